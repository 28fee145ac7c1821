//! Readiness: an edge of the host's file is remembered, and told once to who armed for it.
//!
//! `nvidia_poll` clears a data-less event by the poll that reports it, so a file is
//! watched edge-triggered and each edge is kept here until the guest takes it.
//!
//! An ARM of a process whose events come soon asks for one report, and whoever served it looks
//! for the event. Where events come late nobody looks, and an ARM is worth [`RUN`] reports: one
//! wake-up a frame, not two.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};

use super::readiness::{Readiness, Report};
use super::session::{GuestFile, Session};
use super::upstream::Upstream;
use crate::host::Host;
use crate::sync::lock;
use crate::transport::events::EventQueue;
use crate::transport::link::{Kind, Outgoing};
use crate::transport::page::SlotPage;
use crate::transport::ring::Ring;
use crate::wire;

/// The token of the event queue's kick; files' tokens are their handles, never 0.
const KICK: u64 = 0;

/// `POLLIN | POLLPRI`: what `nvidia_poll` says of a file with events.
const READABLE: u32 = 0x3;

/// Reports for one ARM where events come late. As many can come that nobody waits for when a
/// program has stopped waiting.
const RUN: u32 = 64;

/// One file as it is watched.
#[derive(Default)]
pub struct Watch {
    state: Mutex<State>,
    registered: AtomicBool,
}

#[derive(Default)]
struct State {
    readiness: Readiness,
    /// When the guest asked last, or was told last.
    since: Option<Instant>,
    /// There are events with data. One that is there makes no further edge, so the host must be
    /// asked for it each time, and nothing can be promised.
    has_data: bool,
}

/// Whether the events of a process come late: when who looks for them would have given up.
struct Pace {
    patience: Duration,
    late: AtomicU32,
}

impl Pace {
    /// So many late ones in a row, and the next is taken to be late too.
    const ENOUGH: u32 = 8;

    fn new(patience: Duration) -> Self {
        Self { patience, late: AtomicU32::new(0) }
    }

    fn is_slow(&self) -> bool {
        self.late.load(Ordering::Relaxed) >= Self::ENOUGH
    }

    /// An event came so long after it was asked for; whether that is late.
    fn came(&self, after: Duration) -> bool {
        let is_late = after > self.patience;
        let late = if is_late { self.late.load(Ordering::Relaxed).saturating_add(1) } else { 0 };
        self.late.store(late, Ordering::Relaxed);
        is_late
    }
}

/// The thread that waits for the host's files, and the queue it reports on.
pub struct Watcher {
    epoll: Epoll,
    upstream: Arc<Upstream>,
    pace: Pace,
    queue: Mutex<(EventQueue, Option<OwnedFd>)>,
}

impl Watcher {
    /// Nothing is watched yet. An event is looked for as long as `patience` after its ARM.
    pub fn new(upstream: Arc<Upstream>, patience: Duration) -> Self {
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)
            .expect("PANIC: a worker that cannot wait is of no use, and its guest has nothing yet");
        Self { epoll, upstream, pace: Pace::new(patience), queue: Mutex::default() }
    }

    /// Whether it is not worth it to look for the event that an ARM waits for.
    pub fn is_slow(&self) -> bool {
        self.pace.is_slow()
    }

    /// Starts the thread.
    pub fn start(session: Arc<Session>) -> std::io::Result<()> {
        let thread = std::thread::Builder::new().name("watch".into()).stack_size(128 << 10);
        thread.spawn(move || session.watcher().run(&session))?;
        Ok(())
    }

    fn run(&self, session: &Session) {
        loop {
            match self.serve(session, EpollTimeout::NONE) {
                Ok(_) | Err(nix::Error::EINTR) => {}
                Err(error) => {
                    tracing::error!(%error, "waiting for the driver's events failed");
                    return;
                }
            }
        }
    }

    /// Serves what has come and does not wait; whether there was something.
    pub fn look(&self, session: &Session) -> bool {
        self.serve(session, EpollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    fn serve(&self, session: &Session, timeout: EpollTimeout) -> nix::Result<usize> {
        let mut events = [EpollEvent::empty(); 16];
        let count = self.epoll.wait(&mut events, timeout)?;
        for event in &events[..count] {
            match event.data() {
                KICK => self.kicked(),
                handle => self.edge(session, handle, event.events()),
            }
        }
        Ok(count)
    }

    fn kicked(&self) {
        let mut queue = lock(&self.queue);
        if let Some(kick) = &queue.1 {
            // Level-triggered: the count is taken so that it can rise again.
            let _ = nix::unistd::read(kick, &mut [0; 8]);
        }
        queue.0.flush();
    }

    fn edge(&self, session: &Session, handle: u64, flags: EpollFlags) {
        // CAST: a handle has 31 bits.
        let Some(file) = session.file(handle as u32) else { return };
        let mut state = lock(&file.watch.state);
        // CAST: poll's and epoll's bits are the same, and few.
        if let Some(report) = state.readiness.edge(flags.bits() as u32 & 0xffff) {
            let now = Instant::now();
            let after = state.since.replace(now).map_or(Duration::ZERO, |since| now - since);
            let is_late = self.pace.came(after);
            // What comes soon is looked for after the next ARM.
            let more = if is_late || !state.readiness.withdraw() { report.more } else { 0 };
            self.report(file.handle, Report { more, ..report });
        }
    }

    fn report(&self, handle: u32, report: Report) {
        self.send(wire::EVENT_READY, handle, report);
    }

    fn send(&self, kind: u32, handle: u32, Report { mask, more }: Report) {
        let mut queue = lock(&self.queue);
        if queue.0.is_started() {
            queue.0.send(kind, handle, mask, more);
            return;
        }
        drop(queue);
        let words = [kind.into(), handle.into(), mask.into(), more.into()];
        if let Err(error) =
            self.upstream.tell(Kind::Event, Outgoing { words, ..Outgoing::default() })
        {
            tracing::debug!(%error, "an event did not reach the broker");
        }
    }

    /// The guest may unpin a registration; its name is made as a file's.
    pub fn released(&self, name: u32) {
        self.send(wire::EVENT_RELEASED, name, Report { mask: 0, more: 0 });
    }

    /// ARM: tells the guest, once, when `file` is ready; where events come late, [`RUN`] times.
    pub fn arm(&self, host: &dyn Host, file: &GuestFile) {
        let mut state = lock(&file.watch.state);
        state.since = Some(Instant::now());
        let promises = self.is_slow() && !state.has_data;
        let mut report = state.readiness.arm(if promises { RUN } else { 1 });
        if report.is_none() && host.pending(file.host()) {
            report = state.readiness.edge(READABLE);
        }
        if let Some(report) = report {
            self.report(file.handle, report);
        }
    }

    /// `file` has events with data, from now on.
    pub fn has_data(&self, file: &GuestFile) {
        let mut state = lock(&file.watch.state);
        if !std::mem::replace(&mut state.has_data, true) && state.readiness.withdraw() {
            self.report(file.handle, Report { mask: 0, more: 0 });
        }
    }

    /// Watches `file` from its first moment on. Adding a file asks it for its readiness
    /// and drops the answer, so an event that came before would be lost. A node without
    /// a poll of its own (nvidia-uvm) cannot be added, and is never ready.
    pub fn watch(&self, file: &GuestFile) {
        let interest = EpollFlags::EPOLLIN | EpollFlags::EPOLLPRI | EpollFlags::EPOLLET;
        let event = EpollEvent::new(interest, file.handle.into());
        let added = self.epoll.add(file.host().watched(), event);
        file.watch.registered.store(added.is_ok(), Ordering::SeqCst);
    }

    /// `file` is being closed. Duplicates would keep it watched, so it is taken out by name.
    pub fn forget(&self, file: &GuestFile) {
        if file.watch.registered.load(Ordering::SeqCst) {
            let _ = self.epoll.delete(file.host().watched());
        }
    }

    /// Reports on a slot's own queue from now on.
    pub fn begin(&self, ring: Ring, kick: OwnedFd, page: Arc<SlotPage>) {
        let mut queue = lock(&self.queue);
        let event = EpollEvent::new(EpollFlags::EPOLLIN, KICK);
        if let Err(error) = self.epoll.add(kick.as_fd(), event) {
            tracing::error!(%error, "watching the event queue's kick failed");
        }
        queue.1 = Some(kick);
        queue.0.start(ring, Some(page));
    }

    /// Interrupts the guest through `call` from now on.
    pub fn set_call(&self, call: OwnedFd) {
        if let Some(ring) = lock(&self.queue).0.ring_mut() {
            ring.set_call(call);
        }
    }

    /// Stops using the slot's queue.
    pub fn stop(&self) {
        let mut queue = lock(&self.queue);
        if let Some(kick) = queue.1.take() {
            let _ = self.epoll.delete(kick.as_fd());
        }
        queue.0.stop();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicU32;

    use super::*;

    #[test]
    fn an_edge_that_comes_unarmed_is_remembered() {
        let mut file = Readiness::default();
        assert_eq!(file.edge(1), None);
        assert_eq!(file.edge(2), None);
        assert_eq!(file.arm(1), Some(Report { mask: 3, more: 0 }));
        assert_eq!(file.edge(1), None, "one report for one arm");
    }

    #[test]
    fn an_arm_is_worth_as_many_reports_as_it_says_and_may_be_taken_back() {
        let mut file = Readiness::default();
        assert_eq!(file.arm(4), None);
        assert_eq!(file.edge(1), Some(Report { mask: 1, more: 3 }));
        assert_eq!(file.arm(2), None, "what is promised is not promised again");
        assert_eq!(file.edge(1), Some(Report { mask: 1, more: 2 }));
        assert!(file.withdraw());
        assert!(!file.withdraw());
        assert_eq!(file.edge(2), None);
        assert_eq!(file.arm(1), Some(Report { mask: 2, more: 0 }));
    }

    #[test]
    fn a_process_is_slow_when_its_events_came_late_for_a_while_and_no_more_when_one_comes_soon() {
        let pace = Pace::new(Duration::from_micros(500));
        for _ in 0..Pace::ENOUGH {
            assert!(!pace.is_slow());
            assert!(pace.came(Duration::from_millis(10)));
        }
        assert!(pace.is_slow());
        assert!(!pace.came(Duration::from_micros(500)));
        assert!(!pace.is_slow());
    }

    #[test]
    fn of_a_million_edges_and_arms_that_cross_none_is_lost() {
        const ROUNDS: u32 = 1_000_000;
        let file = Arc::new(Mutex::new(Readiness::default()));
        let (host, reports) = (Arc::clone(&file), Arc::new(AtomicU32::new(0)));
        let told = Arc::clone(&reports);
        // Each edge waits for the last to be reported, each arm likewise, so that they cross.
        let edges = std::thread::spawn(move || {
            for round in 0..ROUNDS {
                while told.load(Ordering::Acquire) < round {
                    std::thread::yield_now();
                }
                if lock(&host).edge(1).is_some() {
                    told.fetch_add(1, Ordering::AcqRel);
                }
            }
        });
        for round in 0..ROUNDS {
            while reports.load(Ordering::Acquire) < round {
                std::thread::yield_now();
            }
            if lock(&file).arm(1).is_some() {
                reports.fetch_add(1, Ordering::AcqRel);
            }
        }
        edges.join().unwrap();
        assert_eq!(reports.load(Ordering::Acquire), ROUNDS);
    }
}
