//! The shared-memory region in this process: a reserved range of addresses, and what
//! the backend has mapped into it.

use std::collections::BTreeMap;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::BorrowedFd;
use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use nix::libc::{self, c_void};
use nix::sys::mman::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};

const PAGE: u64 = 4096;

/// Takes the backend's placements; the loop-back guest has its own.
pub trait Place: Send + Sync {
    /// Maps a range of a file at an offset of the window.
    fn map(&self, at: u64, length: u64, fd: BorrowedFd<'_>, from: Source) -> io::Result<()>;
    /// Takes a range out again.
    fn unmap(&self, at: u64, length: u64) -> io::Result<()>;
}

/// What of a file is mapped.
#[derive(Clone, Copy, Debug)]
pub struct Source {
    /// Offset in the file.
    pub offset: u64,
    /// Whether the guest may write.
    pub writable: bool,
}

/// What a guest finds where nothing is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hole {
    /// A fault.
    Fault,
    /// Zeroes; writes lead nowhere. Stock QEMU does this.
    Zero,
}

/// A window in this process.
#[derive(Debug)]
pub struct Window {
    base: NonNull<c_void>,
    size: u64,
    hole: Hole,
    placed: Mutex<BTreeMap<u64, u64>>,
}

// SAFETY: the range lives as long as the value; what is mapped there is shared memory,
// reached by raw pointers alone.
unsafe impl Send for Window {}
// SAFETY: as above; the book of placements is behind a lock.
unsafe impl Sync for Window {}

impl Window {
    /// Reserves `size` bytes of address space.
    pub fn reserve(size: u64, hole: Hole) -> io::Result<Self> {
        let length = length(size)?;
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a fresh range at an address that the kernel picks.
        let base = unsafe { mmap_anonymous(None, length, hole.protection(), flags)? };
        Ok(Self { base, size, hole, placed: Mutex::default() })
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Where an offset of the window is in this process.
    pub fn at(&self, offset: u64) -> *mut u8 {
        assert!(offset <= self.size, "outside of the window");
        // SAFETY: the offset lies in the reserved range. CAST: so it fits.
        unsafe { self.base.as_ptr().cast::<u8>().add(offset as usize) }
    }

    /// Ranges that are mapped.
    pub fn placements(&self) -> usize {
        self.book().len()
    }

    fn book(&self) -> std::sync::MutexGuard<'_, BTreeMap<u64, u64>> {
        self.placed.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place for Window {
    fn map(&self, at: u64, len: u64, fd: BorrowedFd<'_>, from: Source) -> io::Result<()> {
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        let end = at.checked_add(len).filter(|&end| end <= self.size).ok_or_else(invalid)?;
        if len == 0 || at % PAGE != 0 || len % PAGE != 0 {
            return Err(invalid());
        }
        let mut book = self.book();
        let before = book.range(..end).next_back();
        if before.is_some_and(|(start, length)| start + length > at) {
            return Err(io::Error::from_raw_os_error(libc::EEXIST));
        }
        let mut protection = ProtFlags::PROT_READ;
        protection.set(ProtFlags::PROT_WRITE, from.writable);
        let offset = i64::try_from(from.offset).map_err(|_| invalid())?;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        let address = NonZeroUsize::new(self.at(at).expose_provenance());
        // SAFETY: the range lies in our own reservation, so nothing else is replaced.
        unsafe { mmap(address, length(len)?, protection, flags, fd, offset)? };
        book.insert(at, len);
        Ok(())
    }

    fn unmap(&self, at: u64, len: u64) -> io::Result<()> {
        let mut book = self.book();
        if book.get(&at) != Some(&len) {
            return Err(io::Error::from_raw_os_error(libc::EINVAL));
        }
        let flags = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE | MapFlags::MAP_FIXED;
        let address = NonZeroUsize::new(self.at(at).expose_provenance());
        // SAFETY: the range lies in our own reservation, so nothing else is replaced.
        unsafe { mmap_anonymous(address, length(len)?, self.hole.protection(), flags)? };
        book.remove(&at);
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Ok(length) = length(self.size) {
            // SAFETY: nobody can name the range through this value any more.
            let _ = unsafe { munmap(self.base, length.get()) };
        }
    }
}

impl Hole {
    fn protection(self) -> ProtFlags {
        match self {
            Self::Fault => ProtFlags::PROT_NONE,
            Self::Zero => ProtFlags::PROT_READ | ProtFlags::PROT_WRITE,
        }
    }
}

fn length(bytes: u64) -> io::Result<NonZeroUsize> {
    let length = usize::try_from(bytes).ok().and_then(NonZeroUsize::new);
    length.ok_or_else(|| io::Error::from_raw_os_error(libc::EINVAL))
}
