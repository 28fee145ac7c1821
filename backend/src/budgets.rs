//! What a guest has of the card itself: its memory and its time. Data and pure functions.
#![forbid(unsafe_code)]

use clap::ValueEnum;

/// What the guest takes for its card's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
#[repr(u8)]
pub enum VramMode {
    /// The card's own; allocations beyond the budget fail.
    #[default]
    Limit = 0,
    /// Its budget.
    Profile = 1,
}

/// The budgets that a guest starts with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budgets {
    /// Bytes of the card's memory, [`NO_BUDGET`] for all that there is.
    pub vram: u64,
    /// What it is shown of that.
    pub mode: VramMode,
    /// See [`slice()`].
    pub weight: u32,
}

/// A guest that may allocate what the card has.
pub const NO_BUDGET: u64 = u64::MAX;

/// Allocations up to this size may use the reserve: command buffers, semaphores, a cursor. A
/// desktop whose textures fail to load goes on; one that cannot submit does not.
pub const SMALL: u64 = 1 << 20;

/// The part of a budget that only [`SMALL`] allocations get: less than a hundredth.
pub fn reserve(budget: u64) -> u64 {
    match budget {
        NO_BUDGET => 0,
        budget => budget / 128,
    }
}

/// The weight of a guest of which nothing is said: its programs' time slices are their own.
pub const DEFAULT_WEIGHT: u32 = 10;
/// Weights that there are.
pub const WEIGHTS: std::ops::RangeInclusive<u32> = 1..=100;

/// A program's own slice counts up to here, in µs: what CUDA sets. RM's default is 1024
/// (`kfifoChannelGroupGetDefaultTimeslice_GV100`). A program that asks for more would take its
/// guest more than its weight.
const OWN_MOST: u64 = 2048;
/// Bounds of every slice, in µs: wide enough that all weights differ at RM's default. A group
/// that waits for one other waits 20 ms at most. An H200 kept the ratio of 1, 2 and 4 ms, and
/// served both of 0.25 and 8 ms; beyond those nothing was measured.
const LEAST: u64 = 100;
const MOST: u64 = 20_000;

/// The time slice, in µs, of a channel group whose program asked for `own`.
pub fn slice(own: u64, weight: u32) -> u64 {
    let own = own.min(OWN_MOST);
    (own * u64::from(weight) / u64::from(DEFAULT_WEIGHT)).clamp(LEAST, MOST)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_weight_leaves_a_program_its_slice() {
        for own in [LEAST, 500, 1024, 2048] {
            assert_eq!(slice(own, DEFAULT_WEIGHT), own);
        }
    }

    #[test]
    fn slices_are_as_weights_are() {
        assert_eq!([1, 5, 20, 100].map(|weight| slice(1024, weight)), [102, 512, 2048, 10_240]);
        assert_eq!([5, 20].map(|weight| slice(2048, weight)), [1024, 4096]);
    }

    #[test]
    fn no_slice_is_so_long_or_short_that_a_guest_starves() {
        for weight in WEIGHTS {
            for own in [0, 1, 1024, 2048, u64::MAX] {
                assert!((LEAST..=MOST).contains(&slice(own, weight)), "{own} {weight}");
            }
        }
        assert_eq!(slice(u64::MAX, DEFAULT_WEIGHT), OWN_MOST);
    }

    #[test]
    fn the_reserve_is_less_than_a_hundredth() {
        assert_eq!(reserve(8 << 30), 64 << 20);
        assert!(reserve(u64::MAX - 1) < u64::MAX / 100);
        assert_eq!(reserve(NO_BUDGET), 0);
    }
}
