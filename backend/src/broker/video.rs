//! How much of the card's memory each worker's objects keep, and the guest's budget of it.
//!
//! Workers say what they allocate and what RM has freed, in bytes. Amounts are relative, so
//! nobody waits for another's, and what a dead worker held is known exactly.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::Mutex;

use crate::budgets::{reserve, NO_BUDGET, SMALL};
use crate::errno::Errno;
use crate::sync::lock;

/// The guest's account.
pub struct Video {
    state: Mutex<State>,
}

struct State {
    budget: u64,
    held: BTreeMap<u16, u64>,
}

/// What the guest has, and what it may have, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All workers together.
    pub used: u64,
    /// [`NO_BUDGET`] if there is none.
    pub budget: u64,
    /// The part of it that is kept for small allocations.
    pub reserve: u64,
}

impl Video {
    /// Nobody holds anything.
    pub fn new(budget: u64) -> Self {
        Self { state: Mutex::new(State { budget, held: BTreeMap::new() }) }
    }

    /// A worker is about to allocate so much, or, with `made`, has it already: that is counted
    /// whatever the budget is. ENOMEM if it is too much.
    pub fn charge(&self, worker: u16, bytes: u64, made: bool) -> Result<Usage, Errno> {
        let mut state = lock(&self.state);
        let usage = state.usage();
        let keep = if bytes <= SMALL { 0 } else { usage.reserve };
        let most = usage.budget - keep;
        if bytes > 0 && !made && usage.used.saturating_add(bytes) > most {
            return Err(Errno::ENOMEM);
        }
        let held = state.held.entry(worker).or_default();
        *held = held.saturating_add(bytes);
        Ok(state.usage())
    }

    /// RM has freed so much of a worker's.
    pub fn credit(&self, worker: u16, bytes: u64) {
        if let Some(held) = lock(&self.state).held.get_mut(&worker) {
            *held = held.saturating_sub(bytes);
        }
    }

    /// A worker is gone, and RM has freed what it held.
    pub fn forget(&self, worker: u16) {
        lock(&self.state).held.remove(&worker);
    }

    /// Another budget. What is allocated stays; more is refused until it is less.
    pub fn set_budget(&self, bytes: u64) {
        lock(&self.state).budget = bytes;
    }

    /// What there is.
    pub fn usage(&self) -> Usage {
        lock(&self.state).usage()
    }
}

impl State {
    fn usage(&self) -> Usage {
        let used = self.held.values().fold(0, |sum: u64, &held| sum.saturating_add(held));
        Usage { used, budget: self.budget, reserve: reserve(self.budget) }
    }
}

impl Usage {
    /// The budget, if there is one.
    pub fn limit(&self) -> Option<u64> {
        (self.budget != NO_BUDGET).then_some(self.budget)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn many_processes_have_no_more_than_the_guest() {
        let video = Video::new(128 * MIB);
        assert_eq!(video.charge(1, 100 * MIB, false).unwrap().used, 100 * MIB);
        assert_eq!(video.charge(2, 28 * MIB, false), Err(Errno::ENOMEM));
        assert_eq!(video.charge(2, 27 * MIB, false).unwrap().used, 127 * MIB);
        video.forget(1);
        assert_eq!(video.usage().used, 27 * MIB);
        video.credit(2, 27 * MIB);
        assert_eq!(video.usage().used, 0);
    }

    #[test]
    fn the_reserve_is_for_small_allocations() {
        let video = Video::new(256 * MIB);
        video.charge(1, 254 * MIB, false).unwrap();
        assert_eq!(video.charge(1, MIB + 1, false), Err(Errno::ENOMEM));
        video.charge(1, MIB, false).unwrap();
        video.charge(1, MIB, false).unwrap();
        assert_eq!(video.charge(1, 1, false), Err(Errno::ENOMEM));
        assert_eq!(video.charge(1, 0, false).unwrap().used, 256 * MIB);
    }

    #[test]
    fn a_smaller_budget_takes_nothing_away() {
        let video = Video::new(NO_BUDGET);
        assert_eq!(video.usage().limit(), None);
        video.charge(1, 100 * MIB, false).unwrap();
        video.set_budget(50 * MIB);
        assert_eq!(video.charge(1, 1, false), Err(Errno::ENOMEM));
        video.credit(1, 60 * MIB);
        video.charge(1, MIB, false).unwrap();
    }

    #[test]
    fn no_amount_that_a_worker_says_overflows_the_account() {
        let video = Video::new(NO_BUDGET);
        video.charge(1, u64::MAX, true).unwrap();
        video.charge(2, u64::MAX, true).unwrap();
        assert_eq!(video.usage().used, u64::MAX);
        video.credit(1, u64::MAX);
        video.credit(1, u64::MAX);
        video.credit(7, u64::MAX);
        video.charge(1, 5, true).unwrap();
    }
}
