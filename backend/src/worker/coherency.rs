//! System memory is write-back, and the card snoops the processor's caches.
//!
//! On Intel, KVM maps a guest's memory write-back whatever the guest's page tables say. Memory
//! that RM takes for uncached or write-combined would then have its newest bytes in a cache
//! which the card does not look into. So RM is asked for write-back memory and for snooping
//! maps of it, and the program is answered what it asked for. (Memory of the arena is
//! registered so by [`super::arena`]; its maps come by here too.)
//!
//! Coherencies that were not seen (`docs/arena.md`) are left as they are, and so is memory that
//! the display reads.

use nvguest_abi::FileKind;

use super::calls::{escape, u32_at, HEAP_ALLOC, HEAP_ALLOC_RANGE};
use super::objects::{Holds, Objects};
use super::session::Session;
use crate::marshal::register::HEAP_SIZE;
use crate::marshal::Prepared;
use crate::sync::lock;

/// `NV01_MEMORY_SYSTEM` (`cl003e.h`)
const MEMORY_SYSTEM: u32 = 0x3e;
/// `NVOS32_ATTR_LOCATION` and its `_PCI`, `NVOS32_ALLOC_FLAGS_VIRTUAL`.
const LOCATION: u32 = 3 << 25;
const PCI: u32 = 1 << 25;
const VIRTUAL: u32 = 0x8_0000;
/// `NVOS32_ATTR2_NISO_DISPLAY` and `_ISO`.
const DISPLAY: u32 = 1 << 16 | 1 << 18;
/// `NVOS32_ATTR_COHERENCY`; `NVOS02_FLAGS_COHERENCY` and `_LOCATION`, of which `_PCI` is 0.
const COHERENCY: u32 = 7 << 29;
const OS02_COHERENCY: u32 = 0xf << 12;
const OS02_LOCATION: u32 = 0xf << 8;
/// `_COHERENCY_UNCACHED`, `_WRITE_COMBINE` and `_WRITE_BACK` of both.
const UNCACHED: u32 = 0;
const WRITE_COMBINE: u32 = 2;
const WRITE_BACK: u32 = 5;
/// `NVOS46_FLAGS_CACHE_SNOOP`: 1 is `_ENABLE`.
const MAP_SNOOP: u32 = 1 << 4;
/// `NVOS03_FLAGS_CACHE_SNOOP`: 1 is `_DISABLE`.
const CONTEXT_NO_SNOOP: u32 = 1 << 28;

/// Where a field is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Block {
    Argument,
    Params,
}

/// Bits of a word that were put in place of the program's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    block: Block,
    at: u16,
    mask: u32,
    own: u32,
}

/// A word of a call, and which of its bits are to be what.
struct Wanted {
    block: Block,
    at: u16,
    mask: u32,
    value: u32,
}

impl Wanted {
    /// Write-back, in a word whose bits under `mask` are one of RM's coherencies.
    fn write_back(block: Block, at: u16, word: u32, mask: u32) -> Option<Self> {
        let own = (word & mask) >> mask.trailing_zeros();
        let value = WRITE_BACK << mask.trailing_zeros();
        matches!(own, UNCACHED | WRITE_COMBINE).then_some(Self { block, at, mask, value })
    }
}

/// The attributes of an allocation of system memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    block: Block,
    at: u16,
    word: u32,
    mask: u32,
    display: bool,
}

/// What an allocation of system memory asks for; `None` for any other call.
fn system_memory(nr: u32, argument: &[u8], params: Option<&[u8]>) -> Option<Memory> {
    let attributes = |block: Block, bytes: &[u8], flags: u16, attr: u16, attr2: u16| {
        let word = u32_at(bytes, attr);
        let is_system = word & LOCATION == PCI && u32_at(bytes, flags) & VIRTUAL == 0;
        let display = u32_at(bytes, attr2) & DISPLAY != 0;
        is_system.then_some(Memory { block, at: attr, word, mask: COHERENCY, display })
    };
    match nr {
        escape::VID_HEAP_CONTROL if argument.len() == HEAP_SIZE => {
            // `data.AllocSizeRange` has its `attr2` elsewhere.
            let attr2 = match u64::from(u32_at(argument, 8)) {
                HEAP_ALLOC => 0x90,
                HEAP_ALLOC_RANGE => 0x88,
                _ => return None,
            };
            attributes(Block::Argument, argument, 0x34, 0x38, attr2)
        }
        escape::ALLOC if u32_at(argument, 0xc) == MEMORY_SYSTEM => {
            attributes(Block::Params, params?, 8, 0x18, 0x1c)
        }
        escape::ALLOC_MEMORY if u32_at(argument, 0xc) == MEMORY_SYSTEM => {
            let word = u32_at(argument, 0x10);
            let (block, mask) = (Block::Argument, OS02_COHERENCY);
            let memory = Memory { block, at: 0x10, word, mask, display: false };
            (word & OS02_LOCATION == 0).then_some(memory)
        }
        _ => None,
    }
}

/// What a call is to say in place of what it says.
fn wanted(
    nr: u32,
    argument: &[u8],
    params: Option<&[u8]>,
    is_system: impl Fn(u32, u32) -> bool,
) -> Option<Wanted> {
    let block = Block::Argument;
    match nr {
        escape::MAP_MEMORY_DMA => is_system(u32_at(argument, 0), u32_at(argument, 0xc))
            .then_some(Wanted { block, at: 0x20, mask: MAP_SNOOP, value: MAP_SNOOP }),
        escape::ALLOC_CONTEXT_DMA2 => is_system(u32_at(argument, 0), u32_at(argument, 0x18))
            .then_some(Wanted { block, at: 0x10, mask: CONTEXT_NO_SNOOP, value: 0 }),
        _ => {
            let Memory { block, at, word, mask, display } = system_memory(nr, argument, params)?;
            (!display).then(|| Wanted::write_back(block, at, word, mask)).flatten()
        }
    }
}

fn put(bytes: &mut [u8], at: u16, mask: u32, value: u32) {
    if let Some(field) = bytes.get_mut(usize::from(at)..).and_then(<[u8]>::first_chunk_mut) {
        *field = (u32::from_le_bytes(*field) & !mask | value).to_le_bytes();
    }
}

/// What the call's new object is, if it is system memory that a guest may map.
pub(super) fn holds_system(prepared: &Prepared<'_>) -> bool {
    let is_rm = matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu);
    let memory = || system_memory(prepared.nr(), prepared.argument(), prepared.params());
    is_rm && memory().is_some_and(|memory| !memory.display)
}

fn is_system(objects: &Objects, client: u32, object: u32) -> bool {
    matches!(objects.holds(client, object), Holds::System | Holds::Guest(_))
}

impl Session {
    /// Makes system memory write-back and its maps for the card snooping. What the program
    /// asked for is returned.
    pub(super) fn put_coherent(&self, prepared: &mut Prepared<'_>) -> Option<Asked> {
        if !matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu) {
            return None;
        }
        let is_system = |client, object| is_system(&lock(&self.objects), client, object);
        let (argument, params) = (prepared.argument(), prepared.params());
        let Wanted { block, at, mask, value } = wanted(prepared.nr(), argument, params, is_system)?;
        let bytes = match block {
            Block::Argument => prepared.argument_mut(),
            Block::Params => prepared.params_mut()?,
        };
        let own = u32_at(bytes, at) & mask;
        put(bytes, at, mask, value);
        Some(Asked { block, at, mask, own })
    }
}

/// Answers what the program asked for.
pub(super) fn put_back(prepared: &mut Prepared<'_>, asked: Option<Asked>) {
    let Some(Asked { block, at, mask, own }) = asked else { return };
    match block {
        Block::Argument => put(prepared.argument_mut(), at, mask, own),
        Block::Params => {
            if let Some(params) = prepared.params_mut() {
                put(params, at, mask, own);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOBODY: fn(u32, u32) -> bool = |_, _| false;

    fn words<const N: usize>(words: &[(usize, u32)]) -> [u8; N] {
        let mut bytes = [0; N];
        for &(at, word) in words {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// The word as RM is told it; `None` if it is told the program's own.
    fn told(nr: u32, argument: &[u8], params: Option<&[u8]>) -> Option<u32> {
        let Wanted { block, at, mask, value } = wanted(nr, argument, params, NOBODY)?;
        let bytes = if block == Block::Params { params? } else { argument };
        Some(u32_at(bytes, at) & !mask | value)
    }

    fn heap(function: u32, flags: u32, attr: u32, attr2: u32) -> [u8; HEAP_SIZE] {
        let at = if u64::from(function) == HEAP_ALLOC { 0x90 } else { 0x88 };
        words(&[(8, function), (0x34, flags), (0x38, attr), (at, attr2)])
    }

    #[test]
    fn system_memory_that_is_uncached_or_write_combined_becomes_write_back() {
        let nr = escape::VID_HEAP_CONTROL;
        for function in [2, 14] {
            for own in [0, 2] {
                let argument = heap(function, 0x4000, PCI | own << 29 | 0x123, 0);
                assert_eq!(told(nr, &argument, None), Some(PCI | 5 << 29 | 0x123), "{own}");
            }
        }
        let params: [u8; 0x60] = words(&[(0x18, PCI | 2 << 29)]);
        let argument: [u8; 48] = words(&[(0xc, MEMORY_SYSTEM)]);
        assert_eq!(told(escape::ALLOC, &argument, Some(&params)), Some(PCI | 5 << 29));
        let argument: [u8; 56] = words(&[(0xc, MEMORY_SYSTEM), (0x10, 0x4000_2010)]);
        assert_eq!(told(escape::ALLOC_MEMORY, &argument, None), Some(0x4000_5010));
    }

    #[test]
    fn memory_that_is_coherent_already_or_not_the_systems_is_left_alone() {
        let nr = escape::VID_HEAP_CONTROL;
        for (function, flags, attr, attr2) in [
            (2, 0, PCI | 1 << 29, 0),
            (2, 0, PCI | 5 << 29, 0),
            (2, 0, PCI | 3 << 29, 0),
            (2, 0, 0, 0),
            (2, 0, 3 << 25, 0),
            (2, VIRTUAL, PCI, 0),
            (2, 0, PCI, 1 << 16),
            (2, 0, PCI, 1 << 18),
            (14, 0, PCI, 1 << 18),
            (3, 0, PCI, 0),
        ] {
            let argument = heap(function, flags, attr, attr2);
            assert_eq!(told(nr, &argument, None), None, "{function} {flags:#x} {attr:#x}");
        }
        assert_eq!(told(nr, &heap(2, 0, PCI, 0)[..100], None), None, "another layout");
        let argument: [u8; 48] = words(&[(0xc, 0x40)]);
        let params: [u8; 0x60] = words(&[(0x18, PCI)]);
        assert_eq!(told(escape::ALLOC, &argument, Some(&params)), None, "the card's memory");
        let argument: [u8; 56] = words(&[(0xc, MEMORY_SYSTEM), (0x10, 2 << 8)]);
        assert_eq!(told(escape::ALLOC_MEMORY, &argument, None), None, "located elsewhere");
    }

    #[test]
    fn the_card_snoops_system_memory_and_nothing_else() {
        let is_system = |client, object| (client, object) == (1, 7);
        for (object, found) in [(7, true), (8, false)] {
            let map: [u8; 56] = words(&[(0, 1), (0xc, object), (0x20, 0x120)]);
            let map = wanted(escape::MAP_MEMORY_DMA, &map, None, is_system);
            let map = map.map(|it| (it.at, 0x120 & !it.mask | it.value));
            assert_eq!(map, found.then_some((0x20, 0x130)));
            let context: [u8; 56] = words(&[(0, 1), (0x10, 0x3000_0000), (0x18, object)]);
            let context = wanted(escape::ALLOC_CONTEXT_DMA2, &context, None, is_system);
            let context = context.map(|it| (it.at, 0x3000_0000 & !it.mask | it.value));
            assert_eq!(context, found.then_some((0x10, 0x2000_0000)));
        }
    }

    #[test]
    fn the_program_is_answered_its_own_bits_and_what_else_rm_says() {
        let mut answered: [u8; 8] = words(&[(4, 5 << 29 | 0x80_0000 | PCI)]);
        put(&mut answered, 4, COHERENCY, 2 << 29);
        assert_eq!(u32_at(&answered, 4), 2 << 29 | 0x80_0000 | PCI);
        put(&mut answered, 6, COHERENCY, 0);
        assert_eq!(u32_at(&answered, 4), 2 << 29 | 0x80_0000 | PCI, "past the end");
    }
}
