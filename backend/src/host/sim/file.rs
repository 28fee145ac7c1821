//! Open files of the simulated driver, and the events that make them readable.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::eventfd::{EfdFlags, EventFd};
use nvguest_abi::FileKind;

use super::layout::UnixEvent;
use super::memory::Source;

/// One open file.
#[derive(Debug)]
pub struct SimFile {
    /// Its number, of all files of the cards.
    pub number: u64,
    /// The card whose node it is; none: the control node.
    pub card: Option<u32>,
    state: Mutex<FileState>,
    /// Written at every event; whoever watches it edge-triggered is woken by each.
    ready: EventFd,
}

/// What changes of an open file.
#[derive(Debug, Default)]
pub struct FileState {
    /// The control file whose clients it joined.
    pub joined: Option<u64>,
    /// Whether it keeps cards in use.
    pub attached: bool,
    /// What mmap would map; never cleared before the close, as in the driver.
    pub armed: Option<Armed>,
    /// Events with data that nobody has taken.
    queue: VecDeque<UnixEvent>,
}

/// Memory that a file maps.
#[derive(Clone, Debug)]
pub struct Armed {
    /// Where it is.
    pub source: Source,
    /// From where in it, whole pages.
    pub offset: u64,
    /// Whole pages.
    pub length: u64,
    /// Whether it may be mapped for writing.
    pub writable: bool,
}

impl SimFile {
    /// Makes one, and the descriptor where its readiness shows.
    pub fn new(number: u64, card: Option<u32>) -> io::Result<(Self, OwnedFd)> {
        let ready = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?;
        let watched = ready.as_fd().try_clone_to_owned()?;
        Ok((Self { number, card, state: Mutex::default(), ready }, watched))
    }

    /// What it is.
    pub fn kind(&self) -> FileKind {
        self.card.map_or(FileKind::Ctl, |_| FileKind::Gpu)
    }

    /// What changes of it.
    pub fn state(&self) -> MutexGuard<'_, FileState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An event without data (`nv_post_event`): the next poll reports it.
    pub fn post(&self) {
        self.wake();
    }

    /// An event with data: polls report it until it is taken.
    pub fn post_data(&self, event: UnixEvent) {
        self.state().queue.push_back(event);
        self.wake();
    }

    /// Takes the oldest event with data, and tells whether more wait.
    pub fn take(&self) -> Option<(UnixEvent, bool)> {
        let mut state = self.state();
        let event = state.queue.pop_front()?;
        if state.queue.is_empty() {
            // Nothing waits: a level-triggered look must not find the file readable.
            let _ = self.ready.read();
        }
        Some((event, !state.queue.is_empty()))
    }

    /// Whether events with data wait.
    pub fn has_data(&self) -> bool {
        !self.state().queue.is_empty()
    }

    fn wake(&self) {
        if let Err(error) = self.ready.write(1) {
            tracing::error!(%error, "simulated card: an event could not be told");
        }
    }
}
