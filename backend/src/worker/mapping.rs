//! What the driver armed on a file, and where it is placed in the window.
//!
//! RM frees a card's memory without touching the page tables of another process, so
//! the order is kept here: out of the window, barrier, and only then the driver's
//! unmap or free. System memory is otherwise: its pages live as long as a mapping of
//! them does (`nvidia_vma_open`), natively too, so its placements stay. A descriptor
//! whose object may be gone is never mapped again.

use std::collections::HashMap;
use std::os::fd::AsRawFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use nvguest_abi::FileKind;

use super::arena::Extent;
use super::session::GuestFile;
use super::upstream::Upstream;
use crate::errno::Errno;
use crate::host::Host;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing, FIRST_VIEW};
use crate::wire::{self, Cache};

/// Bytes of a page, of guest and host.
pub const PAGE: u64 = 4096;

/// A mapping that the driver armed on a file.
#[derive(Clone)]
pub struct Armed {
    /// The client that made it.
    pub client: u32,
    /// The object that is mapped.
    pub memory: u32,
    /// The name that RM knows the mapping by: its own, or the address the caller told it.
    pub linear: u64,
    /// Whole pages.
    pub length: u64,
    /// How the guest must map it.
    pub cache: Cache,
    /// RM made it so, or the caller asked for it.
    pub read_only: bool,
    /// The file whose client owns the memory. It lives as long as this does.
    pub owner: Arc<GuestFile>,
    /// The memory and where in it the mapping begins, if it is the arena's.
    pub extent: Option<(Arc<Extent>, u64)>,
    /// Where it is in the window.
    pub placement: Option<u32>,
}

/// A range of the window, and who reaches it.
#[derive(Clone, Copy)]
struct Placement {
    file: u32,
    offset: u64,
    length: u64,
    guests: u32,
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The guest reaches the memory.
    Live,
    /// It is being taken out.
    Leaving,
    /// Nothing is behind it; its range waits for the guest to let go.
    Hole,
}

/// The placements of one worker.
pub struct Mappings {
    upstream: Arc<Upstream>,
    placements: Mutex<HashMap<u32, Placement>>,
    left: Condvar,
    last_view: AtomicU32,
}

impl Mappings {
    /// Nothing is placed.
    pub fn new(upstream: Arc<Upstream>) -> Self {
        let (placements, left, last_view) = Default::default();
        Self { upstream, placements, left, last_view }
    }

    /// MAP: places what is armed on `file`, or finds where it is placed already.
    pub fn map(
        &self,
        host: &dyn Host,
        file: &GuestFile,
        request: &wire::MapReq,
    ) -> Result<wire::MapResp, Errno> {
        let mut armed = lock(&file.armed);
        let armed = armed.as_mut().ok_or(Errno::EINVAL)?;
        let length = request.length.get();
        let whole = length.checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        let known = wire::PROT_READ | wire::PROT_WRITE;
        if request.prot.get() & !known != 0 || request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let writable = request.prot.get() & wire::PROT_WRITE != 0;
        if request.offset.get() != 0 || length == 0 {
            return Err(Errno::EINVAL);
        }
        // As nvidia_mmap_helper has it: a card's memory whole or not at all, system
        // memory from its start.
        match file.kind {
            FileKind::Ctl if whole > armed.length => return Err(Errno(nix::libc::ERANGE)),
            FileKind::Gpu if whole != armed.length => return Err(Errno::ENXIO),
            _ => {}
        }
        if writable && armed.read_only {
            return Err(Errno(nix::libc::EACCES));
        }
        let found = armed.placement.and_then(|id| self.enter(id).map(|found| (id, found)));
        let (id, placement) = match (found, &armed.extent) {
            (Some(found), _) => found,
            (None, Some((extent, offset))) => self.view(file, extent, *offset, armed.length)?,
            (None, None) => self.place(host, file, armed)?,
        };
        armed.placement = Some(id);
        Ok(wire::MapResp {
            window_offset: placement.offset.into(),
            length: placement.length.into(),
            placement: id.into(),
            cache: armed.cache as u8,
            flags: if armed.read_only { wire::MAP_READ_ONLY } else { 0 },
            reserved: 0.into(),
        })
    }

    /// Placements that the guest reaches.
    pub fn live(&self) -> usize {
        lock(&self.placements).values().filter(|placement| placement.state == State::Live).count()
    }

    /// One more mapping of the guest's reaches a placement, if it is live.
    fn enter(&self, id: u32) -> Option<Placement> {
        let mut placements = lock(&self.placements);
        let placement = placements.get_mut(&id).filter(|p| p.state == State::Live)?;
        placement.guests = placement.guests.saturating_add(1);
        Some(*placement)
    }

    fn place(
        &self,
        host: &dyn Host,
        file: &GuestFile,
        armed: &Armed,
    ) -> Result<(u32, Placement), Errno> {
        let mapping = host.mapping(file.host(), 0, armed.length, !armed.read_only)?;
        let owner = match file.kind {
            FileKind::Ctl => &mapping.fd,
            _ => &armed.owner.host().fd,
        };
        let fds = [mapping.fd.as_raw_fd(), owner.as_raw_fd()];
        let words = [mapping.offset, mapping.length, u64::from(!armed.read_only), 0];
        let answer =
            self.upstream.ask(Kind::Place, Outgoing { words, fds: &fds, ..Outgoing::default() })?;
        let id = u32::try_from(answer.words[1]).map_err(|_| Errno::EPROTO)?;
        let placement = Placement {
            file: file.handle,
            offset: answer.words[2],
            length: mapping.length,
            guests: 1,
            state: State::Live,
        };
        lock(&self.placements).insert(id, placement);
        Ok((id, placement))
    }

    /// Memory of the arena is placed already. The broker hears of the view before the guest
    /// does: if this worker dies, it knows what the guest must let go of.
    fn view(
        &self,
        file: &GuestFile,
        extent: &Extent,
        offset: u64,
        length: u64,
    ) -> Result<(u32, Placement), Errno> {
        let id = self.new_view();
        let at = extent.offset();
        let words = [at, u64::from(id), 0, 0];
        self.upstream.tell(Kind::Show, Outgoing { words, ..Outgoing::default() })?;
        let offset = at + offset;
        let placement =
            Placement { file: file.handle, offset, length, guests: 1, state: State::Live };
        lock(&self.placements).insert(id, placement);
        Ok((id, placement))
    }

    fn new_view(&self) -> u32 {
        let placements = lock(&self.placements);
        loop {
            let id = FIRST_VIEW | self.last_view.fetch_add(1, Ordering::Relaxed);
            if !placements.contains_key(&id) {
                return id;
            }
        }
    }

    /// UNMAP: one mapping of the guest's is gone. The last takes the placement along.
    pub fn unmap(&self, file: &GuestFile, request: &wire::UnmapReq) -> Result<(), Errno> {
        if request.reserved.get() != 0 {
            return Err(Errno::EINVAL);
        }
        let id = request.placement.get();
        let state = {
            let mut placements = lock(&self.placements);
            let placement =
                placements.get_mut(&id).filter(|p| p.file == file.handle).ok_or(Errno::EINVAL)?;
            placement.guests = placement.guests.saturating_sub(1);
            if placement.guests > 0 {
                return Ok(());
            }
            let state = placement.state;
            if state == State::Live {
                placement.state = State::Leaving;
            }
            state
        };
        if state == State::Leaving {
            self.await_left(id);
        }
        {
            let mut armed = lock(&file.armed);
            if let Some(armed) = armed.as_mut().filter(|armed| armed.placement == Some(id)) {
                armed.placement = None;
            }
        }
        let outcome = self.unplace(id, false);
        lock(&self.placements).remove(&id);
        self.left.notify_all();
        outcome
    }

    fn unplace(&self, id: u32, keep_range: bool) -> Result<(), Errno> {
        if id >= FIRST_VIEW {
            let words = [u64::from(id), 0, 0, 0];
            return Ok(self
                .upstream
                .tell(Kind::Hide, Outgoing { words, ..Outgoing::default() })?);
        }
        let words = [u64::from(id), u64::from(keep_range), 0, 0];
        let out = Outgoing { words, ..Outgoing::default() };
        self.upstream.ask(Kind::Unplace, out).map(drop)
    }

    fn await_left(&self, id: u32) {
        let leaving = |placements: &mut HashMap<u32, Placement>| {
            placements.get(&id).is_some_and(|p| p.state == State::Leaving)
        };
        let placements = lock(&self.placements);
        let waited = self.left.wait_while(placements, leaving);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
    }

    /// Disarms every mapping that `goes` names, and takes those of a card's memory out
    /// of the window; returns when no guest can reach them any more. Their ranges stay
    /// taken until the guest has let go of them.
    pub fn evict(&self, files: &[Arc<GuestFile>], goes: impl Fn(&GuestFile, &Armed) -> bool) {
        for file in files {
            let gone = {
                let mut armed = lock(&file.armed);
                match armed.as_ref() {
                    Some(mapping) if goes(file, mapping) => armed.take(),
                    _ => None,
                }
            };
            let placement = gone.and_then(|armed| armed.placement);
            if let Some(id) = placement.filter(|_| file.kind != FileKind::Ctl) {
                self.hollow(id);
            }
        }
    }

    /// `file` is closed: its ranges are free again, whether or not the guest let go.
    pub fn release(&self, file: u32) {
        let ids: Vec<u32> = lock(&self.placements)
            .iter()
            .filter_map(|(&id, placement)| (placement.file == file).then_some(id))
            .collect();
        for id in ids {
            if let Err(error) = self.unplace(id, false) {
                tracing::debug!(%error, placement = id, "a placement could not be given back");
            }
            lock(&self.placements).remove(&id);
        }
    }

    fn hollow(&self, id: u32) {
        {
            let mut placements = lock(&self.placements);
            match placements.get_mut(&id) {
                Some(placement) if placement.state == State::Live => {
                    placement.state = State::Leaving;
                }
                Some(placement) if placement.state == State::Leaving => {
                    drop(placements);
                    return self.await_left(id);
                }
                _ => return,
            }
        }
        if let Err(error) = self.unplace(id, true) {
            // The broker is gone, and the window with it; or it has ended this worker.
            tracing::warn!(%error, placement = id, "a placement could not be taken out");
        }
        if let Some(placement) = lock(&self.placements).get_mut(&id) {
            placement.state = State::Hole;
        }
        self.left.notify_all();
    }
}
