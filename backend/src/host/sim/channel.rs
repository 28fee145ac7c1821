//! Channels as far as their doorbell: work that is submitted is done at once.
//!
//! A program puts the end of its work in GP_PUT of the channel's USERD and writes the channel's
//! token to the doorbell register. The card then moves GP_GET to GP_PUT in every channel and
//! fires the events of finished work. What the work says is not read. A thread looks at the
//! doorbell as long as a channel exists, because memory that a guest writes tells nobody.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::Duration;

use super::memory::{Memory, DOORBELL};
use super::Inner;
use crate::transport::shared::sealed_file;

/// The register that takes a token (`NVC361_NOTIFY_CHANNEL_PENDING`).
const PENDING: u64 = 0x90;
/// Offsets in USERD (`Nvc36fControl_struct`).
const GP_GET: u64 = 0x88;
const GP_PUT: u64 = 0x8c;
/// How often the thread looks.
const LOOK: Duration = Duration::from_micros(100);

/// Where a channel's USERD is.
#[derive(Debug)]
struct Userd {
    memory: Arc<Memory>,
    offset: u64,
}

/// The channels that one worker has of one card, and their doorbell.
#[derive(Debug)]
pub struct Channels {
    card: u32,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    page: Option<Arc<Memory>>,
    /// By token. Tokens begin at 1: an untouched register reads 0.
    channels: HashMap<u32, Option<Userd>>,
    last: u32,
    looking: bool,
}

impl Channels {
    /// None yet.
    pub fn of(card: u32) -> Self {
        Self { card, state: Mutex::default() }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The doorbell page; all objects of its class share one, as on a card.
    pub fn page(&self) -> io::Result<Arc<Memory>> {
        let mut state = self.state();
        if let Some(page) = &state.page {
            return Ok(Arc::clone(page));
        }
        let file = Arc::new(sealed_file("nvguest-doorbell", DOORBELL)?);
        let page = Arc::new(Memory::doorbell(self.card, file));
        state.page = Some(Arc::clone(&page));
        Ok(page)
    }

    /// A new channel; gives its token.
    pub fn add(&self, inner: &Arc<Inner>, userd: Option<(Arc<Memory>, u64)>) -> io::Result<u32> {
        self.page()?;
        let mut state = self.state();
        state.last += 1;
        let token = state.last;
        state.channels.insert(token, userd.map(|(memory, offset)| Userd { memory, offset }));
        if !state.looking {
            let (inner, card) = (Arc::downgrade(inner), self.card);
            thread::Builder::new().name("sim-doorbell".into()).spawn(move || look(&inner, card))?;
            state.looking = true;
        }
        Ok(token)
    }

    /// A channel is gone.
    pub fn remove(&self, token: u32) {
        self.state().channels.remove(&token);
    }

    /// Does what was rung for; tells whether the thread goes on.
    fn serve(&self, inner: &Inner) -> io::Result<bool> {
        let mut state = self.state();
        if state.channels.is_empty() {
            state.looking = false;
            return Ok(false);
        }
        let Some(page) = &state.page else { return Ok(true) };
        if page.read_u32(PENDING)? == 0 {
            return Ok(true);
        }
        // Cleared before the channels are looked at: who rings later is seen at the next look.
        page.write_u32(PENDING, 0)?;
        let mut done = false;
        for userd in state.channels.values().flatten() {
            let put = userd.memory.read_u32(userd.offset + GP_PUT)?;
            if userd.memory.read_u32(userd.offset + GP_GET)? != put {
                userd.memory.write_u32(userd.offset + GP_GET, put)?;
                done = true;
            }
        }
        drop(state);
        if done {
            inner.events().notify_work(self.card, 0);
        }
        Ok(true)
    }
}

fn look(inner: &Weak<Inner>, card: u32) {
    while let Some(inner) = inner.upgrade() {
        let Some(channels) = inner.channels(card) else { return };
        match channels.serve(&inner) {
            Ok(true) => (),
            Ok(false) => return,
            Err(error) => tracing::error!(%error, "simulated card: a doorbell could not be served"),
        }
        drop(inner);
        thread::sleep(LOOK);
    }
}
