//! IOCTL: one call of the driver, and what it means for objects and placements.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nvguest_abi::compiled::{Compiled, Verdict};
use nvguest_abi::rules::{read_uint, NO_OFFSET};
use nvguest_abi::{status, FileKind};

use super::coherency::{self, holds_system};
use super::mapping::{Armed, PAGE};
use super::objects::Holds;
use super::registered::HEAP_REGISTER;
use super::serve::Bench;
use super::session::{GuestFile, Named, Session};
use super::slices::holds_time;
use crate::errno::Errno;
use crate::limits::Resource;
use crate::marshal::{prepare, Call, Prepared, Refused};
use crate::policy::sharing::{self, Sharing};
use crate::policy::Answer;
use crate::rate;
use crate::sync::lock;
use crate::transport::counts::{Class, Word};
use crate::transport::link::{Kind, Outgoing};
use crate::wire::Cache;

/// Escapes (`nv_escape.h`) that change objects, mappings or what the host shares,
/// and where their fields are (`nvos.h`). `tests/layouts.rs` compares every offset
/// with every measured release.
pub mod escape {
    /// `NV_ESC_RM_CONTROL`: client 0, command 8.
    pub const CONTROL: u32 = 0x2a;
    /// `NV_ESC_RM_ALLOC_MEMORY`: root 0, parent 4, object 8, flags 0x10, status 0x28, fd 0x30.
    pub const ALLOC_MEMORY: u32 = 0x27;
    /// `NV_ESC_RM_ALLOC_OBJECT`: root 0, parent 4, object 8, class 0xc.
    pub const ALLOC_OBJECT: u32 = 0x28;
    /// `NV_ESC_RM_FREE`: root 0, object 8.
    pub const FREE: u32 = 0x29;
    /// `NV_ESC_RM_ALLOC`: root 0, parent 4, object 8, class 0xc.
    pub const ALLOC: u32 = 0x2b;
    /// `NV_ESC_RM_DUP_OBJECT`: client 0, parent 4, object 8, source client 0xc, source 0x10.
    pub const DUP_OBJECT: u32 = 0x34;
    /// `NV_ESC_RM_SHARE`: client 0, object 4, policy 8.
    pub const SHARE: u32 = 0x35;
    /// `NV_ESC_RM_IDLE_CHANNELS`: clients behind 0x10.
    pub const IDLE_CHANNELS: u32 = 0x41;
    /// `NV_ESC_RM_VID_HEAP_CONTROL`: root 0, parent 4, function 8, memory 0x2c.
    pub const VID_HEAP_CONTROL: u32 = 0x4a;
    /// `NV_ESC_RM_MAP_MEMORY`: client 0, memory 8, length 0x18, linear 0x20, flags 0x2c.
    pub const MAP_MEMORY: u32 = 0x4e;
    /// `NV_ESC_RM_UNMAP_MEMORY`: client 0, memory 8, linear 0x10.
    pub const UNMAP_MEMORY: u32 = 0x4f;
    /// `NV_ESC_RM_GET_EVENT_DATA`.
    pub const GET_EVENT_DATA: u32 = 0x52;
    /// `NV_ESC_RM_ALLOC_CONTEXT_DMA2`: root 0, object 8, flags 0x10, memory 0x18.
    pub const ALLOC_CONTEXT_DMA2: u32 = 0x54;
    /// `NV_ESC_RM_MAP_MEMORY_DMA`: client 0, memory 0xc, flags 0x20.
    pub const MAP_MEMORY_DMA: u32 = 0x57;
    /// `NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO`: client 0, memory 8, old 0x10, new 0x18.
    pub const UPDATE_DEVICE_MAPPING_INFO: u32 = 0x5e;
    /// `NV_ESC_CARD_INFO`: places of 72 bytes, card 0x10.
    pub const CARD_INFO: u32 = 200;
    /// `NV_ESC_ATTACH_GPUS_TO_FD`: cards 0.
    pub const ATTACH_GPUS_TO_FD: u32 = 212;
    /// `NV_ESC_SYS_PARAMS`: memory block size 0.
    pub const SYS_PARAMS: u32 = 214;
}

/// `NVOS32_FUNCTION_ALLOC_SIZE`, `_ALLOC_SIZE_RANGE` and `_FREE` (`nvos.h`).
pub(super) const HEAP_ALLOC: u64 = 2;
pub(super) const HEAP_ALLOC_RANGE: u64 = 14;
const HEAP_FREE: u64 = 3;
/// `NV01_ROOT`, `NV01_ROOT_NON_PRIV`, `NV01_ROOT_CLIENT` (`cl0000.h`, `cl0001.h`, `cl0041.h`).
const CLIENT_CLASSES: [u64; 3] = [0x0, 0x1, 0x41];

/// `NV01_EVENT_WITHOUT_EVENT_DATA` of `notifyIndex`, and `data` (`NV0005_ALLOC_PARAMETERS`).
const WITHOUT_DATA: u32 = 0x1000_0000;
const NOTIFY_INDEX: u16 = 12;
const EVENT_FILE: u16 = 16;

/// `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`: it stops the card's scheduler for a moment, and
/// Vulkan hangs without it.
const DISABLE_CHANNELS: u64 = 0x2080_110b;
/// A call that comes too often waits so long at most, and is refused then.
const DISABLE_PATIENCE: Duration = Duration::from_millis(500);

/// What a call is told that finds no room.
const FULL: (Verdict, u32) = (Verdict::Limit, status::INSUFFICIENT_RESOURCES);

pub(super) fn u32_at(bytes: &[u8], offset: u16) -> u32 {
    // CAST: four bytes were read. Outside the argument there is nothing: 0.
    read_uint(bytes, offset, 4).unwrap_or(0) as u32
}

pub(super) fn u64_at(bytes: &[u8], offset: u16) -> u64 {
    read_uint(bytes, offset, 8).unwrap_or(0)
}

/// The file that a new event with data is for. Of the classes that a guest may make, only events
/// have a descriptor there.
fn receives_data(prepared: &Prepared<'_>) -> Option<u32> {
    let file = prepared.file_at(1, EVENT_FILE)?;
    (u32_at(prepared.params()?, NOTIFY_INDEX) & WITHOUT_DATA == 0).then_some(file)
}

impl Session {
    /// Makes the call that `body` describes and appends its reply.
    pub fn ioctl(
        &self,
        file: &Arc<GuestFile>,
        body: &[u8],
        room: usize,
        bench: &mut Bench,
    ) -> Result<(), Errno> {
        let call = Call::parse(body)?;
        let named = Named::new(self);
        let compiled = &*self.start.compiled;
        let prepared = prepare(compiled, file.kind, &call, &named, &mut bench.scratch);
        let mut prepared = match prepared {
            Ok(prepared) => prepared,
            Err(refused) => {
                self.refused(&refused);
                return refused.finish(compiled, file.kind, &call, &mut bench.reply);
            }
        };
        if prepared.reply_len() > room {
            return Err(Errno::EMSGSIZE);
        }
        let _turn = self.registrations.turn(prepared.offer().is_some());
        let status_at = status_offset(compiled, file.kind, &prepared);
        let makes = makes(file.kind, &prepared);
        let allowed = match makes.map_or(Ok(()), |resource| self.reserve(resource)) {
            Err(_) => Err(FULL),
            Ok(()) if self.arena_answers(file, &named, &mut prepared) => {
                self.settle(makes);
                prepared.finish(Ok(0), &mut bench.reply);
                return Ok(());
            }
            Ok(()) => self
                .before(file, &mut prepared)
                .map_or_else(|| self.charge(&prepared), Err)
                .and_then(|block| Ok((block, self.register(&mut prepared)?)))
                .inspect_err(|_| self.settle(makes)),
        };
        let (block, registration) = match allowed {
            Ok(allowed) => allowed,
            Err((verdict, status)) => {
                let what = prepared.what();
                let answer = match status_at {
                    NO_OFFSET => Answer::Errno(Errno::EINVAL),
                    offset => Answer::Status { offset, status },
                };
                let refused = Refused { verdict, what, answer };
                self.refused(&refused);
                return refused.finish(compiled, file.kind, &call, &mut bench.reply);
            }
        };
        // Held from before RM makes the duplicate: its source may be freed meanwhile.
        let source = self.source(&prepared);
        let asked_slice = self.put_slice(&mut prepared);
        let asked_bits = self.put_coherent(&mut prepared);
        let result = prepared.execute(&*self.host, file.host());
        coherency::put_back(&mut prepared, asked_bits);
        if prepared.nr() == escape::SHARE && self.sharing(call.argument) == Sharing::WithUser {
            sharing::set_type(prepared.argument_mut(), false);
        }
        let status = read_uint(prepared.argument(), status_at, 4).unwrap_or(0);
        let done = result.is_ok() && status == u64::from(status::OK);
        if result.is_ok() && !done {
            self.page().count(Word::Status);
        }
        if done {
            let holds = match (block, registration) {
                (Some(block), _) => Holds::Video(self.charged(block, &prepared)),
                (_, Some(registration)) => Self::registered(registration, &mut prepared),
                _ if prepared.nr() == escape::DUP_OBJECT => source,
                _ if holds_system(&prepared) => Holds::System,
                _ => holds_time(&prepared),
            };
            self.after(file, &named, call.argument, (&prepared, holds));
            self.arena_follows(call.argument, &prepared);
            self.show_budget(&mut prepared);
            self.hide_cards(&mut prepared, status_at);
        }
        self.slices_follow(&mut prepared, asked_slice, done);
        self.settle(makes);
        prepared.finish(result, &mut bench.reply);
        result.map(drop)
    }

    /// Answers a call for which the process has no room left.
    pub fn over_limit(
        &self,
        file: &GuestFile,
        body: &[u8],
        bench: &mut Bench,
    ) -> Result<(), Errno> {
        let call = Call::parse(body)?;
        let refused = Refused::new(&self.start.compiled, file.kind, &call, Verdict::Limit);
        self.refused(&refused);
        refused.finish(&self.start.compiled, file.kind, &call, &mut bench.reply)
    }

    /// Room for one more client or object.
    fn reserve(&self, resource: Resource) -> Result<(), Errno> {
        let client = resource == Resource::Clients;
        let needed = lock(&self.objects).expect(client);
        self.share.cover(resource, needed).inspect_err(|_| {
            lock(&self.objects).expected_no_more(client);
        })
    }

    /// What a call made is counted among what there is; what is left over goes back.
    fn settle(&self, made: Option<Resource>) {
        let (clients, objects) = {
            let mut objects = lock(&self.objects);
            if let Some(resource) = made {
                objects.expected_no_more(resource == Resource::Clients);
            }
            objects.count()
        };
        self.share.settle(Resource::Clients, clients as u64);
        self.share.settle(Resource::Objects, objects as u64);
        self.share.settle(Resource::Registered, self.registrations.bytes());
    }

    fn sharing(&self, argument: &[u8]) -> Sharing {
        let objects = lock(&self.objects);
        sharing::judge(argument, self.start.own_user, |client| objects.owner(client).is_some())
    }

    /// Waits until the card's scheduler may be stopped once more; `false` if that is too long.
    fn may_disable(&self) -> bool {
        let (guest, own) = &self.rates;
        let deadline = Instant::now() + DISABLE_PATIENCE;
        [(own, self.start.own_disables), (&**guest, self.start.disables)].into_iter().all(
            |(rates, rate)| loop {
                match rates.take(rate::What::Disables, rate, rate) {
                    Ok(()) => break true,
                    Err(_) if Instant::now() >= deadline => break false,
                    Err(wait) => std::thread::sleep(wait.min(DISABLE_PATIENCE)),
                }
            },
        )
    }

    fn refused(&self, refused: &Refused) {
        let times = lock(&self.refusals).count(refused.verdict, refused.what);
        // The broker hears of a name at once, and of its count ever more rarely.
        if !times.is_power_of_two() {
            return;
        }
        let (kind, number) = refused.what.to_parts();
        let words = [refused.verdict as u64, kind, number, times];
        let out = Outgoing { words, ..Outgoing::default() };
        if let Err(error) = self.upstream.tell(Kind::Refused, out) {
            tracing::debug!(%error, "a refusal did not reach the broker");
        }
    }

    /// What must be so before the driver is asked; why not and RM's status if it must not be.
    fn before(&self, file: &GuestFile, prepared: &mut Prepared<'_>) -> Option<(Verdict, u32)> {
        if !matches!(file.kind, FileKind::Ctl | FileKind::Gpu) {
            return None;
        }
        self.note_kept(prepared);
        let refused =
            self.names_foreign_client(prepared).or_else(|| self.names_foreign_card(prepared));
        let argument = prepared.argument();
        let (client, object) = (u32_at(argument, 0), u32_at(argument, 8));
        match prepared.nr() {
            _ if refused.is_some() => return refused,
            escape::CONTROL if self.exports_registered(prepared) => {
                return Some((Verdict::Overlay, status::NOT_SUPPORTED));
            }
            escape::FREE => self.evict_tree(client, object),
            escape::VID_HEAP_CONTROL if read_uint(argument, 8, 4) == Some(HEAP_FREE) => {
                self.evict_tree(client, u32_at(argument, 0x2c));
            }
            escape::UNMAP_MEMORY => {
                let linear = u64_at(argument, 0x10);
                self.mappings.evict(&self.all_files(), |_, armed| {
                    (armed.client, armed.memory, armed.linear) == (client, object, linear)
                });
            }
            escape::CONTROL
                if read_uint(argument, 8, 4) == Some(DISABLE_CHANNELS) && !self.may_disable() =>
            {
                return Some(FULL);
            }
            escape::MAP_MEMORY if self.placements_full() => return Some(FULL),
            escape::GET_EVENT_DATA => self.watcher().has_data(file),
            escape::ALLOC => {
                if let Some(file) = receives_data(prepared).and_then(|handle| self.file(handle)) {
                    self.watcher().has_data(&file);
                }
            }
            escape::DUP_OBJECT if self.duplicates_unseen(argument) => {
                return Some((Verdict::Limit, status::INSUFFICIENT_PERMISSIONS));
            }
            escape::SHARE => match self.sharing(argument) {
                Sharing::AsAsked => {}
                Sharing::WithUser => sharing::set_type(prepared.argument_mut(), true),
                Sharing::Refused => {
                    return Some((Verdict::Overlay, status::INSUFFICIENT_PERMISSIONS));
                }
            },
            escape::SYS_PARAMS => {
                if let Some(field) = prepared.argument_mut().first_chunk_mut() {
                    *field = memory_block_size().to_le_bytes();
                }
            }
            _ => {}
        }
        None
    }

    fn evict_tree(&self, client: u32, freed: u32) {
        let goes: Vec<Arc<GuestFile>> = {
            let objects = lock(&self.objects);
            self.all_files()
                .into_iter()
                .filter(|file| {
                    lock(&file.armed).as_ref().is_some_and(|armed| {
                        armed.client == client && objects.goes_with(client, armed.memory, freed)
                    })
                })
                .collect()
        };
        self.mappings.evict(&goes, |_, armed| armed.client == client);
    }

    /// What the driver did, noted. `asked` is the argument as it was asked with.
    fn after(
        &self,
        file: &Arc<GuestFile>,
        named: &Named<'_>,
        asked: &[u8],
        (prepared, holds): (&Prepared<'_>, Holds),
    ) {
        let done = prepared.argument();
        let (root, parent, object) = (u32_at(done, 0), u32_at(done, 4), u32_at(done, 8));
        let mut objects = lock(&self.objects);
        match prepared.nr() {
            escape::ALLOC if CLIENT_CLASSES.contains(&read_uint(asked, 0xc, 4).unwrap_or(9)) => {
                objects.client(object, file.handle);
            }
            escape::ALLOC | escape::ALLOC_OBJECT | escape::ALLOC_MEMORY => {
                objects.made(root, object, parent, holds);
            }
            escape::DUP_OBJECT => objects.made(root, object, parent, holds),
            escape::ALLOC_CONTEXT_DMA2 => objects.made(root, object, root, holds),
            escape::VID_HEAP_CONTROL => match read_uint(asked, 8, 4) {
                Some(HEAP_ALLOC | HEAP_ALLOC_RANGE) => {
                    objects.made(root, u32_at(done, 0x2c), parent, holds);
                }
                Some(HEAP_REGISTER) => objects.made(root, u32_at(done, 0x28), parent, holds),
                Some(HEAP_FREE) => drop(objects.freed(root, u32_at(asked, 0x2c))),
                _ => {}
            },
            escape::FREE => drop(objects.freed(root, u32_at(asked, 8))),
            escape::CONTROL => {
                drop(objects);
                self.passed_on(named, prepared);
            }
            escape::UPDATE_DEVICE_MAPPING_INFO => {
                drop(objects);
                self.renamed(root, object, u64_at(asked, 0x10), u64_at(asked, 0x18));
            }
            escape::MAP_MEMORY => {
                let owner = objects.owner(root).and_then(|owner| self.file(owner));
                drop(objects);
                let Some(target) = named.first() else { return };
                let owner = owner.unwrap_or_else(|| Arc::clone(file));
                *lock(&target.armed) = Some(armed(&target, owner, done));
            }
            _ => {}
        }
    }

    /// What the source of a duplicate holds.
    fn source(&self, prepared: &Prepared<'_>) -> Holds {
        let argument = prepared.argument();
        let is_rm = matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu);
        match prepared.nr() {
            escape::DUP_OBJECT if is_rm => {
                lock(&self.objects).holds(u32_at(argument, 0xc), u32_at(argument, 0x10))
            }
            _ => Holds::Nothing,
        }
    }

    /// The caller told RM where it put a mapping; RM knows it by that address now.
    pub(super) fn renamed(&self, client: u32, memory: u32, old: u64, new: u64) {
        for file in self.all_files() {
            let mut armed = lock(&file.armed);
            if let Some(armed) = armed.as_mut() {
                if (armed.client, armed.memory, armed.linear) == (client, memory, old) {
                    armed.linear = new;
                }
            }
        }
    }
}

/// What a call makes one more of.
fn makes(kind: FileKind, prepared: &Prepared<'_>) -> Option<Resource> {
    let argument = prepared.argument();
    match prepared.nr() {
        _ if !matches!(kind, FileKind::Ctl | FileKind::Gpu) => None,
        escape::ALLOC if CLIENT_CLASSES.contains(&read_uint(argument, 0xc, 4).unwrap_or(9)) => {
            Some(Resource::Clients)
        }
        escape::ALLOC | escape::ALLOC_OBJECT | escape::ALLOC_MEMORY | escape::DUP_OBJECT => {
            Some(Resource::Objects)
        }
        escape::ALLOC_CONTEXT_DMA2 => Some(Resource::Objects),
        escape::VID_HEAP_CONTROL
            if matches!(
                read_uint(argument, 8, 4),
                Some(HEAP_ALLOC | HEAP_ALLOC_RANGE | HEAP_REGISTER)
            ) =>
        {
            Some(Resource::Objects)
        }
        _ => None,
    }
}

/// What an ioctl is for.
pub fn class(kind: FileKind, nr: u32) -> Class {
    match nr {
        _ if !matches!(kind, FileKind::Ctl | FileKind::Gpu) => Class::Other,
        escape::CONTROL => Class::Control,
        escape::ALLOC | escape::ALLOC_OBJECT | escape::ALLOC_MEMORY => Class::Alloc,
        escape::ALLOC_CONTEXT_DMA2 | escape::DUP_OBJECT | escape::VID_HEAP_CONTROL => Class::Alloc,
        escape::FREE => Class::Free,
        escape::MAP_MEMORY => Class::Map,
        escape::UNMAP_MEMORY => Class::Unmap,
        _ => Class::Other,
    }
}

/// Where RM leaves its status in the argument of this call.
pub(super) fn status_offset(compiled: &Compiled, kind: FileKind, prepared: &Prepared<'_>) -> u16 {
    let size = u32::try_from(prepared.argument().len()).unwrap_or(u32::MAX);
    compiled.escape(kind, prepared.nr(), size).map_or(NO_OFFSET, |entry| entry.status.get())
}

/// What RM_MAP_MEMORY armed, from the argument as RM left it.
pub(super) fn armed(target: &GuestFile, owner: Arc<GuestFile>, done: &[u8]) -> Armed {
    let flags = u32_at(done, 0x2c);
    let (offset, length) = (u64_at(done, 0x10), u64_at(done, 0x18));
    Armed {
        client: u32_at(done, 0),
        memory: u32_at(done, 8),
        linear: u64_at(done, 0x20),
        length: (offset % PAGE).saturating_add(length).div_ceil(PAGE).saturating_mul(PAGE),
        cache: cache(target.kind, flags),
        // NVOS33_FLAGS_ACCESS: 1 is read-only.
        read_only: flags & 3 == 1,
        owner,
        extent: None,
        placement: None,
    }
}

/// `NVOS33_FLAGS_CACHING_TYPE` as RM answers it, bits 25:23 (`nvos.h`).
fn cache(kind: FileKind, flags: u32) -> Cache {
    match (flags >> 23 & 7, kind) {
        // The driver maps system memory as it was allocated, whatever is asked of the map.
        (_, FileKind::Ctl) | (0 | 5, _) => Cache::WriteBack,
        (2, _) => Cache::WriteCombine,
        // Uncached, weakly ordered, and a device's default: registers.
        _ => Cache::Uncached,
    }
}

/// The host's memory block size. The first to set it in the driver wins for all, so a
/// guest sends the host's own (`NV_ESC_SYS_PARAMS`), which a native program would too.
fn memory_block_size() -> u64 {
    std::fs::read_to_string("/sys/devices/system/memory/block_size_bytes")
        .ok()
        .and_then(|text| u64::from_str_radix(text.trim(), 16).ok())
        .unwrap_or(128 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn system_memory_is_mapped_write_back_and_registers_uncached() {
        for caching in 0..8 {
            assert_eq!(cache(FileKind::Ctl, caching << 23), Cache::WriteBack, "{caching}");
        }
        for (caching, expected) in [
            (1, Cache::Uncached),
            (2, Cache::WriteCombine),
            (3, Cache::Uncached),
            (6, Cache::Uncached),
        ] {
            assert_eq!(cache(FileKind::Gpu, caching << 23), expected, "{caching}");
        }
    }
}
