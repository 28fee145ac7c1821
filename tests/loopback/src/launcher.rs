//! The launcher's half: it is the VMM and, for what the guest has only one of, the guest's
//! kernel. It holds the memory, the broker's queue, the event queues and the placements;
//! each program drives the queue of its own slot.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::socket::MsgFlags;
use nvguest_frontend::events::Mailbox;
use nvguest_frontend::guest::{body_of, header, message};
use nvguest_frontend::vmm::Late;
use nvguest_frontend::window::{Place, Source};
use nvguest_frontend::wire::{self, Kind};
use nvguest_frontend::{Error, Guest, Options, Result};
use zerocopy::{FromBytes, IntoBytes};

use crate::board::{self, Board, Limits};
use crate::talk::{self, Ask, Frame};

/// Bytes of guest memory for a slot's large requests.
const HEAP: usize = 8 << 20;
/// Threads that wait for CLOSE to be answered.
const CLOSERS: usize = 8;

/// Placements that a program can ask for.
#[derive(Default)]
struct Placements(Mutex<BTreeMap<u64, Placed>>);

struct Placed {
    length: u64,
    fd: OwnedFd,
    source: Source,
}

impl Placements {
    fn book(&self) -> MutexGuard<'_, BTreeMap<u64, Placed>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Place for Placements {
    fn map(&self, at: u64, length: u64, fd: BorrowedFd<'_>, from: Source) -> io::Result<()> {
        let fd = fd.try_clone_to_owned()?;
        self.book().insert(at, Placed { length, fd, source: from });
        Ok(())
    }

    fn unmap(&self, at: u64, length: u64) -> io::Result<()> {
        let mut book = self.book();
        if book.get(&at).is_none_or(|placed| placed.length != length) {
            return Err(io::Error::from_raw_os_error(nix::libc::EINVAL));
        }
        book.remove(&at);
        Ok(())
    }
}

/// The other ends of stand-ins, by the file's number on the board.
#[derive(Default)]
struct Ends {
    by_index: HashMap<usize, OwnedFd>,
    by_handle: HashMap<u32, usize>,
}

/// What the machine is like.
#[derive(Clone, Copy, Debug, Default)]
pub struct Vm {
    /// Memory is placed before that is said, and not sent back in the table of RAM; stock
    /// QEMU does neither.
    pub prompt: bool,
    /// Event queues are looked at, not slept for: an interrupt wakes no thread either.
    pub attentive: bool,
}

/// The VMM and what the guest has only one of.
pub struct Launcher {
    guest: OnceLock<Arc<Guest>>,
    board: OnceLock<Board>,
    placements: Arc<Placements>,
    ends: Mutex<Ends>,
    epoll: Epoll,
    heaps: OnceLock<Vec<usize>>,
    closing: Mutex<Sender<usize>>,
}

impl Launcher {
    /// Becomes the guest of the broker that listens on `socket`.
    pub fn start(socket: &Path, vm: Vm) -> Result<Arc<Self>> {
        let (closing, closers) = channel();
        let launcher = Arc::new(Self {
            guest: OnceLock::new(),
            board: OnceLock::new(),
            placements: Arc::default(),
            ends: Mutex::default(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            heaps: OnceLock::new(),
            closing: Mutex::new(closing),
        });
        let slots = Options::default().slots;
        let options = Options {
            patience: Duration::from_secs(3600),
            poll: Duration::ZERO,
            heap: (slots + 4) * HEAP,
            echo: !vm.prompt,
            late: if vm.prompt { Late::Never } else { Late::UntilNextRequest },
            attentive: vm.attentive,
            ..Options::default()
        };
        let told = Arc::clone(&launcher);
        let sink = Arc::new(move |event| told.event(event));
        let place: Arc<dyn Place> = Arc::clone(&launcher.placements) as Arc<dyn Place>;
        let events = (Arc::new(Mailbox::default()), sink as _);
        let guest = Guest::start_in(connect(socket)?, options, events, Some(place))?;
        let hello = guest.probe()?.hello;
        let schema = guest.download(Kind::Schema, hello.schema_len.get())?;
        let nodes = guest.download(Kind::Nodes, hello.nodes_len.get())?;
        let limits = Limits {
            max_request: hello.max_request.get(),
            max_response: hello.max_response.get(),
            max_segments: hello.max_segments.get(),
        };
        let heaps = (0..slots).map(|_| guest.memory.take(HEAP)).collect::<Option<Vec<_>>>();
        let _ = launcher.heaps.set(heaps.ok_or(Error::Errno(nix::libc::ENOMEM))?);
        let _ = launcher.board.set(Board::create(limits, &schema, &nodes)?);
        let _ = launcher.guest.set(guest);
        launcher.watch(closers)?;
        Ok(launcher)
    }

    /// The guest.
    pub fn guest(&self) -> &Arc<Guest> {
        self.guest.get().expect("INVARIANT: set before anybody is served")
    }

    fn board(&self) -> &Board {
        self.board.get().expect("INVARIANT: set before anybody is served")
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.ends.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Serves every program that connects, from threads of their own.
    pub fn serve(self: &Arc<Self>, listener: UnixListener) -> Result<()> {
        let launcher = Arc::clone(self);
        std::thread::Builder::new().name("loopback".into()).spawn(move || {
            for stream in listener.incoming().map_while(io::Result::ok) {
                let launcher = Arc::clone(&launcher);
                let named = std::thread::Builder::new().name("program".into());
                let _ = named.spawn(move || launcher.converse(&stream));
            }
        })?;
        Ok(())
    }

    /// Waits until every file is closed; whether that was in time.
    pub fn await_closed(&self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while self.board().files().next().is_some() {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn converse(self: &Arc<Self>, stream: &UnixStream) {
        let socket = stream.as_raw_fd();
        let mut anchor = None;
        while let Ok(Some(frame)) = talk::receive(socket) {
            let outcome = match Ask::from_word(frame.words[0]) {
                Some(Ask::Attach) => self.attach(socket, &frame, &mut anchor),
                Some(Ask::Look) => {
                    let board = self.board().fd().as_raw_fd();
                    talk::send(socket, &[0], &[], &[board]).map_err(Error::from)
                }
                Some(Ask::Request) => self.request(socket, &frame),
                Some(Ask::Placement) => self.placement(socket, &frame),
                Some(Ask::Register) => {
                    self.register(frame);
                    Ok(())
                }
                None => Err(Error::Errno(nix::libc::EPROTO)),
            };
            if let Err(error) = outcome {
                // CAST: an errno is positive.
                let words = [error.errno() as u64];
                if talk::send(socket, &words, &[], &[]).is_err() {
                    break;
                }
            }
        }
        if let Some(index) = anchor {
            self.close_later(index);
        }
    }

    /// A process: its worker is started, and kept until the process ends, so that the queue
    /// of its slot is nobody else's meanwhile.
    fn attach(&self, socket: i32, frame: &Frame, anchor: &mut Option<usize>) -> Result<()> {
        let [_, tgid, start, euid, ..] = frame.words;
        // CAST: they were 32 bits wide when they were sent.
        let (tgid, euid) = (tgid as u32, euid as u32);
        let caller = wire::Caller { tgid: tgid.into(), euid: euid.into(), start_ns: start.into() };
        let guest = self.guest();
        let (node, kind) = guest.node("nvidiactl")?;
        let body = wire::OpenReq { node: node.into(), flags: 2.into() };
        let request = message(header(Kind::Open, 0, caller), body.as_bytes());
        let reply = guest.request(wire::NO_SLOT, &request, 64)?;
        let opened = wire::OpenResp::read_from_bytes(body_of(&reply)?)
            .map_err(|_| Error::Malformed("OPEN"))?;
        let (file, slot) = (opened.file.get(), opened.slot.get());
        let index = self.board().take().ok_or(Error::Errno(nix::libc::ENFILE))?;
        let entry = self.board().file(index);
        entry.kind.store(kind as u32, Ordering::Relaxed);
        entry.slot.store(slot, Ordering::Relaxed);
        entry.owner.store(tgid, Ordering::Relaxed);
        entry.handle.store(file, Ordering::Release);
        *anchor = Some(index);
        let (board, memory) = (self.board().fd().as_raw_fd(), guest.memory.fd().as_raw_fd());
        let size = guest.memory.size() as u64;
        let mut words = [0, size, slot.into(), index as u64, 0, 0, 0, 0];
        let heap = self.heaps.get().and_then(|heaps| heaps.get(slot as usize));
        let Some(&heap) = heap else {
            words[2] = wire::NO_SLOT.into();
            return Ok(talk::send(socket, &words, &[], &[board, memory])?);
        };
        let ring = guest.queue(slot).ring();
        words[4..8].copy_from_slice(&[
            ring.layout.base as u64,
            ring.layout.size.into(),
            heap as u64,
            HEAP as u64,
        ]);
        let bells = [ring.kick.as_raw_fd(), ring.call.as_raw_fd()];
        Ok(talk::send(socket, &words, &[], &[board, memory, bells[0], bells[1]])?)
    }

    fn request(&self, socket: i32, frame: &Frame) -> Result<()> {
        let room = usize::try_from(frame.words[1]).unwrap_or(0).min(4 << 20);
        let reply = self.guest().request(wire::NO_SLOT, &frame.bytes, room)?;
        Ok(talk::send(socket, &[0], &reply, &[])?)
    }

    fn placement(&self, socket: i32, frame: &Frame) -> Result<()> {
        let at = frame.words[1];
        let book = self.placements.book();
        let found =
            book.range(..=at).next_back().filter(|(start, placed)| at - *start < placed.length);
        let (start, placed) = found.ok_or(Error::Errno(nix::libc::EFAULT))?;
        let words = [0, placed.source.offset + (at - start), placed.source.writable.into()];
        let fd = placed.fd.try_clone()?;
        drop(book);
        Ok(talk::send(socket, &words, &[], &[fd.as_raw_fd()])?)
    }

    /// The other end of a file's stand-in: rung when the file is ready, and at an end when
    /// the last descriptor in any process is.
    fn register(&self, frame: Frame) {
        // CAST: a number on the board, checked below.
        let index = frame.words[1] as usize;
        let Some(end) = frame.fds.into_iter().next().filter(|_| index < board::FILES) else {
            return;
        };
        let entry = self.board().file(index);
        let mut ends = self.ends();
        let event = EpollEvent::new(EpollFlags::EPOLLRDHUP | EpollFlags::EPOLLHUP, index as u64);
        if self.epoll.add(&end, event).is_err() {
            return;
        }
        ends.by_handle.insert(entry.handle.load(Ordering::Acquire), index);
        ends.by_index.insert(index, end);
        let missed = entry.flags.load(Ordering::Acquire) & (board::READY | board::LOST) != 0;
        if missed {
            ends.ring(index);
        }
    }

    /// Watches for stand-ins whose last descriptor is gone.
    fn watch(self: &Arc<Self>, closers: Receiver<usize>) -> Result<()> {
        let closers = Arc::new(Mutex::new(closers));
        for _ in 0..CLOSERS {
            let (launcher, closers) = (Arc::clone(self), Arc::clone(&closers));
            std::thread::Builder::new().name("close".into()).spawn(move || loop {
                let next = closers.lock().unwrap_or_else(PoisonError::into_inner).recv();
                match next {
                    Ok(index) => launcher.close(index),
                    Err(_) => return,
                }
            })?;
        }
        let launcher = Arc::clone(self);
        std::thread::Builder::new().name("stand-ins".into()).spawn(move || {
            let mut ended = [EpollEvent::empty(); 64];
            loop {
                let count = match launcher.epoll.wait(&mut ended, EpollTimeout::NONE) {
                    Ok(count) => count,
                    Err(nix::Error::EINTR) => continue,
                    Err(_) => return,
                };
                for event in &ended[..count] {
                    // CAST: a number on the board.
                    launcher.ended(event.data() as usize);
                }
            }
        })?;
        Ok(())
    }

    fn ended(&self, index: usize) {
        let end = {
            let mut ends = self.ends();
            let handle = self.board().file(index).handle.load(Ordering::Acquire);
            if ends.by_handle.get(&handle) == Some(&index) {
                ends.by_handle.remove(&handle);
            }
            ends.by_index.remove(&index)
        };
        drop(end);
        let entry = self.board().file(index);
        if entry.flags.load(Ordering::Acquire) & board::CLOSED != 0 {
            entry.used.store(0, Ordering::Release);
        } else {
            self.close_later(index);
        }
    }

    fn close_later(&self, index: usize) {
        let closing = self.closing.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = closing.send(index);
    }

    fn close(&self, index: usize) {
        let entry = self.board().file(index);
        let sent = entry.flags.fetch_or(board::CLOSED, Ordering::AcqRel) & board::CLOSED != 0;
        if !sent {
            let handle = entry.handle.load(Ordering::Acquire);
            let owner = entry.owner.load(Ordering::Relaxed);
            let caller = wire::Caller { tgid: owner.into(), ..wire::Caller::default() };
            let request = message(header(Kind::Close, handle, caller), &[]);
            let _ = self.guest().request(wire::NO_SLOT, &request, 8);
        }
        entry.used.store(0, Ordering::Release);
    }

    /// A record of an event queue.
    fn event(&self, event: wire::Event) {
        let Some(board) = self.board.get() else { return };
        let file = event.file.get();
        match event.kind.get() {
            wire::EVENT_READY => {
                let mut ends = self.ends();
                let Some(index) = ends.find(board, file) else { return };
                let flags = &board.file(index).flags;
                let mask = event.mask.get() & board::READY;
                let over = if event.more.get() == 0 { board::ARMED } else { 0 };
                let _ = flags.fetch_update(Ordering::AcqRel, Ordering::Acquire, |flags| {
                    Some((flags | mask) & !over)
                });
                ends.ring(index);
            }
            wire::EVENT_LOST => {
                let ends = self.ends();
                for (index, entry) in board.files() {
                    let handle = entry.handle.load(Ordering::Acquire);
                    let whole = file & 0xffff == 0 && handle >> 16 == file >> 16;
                    if whole || handle == file {
                        entry.flags.fetch_or(board::LOST, Ordering::AcqRel);
                        ends.ring(index);
                    }
                }
            }
            _ => {}
        }
    }
}

/// A socket's file is there a moment before anybody listens.
fn connect(socket: &Path) -> io::Result<UnixStream> {
    let deadline = Instant::now() + Duration::from_secs(5);
    loop {
        match UnixStream::connect(socket) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                if Instant::now() >= deadline {
                    return Err(error);
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            connected => return connected,
        }
    }
}

impl Ends {
    /// A file by its name on the wire: one that is not registered yet is looked for.
    fn find(&mut self, board: &Board, handle: u32) -> Option<usize> {
        self.by_handle.get(&handle).copied().or_else(|| board.find(handle))
    }

    fn ring(&self, index: usize) {
        if let Some(end) = self.by_index.get(&index) {
            let flags = MsgFlags::MSG_DONTWAIT | MsgFlags::MSG_NOSIGNAL;
            // Full means that it is rung already.
            let _ = nix::sys::socket::send(end.as_raw_fd(), &[1], flags);
        }
    }
}
