//! The threads that serve a guest process.
//!
//! One of them *leads*: it looks for the next request. A request that is quickly
//! done it serves itself and goes on leading; before one that may take long it lets
//! go of the lead and asks for kicks, and wakes nobody: a kick wakes a thread that
//! takes the lead, and if none comes the same thread leads again when it is done.
//! Calls on one file keep their order: what comes for a busy file waits there.

use std::collections::{HashSet, VecDeque};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::eventfd::{EfdFlags, EventFd};
use zerocopy::{FromBytes, IntoBytes};

use super::calls;
use super::session::{Admission, GuestFile, Session};
use super::upstream::Upstream;
use crate::errno::Errno;
use crate::marshal::scratch::Scratch;
use crate::sync::{lock, try_lock};
use crate::transport::counts::{Class, Word};
use crate::transport::link::{self, Outgoing};
use crate::transport::ring::{Message, Parked, Ring};
use crate::wire::{self, Kind};

/// A call that takes longer is not served by the thread that leads.
const QUICK: Duration = Duration::from_micros(200);
/// Commands that are remembered for it.
const MAX_SLOW: usize = 256;

/// A request, and where its reply goes.
pub struct Work {
    message: Message,
    header: wire::ReqHeader,
    source: Source,
    /// Whether it counts against the process's share.
    counted: bool,
}

enum Source {
    /// The slot's own queue, in the generation that it was taken from.
    Ring(u64),
    /// The broker's queue: the tag that the broker knows it by, and the room for its reply.
    Broker { tag: u64, room: usize },
}

/// Of one serving thread.
pub struct Bench {
    /// Memory that host calls are built in.
    pub scratch: Scratch,
    /// The reply that is being built.
    pub reply: Vec<u8>,
}

/// What the threads share.
pub struct Server {
    session: Arc<Session>,
    upstream: Arc<Upstream>,
    lead: Mutex<()>,
    queue: Mutex<Queue>,
    submitted: Mutex<VecDeque<Work>>,
    /// Commands of RM_CONTROL that took long once.
    slow: Mutex<HashSet<u32>>,
    bells: Bells,
    poll: Duration,
}

#[derive(Default)]
struct Queue {
    generation: u64,
    ring: Option<Ring>,
    kick: Option<OwnedFd>,
    parked: Parked,
    /// The guest need not kick: somebody looks.
    is_spared: bool,
}

/// What wakes a leader that sleeps: the queue's kick, and our own word. Edge-triggered, so
/// that neither has to be read: to sleep and to be woken is one system call.
struct Bells {
    epoll: Epoll,
    own: EventFd,
}

impl Bells {
    fn new() -> nix::Result<Self> {
        let bells = Self {
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            own: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        };
        bells.add(bells.own.as_fd())?;
        Ok(bells)
    }

    fn add(&self, bell: BorrowedFd<'_>) -> nix::Result<()> {
        self.epoll.add(bell, EpollEvent::new(EpollFlags::EPOLLIN | EpollFlags::EPOLLET, 0))
    }

    fn ring(&self) {
        // Full means that it was rung already.
        let _ = self.own.write(1);
    }

    fn wait(&self) {
        let _ = self.epoll.wait(&mut [EpollEvent::empty(); 2], EpollTimeout::NONE);
    }
}

impl Server {
    /// Starts `threads` threads; they wait for work.
    pub fn start(
        threads: usize,
        session: Arc<Session>,
        upstream: Arc<Upstream>,
    ) -> anyhow::Result<Arc<Self>> {
        let server = Arc::new(Self {
            poll: session.start.poll(),
            session,
            upstream,
            lead: Mutex::default(),
            queue: Mutex::default(),
            submitted: Mutex::default(),
            slow: Mutex::default(),
            bells: Bells::new()?,
        });
        for number in 0..threads {
            let mut bench = Bench { scratch: Scratch::new()?, reply: Vec::with_capacity(4096) };
            let server = Arc::clone(&server);
            std::thread::Builder::new()
                .name(format!("serve-{number}"))
                .stack_size(256 << 10)
                .spawn(move || server.run(&mut bench))?;
        }
        Ok(server)
    }

    /// Serves a slot's queue from now on.
    pub fn begin(&self, mut ring: Ring, kick: OwnedFd) {
        let mut queue = lock(&self.queue);
        if !queue.parked.started(&mut ring) {
            queue.generation += 1;
        }
        queue.ring = Some(ring);
        if let Err(error) = self.bells.add(kick.as_fd()) {
            tracing::error!(%error, "watching the queue's kick failed");
        }
        queue.kick = Some(kick);
        drop(queue);
        self.bells.ring();
    }

    /// Touches the queue no more. Replies of calls under way wait for it to go on.
    pub fn stop(&self) {
        let mut queue = lock(&self.queue);
        if let Some(ring) = queue.ring.take() {
            queue.parked.stopped(&ring);
        }
        if let Some(kick) = queue.kick.take() {
            // The VMM has a duplicate, which would keep it watched.
            let _ = self.bells.epoll.delete(kick);
        }
        drop(queue);
        self.bells.ring();
    }

    /// Interrupts the guest through `call` from now on.
    pub fn set_call(&self, call: OwnedFd) {
        if let Some(ring) = &mut lock(&self.queue).ring {
            ring.set_call(call);
        }
    }

    /// Serves a request that came on the broker's queue.
    pub fn submit(&self, message: link::Message) {
        let room = usize::try_from(message.words[0]).unwrap_or(0);
        let source = Source::Broker { tag: message.tag, room };
        let message = Message { request: message.payload, ..Message::default() };
        let work = Work { message, header: wire::ReqHeader::default(), source, counted: false };
        lock(&self.submitted).push_back(work);
        self.bells.ring();
    }

    fn run(&self, bench: &mut Bench) {
        let mut armed = false;
        loop {
            armed = self.turn(bench, armed);
        }
    }

    /// Serves one request; whether it was an ARM.
    fn turn(&self, bench: &mut Bench, armed: bool) -> bool {
        let (leading, work, more) = self.next(armed);
        // What a request is, is known once it was admitted.
        let Some((work, file)) = self.admit(work, bench) else { return false };
        let armed = work.kind() == Some(Kind::Arm);
        let mut leading = Some(leading);
        if let Some(leading) = leading.take_if(|_| more || !self.is_quick(&work)) {
            self.leave(leading);
        }
        self.serve(work, file.as_deref(), bench);
        while let Some(work) = file.as_ref().and_then(|file| file.next()) {
            // The backlog of a file is served without the lead: others go on meanwhile.
            if let Some(leading) = leading.take() {
                self.leave(leading);
            }
            self.serve(work, file.as_deref(), bench);
        }
        armed
    }

    /// Serves all that was submitted, on this thread: a server that was started with none of
    /// its own.
    #[cfg(feature = "fuzzing")]
    pub fn serve_submitted(&self, bench: &mut Bench) {
        while let Some((work, _)) = self.try_next() {
            let Some((work, file)) = self.admit(work, bench) else { continue };
            let _ = self.is_quick(&work);
            self.serve(work, file.as_deref(), bench);
            while let Some(work) = file.as_ref().and_then(|file| file.next()) {
                self.serve(work, file.as_deref(), bench);
            }
        }
    }

    /// The lead, the next request, and whether more are waiting. After an ARM the event that
    /// it waits for is often a few microseconds away: who looks for requests anyway looks
    /// for that as well, which spares it the wake-up of another thread.
    fn next(&self, mut armed: bool) -> (MutexGuard<'_, ()>, Work, bool) {
        loop {
            if let Some(leading) = try_lock(&self.lead) {
                if let Some((work, more)) = self.look(armed) {
                    return (leading, work, more);
                }
                drop(leading);
                if self.wants_kicks() {
                    continue;
                }
            }
            armed = false;
            self.bells.wait();
            self.session.page().count(Word::Wake);
        }
    }

    /// Looks for a request for as long as the broker said; after an ARM, if that was worth it
    /// lately: who waits for long frames sleeps, and so do we.
    fn look(&self, mut armed: bool) -> Option<(Work, bool)> {
        let watcher = self.session.watcher();
        let patience = if armed && watcher.is_slow() { Duration::ZERO } else { self.poll };
        let deadline = Instant::now() + patience;
        loop {
            let found = self.try_next();
            if found.is_some() || Instant::now() >= deadline {
                return found;
            }
            armed = armed && !watcher.look(&self.session);
            std::hint::spin_loop();
        }
    }

    /// Lets another lead if there is something to do, now or when it comes.
    fn leave(&self, leading: MutexGuard<'_, ()>) {
        drop(leading);
        if self.wants_kicks() {
            self.bells.ring();
        }
    }

    /// Asks to be woken for the next request; whether there is one already. Only after the
    /// lead was let go: whoever is woken must find it free.
    fn wants_kicks(&self) -> bool {
        let mut queue = lock(&self.queue);
        queue.is_spared = false;
        let waits = queue.ring.as_mut().is_some_and(Ring::want_kick);
        drop(queue);
        waits || !lock(&self.submitted).is_empty()
    }

    fn try_next(&self) -> Option<(Work, bool)> {
        let submitted = lock(&self.submitted).pop_front();
        if let Some(work) = submitted {
            return Some((work, true));
        }
        let mut queue = lock(&self.queue);
        let source = Source::Ring(queue.generation);
        let was_spared = std::mem::replace(&mut queue.is_spared, true);
        let ring = queue.ring.as_mut()?;
        if !was_spared {
            ring.spare_kick();
        }
        let message = ring.take()?;
        let more = ring.has_more();
        let header = wire::ReqHeader::default();
        Some((Work { message, header, source, counted: false }, more))
    }

    /// Reads the header and finds the file; `None` if the request was answered, or waits.
    fn admit(&self, mut work: Work, bench: &mut Bench) -> Option<(Work, Option<Arc<GuestFile>>)> {
        match read_header(&work.message.request) {
            Ok(header) => work.header = header,
            Err(errno) => {
                self.reply(work, bench, Err(errno));
                return None;
            }
        }
        let opens = work.kind() == Some(Kind::Open);
        let file = self.session.file(work.header.file.get()).filter(|_| !opens);
        if file.is_none() && !opens {
            self.reply(work, bench, Err(Errno::EBADF));
            return None;
        }
        let work = self.count(work, file.as_deref(), bench)?;
        let Some(file) = file else { return Some((work, None)) };
        match file.admit(work) {
            Admission::Run(work) => Some((work, Some(file))),
            Admission::Waits => None,
            Admission::Refused(work) => {
                self.reply(work, bench, Err(Errno::EAGAIN));
                None
            }
        }
    }

    /// Counts a request against the share of its process; `None` if it was answered because
    /// there is no room for it. What gives something back is never refused.
    fn count(&self, mut work: Work, file: Option<&GuestFile>, bench: &mut Bench) -> Option<Work> {
        let taken = self.session.share.take(work.message.request.len());
        work.counted = true;
        let kind = work.kind();
        if taken.is_ok() || matches!(kind, Some(Kind::Close | Kind::Unmap)) {
            return Some(work);
        }
        bench.reply.resize(size_of::<wire::RespHeader>(), 0);
        let body = &work.message.request[size_of::<wire::ReqHeader>()..];
        let outcome = match (kind, file) {
            (Some(Kind::Ioctl), Some(file)) => self.session.over_limit(file, body, bench),
            _ => Err(Errno::ENOMEM),
        };
        self.reply(work, bench, outcome);
        None
    }

    /// Whether a request is done in microseconds. A control answers at once, or takes a
    /// lock that RM's other calls of this process would wait for just so, and one that
    /// was slow before is not tried again; opening a card, mapping, allocating and
    /// waiting may take long.
    fn is_quick(&self, work: &Work) -> bool {
        match work.kind() {
            Some(Kind::Arm) => true,
            Some(Kind::Ioctl) => {
                control_of(work).is_some_and(|command| !lock(&self.slow).contains(&command))
            }
            _ => false,
        }
    }

    fn serve(&self, work: Work, file: Option<&GuestFile>, bench: &mut Bench) {
        bench.reply.clear();
        bench.reply.resize(size_of::<wire::RespHeader>(), 0);
        let control = control_of(&work);
        let class = class_of(&work, file);
        let start = Instant::now();
        let outcome = self.dispatch(&work, file, bench);
        let took = start.elapsed();
        self.session.page().count_call(class, took);
        if self.session.trace.is_on() {
            self.session.traced(&work.message.request, file, (took, outcome, &bench.reply));
        }
        tracing::trace!(kind = work.header.kind.get(), control, ?took, "served");
        if let Some(command) = control.filter(|_| took > QUICK) {
            let mut slow = lock(&self.slow);
            // A guest can make up commands; what is forgotten is learnt again.
            if slow.len() >= MAX_SLOW {
                slow.clear();
            }
            slow.insert(command);
        }
        self.reply(work, bench, outcome);
    }

    fn dispatch(
        &self,
        work: &Work,
        file: Option<&GuestFile>,
        bench: &mut Bench,
    ) -> Result<(), Errno> {
        let session = &*self.session;
        let body = &work.message.request[size_of::<wire::ReqHeader>()..];
        let room = work.room().saturating_sub(size_of::<wire::RespHeader>());
        let kind = work.kind();
        if let Some(kind) = kind {
            session.page().count(Word::Request(kind));
        }
        if kind == Some(Kind::Open) {
            fits::<wire::OpenResp>(room)?;
            let opened = session.open(&work.header.caller, body)?;
            bench.reply.extend_from_slice(opened.as_bytes());
            return Ok(());
        }
        // A file that was closed while this request waited for its turn.
        let file = file.and_then(|file| session.file(file.handle)).ok_or(Errno::EBADF)?;
        match kind {
            Some(Kind::Ioctl) => session.ioctl(&file, body, room, bench),
            Some(Kind::Map) => {
                fits::<wire::MapResp>(room)?;
                let request = wire::MapReq::read_from_bytes(body).map_err(|_| Errno::EINVAL)?;
                let mapped = session.mappings.map(&*session.host, &file, &request)?;
                bench.reply.extend_from_slice(mapped.as_bytes());
                Ok(())
            }
            Some(Kind::Unmap) => {
                let request = wire::UnmapReq::read_from_bytes(body).map_err(|_| Errno::EINVAL)?;
                session.mappings.unmap(&file, &request)
            }
            Some(Kind::Arm | Kind::Close) if !body.is_empty() => Err(Errno::EINVAL),
            Some(Kind::Arm) => {
                session.watcher().arm(&*session.host, &file);
                Ok(())
            }
            Some(Kind::Close) => {
                session.close(&file);
                Ok(())
            }
            _ => Err(Errno::EPROTO),
        }
    }

    /// Sends what is in `bench.reply`. A failed request is answered with its header
    /// alone, unless the driver's own failure left an argument to copy back.
    fn reply(&self, work: Work, bench: &mut Bench, outcome: Result<(), Errno>) {
        let header_size = size_of::<wire::RespHeader>();
        if bench.reply.len() < header_size || outcome.is_err() && work.is_not_ioctl() {
            bench.reply.clear();
            bench.reply.resize(header_size, 0);
        }
        if let Some(kind) = work.kind().filter(|_| outcome.is_err()) {
            self.session.page().count(Word::Error(kind));
        }
        if work.counted {
            self.session.share.give(work.message.request.len());
        }
        let status = outcome.err().map_or(0, Errno::status);
        // CAST: replies are bounded by MAX_RESPONSE.
        let len = bench.reply.len() as u32;
        let header = wire::RespHeader { status: status.into(), len: len.into() };
        bench.reply[..header_size].copy_from_slice(header.as_bytes());
        match work.source {
            Source::Ring(generation) => {
                let mut queue = lock(&self.queue);
                if queue.generation == generation {
                    match &mut queue.ring {
                        Some(ring) => ring.give(work.message, &bench.reply),
                        None => queue.parked.keep(work.message, &bench.reply),
                    }
                }
            }
            Source::Broker { tag, .. } => {
                let out = Outgoing { tag, payload: &bench.reply, ..Outgoing::default() };
                if let Err(error) = self.upstream.tell(link::Kind::Reply, out) {
                    tracing::debug!(%error, "a reply did not reach the broker");
                }
            }
        }
        bench.reply.clear();
        bench.reply.shrink_to(64 << 10);
    }
}

impl Work {
    fn room(&self) -> usize {
        match self.source {
            Source::Ring(_) => self.message.room(),
            Source::Broker { room, .. } => room,
        }
    }

    fn kind(&self) -> Option<Kind> {
        Kind::from_number(self.header.kind.get())
    }

    fn is_not_ioctl(&self) -> bool {
        self.kind() != Some(Kind::Ioctl)
    }

    /// What an IOCTL asks, and what follows it.
    fn ioctl(&self) -> Option<(wire::IoctlReq, &[u8])> {
        if self.is_not_ioctl() {
            return None;
        }
        let body = self.message.request.get(size_of::<wire::ReqHeader>()..)?;
        wire::IoctlReq::read_from_prefix(body).ok()
    }
}

/// The header of a request, if the request is what the header says.
pub fn read_header(request: &[u8]) -> Result<wire::ReqHeader, Errno> {
    let (header, _) = wire::ReqHeader::read_from_prefix(request).map_err(|_| Errno::EPROTO)?;
    let honest = header.len.get() as usize == request.len() && header.reserved.get() == 0;
    match Kind::from_number(header.kind.get()) {
        Some(_) if honest => Ok(header),
        _ => Err(Errno::EPROTO),
    }
}

fn fits<T>(room: usize) -> Result<(), Errno> {
    if room < size_of::<T>() {
        return Err(Errno::EMSGSIZE);
    }
    Ok(())
}

/// What a request is for.
fn class_of(work: &Work, file: Option<&GuestFile>) -> Class {
    match work.kind() {
        Some(Kind::Open) => Class::Open,
        Some(Kind::Close) => Class::Close,
        Some(Kind::Map) => Class::Map,
        Some(Kind::Unmap) => Class::Unmap,
        Some(Kind::Arm) => Class::Arm,
        _ => work.ioctl().zip(file).map_or(Class::Other, |((call, _), file)| {
            calls::class(file.kind, call.cmd.get() & 0xff)
        }),
    }
}

/// The command of an RM_CONTROL.
fn control_of(work: &Work) -> Option<u32> {
    const NV_ESC_RM_CONTROL: u32 = 0x2a;
    /// `NVOS54_PARAMETERS.cmd` (`nvos.h`).
    const COMMAND: usize = 8;
    let (call, rest) = work.ioctl()?;
    if call.cmd.get() & 0xff != NV_ESC_RM_CONTROL {
        return None;
    }
    let lengths = wire::padded(4 * usize::from(call.nsegs.get()));
    let fds = size_of::<wire::FdRecord>() * usize::from(call.nfds.get());
    let at = lengths + fds + COMMAND;
    let command = rest.get(at..at + 4)?.try_into().ok()?;
    Some(u32::from_le_bytes(command))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::transport::link::Message as Told;
    use crate::worker::rig;

    /// A request with nothing behind its header.
    fn bare(kind: Kind, file: u32) -> Told {
        let header = wire::ReqHeader {
            kind: (kind as u32).into(),
            file: file.into(),
            len: (size_of::<wire::ReqHeader>() as u32).into(),
            ..Default::default()
        };
        let payload = header.as_bytes().to_vec();
        Told { kind: link::Kind::Request, tag: 1, words: [64, 0, 0, 0], payload, fds: Vec::new() }
    }

    #[test]
    fn after_an_arm_that_was_served_its_event_is_looked_for_and_after_nothing_else() {
        let session = Arc::new(rig::session());
        let body = wire::OpenReq::default();
        let opened = session.open(&wire::Caller::default(), body.as_bytes()).unwrap();
        let server = Server::start(0, session, rig::broker()).unwrap();
        let mut bench = Bench { scratch: Scratch::new().unwrap(), reply: Vec::new() };
        let mut turn = |kind, file| {
            server.submit(bare(kind, file));
            server.turn(&mut bench, false)
        };
        assert!(turn(Kind::Arm, opened.file.get()));
        assert!(!turn(Kind::Arm, opened.file.get() + 1), "no such file");
        assert!(!turn(Kind::Close, opened.file.get()));
    }
}
