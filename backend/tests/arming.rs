//! Arming, in every order that two processors can see: the backend's half is the code itself
//! (`worker/readiness.rs`), the guest's half is what `guest-module/poll.c` does, step by step.
//! A wake-up that is lost leaves the guest's thread asleep for ever, which the checker reports.

#[path = "../src/worker/readiness.rs"]
mod readiness;

use loom::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use readiness::{Readiness, Report};

/// A file: the backend's word of it, and the guest's.
#[derive(Default)]
struct File {
    host: Mutex<Readiness>,
    /// Reports that an ARM is worth.
    run: u32,
    ready: AtomicU32,
    armed: AtomicBool,
    records: AtomicU32,
    asked: AtomicU32,
    /// The wait queue: how often it was woken.
    woken: Mutex<u32>,
    wait: Condvar,
}

impl File {
    fn of(run: u32) -> Arc<Self> {
        Arc::new(Self { run, ..Self::default() })
    }

    /// The host's file had an edge.
    fn edge(&self, mask: u32) {
        let report = self.host.lock().unwrap().edge(mask);
        report.into_iter().for_each(|report| self.report(report));
    }

    /// The guest takes an event with data, after which nothing can be promised.
    fn withdraw(&self) {
        if self.host.lock().unwrap().withdraw() {
            self.report(Report { mask: 0, more: 0 });
        }
    }

    /// ARM reaches the backend.
    fn arm(&self) {
        self.asked.fetch_add(1, Ordering::Relaxed);
        let report = self.host.lock().unwrap().arm(self.run);
        report.into_iter().for_each(|report| self.report(report));
    }

    /// The record reaches the guest, in any order: `nvg_ready`.
    fn report(&self, Report { mask, more }: Report) {
        self.records.fetch_add(1, Ordering::Relaxed);
        self.ready.fetch_or(mask, Ordering::AcqRel);
        if more == 0 {
            self.armed.swap(false, Ordering::AcqRel);
        }
        *self.woken.lock().unwrap() += 1;
        self.wait.notify_all();
    }

    /// `nvg_poll`: what there is, after asking to be told of more if there is nothing.
    fn look(&self) -> u32 {
        let mask = self.ready.swap(0, Ordering::AcqRel);
        if mask != 0 {
            return mask;
        }
        if !self.armed.swap(true, Ordering::AcqRel) {
            self.arm();
        }
        self.ready.swap(0, Ordering::AcqRel)
    }

    /// A guest's thread in `poll`: looks, sleeps until it is woken, looks again.
    fn poll(&self) -> u32 {
        loop {
            let seen = *self.woken.lock().unwrap();
            let mask = self.look();
            if mask != 0 {
                return mask;
            }
            let mut woken = self.woken.lock().unwrap();
            while *woken == seen {
                woken = self.wait.wait(woken).unwrap();
            }
        }
    }
}

fn check(model: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(model);
}

#[test]
fn a_guest_that_polls_hears_of_every_edge_whatever_crosses() {
    for run in [1, 2, 16] {
        check(move || {
            let file = File::of(run);
            let host = Arc::clone(&file);
            let edges = loom::thread::spawn(move || {
                host.edge(1);
                host.edge(2);
            });
            let mut seen = 0;
            while seen != 3 {
                seen |= file.poll();
            }
            edges.join().unwrap();
        });
    }
}

#[test]
fn a_promise_that_is_taken_back_while_others_are_kept_loses_no_edge() {
    check(|| {
        let file = File::of(2);
        let (host, other) = (Arc::clone(&file), Arc::clone(&file));
        let edges = loom::thread::spawn(move || {
            host.edge(1);
            host.edge(2);
        });
        let takes = loom::thread::spawn(move || other.withdraw());
        let mut seen = 0;
        while seen != 3 {
            seen |= file.poll();
        }
        edges.join().unwrap();
        takes.join().unwrap();
    });
}

#[test]
fn two_threads_that_poll_one_file_do_not_lose_the_edge_between_them() {
    for run in [1, 2] {
        check(move || {
            let file = File::of(run);
            let (host, other) = (Arc::clone(&file), Arc::clone(&file));
            let edges = loom::thread::spawn(move || host.edge(1));
            let looker = loom::thread::spawn(move || other.look());
            let looked = looker.join().unwrap();
            if looked == 0 {
                assert_eq!(file.poll(), 1);
            }
            edges.join().unwrap();
        });
    }
}

#[test]
fn there_are_as_many_records_as_an_arm_is_worth_and_none_without() {
    for run in [1, 2] {
        check(move || {
            let file = File::of(run);
            let host = Arc::clone(&file);
            let edges = loom::thread::spawn(move || (0..3).for_each(|_| host.edge(1)));
            file.look();
            edges.join().unwrap();
            let (records, asked) =
                (file.records.load(Ordering::Relaxed), file.asked.load(Ordering::Relaxed));
            assert!(records <= run * asked, "{records} records for {asked} arms");
            assert_eq!(asked, 1);
        });
    }
}
