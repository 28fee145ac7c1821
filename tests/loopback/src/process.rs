//! This process as a process of the guest: the queue of its worker's slot, which it drives
//! itself, and a connection to the launcher for what the guest has only one of.

use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use nix::libc;
use nvguest_frontend::guest::body_of;
use nvguest_frontend::memory::Memory;
use nvguest_frontend::queue::{Manner, Queue};
use nvguest_frontend::ring::{Bells, Layout, Ring};
use nvguest_frontend::wire::{self, Kind};
use vmm_sys_util::eventfd::EventFd;
use zerocopy::IntoBytes;

use crate::board::{Board, Entry, LOST};
use crate::files;
use crate::schema::Rules;
use crate::talk::{self, Ask, Frame};

/// An errno.
pub type Errno = i32;

/// When a caller gives up: not before the program's user does.
const PATIENCE: Duration = Duration::from_secs(24 * 3600);
/// How long a slot's former user may still have a request there.
const REST: Duration = Duration::from_secs(2);

/// Where the launcher is.
pub struct Launcher {
    /// Its process.
    pub pid: u32,
    path: String,
}

/// The launcher that this program was started by; `None` if by none.
pub fn launcher() -> Option<&'static Launcher> {
    static LAUNCHER: OnceLock<Option<Launcher>> = OnceLock::new();
    let found = LAUNCHER.get_or_init(|| {
        let text = std::env::var(talk::SOCKET).ok()?;
        let (pid, path) = text.split_once(':')?;
        Some(Launcher { pid: pid.parse().ok()?, path: path.to_owned() })
    });
    found.as_ref()
}

/// Whether a variable is set; asked once.
fn is_set(name: &str) -> bool {
    std::env::var_os(name).is_some_and(|value| value != "0")
}

/// Calls go to the host's own driver, and are only traced.
pub fn is_native() -> bool {
    static NATIVE: OnceLock<bool> = OnceLock::new();
    *NATIVE.get_or_init(|| is_set(talk::NATIVE))
}

/// The board, once it is known.
pub fn board() -> Option<&'static Board> {
    BOARD.get()
}

static BOARD: OnceLock<Board> = OnceLock::new();
static RULES: OnceLock<Option<Rules>> = OnceLock::new();
static NOW: AtomicPtr<Process> = AtomicPtr::new(std::ptr::null_mut());
static START: Mutex<()> = Mutex::new(());

/// A process of the guest. It is never freed: calls may be under way in other threads.
pub struct Process {
    /// How its requests name it.
    pub caller: wire::Caller,
    pid: u32,
    slot: u32,
    anchor: usize,
    queue: Option<Queue>,
    life: Mutex<OwnedFd>,
    idle: Mutex<Vec<OwnedFd>>,
    trusting: bool,
}

/// The schema's rules.
pub fn rules() -> Result<&'static Rules, Errno> {
    let board = board().ok_or(libc::ENODEV)?;
    RULES.get_or_init(|| Rules::new(board.schema())).as_ref().ok_or(libc::EPROTO)
}

/// The board, without becoming a process of the guest.
pub fn look() -> Result<&'static Board, Errno> {
    if let Some(board) = BOARD.get() {
        return Ok(board);
    }
    let guard = hold();
    let socket = connect()?;
    let frame = ask(socket.as_raw_fd(), &[Ask::Look as u64], &[])?;
    drop(guard);
    files::set_hidden(socket.as_raw_fd(), false);
    let board = Board::attach(hidden(frame.fds.into_iter().next().ok_or(libc::EPROTO)?));
    Ok(BOARD.get_or_init(|| board.expect("INVARIANT: the launcher's board can be mapped")))
}

/// Holds back a fork while the state is being changed.
pub fn hold() -> MutexGuard<'static, ()> {
    START.lock().unwrap_or_else(PoisonError::into_inner)
}

/// This process, attached to the launcher if it was not.
pub fn process() -> Result<&'static Process, Errno> {
    let now = NOW.load(Ordering::Acquire);
    // SAFETY: set to a leaked value alone.
    match unsafe { now.as_ref() } {
        Some(process) => Ok(process),
        None => attach(),
    }
}

fn attach() -> Result<&'static Process, Errno> {
    let guard = hold();
    let now = NOW.load(Ordering::Acquire);
    // SAFETY: as in `process`.
    if let Some(process) = unsafe { now.as_ref() } {
        return Ok(process);
    }
    let process: &'static Process = Box::leak(Box::new(Process::attach()?));
    NOW.store(std::ptr::from_ref(process).cast_mut(), Ordering::Release);
    drop(guard);
    Ok(process)
}

/// After a fork: the child is a process of its own, and leaves its parent's descriptors.
pub fn forked() {
    let before = NOW.swap(std::ptr::null_mut(), Ordering::AcqRel);
    // SAFETY: as in `process`.
    let Some(process) = (unsafe { before.as_ref() }) else { return };
    let life = process.life.try_lock().map(|fd| fd.as_raw_fd());
    let idle: Vec<RawFd> = match process.idle.try_lock() {
        Ok(idle) => idle.iter().map(AsRawFd::as_raw_fd).collect(),
        Err(_) => Vec::new(),
    };
    for fd in life.into_iter().chain(idle) {
        files::set_hidden(fd, false);
        crate::next::close(fd);
    }
}

fn connect() -> Result<OwnedFd, Errno> {
    let launcher = launcher().ok_or(libc::ENODEV)?;
    let stream = UnixStream::connect(&launcher.path).map_err(of_io)?;
    Ok(hidden(stream.into()))
}

/// A descriptor that the program does not see.
pub fn hidden(fd: OwnedFd) -> OwnedFd {
    let fd = talk::aside(fd);
    files::set_hidden(fd.as_raw_fd(), true);
    fd
}

/// The errno of a failure.
pub fn of_io(error: std::io::Error) -> Errno {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// The answer to a question: 0 in its first word, or an errno.
fn ask(socket: RawFd, words: &[u64], bytes: &[u8]) -> Result<Frame, Errno> {
    talk::send(socket, words, bytes, &[]).map_err(of_io)?;
    let frame = talk::receive(socket).map_err(of_io)?.ok_or(libc::ENODEV)?;
    match frame.words[0] {
        0 => Ok(frame),
        errno => Err(Errno::try_from(errno).unwrap_or(libc::EIO)),
    }
}

/// When this process started, in nanoseconds since boot.
fn started() -> u64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after = stat.rsplit(')').next().unwrap_or_default();
    let ticks: u64 = after.split_whitespace().nth(19).and_then(|t| t.parse().ok()).unwrap_or(0);
    ticks * 10_000_000
}

impl Process {
    fn attach() -> Result<Self, Errno> {
        // A process ends with a fork's handlers in place before it has anything to inherit.
        files::before_first();
        let life = connect()?;
        let pid = std::process::id();
        // SAFETY: takes nothing.
        let euid = unsafe { libc::geteuid() };
        let start = started();
        let words = [Ask::Attach as u64, pid.into(), start, euid.into()];
        let frame = ask(life.as_raw_fd(), &words, &[])?;
        let mut fds = frame.fds.into_iter();
        let board = fds.next().ok_or(libc::EPROTO)?;
        if BOARD.get().is_none() {
            let _ = BOARD.set(Board::attach(hidden(board)).map_err(of_io)?);
        }
        let [_, size, slot, anchor, base, queue_size, heap, heap_size, ..] = frame.words;
        let size = usize::try_from(size).map_err(|_| libc::EPROTO)?;
        let memory = fds.next().ok_or(libc::EPROTO)?;
        let memory = Memory::attach(hidden(memory), size).map_err(|error| error.errno())?;
        let memory = Arc::new(memory);
        let mut queue = None;
        if let (Some(kick), Some(call)) = (fds.next(), fds.next()) {
            // CAST: what the launcher says of its own memory.
            memory.give(heap as usize, heap_size as usize);
            let layout = Layout { base: base as usize, size: queue_size as u16 };
            queue = rest(&memory, layout, [kick, call].map(hidden));
        }
        let caller = wire::Caller { tgid: pid.into(), euid: euid.into(), start_ns: start.into() };
        Ok(Self {
            caller,
            pid,
            // CAST: slots are few, and there is one number for none.
            slot: slot as u32,
            anchor: anchor as usize,
            queue,
            life: Mutex::new(life),
            idle: Mutex::default(),
            trusting: is_set(talk::TRUSTING),
        })
    }

    /// Whether copies may be made without asking the kernel about the caller's pointers.
    pub fn is_trusting(&self) -> bool {
        self.trusting
    }

    /// Whether the worker is gone. A new one is had by attaching again.
    pub fn is_lost(&self) -> bool {
        let lost = |board: &Board| board.file(self.anchor).flags.load(Ordering::Acquire) & LOST;
        board().is_some_and(|board| lost(board) != 0)
    }

    /// Forgets this process's worker, which is gone.
    pub fn abandon(&self) {
        let _guard = hold();
        let own = std::ptr::from_ref(self).cast_mut();
        let order = (Ordering::AcqRel, Ordering::Relaxed);
        let _ = NOW.compare_exchange(own, std::ptr::null_mut(), order.0, order.1);
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = nix::sys::socket::shutdown(life.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }

    /// The queue for requests that speak of a file, if it is ours.
    pub fn queue_of(&self, entry: &Entry) -> Option<&Queue> {
        let own = entry.owner.load(Ordering::Relaxed) == self.pid
            && entry.slot.load(Ordering::Relaxed) == self.slot;
        self.queue.as_ref().filter(|_| own)
    }

    /// Whether a file's requests go on our own queue.
    pub fn has(&self, entry: &Entry) -> bool {
        self.queue_of(entry).is_some()
    }

    /// Notes that a new file is of our worker.
    pub fn own(&self, entry: &Entry, slot: u32) {
        entry.owner.store(self.pid, Ordering::Relaxed);
        entry.slot.store(slot, Ordering::Relaxed);
    }

    /// The queue for an OPEN.
    pub fn own_queue(&self) -> Option<&Queue> {
        self.queue.as_ref()
    }

    /// Sends a request: on our own queue, or through the launcher on the broker's.
    pub fn send(
        &self,
        queue: Option<&Queue>,
        request: &[u8],
        reply: &mut [u8],
    ) -> Result<usize, Errno> {
        if let Some(queue) = queue {
            return queue.call(request, reply).map_err(|error| error.errno());
        }
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let socket = idle.map_or_else(connect, Ok)?;
        let words = [Ask::Request as u64, reply.len() as u64];
        let frame = ask(socket.as_raw_fd(), &words, request)?;
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(socket);
        let count = frame.bytes.len().min(reply.len());
        reply[..count].copy_from_slice(&frame.bytes[..count]);
        Ok(count)
    }

    /// A message with this body for a file; the reply's body.
    pub fn simple<const ROOM: usize>(
        &self,
        queue: Option<&Queue>,
        (kind, file): (Kind, u32),
        body: &[u8],
    ) -> Result<[u8; ROOM], Errno> {
        let mut request = [0; 96];
        let length = size_of::<wire::ReqHeader>() + body.len();
        let header = wire::ReqHeader {
            kind: (kind as u32).into(),
            file: file.into(),
            // CAST: below 96.
            len: (length as u32).into(),
            caller: self.caller,
            ..wire::ReqHeader::default()
        };
        request[..size_of::<wire::ReqHeader>()].copy_from_slice(header.as_bytes());
        request[size_of::<wire::ReqHeader>()..length].copy_from_slice(body);
        let mut reply = [0; 128];
        let room = size_of::<wire::RespHeader>() + ROOM;
        let count = self.send(queue, &request[..length], &mut reply[..room])?;
        let body = body_of(&reply[..count]).map_err(|error| error.errno())?;
        body.try_into().map_err(|_| libc::EPROTO)
    }

    /// What is at an offset of the window: a descriptor, the offset in it.
    pub fn placement(&self, at: u64) -> Result<(OwnedFd, u64), Errno> {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let frame = ask(life.as_raw_fd(), &[Ask::Placement as u64, at], &[])?;
        let fd = frame.fds.into_iter().next().ok_or(libc::EPROTO)?;
        Ok((fd, frame.words[1]))
    }

    /// Gives the launcher the other end of a file's stand-in.
    pub fn register(&self, index: usize, end: OwnedFd) -> Result<(), Errno> {
        let life = self.life.lock().unwrap_or_else(PoisonError::into_inner);
        let words = [Ask::Register as u64, index as u64];
        talk::send(life.as_raw_fd(), &words, &[], &[end.as_raw_fd()]).map_err(of_io)
    }
}

/// The queue of our slot, once the device has returned what a former process left there.
fn rest(memory: &Arc<Memory>, layout: Layout, bells: [OwnedFd; 2]) -> Option<Queue> {
    let poll = std::env::var(talk::POLL).ok().and_then(|text| text.parse().ok()).unwrap_or(500);
    let manner = Manner {
        event_idx: true,
        indirect: true,
        poll: Duration::from_micros(poll),
        patience: PATIENCE,
    };
    // SAFETY: each is open and is owned by the eventfd from here on.
    let [kick, call] = bells.map(|fd| unsafe { EventFd::from_raw_fd(fd.into_raw_fd()) });
    let ring = Ring::attach(Arc::clone(memory), layout, true, Bells { kick, call });
    let deadline = Instant::now() + REST;
    while ring.at_rest().is_none() && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    Queue::attach(ring, manner)
}
