//! The guest module's interpreter of the schema (`guest-module/schema.c`), compiled in.

use std::ffi::{c_int, c_long, c_void};
use std::sync::atomic::Ordering;

use nvguest_frontend::wire;
use zerocopy::IntoBytes;

use crate::board::{Entry, LOST};
use crate::files;
use crate::next::{errno, next};
use crate::process::{self, board, Errno, Process};
use crate::trace::Seen;

#[repr(C)]
struct Limits {
    max_request: u32,
    max_response: u32,
    max_segments: u32,
    trusting: u32,
}

#[repr(C)]
struct Ops {
    send: unsafe extern "C" fn(*mut c_void, *mut u8, u32, *mut u8, u32) -> c_long,
    file: unsafe extern "C" fn(*mut c_void, c_int, *mut u32) -> c_int,
    seen: Option<unsafe extern "C" fn(*mut c_void, u64, u32, u32)>,
}

extern "C" {
    fn nvl_rules(blob: *const u8, len: usize) -> *mut c_void;
    fn nvl_call(
        rules: *const c_void,
        limits: *const Limits,
        ops: *const Ops,
        ctx: *mut c_void,
        kind: u8,
        cmd: u32,
        arg: u64,
    ) -> c_int;
}

/// The schema's tables.
pub struct Rules(*mut c_void);

// SAFETY: read alone once they are made.
unsafe impl Send for Rules {}
// SAFETY: as above.
unsafe impl Sync for Rules {}

impl Rules {
    /// The tables of a schema, if it is sound.
    pub fn new(schema: &'static [u8]) -> Option<Self> {
        // SAFETY: the schema stays for ever and is aligned to a page.
        let rules = unsafe { nvl_rules(schema.as_ptr(), schema.len()) };
        (!rules.is_null()).then_some(Self(rules))
    }
}

/// Who answers a call.
#[derive(Clone, Copy)]
pub enum Answerer<'a> {
    /// The backend.
    Backend(&'a Process, &'a Entry),
    /// The host's own driver, on this descriptor.
    Host(c_int),
}

/// A call on its way.
struct Call<'a> {
    answerer: Answerer<'a>,
    cmd: u32,
    argument: *mut c_void,
    host: Option<Result<c_int, Errno>>,
    seen: Option<&'a mut Seen>,
}

/// An ioctl on a file of this kind: what it returns, or an errno. What the rules reach is
/// shown to `seen` when it is over.
///
/// # Safety
/// As for the ioctl.
pub unsafe fn ioctl(
    answerer: Answerer<'_>,
    kind: u8,
    (cmd, argument): (u32, *mut c_void),
    seen: Option<&mut Seen>,
) -> Result<c_int, Errno> {
    let limits = board().ok_or(nix::libc::ENODEV)?.limits();
    let trusting = matches!(answerer, Answerer::Backend(process, _) if process.is_trusting());
    let limits = Limits {
        max_request: limits.max_request,
        max_response: limits.max_response,
        max_segments: limits.max_segments,
        trusting: trusting.into(),
    };
    let ops = Ops { send, file, seen: seen.is_some().then_some(seen_buffer as _) };
    let mut call = Call { answerer, cmd, argument, host: None, seen };
    let rules = process::rules()?;
    // SAFETY: the rules are made and stay; the callbacks get `call`, which lives until the
    // function returns; the argument is the caller's business.
    let ret = unsafe {
        nvl_call(
            rules.0,
            &raw const limits,
            &raw const ops,
            (&raw mut call).cast(),
            kind,
            cmd,
            argument.expose_provenance() as u64,
        )
    };
    match (call.host, call.answerer) {
        (Some(answer), _) => answer,
        // The rules did not like it; the host says itself what it thinks.
        // SAFETY: passed on.
        (None, Answerer::Host(fd)) => unsafe { host_ioctl(fd, cmd, argument) },
        (None, Answerer::Backend(..)) if ret < 0 => Err(-ret),
        (None, Answerer::Backend(..)) => Ok(ret),
    }
}

/// # Safety
/// As for the ioctl.
unsafe fn host_ioctl(fd: c_int, cmd: u32, argument: *mut c_void) -> Result<c_int, Errno> {
    type Ioctl = unsafe extern "C" fn(c_int, std::ffi::c_ulong, *mut c_void) -> c_int;
    // SAFETY: the caller's own arguments.
    let ret = unsafe { next!(c"ioctl", Ioctl)(fd, cmd.into(), argument) };
    if ret < 0 {
        Err(errno())
    } else {
        Ok(ret)
    }
}

/// # Safety
/// The interpreter passes its context, and buffers of the lengths it says.
unsafe extern "C" fn send(
    ctx: *mut c_void,
    message: *mut u8,
    len: u32,
    reply: *mut u8,
    room: u32,
) -> c_long {
    // SAFETY: the context is the call that `ioctl` keeps alive.
    let call = unsafe { &mut *ctx.cast::<Call<'_>>() };
    let (process, entry) = match call.answerer {
        Answerer::Backend(process, entry) => (process, entry),
        Answerer::Host(fd) => {
            // SAFETY: the program's own call.
            call.host = Some(unsafe { host_ioctl(fd, call.cmd, call.argument) });
            return -c_long::from(nix::libc::ENOSYS);
        }
    };
    // SAFETY: the interpreter owns both buffers and lends them for this call.
    let (message, reply) = unsafe {
        (
            std::slice::from_raw_parts_mut(message, len as usize),
            std::slice::from_raw_parts_mut(reply, room as usize),
        )
    };
    let handle = entry.handle.load(Ordering::Relaxed);
    let caller = size_of::<wire::ReqHeader>() - size_of::<wire::Caller>();
    message[4..8].copy_from_slice(&handle.to_le_bytes());
    message[caller..size_of::<wire::ReqHeader>()].copy_from_slice(process.caller.as_bytes());
    let queue = process.queue_of(entry);
    match process.send(queue, message, reply) {
        // CAST: at most `room`.
        Ok(count) => count as c_long,
        Err(errno) => -c_long::from(errno),
    }
}

/// # Safety
/// The interpreter passes its context and where the answer goes.
unsafe extern "C" fn file(ctx: *mut c_void, fd: c_int, file: *mut u32) -> c_int {
    // SAFETY: as in `send`.
    let call = unsafe { &*ctx.cast::<Call<'_>>() };
    if matches!(call.answerer, Answerer::Host(_)) {
        // SAFETY: the interpreter's own variable.
        unsafe { *file = 1 };
        return 0;
    }
    let Some((_, entry)) = files::of(fd) else { return -nix::libc::EBADF };
    if entry.flags.load(Ordering::Acquire) & LOST != 0 {
        return -nix::libc::ENODEV;
    }
    // SAFETY: the interpreter's own variable.
    unsafe { *file = entry.handle.load(Ordering::Relaxed) };
    0
}

/// # Safety
/// The interpreter passes its context; the buffer is the caller's, as the call was told.
unsafe extern "C" fn seen_buffer(ctx: *mut c_void, user: u64, len: u32, flags: u32) {
    // SAFETY: as in `send`.
    let call = unsafe { &mut *ctx.cast::<Call<'_>>() };
    if let Some(seen) = &mut call.seen {
        seen.buffer(user, len, flags);
    }
}
