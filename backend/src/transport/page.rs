//! What outlives the server of a slot's queues: a page of memory that the worker
//! writes and, when it is dead, the broker reads.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use super::counts::{bucket, Class, Counts, Word, WORDS};
use super::ring::{Message, MAX_QUEUE_SIZE};
use super::shared;
use crate::errno::Errno;

/// Bytes: four words, what is counted, an entry for each possible head.
const SIZE: usize = ENTRIES + ENTRY * MAX_QUEUE_SIZE as usize;
/// An entry: address of the reply, and its length plus one; 0 where nothing is pending.
const ENTRY: usize = 16;

const NEXT_AVAILABLE: usize = 0;
const NEXT_USED: usize = 4;
const EVENTS_NEXT_AVAILABLE: usize = 8;
const PLACEMENTS: usize = 12;
const TALLY: usize = 16;
const ENTRIES: usize = TALLY + 8 * WORDS;

/// Shared state of a slot's two queues.
pub struct SlotPage(shared::Words);

impl SlotPage {
    /// A fresh page.
    pub fn create() -> Result<Self, Errno> {
        shared::Words::create("nvguest-slot", SIZE).map(Self)
    }

    /// The page behind `fd`, made by the broker.
    pub fn open(fd: OwnedFd) -> Result<Self, Errno> {
        shared::Words::open(fd, SIZE).map(Self)
    }

    /// A descriptor of the page for the worker.
    pub fn share(&self) -> Result<OwnedFd, Errno> {
        self.0.share()
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        self.0.at(offset)
    }

    fn address(&self, head: u16) -> &AtomicU64 {
        self.0.at(ENTRIES + ENTRY * usize::from(head % MAX_QUEUE_SIZE))
    }

    fn length(&self, head: u16) -> &AtomicU32 {
        self.word(ENTRIES + ENTRY * usize::from(head % MAX_QUEUE_SIZE) + 8)
    }

    /// Position in the available ring that is served next.
    pub fn next_available(&self) -> u16 {
        // CAST: ring positions wrap at 16 bits.
        self.word(NEXT_AVAILABLE).load(Ordering::Acquire) as u16
    }

    /// Position in the used ring that was published and noted last.
    pub fn next_used(&self) -> u16 {
        // CAST: as above.
        self.word(NEXT_USED).load(Ordering::Acquire) as u16
    }

    /// The same of the slot's event queue.
    pub fn events_next_available(&self) -> u16 {
        // CAST: as above.
        self.word(EVENTS_NEXT_AVAILABLE).load(Ordering::Acquire) as u16
    }

    /// Where serving begins: positions as the frontend or the last server left them.
    pub fn begin(&self, next_available: u16, next_used: u16, events_next_available: u16) {
        self.word(NEXT_AVAILABLE).store(next_available.into(), Ordering::Release);
        self.word(NEXT_USED).store(next_used.into(), Ordering::Release);
        self.word(EVENTS_NEXT_AVAILABLE).store(events_next_available.into(), Ordering::Release);
    }

    /// Placements that the whole guest has: the broker's word.
    pub fn placements(&self) -> u32 {
        self.word(PLACEMENTS).load(Ordering::Relaxed)
    }

    /// Tells the worker how many placements the whole guest has.
    pub fn set_placements(&self, count: u32) {
        self.word(PLACEMENTS).store(count, Ordering::Relaxed);
    }

    fn counter(&self, index: usize) -> &AtomicU64 {
        self.0.at(TALLY + 8 * index)
    }

    /// One more of something.
    pub fn count(&self, word: Word) {
        self.counter(word.index()).fetch_add(1, Ordering::Relaxed);
    }

    /// A call of this class was made.
    pub fn count_call(&self, class: Class, took: Duration) {
        let nanos = u64::try_from(took.as_nanos()).unwrap_or(u64::MAX);
        self.counter(Word::Time(class).index()).fetch_add(nanos, Ordering::Relaxed);
        self.count(Word::Took(class, bucket(took)));
    }

    /// All that was counted so far.
    pub fn counts(&self) -> Counts {
        Counts(std::array::from_fn(|index| self.counter(index).load(Ordering::Relaxed)))
    }

    /// Requests that were taken and not answered.
    pub fn in_flight(&self) -> usize {
        (0..MAX_QUEUE_SIZE).filter(|&head| self.length(head).load(Ordering::Relaxed) > 0).count()
    }

    /// Notes how far the event queue has been served.
    pub fn events_taken(&self, next_available: u16) {
        self.word(EVENTS_NEXT_AVAILABLE).store(next_available.into(), Ordering::Release);
    }

    /// Notes that a request was taken.
    pub(super) fn taken(&self, message: &Message, next_available: u16) {
        let (address, length) = message.reply.first().copied().unwrap_or_default();
        self.address(message.head).store(address, Ordering::Relaxed);
        self.length(message.head).store(length.saturating_add(1), Ordering::Release);
        self.word(NEXT_AVAILABLE).store(next_available.into(), Ordering::Release);
    }

    /// Notes that a reply was given.
    pub(super) fn given(&self, head: u16, next_used: u16) {
        self.forget(head);
        self.word(NEXT_USED).store(next_used.into(), Ordering::Release);
    }

    /// Nothing is pending for `head` any more.
    pub(super) fn forget(&self, head: u16) {
        self.length(head).store(0, Ordering::Release);
    }

    /// What was taken and not answered: heads, and where each reply begins.
    pub(super) fn pending(&self) -> Vec<(u16, Option<(u64, u32)>)> {
        (0..MAX_QUEUE_SIZE)
            .filter_map(|head| {
                let length = self.length(head).load(Ordering::Acquire).checked_sub(1)?;
                let address = self.address(head).load(Ordering::Relaxed);
                Some((head, (length > 0).then_some((address, length))))
            })
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn a_worker_cannot_take_the_page_from_under_the_broker() {
        let page = SlotPage::create().unwrap();
        let theirs = File::from(page.share().unwrap());
        for length in [0, 1, 4096, 1 << 20] {
            assert!(theirs.set_len(length).is_err(), "{length}");
        }
        assert_eq!(page.next_available(), 0);
    }
}
