//! Where a broker listens: a socket of its own, or one that it was handed.

use std::fs;
use std::io;
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;

use anyhow::{bail, Context, Result};
use nix::fcntl::{fcntl, FcntlArg};
use nix::sys::stat::{umask, Mode};

/// A socket that only its owner can use. What a killed process left there is replaced;
/// a socket that is served is refused.
pub fn bind(path: &Path) -> Result<UnixListener> {
    // Asked in a way that cannot connect: a backend serves one connection, and this is none.
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).ok();
        }
        Err(error) if error.raw_os_error() != Some(nix::libc::EPROTOTYPE) => {}
        _ => bail!("{} is served by another process", path.display()),
    }
    umask(Mode::from_bits_truncate(0o077));
    UnixListener::bind(path).with_context(|| format!("Listening on {} failed", path.display()))
}

/// A listening socket that whoever started us left open, as systemd does.
pub fn inherited(fd: RawFd) -> Result<UnixListener> {
    // SAFETY: only looked at; a number that is not open is refused right here.
    let seen = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl(seen, FcntlArg::F_GETFD)
        .with_context(|| format!("--fd {fd} is not an open descriptor"))?;
    // SAFETY: the caller gave us this descriptor, and nothing else here uses it.
    Ok(UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}
