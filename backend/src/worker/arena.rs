//! System memory out of the arena: objects that RM believes to be registered memory.
//!
//! RM maps no registered memory for a program, so what concerns the maps of such an object
//! is answered here: they are views of the window's part that shows the arena.
//! `docs/arena.md` has what is allocated so, and how that was established.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use nvguest_abi::status;

use super::mapping::PAGE;
use super::objects::Objects;
use super::upstream::Upstream;
use crate::errno::Errno;
use crate::host::{Host, HostFile};
use crate::marshal::register::Registration;
use crate::marshal::scratch::Scratch;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};
use crate::transport::shared::{Piece, Shared};

/// `NV_ERR_INVALID_BASE` (`nvstatuscodes.h`)
const INVALID_BASE: u32 = 0x20;
/// Maps of one object at most.
const MAX_MAPS: usize = 4096;
/// First name of a map; like an address, with the offset in its page.
const FIRST_LINEAR: u64 = 0x7e00_0000_0000;

/// `NVOS32_ATTR_LOCATION`, `_PHYSICALITY`, `_COHERENCY` and `_PAGE_SIZE` (`nvos.h`).
mod attr {
    pub const LOCATION: u32 = 3 << 25;
    pub const PCI: u32 = 1 << 25;
    pub const PHYSICALITY: u32 = 3 << 27;
    pub const NONCONTIGUOUS: u32 = 1 << 27;
    pub const CONTIGUOUS: u32 = 2 << 27;
    pub const COHERENCY: u32 = 7 << 29;
    pub const WRITE_BACK: u32 = 5 << 29;
    /// UNCACHED, CACHED, WRITE_COMBINE, WRITE_BACK: all that were seen.
    pub const COHERENCIES: [u32; 4] = [0, 1, 2, 5];
    pub const PAGE_SIZE: u32 = 3 << 23;
    pub const PAGE_SIZE_4KB: u32 = 1 << 23;
}
/// `NVOS32_ATTR2_ZBC` and `_GPU_CACHEABLE`.
mod attr2 {
    pub const ZBC: u32 = 3;
    pub const PREFER_NO_ZBC: u32 = 1;
    pub const GPU_CACHEABLE: u32 = 3 << 2;
    pub const NOT_GPU_CACHEABLE: u32 = 2 << 2;
}
/// `NVOS32_TYPE_IMAGE`: all that was seen.
const TYPE_IMAGE: u32 = 0;
/// `NVOS32_ALLOC_FLAGS_VIRTUAL`
const VIRTUAL: u32 = 0x8_0000;

/// A range of the arena that RM has registered. When the last owner lets go of it, RM has.
pub struct Extent {
    upstream: Arc<Upstream>,
    piece: Piece,
}

impl Drop for Extent {
    fn drop(&mut self) {
        let words = [self.piece.offset, 0, 0, 0];
        if let Err(error) =
            self.upstream.tell(Kind::Give, Outgoing { words, ..Outgoing::default() })
        {
            // The broker is gone, and the arena with it.
            tracing::debug!(%error, "a range of the arena was not given back");
        }
    }
}

impl Extent {
    /// Where it is in the arena, and in the window, which begins with the arena.
    pub fn offset(&self) -> u64 {
        self.piece.offset
    }
}

/// What is asked of RM.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Everything but the memory.
    pub registration: Registration,
    /// Bytes.
    pub size: u64,
}

impl Wanted {
    /// Bytes that it gets.
    pub fn whole(&self) -> u64 {
        self.size.saturating_add(PAGE - 1) / PAGE * PAGE
    }

    /// Whether it is system memory at all.
    fn is_system(&self) -> bool {
        let Registration { flags, attr, .. } = self.registration;
        attr & attr::LOCATION == attr::PCI && flags & VIRTUAL == 0
    }

    /// Whether it is established that registered memory can stand in.
    fn fits(&self) -> bool {
        let Registration { kind, attr, .. } = self.registration;
        kind == TYPE_IMAGE
            && attr & attr::PHYSICALITY != attr::CONTIGUOUS
            && attr::COHERENCIES.contains(&(attr >> attr::COHERENCY.trailing_zeros()))
            // RM itself maps some of one page, for semaphore surfaces.
            && self.whole() > PAGE
    }

    /// `attr` and `attr2` as RM answers them for memory of its own.
    pub fn answered(&self) -> (u32, u32) {
        let Registration { mut attr, mut attr2, .. } = self.registration;
        attr = attr & !attr::PHYSICALITY | attr::NONCONTIGUOUS;
        if attr & attr::PAGE_SIZE == 0 {
            attr |= attr::PAGE_SIZE_4KB;
        }
        attr2 = attr2 & !attr2::ZBC | attr2::PREFER_NO_ZBC;
        if attr2 & attr2::GPU_CACHEABLE == 0 {
            attr2 |= attr2::NOT_GPU_CACHEABLE;
        }
        (attr, attr2)
    }

    fn registered(&self) -> Registration {
        const CHANGED: u32 = attr::LOCATION | attr::PHYSICALITY | attr::COHERENCY;
        let attr = self.registration.attr & !CHANGED;
        let attr = attr | attr::PCI | attr::NONCONTIGUOUS | attr::WRITE_BACK;
        Registration { attr, ..self.registration }
    }
}

struct Object {
    extent: Arc<Extent>,
    /// Maps of it, by the names that the program knows them by.
    maps: Vec<u64>,
}

/// The arena, from the side of one worker.
pub struct Arena {
    shared: Arc<Shared>,
    upstream: Arc<Upstream>,
    /// RM makes one such object at a time anyway.
    scratch: Mutex<Scratch>,
    /// By client and handle.
    objects: Mutex<HashMap<(u32, u32), Object>>,
    next_linear: AtomicU64,
}

impl Arena {
    /// Of which nothing is used yet.
    pub fn new(shared: Arc<Shared>, upstream: Arc<Upstream>) -> Result<Self, Errno> {
        Ok(Self {
            shared,
            upstream,
            scratch: Mutex::new(Scratch::new()?),
            objects: Mutex::default(),
            next_linear: AtomicU64::new(FIRST_LINEAR),
        })
    }

    /// Makes an object of memory of the arena: its handle and its memory. `None` where RM is
    /// to be asked for memory of its own.
    pub fn allocate(
        &self,
        host: &dyn Host,
        file: &HostFile,
        wanted: &Wanted,
    ) -> Option<(u32, Arc<Extent>)> {
        if !wanted.is_system() {
            return None;
        }
        if !wanted.fits() {
            tracing::debug!(?wanted, "system memory that the arena is not used for");
            return None;
        }
        let extent = match self.take(wanted.whole()) {
            Ok(extent) => extent,
            Err(errno) => {
                tracing::debug!(%errno, size = wanted.size, "the arena has no room");
                return None;
            }
        };
        let registration = wanted.registered();
        let made = registration.make(host, file, &mut lock(&self.scratch), &extent.piece);
        match made {
            Ok(handle) => {
                tracing::trace!(?wanted, handle, "system memory of the arena");
                Some((handle, Arc::new(extent)))
            }
            Err(status) => {
                tracing::debug!(?wanted, ?status, "RM does not register memory of the arena");
                None
            }
        }
    }

    fn take(&self, length: u64) -> Result<Extent, Errno> {
        let words = [length, 0, 0, 0];
        let answer = self.upstream.ask(Kind::Take, Outgoing { words, ..Outgoing::default() })?;
        self.had(answer.words[1], length)
    }

    /// A range that the broker handed us.
    pub fn had(&self, at: u64, length: u64) -> Result<Extent, Errno> {
        let piece = self.shared.piece(at, length).ok_or(Errno::EPROTO)?;
        Ok(Extent { upstream: Arc::clone(&self.upstream), piece })
    }

    /// `object`, which is known to be there, is memory of the arena.
    pub fn own(&self, client: u32, object: u32, extent: Arc<Extent>) {
        let object = ((client, object), Object { extent, maps: Vec::new() });
        let before = lock(&self.objects).insert(object.0, object.1);
        drop(before);
    }

    /// The memory of an object, if it is the arena's.
    pub fn extent(&self, client: u32, object: u32) -> Option<Arc<Extent>> {
        lock(&self.objects).get(&(client, object)).map(|object| Arc::clone(&object.extent))
    }

    /// Takes out the objects that are not among `left`. Their memory is RM's until it is
    /// known to have let go: then the caller drops it.
    pub fn sweep(&self, left: &Objects) -> Vec<Arc<Extent>> {
        let mut gone = Vec::new();
        lock(&self.objects).retain(|&(client, object), memory| {
            let stays = left.knows(client, object);
            if !stays {
                gone.push(Arc::clone(&memory.extent));
            }
            stays
        });
        gone
    }

    /// `object` is another's memory from now on.
    pub fn forget(&self, client: u32, object: u32) {
        let before = lock(&self.objects).remove(&(client, object));
        drop(before);
    }

    /// RM_MAP_MEMORY: the memory and the map's name; RM's status where it would refuse.
    pub fn map(
        &self,
        (client, object): (u32, u32),
        (offset, length): (u64, u64),
    ) -> Result<(Arc<Extent>, u64), u32> {
        let mut objects = lock(&self.objects);
        let object = objects.get_mut(&(client, object)).ok_or(status::OBJECT_NOT_FOUND)?;
        let size = object.extent.piece.length;
        if offset >= size {
            return Err(INVALID_BASE);
        }
        if length == 0 || offset.checked_add(length).is_none_or(|end| end > size) {
            return Err(status::INVALID_LIMIT);
        }
        if object.maps.len() >= MAX_MAPS {
            return Err(status::INSUFFICIENT_RESOURCES);
        }
        let step = length.next_multiple_of(PAGE) + PAGE;
        let linear = self.next_linear.fetch_add(step, Ordering::Relaxed) + offset % PAGE;
        object.maps.push(linear);
        Ok((Arc::clone(&object.extent), linear))
    }

    /// RM_UNMAP_MEMORY: a map's name is gone. RM's status.
    pub fn unmap(&self, client: u32, object: u32, linear: u64) -> u32 {
        self.named(client, object, linear, |maps, at| {
            maps.swap_remove(at);
        })
    }

    /// RM_UPDATE_DEVICE_MAPPING_INFO: the program has its own name for a map. RM's status.
    pub fn rename(&self, client: u32, object: u32, old: u64, new: u64) -> u32 {
        self.named(client, object, old, |maps, at| maps[at] = new)
    }

    fn named(
        &self,
        client: u32,
        object: u32,
        linear: u64,
        change: impl FnOnce(&mut Vec<u64>, usize),
    ) -> u32 {
        let mut objects = lock(&self.objects);
        let maps = objects.get_mut(&(client, object)).map(|object| &mut object.maps);
        let at = maps.as_ref().and_then(|maps| maps.iter().position(|&name| name == linear));
        let (Some(maps), Some(at)) = (maps, at) else { return status::OBJECT_NOT_FOUND };
        change(maps, at);
        status::OK
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted(attr: u32, flags: u32, size: u64) -> Wanted {
        let (client, parent, handle, kind, attr2) = (1, 2, 3, 0, 0);
        Wanted {
            registration: Registration { client, parent, handle, kind, flags, attr, attr2 },
            size,
        }
    }

    #[test]
    fn only_what_is_established_comes_from_the_arena() {
        for wanted in [wanted(attr::PCI, 0x4000, 65536), wanted(attr::PCI | 2 << 29, 0, 4097)] {
            assert!(wanted.is_system() && wanted.fits(), "{wanted:?}");
        }
        for (attr, flags, size) in [
            (0, 0, 65536),
            (2 << 25, 0, 65536),
            (3 << 25, 0, 65536),
            (attr::PCI | attr::CONTIGUOUS, 0, 65536),
            (attr::PCI | 3 << 29, 0, 65536),
            (attr::PCI, VIRTUAL, 65536),
            (attr::PCI, 0, 4096),
            (attr::PCI, 0, 0),
        ] {
            let wanted = wanted(attr, flags, size);
            assert!(!(wanted.is_system() && wanted.fits()), "{attr:#x} {flags:#x} {size:#x}");
        }
    }

    /// What an H200 with 580.159.04 answered: `benchmarks/h200-580.159.04/arena/exp.txt`.
    #[test]
    fn what_is_answered_is_what_rm_answers_for_its_own() {
        for (asked, answered) in [
            ((0x200_0000, 0), (0xa80_0000, 9)),
            ((0x2200_0000, 0), (0x2a80_0000, 9)),
            ((0x3a00_0000, 0), (0x2a80_0000, 9)),
            ((0x4280_0000, 4), (0x4a80_0000, 5)),
            ((0x2300_0000, 0), (0x2b00_0000, 9)),
            ((0x2200_0000, 0xf), (0x2a80_0000, 0xd)),
        ] {
            let mut wanted = wanted(asked.0, 0, 65536);
            wanted.registration.attr2 = asked.1;
            assert_eq!(wanted.answered(), answered, "{asked:#x?}");
        }
    }

    #[test]
    fn registered_memory_is_write_back_and_not_contiguous() {
        let asked = wanted(attr::PCI | 2 << 29 | 3 << 27 | 0x123, 0, 65536);
        assert_eq!(asked.registered().attr, 0x123 | 1 << 25 | 1 << 27 | 5 << 29);
    }
}
