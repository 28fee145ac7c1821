//! The calls of a guest as they are served, while an admin looks: a ring of records in memory
//! that broker and workers share.
//!
//! A worker looks at one word; if that is set and the call is wanted, it writes a record. The
//! ring is as large as it is: what the broker does not read in time is overwritten, and counted
//! as lost. The broker believes nothing in it: it copies a record once, looks at no more of them
//! than there is room for, and waits for none.
#![forbid(unsafe_code)]

use std::os::fd::OwnedFd;
use std::sync::atomic::{fence, AtomicU64, Ordering};
use std::time::Duration;

use super::shared;
use crate::errno::Errno;

/// Records that the ring holds.
pub const RECORDS: u64 = 8192;
/// 64-bit words of a record, the first of which says which it is.
const WORDS: usize = 8;

const ON: usize = 0;
const SLOW: usize = 8;
const ERRORS: usize = 16;
const NEXT: usize = 24;
const RING: usize = 64;
const SIZE: usize = RING + RECORDS as usize * WORDS * 8;

/// Which calls an admin wants to see; all of them where neither is said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Those that took so many nanoseconds.
    pub slow_ns: Option<u64>,
    /// Those that failed, by errno or by RM's status.
    pub errors: bool,
}

/// A call that was served.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// When it was over, in ns since 1970.
    pub at_ns: u64,
    /// How long it took.
    pub took_ns: u64,
    /// The process in the guest.
    pub tgid: u32,
    /// `wire::Kind`.
    pub kind: u8,
    /// What the file is: `FileKind`; [`Record::NO_FILE`] for none.
    pub file: u8,
    /// `policy::What::to_parts`, of an ioctl.
    pub what: Option<(u8, u32)>,
    /// The errno that it was answered with, or 0.
    pub errno: u32,
    /// RM's status, if it has one.
    pub status: Option<u32>,
}

impl Record {
    /// What `file` says of a request that concerns none.
    pub const NO_FILE: u8 = u8::MAX;
    const HAS_WHAT: u64 = 1;
    const HAS_STATUS: u64 = 2;

    /// Whether it failed, by errno or by RM's status.
    pub fn failed(&self) -> bool {
        self.errno != 0 || self.status.is_some_and(|status| status != 0)
    }

    fn to_words(self) -> [u64; WORDS - 1] {
        let [low, high] = [0, 32].map(|shift| move |word: u32| u64::from(word) << shift);
        let (part, number) = self.what.unwrap_or_default();
        let has = |is, bit| if is { bit } else { 0 };
        let flags = has(self.what.is_some(), Self::HAS_WHAT);
        let flags = flags | has(self.status.is_some(), Self::HAS_STATUS);
        [
            self.at_ns,
            self.took_ns,
            low(self.tgid) | u64::from(self.kind) << 32 | u64::from(self.file) << 40,
            low(number) | high(u32::from(part)),
            low(self.errno) | high(self.status.unwrap_or(0)),
            flags,
            0,
        ]
    }

    fn from_words(words: [u64; WORDS - 1]) -> Self {
        let [at_ns, took_ns, who, what, outcome, flags, _] = words;
        // CAST: the parts of a word, as they were put together.
        let (low, high) = (|word: u64| word as u32, |word: u64| (word >> 32) as u32);
        let has = |bit| flags & bit != 0;
        Self {
            at_ns,
            took_ns,
            tgid: low(who),
            kind: (who >> 32) as u8,
            file: (who >> 40) as u8,
            what: has(Self::HAS_WHAT).then_some((high(what) as u8, low(what))),
            errno: low(outcome),
            status: has(Self::HAS_STATUS).then_some(high(outcome)),
        }
    }
}

/// The ring of one guest.
pub struct Trace(shared::Words);

impl Trace {
    /// Nobody looks. Memory is taken when somebody does.
    pub fn create() -> Result<Self, Errno> {
        shared::Words::create("nvguest-trace", SIZE).map(Self)
    }

    /// The ring that another process made.
    pub fn open(fd: OwnedFd) -> Result<Self, Errno> {
        shared::Words::open(fd, SIZE).map(Self)
    }

    /// A descriptor of it for another process.
    pub fn share(&self) -> Result<OwnedFd, Errno> {
        self.0.share()
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        self.0.at(offset)
    }

    fn record(&self, number: u64, word: usize) -> &AtomicU64 {
        // CAST: below RECORDS.
        self.word(RING + 8 * ((number % RECORDS) as usize * WORDS + word))
    }

    /// Whether somebody looks: all that a call costs otherwise.
    pub fn is_on(&self) -> bool {
        self.word(ON).load(Ordering::Relaxed) != 0
    }

    /// Lets workers write what is wanted, or nothing any more.
    pub fn set(&self, wanted: Option<Wanted>) {
        let Wanted { slow_ns, errors } = wanted.unwrap_or_default();
        self.word(SLOW).store(slow_ns.unwrap_or(u64::MAX), Ordering::Relaxed);
        self.word(ERRORS).store(errors.into(), Ordering::Relaxed);
        self.word(ON).store(wanted.is_some().into(), Ordering::Release);
    }

    /// Writes a call down, if it is wanted.
    pub fn note(&self, record: &Record) {
        let slow = self.word(SLOW).load(Ordering::Relaxed);
        let errors = self.word(ERRORS).load(Ordering::Relaxed) != 0;
        let all = slow == u64::MAX && !errors;
        if all || record.took_ns >= slow || errors && record.failed() {
            self.write(record);
        }
    }

    fn write(&self, record: &Record) {
        let number = self.word(NEXT).fetch_add(1, Ordering::Relaxed);
        let state = self.record(number, 0);
        state.store(begun(number), Ordering::Relaxed);
        // Who reads a word of it sees that it is being written.
        fence(Ordering::Release);
        for (word, value) in record.to_words().into_iter().enumerate() {
            self.record(number, word + 1).store(value, Ordering::Relaxed);
        }
        state.store(done(number), Ordering::Release);
    }

    /// The record with this number, if it is whole and still there.
    fn read(&self, number: u64) -> Option<Record> {
        let state = self.record(number, 0);
        let is_done = |order| state.load(order) == done(number);
        if !is_done(Ordering::Acquire) {
            return None;
        }
        let words = std::array::from_fn(|at| self.record(number, at + 1).load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        is_done(Ordering::Relaxed).then(|| Record::from_words(words))
    }
}

fn begun(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(1)
}

fn done(number: u64) -> u64 {
    number.wrapping_mul(2).wrapping_add(2)
}

/// Who reads the ring, and how far they are.
pub struct Reader<'a> {
    trace: &'a Trace,
    /// The record that is read next.
    at: u64,
    /// Where the ring ended when it was looked at last: records before it had their time.
    seen: u64,
    lost: u64,
}

impl<'a> Reader<'a> {
    /// How long whoever writes a record has for it, at least, before it is given up. A worker
    /// that dies in the middle of one never finishes it.
    pub const INTERVAL: Duration = Duration::from_millis(20);

    /// Reads what is written from now on.
    pub fn new(trace: &'a Trace) -> Self {
        let at = trace.word(NEXT).load(Ordering::Acquire);
        Self { trace, at, seen: at, lost: 0 }
    }

    /// What was written since, in the order in which it began: at most [`RECORDS`] a call,
    /// whatever the ring says.
    pub fn take(&mut self, mut see: impl FnMut(Record)) {
        let end = self.trace.word(NEXT).load(Ordering::Acquire);
        let behind = end.wrapping_sub(self.at);
        if behind > RECORDS {
            // A jump of the ring's end is a worker's lie: begin anew.
            let missed = if behind > u64::MAX / 2 { behind } else { behind - RECORDS };
            self.lost = self.lost.saturating_add(missed.min(u64::from(u32::MAX)));
            self.at = end.wrapping_sub(behind.min(RECORDS));
        }
        while self.at != end {
            match self.trace.read(self.at) {
                Some(record) => see(record),
                None if !self.had_its_time() => break,
                None => self.lost = self.lost.saturating_add(1),
            }
            self.at = self.at.wrapping_add(1);
        }
        self.seen = end;
    }

    /// Records that were not read, since this was asked last.
    pub fn lost(&mut self) -> u64 {
        std::mem::take(&mut self.lost)
    }

    fn had_its_time(&self) -> bool {
        (1..=RECORDS).contains(&self.seen.wrapping_sub(self.at))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use std::fs::File;

    use super::*;

    fn record(took_ns: u64) -> Record {
        Record {
            at_ns: 1_796_000_000_000_000_000,
            took_ns,
            tgid: 1234,
            kind: 6,
            file: 1,
            what: Some((16, 0x2080_0102)),
            errno: 0,
            status: Some(0),
        }
    }

    fn all(reader: &mut Reader<'_>) -> Vec<u64> {
        let mut seen = Vec::new();
        reader.take(|record| seen.push(record.took_ns));
        seen
    }

    #[test]
    fn a_worker_cannot_take_the_ring_from_under_the_broker() {
        let trace = Trace::create().unwrap();
        let theirs = File::from(trace.share().unwrap());
        assert!(theirs.set_len(0).is_err() && theirs.set_len(1 << 30).is_err());
        assert!(!trace.is_on());
    }

    #[test]
    fn what_a_worker_writes_the_broker_reads_in_order() {
        let trace = Trace::create().unwrap();
        let worker = Trace::open(trace.share().unwrap()).unwrap();
        worker.write(&record(9));
        let mut reader = Reader::new(&trace);
        trace.set(Some(Wanted::default()));
        assert!(worker.is_on());
        for took in 0..3 {
            worker.note(&record(took));
        }
        let mut seen = Vec::new();
        reader.take(|record| seen.push(record));
        assert_eq!(seen, [record(0), record(1), record(2)]);
        assert_eq!(reader.lost(), 0);
        trace.set(None);
        assert!(!worker.is_on());
    }

    #[test]
    fn only_what_is_wanted_is_written() {
        let trace = Trace::create().unwrap();
        let failed = Record { status: Some(0x56), ..record(5) };
        let refused = Record { errno: 22, status: None, ..record(6) };
        let wanted = |slow_ns, errors| {
            let mut reader = Reader::new(&trace);
            trace.set(Some(Wanted { slow_ns, errors }));
            [record(1), record(1000), failed, refused].iter().for_each(|record| trace.note(record));
            all(&mut reader)
        };
        assert_eq!(wanted(None, false), [1, 1000, 5, 6]);
        assert_eq!(wanted(Some(1000), false), [1000]);
        assert_eq!(wanted(None, true), [5, 6]);
        assert_eq!(wanted(Some(6), true), [1000, 5, 6]);
    }

    #[test]
    fn what_is_not_read_in_time_is_lost_and_counted() {
        let trace = Trace::create().unwrap();
        let mut reader = Reader::new(&trace);
        (0..RECORDS + 5).for_each(|took| trace.write(&record(took)));
        assert_eq!(all(&mut reader), (5..RECORDS + 5).collect::<Vec<_>>());
        assert_eq!((reader.lost(), reader.lost()), (5, 0));
    }

    #[test]
    fn a_record_that_its_worker_died_of_is_given_up_at_the_second_look() {
        let trace = Trace::create().unwrap();
        let mut reader = Reader::new(&trace);
        trace.word(NEXT).fetch_add(1, Ordering::Relaxed);
        trace.write(&record(1));
        assert_eq!(all(&mut reader), [0; 0]);
        assert_eq!(all(&mut reader), [1]);
        assert_eq!(reader.lost(), 1);
    }

    proptest! {
        #[test]
        fn no_ring_makes_the_broker_read_more_than_it_holds(
            ends in proptest::collection::vec(any::<u64>(), 1..6),
            junk in proptest::collection::vec((0..SIZE / 8, any::<u64>()), 0..64),
        ) {
            let trace = Trace::create().unwrap();
            let mut reader = Reader::new(&trace);
            for (at, value) in junk {
                trace.word(8 * at).store(value, Ordering::Relaxed);
            }
            for end in ends {
                trace.word(NEXT).store(end, Ordering::Relaxed);
                prop_assert!(all(&mut reader).len() as u64 <= RECORDS);
                // Whatever was said, what comes next is heard.
                all(&mut reader);
                trace.write(&record(7));
                prop_assert_eq!(all(&mut reader), [7]);
                reader.lost();
            }
        }
    }
}
