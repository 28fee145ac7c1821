//! Serving a split virtqueue (virtio 1.2, section 2.7) that lives in guest memory.
//!
//! The same code serves the broker's queues and a worker's own. Whoever serves a
//! queue of a worker slot keeps its state in the slot's [page](super::page), so that the
//! broker can answer what a dead worker left.
//!

use std::os::fd::OwnedFd;
use std::sync::Arc;

use virtio_queue::{Queue, QueueT};
use vm_memory::{Bytes, GuestAddress, GuestMemoryMmap};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::page::SlotPage;
use crate::errno::Errno;
use crate::wire;

/// The guest's memory as its RAM regions are mapped here.
pub type Memory = GuestMemoryMmap<()>;

/// Bytes that [`Ring::bury`] returns of a request: all of a CLOSE or an UNMAP.
pub const SHORT: usize = size_of::<wire::ReqHeader>() + size_of::<wire::UnmapReq>();

/// Largest queue that we serve.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Where a queue lies and how far it has been served.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C, packed)]
pub struct RingConfig {
    /// Guest-physical address of the descriptor table.
    pub descriptors: u64,
    /// Guest-physical address of the available ring.
    pub available: u64,
    /// Guest-physical address of the used ring.
    pub used: u64,
    /// Entries.
    pub size: u16,
    /// Position in the available ring that is served next.
    pub next_available: u16,
    /// Whether `VIRTIO_F_EVENT_IDX` was negotiated: 0 or 1.
    pub event_idx: u16,
    /// Zero.
    pub reserved: u16,
}

/// A request taken from a queue, copied once, and where its reply goes.
#[derive(Debug, Default)]
pub struct Message {
    /// Head of its descriptor chain.
    pub head: u16,
    /// All bytes that the guest gave to read.
    pub request: Vec<u8>,
    /// Where the guest wants the reply: guest-physical address and length.
    pub reply: Vec<(u64, u32)>,
}

impl Message {
    /// Bytes of reply that the guest has room for.
    pub fn room(&self) -> usize {
        self.reply.iter().map(|&(_, length)| length as usize).fold(0, usize::saturating_add)
    }
}

/// A virtqueue and the side of it that we serve.
pub struct Ring {
    queue: Queue,
    memory: Arc<Memory>,
    call: Option<OwnedFd>,
    page: Option<Arc<SlotPage>>,
    spare: Vec<Message>,
    broken: bool,
}

/// How far a queue has been served, to tell whether it goes on where it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    addresses: [u64; 3],
    size: u16,
    next_available: u16,
    next_used: u16,
}

/// Replies that were ready while their queue was stopped. A frontend that stops a queue
/// for a pause starts it where it was, and its guest waits for them; after a reset the
/// queue begins anew, and nobody does.
#[derive(Debug, Default)]
pub struct Parked {
    position: Option<Position>,
    replies: Vec<(Message, Vec<u8>)>,
}

impl Parked {
    /// The queue is stopped here.
    pub fn stopped(&mut self, ring: &Ring) {
        self.position = Some(ring.position());
    }

    /// Keeps a reply until the queue starts again.
    pub fn keep(&mut self, message: Message, reply: &[u8]) {
        if self.position.is_some() {
            self.replies.push((message, reply.to_vec()));
        }
    }

    /// The queue starts: gives what was kept if it goes on where it was. `false` if it
    /// begins anew, so that nothing taken before may be answered.
    pub fn started(&mut self, ring: &mut Ring) -> bool {
        let resumes = self.position.take() == Some(ring.position());
        let replies = std::mem::take(&mut self.replies);
        if resumes {
            replies.into_iter().for_each(|(message, reply)| ring.give(message, &reply));
        } else {
            ring.forget_pending();
        }
        resumes
    }
}

/// Why a queue cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum RingError {
    /// Its addresses or its size are not those of a virtqueue in guest memory.
    #[error("the queue at {0:?} does not lie in guest memory")]
    Misplaced(RingConfig),
}

impl Ring {
    /// A queue at `config`, whose interrupts go to `call`.
    pub fn new(
        config: RingConfig,
        memory: Arc<Memory>,
        call: Option<OwnedFd>,
        page: Option<Arc<SlotPage>>,
    ) -> Result<Self, RingError> {
        let misplaced = |_| RingError::Misplaced(config);
        let mut queue = Queue::new(MAX_QUEUE_SIZE).map_err(misplaced)?;
        queue.try_set_size(config.size).map_err(misplaced)?;
        queue.try_set_desc_table_address(GuestAddress(config.descriptors)).map_err(misplaced)?;
        queue.try_set_avail_ring_address(GuestAddress(config.available)).map_err(misplaced)?;
        queue.try_set_used_ring_address(GuestAddress(config.used)).map_err(misplaced)?;
        queue.set_event_idx(config.event_idx != 0);
        queue.set_next_avail(config.next_available);
        queue.set_ready(true);
        if !queue.is_valid(&*memory) {
            return Err(RingError::Misplaced(config));
        }
        let used =
            queue.used_idx(&*memory, std::sync::atomic::Ordering::Acquire).map_err(misplaced)?;
        queue.set_next_used(used.0);
        Ok(Self { queue, memory, call, page, spare: Vec::new(), broken: false })
    }

    /// Position in the available ring that is served next.
    pub fn next_available(&self) -> u16 {
        self.queue.next_avail()
    }

    /// How far it has been served.
    pub fn position(&self) -> Position {
        Position {
            addresses: [self.queue.desc_table(), self.queue.avail_ring(), self.queue.used_ring()],
            size: self.queue.size(),
            next_available: self.queue.next_avail(),
            next_used: self.queue.next_used(),
        }
    }

    /// What was taken from this queue before is nobody's any more.
    fn forget_pending(&self) {
        if let Some(page) = &self.page {
            page.pending().into_iter().for_each(|(head, _)| page.forget(head));
        }
    }

    /// Interrupts the guest through `call` from now on, and once at once: what was
    /// rung on the old descriptor just now, nobody may have heard.
    pub fn set_call(&mut self, call: OwnedFd) {
        let _ = nix::unistd::write(&call, &1u64.to_ne_bytes());
        self.call = Some(call);
    }

    /// Takes the next request, if there is one. A chain that cannot be read, or is
    /// longer than [`wire::MAX_REQUEST`], is taken too: with an empty request.
    pub fn take(&mut self) -> Option<Message> {
        let Some(chain) = self.queue.pop_descriptor_chain(Arc::clone(&self.memory)) else {
            self.check_position();
            return None;
        };
        let mut message = self.spare.pop().unwrap_or_default();
        message.head = chain.head_index();
        message.request.clear();
        message.reply.clear();
        let mut sound = true;
        for descriptor in chain {
            let (address, length) = (descriptor.addr(), descriptor.len());
            if descriptor.is_write_only() {
                message.reply.push((address.0, length));
                continue;
            }
            let start = message.request.len();
            let end = start.saturating_add(length as usize);
            // A readable part behind a writable one is against the specification (2.7.4.2).
            sound &= end <= wire::MAX_REQUEST as usize && message.reply.is_empty();
            if sound {
                message.request.resize(end, 0);
                let part = &mut message.request[start..];
                sound = self.memory.read_slice(part, address).is_ok();
            }
        }
        if !sound {
            message.request.clear();
        }
        if let Some(page) = &self.page {
            page.taken(&message, self.queue.next_avail());
        }
        Some(message)
    }

    /// A position further on than the queue is long is no driver's: the queue is given
    /// up, or whoever serves it would look at it for ever.
    fn check_position(&mut self) {
        let ahead = self
            .queue
            .avail_idx(&*self.memory, std::sync::atomic::Ordering::Acquire)
            .map_or(0, |index| index.0.wrapping_sub(self.queue.next_avail()));
        if ahead > self.queue.size() && !self.broken {
            tracing::warn!(ahead, "the guest broke its queue, which is served no more");
            self.broken = true;
        }
    }

    /// Whether the guest has made more requests available.
    pub fn has_more(&self) -> bool {
        self.queue
            .avail_idx(&*self.memory, std::sync::atomic::Ordering::Acquire)
            .is_ok_and(|index| index.0 != self.queue.next_avail())
    }

    /// Gives the reply to `message`, cut to what the guest has room for, and
    /// interrupts the guest if it wants that.
    pub fn give(&mut self, message: Message, reply: &[u8]) {
        let mut rest = reply;
        for &(address, length) in &message.reply {
            let (now, later) = rest.split_at(rest.len().min(length as usize));
            if now.is_empty() || self.memory.write_slice(now, GuestAddress(address)).is_err() {
                break;
            }
            rest = later;
        }
        // CAST: a reply is no longer than MAX_RESPONSE.
        let written = (reply.len() - rest.len()) as u32;
        self.give_back(message.head, written);
        if self.spare.len() < 8 && message.request.capacity() <= 64 << 10 {
            self.spare.push(message);
        }
    }

    /// Returns a chain with `written` bytes in it.
    fn give_back(&mut self, head: u16, written: u32) {
        if let Err(error) = self.queue.add_used(&*self.memory, head, written) {
            tracing::debug!(%error, head, "a reply could not be given");
        }
        if let Some(page) = &self.page {
            page.given(head, self.queue.next_used());
        }
        self.interrupt();
    }

    fn interrupt(&mut self) {
        if self.queue.needs_notification(&*self.memory).unwrap_or(true) {
            if let Some(call) = &self.call {
                // Full means that an interrupt is pending already.
                let _ = nix::unistd::write(call, &1u64.to_ne_bytes());
            }
        }
    }

    /// Asks the guest to kick for its next request; `true` if there is one already.
    pub fn want_kick(&mut self) -> bool {
        self.queue.enable_notification(&*self.memory).unwrap_or(false) && !self.broken
    }

    /// Spares the guest its kicks while we look at the queue anyway.
    pub fn spare_kick(&mut self) {
        let _ = self.queue.disable_notification(&*self.memory);
    }

    /// Answers ENODEV to everything that was taken and never answered, and to
    /// everything that waits: the server of this queue is dead. Returns the beginnings
    /// of the requests that waited, [`SHORT`] bytes of each.
    ///
    /// What its page says is checked like a guest's word: a worker may have lied.
    pub fn bury(&mut self) -> Vec<Vec<u8>> {
        let taken = self.page.clone().map_or_else(Vec::new, |page| {
            // A worker that died between publishing a reply and noting it has given it.
            if page.next_used() != self.queue.next_used() {
                self.last_given().into_iter().for_each(|head| page.forget(head));
            }
            page.pending()
        });
        // All that waits is taken before the first answer: a head that is answered comes
        // back at once with another request. What is in both lists was taken by a worker
        // that died before it noted its position.
        let size = usize::from(self.queue.size());
        let mut waiting: Vec<Message> = std::iter::from_fn(|| self.take()).take(size).collect();
        waiting.retain(|message| taken.iter().all(|(head, _)| *head != message.head));
        let reply = gone();
        for (head, reply_at) in taken {
            let reply_at = reply_at.into_iter().collect();
            self.give(Message { head, reply: reply_at, ..Message::default() }, &reply);
        }
        let mut waited = Vec::new();
        // A guest that keeps asking a dead worker is not listened to for ever.
        for _ in 0..4 * size {
            let Some(message) = waiting.pop().or_else(|| self.take()) else { break };
            waited.push(message.request.iter().copied().take(SHORT).collect());
            self.give(message, &reply);
        }
        self.want_kick();
        waited
    }

    /// Head of the chain that was returned last.
    fn last_given(&self) -> Option<u16> {
        let size = self.queue.size();
        let last = self.queue.next_used().wrapping_sub(1) % size;
        let at = self.queue.used_ring().checked_add(4 + 8 * u64::from(last))?;
        let head: u32 = self.memory.read_obj(GuestAddress(at)).ok()?;
        u16::try_from(head).ok().filter(|&head| head < size)
    }
}

/// The reply of a file whose worker is gone.
fn gone() -> [u8; 8] {
    let mut reply = [0; 8];
    let header = wire::RespHeader { status: Errno::ENODEV.status().into(), len: 8.into() };
    reply.copy_from_slice(header.as_bytes());
    reply
}
