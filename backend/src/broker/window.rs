//! The window: virtio shared-memory region 1, and what is placed in it.
//!
//! QEMU acknowledges a map, and an unmap, before it takes effect; the answer to the
//! request after it proves that it has. That next request is the *barrier*: the
//! removal of a shared object that does not exist.

use std::collections::{BTreeMap, HashMap};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex};

use nix::sys::stat::{fstat, SFlag};
use uuid::Uuid;
use vhost::vhost_user::message::{VhostUserMMap, VhostUserMMapFlags, VhostUserSharedMsg};
use vhost::vhost_user::{Backend, VhostUserFrontendReqHandler};
use zerocopy::FromBytes;

use super::arena::Arena;
use super::ranges::{first_fit, PAGE};
use crate::errno::Errno;
use crate::limits::{Limits, Live, Resource};
use crate::sync::lock;
use crate::transport::link::FIRST_VIEW;
use crate::wire::{file_worker, Kind, ReqHeader, UnmapReq, SHM_WINDOW};

/// Whose the arena's placement is: no worker has this number.
const NOBODY: u16 = 0;
/// Names nothing; only its answer is wanted.
const BARRIER: Uuid = Uuid::from_u128(0x6e76_6775_6573_7400_6261_7272_6965_7200);

/// Memory to place.
pub struct Placing {
    /// The mapping's descriptor.
    pub fd: OwnedFd,
    /// The file whose client owns the memory: held as long as the placement, so that
    /// the memory outlives a worker that dies.
    pub owner: OwnedFd,
    /// Offset in `fd`.
    pub offset: u64,
    /// Bytes, whole pages.
    pub length: u64,
    /// Whether the guest may write.
    pub writable: bool,
}

/// A range of the window.
struct Range {
    id: u32,
    worker: u16,
    length: u64,
    /// What is behind it; `None` where its range only waits for the guest to let go.
    held: Option<Held>,
}

struct Held {
    _fd: OwnedFd,
    _owner: Option<OwnedFd>,
    file: (u64, u64),
}

#[derive(Default)]
struct Ranges {
    by_offset: BTreeMap<u64, Range>,
    next_id: u32,
    /// Most placements of processes that were live at once.
    peak: u32,
    /// Files that are placed, with how often: the frontend sends them back as guest memory.
    files: HashMap<(u64, u64), u32>,
}

/// The window of one guest.
pub struct Window {
    size: u64,
    limits: Arc<Live>,
    /// Shown at the window's start; placements come behind it.
    arena: Option<Arena>,
    frontend: Mutex<Option<Backend>>,
    ranges: Mutex<Ranges>,
}

impl Window {
    /// An empty window of `size` bytes, which `arena` is a small part of.
    pub fn new(size: u64, arena: Option<Arena>, limits: Arc<Live>) -> Self {
        let (frontend, ranges) = Default::default();
        Self { size, limits, arena, frontend, ranges }
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The arena, if there is one.
    pub fn arena(&self) -> Option<&Arena> {
        self.arena.as_ref()
    }

    /// Where to ask from now on. A new channel means a new activation.
    pub fn connect(&self, frontend: Backend) {
        *lock(&self.frontend) = Some(frontend);
    }

    fn frontend(&self) -> Result<Backend, Errno> {
        let frontend = lock(&self.frontend);
        frontend.clone().ok_or(Errno::ENODEV)
    }

    fn ranges(&self) -> std::sync::MutexGuard<'_, Ranges> {
        lock(&self.ranges)
    }

    /// Places memory; returns the placement's id and its offset once the guest can use it.
    pub fn place(&self, worker: u16, placing: Placing) -> Result<(u32, u64), Errno> {
        let Placing { fd, owner, offset, length, writable } = placing;
        if length == 0 || length % PAGE != 0 || offset % PAGE != 0 {
            return Err(Errno::EINVAL);
        }
        let file = identity(&fd)?;
        let placed_fd = fd.try_clone()?;
        let (id, at) = {
            let mut ranges = self.ranges();
            if !ranges.may_place(&self.limits.now(), worker, length) {
                return Err(Errno::ENOMEM);
            }
            let taken = ranges.by_offset.iter().map(|(&at, range)| (at, range.length));
            let start = self.arena.as_ref().map_or(0, Arena::size);
            let at = first_fit(taken, start..self.size, length, PAGE).ok_or(Errno::ENOMEM)?;
            let held = Held { _fd: fd, _owner: Some(owner), file };
            (ranges.insert(at, worker, length, held), at)
        };
        let flags =
            if writable { VhostUserMMapFlags::WRITABLE } else { VhostUserMMapFlags::empty() };
        self.map(&placed_fd, &request(at, length, offset, flags))?;
        Ok((id, at))
    }

    /// Shows the arena to a guest that begins: once, all of it.
    pub fn place_arena(&self) {
        let Some(arena) = &self.arena else { return };
        if let Err(error) = self.try_place(arena) {
            tracing::warn!(%error, "the arena is not used: each map of system memory costs a placement");
        }
    }

    fn try_place(&self, arena: &Arena) -> Result<(), Errno> {
        let fd = arena.file().as_fd().try_clone_to_owned()?;
        let held = Held { _fd: fd.try_clone()?, _owner: None, file: identity(&fd)? };
        self.ranges().insert(0, NOBODY, arena.size(), held);
        self.map(&fd, &request(0, arena.size(), 0, VhostUserMMapFlags::WRITABLE))?;
        arena.placed();
        Ok(())
    }

    /// Asks the VMM; if it does not, what was to be mapped is forgotten.
    fn map(&self, fd: &OwnedFd, request: &VhostUserMMap) -> Result<(), Errno> {
        let (at, length) = (request.shm_offset, request.len);
        let mapped = self.frontend().map(|frontend| {
            let mapped = frontend.shmem_map(request, fd);
            self.barrier(&frontend);
            mapped
        });
        match mapped {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => {
                tracing::warn!(%error, offset = at, length, "the VMM did not map into the window");
                self.ranges().remove(at);
                Err(Errno::ENOMEM)
            }
            Err(errno) => {
                self.ranges().remove(at);
                Err(errno)
            }
        }
    }

    /// Takes a placement of `worker` out; returns once no guest reaches its memory.
    /// With `keep` its range is not given out again before it is unplaced without.
    pub fn unplace(&self, worker: u16, id: u32, keep: bool) -> Result<(), Errno> {
        let (at, length, live) = {
            let ranges = self.ranges();
            let found = ranges.by_offset.iter().find(|(_, r)| r.id == id && r.worker == worker);
            let (&at, range) = found.ok_or(Errno::EINVAL)?;
            (at, range.length, range.held.is_some())
        };
        if live {
            let frontend = self.frontend()?;
            self.unmap(&frontend, at, length);
            self.barrier(&frontend);
        }
        let mut ranges = self.ranges();
        if keep {
            ranges.hollow(at);
        } else {
            ranges.remove(at);
        }
        Ok(())
    }

    /// Takes out all that a dead `worker` had, or all there is; and only then lets go of it.
    /// The ranges of a worker stay taken: its guest process may reach them until it unmaps.
    pub fn clear(&self, worker: Option<u16>) {
        self.clear_placements(worker);
        match (&self.arena, worker) {
            (Some(arena), Some(worker)) => arena.buried(worker),
            (Some(arena), None) => arena.clear(),
            (None, _) => {}
        }
    }

    fn clear_placements(&self, worker: Option<u16>) {
        let gone: Vec<(u64, u64, bool)> = self
            .ranges()
            .by_offset
            .iter()
            .filter(|(_, range)| worker.is_none_or(|worker| range.worker == worker))
            .map(|(&at, range)| (at, range.length, range.held.is_some()))
            .collect();
        if gone.is_empty() {
            return;
        }
        if let Ok(frontend) = self.frontend() {
            for &(at, length, _) in gone.iter().filter(|(_, _, live)| *live) {
                self.unmap(&frontend, at, length);
            }
            self.barrier(&frontend);
        }
        let mut ranges = self.ranges();
        for (at, _, _) in gone {
            match worker {
                Some(_) => ranges.hollow(at),
                None => ranges.remove(at),
            }
        }
    }

    fn unmap(&self, frontend: &Backend, at: u64, length: u64) {
        let request = request(at, length, 0, VhostUserMMapFlags::empty());
        if let Err(error) = frontend.shmem_unmap(&request) {
            // After a device reset the VMM has dropped it by itself.
            tracing::debug!(%error, offset = at, length, "the VMM had nothing to unmap");
        }
    }

    /// A request for a file of a worker that is gone. If it is an UNMAP, its range is
    /// free again; anything else gets ENODEV.
    pub fn unmapped(&self, request: &[u8]) -> Result<(), Errno> {
        let (header, body) = ReqHeader::read_from_prefix(request).map_err(|_| Errno::ENODEV)?;
        if Kind::from_number(header.kind.get()) != Some(Kind::Unmap) {
            return Err(Errno::ENODEV);
        }
        let unmap = UnmapReq::read_from_bytes(body).map_err(|_| Errno::ENODEV)?;
        let (worker, id) = (file_worker(header.file.get()), unmap.placement.get());
        if let (Some(arena), true) = (&self.arena, id >= FIRST_VIEW) {
            return arena.hide(worker, id).map_err(|_| Errno::ENODEV);
        }
        let mut ranges = self.ranges();
        let dead = |range: &Range| (range.worker, range.id) == (worker, id) && range.held.is_none();
        let found = ranges.by_offset.iter().find(|(_, range)| dead(range)).map(|(&at, _)| at);
        ranges.remove(found.ok_or(Errno::ENODEV)?);
        Ok(())
    }

    /// Returns once what was asked before is in effect. The answer is an error, as expected.
    fn barrier(&self, frontend: &Backend) {
        let _ = frontend.shared_object_remove(&VhostUserSharedMsg { uuid: BARRIER });
    }

    /// Whether `fd`, which the frontend sent as guest memory, is something we placed.
    pub fn is_echo(&self, fd: impl AsFd) -> bool {
        let Ok(stat) = fstat(fd) else { return true };
        let regular = SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT == SFlag::S_IFREG;
        !regular || self.ranges().files.contains_key(&(stat.st_dev, stat.st_ino))
    }

    /// Most placements of processes that were live at once.
    pub fn peak(&self) -> u32 {
        self.ranges().peak
    }

    /// Placements of processes that are live, and bytes of the window that they take.
    pub fn usage(&self) -> (u32, u64) {
        let ranges = self.ranges();
        (ranges.live(), ranges.of_processes().map(|range| range.length).sum())
    }
}

impl Ranges {
    fn of_processes(&self) -> impl Iterator<Item = &Range> {
        self.by_offset.values().filter(|range| range.worker != NOBODY)
    }

    /// Whether neither guest nor process has all that it may have.
    fn may_place(&self, limits: &Limits, worker: u16, length: u64) -> bool {
        let fits = |process: bool, most: fn(&Limits, Resource) -> u64| {
            let ranges = || self.of_processes().filter(|r| !process || r.worker == worker);
            let live = ranges().filter(|range| range.held.is_some()).count() as u64;
            let bytes: u64 = ranges().map(|range| range.length).sum();
            live < most(limits, Resource::Placements)
                && bytes.saturating_add(length) <= most(limits, Resource::Window)
        };
        fits(false, Limits::guest) && fits(true, Limits::process)
    }

    // CAST: bounded by the limit of placements.
    fn live(&self) -> u32 {
        self.of_processes().filter(|range| range.held.is_some()).count() as u32
    }

    fn insert(&mut self, at: u64, worker: u16, length: u64, held: Held) -> u32 {
        let id = self.new_id();
        *self.files.entry(held.file).or_default() += 1;
        self.by_offset.insert(at, Range { id, worker, length, held: Some(held) });
        self.peak = self.peak.max(self.live());
        id
    }

    fn new_id(&mut self) -> u32 {
        loop {
            self.next_id = (self.next_id + 1) % FIRST_VIEW;
            let id = self.next_id;
            if id != 0 && self.by_offset.values().all(|range| range.id != id) {
                return id;
            }
        }
    }

    fn hollow(&mut self, at: u64) {
        let held = self.by_offset.get_mut(&at).and_then(|range| range.held.take());
        self.forget(held);
    }

    fn remove(&mut self, at: u64) {
        let held = self.by_offset.remove(&at).and_then(|range| range.held);
        self.forget(held);
    }

    fn forget(&mut self, held: Option<Held>) {
        let Some(held) = held else { return };
        if let Some(count) = self.files.get_mut(&held.file) {
            *count -= 1;
            if *count == 0 {
                self.files.remove(&held.file);
            }
        }
    }
}

fn identity(fd: &OwnedFd) -> Result<(u64, u64), Errno> {
    let stat = fstat(fd)?;
    Ok((stat.st_dev, stat.st_ino))
}

fn request(at: u64, length: u64, offset: u64, flags: VhostUserMMapFlags) -> VhostUserMMap {
    VhostUserMMap {
        shmid: SHM_WINDOW,
        fd_offset: offset,
        shm_offset: at,
        len: length,
        flags: flags.bits(),
        ..VhostUserMMap::default()
    }
}
