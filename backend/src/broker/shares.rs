//! Who holds how much of what the guest has.
//!
//! A worker counts for itself and asks here when it needs more than it holds; so it asks
//! rarely, and what a dead worker held is known exactly.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use crate::errno::Errno;
use crate::limits::{Live, Resource, COUNT, TABLE};
use crate::sync::lock;

/// A worker that needs more is given such a part of the guest's share beyond that. All
/// workers together keep no more than a quarter of it unused.
const PART: u64 = 1024;

/// The shares of all workers.
pub struct Shares {
    limits: Arc<Live>,
    held: Mutex<BTreeMap<u16, [u64; COUNT]>>,
}

impl Shares {
    /// Nobody holds anything.
    pub fn new(limits: Arc<Live>) -> Self {
        Self { limits, held: Mutex::default() }
    }

    /// Lets a worker hold `wanted` of something, and says how much it now may.
    pub fn hold(&self, worker: u16, resource: Resource, wanted: u64) -> Result<u64, Errno> {
        let mut held = lock(&self.held);
        let index = resource as usize;
        let others = held.iter().filter(|(&number, _)| number != worker);
        let others: u64 = others.map(|(_, held)| held[index]).sum();
        let limits = self.limits.now();
        let guest = limits.guest(resource);
        let most = limits.process(resource).min(guest.saturating_sub(others));
        if wanted > most {
            return Err(Errno::ENOMEM);
        }
        let granted = wanted.saturating_add(guest / PART).min(most);
        held.entry(worker).or_default()[index] = granted;
        Ok(granted)
    }

    /// A worker is gone, and what it held is free.
    pub fn forget(&self, worker: u16) {
        lock(&self.held).remove(&worker);
    }

    /// What workers hold of each resource, by its word.
    pub fn usage(&self) -> impl Iterator<Item = (&'static str, u64, u64)> + '_ {
        let held = lock(&self.held);
        let sums: [u64; COUNT] = std::array::from_fn(|i| held.values().map(|held| held[i]).sum());
        let limits = self.limits.now();
        TABLE
            .iter()
            .map(move |row| (row.key, sums[row.resource as usize], limits.guest(row.resource)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shares(limits: &str) -> Shares {
        Shares::new(Live::new(limits.parse().unwrap()))
    }

    #[test]
    fn many_processes_have_no_more_than_the_guest() {
        let shares = shares("files=10,process-files=6");
        assert_eq!(shares.hold(1, Resource::Files, 6), Ok(6));
        assert_eq!(shares.hold(1, Resource::Files, 7), Err(Errno::ENOMEM));
        assert_eq!(shares.hold(2, Resource::Files, 4), Ok(4));
        assert_eq!(shares.hold(3, Resource::Files, 1), Err(Errno::ENOMEM));
        shares.forget(1);
        assert_eq!(shares.hold(3, Resource::Files, 6), Ok(6));
    }

    #[test]
    fn a_worker_is_given_some_more_than_it_needs_while_there_is() {
        let shares = shares("objects=10240,process-objects=10240");
        assert_eq!(shares.hold(1, Resource::Objects, 1), Ok(11));
        assert_eq!(shares.hold(2, Resource::Objects, 10225), Ok(10229));
        assert_eq!(shares.hold(1, Resource::Objects, 5), Ok(11));
    }
}
