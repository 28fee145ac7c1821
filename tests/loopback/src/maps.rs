//! mmap and munmap. A file's memory is placed in the window by the backend; what QEMU would map
//! into the guest's physical memory, the program maps itself, where it wants it.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use nix::libc::{self, MAP_FAILED};
use nvguest_frontend::wire::{self, Kind};
use zerocopy::{FromBytes, IntoBytes};

use crate::board::{Entry, LOST};
use crate::files;
use crate::next::{fail, next};
use crate::process::{process, Errno};
use crate::trace;

type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type Munmap = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type Mremap = unsafe extern "C" fn(*mut c_void, usize, usize, c_int, *mut c_void) -> *mut c_void;

const PAGE: usize = 4096;

/// A placement, held by the ranges that show it. The last of them sends the one UNMAP.
pub struct Placement {
    entry: &'static Entry,
    number: u32,
    kept: Option<OwnedFd>,
    pid: u32,
}

impl Drop for Placement {
    fn drop(&mut self) {
        let Some(kept) = self.kept.take() else { return };
        // A child's copy of the range goes without a word: its parent has it still.
        if self.pid == std::process::id() {
            if let Ok(process) = process() {
                let body = wire::UnmapReq { placement: self.number.into(), reserved: 0.into() };
                let lost = self.entry.flags.load(Ordering::Acquire) & LOST != 0;
                let queue = process.queue_of(self.entry).filter(|_| !lost);
                let handle = self.entry.handle.load(Ordering::Relaxed);
                let _ = process.simple::<0>(queue, (Kind::Unmap, handle), body.as_bytes());
            }
        }
        files::unkeep(kept, self.entry);
    }
}

#[derive(Clone)]
struct Range {
    end: usize,
    placement: Arc<Placement>,
}

/// Ranges of this process that show a placement, by where they begin.
pub type Ranges = BTreeMap<usize, RangeOf>;
/// See [`Ranges`].
pub struct RangeOf(Range);
/// The ranges, held.
pub type Guard = MutexGuard<'static, Ranges>;

static RANGES: Mutex<Ranges> = Mutex::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

/// The ranges; held over a fork too.
pub fn hold() -> Guard {
    RANGES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// In a child: its copies of the placements' descriptors keep their files too.
pub fn inherited(ranges: &Guard) {
    let mut seen: Vec<*const Placement> = Vec::new();
    for RangeOf(range) in ranges.values() {
        let at = Arc::as_ptr(&range.placement);
        if !seen.contains(&at) {
            seen.push(at);
            range.placement.entry.references.fetch_add(1, Ordering::AcqRel);
        }
    }
}

/// Takes `[start, end)` out of the ranges; what nothing shows any more ends with the answer.
fn cut(ranges: &mut Ranges, start: usize, end: usize) -> Vec<Range> {
    let keys: Vec<usize> = ranges
        .range(..end)
        .rev()
        .take_while(|(_, RangeOf(range))| range.end > start)
        .map(|(&key, _)| key)
        .collect();
    let mut gone = Vec::new();
    for key in keys {
        let Some(RangeOf(range)) = ranges.remove(&key) else { continue };
        let part = |end| RangeOf(Range { end, placement: Arc::clone(&range.placement) });
        if key < start {
            ranges.insert(key, part(start));
        }
        if range.end > end {
            ranges.insert(end, part(range.end));
        }
        gone.push(range);
    }
    COUNT.store(ranges.len(), Ordering::Release);
    gone
}

fn host_mmap(
    at: *mut c_void,
    length: usize,
    (protection, flags): (c_int, c_int),
    (fd, offset): (c_int, i64),
) -> *mut c_void {
    // SAFETY: the caller's own arguments, or our own for an address that it named.
    unsafe { next!(c"mmap", Mmap)(at, length, protection, flags, fd, offset) }
}

/// Maps a file of the guest.
fn map(
    (fd, entry): (c_int, &'static Entry),
    at: *mut c_void,
    length: usize,
    (protection, flags): (c_int, c_int),
    offset: i64,
) -> Result<*mut c_void, Errno> {
    if entry.flags.load(Ordering::Acquire) & LOST != 0 {
        return Err(libc::ENODEV);
    }
    let kind = flags & libc::MAP_TYPE;
    if length == 0 || offset % PAGE as i64 != 0 || offset < 0 || kind == libc::MAP_PRIVATE {
        return Err(libc::EINVAL);
    }
    let whole = length.checked_next_multiple_of(PAGE).ok_or(libc::ENOMEM)?;
    let asked = |bit: c_int, word: u32| if protection & bit != 0 { word } else { 0 };
    let wanted =
        asked(libc::PROT_READ, wire::PROT_READ) | asked(libc::PROT_WRITE, wire::PROT_WRITE);
    let body = wire::MapReq {
        offset: (offset as u64).into(),
        length: (whole as u64).into(),
        prot: wanted.into(),
        reserved: 0.into(),
    };
    let process = process()?;
    let (queue, handle) = (process.queue_of(entry), entry.handle.load(Ordering::Relaxed));
    let reply: [u8; size_of::<wire::MapResp>()] =
        process.simple(queue, (Kind::Map, handle), body.as_bytes())?;
    let mapped = wire::MapResp::read_from_bytes(&reply).map_err(|_| libc::EPROTO)?;
    let placement = Arc::new(Placement {
        entry,
        number: mapped.placement.get(),
        kept: Some(files::keep(fd, entry)?),
        pid: std::process::id(),
    });
    if mapped.length.get() < whole as u64 {
        return Err(libc::EPROTO);
    }
    let (source, from) = process.placement(mapped.window_offset.get())?;
    let read_only = mapped.flags & wire::MAP_READ_ONLY != 0;
    let protection = if read_only { protection & !libc::PROT_WRITE } else { protection };
    let kept = libc::MAP_FIXED | libc::MAP_FIXED_NOREPLACE | libc::MAP_32BIT | libc::MAP_POPULATE;
    let flags = libc::MAP_SHARED | (flags & kept);
    let mut ranges = hold();
    // CAST: an offset of a file.
    let shown = host_mmap(at, whole, (protection, flags), (source.as_raw_fd(), from as i64));
    if shown == MAP_FAILED {
        let errno = crate::next::errno();
        drop(ranges);
        return Err(errno);
    }
    let start = shown.expose_provenance();
    let gone = cut(&mut ranges, start, start + whole);
    ranges.insert(start, RangeOf(Range { end: start + whole, placement }));
    COUNT.store(ranges.len(), Ordering::Release);
    drop(ranges);
    drop(gone);
    Ok(shown)
}

fn mapped(
    at: *mut c_void,
    length: usize,
    modes: (c_int, c_int),
    (fd, offset): (c_int, i64),
) -> *mut c_void {
    let shared = modes.1 & libc::MAP_ANONYMOUS == 0 && fd >= 0;
    let start = Instant::now();
    if shared && files::native(fd).is_some() {
        let shown = host_mmap(at, length, modes, (fd, offset));
        trace::map(fd, length, modes.0, (shown == MAP_FAILED, start));
        return shown;
    }
    if let Some((_, entry)) = Some(fd).filter(|_| shared).and_then(files::of_any) {
        let outcome = map((fd, entry), at, length, modes, offset);
        trace::map(fd, length, modes.0, (outcome.is_err(), start));
        return outcome.unwrap_or_else(|errno| {
            fail(errno);
            MAP_FAILED
        });
    }
    if COUNT.load(Ordering::Acquire) == 0 || modes.1 & libc::MAP_FIXED == 0 {
        return host_mmap(at, length, modes, (fd, offset));
    }
    // Over a range of ours, perhaps.
    let mut ranges = hold();
    let shown = host_mmap(at, length, modes, (fd, offset));
    let gone = if shown == MAP_FAILED {
        Vec::new()
    } else {
        let start = shown.expose_provenance();
        cut(&mut ranges, start, start + length.next_multiple_of(PAGE))
    };
    drop(ranges);
    drop(gone);
    shown
}

macro_rules! mmaps {
    ($($name:ident)*) => {$(
        /// # Safety
        /// As `mmap(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            at: *mut c_void,
            length: usize,
            protection: c_int,
            flags: c_int,
            fd: c_int,
            offset: i64,
        ) -> *mut c_void {
            mapped(at, length, (protection, flags), (fd, offset))
        }
    )*};
}
mmaps! { mmap mmap64 }

/// # Safety
/// As `munmap(2)`.
#[no_mangle]
pub unsafe extern "C" fn munmap(at: *mut c_void, length: usize) -> c_int {
    let host = next!(c"munmap", Munmap);
    if COUNT.load(Ordering::Acquire) == 0 {
        // SAFETY: the caller's own arguments.
        return unsafe { host(at, length) };
    }
    let mut ranges = hold();
    // SAFETY: the caller's own arguments.
    let ret = unsafe { host(at, length) };
    let start = at.expose_provenance();
    let gone = match ret {
        0 => cut(&mut ranges, start, start.saturating_add(length).next_multiple_of(PAGE)),
        _ => Vec::new(),
    };
    drop(ranges);
    drop(gone);
    ret
}

/// # Safety
/// As `mremap(2)`. The last argument is read whether C passed it or not.
#[no_mangle]
pub unsafe extern "C" fn mremap(
    at: *mut c_void,
    length: usize,
    larger: usize,
    flags: c_int,
    to: *mut c_void,
) -> *mut c_void {
    let host = next!(c"mremap", Mremap);
    let mut ranges = hold();
    let start = at.expose_provenance();
    let ours = ranges.range(..=start).next_back().is_some_and(|(_, range)| start < range.0.end);
    if ours && larger > length {
        // VM_DONTEXPAND, as all of the driver's mappings have it.
        fail(libc::EFAULT);
        return MAP_FAILED;
    }
    // SAFETY: the caller's own arguments.
    let shown = unsafe { host(at, length, larger, flags, to) };
    let mut gone = Vec::new();
    if shown != MAP_FAILED && !ranges.is_empty() {
        let (old, new) = (at.expose_provenance(), shown.expose_provenance());
        gone = cut(&mut ranges, old, old + length.next_multiple_of(PAGE));
        let end = new + larger.next_multiple_of(PAGE);
        let over = cut(&mut ranges, new, end);
        if let Some(range) = gone.first() {
            let placement = Arc::clone(&range.placement);
            ranges.insert(new, RangeOf(Range { end, placement }));
        }
        gone.extend(over);
        COUNT.store(ranges.len(), Ordering::Release);
    }
    drop(ranges);
    drop(gone);
    shown
}
