//! How often something may happen, for all processes of a guest together.
//!
//! A page that broker and workers share holds, for each thing, the moment at which all
//! that was done so far would have been due (the generic cell rate algorithm: one word,
//! no lock, nothing to give back when a process dies).
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::time::{clock_gettime, ClockId};

use crate::errno::Errno;
use crate::transport::shared::Words;

const SIZE: usize = 4096;
const SECOND: u64 = 1_000_000_000;

/// What has a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum What {
    /// Lines of log.
    Lines = 0,
    /// `FIFO_DISABLE_CHANNELS`.
    Disables = 1,
}

/// The rates of one guest, or of one process.
pub struct Rates(Words);

impl Rates {
    /// Nothing was done yet. For all processes of a guest to share.
    pub fn create() -> Result<Self, Errno> {
        Words::create("nvguest-rates", SIZE).map(Self)
    }

    /// The same for one process, which shares it with nobody. A confined worker may not seal.
    pub fn own() -> Result<Self, Errno> {
        let fd = memfd_create(c"nvguest-rates", MFdFlags::MFD_CLOEXEC)?;
        nix::unistd::ftruncate(&fd, SIZE as i64)?;
        Self::open(fd)
    }

    /// The page that another process made.
    pub fn open(fd: OwnedFd) -> Result<Self, Errno> {
        Words::open(fd, SIZE).map(Self)
    }

    /// A descriptor of the page for another process.
    pub fn share(&self) -> Result<OwnedFd, Errno> {
        self.0.share()
    }

    /// One more of it, at `rate` a second and up to `burst` at once; how long to wait for it
    /// if it is too early.
    pub fn take(&self, what: What, rate: u64, burst: u64) -> Result<(), Duration> {
        self.take_at(what, rate, burst, now())
    }

    fn take_at(&self, what: What, rate: u64, burst: u64, now: u64) -> Result<(), Duration> {
        let interval = SECOND / rate.max(1);
        let ahead = interval.saturating_mul(burst.max(1));
        let mut early = 0;
        let taken = self.word(what).fetch_update(Ordering::AcqRel, Ordering::Acquire, |due| {
            let next = due.max(now).saturating_add(interval);
            early = next.saturating_sub(now.saturating_add(ahead));
            (early == 0).then_some(next)
        });
        taken.map(drop).map_err(|_| Duration::from_nanos(early))
    }

    fn word(&self, what: What) -> &AtomicU64 {
        self.0.at(8 * what as usize)
    }
}

fn now() -> u64 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from).unwrap_or_default();
    u64::try_from(now.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_worker_cannot_take_the_page_from_under_the_others() {
        let rates = Rates::create().unwrap();
        let theirs = File::from(rates.share().unwrap());
        assert!(theirs.set_len(0).is_err() && theirs.set_len(1 << 20).is_err());
        assert_eq!(rates.take(What::Lines, 1, 1), Ok(()));
    }

    #[test]
    fn a_burst_is_followed_by_one_at_a_time() {
        let rates = Rates::create().unwrap();
        let take = |now| rates.take_at(What::Lines, 10, 3, now);
        let start = 5 * SECOND;
        assert_eq!([take(start), take(start), take(start)], [Ok(()); 3]);
        assert_eq!(take(start), Err(Duration::from_millis(100)));
        assert_eq!(take(start + SECOND / 10), Ok(()));
        assert!(take(start + SECOND / 10).is_err());
    }

    #[test]
    fn processes_that_share_the_page_share_the_rate() {
        let one = Rates::create().unwrap();
        let other = Rates::open(one.share().unwrap()).unwrap();
        assert_eq!(one.take_at(What::Disables, 1, 1, SECOND), Ok(()));
        assert!(other.take_at(What::Disables, 1, 1, SECOND).is_err());
        assert_eq!(other.take_at(What::Lines, 1, 1, SECOND), Ok(()));
    }
}
