//! The files of one guest process, and the requests that open, close, wait and name them.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use nvguest_abi::FileKind;
use zerocopy::FromBytes;

use super::arena::Arena;
use super::exports::Kept;
use super::mapping::{Armed, Mappings};
use super::objects::Objects;
use super::registered::Registrations;
use super::serve::Work;
use super::share::Share;
use super::slices::Slices;
use super::start::{Process, Start};
use super::upstream::Upstream;
use super::video::Block;
use super::watch::{Watch, Watcher};
use crate::errno::Errno;
use crate::host::{Host, HostFile};
use crate::limits::Resource;
use crate::marshal::Files;
use crate::policy::tally::Tally;
use crate::rate::Rates;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};
use crate::transport::page::SlotPage;
use crate::transport::trace::Trace;
use crate::wire;

/// Requests of one file that may wait for the one before them.
const MAX_BACKLOG: usize = 256;

/// A file of the guest and its one host file.
pub struct GuestFile {
    /// Its name on the wire.
    pub handle: u32,
    /// What it is.
    pub kind: FileKind,
    /// Its readiness.
    pub watch: Watch,
    /// What the driver armed on it.
    pub armed: Mutex<Option<Armed>>,
    /// Memory that RM has as long as the host's file is open.
    pub keeps: Mutex<Vec<Kept>>,
    host: Arc<dyn Host>,
    file: Option<HostFile>,
    order: Mutex<Order>,
}

/// Calls on one file keep their order: one runs, the rest wait here.
#[derive(Default)]
struct Order {
    running: bool,
    backlog: VecDeque<Work>,
}

/// What became of a request that came for a file.
pub enum Admission {
    /// Its turn is now.
    Run(Work),
    /// It waits for the one before it, whose server will run it.
    Waits,
    /// Too many wait already.
    Refused(Work),
}

impl GuestFile {
    /// The host's file.
    pub fn host(&self) -> &HostFile {
        self.file.as_ref().expect("INVARIANT: only drop takes it")
    }

    /// Lets `work` run now, or when what came before it on this file is done.
    pub fn admit(&self, work: Work) -> Admission {
        let mut order = lock(&self.order);
        if !order.running {
            order.running = true;
            return Admission::Run(work);
        }
        if order.backlog.len() >= MAX_BACKLOG {
            return Admission::Refused(work);
        }
        order.backlog.push_back(work);
        Admission::Waits
    }

    /// The request whose turn it is when one is done.
    pub fn next(&self) -> Option<Work> {
        let mut order = lock(&self.order);
        let next = order.backlog.pop_front();
        order.running = next.is_some();
        next
    }
}

impl Drop for GuestFile {
    fn drop(&mut self) {
        // What it keeps goes after it, with the value's fields.
        if let Some(file) = self.file.take() {
            self.host.close(file);
        }
    }
}

/// All that a worker holds for its guest process.
pub struct Session {
    /// What it was told at the start.
    pub start: Start,
    /// The driver.
    pub host: Arc<dyn Host>,
    /// The broker.
    pub upstream: Arc<Upstream>,
    /// What is armed and placed.
    pub mappings: Mappings,
    /// The RM objects.
    pub objects: Mutex<Objects>,
    /// Memory of the guest's that RM has.
    pub registrations: Arc<Registrations>,
    /// Memory that the guest reaches without a placement of its own, if there is such.
    pub arena: Option<Arena>,
    /// Refusals, counted by name.
    pub refusals: Mutex<Tally>,
    /// What is held of the guest's share.
    pub share: Share,
    /// How long its channel groups have the card.
    pub slices: Slices,
    /// How often something was done lately, by the guest and by this process.
    pub rates: (Arc<Rates>, Rates),
    /// Calls as they are served, while an admin looks.
    pub trace: Trace,
    page: Arc<SlotPage>,
    watcher: Arc<Watcher>,
    files: RwLock<HashMap<u16, Arc<GuestFile>>>,
    next_number: AtomicU16,
    slot: AtomicU32,
}

/// Memory that a worker and its broker have in common.
pub struct Common {
    /// The state of its slot.
    pub page: Arc<SlotPage>,
    /// How often things were done, by all of the guest.
    pub rates: Arc<Rates>,
    /// Where calls are written down while an admin looks.
    pub trace: Trace,
    /// What system memory comes from, if it does.
    pub arena: Option<Arena>,
}

impl Session {
    /// Nothing is open yet.
    pub fn new(
        start: Start,
        host: Arc<dyn Host>,
        upstream: Arc<Upstream>,
        common: Common,
    ) -> Result<Self, Errno> {
        let Common { page, rates, trace, arena } = common;
        let watcher = Arc::new(Watcher::new(Arc::clone(&upstream), start.poll()));
        Ok(Self {
            mappings: Mappings::new(Arc::clone(&upstream)),
            share: Share::new(Arc::clone(&upstream)),
            rates: (rates, Rates::own()?),
            slices: Slices::new(start.weight)?,
            registrations: Registrations::new(&start, Arc::clone(&watcher)),
            start,
            host,
            upstream,
            objects: Mutex::default(),
            arena,
            trace,
            refusals: Mutex::default(),
            page,
            watcher,
            files: RwLock::default(),
            next_number: AtomicU16::new(1),
            slot: AtomicU32::new(wire::NO_SLOT),
        })
    }

    /// Its readiness thread.
    pub fn watcher(&self) -> &Arc<Watcher> {
        &self.watcher
    }

    /// The slot whose queues the guest may use for this process.
    pub fn set_slot(&self, slot: u32) {
        self.slot.store(slot, Ordering::Release);
    }

    /// What is counted.
    pub fn page(&self) -> &SlotPage {
        &self.page
    }

    /// Whether guest or process has all the placements that it may have.
    pub fn placements_full(&self) -> bool {
        self.page.placements() >= self.start.max_placements
            || self.mappings.live() >= self.start.max_own_placements as usize
    }

    /// The open file with this handle.
    pub fn file(&self, handle: u32) -> Option<Arc<GuestFile>> {
        if wire::file_worker(handle) != self.start.worker {
            return None;
        }
        // CAST: the lower half is the file's number.
        self.files().get(&(handle as u16)).cloned()
    }

    /// All open files.
    pub fn all_files(&self) -> Vec<Arc<GuestFile>> {
        self.files().values().cloned().collect()
    }

    fn files(&self) -> std::sync::RwLockReadGuard<'_, HashMap<u16, Arc<GuestFile>>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn files_mut(&self) -> std::sync::RwLockWriteGuard<'_, HashMap<u16, Arc<GuestFile>>> {
        self.files.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// OPEN: a file of this worker's process.
    pub fn open(&self, caller: &wire::Caller, body: &[u8]) -> Result<wire::OpenResp, Errno> {
        let request = wire::OpenReq::read_from_bytes(body).map_err(|_| Errno::EINVAL)?;
        // CAST: constants of a few bits.
        let known = (nix::libc::O_ACCMODE | nix::libc::O_NONBLOCK) as u32;
        if request.flags.get() & !known != 0 {
            return Err(Errno::EINVAL);
        }
        let process = Process { tgid: caller.tgid.get(), start_ns: caller.start_ns.get() };
        if process != self.start.process {
            return Err(Errno::ENODEV);
        }
        let node = self.start.nodes.get(request.node.get() as usize);
        let node = node.and_then(Option::as_ref).ok_or(Errno::ENXIO)?;
        let files = self.files().len() as u64;
        if self.share.cover(Resource::Files, files + 1).is_err() {
            return Err(Errno::EMFILE);
        }
        let host_file = self.host.open(node, request.flags.get())?;
        let mut files = self.files_mut();
        let number = self.free_number(&files).ok_or(Errno::EMFILE)?;
        let handle = wire::file_handle(self.start.worker, number);
        let file = GuestFile {
            handle,
            kind: node.kind,
            watch: Watch::default(),
            armed: Mutex::default(),
            keeps: Mutex::default(),
            host: Arc::clone(&self.host),
            file: Some(host_file),
            order: Mutex::default(),
        };
        self.watcher.watch(&file);
        files.insert(number, Arc::new(file));
        let first = files.len() == 1;
        drop(files);
        if first {
            self.tell_files(1);
        }
        let slot = self.slot.load(Ordering::Acquire);
        Ok(wire::OpenResp { file: handle.into(), slot: slot.into() })
    }

    /// A number that no open file has; never 0, and as late as possible re-used.
    fn free_number(&self, files: &HashMap<u16, Arc<GuestFile>>) -> Option<u16> {
        (0..=u16::MAX)
            .map(|_| self.next_number.fetch_add(1, Ordering::Relaxed))
            .find(|number| *number != 0 && !files.contains_key(number))
    }

    /// CLOSE: what the file armed and what its clients own leaves the window first.
    pub fn close(&self, file: &Arc<GuestFile>) {
        self.mappings.evict(&self.all_files(), |other, armed| {
            other.handle == file.handle || armed.owner.handle == file.handle
        });
        self.mappings.release(file.handle);
        let mut objects = lock(&self.objects);
        let held = objects.closed(file.handle).into_iter().filter_map(Kept::of);
        lock(&file.keeps).extend(held);
        if let Some(arena) = &self.arena {
            lock(&file.keeps).extend(arena.sweep(&objects).into_iter().map(Kept::Range));
        }
        drop(objects);
        self.watcher.forget(file);
        // CAST: the lower half is the file's number.
        let left = {
            let mut files = self.files_mut();
            files.remove(&(file.handle as u16));
            files.len()
        };
        self.share.settle(Resource::Files, left as u64);
        if left == 0 {
            self.tell_files(0);
        }
    }

    fn tell_files(&self, count: u64) {
        let out = Outgoing { words: [count, 0, 0, 0], ..Outgoing::default() };
        if let Err(error) = self.upstream.tell(Kind::Files, out) {
            tracing::debug!(%error, "the broker did not hear of our files");
        }
    }

    /// A duplicate of a file for another worker, whose guest process names it, and the memory
    /// that was exported to it.
    pub fn export(&self, handle: u32) -> Result<(OwnedFd, FileKind, Option<Kept>), Errno> {
        let file = self.file(handle).ok_or(Errno::EBADF)?;
        let exported = lock(&file.keeps).last().cloned();
        Ok((file.host().fd.as_fd().try_clone_to_owned()?, file.kind, exported))
    }
}

/// Resolves the files that a call names, and holds them while it runs.
pub struct Named<'a> {
    session: &'a Session,
    own: RefCell<Vec<Arc<GuestFile>>>,
    foreign: RefCell<Vec<OwnedFd>>,
    /// Memory that a foreign file keeps.
    kept: RefCell<Option<Kept>>,
}

impl<'a> Named<'a> {
    /// No file is named yet.
    pub fn new(session: &'a Session) -> Self {
        let (own, foreign, kept) = Default::default();
        Self { session, own, foreign, kept }
    }

    /// Memory that was exported to the file that the call names.
    pub fn exported(&self) -> Option<Kept> {
        let own = self.first().and_then(|file| lock(&file.keeps).last().cloned());
        own.or_else(|| self.kept.borrow().clone())
    }

    /// The first of this worker's own files that the call named.
    pub fn first(&self) -> Option<Arc<GuestFile>> {
        self.own.borrow().first().cloned()
    }

    fn fetch(&self, handle: u32, kinds: u32) -> Result<i32, Errno> {
        let words = [u64::from(handle), 0, 0, 0];
        let upstream = &self.session.upstream;
        let mut answer = upstream.ask(Kind::Fetch, Outgoing { words, ..Outgoing::default() })?;
        let kind = u8::try_from(answer.words[1]).ok().and_then(FileKind::from_number);
        let [_, _, range, bytes] = answer.words;
        let kept = match (&self.session.arena, range.checked_sub(1)) {
            (Some(arena), Some(at)) => Some(Kept::Range(Arc::new(arena.had(at, bytes)?))),
            // Counted here as well as there: either process may be the first to go.
            (_, None) if bytes > 0 => Some(Kept::Video(Arc::new(Block::had(upstream, bytes)))),
            _ => None,
        };
        *self.kept.borrow_mut() = kept;
        let (Some(kind), Some(fd)) = (kind, answer.fds.pop()) else { return Err(Errno::EBADF) };
        if kinds & kind.bit() == 0 {
            return Err(Errno::EINVAL);
        }
        let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
        self.foreign.borrow_mut().push(fd);
        Ok(number)
    }
}

impl Files for Named<'_> {
    fn host_number(&self, handle: u32, kinds: u32) -> Result<i32, Errno> {
        if wire::file_worker(handle) != self.session.start.worker {
            return self.fetch(handle, kinds);
        }
        let file = self.session.file(handle).ok_or(Errno::EBADF)?;
        if kinds & file.kind.bit() == 0 {
            return Err(Errno::EINVAL);
        }
        let number = file.host().number();
        self.own.borrow_mut().push(file);
        Ok(number)
    }
}
