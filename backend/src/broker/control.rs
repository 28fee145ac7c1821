//! Queues 0 and 1, and the thread that serves them.
//!
//! The thread answers what concerns the guest as a whole, starts workers, and passes
//! on what is a worker's to answer. It waits for nobody but the VMM and the kernel.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::time::{clock_gettime, ClockId};
use nvguest_abi::compiled::padded;
use zerocopy::{FromBytes, IntoBytes};

use super::{slot_of, Broker};
use crate::errno::Errno;
use crate::limits::Resource;
use crate::sync::lock;
use crate::transport::events::EventQueue;
use crate::transport::ring::{Message, Parked, Ring};
use crate::wire::{self, Kind};
use crate::worker::serve::read_header;
use crate::worker::start::Process;

/// A guest that begins anew waits so long for what it held before.
const FRESH: Duration = Duration::from_secs(10);

/// The broker's queues.
pub struct Control {
    epoll: Epoll,
    queue: Mutex<ControlQueue>,
    events: Mutex<(EventQueue, Option<OwnedFd>)>,
    greeted: AtomicBool,
    epoch: AtomicU32,
    /// Bytes of requests that workers were asked and have not answered.
    asked: AtomicU64,
    tally: [AtomicU64; Kind::ALL.len()],
    failed: [AtomicU64; Kind::ALL.len()],
}

#[derive(Default)]
struct ControlQueue {
    generation: u64,
    ring: Option<Ring>,
    kick: Option<OwnedFd>,
    parked: Parked,
}

/// A request that a worker will answer.
#[derive(Debug)]
pub struct Pending {
    generation: u64,
    message: Message,
    /// Bytes of it that count against the guest's share.
    counted: u64,
}

/// Starts the thread.
pub fn start(broker: &Arc<Broker>) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("control".into())
        .stack_size(256 << 10)
        .spawn(move || broker.control.run(&broker))
        .context("Starting the control thread failed")?;
    Ok(())
}

impl Control {
    /// Serves no queue yet.
    pub fn new() -> Result<Self> {
        Ok(Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            queue: Mutex::default(),
            events: Mutex::default(),
            greeted: AtomicBool::new(false),
            epoch: AtomicU32::new(0),
            asked: AtomicU64::new(0),
            tally: Default::default(),
            failed: Default::default(),
        })
    }

    fn queue(&self) -> MutexGuard<'_, ControlQueue> {
        lock(&self.queue)
    }

    fn events(&self) -> MutexGuard<'_, (EventQueue, Option<OwnedFd>)> {
        lock(&self.events)
    }

    fn run(&self, broker: &Arc<Broker>) {
        let mut ready = [EpollEvent::empty(); 16];
        loop {
            let count = match self.epoll.wait(&mut ready, EpollTimeout::NONE) {
                Ok(count) => count,
                Err(nix::Error::EINTR) => continue,
                Err(error) => {
                    tracing::error!(%error, "waiting for the guest failed");
                    return;
                }
            };
            for event in &ready[..count] {
                // CAST: tokens are queue numbers.
                match event.data() as usize {
                    0 => self.drain(broker),
                    1 => self.events_kicked(),
                    index => {
                        if let Some(slot) = slot_of(index) {
                            broker.workers.orphan_kicked(broker, slot);
                        }
                    }
                }
            }
        }
    }

    /// Watches a kick on behalf of the thread; the token is its queue's number.
    pub fn watch(&self, kick: &OwnedFd, index: usize) {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, index as u64);
        if let Err(error) = self.epoll.add(kick.as_fd(), event) {
            tracing::error!(%error, queue = index, "watching a kick failed");
        }
    }

    /// The reverse of [`Control::watch`].
    pub fn unwatch(&self, kick: &OwnedFd) {
        let _ = self.epoll.delete(kick.as_fd());
    }

    /// Begins to serve queue 0 or 1.
    pub fn begin(&self, broker: &Broker, index: usize) {
        let (parts, memory) = {
            let device = broker.device();
            (device.parts(index), device.memory())
        };
        let (Some(parts), Some(memory)) = (parts, memory) else { return };
        let mut ring = match Ring::new(parts.config, memory, Some(parts.call), None) {
            Ok(ring) => ring,
            Err(error) => {
                tracing::error!(%error, queue = index, "the guest's queue cannot be served");
                return;
            }
        };
        self.watch(&parts.kick, index);
        if index == 0 {
            let mut queue = self.queue();
            if !queue.parked.started(&mut ring) {
                queue.generation += 1;
            }
            queue.ring = Some(ring);
            queue.kick = Some(parts.kick);
        } else {
            let mut events = self.events();
            events.1 = Some(parts.kick);
            events.0.start(ring, None);
        }
        // What the guest made available before it was served.
        if index == 0 {
            self.rouse();
        }
    }

    /// The queue's kick is rung by ourselves: the thread looks at the queue.
    fn rouse(&self) {
        if let Some(kick) = &self.queue().kick {
            let _ = nix::unistd::write(kick, &1u64.to_ne_bytes());
        }
    }

    /// Stops serving queue 0 or 1, and notes how far it was served.
    pub fn end(&self, broker: &Broker, index: usize) {
        let (position, kick) = if index == 0 {
            let mut queue = self.queue();
            let ring = queue.ring.take();
            if let Some(ring) = &ring {
                queue.parked.stopped(ring);
            }
            (ring.map(|ring| ring.next_available()), queue.kick.take())
        } else {
            let mut events = self.events();
            (events.0.stop(), events.1.take())
        };
        if let Some(kick) = kick {
            self.unwatch(&kick);
        }
        if let Some(position) = position {
            broker.device().set_position(index, position);
        }
    }

    /// Interrupts the guest through `call` from now on.
    pub fn set_call(&self, index: usize, call: OwnedFd) {
        if index == 0 {
            if let Some(ring) = &mut self.queue().ring {
                ring.set_call(call);
            }
        } else if let Some(ring) = self.events().0.ring_mut() {
            ring.set_call(call);
        }
    }

    /// Sends an event on queue 1.
    pub fn event(&self, kind: u32, file: u32, mask: u32, more: u32) {
        self.events().0.send(kind, file, mask, more);
    }

    /// What a worker that is gone said of its files: that they are lost says it all.
    pub fn forget_events(&self, worker: u16) {
        self.events().0.forget_worker(worker);
    }

    fn events_kicked(&self) {
        let mut events = self.events();
        if let Some(kick) = &events.1 {
            let _ = nix::unistd::read(kick, &mut [0; 8]);
        }
        events.0.flush();
    }

    fn drain(&self, broker: &Arc<Broker>) {
        if let Some(kick) = &self.queue().kick {
            let _ = nix::unistd::read(kick, &mut [0; 8]);
        }
        loop {
            let taken = {
                let mut queue = self.queue();
                let generation = queue.generation;
                let Some(ring) = &mut queue.ring else { return };
                match ring.take() {
                    Some(message) => Some(Pending { generation, message, counted: 0 }),
                    None if ring.want_kick() => None,
                    None => return,
                }
            };
            if let Some(pending) = taken {
                self.serve(broker, pending);
            }
        }
    }

    fn serve(&self, broker: &Arc<Broker>, mut pending: Pending) {
        let header = match read_header(&pending.message.request) {
            Ok(header) => header,
            Err(errno) => return self.fail(pending, errno),
        };
        let Some(kind) = Kind::from_number(header.kind.get()) else { return };
        self.tally[kind as usize - 1].fetch_add(1, Ordering::Relaxed);
        if kind != Kind::Hello && !self.greeted.load(Ordering::Acquire) {
            return self.fail(pending, Errno::EPROTO);
        }
        // A copy stays here until the worker's answer.
        pending.counted = pending.message.request.len() as u64;
        let asked = self.asked.fetch_add(pending.counted, Ordering::Relaxed) + pending.counted;
        if asked > broker.limits.guest(Resource::Bytes) {
            return self.fail(pending, Errno::ENOMEM);
        }
        let answer = {
            let body = &pending.message.request[size_of::<wire::ReqHeader>()..];
            match kind {
                Kind::Hello => self.hello(broker, body),
                Kind::Nodes => chunk(&broker.nodes, body),
                Kind::Schema => chunk(&broker.schema, body),
                Kind::Clock => clock(body),
                Kind::Open => {
                    let caller = header.caller;
                    let process =
                        Process { tgid: caller.tgid.get(), start_ns: caller.start_ns.get() };
                    return broker.workers.open(broker, process, pending);
                }
                Kind::Close | Kind::Ioctl | Kind::Map | Kind::Unmap | Kind::Arm => {
                    return broker.workers.forward(broker, header.file.get(), pending);
                }
            }
        };
        match answer {
            Ok(body) => self.answer(pending, &body),
            Err(errno) => self.fail(pending, errno),
        }
    }

    fn hello(&self, broker: &Arc<Broker>, body: &[u8]) -> Result<Vec<u8>, Errno> {
        let hello = wire::HelloReq::read_from_bytes(body).map_err(|_| Errno::EINVAL)?;
        if hello.version.get() != u32::from(wire::VERSION) {
            tracing::error!(
                "the guest's module speaks version {} of the protocol and this backend {}; \
                 install the module that came with the backend",
                hello.version.get(),
                wire::VERSION
            );
            return Err(Errno::EPROTO);
        }
        if hello.flags.get() & !wire::HELLO_FRESH != 0 {
            return Err(Errno::EINVAL);
        }
        if hello.flags.get() & wire::HELLO_FRESH != 0 {
            broker.workers.end_all();
            if !broker.workers.await_empty(FRESH) {
                return Err(Errno::EBUSY);
            }
            broker.window.clear(None);
            if broker.device().can_map() {
                broker.window.place_arena();
            }
            self.events().0.forget();
        }
        self.greeted.store(true, Ordering::Release);
        let epoch = self.epoch.fetch_add(1, Ordering::Relaxed).wrapping_add(1);
        tracing::info!(epoch, "the guest's driver says hello");
        let word = |limit: u64| u32::try_from(limit).unwrap_or(u32::MAX);
        // CAST: the blobs are small.
        let length = |blob: &[u8]| (blob.len() as u32).into();
        let answer = wire::HelloResp {
            version: u32::from(wire::VERSION).into(),
            caps: broker.compiled.capabilities.into(),
            driver: padded(&broker.compiled.release),
            profile: padded(&broker.compiled.profile),
            window_size: broker.window_size().into(),
            max_request: wire::MAX_REQUEST.into(),
            max_response: wire::MAX_RESPONSE.into(),
            max_segments: wire::MAX_SEGMENTS.into(),
            max_files: word(broker.limits.process(Resource::Files)).into(),
            max_placements: word(broker.limits.guest(Resource::Placements)).into(),
            nodes_len: length(&broker.nodes),
            schema_len: length(&broker.schema),
            epoch: epoch.into(),
        };
        Ok(answer.as_bytes().to_vec())
    }

    /// A request for a file of a worker that is gone: ENODEV, but an UNMAP is heard.
    pub fn answer_for_dead(&self, broker: &Broker, pending: Pending) {
        match broker.window.unmapped(pending.request()) {
            Ok(()) => self.answer(pending, &[]),
            Err(errno) => self.fail(pending, errno),
        }
    }

    /// Answers with a body.
    fn answer(&self, pending: Pending, body: &[u8]) {
        let len = size_of::<wire::RespHeader>() + body.len();
        if len > pending.message.room() {
            return self.fail(pending, Errno::EMSGSIZE);
        }
        // CAST: bodies are small.
        let header = wire::RespHeader { status: 0.into(), len: (len as u32).into() };
        let reply = [header.as_bytes(), body].concat();
        self.give(pending, &reply);
    }

    /// Answers with an errno.
    pub fn fail(&self, pending: Pending, errno: Errno) {
        if let Some(kind) = pending.kind() {
            self.failed[kind as usize - 1].fetch_add(1, Ordering::Relaxed);
        }
        let header = wire::RespHeader {
            status: errno.status().into(),
            // CAST: a header has eight bytes.
            len: (size_of::<wire::RespHeader>() as u32).into(),
        };
        self.give(pending, header.as_bytes());
    }

    /// Gives a whole reply, unless the queue has begun anew since.
    pub fn give(&self, pending: Pending, reply: &[u8]) {
        self.asked.fetch_sub(pending.counted, Ordering::Relaxed);
        let mut queue = self.queue();
        if queue.generation == pending.generation {
            match &mut queue.ring {
                Some(ring) => ring.give(pending.message, reply),
                None => queue.parked.keep(pending.message, reply),
            }
        }
    }

    /// Requests of each kind that came on queue 0.
    pub fn counted(&self, kind: Kind) -> u64 {
        self.tally[kind as usize - 1].load(Ordering::Relaxed)
    }

    /// Requests of each kind that the broker itself answered with an errno.
    pub fn errors(&self, kind: Kind) -> u64 {
        self.failed[kind as usize - 1].load(Ordering::Relaxed)
    }

    /// Event records that went out on queue 1.
    pub fn events_counted(&self) -> u64 {
        self.events().0.sent()
    }
}

impl Pending {
    /// The request as the guest sent it.
    pub fn request(&self) -> &[u8] {
        &self.message.request
    }

    /// What it asks.
    pub fn kind(&self) -> Option<Kind> {
        Kind::from_number(read_header(self.request()).ok()?.kind.get())
    }

    /// Bytes of reply that the guest has room for.
    pub fn room(&self) -> usize {
        self.message.room()
    }
}

fn chunk(blob: &[u8], body: &[u8]) -> Result<Vec<u8>, Errno> {
    let request = wire::ReadReq::read_from_bytes(body).map_err(|_| Errno::EINVAL)?;
    let rest = blob.get(request.offset.get() as usize..).ok_or(Errno::EINVAL)?;
    Ok(rest[..rest.len().min(request.size.get() as usize)].to_vec())
}

fn clock(body: &[u8]) -> Result<Vec<u8>, Errno> {
    if !body.is_empty() {
        return Err(Errno::EINVAL);
    }
    let now = |clock| -> Result<u64, Errno> {
        let now = clock_gettime(clock)?;
        let seconds = u64::try_from(now.tv_sec()).unwrap_or(0);
        Ok(seconds * 1_000_000_000 + u64::try_from(now.tv_nsec()).unwrap_or(0))
    };
    let answer = wire::ClockResp {
        monotonic_ns: now(ClockId::CLOCK_MONOTONIC)?.into(),
        realtime_ns: now(ClockId::CLOCK_REALTIME)?.into(),
        raw_ns: now(ClockId::CLOCK_MONOTONIC_RAW)?.into(),
    };
    Ok(answer.as_bytes().to_vec())
}
