//! Which guest process has which worker, and which worker has which slot.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nvguest_abi::compiled::Verdict;

use super::control::Pending;
use super::device::QueueParts;
use super::worker::Worker;
use super::{queues_of, Broker};
use crate::errno::Errno;
use crate::limits::Live;
use crate::policy::tally::Tally;
use crate::policy::What;
use crate::sync::lock;
use crate::transport::counts::Counts;
use crate::transport::link::{Kind, Outgoing};
use crate::transport::page::SlotPage;
use crate::transport::ring::Ring;
use crate::wire;
use crate::worker::start::Process;

/// Who serves a slot's queues.
#[derive(Default)]
enum Slot {
    /// The frontend has not set it up.
    #[default]
    Absent,
    /// Nobody's: the broker watches its kick, and answers ENODEV.
    Free(Option<QueueParts>),
    /// A worker's.
    Owned(Arc<Worker>),
}

#[derive(Default)]
struct Table {
    by_number: BTreeMap<u16, Arc<Worker>>,
    by_process: HashMap<Process, u16>,
    slots: Vec<Slot>,
    last_number: u16,
    refusals: Tally,
    /// What workers counted that are gone.
    past: Counts,
}

/// The workers of one guest.
pub struct Workers {
    table: Mutex<Table>,
    changed: Condvar,
    limits: Arc<Live>,
}

impl Workers {
    /// No worker, no slot.
    pub fn new(limits: Arc<Live>) -> Self {
        let slots = std::iter::repeat_with(Slot::default).take(limits.now().slots).collect();
        let table = Mutex::new(Table { slots, ..Table::default() });
        Self { table, changed: Condvar::new(), limits }
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// OPEN on queue 0: by the process's worker, which is started if there is none.
    pub fn open(&self, broker: &Arc<Broker>, process: Process, pending: Pending) {
        let known = {
            let table = self.table();
            table.by_process.get(&process).and_then(|n| table.by_number.get(n)).cloned()
        };
        let worker = match known {
            Some(worker) => Ok(worker),
            None => self.start(broker, process),
        };
        match worker {
            Ok(worker) => worker.forward(broker, pending),
            Err(errno) => broker.control.fail(pending, errno),
        }
    }

    fn start(&self, broker: &Arc<Broker>, process: Process) -> Result<Arc<Worker>, Errno> {
        let mut table = self.table();
        if table.by_number.len() >= self.limits.now().processes {
            return Err(Errno::EMFILE);
        }
        let number = table.new_number().ok_or(Errno::EMFILE)?;
        let worker = Worker::start(broker, number, process).map_err(|error| {
            tracing::error!("{error:#}");
            Errno::EIO
        })?;
        table.by_number.insert(number, Arc::clone(&worker));
        table.by_process.insert(process, number);
        let free = table.slots.iter().position(|slot| matches!(slot, Slot::Free(_)));
        if let Some(slot) = free {
            table.give_slot(broker, slot, &worker);
        }
        tracing::debug!(worker = number, pid = worker.pid, tgid = process.tgid, slot = ?free, "started");
        Ok(worker)
    }

    /// A request on queue 0 for a file: passed to the worker that has it.
    pub fn forward(&self, broker: &Broker, file: u32, pending: Pending) {
        match self.of_file(file) {
            Some(worker) => worker.forward(broker, pending),
            None => broker.control.answer_for_dead(broker, pending),
        }
    }

    /// The worker that has a file.
    pub fn of_file(&self, file: u32) -> Option<Arc<Worker>> {
        self.table().by_number.get(&wire::file_worker(file)).cloned()
    }

    /// A slot's queues are usable.
    pub fn slot_ready(&self, broker: &Arc<Broker>, slot: usize) {
        let mut table = self.table();
        let owner = match table.slots.get(slot) {
            Some(Slot::Owned(worker)) => Some(Arc::clone(worker)),
            Some(Slot::Absent) => None,
            _ => return,
        };
        match owner {
            Some(worker) => table.give_slot(broker, slot, &worker),
            None => table.free_slot(broker, slot),
        }
    }

    /// The frontend takes a slot's queues back; returns once nobody touches them.
    pub fn slot_gone(&self, broker: &Broker, slot: usize) {
        let owner = {
            let mut table = self.table();
            match table.slots.get_mut(slot) {
                Some(Slot::Owned(worker)) => Some(Arc::clone(worker)),
                Some(free @ Slot::Free(_)) => {
                    if let Slot::Free(Some(parts)) = std::mem::take(free) {
                        broker.control.unwatch(&parts.kick);
                    }
                    None
                }
                _ => None,
            }
        };
        if let Some(worker) = owner {
            worker.stop();
            note_positions(broker, slot, &worker.page);
        }
    }

    /// A guest rang for a slot that is nobody's: it has not heard yet.
    pub fn orphan_kicked(&self, broker: &Broker, slot: usize) {
        let table = self.table();
        if let Some(Slot::Free(Some(parts))) = table.slots.get(slot) {
            let _ = nix::unistd::read(&parts.kick, &mut [0; 8]);
            for request in bury_queue(broker, slot, None) {
                // Whatever else it was has been answered.
                let _ = broker.window.unmapped(&request);
            }
        }
    }

    /// The frontend wants a slot's interrupts elsewhere.
    pub fn set_call(&self, slot: usize, events: bool, call: BorrowedFd<'_>) {
        let table = self.table();
        if let Some(Slot::Owned(worker)) = table.slots.get(slot) {
            let words = [u64::from(events), 0, 0, 0];
            let fds = [call.as_raw_fd()];
            let _ = worker.tell(Kind::Call, Outgoing { words, fds: &fds, ..Outgoing::default() });
        }
    }

    /// A worker's process is gone: its slot is answered for, and is free again. Returns
    /// the requests that waited there.
    pub fn left(&self, broker: &Broker, worker: &Arc<Worker>) -> Vec<Vec<u8>> {
        let mut table = self.table();
        if table.by_process.get(&worker.process) == Some(&worker.number) {
            table.by_process.remove(&worker.process);
        }
        let owned = table
            .slots
            .iter()
            .position(|slot| matches!(slot, Slot::Owned(owner) if owner.number == worker.number));
        owned.map_or_else(Vec::new, |slot| {
            note_positions(broker, slot, &worker.page);
            let waited = bury_queue(broker, slot, Some(&worker.page));
            table.free_slot(broker, slot);
            waited
        })
    }

    /// All that a worker held has gone back.
    pub fn buried(&self, broker: &Broker, worker: &Worker) {
        broker.shares.forget(worker.number);
        broker.video.forget(worker.number);
        {
            let mut table = self.table();
            table.past.add(&worker.page.counts());
            table.by_number.remove(&worker.number);
        }
        self.changed.notify_all();
    }

    /// Ends every worker.
    pub fn end_all(&self) {
        for worker in self.table().by_number.values() {
            worker.end();
        }
    }

    /// Whether every worker has ended, waiting so long for it.
    pub fn await_empty(&self, patience: Duration) -> bool {
        let waited = self
            .changed
            .wait_timeout_while(self.table(), patience, |table| !table.by_number.is_empty());
        let (table, _) = waited.unwrap_or_else(PoisonError::into_inner);
        table.by_number.is_empty()
    }

    /// Tells every worker how many placements the guest has.
    pub fn placements_changed(&self, broker: &Broker) {
        let (live, _) = broker.window.usage();
        for worker in self.table().by_number.values() {
            worker.page.set_placements(live);
        }
    }

    /// Tells every worker the guest's share of the card's time.
    pub fn weight_changed(&self, weight: u32) {
        for worker in self.table().by_number.values() {
            let words = [u64::from(weight), 0, 0, 0];
            let _ = worker.tell(Kind::Weight, Outgoing { words, ..Outgoing::default() });
        }
    }

    /// A worker refused something, for the `times`th time.
    pub fn refused(&self, verdict: Verdict, what: What, times: u64) {
        let news = times / 2 + times % 2;
        if self.table().refusals.add(verdict, what, news) == news {
            tracing::warn!(reason = verdict.name(), "refused {what}");
        }
    }

    /// What the guest was refused: verdict, name, how often (at least).
    pub fn refusals(&self) -> Vec<(Verdict, What, u64)> {
        self.table().refusals.iter().collect()
    }

    /// What workers counted, now and before.
    pub fn counts(&self) -> Counts {
        let table = self.table();
        let mut all = table.past.clone();
        table.by_number.values().for_each(|worker| all.add(&worker.page.counts()));
        all
    }

    /// Requests that workers have taken and not answered.
    pub fn in_flight(&self) -> usize {
        self.table().by_number.values().map(|worker| worker.page.in_flight()).sum()
    }

    /// Refusals of every name, those included that found no room for theirs.
    pub fn refused_total(&self) -> u64 {
        self.table().refusals.total()
    }

    /// Every worker: number, pid on the host, guest's process.
    pub fn list(&self) -> Vec<(u16, i32, Process)> {
        let table = self.table();
        table.by_number.values().map(|w| (w.number, w.pid, w.process)).collect()
    }
}

impl Table {
    /// A number that no worker has, as late as possible re-used.
    fn new_number(&mut self) -> Option<u16> {
        const LAST: u16 = 0x7fff;
        for _ in 0..LAST {
            self.last_number = self.last_number % LAST + 1;
            if !self.by_number.contains_key(&self.last_number) {
                return Some(self.last_number);
            }
        }
        None
    }

    fn give_slot(&mut self, broker: &Broker, slot: usize, worker: &Arc<Worker>) {
        if let Some(Slot::Free(Some(parts))) = self.slots.get(slot) {
            broker.control.unwatch(&parts.kick);
        }
        match worker.serve(broker, slot) {
            Ok(()) => self.slots[slot] = Slot::Owned(Arc::clone(worker)),
            Err(error) => tracing::error!("{error:#}"),
        }
    }

    fn free_slot(&mut self, broker: &Broker, slot: usize) {
        let parts = broker.device().parts(queues_of(slot).0);
        if let Some(parts) = &parts {
            broker.control.watch(&parts.kick, queues_of(slot).0);
        }
        self.slots[slot] = if parts.is_some() { Slot::Free(parts) } else { Slot::Absent };
    }
}

/// Notes how far a slot's queues were served, for whoever serves them next.
fn note_positions(broker: &Broker, slot: usize, page: &SlotPage) {
    let (control, events) = queues_of(slot);
    let mut device = broker.device();
    device.set_position(control, page.next_available());
    device.set_position(events, page.events_next_available());
}

/// Answers ENODEV to all that a slot's queue holds; returns what waited in it.
fn bury_queue(broker: &Broker, slot: usize, page: Option<&Arc<SlotPage>>) -> Vec<Vec<u8>> {
    let (control, _) = queues_of(slot);
    let (parts, memory) = {
        let device = broker.device();
        (device.parts(control), device.memory())
    };
    let (Some(parts), Some(memory)) = (parts, memory) else { return Vec::new() };
    match Ring::new(parts.config, memory, Some(parts.call), page.cloned()) {
        Ok(mut ring) => {
            let waited = ring.bury();
            broker.device().set_position(control, ring.next_available());
            waited
        }
        Err(error) => {
            tracing::error!(%error, slot, "a slot's queue cannot be answered for");
            Vec::new()
        }
    }
}
