//! What is counted of requests: their number, failures and latency, by type and class.
//!
//! A worker counts in the page of its slot, a word for each thing, so that its counts
//! outlive it: the broker adds those of a dead worker to the guest's.
#![forbid(unsafe_code)]

use std::time::Duration;

use crate::wire::Kind;

/// What a call is for, as far as its latency goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Class {
    /// `RM_CONTROL`.
    Control,
    /// Whatever makes an object or memory.
    Alloc,
    /// `RM_FREE`.
    Free,
    /// `RM_MAP_MEMORY`, and placing it in the window.
    Map,
    /// The reverse.
    Unmap,
    /// Opening a file.
    Open,
    /// Closing one.
    Close,
    /// Asking to be told of readiness.
    Arm,
    /// Every other ioctl.
    Other,
}

impl Class {
    /// Every class, in the order of its number.
    pub const ALL: [Self; 9] = [
        Self::Control,
        Self::Alloc,
        Self::Free,
        Self::Map,
        Self::Unmap,
        Self::Open,
        Self::Close,
        Self::Arm,
        Self::Other,
    ];

    /// Its name in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Alloc => "alloc",
            Self::Free => "free",
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::Open => "open",
            Self::Close => "close",
            Self::Arm => "arm",
            Self::Other => "other",
        }
    }
}

/// Buckets of a latency: up to 1 µs, 2 µs, 4 µs and so on to 2^20 µs, and all beyond.
pub const BUCKETS: usize = 22;

/// The bucket of a latency.
pub fn bucket(took: Duration) -> usize {
    let us = took.as_nanos().div_ceil(1000).saturating_sub(1);
    let us = u64::try_from(us).unwrap_or(u64::MAX);
    // CAST: at most 64.
    let doubled = (u64::BITS - us.leading_zeros()) as usize;
    doubled.min(BUCKETS - 1)
}

/// Upper bound of a bucket in seconds; infinite for the last.
pub fn bound(bucket: usize) -> f64 {
    if bucket + 1 >= BUCKETS {
        return f64::INFINITY;
    }
    // A power of two has an exact f64.
    f64::from(1u32 << bucket) / 1e6
}

const KINDS: usize = Kind::ALL.len();
const CLASSES: usize = Class::ALL.len();
/// Words that are counted.
pub const WORDS: usize = 3 + 2 * KINDS + CLASSES * (1 + BUCKETS);

/// A thing that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Word {
    /// Event records that were sent.
    Event,
    /// Times that a server slept and was woken.
    Wake,
    /// Calls that the driver answered with a status other than OK.
    Status,
    /// Requests of a type that were served.
    Request(Kind),
    /// Requests of a type that were answered with an errno.
    Error(Kind),
    /// Nanoseconds that the calls of a class took.
    Time(Class),
    /// Calls of a class that took as long as a bucket says.
    Took(Class, usize),
}

impl Word {
    /// Its place.
    pub fn index(self) -> usize {
        let kind = |kind: Kind| kind as usize - 1;
        match self {
            Self::Event => 0,
            Self::Wake => 1,
            Self::Status => 2,
            Self::Request(of) => 3 + kind(of),
            Self::Error(of) => 3 + KINDS + kind(of),
            Self::Time(class) => 3 + 2 * KINDS + class as usize,
            Self::Took(class, bucket) => {
                let at = class as usize * BUCKETS + bucket.min(BUCKETS - 1);
                3 + 2 * KINDS + CLASSES + at
            }
        }
    }
}

/// All counts, as they were at a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Counts(pub [u64; WORDS]);

impl Default for Counts {
    fn default() -> Self {
        Self([0; WORDS])
    }
}

impl Counts {
    /// One of them.
    pub fn get(&self, word: Word) -> u64 {
        self.0[word.index()]
    }

    /// Adds those of another. A worker wrote them: it may have written anything.
    pub fn add(&mut self, other: &Self) {
        for (word, more) in self.0.iter_mut().zip(&other.0) {
            *word = word.saturating_add(*more);
        }
    }

    /// The calls of a class, by bucket.
    pub fn latency(&self, class: Class) -> [u64; BUCKETS] {
        std::array::from_fn(|bucket| self.get(Word::Took(class, bucket)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_word_has_a_place_of_its_own() {
        let mut words = vec![Word::Event, Word::Wake, Word::Status];
        words.extend(Kind::ALL.into_iter().flat_map(|k| [Word::Request(k), Word::Error(k)]));
        for class in Class::ALL {
            words.push(Word::Time(class));
            words.extend((0..BUCKETS).map(|bucket| Word::Took(class, bucket)));
        }
        let mut places: Vec<usize> = words.into_iter().map(Word::index).collect();
        places.sort_unstable();
        assert_eq!(places, (0..WORDS).collect::<Vec<_>>());
    }

    #[test]
    fn a_latency_is_in_the_first_bucket_whose_bound_it_does_not_exceed() {
        for nanos in [0, 1, 999, 1000, 1001, 2000, 2001, 1_048_576_000, 1_048_576_001, u64::MAX] {
            let took = Duration::from_nanos(nanos);
            let at = bucket(took);
            assert!(took.as_secs_f64() <= bound(at), "{nanos} in {at}");
            assert!(at == 0 || took.as_secs_f64() > bound(at - 1), "{nanos} in {at}");
        }
    }

    #[test]
    fn what_a_worker_made_up_does_not_overflow() {
        let mut sum = Counts([1; WORDS]);
        sum.add(&Counts([u64::MAX; WORDS]));
        assert_eq!(sum.get(Word::Wake), u64::MAX);
    }
}
