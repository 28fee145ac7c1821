//! Memory of its own that the guest program registers with RM.
//!
//! The guest's module pins the pages and says which they are. They are mapped here side by side
//! for as long as the call takes: RM pins what it finds there. From then on the guest must keep
//! them until RM has let go, which it is told by an event. `docs/registered.md` has the whole.

use std::collections::HashSet;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use nvguest_abi::compiled::Verdict;
use nvguest_abi::{status, Capability};

use super::calls::{escape, u32_at};
use super::exports;
use super::objects::Holds;
use super::session::Session;
use super::start::{Region, Start};
use super::watch::Watcher;
use crate::errno::Errno;
use crate::limits::Resource;
use crate::marshal::pages::{Piece, SideBySide, Unfit};
use crate::marshal::Prepared;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};
use crate::wire::{file_handle, Run};

/// `NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR` (`nvos.h`), whose object is at 0x28.
pub const HEAP_REGISTER: u64 = 27;

/// The registrations of one guest process.
pub struct Registrations {
    worker: u16,
    watcher: Arc<Watcher>,
    /// Of a guest that may register: what a call does with an object is noted before or after RM
    /// did it, so none may be under way while the object becomes such memory.
    turns: Option<RwLock<()>>,
    /// The guest's numbers that are in use.
    live: Mutex<HashSet<u32>>,
    bytes: AtomicU64,
}

impl Registrations {
    /// None yet. The guest is told through `watcher`.
    pub fn new(start: &Start, watcher: Arc<Watcher>) -> Arc<Self> {
        let may = start.compiled.capabilities & Capability::Compute as u32 != 0;
        let turns = may.then(RwLock::default);
        let (live, bytes) = (Mutex::default(), AtomicU64::new(0));
        Arc::new(Self { worker: start.worker, watcher, turns, live, bytes })
    }

    /// The turn of a call, with others or, if it registers memory, alone.
    pub fn turn(&self, registers: bool) -> Turn<'_> {
        let Some(turns) = &self.turns else { return Turn::Any };
        match registers {
            true => Turn::Alone(turns.write().unwrap_or_else(PoisonError::into_inner)),
            false => Turn::Shared(turns.read().unwrap_or_else(PoisonError::into_inner)),
        }
    }

    /// Bytes of all.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    /// A new one; `None` if its number is in use.
    fn begin(self: &Arc<Self>, number: u32, bytes: u64) -> Option<Registration> {
        if !lock(&self.live).insert(number) {
            return None;
        }
        self.bytes.fetch_add(bytes, Ordering::AcqRel);
        let (all, held) = (Arc::clone(self), AtomicBool::new(false));
        Some(Registration { all, number, bytes, held })
    }
}

/// As long as it lives, a call is under way.
#[allow(dead_code, reason = "what they guard ends with them")]
pub enum Turn<'t> {
    /// Nothing can be registered.
    Any,
    /// Beside other calls.
    Shared(RwLockReadGuard<'t, ()>),
    /// Beside no other.
    Alone(RwLockWriteGuard<'t, ()>),
}

/// One registration. When the last owner lets go of it, RM has.
pub struct Registration {
    all: Arc<Registrations>,
    number: u32,
    bytes: u64,
    /// The guest is told that the host has the memory, and waits to hear that it has not.
    held: AtomicBool,
}

impl Registration {
    /// RM has the memory, and the guest will be told so.
    fn hold(&self) {
        self.held.store(true, Ordering::Release);
    }
}

impl std::fmt::Debug for Registration {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "registration {} of {} bytes", self.number, self.bytes)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.all.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        lock(&self.all.live).remove(&self.number);
        if *self.held.get_mut() {
            // CAST: a registration's number has 13 bits.
            let name = file_handle(self.all.worker, self.number as u16);
            self.all.watcher.released(name);
        }
    }
}

/// Where runs of guest-physical pages lie in the files of the guest's memory, in order; `None`
/// if one is not all memory.
pub fn pieces<'f>(
    runs: &[Run],
    regions: &[Region],
    files: &'f [OwnedFd],
) -> Option<Vec<Piece<BorrowedFd<'f>>>> {
    let mut pieces = Vec::with_capacity(runs.len());
    for run in runs {
        let (mut address, mut left) = (run.address.get(), run.length.get());
        while left > 0 {
            let inside = |region: &Region| {
                let Region { address: start, size, .. } = *region;
                address.checked_sub(start).filter(|&at| at < size).map(|at| (at, size - at))
            };
            let mut known = regions.iter().zip(files);
            let found = known.find_map(|(region, file)| Some((region, file, inside(region)?)));
            let (region, file, (at, rest)) = found?;
            let length = left.min(rest);
            let offset = region.offset.checked_add(at)?;
            pieces.push(Piece { file: file.as_fd(), offset, length });
            (address, left) = (address.checked_add(length)?, left - length);
        }
    }
    Some(pieces)
}

/// What RM would say of such memory, or we where RM is not asked.
fn answer(unfit: Unfit) -> (Verdict, u32) {
    match unfit {
        Unfit::Unaligned => (Verdict::Shape, status::NOT_SUPPORTED),
        Unfit::Endless => (Verdict::Shape, status::INVALID_LIMIT),
        Unfit::Unpinned(Errno::EFAULT) => (Verdict::Shape, status::INVALID_ADDRESS),
        Unfit::TooLong | Unfit::Unpinned(Errno::ENOMEM) => (Verdict::Limit, status::NO_MEMORY),
        Unfit::Unpinned(_) => (Verdict::Shape, status::NOT_SUPPORTED),
        Unfit::Mismatch => (Verdict::Shape, status::INVALID_ARGUMENT),
    }
}

impl Session {
    /// Finds the memory that the call registers and hands it to RM. RM's status where it would
    /// not have it, or we do not.
    pub(super) fn register(
        &self,
        prepared: &mut Prepared<'_>,
    ) -> Result<Option<Registration>, (Verdict, u32)> {
        let Some(offer) = prepared.offer() else { return Ok(None) };
        let runs = offer.check().map_err(answer)?;
        let length = offer.length();
        let registration = self.registrations.begin(offer.registration, length);
        let registration = registration.ok_or(answer(Unfit::Mismatch))?;
        let full = |_| (Verdict::Limit, status::NO_MEMORY);
        self.share.cover(Resource::Registered, self.registrations.bytes()).map_err(full)?;
        let memory = self.side_by_side(runs, length).map_err(|errno| {
            tracing::debug!(%errno, length, runs = runs.len(), "memory of the guest was not found");
            answer(if errno == Errno::ENOMEM { Unfit::Unpinned(errno) } else { Unfit::Mismatch })
        })?;
        prepared.register(&Arc::new(memory)).map_err(|_| answer(Unfit::Mismatch))?;
        Ok(Some(registration))
    }

    /// The broker is asked each time: the VMM may have changed the guest's memory.
    fn side_by_side(&self, runs: &[Run], length: u64) -> Result<SideBySide, Errno> {
        let memory = self.upstream.ask(Kind::Memory, Outgoing::default())?;
        let regions = Region::parse(&memory.payload).map_err(|_| Errno::EPROTO)?;
        let pieces = pieces(runs, regions, &memory.fds).ok_or(Errno::EFAULT)?;
        SideBySide::map(length, pieces)
    }

    /// RM has done what was asked: the guest keeps the memory from now on.
    pub(super) fn registered(registration: Registration, prepared: &mut Prepared<'_>) -> Holds {
        registration.hold();
        prepared.hold();
        Holds::Guest(Arc::new(registration))
    }

    /// What RM may keep of such memory beyond its object, noted before the call is made. A call
    /// that cannot, but has a number in it that is the object's too, keeps it a little longer.
    pub(super) fn note_kept(&self, prepared: &Prepared<'_>) {
        /// `NV_ESC_RM_UNMAP_MEMORY_DMA`
        const UNMAP_MEMORY_DMA: u32 = 0x58;
        if self.registrations.bytes() == 0 {
            return;
        }
        let mut objects = lock(&self.objects);
        let argument = prepared.argument();
        let client = u32_at(argument, 0);
        match prepared.nr() {
            // RM undoes maps with the object, and a duplicate is one itself.
            escape::MAP_MEMORY_DMA | UNMAP_MEMORY_DMA | escape::FREE | escape::DUP_OBJECT => {}
            escape::MAP_MEMORY | escape::UNMAP_MEMORY | escape::VID_HEAP_CONTROL => {}
            escape::UPDATE_DEVICE_MAPPING_INFO => {}
            escape::CONTROL | escape::ALLOC => {
                prepared.buffers().for_each(|bytes| objects.may_keep(client, bytes));
            }
            _ => objects.may_keep(client, argument),
        }
    }

    /// Whether a control would let registered memory go where it is not followed: to a file,
    /// and so to other processes.
    pub(super) fn exports_registered(&self, prepared: &Prepared<'_>) -> bool {
        exports::exported(prepared).is_some_and(|(client, object)| {
            matches!(lock(&self.objects).holds(client, object), Holds::Guest(_))
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nvguest_abi::compiled::Compiled;

    use super::*;
    use crate::worker::objects::Objects;
    use crate::worker::rig;

    fn registrations() -> Arc<Registrations> {
        Registrations::new(&rig::start(), Arc::new(Watcher::new(rig::broker(), Duration::ZERO)))
    }

    #[test]
    fn memory_is_registered_beside_no_call_that_may_name_it() {
        let mut start = rig::start();
        let compiled = Compiled { capabilities: Capability::Compute as u32, ..Compiled::default() };
        start.compiled = Arc::new(compiled);
        let watcher = Arc::new(Watcher::new(rig::broker(), Duration::ZERO));
        let all = Registrations::new(&start, watcher);
        let (one, other) = (all.turn(false), all.turn(false));
        let alone = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let _turn = all.turn(true);
                alone.store(true, Ordering::Release);
            });
            std::thread::sleep(Duration::from_millis(50));
            drop(one);
            assert!(!alone.load(Ordering::Acquire), "one call is under way");
            drop(other);
        });
        assert!(alone.into_inner());
    }

    #[test]
    fn memory_that_a_call_may_have_named_is_kept_as_long_as_the_clients_of_both() {
        let all = registrations();
        let registration = Arc::new(all.begin(1, 4096).unwrap());
        let mut objects = Objects::default();
        objects.client(0xc1, 1);
        objects.client(0xc2, 1);
        objects.made(0xc1, 7, 0xc1, Holds::Guest(registration));
        objects.may_keep(0xc2, &[0, 0, 0, 0, 7, 0, 0, 0, 7, 0, 0, 0, 1]);
        for (client, freed, bytes) in [(0xc1, 7, 4096), (0xc1, 0xc1, 4096), (0xc2, 0xc2, 0)] {
            drop(objects.freed(client, freed));
            assert_eq!(all.bytes(), bytes, "after {freed:#x}");
        }
    }

    #[test]
    fn a_call_as_a_client_that_is_nobodys_keeps_nothing_for_it() {
        let all = registrations();
        let registration = Arc::new(all.begin(1, 4096).unwrap());
        let mut objects = Objects::default();
        objects.client(0xc1, 1);
        objects.made(0xc1, 7, 0xc1, Holds::Guest(registration));
        objects.may_keep(0xbad, &[7, 0, 0, 0]);
        drop(objects.freed(0xc1, 0xc1));
        assert_eq!(all.bytes(), 0);
    }

    #[test]
    fn memory_that_no_call_named_goes_with_its_object() {
        let all = registrations();
        let registration = Arc::new(all.begin(1, 4096).unwrap());
        let mut objects = Objects::default();
        objects.client(0xc1, 1);
        objects.made(0xc1, 0x700, 0xc1, Holds::Guest(registration));
        // Not at a multiple of four bytes, where no handle is.
        objects.may_keep(0xc1, &[0, 0, 0, 0, 0, 0, 7, 0, 0]);
        drop(objects.freed(0xc1, 0x700));
        assert_eq!(all.bytes(), 0);
        assert!(all.begin(1, 4096).is_some(), "its number is free again");
    }

    #[test]
    fn runs_are_found_in_the_regions_that_they_cross_and_nowhere_else() {
        let region = |address, size, offset| Region { address, size, offset };
        let regions = [region(0x1000, 0x3000, 0x8000), region(0x4000, 0x2000, 0)];
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        let files = [file(), file()];
        let find = |address: u64, length: u64| {
            let run = Run { address: address.into(), length: length.into() };
            let pieces = pieces(&[run], &regions, &files)?;
            Some(pieces.iter().map(|it| (it.offset, it.length)).collect::<Vec<_>>())
        };
        assert_eq!(find(0x2000, 0x1000), Some(vec![(0x9000, 0x1000)]));
        assert_eq!(find(0x3000, 0x2000), Some(vec![(0xa000, 0x1000), (0, 0x1000)]));
        for (address, length) in
            [(0, 0x1000), (0x5000, 0x2000), (0x6000, 0x1000), (0x1000, u64::MAX)]
        {
            assert_eq!(find(address, length), None, "{address:#x}");
        }
    }
}
