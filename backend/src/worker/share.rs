//! What this worker holds of the guest's share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::upstream::Upstream;
use crate::errno::Errno;
use crate::limits::{Resource, COUNT};
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};

/// A worker that holds so many times what it needs gives the rest back.
const IDLE: u64 = 4;

/// The share of one worker.
pub struct Share {
    upstream: Arc<Upstream>,
    held: [AtomicU64; COUNT],
    /// Whoever changes `held` talks to the broker meanwhile.
    asking: Mutex<()>,
    requests: AtomicU64,
    bytes: AtomicU64,
}

impl Share {
    /// Nothing is held.
    pub fn new(upstream: Arc<Upstream>) -> Self {
        let held = Default::default();
        let (requests, bytes) = Default::default();
        Self { upstream, held, asking: Mutex::default(), requests, bytes }
    }

    /// Makes the share cover `needed`; an error if neither process nor guest has so much.
    pub fn cover(&self, resource: Resource, needed: u64) -> Result<(), Errno> {
        let held = &self.held[resource as usize];
        if needed <= held.load(Ordering::Acquire) {
            return Ok(());
        }
        let _asking = lock(&self.asking);
        if needed <= held.load(Ordering::Acquire) {
            return Ok(());
        }
        let words = [resource as u64, needed, 0, 0];
        let answer = self.upstream.ask(Kind::Hold, Outgoing { words, ..Outgoing::default() })?;
        held.store(answer.words[1], Ordering::Release);
        Ok(())
    }

    /// `needed` is enough from now on: much more than that goes back to the guest.
    pub fn settle(&self, resource: Resource, needed: u64) {
        let held = &self.held[resource as usize];
        let idle = |held: u64| held > needed.saturating_mul(IDLE) && held > needed + 64;
        if !idle(held.load(Ordering::Acquire)) {
            return;
        }
        let _asking = lock(&self.asking);
        if idle(held.load(Ordering::Acquire)) {
            let words = [resource as u64, needed, 0, 0];
            let out = Outgoing { words, ..Outgoing::default() };
            // Nothing waits for it but the next who need it.
            if let Ok(answer) = self.upstream.ask(Kind::Hold, out) {
                held.store(answer.words[1], Ordering::Release);
            }
        }
    }

    /// A request of so many bytes was taken.
    pub fn take(&self, bytes: usize) -> Result<(), Errno> {
        let bytes = bytes as u64;
        let requests = self.requests.fetch_add(1, Ordering::AcqRel) + 1;
        let all = self.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.cover(Resource::Requests, requests)?;
        self.cover(Resource::Bytes, all)
    }

    /// It was answered, or refused by [`Share::take`].
    pub fn give(&self, bytes: usize) {
        self.requests.fetch_sub(1, Ordering::AcqRel);
        self.bytes.fetch_sub(bytes as u64, Ordering::AcqRel);
    }
}
