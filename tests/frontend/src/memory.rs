//! The guest's memory: a memory file, mapped here and sent to the backend.

use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU16, AtomicU32};
use std::sync::{Mutex, PoisonError};

use nix::libc::c_void;
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, munmap, MapFlags, ProtFlags};

use crate::{Error, Result};

/// Guest-physical address where the memory begins: not 0, and not where it is mapped.
pub const GPA: u64 = 0x4000_0000;

/// Guest memory. Others write it at any time, so it is only read and written whole
/// by copies, or through atomics.
#[derive(Debug)]
pub struct Memory {
    base: NonNull<c_void>,
    size: usize,
    fd: OwnedFd,
    /// Free ranges of the part that is given out, by offset.
    free: Mutex<Vec<(usize, usize)>>,
}

// SAFETY: the mapping lives as long as the value, and is only reached by volatile
// copies and atomics.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// Zeroed memory of `fixed` bytes for queues, and `heap` bytes to give out.
    pub fn create(fixed: usize, heap: usize) -> Result<Self> {
        let fd = memfd_create("nvguest-guest", MFdFlags::MFD_CLOEXEC)?;
        let size = fixed + heap;
        nix::unistd::ftruncate(&fd, i64::try_from(size).map_err(|_| Error::Errno(27))?)?;
        let memory = Self::attach(fd, size)?;
        *memory.free.lock().unwrap_or_else(PoisonError::into_inner) = vec![(fixed, heap)];
        Ok(memory)
    }

    /// Memory that another process made; nothing of it is given out here.
    pub fn attach(fd: OwnedFd, size: usize) -> Result<Self> {
        let length = NonZeroUsize::new(size).ok_or(Error::Errno(nix::libc::EINVAL))?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel picks.
        let base = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, &fd, 0)? };
        Ok(Self { base, size, fd, free: Mutex::default() })
    }

    /// Its file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Where it is mapped here.
    pub fn address(&self) -> u64 {
        self.base.as_ptr().expose_provenance() as u64
    }

    fn at(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(offset <= self.size && length <= self.size - offset, "outside of guest memory");
        // SAFETY: the range lies in the mapping, as was just checked.
        unsafe { self.base.as_ptr().cast::<u8>().add(offset) }
    }

    /// Copies into the memory.
    pub fn write(&self, offset: usize, bytes: &[u8]) {
        let to = self.at(offset, bytes.len());
        // SAFETY: the range lies in the mapping, which no reference points into.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) }
    }

    /// Copies out of the memory.
    pub fn read(&self, offset: usize, bytes: &mut [u8]) {
        let from = self.at(offset, bytes.len());
        // SAFETY: as in `write`.
        unsafe { std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), bytes.len()) }
    }

    /// A 16-bit word.
    pub fn u16(&self, offset: usize) -> &AtomicU16 {
        assert!(offset % 2 == 0);
        // SAFETY: aligned, in the mapping, and reached as an atomic by everybody.
        unsafe { AtomicU16::from_ptr(self.at(offset, 2).cast()) }
    }

    /// A 32-bit word.
    pub fn u32(&self, offset: usize) -> &AtomicU32 {
        assert!(offset % 4 == 0);
        // SAFETY: as above.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// Takes a range of whole pages; `None` if there is none.
    pub fn take(&self, length: usize) -> Option<usize> {
        let length = length.next_multiple_of(4096);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let range = free.iter_mut().find(|range| range.1 >= length)?;
        let offset = range.0;
        *range = (range.0 + length, range.1 - length);
        free.retain(|range| range.1 > 0);
        Some(offset)
    }

    /// Gives a range back, or out for the first time.
    pub fn give(&self, offset: usize, length: usize) {
        let length = length.next_multiple_of(4096);
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        let at = free.partition_point(|range| range.0 < offset);
        free.insert(at, (offset, length));
        // Neighbours become one.
        free.dedup_by(|next, range| {
            let meets = range.0 + range.1 == next.0;
            if meets {
                range.1 += next.1;
            }
            meets
        });
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: nothing borrows the mapping any more.
        let _ = unsafe { munmap(self.base, self.size) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_back_can_be_taken_again_whole() {
        let memory = Memory::create(4096, 4 * 4096).unwrap();
        let ranges: Vec<usize> = (0..4).map(|_| memory.take(100).unwrap()).collect();
        assert_eq!(memory.take(1), None);
        for at in [ranges[2], ranges[0], ranges[3], ranges[1]] {
            memory.give(at, 100);
        }
        assert_eq!(memory.take(4 * 4096), Some(4096));
    }
}
