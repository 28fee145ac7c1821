//! libc's own functions behind ours.

use std::ffi::{c_int, c_void, CStr};
use std::sync::atomic::{AtomicPtr, Ordering};

use nix::libc;

/// libc's own function of a name, looked up once.
pub struct Next {
    name: &'static CStr,
    found: AtomicPtr<c_void>,
}

impl Next {
    /// Not looked up yet.
    pub const fn new(name: &'static CStr) -> Self {
        Self { name, found: AtomicPtr::new(std::ptr::null_mut()) }
    }

    /// Its address.
    pub fn get(&self) -> *mut c_void {
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
        static NEXT: $crate::next::Next = $crate::next::Next::new($name);
        // SAFETY: the pointer is libc's function of this name, which has this type.
        #[allow(unused_unsafe, reason = "some callers are in such a block already")]
        let function = unsafe { std::mem::transmute::<*mut std::ffi::c_void, $kind>(NEXT.get()) };
        function
    }};
}
pub(crate) use next;

/// Sets errno and fails as a call does.
pub fn fail(errno: c_int) -> c_int {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() = errno };
    -1
}

/// This thread's errno.
pub fn errno() -> c_int {
    // SAFETY: this thread's own errno.
    unsafe { *libc::__errno_location() }
}

/// `Ok` as it is, an errno as a call fails with it.
pub fn answer(outcome: Result<c_int, c_int>) -> c_int {
    outcome.unwrap_or_else(fail)
}

type Close = unsafe extern "C" fn(c_int) -> c_int;

/// libc's close.
pub fn close(fd: c_int) -> c_int {
    let next = next!(c"close", Close);
    // SAFETY: a number.
    unsafe { next(fd) }
}
