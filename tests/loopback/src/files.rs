//! Which descriptor is which file of the guest. A descriptor that a program has is one end of
//! a socket pair, its *stand-in*: the launcher rings it when the file is ready, and sees by the
//! other end when the last descriptor of it is gone in every process.

use std::collections::BTreeMap;
use std::os::fd::{AsRawFd, FromRawFd, IntoRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicI32, AtomicU32, Ordering};
use std::sync::{Once, OnceLock};

use nix::libc::{self, c_int};
use nix::sys::socket::{bind, socketpair, AddressFamily, SockFlag, SockType, UnixAddr};
use nvguest_frontend::wire::{self, padded, Kind};
use zerocopy::{FromBytes, IntoBytes};

use crate::board::{self, Entry};
use crate::next;
use crate::process::{self, board, launcher, process, Errno, Process};
use crate::talk;

/// Descriptors that are told apart; programs have fewer.
const DESCRIPTORS: usize = 65536;
/// What an entry of the table says.
const NONE: u32 = 0;
const HIDDEN: u32 = 1;
const FIRST: u32 = 2;
/// The host's own file; the rest is its node's number.
const NATIVE: u32 = 1 << 30;

static TABLE: [AtomicU32; DESCRIPTORS] = [const { AtomicU32::new(NONE) }; DESCRIPTORS];
static HIGHEST: AtomicI32 = AtomicI32::new(-1);
static ANY: AtomicBool = AtomicBool::new(false);

fn slot(fd: RawFd) -> Option<&'static AtomicU32> {
    TABLE.get(usize::try_from(fd).ok()?)
}

fn set(fd: RawFd, value: u32) {
    if let Some(slot) = slot(fd) {
        slot.store(value, Ordering::Release);
        if value != NONE {
            HIGHEST.fetch_max(fd, Ordering::Relaxed);
            ANY.store(true, Ordering::Release);
        }
    }
}

/// Whether this process has had any file of the guest.
pub fn any() -> bool {
    ANY.load(Ordering::Acquire)
}

/// Marks a descriptor as one that the program did not open and does not know.
pub fn set_hidden(fd: RawFd, hidden: bool) {
    set(fd, if hidden { HIDDEN } else { NONE });
}

/// Whether it is one.
pub fn is_hidden(fd: RawFd) -> bool {
    slot(fd).is_some_and(|slot| slot.load(Ordering::Acquire) == HIDDEN)
}

/// The file that a descriptor stands for: its number on the board, and its entry there.
pub fn of(fd: RawFd) -> Option<(usize, &'static Entry)> {
    let value = slot(fd)?.load(Ordering::Acquire);
    if !(FIRST..NATIVE).contains(&value) {
        return None;
    }
    let index = (value - FIRST) as usize;
    Some((index, board()?.file(index)))
}

/// The node of the host that a descriptor is open on, in a run that is only traced.
pub fn native(fd: RawFd) -> Option<&'static Node> {
    let value = slot(fd)?.load(Ordering::Acquire);
    nodes().get(value.checked_sub(NATIVE)? as usize)
}

/// Like [`of`], for a descriptor that may have come by a way that is not seen: an exec, a
/// message, a close that went past us.
pub fn of_any(fd: RawFd) -> Option<(usize, &'static Entry)> {
    if let Some(found) = of(fd) {
        return Some(found);
    }
    if fd < 0 || process::is_native() || is_hidden(fd) {
        return None;
    }
    adopt(fd);
    of(fd)
}

/// Looks whether a descriptor stands for a file, and notes it.
pub fn adopt(fd: RawFd) {
    let Some(launcher) = launcher() else { return };
    if let Some(index) = talk::file_of(fd, launcher.pid) {
        if index < board::FILES && process().is_ok() {
            set(fd, FIRST + u32::try_from(index).unwrap_or(0));
        }
    }
}

/// A character device of the guest.
pub struct Node {
    /// Its name below `/dev`.
    pub name: String,
    /// Its position in NODES.
    pub number: u32,
    /// What its files are, as the wire numbers it.
    pub kind: u8,
    /// The device's number.
    pub device: u64,
    /// Its permissions.
    pub mode: u32,
}

/// The guest's devices, by position among themselves.
pub fn nodes() -> &'static [Node] {
    static NODES: OnceLock<Vec<Node>> = OnceLock::new();
    match board() {
        Some(board) => NODES.get_or_init(|| parse(board.nodes())),
        None => &[],
    }
}

fn parse(mut blob: &[u8]) -> Vec<Node> {
    let mut nodes = Vec::new();
    let mut majors = BTreeMap::new();
    let mut number = 0;
    while let Ok((header, rest)) = wire::NodeHeader::read_from_prefix(blob) {
        let (name, data) = (header.name_len.get() as usize, header.data_len.get() as usize);
        let Some((text, rest)) = rest.split_at_checked(padded(name)) else { break };
        let Some((major, rest)) = rest.split_at_checked(padded(data)) else { break };
        if header.kind.get() == wire::NODE_CDEV {
            // A kernel would pick one for those that have none.
            let next = 500 + u32::try_from(majors.len()).unwrap_or(0);
            let picked = *majors.entry(major[..data].to_vec()).or_insert(next);
            let major = if header.major.get() == 0 { picked } else { header.major.get() };
            nodes.push(Node {
                name: String::from_utf8_lossy(&text[..name]).into_owned(),
                number,
                kind: header.file_kind,
                device: libc::makedev(major, header.minor.get()),
                mode: u32::from(header.mode.get()) & 0o777,
            });
        }
        number += 1;
        blob = rest;
    }
    nodes
}

/// What a path means to the guest.
pub enum Path {
    /// Not one of NVIDIA's.
    Other,
    /// One that the guest does not have.
    Missing,
    /// One of its devices.
    Node(&'static Node),
}

/// What a path means to the guest. The first of NVIDIA's attaches this process.
pub fn look_up(path: &[u8]) -> Path {
    let Some(name) = path.strip_prefix(b"/dev/") else { return Path::Other };
    if !name.starts_with(b"nvidia") || launcher().is_none() {
        return Path::Other;
    }
    if process::look().is_err() {
        return Path::Missing;
    }
    let found = nodes().iter().find(|node| node.name.as_bytes() == name);
    // A folder is the host's own.
    match found {
        Some(node) => Path::Node(node),
        None if name == b"nvidia-caps" => Path::Other,
        None => Path::Missing,
    }
}

/// Opens a device; the descriptor.
pub fn open(node: &Node, flags: c_int) -> Result<RawFd, Errno> {
    let process = process()?;
    match open_on(process, node, flags) {
        Err(libc::ENODEV) if process.is_lost() => {
            process.abandon();
            open_on(self::process()?, node, flags)
        }
        opened => opened,
    }
}

fn open_on(process: &Process, node: &Node, flags: c_int) -> Result<RawFd, Errno> {
    // CAST: flags of open(2) are positive.
    let kept = (flags & (libc::O_ACCMODE | libc::O_NONBLOCK)) as u32;
    let body = wire::OpenReq { node: node.number.into(), flags: kept.into() };
    let queue = process.own_queue();
    let reply: [u8; 8] = process.simple(queue, (Kind::Open, 0), body.as_bytes())?;
    let opened = wire::OpenResp::read_from_bytes(&reply).map_err(|_| libc::EPROTO)?;
    let index = board().and_then(board::Board::take).ok_or(libc::ENFILE)?;
    let entry = board().ok_or(libc::ENODEV)?.file(index);
    entry.kind.store(node.kind.into(), Ordering::Relaxed);
    entry.node.store(node.number, Ordering::Relaxed);
    entry.device.store(node.device, Ordering::Relaxed);
    entry.references.store(1, Ordering::Relaxed);
    process.own(entry, opened.slot.get());
    entry.handle.store(opened.file.get(), Ordering::Release);
    match stand_in(process, index, flags) {
        Ok(fd) => Ok(fd),
        Err(errno) => {
            send_close(process, entry);
            entry.used.store(0, Ordering::Release);
            Err(errno)
        }
    }
}

fn stand_in(process: &Process, index: usize, flags: c_int) -> Result<RawFd, Errno> {
    let launcher = launcher().ok_or(libc::ENODEV)?;
    let (family, kind) = (AddressFamily::Unix, SockType::SeqPacket);
    let made = socketpair(family, kind, None, SockFlag::SOCK_CLOEXEC);
    let (ours, theirs) = made.map_err(|errno| errno as c_int)?;
    let name = talk::name_of(launcher.pid, index);
    let address = UnixAddr::new_abstract(name.as_bytes()).map_err(|errno| errno as c_int)?;
    bind(theirs.as_raw_fd(), &address).map_err(|errno| errno as c_int)?;
    process.register(index, theirs)?;
    if flags & libc::O_CLOEXEC == 0 {
        // SAFETY: a number and a flag.
        unsafe { libc::fcntl(ours.as_raw_fd(), libc::F_SETFD, 0) };
    }
    let fd = ours.into_raw_fd();
    set(fd, FIRST + u32::try_from(index).unwrap_or(0));
    Ok(fd)
}

/// Notes that a descriptor is open on the host's own node.
pub fn opened_native(fd: RawFd, node: &Node) {
    let at = nodes().iter().position(|known| known.number == node.number).unwrap_or(0);
    set(fd, NATIVE + u32::try_from(at).unwrap_or(0));
}

/// CLOSE, by whoever knows that nobody else has the file.
fn send_close(process: &Process, entry: &Entry) {
    entry.flags.fetch_or(board::CLOSED, Ordering::AcqRel);
    let handle = entry.handle.load(Ordering::Relaxed);
    let _ = process.simple::<0>(process.queue_of(entry), (Kind::Close, handle), &[]);
}

/// One reference less: when it was the last and can be no other's, the file is closed here and
/// at once; else the launcher closes it when the last stand-in is gone.
pub fn release(fd: RawFd, entry: &Entry) {
    let others = entry.references.fetch_sub(1, Ordering::AcqRel) - 1;
    let flags = entry.flags.load(Ordering::Acquire);
    // SAFETY: a number.
    let stays = unsafe { libc::fcntl(fd, libc::F_GETFD) } & libc::FD_CLOEXEC != 0;
    if others == 0 && stays && flags & (board::ESCAPED | board::CLOSED | board::LOST) == 0 {
        if let Some(process) = process().ok().filter(|process| process.has(entry)) {
            send_close(process, entry);
        }
    }
}

/// Before a descriptor is closed: what it stands for is one reference less.
pub fn closing(fd: RawFd) {
    if let Some((_, entry)) = of(fd) {
        set(fd, NONE);
        release(fd, entry);
    } else if native(fd).is_some() {
        set(fd, NONE);
    }
}

/// A descriptor was duplicated.
pub fn duplicated(from: RawFd, to: RawFd) {
    if let Some((index, entry)) = of(from) {
        entry.references.fetch_add(1, Ordering::AcqRel);
        set(to, FIRST + u32::try_from(index).unwrap_or(0));
    } else if let (Some(from), true) = (slot(from), native(from).is_some()) {
        set(to, from.load(Ordering::Acquire));
    } else {
        set(to, NONE);
    }
}

/// A duplicate that the program does not see; it keeps the file open.
pub fn keep(fd: RawFd, entry: &Entry) -> Result<OwnedFd, Errno> {
    // SAFETY: duplicates a descriptor that the program has.
    let kept = unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 900) };
    let kept = if kept < 0 {
        // SAFETY: as above, where there is no room so far up.
        unsafe { libc::fcntl(fd, libc::F_DUPFD_CLOEXEC, 0) }
    } else {
        kept
    };
    if kept < 0 {
        return Err(next::errno());
    }
    entry.references.fetch_add(1, Ordering::AcqRel);
    set_hidden(kept, true);
    // SAFETY: just made, and nobody else's.
    Ok(unsafe { OwnedFd::from_raw_fd(kept) })
}

/// The reverse of [`keep`].
pub fn unkeep(kept: OwnedFd, entry: &Entry) {
    let fd = kept.into_raw_fd();
    set_hidden(fd, false);
    release(fd, entry);
    next::close(fd);
}

/// Goes through the descriptors that are files, up to the highest that was ever one.
pub fn each(mut visit: impl FnMut(RawFd, &'static Entry)) {
    for fd in 0..=HIGHEST.load(Ordering::Relaxed) {
        if let Some((_, entry)) = of(fd) {
            visit(fd, entry);
        }
    }
}

/// Handlers of fork, once; and what an exec has left is noted.
pub fn before_first() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: three functions of the type that the call takes.
        unsafe { libc::pthread_atfork(Some(prepare), Some(parent), Some(child)) };
    });
}

thread_local! {
    static HELD: std::cell::RefCell<Option<Held>> = const { std::cell::RefCell::new(None) };
}

type Held = (std::sync::MutexGuard<'static, ()>, crate::maps::Guard);

extern "C" fn prepare() {
    let held = (process::hold(), crate::maps::hold());
    HELD.with(|slot| *slot.borrow_mut() = Some(held));
}

extern "C" fn parent() {
    HELD.with(|slot| drop(slot.borrow_mut().take()));
}

extern "C" fn child() {
    let held = HELD.with(|slot| slot.borrow_mut().take());
    each(|_, entry| {
        entry.references.fetch_add(1, Ordering::AcqRel);
    });
    if let Some(held) = &held {
        crate::maps::inherited(&held.1);
    }
    process::forked();
    drop(held);
}
