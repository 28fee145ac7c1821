//! A Linux error number as the guest will see it.

use std::fmt;
use std::io;

/// A positive Linux errno, never 0: the `status` of a failed reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// The caller's buffer or pointer does not reach what the call needs.
    pub const EFAULT: Self = Self(nix::libc::EFAULT);
    /// The request is malformed, or the driver would call it so.
    pub const EINVAL: Self = Self(nix::libc::EINVAL);
    /// No such file, or not of this process.
    pub const EBADF: Self = Self(nix::libc::EBADF);
    /// The worker behind the file is gone.
    pub const ENODEV: Self = Self(nix::libc::ENODEV);
    /// The node does not exist for this guest.
    pub const ENXIO: Self = Self(nix::libc::ENXIO);
    /// A limit of memory or window.
    pub const ENOMEM: Self = Self(nix::libc::ENOMEM);
    /// A limit of files.
    pub const EMFILE: Self = Self(nix::libc::EMFILE);
    /// The node knows no ioctls of this type.
    pub const ENOTTY: Self = Self(nix::libc::ENOTTY);
    /// The message is unknown, or came before HELLO.
    pub const EPROTO: Self = Self(nix::libc::EPROTO);
    /// The reply does not fit in what the guest gave.
    pub const EMSGSIZE: Self = Self(nix::libc::EMSGSIZE);
    /// Try again: a limit that passes.
    pub const EAGAIN: Self = Self(nix::libc::EAGAIN);
    /// Something on the host failed that the guest has no word for.
    pub const EIO: Self = Self(nix::libc::EIO);
    /// Already so.
    pub const EBUSY: Self = Self(nix::libc::EBUSY);

    /// The number on the wire.
    pub fn status(self) -> u32 {
        self.0.unsigned_abs()
    }

    /// Of the call that just failed in this thread.
    pub fn last() -> Self {
        io::Error::last_os_error().into()
    }
}

impl fmt::Display for Errno {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        io::Error::from_raw_os_error(self.0).fmt(f)
    }
}

impl std::error::Error for Errno {}

impl From<io::Error> for Errno {
    fn from(error: io::Error) -> Self {
        Self(error.raw_os_error().unwrap_or(nix::libc::EIO))
    }
}

impl From<nix::Error> for Errno {
    fn from(error: nix::Error) -> Self {
        Self(error as i32)
    }
}
