//! One worker, from the broker's side: its process, its link, and its end.

use std::collections::HashMap;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use nvguest_abi::compiled::Verdict;
use zerocopy::IntoBytes;

use super::arena::{Arena, NotYours};
use super::control::Pending;
use super::Broker;
use crate::errno::Errno;
use crate::limits::{Resource, TABLE};
use crate::policy::What;
use crate::starter::Started;
use crate::sync::lock;
use crate::transport::link::{Kind, Message, Outgoing, Receiver, Sender};
use crate::transport::page::SlotPage;
use crate::transport::process::Process as HostProcess;
use crate::wire;
use crate::worker::start::{Process, Start};

/// A worker that does not read for so long is ended.
const PATIENCE: Duration = Duration::from_secs(1);
/// A worker whose process closed its last file lives on so long, for the next open.
const LINGER: Duration = Duration::from_secs(2);
/// Questions of one worker that wait for the broker's answer at most: each of its threads
/// asks one at a time, and a few may have lost their patience.
const MAX_QUESTIONS: usize = 64;
/// A worker gives a queue back within this, or is ended.
const STOPPING: Duration = Duration::from_secs(2);

/// A worker process.
pub struct Worker {
    /// The upper half of its files' handles.
    pub number: u16,
    /// The guest process that it serves.
    pub process: Process,
    /// State of its queues that outlives it.
    pub page: Arc<SlotPage>,
    /// Its process id on the host.
    pub pid: i32,
    host_process: HostProcess,
    sender: Sender,
    next_tag: AtomicU64,
    /// Requests that came on queue 0 and that it will answer.
    pending: Mutex<HashMap<u64, Pending>>,
    /// Workers that wait for a file of this one, with the tags of their questions.
    fetching: Mutex<HashMap<u64, (Arc<Worker>, u64)>>,
    /// Its questions that wait for the VMM or for another worker.
    questions: AtomicUsize,
    stopped: (Mutex<bool>, Condvar),
    ended: AtomicBool,
}

impl Worker {
    /// Starts a process and the thread that listens to it.
    pub fn start(broker: &Arc<Broker>, number: u16, process: Process) -> Result<Arc<Self>> {
        let page = Arc::new(SlotPage::create().context("Making a worker's page failed")?);
        page.set_placements(broker.window.usage().0);
        let started = broker.starter.start().context("Starting a worker process failed")?;
        let Started { pid, process: host_process, link } = started;
        let worker = Arc::new(Self {
            number,
            process,
            page,
            pid,
            host_process,
            sender: Sender::new(link.try_clone()?, PATIENCE)?,
            next_tag: AtomicU64::new(1),
            pending: Mutex::default(),
            fetching: Mutex::default(),
            questions: AtomicUsize::new(0),
            stopped: Default::default(),
            ended: AtomicBool::new(false),
        });
        worker.introduce(broker)?;
        let listener = Listener { broker: Arc::clone(broker), worker: Arc::clone(&worker) };
        let receiver = Receiver::new(link);
        std::thread::Builder::new()
            .name(format!("worker-{number}"))
            .stack_size(256 << 10)
            .spawn(move || listener.run(receiver))
            .context("Starting a worker's thread failed")?;
        Ok(worker)
    }

    fn introduce(&self, broker: &Broker) -> Result<()> {
        let arena = broker.window.arena().filter(|arena| arena.is_placed());
        let start = Start {
            worker: self.number,
            host: broker.host,
            process: self.process,
            poll_us: broker.poll_us,
            max_placements: placements(broker.limits.guest(Resource::Placements)),
            max_own_placements: placements(broker.limits.process(Resource::Placements)),
            lines: broker.limits.guest(Resource::Lines),
            disables: broker.limits.guest(Resource::Disables),
            own_disables: broker.limits.process(Resource::Disables),
            own_user: broker.own_user,
            vram_mode: broker.vram_mode,
            weight: broker.weight(),
            arena_size: arena.map_or(0, Arena::size),
            compiled: Arc::clone(&broker.compiled),
            nodes: Arc::clone(&broker.devices),
        };
        let page = self.page.share()?;
        let rates = broker.rates.share()?;
        let trace = broker.trace.ring().share()?;
        let mut fds = vec![page.as_raw_fd(), rates.as_raw_fd(), trace.as_raw_fd()];
        fds.extend(arena.map(|arena| arena.file().as_raw_fd()));
        fds.extend(broker.card.as_ref().map(AsRawFd::as_raw_fd));
        let payload = start.encode(&broker.compiled_blob);
        let out = Outgoing { payload: &payload, fds: &fds, ..Outgoing::default() };
        self.sender.send(Kind::Start, out).context("Greeting a worker failed")
    }

    /// Sends; a worker that does not take it is ended.
    pub fn tell(&self, kind: Kind, message: Outgoing<'_>) -> io::Result<()> {
        let sent = self.sender.send(kind, message);
        if let Err(error) = &sent {
            tracing::debug!(%error, worker = self.number, "a worker does not read");
            self.end();
        }
        sent
    }

    /// Ends the process. What follows is its listener's to do.
    pub fn end(&self) {
        if !self.ended.swap(true, Ordering::AcqRel) {
            self.host_process.kill();
        }
    }

    fn tag(&self) -> u64 {
        self.next_tag.fetch_add(1, Ordering::Relaxed)
    }

    /// Passes a request on; the answer goes straight to queue 0.
    pub fn forward(&self, broker: &Broker, pending: Pending) {
        let tag = self.tag();
        let room = pending.room() as u64;
        let request = pending.request().to_vec();
        lock(&self.pending).insert(tag, pending);
        let words = [room, 0, 0, 0];
        let out = Outgoing { tag, words, payload: &request, ..Outgoing::default() };
        if self.tell(Kind::Request, out).is_err() || self.ended.load(Ordering::Acquire) {
            if let Some(pending) = lock(&self.pending).remove(&tag) {
                broker.control.fail(pending, Errno::ENODEV);
            }
        }
    }

    /// Asks for a file of this worker on behalf of another.
    fn export(&self, asker: &Arc<Worker>, asker_tag: u64, file: u64) {
        let tag = self.tag();
        lock(&self.fetching).insert(tag, (Arc::clone(asker), asker_tag));
        let words = [file, 0, 0, 0];
        let out = Outgoing { tag, words, ..Outgoing::default() };
        if self.tell(Kind::Export, out).is_err() || self.ended.load(Ordering::Acquire) {
            if let Some((asker, tag)) = lock(&self.fetching).remove(&tag) {
                asker.answer_later(Kind::Fetched, tag, Err(Errno::ENODEV), [0; 2]);
            }
        }
    }

    /// It has one more question that is not answered at once; `false` if those are too many.
    fn may_ask(&self) -> bool {
        self.questions.fetch_add(1, Ordering::AcqRel) < MAX_QUESTIONS
    }

    /// Answers such a question, or says why not.
    pub(super) fn answer_later(
        &self,
        kind: Kind,
        tag: u64,
        outcome: Result<(), Errno>,
        more: [u64; 2],
    ) {
        self.questions.fetch_sub(1, Ordering::AcqRel);
        self.answer(kind, tag, outcome, more);
    }

    /// Answers a question of this worker's.
    fn answer(&self, kind: Kind, tag: u64, outcome: Result<(), Errno>, more: [u64; 2]) {
        let errno = outcome.err().map_or(0, |errno| u64::from(errno.status()));
        let words = [errno, more[0], more[1], 0];
        let _ = self.tell(kind, Outgoing { tag, words, ..Outgoing::default() });
    }

    /// Takes the queues back; returns once the worker does not touch them.
    pub fn stop(&self) {
        *lock(&self.stopped.0) = false;
        if self.tell(Kind::Stop, Outgoing::default()).is_err() {
            return;
        }
        let stopped = lock(&self.stopped.0);
        let waited = self.stopped.1.wait_timeout_while(stopped, STOPPING, |stopped| !*stopped);
        let kept = waited.unwrap_or_else(PoisonError::into_inner).1.timed_out();
        if kept {
            tracing::warn!(worker = self.number, "a worker kept its queue and is ended");
            self.end();
        }
    }

    fn has_stopped(&self) {
        *lock(&self.stopped.0) = true;
        self.stopped.1.notify_all();
    }
}

/// The thread that listens to one worker. What it hears is as untrusted as a guest.
struct Listener {
    broker: Arc<Broker>,
    worker: Arc<Worker>,
}

impl Listener {
    fn run(self, mut receiver: Receiver) {
        let (mut files, mut idle) = (0, false);
        loop {
            let patience = (files == 0).then_some(LINGER);
            if receiver.set_patience(patience).is_err() {
                break;
            }
            match receiver.receive() {
                Ok(Some(message)) if message.kind == Kind::Files => files = message.words[0],
                Ok(Some(message)) => {
                    if let Err(kind) = self.hear(message) {
                        tracing::warn!(?kind, worker = self.worker.number, "not a worker's to say");
                        break;
                    }
                }
                Ok(None) => break,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    if !self.worker.is_asked() {
                        idle = true;
                        break;
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, worker = self.worker.number, "a worker's link broke");
                    break;
                }
            }
        }
        self.bury(files, idle);
    }

    fn hear(&self, mut message: Message) -> Result<(), Kind> {
        let (broker, worker) = (&self.broker, &self.worker);
        if matches!(message.kind, Kind::Place | Kind::Unplace | Kind::Fetch) {
            // They wait, and with them all that came along.
            message.payload = Vec::new();
            if !worker.may_ask() {
                return Err(message.kind);
            }
        }
        match message.kind {
            Kind::Ready => {}
            Kind::Reply => {
                if let Some(pending) = lock(&worker.pending).remove(&message.tag) {
                    broker.control.give(pending, &message.payload);
                }
            }
            Kind::Place => broker.placer.place(worker, message),
            Kind::Unplace => broker.placer.unplace(worker, message),
            Kind::Take | Kind::Give | Kind::Show | Kind::Hide => self.arena(&message)?,
            Kind::Fetch => {
                let file = message.words[0];
                match broker.workers.of_file(u32::try_from(file).unwrap_or(0)) {
                    Some(owner) => owner.export(worker, message.tag, file),
                    None => {
                        worker.answer_later(Kind::Fetched, message.tag, Err(Errno::ENODEV), [0; 2]);
                    }
                }
            }
            Kind::Exported => {
                let Some((asker, tag)) = lock(&worker.fetching).remove(&message.tag) else {
                    return Ok(());
                };
                message.fds.truncate(1);
                let fds: Vec<_> = message.fds.iter().map(AsRawFd::as_raw_fd).collect();
                let [errno, kind, range, bytes] = message.words;
                let [range, length] = match range {
                    0 => [0, bytes],
                    range => self.share(range, &asker).ok_or(message.kind)?,
                };
                let words = [errno, kind, range, length];
                let out = Outgoing { tag, words, fds: &fds, ..Outgoing::default() };
                asker.questions.fetch_sub(1, Ordering::AcqRel);
                let _ = asker.tell(Kind::Fetched, out);
            }
            Kind::Event => {
                let [event, file, mask, more] = message.words;
                let file = u32::try_from(file).unwrap_or(0);
                let known = [wire::EVENT_READY, wire::EVENT_RELEASED];
                let event = known.into_iter().find(|&kind| u64::from(kind) == event);
                let is_its_own = wire::file_worker(file) == worker.number;
                if let Some(event) = event.filter(|_| is_its_own) {
                    // CAST: poll's bits are few, and so is what is promised.
                    let (mask, more) = (mask as u32 & 0xffff, more as u32);
                    broker.control.event(event, file, mask, more);
                }
            }
            Kind::Hold => {
                let [resource, wanted, ..] = message.words;
                let row = usize::try_from(resource).ok().and_then(|index| TABLE.get(index));
                let granted = row
                    .ok_or(Errno::EINVAL)
                    .and_then(|row| broker.shares.hold(worker.number, row.resource, wanted));
                let more = [granted.unwrap_or(0), 0];
                worker.answer(Kind::Held, message.tag, granted.map(drop), more);
            }
            Kind::Charge => self.charge(&message),
            Kind::Memory => worker.tell_memory(broker, message.tag),
            Kind::Credit => broker.video.credit(worker.number, message.words[0]),
            Kind::Sliced => {
                broker.slice_was_refused(u32::try_from(message.words[0]).unwrap_or(u32::MAX));
            }
            Kind::Stopped => worker.has_stopped(),
            Kind::Refused => {
                let [verdict, part, number, times] = message.words;
                let verdict = Verdict::from_number(u8::try_from(verdict).unwrap_or(u8::MAX));
                if let Some(what) = What::from_parts(part, number) {
                    broker.workers.refused(verdict, what, times);
                }
            }
            kind => return Err(kind),
        }
        Ok(())
    }

    /// A worker is about to allocate video memory, or has.
    fn charge(&self, message: &Message) {
        let [bytes, made, ..] = message.words;
        let outcome = self.broker.video.charge(self.worker.number, bytes, made != 0);
        let words = match outcome {
            Ok(usage) => [0, usage.used, usage.budget, usage.reserve],
            Err(errno) => [u64::from(errno.status()), 0, 0, 0],
        };
        let out = Outgoing { tag: message.tag, words, ..Outgoing::default() };
        let _ = self.worker.tell(Kind::Charged, out);
    }

    /// A range of the arena goes along with a file that another worker fetched: its place plus
    /// one and its length.
    fn share(&self, range: u64, asker: &Worker) -> Option<[u64; 2]> {
        let at = range.checked_sub(1)?;
        let arena = self.broker.window.arena()?;
        let length = arena.share(self.worker.number, at, asker.number).ok()?;
        if asker.ended.load(Ordering::Acquire) {
            // It may have been buried before this; if not, it is now or never.
            let _ = arena.give(asker.number, at);
        }
        Some([range, length])
    }

    /// What a worker says of its ranges of the arena. It speaks of no other's.
    fn arena(&self, message: &Message) -> Result<(), Kind> {
        let (kind, number) = (message.kind, self.worker.number);
        let arena = self.broker.window.arena().ok_or(kind)?;
        let [first, second, ..] = message.words;
        let view = |word| u32::try_from(word).map_err(|_| kind);
        let heard = match kind {
            Kind::Give => arena.give(number, first),
            Kind::Show => arena.show(number, first, view(second)?),
            Kind::Hide => arena.hide(number, view(first)?),
            _ => {
                let (outcome, at) = match arena.take(number, first) {
                    Ok(at) => (Ok(()), at),
                    Err(errno) => (Err(errno), 0),
                };
                self.worker.answer(Kind::Taken, message.tag, outcome, [at, 0]);
                Ok(())
            }
        };
        heard.map_err(|NotYours| kind)
    }

    /// The order matters: nobody may reach memory that RM has given away, and nobody
    /// may wait for a worker that is gone.
    fn bury(&self, files: u64, idle: bool) {
        let (broker, worker) = (&self.broker, &self.worker);
        worker.end();
        if let Err(error) = worker.host_process.await_end() {
            tracing::error!(%error, worker = worker.number, "waiting for a worker's end failed");
        }
        worker.has_stopped();
        for (_, (asker, tag)) in lock(&worker.fetching).drain() {
            asker.answer_later(Kind::Fetched, tag, Err(Errno::ENODEV), [0; 2]);
        }
        let mut unheard = broker.workers.left(broker, worker);
        let pending: Vec<Pending> = lock(&worker.pending).drain().map(|(_, p)| p).collect();
        for pending in pending {
            // An open that came while an idle worker was being ended starts another. One that
            // a worker died of does not, or it would start them for ever.
            if idle && pending.kind() == Some(wire::Kind::Open) {
                broker.workers.open(broker, worker.process, pending);
            } else {
                unheard.push(pending.request().to_vec());
                broker.control.fail(pending, Errno::ENODEV);
            }
        }
        broker.placer.clear(worker.number);
        // The guest does not say UNMAP twice.
        for request in unheard {
            let _ = broker.window.unmapped(&request);
        }
        if files > 0 {
            tracing::info!(worker = worker.number, files, "a worker ended with files open");
        }
        broker.workers.buried(broker, worker);
        broker.control.forget_events(worker.number);
        // Last: what the guest then says of this worker's placements is for the broker.
        broker.control.event(wire::EVENT_LOST, wire::file_handle(worker.number, 0), 0, 0);
    }
}

impl Worker {
    /// Whether an answer of this worker is awaited.
    fn is_asked(&self) -> bool {
        !lock(&self.pending).is_empty() || !lock(&self.fetching).is_empty()
    }

    /// Tells it which is the guest's memory.
    fn tell_memory(&self, broker: &Broker, tag: u64) {
        let shared = broker.device().share_memory();
        let (regions, files) = match shared {
            Ok(shared) => shared,
            Err(error) => return self.answer(Kind::Regions, tag, Err(error.into()), [0; 2]),
        };
        let fds: Vec<_> = files.iter().map(AsRawFd::as_raw_fd).collect();
        let out = Outgoing { tag, payload: regions.as_bytes(), fds: &fds, ..Outgoing::default() };
        let _ = self.tell(Kind::Regions, out);
    }

    /// Hands over a slot's queues.
    pub fn serve(&self, broker: &Broker, slot: usize) -> Result<()> {
        let (control, events) = super::queues_of(slot);
        let device = broker.device();
        let control = device.parts(control).context("The slot's queue is gone")?;
        let events = device.parts(events).context("The slot's event queue is gone")?;
        let (regions, memory) = device.share_memory()?;
        drop(device);
        let positions = (control.config.next_available, events.config.next_available);
        self.page.begin(positions.0, used_position(broker, &control.config), positions.1);
        let mut payload = [control.config, events.config].as_bytes().to_vec();
        payload.extend_from_slice(regions.as_bytes());
        let queues = [&control.kick, &control.call, &events.kick, &events.call];
        let fds: Vec<_> = queues.into_iter().chain(&memory).map(AsRawFd::as_raw_fd).collect();
        let words = [slot as u64, 0, 0, 0];
        let out = Outgoing { words, payload: &payload, fds: &fds, ..Outgoing::default() };
        self.tell(Kind::Rings, out).context("Handing over a slot's queues failed")
    }
}

/// The position in the used ring that the guest sees.
fn used_position(broker: &Broker, config: &crate::transport::ring::RingConfig) -> u16 {
    use vm_memory::{Bytes, GuestAddress};
    let memory = broker.device().memory();
    let at = config.used.wrapping_add(2);
    memory.and_then(|memory| memory.read_obj(GuestAddress(at)).ok()).unwrap_or(0)
}

/// A limit of placements as the wire has it.
fn placements(limit: u64) -> u32 {
    u32::try_from(limit).unwrap_or(u32::MAX)
}
