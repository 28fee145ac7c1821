//! The functions that stand before libc's: open, ioctl, close, dup, stat and their kin.

use std::ffi::{c_char, c_int, c_long, c_uint, c_ulong, c_void, CStr};
use std::sync::atomic::Ordering;

use nix::libc;

use crate::board::{ESCAPED, LOST};
use crate::files::{self, Path};
use crate::next::{answer, errno, fail, next};
use crate::process::{is_native, process};
use crate::schema::{self, Answerer};
use crate::trace;

type Open = unsafe extern "C" fn(*const c_char, c_int, libc::mode_t) -> c_int;
type Open2 = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
type OpenAt = unsafe extern "C" fn(c_int, *const c_char, c_int, libc::mode_t) -> c_int;
type OpenAt2 = unsafe extern "C" fn(c_int, *const c_char, c_int) -> c_int;
type Ioctl = unsafe extern "C" fn(c_int, c_ulong, *mut c_void) -> c_int;
type Fcntl = unsafe extern "C" fn(c_int, c_int, *mut c_void) -> c_int;
type Dup = unsafe extern "C" fn(c_int) -> c_int;
type Dup2 = unsafe extern "C" fn(c_int, c_int) -> c_int;
type Dup3 = unsafe extern "C" fn(c_int, c_int, c_int) -> c_int;
type CloseRange = unsafe extern "C" fn(c_uint, c_uint, c_int) -> c_int;
type FStat = unsafe extern "C" fn(c_int, *mut libc::stat) -> c_int;
type Stat = unsafe extern "C" fn(*const c_char, *mut libc::stat) -> c_int;
type Access = unsafe extern "C" fn(*const c_char, c_int) -> c_int;
type SendMsg = unsafe extern "C" fn(c_int, *const libc::msghdr, c_int) -> libc::ssize_t;
type RecvMsg = unsafe extern "C" fn(c_int, *mut libc::msghdr, c_int) -> libc::ssize_t;

/// Opens a path by `host`, or as the guest has it.
fn opened(path: *const c_char, flags: c_int, host: impl FnOnce() -> c_int) -> c_int {
    if path.is_null() {
        return host();
    }
    // SAFETY: a C string, as for open(2).
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    if !bytes.starts_with(b"/dev/nvidia") {
        let fd = host();
        if fd >= 0 && files::any() {
            // A number that was a file's, closed by a way that is not seen.
            files::closing(fd);
        }
        return fd;
    }
    let found = files::look_up(bytes);
    let fd = match found {
        Path::Other => return host(),
        Path::Missing if !is_native() => fail(libc::ENOENT),
        Path::Missing => host(),
        Path::Node(node) if is_native() => {
            let fd = host();
            if fd >= 0 {
                files::opened_native(fd, node);
            }
            fd
        }
        Path::Node(node) => answer(files::open(node, flags)),
    };
    trace::open(bytes, fd);
    fd
}

macro_rules! opens {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `open(2)`. The mode is read whether C passed it or not, and then not used.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            path: *const c_char,
            flags: c_int,
            mode: libc::mode_t,
        ) -> c_int {
            // SAFETY: the caller's own arguments.
            opened(path, flags, || unsafe { next!($text, Open)(path, flags, mode) })
        }
    )*};
}
opens! { open c"open" open64 c"open64" }

macro_rules! open2s {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `open(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: the caller's own arguments.
            opened(path, flags, || unsafe { next!($text, Open2)(path, flags) })
        }
    )*};
}
open2s! { __open_2 c"__open_2" __open64_2 c"__open64_2" }

macro_rules! openats {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `openat(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(
            folder: c_int,
            path: *const c_char,
            flags: c_int,
            mode: libc::mode_t,
        ) -> c_int {
            // SAFETY: the caller's own arguments.
            opened(path, flags, || unsafe { next!($text, OpenAt)(folder, path, flags, mode) })
        }
    )*};
}
openats! { openat c"openat" openat64 c"openat64" }

macro_rules! openat2s {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `openat(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
            // SAFETY: the caller's own arguments.
            opened(path, flags, || unsafe { next!($text, OpenAt2)(folder, path, flags) })
        }
    )*};
}
openat2s! { __openat_2 c"__openat_2" __openat64_2 c"__openat64_2" }

/// # Safety
/// As `ioctl(2)` with one argument, which all of NVIDIA's are.
#[no_mangle]
pub unsafe extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    // CAST: the kernel takes an unsigned int too.
    let call = (request as u32, argument);
    if is_native() {
        if let Some(node) = files::native(fd) {
            let mut record = trace::Call::begin(node, call);
            // SAFETY: passed on.
            let outcome =
                unsafe { schema::ioctl(Answerer::Host(fd), node.kind, call, record.seen()) };
            record.end(outcome);
            return answer(outcome);
        }
    } else if let Some((_, entry)) = files::of_any(fd) {
        if entry.flags.load(Ordering::Acquire) & LOST != 0 {
            return fail(libc::ENODEV);
        }
        // CAST: kinds are few.
        let kind = entry.kind.load(Ordering::Relaxed) as u8;
        if kind == nvguest_abi::FileKind::Cap as u8 {
            return fail(libc::ENOTTY);
        }
        let process = match process() {
            Ok(process) => process,
            Err(errno) => return fail(errno),
        };
        if !trace::is_on() {
            // SAFETY: passed on.
            let outcome =
                unsafe { schema::ioctl(Answerer::Backend(process, entry), kind, call, None) };
            return answer(outcome);
        }
        let mut record = trace::Call::begin(trace::node_of(entry), call);
        let answerer = Answerer::Backend(process, entry);
        // SAFETY: passed on.
        let outcome = unsafe { schema::ioctl(answerer, kind, call, record.seen()) };
        record.end(outcome);
        return answer(outcome);
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"ioctl", Ioctl)(fd, request, argument) }
}

/// # Safety
/// As `read(2)`. The driver's files cannot be read.
#[no_mangle]
pub unsafe extern "C" fn read(fd: c_int, to: *mut c_void, length: usize) -> isize {
    type Read = unsafe extern "C" fn(c_int, *mut c_void, usize) -> isize;
    if files::any() && files::of(fd).is_some() {
        return fail(libc::EINVAL) as isize;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"read", Read)(fd, to, length) }
}

/// # Safety
/// As `write(2)`. The driver's files cannot be written.
#[no_mangle]
pub unsafe extern "C" fn write(fd: c_int, from: *const c_void, length: usize) -> isize {
    type Write = unsafe extern "C" fn(c_int, *const c_void, usize) -> isize;
    if files::any() && files::of(fd).is_some() {
        return fail(libc::EINVAL) as isize;
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"write", Write)(fd, from, length) }
}

/// # Safety
/// As `close(2)`.
#[no_mangle]
pub unsafe extern "C" fn close(fd: c_int) -> c_int {
    if files::any() {
        if files::is_hidden(fd) {
            return fail(libc::EBADF);
        }
        trace::close(fd);
        files::closing(fd);
    }
    crate::next::close(fd)
}

/// # Safety
/// As `close_range(2)`.
#[no_mangle]
pub unsafe extern "C" fn close_range(first: c_uint, last: c_uint, flags: c_int) -> c_int {
    let host = |first: c_uint, last: c_uint| {
        // SAFETY: numbers.
        unsafe { next!(c"close_range", CloseRange)(first, last, flags) }
    };
    if !files::any() {
        return host(first, last);
    }
    let mut from = first;
    // CAST: what is beyond is not told apart.
    for fd in first..=last.min(65535) {
        let number = fd as c_int;
        if files::is_hidden(number) {
            if fd > from && host(from, fd - 1) != 0 {
                return -1;
            }
            from = fd + 1;
        } else if flags & libc::CLOSE_RANGE_CLOEXEC as c_int == 0 {
            files::closing(number);
        }
    }
    if from > last {
        return 0;
    }
    host(from, last)
}

/// # Safety
/// As `closefrom(3)`.
#[no_mangle]
pub unsafe extern "C" fn closefrom(first: c_int) {
    // SAFETY: numbers. CAST: a negative one means all.
    unsafe { close_range(first.max(0) as c_uint, c_uint::MAX, 0) };
}

/// # Safety
/// As `dup(2)`.
#[no_mangle]
pub unsafe extern "C" fn dup(fd: c_int) -> c_int {
    // SAFETY: a number.
    let to = unsafe { next!(c"dup", Dup)(fd) };
    if to >= 0 && files::any() {
        files::duplicated(fd, to);
    }
    to
}

fn duplicated_to(from: c_int, to: c_int, host: impl FnOnce() -> c_int) -> c_int {
    if !files::any() || from == to {
        return host();
    }
    if files::is_hidden(to) {
        return fail(libc::EBUSY);
    }
    files::closing(to);
    let made = host();
    if made >= 0 {
        files::duplicated(from, made);
    }
    made
}

/// # Safety
/// As `dup2(2)`.
#[no_mangle]
pub unsafe extern "C" fn dup2(from: c_int, to: c_int) -> c_int {
    // SAFETY: numbers.
    duplicated_to(from, to, || unsafe { next!(c"dup2", Dup2)(from, to) })
}

/// # Safety
/// As `dup3(2)`.
#[no_mangle]
pub unsafe extern "C" fn dup3(from: c_int, to: c_int, flags: c_int) -> c_int {
    // SAFETY: numbers.
    duplicated_to(from, to, || unsafe { next!(c"dup3", Dup3)(from, to, flags) })
}

macro_rules! fcntls {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `fcntl(2)`. The argument is read whether C passed it or not.
        #[no_mangle]
        pub unsafe extern "C" fn $name(fd: c_int, command: c_int, argument: *mut c_void) -> c_int {
            // SAFETY: the caller's own arguments.
            let made = unsafe { next!($text, Fcntl)(fd, command, argument) };
            let duplicates = command == libc::F_DUPFD || command == libc::F_DUPFD_CLOEXEC;
            if duplicates && made >= 0 && files::any() && !files::is_hidden(fd) {
                files::duplicated(fd, made);
            }
            made
        }
    )*};
}
fcntls! { fcntl c"fcntl" fcntl64 c"fcntl64" }

/// # Safety
/// `status` must be a stat's.
unsafe fn describe(device: u64, mode: u32, status: *mut libc::stat) {
    // SAFETY: the caller's stat; all zeroes are one.
    unsafe {
        status.write(std::mem::zeroed());
        (*status).st_mode = libc::S_IFCHR | mode;
        (*status).st_rdev = device;
        (*status).st_dev = 6;
        (*status).st_ino = device;
        (*status).st_nlink = 1;
        (*status).st_blksize = 4096;
    }
}

/// Whether a path is one of NVIDIA's that the host may have and the guest has not.
///
/// # Safety
/// `path` must be null or a C string.
unsafe fn is_missing(path: *const c_char) -> bool {
    // SAFETY: the caller's own.
    let bytes = if path.is_null() { &[] } else { unsafe { CStr::from_ptr(path) }.to_bytes() };
    bytes.starts_with(b"/dev/nvidia")
        && !is_native()
        && matches!(files::look_up(bytes), Path::Missing)
}

macro_rules! fstats {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `fstat(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(fd: c_int, status: *mut libc::stat) -> c_int {
            if let Some((_, entry)) = files::of(fd) {
                // SAFETY: the caller's own.
                unsafe { describe(entry.device.load(Ordering::Relaxed), 0o666, status) };
                return 0;
            }
            // SAFETY: the caller's own arguments.
            unsafe { next!($text, FStat)(fd, status) }
        }
    )*};
}
fstats! { fstat c"fstat" fstat64 c"fstat64" }

macro_rules! stats {
    ($($name:ident $text:literal)*) => {$(
        /// # Safety
        /// As `stat(2)`.
        #[no_mangle]
        pub unsafe extern "C" fn $name(path: *const c_char, status: *mut libc::stat) -> c_int {
            // SAFETY: the caller's own arguments.
            if unsafe { is_missing(path) } {
                return fail(libc::ENOENT);
            }
            // SAFETY: the caller's own arguments.
            let ret = unsafe { next!($text, Stat)(path, status) };
            if ret == 0 || errno() != libc::ENOENT {
                return ret;
            }
            // SAFETY: libc has just read it.
            let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
            match files::look_up(bytes) {
                Path::Node(node) if !is_native() => {
                    // SAFETY: the caller's own.
                    unsafe { describe(node.device, node.mode, status) };
                    0
                }
                _ => fail(libc::ENOENT),
            }
        }
    )*};
}
stats! { stat c"stat" stat64 c"stat64" lstat c"lstat" lstat64 c"lstat64" }

/// # Safety
/// As `statx(2)`.
#[no_mangle]
pub unsafe extern "C" fn statx(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mask: c_uint,
    status: *mut libc::statx,
) -> c_int {
    type Statx =
        unsafe extern "C" fn(c_int, *const c_char, c_int, c_uint, *mut libc::statx) -> c_int;
    // SAFETY: as for statx(2); a null path is another way to say an empty one.
    let bytes = if path.is_null() { &[] } else { unsafe { CStr::from_ptr(path) }.to_bytes() };
    let own = files::of(folder).filter(|_| bytes.is_empty());
    let device = match own {
        Some((_, entry)) => entry.device.load(Ordering::Relaxed),
        None => {
            // SAFETY: the caller's own arguments.
            if unsafe { is_missing(path) } {
                return fail(libc::ENOENT);
            }
            // SAFETY: the caller's own arguments.
            let ret = unsafe { next!(c"statx", Statx)(folder, path, flags, mask, status) };
            if ret == 0 || errno() != libc::ENOENT {
                return ret;
            }
            match files::look_up(bytes) {
                Path::Node(node) if !is_native() => node.device,
                _ => return fail(libc::ENOENT),
            }
        }
    };
    // SAFETY: the caller's own; all zeroes are one.
    unsafe {
        status.write(std::mem::zeroed());
        (*status).stx_mask = libc::STATX_BASIC_STATS;
        // CAST: a character device's type has 16 bits.
        (*status).stx_mode = (libc::S_IFCHR | 0o666) as u16;
        (*status).stx_rdev_major = libc::major(device);
        (*status).stx_rdev_minor = libc::minor(device);
        (*status).stx_ino = device;
        (*status).stx_nlink = 1;
        (*status).stx_blksize = 4096;
    }
    0
}

/// # Safety
/// As `access(2)`.
#[no_mangle]
pub unsafe extern "C" fn access(path: *const c_char, mode: c_int) -> c_int {
    // SAFETY: the caller's own arguments.
    if unsafe { is_missing(path) } {
        return fail(libc::ENOENT);
    }
    // SAFETY: the caller's own arguments.
    let ret = unsafe { next!(c"access", Access)(path, mode) };
    if ret == 0 || errno() != libc::ENOENT {
        return ret;
    }
    // SAFETY: libc has just read it.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    match files::look_up(bytes) {
        Path::Node(_) if !is_native() && mode & libc::X_OK == 0 => 0,
        _ => fail(libc::ENOENT),
    }
}

/// Visits the descriptors that a message carries.
///
/// # Safety
/// As for the message: its control data must be as long as it says.
unsafe fn each_passed(message: *const libc::msghdr, mut visit: impl FnMut(c_int)) {
    // SAFETY: the caller vouches for the message.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(message);
        while let Some(control) = header.as_ref() {
            if (control.cmsg_level, control.cmsg_type) == (libc::SOL_SOCKET, libc::SCM_RIGHTS) {
                let bytes = control.cmsg_len.saturating_sub(libc::CMSG_LEN(0) as usize);
                let fds = libc::CMSG_DATA(header).cast::<c_int>();
                for at in 0..bytes / size_of::<c_int>() {
                    visit(fds.add(at).read_unaligned());
                }
            }
            header = libc::CMSG_NXTHDR(message, header);
        }
    }
}

/// # Safety
/// As `sendmsg(2)`.
#[no_mangle]
pub unsafe extern "C" fn sendmsg(
    socket: c_int,
    message: *const libc::msghdr,
    flags: c_int,
) -> libc::ssize_t {
    if files::any() && !message.is_null() {
        // SAFETY: the caller's own message.
        unsafe {
            each_passed(message, |fd| {
                if let Some((_, entry)) = files::of(fd) {
                    entry.flags.fetch_or(ESCAPED, Ordering::AcqRel);
                }
            });
        }
    }
    // SAFETY: the caller's own arguments.
    unsafe { next!(c"sendmsg", SendMsg)(socket, message, flags) }
}

/// # Safety
/// As `recvmsg(2)`.
#[no_mangle]
pub unsafe extern "C" fn recvmsg(
    socket: c_int,
    message: *mut libc::msghdr,
    flags: c_int,
) -> libc::ssize_t {
    // SAFETY: the caller's own arguments.
    let count = unsafe { next!(c"recvmsg", RecvMsg)(socket, message, flags) };
    if count >= 0 && !message.is_null() && !files::is_hidden(socket) && !is_native() {
        // SAFETY: the kernel has just written it.
        unsafe {
            each_passed(message, |fd| {
                if files::any() {
                    files::closing(fd);
                }
                files::adopt(fd);
            });
        }
    }
    count
}

/// # Safety
/// As `syscall(2)`: the calls that have a hook go there, so that a program that goes past libc's
/// names is seen all the same.
#[no_mangle]
pub unsafe extern "C" fn syscall(
    number: c_long,
    a: c_long,
    b: c_long,
    c: c_long,
    d: c_long,
    e: c_long,
    f: c_long,
) -> c_long {
    type Syscall =
        unsafe extern "C" fn(c_long, c_long, c_long, c_long, c_long, c_long, c_long) -> c_long;
    let pointer = |word: c_long| std::ptr::with_exposed_provenance_mut::<c_void>(word as usize);
    // CAST: the kernel takes the low halves too. SAFETY: the caller's own arguments.
    unsafe {
        match number {
            libc::SYS_ioctl if files::any() => ioctl(a as c_int, b as c_ulong, pointer(c)).into(),
            libc::SYS_open => open(pointer(a).cast(), b as c_int, c as libc::mode_t).into(),
            libc::SYS_openat => {
                openat(a as c_int, pointer(b).cast(), c as c_int, d as libc::mode_t).into()
            }
            libc::SYS_close => close(a as c_int).into(),
            libc::SYS_mmap => {
                let (length, fd) = (b as usize, e as c_int);
                let at = crate::maps::mmap(pointer(a), length, c as c_int, d as c_int, fd, f);
                at.expose_provenance() as c_long
            }
            libc::SYS_munmap => crate::maps::munmap(pointer(a), b as usize).into(),
            _ => next!(c"syscall", Syscall)(number, a, b, c, d, e, f),
        }
    }
}
