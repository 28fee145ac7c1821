//! epoll: the stand-in is watched in the file's place, and what it says is taken by whoever waits.

use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use nix::libc::{self, epoll_event};

use crate::board::READY;
use crate::files;
use crate::next::next;
use crate::wait::{arm, take, told};

type Ctl = unsafe extern "C" fn(c_int, c_int, c_int, *mut epoll_event) -> c_int;
type PWait =
    unsafe extern "C" fn(c_int, *mut epoll_event, c_int, c_int, *const libc::sigset_t) -> c_int;

/// The upper half of what the kernel keeps for a file of ours.
const MARK: u64 = 0x6e76_6775 << 32;

/// What a program asked to be told of a file.
#[derive(Clone, Copy)]
struct Watch {
    fd: c_int,
    events: u32,
    data: u64,
}

static WATCHES: Mutex<BTreeMap<(c_int, u32), Watch>> = Mutex::new(BTreeMap::new());
static COUNT: AtomicUsize = AtomicUsize::new(0);

fn watches() -> MutexGuard<'static, BTreeMap<(c_int, u32), Watch>> {
    WATCHES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// # Safety
/// As `epoll_ctl(2)`.
#[no_mangle]
pub unsafe extern "C" fn epoll_ctl(
    epoll: c_int,
    operation: c_int,
    fd: c_int,
    event: *mut epoll_event,
) -> c_int {
    let host = next!(c"epoll_ctl", Ctl);
    let Some((_, entry)) = files::of(fd) else {
        // SAFETY: the caller's own arguments.
        return unsafe { host(epoll, operation, fd, event) };
    };
    // SAFETY: the caller's own, or null for a deletion.
    let wanted = unsafe { event.as_ref() }.copied();
    // CAST: a descriptor is positive.
    let key = (epoll, fd as u32);
    let mut inner = epoll_event { events: libc::EPOLLIN as u32, u64: MARK | u64::from(key.1) };
    if let Some(wanted) = wanted {
        inner.events |= wanted.events & (libc::EPOLLONESHOT | libc::EPOLLET) as u32;
    }
    // SAFETY: our own event.
    let ret = unsafe { host(epoll, operation, fd, &raw mut inner) };
    if ret != 0 {
        return ret;
    }
    let mut watches = watches();
    match (operation, wanted) {
        (libc::EPOLL_CTL_DEL, _) => {
            watches.remove(&key);
        }
        (_, Some(wanted)) => {
            let (events, data) = (wanted.events, wanted.u64);
            watches.insert(key, Watch { fd, events, data });
        }
        _ => {}
    }
    COUNT.store(watches.len(), Ordering::Release);
    drop(watches);
    if operation != libc::EPOLL_CTL_DEL && entry.flags.load(Ordering::Acquire) & READY == 0 {
        let _ = arm(entry);
    }
    0
}

/// Asks to be told of every file that this epoll watches and that is not ready.
fn arm_all(epoll: c_int) -> bool {
    let watched: Vec<Watch> =
        watches().range((epoll, 0)..=(epoll, u32::MAX)).map(|(_, watch)| *watch).collect();
    for watch in &watched {
        if let Some((_, entry)) = files::of(watch.fd) {
            if entry.flags.load(Ordering::Acquire) & READY == 0 {
                let _ = arm(entry);
            }
        }
    }
    !watched.is_empty()
}

/// Turns rings into what the program is told; events that are none go away.
fn translate(epoll: c_int, events: &mut [epoll_event]) -> usize {
    let mut kept = 0;
    for at in 0..events.len() {
        let mut event = events[at];
        let data = event.u64;
        // CAST: the lower half is a descriptor.
        let watch = (data & !u64::from(u32::MAX) == MARK)
            .then(|| watches().get(&(epoll, data as u32)).copied())
            .flatten();
        if let Some(watch) = watch {
            let mask = files::of(watch.fd).map_or(0, |(_, entry)| take(watch.fd, entry));
            // CAST: poll's and epoll's bits are the same.
            event.events = u32::from(told(mask, watch.events as i16) as u16);
            event.u64 = watch.data;
            if event.events == 0 {
                continue;
            }
        }
        events[kept] = event;
        kept += 1;
    }
    kept
}

/// # Safety
/// As `epoll_pwait(2)`.
#[no_mangle]
pub unsafe extern "C" fn epoll_pwait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
    mask: *const libc::sigset_t,
) -> c_int {
    let host = next!(c"epoll_pwait", PWait);
    if COUNT.load(Ordering::Acquire) == 0 || !arm_all(epoll) {
        // SAFETY: the caller's own arguments.
        return unsafe { host(epoll, events, most, timeout, mask) };
    }
    let patience = u64::try_from(timeout).ok().map(Duration::from_millis);
    let end = patience.map(|patience| Instant::now() + patience);
    loop {
        let left = end.map_or(-1, |end| {
            let left = end.saturating_duration_since(Instant::now());
            c_int::try_from(left.as_micros().div_ceil(1000)).unwrap_or(c_int::MAX)
        });
        // SAFETY: the caller's own arguments.
        let count = unsafe { host(epoll, events, most, left, mask) };
        let Some(count) = usize::try_from(count).ok().filter(|&count| count > 0) else {
            return count;
        };
        // SAFETY: the kernel has just written so many.
        let told = unsafe { std::slice::from_raw_parts_mut(events, count) };
        let kept = translate(epoll, told);
        if kept > 0 {
            // CAST: at most what the caller has room for.
            return kept as c_int;
        }
        arm_all(epoll);
        if left == 0 {
            return 0;
        }
    }
}

/// # Safety
/// As `epoll_wait(2)`.
#[no_mangle]
pub unsafe extern "C" fn epoll_wait(
    epoll: c_int,
    events: *mut epoll_event,
    most: c_int,
    timeout: c_int,
) -> c_int {
    // SAFETY: passed on.
    unsafe { epoll_pwait(epoll, events, most, timeout, std::ptr::null()) }
}
