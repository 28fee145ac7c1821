//! The system calls that need `unsafe`: ioctl on the driver's nodes, and shared mappings.
//!
//! Both are made safe here: an argument's pointers are written by [`call`] alone, and a
//! [`Mapping`] is read and written through bounds-checked volatile accesses.

use std::arch::asm;
use std::fs::{File, OpenOptions};
use std::io;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use nix::sys::mman::{mmap, mmap_anonymous, mprotect, mremap, munmap};
use nix::sys::mman::{MRemapFlags, MapFlags, ProtFlags};
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use nix::unistd::{fork, ForkResult, Pid};

use crate::abi::escape;

/// Bytes behind every pointer that the driver is given: more than the parameters of any class or
/// control that anybody here uses. RM copies its own size of a class's parameters in and out,
/// whatever the caller says.
const SCRATCH: usize = 4096;

/// Bytes of a page.
pub const PAGE: usize = 4096;

/// Opens a node for reading and writing, blocking, closed on exec.
pub fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).open(path)
}

/// Makes the call `nr` with `argument`, whose one pointer (if it has one) leads to `params`.
///
/// # Panics
/// On a number that is not known here, because what its argument reaches is then not known either.
pub fn call(
    file: &File,
    nr: u32,
    argument: &mut [u8],
    params: Option<&mut [u8]>,
) -> io::Result<()> {
    let Some(at) = pointer_of(nr, argument) else {
        assert!(params.is_none(), "call {nr:#x} takes no parameters");
        return raw_ioctl(file, nr, argument);
    };
    let Some(params) = params else {
        argument[at..at + 8].fill(0);
        return raw_ioctl(file, nr, argument);
    };
    if nr == escape::RM_CONTROL {
        // What the driver copies of a control is what the argument says.
        let size = u32::from_le_bytes(argument[0x18..0x1c].try_into().expect("four bytes"));
        assert!(size as usize <= SCRATCH, "control of {size} bytes");
    }
    assert!(params.len() <= SCRATCH, "parameters of {} bytes", params.len());
    let mut scratch = [0_u8; SCRATCH];
    scratch[..params.len()].copy_from_slice(params);
    argument[at..at + 8].copy_from_slice(&address_of(&mut scratch).to_le_bytes());
    let result = raw_ioctl(file, nr, argument);
    params.copy_from_slice(&scratch[..params.len()]);
    result
}

/// Where the argument of `nr` has its pointer.
fn pointer_of(nr: u32, argument: &mut [u8]) -> Option<usize> {
    match nr {
        escape::RM_CONTROL => Some(0x10),
        escape::RM_ALLOC => {
            // `pRightsRequested`: this probe asks for none.
            argument[0x18..0x20].fill(0);
            Some(0x10)
        }
        escape::RM_GET_EVENT_DATA => Some(0),
        escape::RM_VID_HEAP_CONTROL => {
            // 27 pins memory, and no more: the card writes to it only where a caller then makes it
            // a channel's, which is a mapping's volatile memory.
            let function = argument[8];
            assert!(matches!(function, 2 | 3 | 27), "heap function {function} is not known here");
            None
        }
        _ => {
            assert!(escape::WITHOUT_POINTER.contains(&nr), "call {nr:#x} is not known here");
            None
        }
    }
}

fn address_of(bytes: &mut [u8]) -> u64 {
    bytes.as_mut_ptr().expose_provenance() as u64
}

fn raw_ioctl(file: &File, nr: u32, argument: &mut [u8]) -> io::Result<()> {
    let size = u32::try_from(argument.len()).expect("arguments are small");
    let request = libc::c_ulong::from(3 << 30 | size << 16 | u32::from(b'F') << 8 | nr);
    // SAFETY: `argument` is as long as the number says and lives through the call; its only
    // pointer was written by `call` and leads to a buffer at least as long as the driver copies
    // (`SCRATCH` bytes), alive as well; `call` checked the size that a control's argument says.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), request as _, argument.as_mut_ptr()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// Memory of the card or the driver, mapped shared.
#[derive(Debug)]
pub struct Mapping {
    start: NonNull<u64>,
    length: usize,
}

// SAFETY: the pages belong to this value until it is dropped, and are only accessed with
// volatile loads and stores of memory that other parties are expected to change.
unsafe impl Send for Mapping {}
// SAFETY: as above; concurrent volatile accesses of whole words are what the memory is for.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `length` bytes from the start of `file`.
    pub fn new(file: &File, length: usize) -> io::Result<Self> {
        let pages =
            NonZeroUsize::new(length.next_multiple_of(4096)).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let start = unsafe { mmap(None, pages, protection, MapFlags::MAP_SHARED, file, 0) }?;
        Ok(Self { start: start.cast(), length: pages.get() })
    }

    /// Zeroed memory of this process alone.
    pub fn anonymous(length: usize) -> io::Result<Self> {
        let pages =
            NonZeroUsize::new(length.next_multiple_of(4096)).ok_or(io::ErrorKind::InvalidInput)?;
        let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: no address is asked for, so no existing mapping is touched.
        let start = unsafe { mmap_anonymous(None, pages, protection, MapFlags::MAP_PRIVATE) }?;
        Ok(Self { start: start.cast(), length: pages.get() })
    }

    /// Bytes mapped, whole pages.
    pub fn bytes(&self) -> usize {
        self.length
    }

    fn word(&self, index: usize) -> NonNull<u64> {
        assert!(index < self.length / 8, "word {index} of {}", self.length / 8);
        // SAFETY: the index is within the mapping.
        unsafe { self.start.add(index) }
    }

    /// Reads the word at `index`.
    pub fn read(&self, index: usize) -> u64 {
        // SAFETY: aligned, mapped for reading, any bits are a number; `word` checked the index.
        unsafe { self.word(index).read_volatile() }
    }

    /// Writes the word at `index`.
    pub fn write(&self, index: usize, value: u64) {
        // SAFETY: aligned, mapped for writing; `word` checked the index.
        unsafe { self.word(index).write_volatile(value) }
    }

    /// Writes a pattern that is different for every seed and every word.
    pub fn fill(&self, seed: u64, bytes: usize) {
        for index in 0..bytes / 8 {
            self.write(index, pattern(seed, index));
        }
    }

    /// How many words are not those of [`Mapping::fill`].
    pub fn wrong(&self, seed: u64, bytes: usize) -> usize {
        (0..bytes / 8).filter(|&index| self.read(index) != pattern(seed, index)).count()
    }
}

/// Accesses that found no page, in the way of [`Mapping::try_read`].
static FAULTS: AtomicU64 = AtomicU64::new(0);
/// `mov rax, [rdi]` and `mov [rdi], rax`, which alone [`survive`] steps over.
const ACCESSES: [[u8; 3]; 2] = [[0x48, 0x8b, 0x07], [0x48, 0x89, 0x07]];

/// Has [`Mapping::try_read`] and [`Mapping::try_write`] survive a page that is gone. Any other
/// access to one ends the process as before.
pub fn survive() -> io::Result<()> {
    // SAFETY: all zeroes are a valid sigaction.
    let mut action: libc::sigaction = unsafe { std::mem::zeroed() };
    let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = step_over;
    action.sa_sigaction = handler as libc::sighandler_t;
    action.sa_flags = libc::SA_SIGINFO;
    // SAFETY: the handler has the signature that SA_SIGINFO asks for, takes no lock and no memory.
    match unsafe { libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

extern "C" fn step_over(_: i32, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let context = context.cast::<libc::ucontext_t>();
    // SAFETY: the kernel hands a handler the context that it will go back to, and nothing else
    // refers to it meanwhile.
    let rip = unsafe { &mut (*context).uc_mcontext.gregs[libc::REG_RIP as usize] };
    let code = std::ptr::with_exposed_provenance::<[u8; 3]>(*rip as usize);
    // SAFETY: an instruction that faulted is there to be read. Three bytes never cross the end of
    // the program's text: the way back follows.
    if ACCESSES.contains(&unsafe { code.read_unaligned() }) {
        FAULTS.fetch_add(1, Ordering::Relaxed);
        *rip += 3;
    } else {
        // SAFETY: the same access faults again, and ends the process.
        unsafe { libc::signal(libc::SIGBUS, libc::SIG_DFL) };
    }
}

/// Memory whose pages may be taken away. One thread at a time, after [`survive`].
impl Mapping {
    /// Reads the word at `index`, or nothing if its page is gone.
    pub fn try_read(&self, index: usize) -> Option<u64> {
        let (word, before) = (self.word(index).as_ptr(), FAULTS.load(Ordering::Relaxed));
        let mut value = 0_u64;
        // SAFETY: aligned and mapped, `word` checked the index; the one instruction is of
        // `ACCESSES`, so a fault leaves `value` as it was.
        unsafe {
            asm!("mov rax, [rdi]", in("rdi") word, inout("rax") value, options(nostack, preserves_flags));
        }
        (FAULTS.load(Ordering::Relaxed) == before).then_some(value)
    }

    /// Writes the word at `index`, if its page is there.
    pub fn try_write(&self, index: usize, value: u64) {
        let word = self.word(index).as_ptr();
        // SAFETY: as above; what a fault keeps from being written was nobody's to read.
        unsafe {
            asm!("mov [rdi], rax", in("rdi") word, in("rax") value, options(nostack, preserves_flags));
        }
    }
}

/// A mapping as a piece of address space.
impl Mapping {
    /// Where it begins.
    pub fn address(&self) -> usize {
        self.start.addr().get()
    }

    fn at(&self, offset: usize) -> NonNull<libc::c_void> {
        assert!(offset <= self.length, "offset {offset} of {}", self.length);
        // SAFETY: within the mapping, or one past it.
        unsafe { self.start.byte_add(offset).cast() }
    }

    /// Cuts it in two at `offset`, a whole number of pages; the kernel is not asked.
    pub fn split_off(&mut self, offset: usize) -> Self {
        assert!(offset & (PAGE - 1) == 0 && offset < self.length, "cut at {offset}");
        let tail = Self { start: self.at(offset).cast(), length: self.length - offset };
        self.length = offset;
        tail
    }

    /// Makes it longer or shorter, wherever the kernel finds room.
    pub fn resize(&mut self, length: usize) -> io::Result<()> {
        // SAFETY: the mapping is this value's alone.
        let start = unsafe {
            mremap(self.start.cast(), self.length, length, MRemapFlags::MREMAP_MAYMOVE, None)
        }?;
        (self.start, self.length) = (start.cast(), length);
        Ok(())
    }

    /// Moves it to another place.
    pub fn relocate(&mut self) -> io::Result<()> {
        let length = NonZeroUsize::new(self.length).ok_or(io::ErrorKind::InvalidInput)?;
        let (free, flags) = (ProtFlags::PROT_NONE, MapFlags::MAP_PRIVATE | MapFlags::MAP_ANONYMOUS);
        // SAFETY: a fresh reservation, which the move replaces.
        let target = unsafe { mmap_anonymous(None, length, free, flags) }?;
        let flags = MRemapFlags::MREMAP_MAYMOVE | MRemapFlags::MREMAP_FIXED;
        // SAFETY: the mapping is this value's alone, and so is the reservation.
        let start =
            unsafe { mremap(self.start.cast(), self.length, self.length, flags, Some(target)) }?;
        self.start = start.cast();
        Ok(())
    }

    /// Changes what may be done with a part of it.
    pub fn protect(&self, part: Range<usize>, protection: ProtFlags) -> io::Result<()> {
        let start = self.at(part.start);
        assert!(part.end <= self.length, "a part up to {} of {}", part.end, self.length);
        // SAFETY: within the mapping; volatile accesses that it forbids end the process.
        Ok(unsafe { mprotect(start, part.len(), protection) }?)
    }
}

/// A child of this process.
#[derive(Debug)]
pub struct Child(Pid);

impl Child {
    /// Waits for its end.
    pub fn wait(&self) -> io::Result<WaitStatus> {
        Ok(waitpid(self.0, None)?)
    }

    /// Whether it has ended, without taking its status.
    pub fn has_ended(&self) -> bool {
        let flags = WaitPidFlag::WEXITED | WaitPidFlag::WNOHANG | WaitPidFlag::WNOWAIT;
        let status = nix::sys::wait::waitid(nix::sys::wait::Id::Pid(self.0), flags);
        !matches!(status, Ok(WaitStatus::StillAlive))
    }
}

/// Runs `body` in a fork of this process, which ends with 0 if it says yes.
pub fn in_child(body: impl FnOnce() -> bool) -> io::Result<Child> {
    // SAFETY: checks run one after the other in one thread.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let said = body();
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(i32::from(!said)) }
        }
        ForkResult::Parent { child } => Ok(Child(child)),
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: this mapping was made by `new`, and nothing borrows it any more.
        let _ = unsafe { munmap(self.start.cast(), self.length) };
    }
}

/// The word of [`Mapping::fill`] at `index`.
pub fn pattern(seed: u64, index: usize) -> u64 {
    (seed ^ index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ seed
}
