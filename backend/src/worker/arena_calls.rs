//! Calls that concern memory of the arena: those that RM would answer otherwise than for
//! memory of its own are answered here, and what the others did is followed.

use std::sync::Arc;

use nvguest_abi::{status, FileKind};

use super::arena::{Arena, Wanted};
use super::calls::{armed, escape, status_offset, u32_at, u64_at, HEAP_ALLOC};
use super::mapping::Armed;
use super::objects::Holds;
use super::session::{GuestFile, Named, Session};
use crate::marshal::register::{Registration, HEAP_SIZE};
use crate::marshal::Prepared;
use crate::sync::lock;
use crate::wire::Cache;

/// `NV01_MEMORY_SYSTEM` (`cl003e.h`) and `NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED`.
const MEMORY_SYSTEM: u32 = 0x3e;
const HANDLE_PROVIDED: u32 = 0x4000;
/// `NVOS33_FLAGS_CACHING_TYPE` and `_MAPPING`, and what RM answers for system memory: the
/// default and direct.
const HOW_MAPPED: u32 = 7 << 23 | 3 << 15;
const MAPPED: u32 = 6 << 23 | 1 << 15;
/// What RM answers for system memory as its `format`, `partitionStride` and, for a class,
/// flag and alignment, where nothing was asked (seen on an H200 with 580.159.04).
const FORMAT: u32 = 6;
const STRIDE: u32 = 0x100;
const CLASS_FLAG: u32 = 0x8000;
const CLASS_ALIGNMENT: u64 = 0x1000;

/// Calls that may be answered here.
const ANSWERED: [u32; 5] = [
    escape::VID_HEAP_CONTROL,
    escape::ALLOC,
    escape::MAP_MEMORY,
    escape::UNMAP_MEMORY,
    escape::UPDATE_DEVICE_MAPPING_INFO,
];

fn put<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if let Some(field) = bytes.get_mut(at..at + N) {
        field.copy_from_slice(&value);
    }
}

/// An answer where the caller asked for nothing.
fn put_default<const N: usize>(bytes: &mut [u8], at: usize, value: [u8; N]) {
    if bytes.get(at..at + N).is_some_and(|field| field.iter().all(|&byte| byte == 0)) {
        put(bytes, at, value);
    }
}

impl Session {
    /// Whether the call is answered already, without RM or with another call of it: then the
    /// argument is as RM would have left it.
    pub(super) fn arena_answers(
        &self,
        file: &Arc<GuestFile>,
        named: &Named<'_>,
        prepared: &mut Prepared<'_>,
    ) -> bool {
        let nr = prepared.nr();
        let Some(arena) = self.arena.as_ref().filter(|_| file.kind == FileKind::Ctl) else {
            return false;
        };
        if !ANSWERED.contains(&nr) || !self.owns_client(file, prepared.argument()) {
            return false;
        }
        match nr {
            escape::VID_HEAP_CONTROL => self.heap_memory(arena, file, prepared),
            escape::ALLOC => self.class_memory(arena, file, prepared),
            escape::MAP_MEMORY => self.map_memory(arena, (file, named), prepared),
            escape::UNMAP_MEMORY => self.unmap_memory(arena, prepared),
            escape::UPDATE_DEVICE_MAPPING_INFO => self.rename_map(arena, prepared),
            _ => false,
        }
    }

    /// RM knows what it says to another file's client.
    fn owns_client(&self, file: &GuestFile, argument: &[u8]) -> bool {
        lock(&self.objects).owner(u32_at(argument, 0)) == Some(file.handle)
    }

    /// VID_HEAP_CONTROL, `AllocSize`: type 0x30, flags 0x34, attr 0x38, format 0x3c,
    /// partitionStride 0x48, size 0x58, offset 0x68, limit 0x70, attr2 0x90.
    fn heap_memory(&self, arena: &Arena, file: &GuestFile, prepared: &mut Prepared<'_>) -> bool {
        let argument = prepared.argument();
        let word = |at| u32_at(argument, at);
        if argument.len() != HEAP_SIZE || u64::from(word(8)) != HEAP_ALLOC {
            return false;
        }
        let registration = Registration {
            client: word(0),
            parent: word(4),
            handle: word(0x2c),
            kind: word(0x30),
            flags: word(0x34),
            attr: word(0x38),
            attr2: word(0x90),
        };
        let wanted = Wanted { registration, size: u64_at(argument, 0x58) };
        let Some(memory) = self.allocate(arena, file, &wanted) else { return false };
        let argument = prepared.argument_mut();
        put(argument, 0x14, status::OK.to_le_bytes());
        put(argument, 0x2c, memory.to_le_bytes());
        let (attr, attr2) = wanted.answered();
        put(argument, 0x38, attr.to_le_bytes());
        put(argument, 0x90, attr2.to_le_bytes());
        put_default(argument, 0x3c, FORMAT.to_le_bytes());
        put_default(argument, 0x48, STRIDE.to_le_bytes());
        put(argument, 0x58, wanted.whole().to_le_bytes());
        put(argument, 0x68, 0_u64.to_le_bytes());
        put(argument, 0x70, (wanted.whole() - 1).to_le_bytes());
        true
    }

    /// RM_ALLOC of `NV01_MEMORY_SYSTEM`, `NV_MEMORY_ALLOCATION_PARAMS`: type 4, flags 8,
    /// attr 0x18, attr2 0x1c, format 0x20, size 0x40, alignment 0x48, offset 0x50, limit 0x58.
    fn class_memory(&self, arena: &Arena, file: &GuestFile, prepared: &mut Prepared<'_>) -> bool {
        let argument = prepared.argument();
        let (class, handle) = (u32_at(argument, 0xc), u32_at(argument, 8));
        let (Some(params), MEMORY_SYSTEM) = (prepared.params(), class) else { return false };
        let flags = u32_at(params, 8) & !HANDLE_PROVIDED;
        let registration = Registration {
            client: u32_at(argument, 0),
            parent: u32_at(argument, 4),
            handle,
            kind: u32_at(params, 4),
            flags: if handle == 0 { flags } else { flags | HANDLE_PROVIDED },
            attr: u32_at(params, 0x18),
            attr2: u32_at(params, 0x1c),
        };
        let wanted = Wanted { registration, size: u64_at(params, 0x40) };
        let Some(memory) = self.allocate(arena, file, &wanted) else { return false };
        if let Some(params) = prepared.params_mut() {
            let (attr, attr2) = wanted.answered();
            put(params, 8, (u32_at(params, 8) | CLASS_FLAG).to_le_bytes());
            put(params, 0x18, attr.to_le_bytes());
            put(params, 0x1c, attr2.to_le_bytes());
            put_default(params, 0x20, FORMAT.to_le_bytes());
            put_default(params, 0x48, CLASS_ALIGNMENT.to_le_bytes());
            put(params, 0x40, wanted.whole().to_le_bytes());
            put(params, 0x50, 0_u64.to_le_bytes());
            put(params, 0x58, (wanted.whole() - 1).to_le_bytes());
        }
        put(prepared.argument_mut(), 8, memory.to_le_bytes());
        let status_at = status_offset(&self.start.compiled, file.kind, prepared);
        put(prepared.argument_mut(), usize::from(status_at), status::OK.to_le_bytes());
        true
    }

    /// The handle of an object of the arena's memory.
    fn allocate(&self, arena: &Arena, file: &GuestFile, wanted: &Wanted) -> Option<u32> {
        let (memory, extent) = arena.allocate(&*self.host, file.host(), wanted)?;
        let Registration { client, parent, .. } = wanted.registration;
        lock(&self.objects).made(client, memory, parent, Holds::System);
        // Only now: what is not known to be there is swept.
        arena.own(client, memory, extent);
        Some(memory)
    }

    fn map_memory(
        &self,
        arena: &Arena,
        (file, named): (&Arc<GuestFile>, &Named<'_>),
        prepared: &mut Prepared<'_>,
    ) -> bool {
        let argument = prepared.argument();
        let (client, object) = (u32_at(argument, 0), u32_at(argument, 8));
        if arena.extent(client, object).is_none() {
            return false;
        }
        let status = match self.arm(arena, (file, named), argument) {
            Ok(linear) => {
                let argument = prepared.argument_mut();
                let flags = u32_at(argument, 0x2c) & !HOW_MAPPED | MAPPED;
                put(argument, 0x20, linear.to_le_bytes());
                put(argument, 0x2c, flags.to_le_bytes());
                status::OK
            }
            Err(status) => status,
        };
        put(prepared.argument_mut(), 0x28, status.to_le_bytes());
        true
    }

    /// Arms the file that the call names, without the driver; the map's name.
    fn arm(
        &self,
        arena: &Arena,
        (file, named): (&Arc<GuestFile>, &Named<'_>),
        argument: &[u8],
    ) -> Result<u64, u32> {
        let (client, device, object) =
            (u32_at(argument, 0), u32_at(argument, 4), u32_at(argument, 8));
        if !lock(&self.objects).knows(client, device) {
            return Err(status::OBJECT_NOT_FOUND);
        }
        let target = named.first().filter(|target| target.kind == FileKind::Ctl);
        let target = target.ok_or(status::INVALID_ARGUMENT)?;
        let (offset, length) = (u64_at(argument, 0x10), u64_at(argument, 0x18));
        let mut slot = lock(&target.armed);
        if slot.is_some() {
            return Err(status::STATE_IN_USE);
        }
        let (extent, linear) = arena.map((client, object), (offset, length))?;
        let base = offset - offset % super::mapping::PAGE;
        *slot = Some(Armed {
            linear,
            cache: Cache::WriteBack,
            extent: Some((extent, base)),
            ..armed(&target, Arc::clone(file), argument)
        });
        Ok(linear)
    }

    /// The program may map the memory on as it may RM's own: only RM's name for it goes.
    fn unmap_memory(&self, arena: &Arena, prepared: &mut Prepared<'_>) -> bool {
        let argument = prepared.argument();
        let (client, object) = (u32_at(argument, 0), u32_at(argument, 8));
        if arena.extent(client, object).is_none() {
            return false;
        }
        let linear = u64_at(argument, 0x10);
        self.mappings.evict(&self.all_files(), |_, armed| {
            (armed.client, armed.memory, armed.linear) == (client, object, linear)
        });
        let status = arena.unmap(client, object, linear);
        put(prepared.argument_mut(), 0x18, status.to_le_bytes());
        true
    }

    fn rename_map(&self, arena: &Arena, prepared: &mut Prepared<'_>) -> bool {
        let argument = prepared.argument();
        let (client, object) = (u32_at(argument, 0), u32_at(argument, 8));
        if arena.extent(client, object).is_none() {
            return false;
        }
        let (old, new) = (u64_at(argument, 0x10), u64_at(argument, 0x18));
        let status = arena.rename(client, object, old, new);
        if status == status::OK {
            self.renamed(client, object, old, new);
        }
        put(prepared.argument_mut(), 0x20, status.to_le_bytes());
        true
    }

    /// What RM did, as far as it concerns memory of the arena.
    pub(super) fn arena_follows(&self, asked: &[u8], prepared: &Prepared<'_>) {
        let is_rm = matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu);
        let Some(arena) = self.arena.as_ref().filter(|_| is_rm) else { return };
        let done = prepared.argument();
        let (client, object) = (u32_at(done, 0), u32_at(done, 8));
        match prepared.nr() {
            escape::FREE | escape::VID_HEAP_CONTROL => {
                let gone = arena.sweep(&lock(&self.objects));
                drop(gone);
            }
            escape::ALLOC | escape::ALLOC_MEMORY => arena.forget(client, object),
            escape::DUP_OBJECT => {
                let source = (u32_at(asked, 0xc), u32_at(asked, 0x10));
                match arena.extent(source.0, source.1) {
                    Some(extent) => arena.own(client, object, extent),
                    None => arena.forget(client, object),
                }
            }
            _ => {}
        }
    }
}
