//! The board: memory that the launcher and all its programs share. It says what each
//! open file of the guest is and whether it is ready, so that a file means the same in
//! every process that a descriptor of it comes to, whatever way it came.

use std::io;
use std::num::NonZeroUsize;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::mman::{mmap, MapFlags, ProtFlags};

/// Open files at most.
pub const FILES: usize = 8192;
/// Bytes for what the guest downloaded.
const BLOBS: usize = 4 << 20;

/// Poll bits that came and nobody took.
pub const READY: u32 = 0xffff;
/// The backend was asked to tell, and has not.
pub const ARMED: u32 = 1 << 16;
/// Its worker is gone.
pub const LOST: u32 = 1 << 17;
/// CLOSE was sent.
pub const CLOSED: u32 = 1 << 18;
/// It went to another process by a way that is not counted.
pub const ESCAPED: u32 = 1 << 19;

/// An open file of the guest.
#[repr(C, align(64))]
#[derive(Debug)]
pub struct Entry {
    /// 1 while it is somebody's.
    pub used: AtomicU32,
    /// Its name on the wire.
    pub handle: AtomicU32,
    /// Its kind, as the wire numbers them.
    pub kind: AtomicU32,
    /// The slot whose worker has it.
    pub slot: AtomicU32,
    /// The process whose slot that is.
    pub owner: AtomicU32,
    /// [`READY`] and the flags.
    pub flags: AtomicU32,
    /// Descriptors and mappings that are known of.
    pub references: AtomicU32,
    /// Position of its node in NODES.
    pub node: AtomicU32,
    /// The character device's number.
    pub device: AtomicU64,
}

/// What a program must know before its first call; written once by the launcher.
#[repr(C)]
#[derive(Debug)]
struct Head {
    max_request: AtomicU32,
    max_response: AtomicU32,
    max_segments: AtomicU32,
    next: AtomicU32,
    schema_length: AtomicU32,
    nodes_length: AtomicU32,
}

#[repr(C, align(4096))]
struct Layout {
    head: Head,
    files: [Entry; FILES],
    blobs: [u8; BLOBS],
}

/// The board in this process.
#[derive(Debug)]
pub struct Board {
    base: NonNull<Layout>,
    fd: OwnedFd,
}

// SAFETY: the mapping is never taken away; all of it is atomics, but for the blobs, which
// are written before any other process has the file.
unsafe impl Send for Board {}
// SAFETY: as above.
unsafe impl Sync for Board {}

/// Limits of a call, as HELLO said them.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    pub max_request: u32,
    pub max_response: u32,
    pub max_segments: u32,
}

impl Board {
    /// A board with what the guest downloaded.
    pub fn create(limits: Limits, schema: &[u8], nodes: &[u8]) -> io::Result<Self> {
        let fd = memfd_create("nvguest-board", MFdFlags::MFD_CLOEXEC)?;
        let size = i64::try_from(size_of::<Layout>()).map_err(io::Error::other)?;
        nix::unistd::ftruncate(&fd, size)?;
        if schema.len().next_multiple_of(8) + nodes.len() > BLOBS {
            return Err(io::Error::other("the schema and the nodes are larger than the board"));
        }
        let board = Self::attach(fd)?;
        // SAFETY: in the mapping, as was just checked; nobody else has it yet.
        unsafe {
            let blobs = (&raw mut (*board.base.as_ptr()).blobs).cast::<u8>();
            std::ptr::copy_nonoverlapping(schema.as_ptr(), blobs, schema.len());
            let at = schema.len().next_multiple_of(8);
            std::ptr::copy_nonoverlapping(nodes.as_ptr(), blobs.add(at), nodes.len());
        }
        let head = board.head();
        head.max_request.store(limits.max_request, Ordering::Relaxed);
        head.max_response.store(limits.max_response, Ordering::Relaxed);
        head.max_segments.store(limits.max_segments, Ordering::Relaxed);
        // CAST: below 4 MiB.
        head.schema_length.store(schema.len() as u32, Ordering::Relaxed);
        head.nodes_length.store(nodes.len() as u32, Ordering::Release);
        Ok(board)
    }

    /// The board that another process made.
    pub fn attach(fd: OwnedFd) -> io::Result<Self> {
        let length = NonZeroUsize::new(size_of::<Layout>()).ok_or(io::ErrorKind::InvalidInput)?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a fresh mapping at an address that the kernel picks.
        let base = unsafe { mmap(None, length, prot, MapFlags::MAP_SHARED, &fd, 0)? };
        Ok(Self { base: base.cast(), fd })
    }

    /// Its file.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    fn head(&self) -> &Head {
        // SAFETY: mapped for as long as the process lives; atomics alone.
        unsafe { &(*self.base.as_ptr()).head }
    }

    /// What a call may be.
    pub fn limits(&self) -> Limits {
        let head = self.head();
        Limits {
            max_request: head.max_request.load(Ordering::Relaxed),
            max_response: head.max_response.load(Ordering::Relaxed),
            max_segments: head.max_segments.load(Ordering::Relaxed),
        }
    }

    /// The schema.
    pub fn schema(&self) -> &'static [u8] {
        self.blob(0, self.head().schema_length.load(Ordering::Acquire))
    }

    /// NODES.
    pub fn nodes(&self) -> &'static [u8] {
        let schema = self.head().schema_length.load(Ordering::Acquire) as usize;
        self.blob(schema.next_multiple_of(8), self.head().nodes_length.load(Ordering::Acquire))
    }

    fn blob(&self, at: usize, length: u32) -> &'static [u8] {
        let length = length as usize;
        assert!(at <= BLOBS && length <= BLOBS - at, "outside of the board");
        // SAFETY: in the mapping, which stays; nobody writes the blobs any more.
        unsafe {
            let blobs = (&raw const (*self.base.as_ptr()).blobs).cast::<u8>();
            std::slice::from_raw_parts(blobs.add(at), length)
        }
    }

    /// A file, by its number here.
    pub fn file(&self, index: usize) -> &'static Entry {
        assert!(index < FILES, "no such file");
        // SAFETY: in the mapping, which stays; atomics alone.
        unsafe { &(*self.base.as_ptr()).files[index] }
    }

    /// A number for a new file.
    pub fn take(&self) -> Option<usize> {
        let start = self.head().next.fetch_add(1, Ordering::Relaxed) as usize;
        let index = (0..FILES).map(|step| (start + step) % FILES).find(|&index| {
            let used = &self.file(index).used;
            used.compare_exchange(0, 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        })?;
        let entry = self.file(index);
        entry.handle.store(0, Ordering::Relaxed);
        entry.flags.store(0, Ordering::Relaxed);
        entry.references.store(0, Ordering::Relaxed);
        Some(index)
    }

    /// The file with this name on the wire.
    pub fn find(&self, handle: u32) -> Option<usize> {
        (0..FILES).find(|&index| {
            let entry = self.file(index);
            entry.used.load(Ordering::Acquire) == 1
                && entry.handle.load(Ordering::Acquire) == handle
                && entry.flags.load(Ordering::Acquire) & CLOSED == 0
        })
    }

    /// All files that are somebody's.
    pub fn files(&self) -> impl Iterator<Item = (usize, &'static Entry)> + '_ {
        (0..FILES)
            .map(|index| (index, self.file(index)))
            .filter(|(_, entry)| entry.used.load(Ordering::Acquire) == 1)
    }
}
