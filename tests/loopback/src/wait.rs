//! poll and select with the module's semantics: readiness is taken by whoever polls, by an
//! exchange; who finds none asks the backend to tell, once; the launcher rings the stand-in.

use std::ffi::{c_int, c_void};
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use nix::libc::{self, pollfd, POLLERR, POLLHUP, POLLIN};
use nvguest_frontend::wire::Kind;

use crate::board::{Entry, ARMED, LOST, READY};
use crate::files;
use crate::next::{answer, errno, next};
use crate::process::{process, Errno};
use crate::trace;

type PPoll = unsafe extern "C" fn(
    *mut pollfd,
    libc::nfds_t,
    *const libc::timespec,
    *const libc::sigset_t,
) -> c_int;

/// What a file is ready for, taken; 0 if nothing.
pub fn take(fd: c_int, entry: &Entry) -> u32 {
    if entry.flags.load(Ordering::Acquire) & LOST != 0 {
        return (POLLHUP | POLLERR) as u32;
    }
    let mut bytes = [0_u8; 16];
    // The ring first: one that comes after it finds its bits or brings new ones.
    loop {
        // SAFETY: at most as much as there is room for.
        let count =
            unsafe { libc::recv(fd, bytes.as_mut_ptr().cast(), bytes.len(), libc::MSG_DONTWAIT) };
        match count {
            1.. => {}
            0 => return (POLLHUP | POLLERR) as u32,
            _ => break,
        }
    }
    entry.flags.fetch_and(!READY, Ordering::AcqRel) & READY
}

/// Asks the backend to tell when a file is ready, unless it is asked already.
pub fn arm(entry: &Entry) -> Result<(), Errno> {
    if entry.flags.fetch_or(ARMED, Ordering::AcqRel) & ARMED != 0 {
        return Ok(());
    }
    let send = || {
        let process = process()?;
        let handle = entry.handle.load(Ordering::Relaxed);
        process.simple::<0>(process.queue_of(entry), (Kind::Arm, handle), &[]).map(drop)
    };
    let outcome: Result<(), Errno> = send();
    match outcome {
        Err(libc::ENODEV | libc::EBADF) => {
            entry.flags.fetch_or(LOST, Ordering::AcqRel);
        }
        Err(_) => {
            entry.flags.fetch_and(!ARMED, Ordering::AcqRel);
        }
        Ok(()) => {}
    }
    outcome
}

/// As the module's poll: takes what is there, and asks to be told if it is nothing.
pub fn look(fd: c_int, entry: &Entry) -> u32 {
    let mask = take(fd, entry);
    // CAST: kinds are few.
    let silent = entry.kind.load(Ordering::Relaxed) == nvguest_abi::FileKind::Cap as u32;
    if mask != 0 || silent {
        return mask;
    }
    match arm(entry) {
        Ok(()) | Err(libc::ENODEV | libc::EBADF) => take(fd, entry),
        Err(_) => POLLERR as u32,
    }
}

/// What a caller that asked for `events` is told of a mask.
pub fn told(mask: u32, events: i16) -> i16 {
    // CAST: poll's bits.
    mask as i16 & (events | POLLERR | POLLHUP)
}

/// How long is left, as the system takes it.
struct Deadline(Option<Instant>);

impl Deadline {
    fn left(&self) -> Option<libc::timespec> {
        let left = self.0?.saturating_duration_since(Instant::now());
        // CAST: seconds and nanoseconds fit.
        Some(libc::timespec {
            tv_sec: left.as_secs() as libc::time_t,
            tv_nsec: left.subsec_nanos().into(),
        })
    }

    fn is_over(&self) -> bool {
        self.0.is_some_and(|end| Instant::now() >= end)
    }
}

/// # Safety
/// `mask` must be null or a signal set.
unsafe fn host(
    fds: &mut [pollfd],
    timeout: Option<&libc::timespec>,
    mask: *const libc::sigset_t,
) -> c_int {
    let timeout = timeout.map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: a slice of pollfds, and the caller's mask.
    unsafe { next!(c"ppoll", PPoll)(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout, mask) }
}

/// # Safety
/// As `ppoll(2)`.
unsafe fn wait(
    fds: &mut [pollfd],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Result<c_int, Errno> {
    let deadline = Deadline(timeout.and_then(|timeout| Instant::now().checked_add(timeout)));
    loop {
        let mut ready = 0;
        let mut inner: Vec<pollfd> = fds.to_vec();
        for (outer, inner) in fds.iter_mut().zip(&mut inner) {
            outer.revents = 0;
            if let Some((_, entry)) = files::of(outer.fd) {
                outer.revents = told(look(outer.fd, entry), outer.events);
                ready += c_int::from(outer.revents != 0);
                inner.events = POLLIN;
            }
        }
        // What else is ready now is told with it.
        let zero = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        let left = if ready > 0 { Some(zero) } else { deadline.left() };
        // SAFETY: the caller's mask.
        let count = unsafe { host(&mut inner, left.as_ref(), mask) };
        if count < 0 && ready == 0 {
            return Err(errno());
        }
        let mut rung = false;
        for (outer, inner) in fds.iter_mut().zip(&inner) {
            match files::of(outer.fd) {
                Some((_, entry)) if outer.revents == 0 && inner.revents != 0 => {
                    rung = true;
                    outer.revents = told(take(outer.fd, entry), outer.events);
                }
                Some(_) => continue,
                None => outer.revents = if count < 0 { 0 } else { inner.revents },
            }
            ready += c_int::from(outer.revents != 0);
        }
        if ready > 0 || (!rung && deadline.is_over()) || (count == 0 && !rung) {
            return Ok(ready);
        }
    }
}

/// # Safety
/// As `ppoll(2)`.
unsafe fn polled(
    fds: *mut pollfd,
    count: libc::nfds_t,
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Option<c_int> {
    if !files::any() || fds.is_null() {
        return None;
    }
    // SAFETY: as many as the caller says.
    let fds = unsafe { std::slice::from_raw_parts_mut(fds, count as usize) };
    if !fds.iter().any(|one| files::of(one.fd).is_some()) {
        return None;
    }
    // SAFETY: passed on.
    let outcome = unsafe { wait(fds, timeout, mask) };
    trace::poll(fds, outcome);
    Some(answer(outcome))
}

/// # Safety
/// As `poll(2)`.
#[no_mangle]
pub unsafe extern "C" fn poll(fds: *mut pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    type Poll = unsafe extern "C" fn(*mut pollfd, libc::nfds_t, c_int) -> c_int;
    let patience = u64::try_from(timeout).ok().map(Duration::from_millis);
    // SAFETY: passed on.
    if let Some(ret) = unsafe { polled(fds, count, patience, std::ptr::null()) } {
        return ret;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"poll", Poll)(fds, count, timeout) }
}

/// # Safety
/// As `poll(2)`; libc has checked the array's size.
#[no_mangle]
pub unsafe extern "C" fn __poll_chk(
    fds: *mut pollfd,
    count: libc::nfds_t,
    timeout: c_int,
    _size: usize,
) -> c_int {
    // SAFETY: passed on.
    unsafe { poll(fds, count, timeout) }
}

/// # Safety
/// As `ppoll(2)`.
#[no_mangle]
pub unsafe extern "C" fn ppoll(
    fds: *mut pollfd,
    count: libc::nfds_t,
    timeout: *const libc::timespec,
    mask: *const libc::sigset_t,
) -> c_int {
    // SAFETY: the caller's own, or null.
    let patience = unsafe { timeout.as_ref() }.map(duration);
    // SAFETY: passed on.
    if let Some(ret) = unsafe { polled(fds, count, patience, mask) } {
        return ret;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"ppoll", PPoll)(fds, count, timeout, mask) }
}

fn duration(time: &libc::timespec) -> Duration {
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    Duration::from_secs(part(time.tv_sec)) + Duration::from_nanos(part(time.tv_nsec))
}

/// # Safety
/// As `pselect(2)`; the sets must be null or sets of descriptors below `count`.
unsafe fn selected(
    count: c_int,
    sets: [*mut libc::fd_set; 3],
    timeout: Option<Duration>,
    mask: *const libc::sigset_t,
) -> Option<c_int> {
    const EVENTS: [i16; 3] = [libc::POLLIN, libc::POLLOUT, libc::POLLPRI];
    if !files::any() {
        return None;
    }
    // SAFETY: the caller's sets, and numbers below its count.
    let has =
        |fd: c_int, set: *mut libc::fd_set| unsafe { !set.is_null() && libc::FD_ISSET(fd, set) };
    let mut fds: Vec<pollfd> = (0..count.min(libc::FD_SETSIZE as c_int))
        .map(|fd| {
            let wanted = sets.iter().zip(EVENTS).filter(|(&set, _)| has(fd, set));
            pollfd { fd, events: wanted.fold(0, |all, (_, bit)| all | bit), revents: 0 }
        })
        .filter(|one| one.events != 0)
        .collect();
    if !fds.iter().any(|one| files::of(one.fd).is_some()) {
        return None;
    }
    // SAFETY: passed on.
    let outcome = unsafe { wait(&mut fds, timeout, mask) };
    if outcome.is_err() {
        return Some(answer(outcome));
    }
    let mut bits = 0;
    for one in &fds {
        for (&set, bit) in sets.iter().zip(EVENTS) {
            let ends = if bit == libc::POLLPRI { 0 } else { POLLERR | POLLHUP };
            if has(one.fd, set) && one.revents & (bit | ends) == 0 {
                // SAFETY: the caller's set.
                unsafe { libc::FD_CLR(one.fd, set) };
            } else if has(one.fd, set) {
                bits += 1;
            }
        }
    }
    Some(bits)
}

/// # Safety
/// As `select(2)`.
#[no_mangle]
pub unsafe extern "C" fn select(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *mut libc::timeval,
) -> c_int {
    type Select = unsafe extern "C" fn(
        c_int,
        *mut libc::fd_set,
        *mut libc::fd_set,
        *mut libc::fd_set,
        *mut libc::timeval,
    ) -> c_int;
    // SAFETY: the caller's own, or null.
    let patience = unsafe { timeout.as_ref() }.map(|time| {
        let part = |part: i64| u64::try_from(part).unwrap_or(0);
        Duration::from_secs(part(time.tv_sec)) + Duration::from_micros(part(time.tv_usec))
    });
    // SAFETY: passed on.
    if let Some(ret) = unsafe { selected(count, [read, write, except], patience, std::ptr::null()) }
    {
        return ret;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"select", Select)(count, read, write, except, timeout) }
}

/// # Safety
/// As `pselect(2)`.
#[no_mangle]
pub unsafe extern "C" fn pselect(
    count: c_int,
    read: *mut libc::fd_set,
    write: *mut libc::fd_set,
    except: *mut libc::fd_set,
    timeout: *const libc::timespec,
    mask: *const c_void,
) -> c_int {
    type PSelect = unsafe extern "C" fn(
        c_int,
        *mut libc::fd_set,
        *mut libc::fd_set,
        *mut libc::fd_set,
        *const libc::timespec,
        *const c_void,
    ) -> c_int;
    // SAFETY: the caller's own, or null.
    let patience = unsafe { timeout.as_ref() }.map(duration);
    // SAFETY: passed on.
    if let Some(ret) = unsafe { selected(count, [read, write, except], patience, mask.cast()) } {
        return ret;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"pselect", PSelect)(count, read, write, except, timeout, mask) }
}
