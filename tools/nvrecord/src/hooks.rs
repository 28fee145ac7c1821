//! The functions that stand before libc's: each calls libc's own and writes a line.

use std::ffi::{c_char, c_int, c_ulong, c_void, CStr};
use std::sync::atomic::{AtomicI32, AtomicPtr, Ordering};

use crate::decode::{self, Call, HEAD};
use crate::files;
use crate::line::Line;

/// libc's own function of a name, looked up once.
struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    fn get(&self) -> *mut c_void {
        let known = self.found.load(Ordering::Relaxed);
        if !known.is_null() {
            return known;
        }
        // SAFETY: the name is a C string; dlsym only reads it.
        let found = unsafe { libc::dlsym(libc::RTLD_NEXT, self.name.as_ptr()) };
        assert!(!found.is_null(), "libc has no {:?}", self.name);
        self.found.store(found, Ordering::Relaxed);
        found
    }
}

/// libc's function `$name` with the type `$kind`.
macro_rules! next {
    ($name:literal, $kind:ty) => {{
        static NEXT: Next = Next::new($name);
        // SAFETY: the pointer is libc's function of this name, which has this type.
        unsafe { std::mem::transmute::<*mut c_void, $kind>(NEXT.get()) }
    }};
}

type Open = unsafe extern "C" fn(*const c_char, c_int, libc::mode_t) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int;
type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Mmap = unsafe extern "C" fn(*mut c_void, usize, c_int, c_int, c_int, i64) -> *mut c_void;
type Poll = unsafe extern "C" fn(*mut libc::pollfd, libc::nfds_t, c_int) -> c_int;
type Close = unsafe extern "C" fn(c_int) -> c_int;

fn begin() -> Line {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec that the call fills; gettid takes nothing.
    let thread = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        libc::gettid()
    };
    Line::begin(now.tv_sec, now.tv_nsec, thread)
}

/// Writes a line to the file that NVRECORD names, or to stderr. Errno stays as it was.
fn write(line: &mut Line) {
    static LOG: AtomicI32 = AtomicI32::new(-1);
    let open = next!(c"open", Open);
    // SAFETY: errno's address is valid for this thread; getenv's result is used before any
    // other call could change it; the line's bytes live until write returns.
    unsafe {
        let errno = *libc::__errno_location();
        let mut log = LOG.load(Ordering::Relaxed);
        if log < 0 {
            let path = libc::getenv(c"NVRECORD".as_ptr());
            let flags = libc::O_CREAT | libc::O_WRONLY | libc::O_APPEND | libc::O_CLOEXEC;
            log = if path.is_null() { 2 } else { open(path, flags, 0o644) };
            LOG.store(if log < 0 { 2 } else { log }, Ordering::Relaxed);
        }
        let bytes = line.end();
        libc::write(log, bytes.as_ptr().cast(), bytes.len());
        *libc::__errno_location() = errno;
    }
}

fn opened(path: *const c_char, flags: c_int, descriptor: c_int) -> c_int {
    if path.is_null() {
        return descriptor;
    }
    // SAFETY: libc's open took it, so it is a C string.
    let path = unsafe { CStr::from_ptr(path) }.to_bytes();
    let node = files::node_of(path);
    if descriptor >= 0 {
        files::opened(descriptor, node);
    }
    let mut line = begin();
    let text = std::str::from_utf8(path).unwrap_or("?");
    if node.is_some() || text.contains("nvidia") {
        line.put(format_args!("open path={text} flags={flags:#x} ret={descriptor}"));
        write(&mut line);
    }
    descriptor
}

/// # Safety
/// As `open(2)`. Declared with the mode that C passes or leaves out: reading a register that
/// the caller did not set is harmless where the mode is not used.
#[no_mangle]
pub unsafe extern "C" fn open(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    let next = next!(c"open", Open);
    // SAFETY: the caller's own arguments.
    opened(path, flags, unsafe { next(path, flags, mode) })
}

/// # Safety
/// As `open`.
#[no_mangle]
pub unsafe extern "C" fn open64(path: *const c_char, flags: c_int, mode: libc::mode_t) -> c_int {
    let next = next!(c"open64", Open);
    // SAFETY: the caller's own arguments.
    opened(path, flags, unsafe { next(path, flags, mode) })
}

/// # Safety
/// As `open`.
#[no_mangle]
pub unsafe extern "C" fn openat(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mode: libc::mode_t,
) -> c_int {
    let next = next!(c"openat", OpenAt);
    // SAFETY: the caller's own arguments.
    opened(path, flags, unsafe { next(folder, path, flags, mode) })
}

/// # Safety
/// As `ioctl(2)` with one argument, which all of NVIDIA's are.
#[no_mangle]
pub unsafe extern "C" fn ioctl(
    descriptor: c_int,
    request: c_ulong,
    argument: *mut c_void,
) -> c_int {
    let next = next!(c"ioctl", Ioctl);
    let Some(node) = files::node(descriptor) else {
        // SAFETY: the caller's own arguments.
        return unsafe { next(descriptor, request, argument) };
    };
    let readable = decode::is_rm(request) && !argument.is_null();
    let length = if readable { decode::size(request).min(HEAD) } else { 0 };
    let mut before = [0u8; HEAD];
    let mut after = [0u8; HEAD];
    // SAFETY: the argument of such an ioctl is as long as its number says, the kernel reads and
    // writes that much, and both copies stay within it and within HEAD.
    let ret = unsafe {
        std::ptr::copy_nonoverlapping(argument.cast::<u8>(), before.as_mut_ptr(), length);
        let ret = next(descriptor, request, argument);
        std::ptr::copy_nonoverlapping(argument.cast::<u8>(), after.as_mut_ptr(), length);
        ret
    };
    let call = Call { node, request, before: &before[..length], after: &after[..length], ret };
    let mut line = begin();
    call.describe(&mut line);
    write(&mut line);
    ret
}

fn mapped(at: *mut c_void, length: usize, protection: c_int, descriptor: c_int, offset: i64) {
    if let Some(node) = files::node(descriptor) {
        let failed = at == libc::MAP_FAILED;
        let mut line = begin();
        line.put(format_args!(
            "mmap node={node} length={length:#x} protection={protection:#x} offset={offset:#x} failed={failed}"
        ));
        write(&mut line);
    }
}

/// # Safety
/// As `mmap(2)`.
#[no_mangle]
pub unsafe extern "C" fn mmap(
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: i64,
) -> *mut c_void {
    let next = next!(c"mmap", Mmap);
    // SAFETY: the caller's own arguments.
    let at = unsafe { next(at, length, protection, flags, descriptor, offset) };
    mapped(at, length, protection, descriptor, offset);
    at
}

/// # Safety
/// As `mmap(2)`.
#[no_mangle]
pub unsafe extern "C" fn mmap64(
    at: *mut c_void,
    length: usize,
    protection: c_int,
    flags: c_int,
    descriptor: c_int,
    offset: i64,
) -> *mut c_void {
    let next = next!(c"mmap64", Mmap);
    // SAFETY: the caller's own arguments.
    let at = unsafe { next(at, length, protection, flags, descriptor, offset) };
    mapped(at, length, protection, descriptor, offset);
    at
}

/// # Safety
/// As `poll(2)`.
#[no_mangle]
pub unsafe extern "C" fn poll(
    descriptors: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: c_int,
) -> c_int {
    let next = next!(c"poll", Poll);
    // SAFETY: the caller's own arguments.
    let ret = unsafe { next(descriptors, count, timeout) };
    let count = usize::try_from(count).unwrap_or(0);
    if ret < 0 || descriptors.is_null() {
        return ret;
    }
    // SAFETY: poll read and wrote `count` of them.
    let polled = unsafe { std::slice::from_raw_parts(descriptors, count) };
    for one in polled {
        if let Some(node) = files::node(one.fd) {
            let mut line = begin();
            line.put(format_args!(
                "poll node={node} events={:#x} revents={:#x} timeout={timeout} ret={ret}",
                one.events, one.revents
            ));
            write(&mut line);
        }
    }
    ret
}

/// # Safety
/// As `close(2)`.
#[no_mangle]
pub unsafe extern "C" fn close(descriptor: c_int) -> c_int {
    if let Some(node) = files::node(descriptor) {
        files::opened(descriptor, None);
        let mut line = begin();
        line.put(format_args!("close node={node} descriptor={descriptor}"));
        write(&mut line);
    }
    let next = next!(c"close", Close);
    // SAFETY: the caller's own argument.
    unsafe { next(descriptor) }
}
