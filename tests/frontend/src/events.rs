//! The event queues: the guest posts buffers, the backend fills them.

use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsRawFd, BorrowedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::FromBytes;

use crate::memory::Memory;
use crate::ring::{Descriptor, Layout, Ring, WRITE};
use crate::wire;
use crate::{Error, Result};

const RECORD: usize = size_of::<wire::Event>();

/// What is done with a record; called from the thread of the event queues.
pub type Sink = Arc<dyn Fn(wire::Event) + Send + Sync>;

/// One event queue, with a buffer for each of its entries.
#[derive(Debug)]
pub struct EventQueue {
    ring: Ring,
    positions: Mutex<(u16, u16)>,
}

impl EventQueue {
    /// Bytes of guest memory that a queue of `size` entries takes.
    pub fn bytes(size: u16) -> usize {
        (Layout { base: 0, size }.bytes() + RECORD * usize::from(size)).next_multiple_of(4096)
    }

    /// A queue whose rings and buffers begin at `layout.base`; `buffers` are posted.
    pub fn new(memory: Arc<Memory>, layout: Layout, event_idx: bool, buffers: u16) -> Result<Self> {
        let ring = Ring::new(memory, layout, event_idx)?;
        let queue = Self { ring, positions: Mutex::default() };
        for index in 0..layout.size {
            let address = Ring::address(queue.buffer(index));
            // CAST: a record has 16 bytes.
            let length = RECORD as u32;
            let descriptor = Descriptor { address, length, flags: WRITE, next: 0 };
            queue.ring.describe(index, descriptor);
        }
        queue.post(0..buffers.min(layout.size));
        queue.ring.want_call(0);
        Ok(queue)
    }

    /// The rings and the eventfds.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Posts the buffers with these numbers.
    pub fn post(&self, buffers: impl IntoIterator<Item = u16>) {
        let mut positions = lock(&self.positions);
        for index in buffers {
            self.ring.publish(&mut positions.0, index);
        }
    }

    /// Moves the available position by `count` entries that hold nothing.
    pub fn leap(&self, count: u16) {
        let mut positions = lock(&self.positions);
        let before = positions.0;
        positions.0 = before.wrapping_add(count);
        self.ring.announce(before, positions.0);
        self.ring.ring();
    }

    fn buffer(&self, index: u16) -> usize {
        self.ring.layout.base + self.ring.layout.bytes() + RECORD * usize::from(index)
    }

    /// Takes every record that is there and posts its buffer again.
    fn drain(&self, sink: &Sink) {
        let mut positions = lock(&self.positions);
        loop {
            while let Some((index, _)) = self.ring.reap(&mut positions.1) {
                let mut bytes = [0; RECORD];
                self.ring.memory.read(self.buffer(index), &mut bytes);
                self.ring.publish(&mut positions.0, index);
                if let Ok(event) = wire::Event::read_from_bytes(&bytes) {
                    sink(event);
                }
            }
            if !self.ring.want_call(positions.1) {
                return;
            }
        }
    }
}

/// Serves event queues until `stop` is rung. An `attentive` server looks at them all the
/// time: a record then costs no wake-up of a thread, as an interrupt costs none.
pub fn serve(
    queues: Vec<Arc<EventQueue>>,
    stop: Arc<EventFd>,
    sink: Sink,
    attentive: bool,
) -> Result<()> {
    let run = if attentive { look } else { sleep };
    std::thread::Builder::new()
        .name("guest-events".into())
        .spawn(move || run(&queues, &stop, &sink))
        .map_err(Error::Io)?;
    Ok(())
}

fn look(queues: &[Arc<EventQueue>], stop: &EventFd, sink: &Sink) {
    // SAFETY: the eventfd lives as long as what it is borrowed from.
    let stop = unsafe { BorrowedFd::borrow_raw(stop.as_raw_fd()) };
    let mut fds = [PollFd::new(stop, PollFlags::POLLIN)];
    while poll(&mut fds, PollTimeout::ZERO).is_ok_and(|count| count == 0) {
        for queue in queues.iter().cycle().take(1000 * queues.len()) {
            queue.drain(sink);
        }
    }
}

fn sleep(queues: &[Arc<EventQueue>], stop: &EventFd, sink: &Sink) {
    // SAFETY: the eventfds live as long as what they are borrowed from.
    let borrow = |fd: &EventFd| unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) };
    let calls = queues.iter().map(|queue| borrow(&queue.ring.call));
    let mut fds: Vec<PollFd<'_>> = std::iter::once(borrow(stop))
        .chain(calls)
        .map(|fd| PollFd::new(fd, PollFlags::POLLIN))
        .collect();
    loop {
        match poll(&mut fds, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(_) => return,
        }
        if fds[0].any().unwrap_or(true) {
            return;
        }
        for (queue, fd) in queues.iter().zip(&fds[1..]) {
            if fd.any().unwrap_or(false) {
                let _ = queue.ring.call.read();
                queue.drain(sink);
            }
        }
    }
}

/// Keeps records for those who wait for them, by file.
#[derive(Debug, Default)]
pub struct Mailbox {
    records: Mutex<HashMap<u32, VecDeque<wire::Event>>>,
    came: Condvar,
}

impl Mailbox {
    /// A sink that puts records here.
    pub fn sink(self: &Arc<Self>) -> Sink {
        let mailbox = Arc::clone(self);
        Arc::new(move |event| {
            lock(&mailbox.records).entry(event.file.get()).or_default().push_back(event);
            mailbox.came.notify_all();
        })
    }

    /// The next record of a file, or of a worker as a whole (number 0).
    pub fn wait(&self, file: u32, patience: Duration) -> Option<wire::Event> {
        let empty = |records: &mut HashMap<u32, VecDeque<wire::Event>>| {
            records.get(&file).is_none_or(VecDeque::is_empty)
        };
        let waited = self.came.wait_timeout_while(lock(&self.records), patience, empty);
        let (mut records, _) = waited.unwrap_or_else(PoisonError::into_inner);
        records.get_mut(&file)?.pop_front()
    }

    /// Records that wait for somebody.
    pub fn count(&self) -> usize {
        lock(&self.records).values().map(VecDeque::len).sum()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
