//! The driver that answers: the host's own, or a simulated card.
//!
//! - `facts`: what of the host's driver a guest is to find
//! - `linux`: the real nodes under `/dev`
//! - `sim`: enough of RM, in this process, for every path to run without a card

pub mod facts;
pub mod linux;
pub mod sim;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nvguest_abi::FileKind;

use crate::errno::Errno;
use crate::marshal::scratch::Frame;

/// A device node that the guest has and the host serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Node {
    /// Where it is on the host, e.g. `/dev/nvidia0`.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Its minor number.
    pub minor: u32,
    /// RM's number of the card, for [`FileKind::Gpu`].
    pub gpu_id: u32,
}

/// An open file of the driver.
#[derive(Debug)]
pub struct HostFile {
    /// The file itself. Its number is what other calls name it by, and the key
    /// of its events; a duplicate keeps its clients and their memory alive.
    pub fd: OwnedFd,
    /// Where its readiness shows, if not on `fd` (the simulated card's files).
    pub ready: Option<OwnedFd>,
    /// What it is.
    pub kind: FileKind,
}

impl HostFile {
    /// The number that a parameter names this file by.
    pub fn number(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// What to watch, edge-triggered, for the events of this file.
    pub fn watched(&self) -> BorrowedFd<'_> {
        self.ready.as_ref().unwrap_or(&self.fd).as_fd()
    }
}

/// Memory that a VMM can map: a range of a file.
#[derive(Debug)]
pub struct HostMapping {
    /// A duplicate, so that the range outlives the file it was armed on.
    pub fd: OwnedFd,
    /// Offset of the range in it.
    pub offset: u64,
    /// Whole pages.
    pub length: u64,
}

/// The driver, from the side of one worker.
pub trait Host: Send + Sync {
    /// Opens a node. `flags` are `O_ACCMODE` and `O_NONBLOCK` of the guest's open;
    /// the latter is never set on the file itself, whose poll would then never wake.
    fn open(&self, node: &Node, flags: u32) -> Result<HostFile, Errno>;

    /// Makes one call. The argument is `frame`'s first block; every pointer in it
    /// leads to another block and every descriptor is one of this worker's files.
    /// Returns what the driver's ioctl returned. On an error the blocks hold what
    /// the driver left in them.
    fn ioctl(&self, file: &HostFile, cmd: u32, frame: &mut Frame<'_>) -> Result<i32, Errno>;

    /// The memory that the last `RM_MAP_MEMORY` (or the like) armed on `file`.
    fn mapping(
        &self,
        file: &HostFile,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<HostMapping, Errno>;

    /// Whether events with data wait on `file`: they make every poll report it until they are
    /// taken, and no edge tells of them again. An event without data that is found on the way
    /// counts, and is gone.
    fn pending(&self, file: &HostFile) -> bool {
        let mut fds = [PollFd::new(file.fd.as_fd(), PollFlags::POLLIN | PollFlags::POLLPRI)];
        matches!(poll(&mut fds, PollTimeout::ZERO), Ok(1))
    }

    /// Closes a file. Duplicates that others hold keep what it owns alive.
    fn close(&self, file: HostFile) {
        drop(file);
    }
}
