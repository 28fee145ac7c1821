//! What can go wrong on the guest's side.

use std::io;
use std::time::Duration;

/// A request, or the device, failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The backend answered with this errno.
    #[error("the backend answered: {}", io::Error::from_raw_os_error(*.0))]
    Errno(i32),
    /// Nothing came.
    #[error("{what} was not answered within {patience:?}")]
    Silence {
        /// What was asked.
        what: &'static str,
        /// How long was waited.
        patience: Duration,
    },
    /// The backend's answer is not one.
    #[error("the answer to {0} is malformed")]
    Malformed(&'static str),
    /// Setting the device up failed.
    #[error("setting up the device failed: {0}")]
    Vhost(#[from] vhost::Error),
    /// The system failed.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// See [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The errno that a guest program would see.
    pub fn errno(&self) -> i32 {
        match self {
            Self::Errno(errno) => *errno,
            Self::Io(error) => error.raw_os_error().unwrap_or(nix::libc::EIO),
            _ => nix::libc::EIO,
        }
    }
}

impl From<nix::Error> for Error {
    fn from(error: nix::Error) -> Self {
        Self::Io(error.into())
    }
}
