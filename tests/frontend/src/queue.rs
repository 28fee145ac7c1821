//! Requests on a control queue: many in flight, from many threads.
//!
//! A waiter first looks at the used ring for a bounded time, then sleeps. Of the
//! sleepers one *leads*: it waits for the interrupt itself, so that a lone caller
//! is woken by the device and nobody in between.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use crate::memory::Memory;
use crate::ring::{Descriptor, Interrupt, Layout, Ring, INDIRECT, NEXT, WRITE};
use crate::{Error, Result};

/// Descriptors of one slot.
pub const CHAIN: usize = 4;
/// Bytes of request, and of reply, that a slot holds itself.
pub const INLINE: usize = 4096;
/// Bytes of a slot: its indirect table, a request, a reply.
const STRIDE: usize = 16 * CHAIN + 2 * INLINE;

const IDLE: u32 = 0;
const PENDING: u32 = 1;
/// Plus the bytes that the device wrote.
const DONE: u32 = 2;

/// How a queue is used.
#[derive(Clone, Copy, Debug)]
pub struct Manner {
    /// `VIRTIO_F_EVENT_IDX` was negotiated.
    pub event_idx: bool,
    /// `VIRTIO_F_INDIRECT_DESC` was negotiated and is used.
    pub indirect: bool,
    /// How long a waiter looks before it sleeps.
    pub poll: Duration,
    /// When a waiter gives up.
    pub patience: Duration,
}

/// A control queue.
#[derive(Debug)]
pub struct Queue {
    ring: Ring,
    interrupt: Interrupt,
    manner: Manner,
    slots: Vec<AtomicU32>,
    free: Mutex<Vec<u16>>,
    freed: Condvar,
    available: Mutex<u16>,
    used: Mutex<u16>,
    leader: Mutex<()>,
    sleepers: AtomicU32,
    park: Mutex<()>,
    unpark: Condvar,
    strays: AtomicU64,
}

/// A request under way.
#[derive(Debug)]
#[must_use = "a request that nobody waits for keeps its slot"]
pub struct Token {
    slot: u16,
    reply_at: usize,
    room: usize,
    heap: Option<(usize, usize)>,
}

impl Queue {
    /// Bytes of guest memory that a queue of `size` entries takes.
    pub fn bytes(size: u16) -> usize {
        let slots = usize::from(size) / CHAIN;
        (Layout { base: 0, size }.bytes() + slots * STRIDE).next_multiple_of(4096)
    }

    /// A queue whose rings and slots begin at `layout.base`.
    pub fn new(memory: Arc<Memory>, layout: Layout, manner: Manner) -> Result<Self> {
        let ring = Ring::new(memory, layout, manner.event_idx)?;
        Self::on(ring, manner, (0, 0))
    }

    /// The driver's side of a queue that another process set up and nobody uses now;
    /// `None` while the device still has a request of whoever used it before.
    pub fn attach(ring: Ring, manner: Manner) -> Option<Self> {
        let positions = ring.at_rest()?;
        Self::on(ring, manner, positions).ok()
    }

    fn on(ring: Ring, manner: Manner, positions: (u16, u16)) -> Result<Self> {
        // CAST: queues have at most 1024 entries.
        let count = ring.layout.size / CHAIN as u16;
        let queue = Self {
            interrupt: Interrupt::of(&ring)?,
            ring,
            manner,
            slots: std::iter::repeat_with(AtomicU32::default).take(count.into()).collect(),
            free: Mutex::new((0..count).rev().collect()),
            freed: Condvar::new(),
            available: Mutex::new(positions.0),
            used: Mutex::new(positions.1),
            leader: Mutex::default(),
            sleepers: AtomicU32::new(0),
            park: Mutex::default(),
            unpark: Condvar::new(),
            strays: AtomicU64::new(0),
        };
        queue.ring.spare_call();
        Ok(queue)
    }

    /// The rings and the eventfds.
    pub fn ring(&self) -> &Ring {
        &self.ring
    }

    /// Requests that can be in flight at once.
    pub fn depth(&self) -> usize {
        self.slots.len()
    }

    /// Chains that the device returned without having been asked, so far.
    pub fn strays(&self) -> u64 {
        self.strays.load(Ordering::Relaxed)
    }

    /// Sends a request and waits for its reply; returns the bytes of it.
    pub fn call(&self, request: &[u8], reply: &mut [u8]) -> Result<usize> {
        let token = self.submit(request, reply.len())?;
        self.wait(token, reply)
    }

    /// Sends a request that gives `room` bytes for its reply.
    pub fn submit(&self, request: &[u8], room: usize) -> Result<Token> {
        crate::record::keep(request, room);
        let slot = self.take_slot()?;
        let table = self.slot_at(slot);
        let heap = if request.len() <= INLINE && room <= INLINE {
            None
        } else {
            let length = request.len().next_multiple_of(8) + room;
            let Some(at) = self.ring.memory.take(length) else {
                self.give_slot(slot);
                return Err(Error::Errno(nix::libc::ENOMEM));
            };
            Some((at, length))
        };
        let (request_at, reply_at) = match heap {
            None => (table + 16 * CHAIN, table + 16 * CHAIN + INLINE),
            Some((at, _)) => (at, at + request.len().next_multiple_of(8)),
        };
        self.ring.memory.write(request_at, request);
        let length = |bytes: usize| u32::try_from(bytes).expect("INVARIANT: guest memory is small");
        let asked = Descriptor {
            address: Ring::address(request_at),
            length: length(request.len()),
            flags: NEXT,
            next: 1,
        };
        let answer = Descriptor {
            address: Ring::address(reply_at),
            length: length(room),
            flags: WRITE,
            next: 0,
        };
        match (request.is_empty(), room) {
            (true, _) => self.publish(slot, &[answer]),
            (false, 0) => self.publish(slot, &[Descriptor { flags: 0, ..asked }]),
            (false, _) => self.publish(slot, &[asked, answer]),
        }
        Ok(Token { slot, reply_at, room, heap })
    }

    /// Sends a chain as it is, however wrong; a `next` below [`CHAIN`] counts from
    /// the chain's own first descriptor. [`Queue::wait`] tells what was written.
    pub fn submit_chain(&self, chain: &[Descriptor]) -> Result<Token> {
        let slot = self.take_slot()?;
        self.publish(slot, chain);
        Ok(Token { slot, reply_at: 0, room: 0, heap: None })
    }

    /// Waits for the reply to a request; returns the bytes the device wrote of it.
    pub fn wait(&self, token: Token, reply: &mut [u8]) -> Result<usize> {
        let written = self.wait_done(token.slot)? as usize;
        let count = written.min(token.room).min(reply.len());
        self.ring.memory.read(token.reply_at, &mut reply[..count]);
        if let Some((at, length)) = token.heap {
            self.ring.memory.give(at, length);
        }
        self.give_slot(token.slot);
        Ok(if token.room == 0 { written } else { count })
    }

    /// Whether the reply to a request is there.
    pub fn is_done(&self, token: &Token) -> bool {
        self.try_reap();
        self.slots[usize::from(token.slot)].load(Ordering::Acquire) >= DONE
    }

    /// Moves the available position by `count` entries that hold nothing.
    pub fn leap(&self, count: u16) {
        let mut position = lock(&self.available);
        let before = *position;
        *position = before.wrapping_add(count);
        self.ring.announce(before, *position);
        self.ring.ring();
    }

    /// Makes a head available that is no chain of ours.
    pub fn publish_head(&self, head: u16) {
        self.ring.publish(&mut lock(&self.available), head);
    }

    fn slot_at(&self, slot: u16) -> usize {
        self.ring.layout.base + self.ring.layout.bytes() + STRIDE * usize::from(slot)
    }

    fn take_slot(&self) -> Result<u16> {
        let patience = self.manner.patience;
        let waited =
            self.freed.wait_timeout_while(lock(&self.free), patience, |free| free.is_empty());
        let (mut free, _) = waited.unwrap_or_else(PoisonError::into_inner);
        free.pop().ok_or(Error::Silence { what: "a full queue", patience })
    }

    fn give_slot(&self, slot: u16) {
        self.slots[usize::from(slot)].store(IDLE, Ordering::Relaxed);
        lock(&self.free).push(slot);
        self.freed.notify_one();
    }

    fn publish(&self, slot: u16, chain: &[Descriptor]) {
        // CAST: four descriptors a slot, of at most 1024.
        let head = slot * CHAIN as u16;
        self.slots[usize::from(slot)].store(PENDING, Ordering::Relaxed);
        let fits = chain.iter().all(|descriptor| descriptor.flags & INDIRECT == 0);
        if self.manner.indirect && fits {
            let table = self.slot_at(slot);
            for (index, descriptor) in chain.iter().enumerate() {
                self.ring.memory.write(table + 16 * index, &descriptor.to_bytes());
            }
            let length = u32::try_from(16 * chain.len()).expect("INVARIANT: a chain is short");
            let address = Ring::address(table);
            self.ring.describe(head, Descriptor { address, length, flags: INDIRECT, next: 0 });
        } else {
            for (index, &descriptor) in (head..).zip(chain) {
                let own = usize::from(descriptor.next) < CHAIN;
                let next = if own { head + descriptor.next } else { descriptor.next };
                self.ring.describe(index, Descriptor { next, ..descriptor });
            }
        }
        self.ring.publish(&mut lock(&self.available), head);
    }

    fn reap(&self, position: &mut u16) -> bool {
        let before = *position;
        while let Some((head, written)) = self.ring.reap(position) {
            let slot = usize::from(head) / CHAIN;
            let whole = usize::from(head) % CHAIN == 0;
            let done = DONE.saturating_add(written);
            let known = self.slots.get(slot).filter(|_| whole).is_some_and(|state| {
                let (old, new) = (PENDING, done);
                state.compare_exchange(old, new, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            });
            if !known {
                self.strays.fetch_add(1, Ordering::Relaxed);
            }
        }
        *position != before
    }

    fn try_reap(&self) {
        match self.used.try_lock() {
            Ok(mut position) => {
                if self.reap(&mut position) {
                    self.wake();
                }
            }
            Err(TryLockError::Poisoned(poisoned)) => {
                self.reap(&mut poisoned.into_inner());
            }
            Err(TryLockError::WouldBlock) => {}
        }
    }

    fn written(&self, slot: u16) -> Option<u32> {
        self.slots[usize::from(slot)].load(Ordering::Acquire).checked_sub(DONE)
    }

    fn wait_done(&self, slot: u16) -> Result<u32> {
        let start = Instant::now();
        loop {
            self.try_reap();
            if let Some(written) = self.written(slot) {
                return Ok(written);
            }
            if start.elapsed() >= self.manner.poll {
                return self.sleep(slot, start + self.manner.patience);
            }
            std::hint::spin_loop();
        }
    }

    fn sleep(&self, slot: u16, deadline: Instant) -> Result<u32> {
        let silence = Error::Silence { what: "a request", patience: self.manner.patience };
        loop {
            if let Some(written) = self.written(slot) {
                return Ok(written);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(silence);
            }
            if let Ok(leading) = self.leader.try_lock() {
                let led = self.lead(slot, deadline);
                drop(leading);
                self.wake();
                led?;
                continue;
            }
            let parked = lock(&self.park);
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            fence(Ordering::SeqCst);
            // The leader may have ended, or have answered us, before it saw us here.
            if self.written(slot).is_none() && self.leader.try_lock().is_err() {
                drop(self.unpark.wait_timeout(parked, left));
            } else {
                drop(parked);
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Waits for interrupts on behalf of all until `slot` is done. Those who still look
    /// may take what the interrupt was for; it comes all the same.
    fn lead(&self, slot: u16, deadline: Instant) -> Result<()> {
        loop {
            let (reaped, more) = {
                let mut position = lock(&self.used);
                let reaped = self.reap(&mut position);
                (reaped, self.ring.want_call(*position))
            };
            if reaped {
                self.wake();
            }
            if self.written(slot).is_some() {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if !more && !self.interrupt.wait(left)? {
                break;
            }
        }
        self.ring.spare_call();
        Ok(())
    }

    /// Wakes those that sleep while another leads.
    fn wake(&self) {
        fence(Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.park));
            self.unpark.notify_all();
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
