//! What this worker holds of the guest's share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use super::upstream::Upstream;
use crate::errno::Errno;
use crate::limits::{Resource, COUNT};
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};

/// A worker that holds so many times what it needs, and is given beyond that, gives it back.
const IDLE: u64 = 4;

/// What is held of one thing.
#[derive(Default)]
struct Held {
    amount: AtomicU64,
    /// What the broker gave beyond what was asked for, the last time.
    surplus: AtomicU64,
}

impl Held {
    fn covers(&self, needed: u64) -> bool {
        needed <= self.amount.load(Ordering::Acquire)
    }

    /// Whether it is much more than is needed. What was just given never is, or every call
    /// would give it back.
    fn is_idle(&self, needed: u64) -> bool {
        let enough = needed.saturating_add(self.surplus.load(Ordering::Acquire));
        self.amount.load(Ordering::Acquire) > enough.saturating_mul(IDLE)
    }

    fn given(&self, amount: u64, asked: u64) {
        self.surplus.store(amount.saturating_sub(asked), Ordering::Release);
        self.amount.store(amount, Ordering::Release);
    }
}

/// The share of one worker.
pub struct Share {
    upstream: Arc<Upstream>,
    held: [Held; COUNT],
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
        if held.covers(needed) {
            return Ok(());
        }
        let _asking = lock(&self.asking);
        if held.covers(needed) {
            return Ok(());
        }
        self.ask(resource, needed)
    }

    /// `needed` is enough from now on: much more than that goes back to the guest.
    pub fn settle(&self, resource: Resource, needed: u64) {
        let held = &self.held[resource as usize];
        if !held.is_idle(needed) {
            return;
        }
        let _asking = lock(&self.asking);
        if held.is_idle(needed) {
            // Nothing waits for it but the next who need it.
            let _ = self.ask(resource, needed);
        }
    }

    fn ask(&self, resource: Resource, needed: u64) -> Result<(), Errno> {
        let words = [resource as u64, needed, 0, 0];
        let answer = self.upstream.ask(Kind::Hold, Outgoing { words, ..Outgoing::default() })?;
        self.held[resource as usize].given(answer.words[1], needed);
        Ok(())
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_just_given_is_not_given_back() {
        for (needed, amount) in [(0, 256), (5, 261), (1, 65), (100, 356), (7, 7)] {
            let held = Held::default();
            held.given(amount, needed);
            assert!(held.covers(needed) && !held.is_idle(needed), "{amount} for {needed}");
        }
    }

    #[test]
    fn what_is_no_longer_needed_is_given_back() {
        let held = Held::default();
        held.given(10_256, 10_000);
        assert!(held.is_idle(5));
    }
}
