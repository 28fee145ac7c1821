//! Video memory: what a call allocates, and what the guest's budget has to do with it.
//!
//! An object keeps its [`Block`], duplicates and exported files keep the same one, and the
//! last that lets go of it gives the bytes back. What RM takes by itself for contexts, page
//! tables and channels is not seen here.

use std::sync::Arc;

use nvguest_abi::compiled::Verdict;
use nvguest_abi::{status, Capability, FileKind};

use super::calls::{escape, u32_at, u64_at, HEAP_ALLOC, HEAP_ALLOC_RANGE};
use super::session::Session;
use super::upstream::Upstream;
use crate::budgets::NO_BUDGET;
use crate::errno::Errno;
use crate::marshal::Prepared;
use crate::sync::lock;
use crate::transport::link::{Kind, Outgoing};

/// `NV01_MEMORY_LOCAL_USER` (`cl0040.h`).
const MEMORY_LOCAL: u32 = 0x40;
/// `NVOS32_ALLOC_FLAGS_VIRTUAL`
const VIRTUAL: u32 = 0x8_0000;
/// `NVOS32_ATTR_LOCATION`, bits 26:25: video memory is 0, any memory is 3.
const LOCATION: u32 = 3 << 25;
const ANYWHERE: u32 = 3 << 25;
const PAGE_SIZE_AT: u32 = 23;

/// Bytes of the card that objects have. When the last owner lets go of it, RM has.
pub struct Block {
    upstream: Arc<Upstream>,
    bytes: u64,
}

impl Block {
    /// Takes so much of the guest's budget.
    pub fn charge(upstream: &Arc<Upstream>, bytes: u64) -> Result<Self, Errno> {
        usage(upstream, bytes)?;
        Ok(Self { upstream: Arc::clone(upstream), bytes })
    }

    /// Counts memory that is there already.
    pub fn had(upstream: &Arc<Upstream>, bytes: u64) -> Self {
        let mut block = Self { upstream: Arc::clone(upstream), bytes: 0 };
        block.settle(bytes);
        block
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// RM gave so much, and not what was asked.
    pub fn settle(&mut self, bytes: u64) {
        if bytes > self.bytes {
            self.tell(Kind::Charge, [bytes - self.bytes, 1, 0, 0]);
        } else {
            self.give(self.bytes - bytes);
        }
        self.bytes = bytes;
    }

    fn give(&self, bytes: u64) {
        if bytes > 0 {
            self.tell(Kind::Credit, [bytes, 0, 0, 0]);
        }
    }

    fn tell(&self, kind: Kind, words: [u64; 4]) {
        if let Err(error) = self.upstream.tell(kind, Outgoing { words, ..Outgoing::default() }) {
            // The broker is gone, and its account with it.
            tracing::debug!(%error, "video memory was not accounted for");
        }
    }
}

impl std::fmt::Debug for Block {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.bytes)
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        self.give(self.bytes);
    }
}

/// The guest's account, as the broker has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// Bytes that all of the guest has.
    pub used: u64,
    /// Bytes that it may have.
    pub budget: u64,
    /// The part of them for small allocations.
    pub reserve: u64,
}

/// Asks the broker for so much, or with 0 just what there is.
pub fn usage(upstream: &Upstream, bytes: u64) -> Result<Usage, Errno> {
    let words = [bytes, 0, 0, 0];
    let answer = upstream.ask(Kind::Charge, Outgoing { words, ..Outgoing::default() })?;
    let [_, used, budget, reserve] = answer.words;
    Ok(Usage { used, budget, reserve })
}

/// Where a call has what concerns its memory; RM leaves there what it gave.
struct Fields {
    flags: u16,
    attr: u16,
    size: u16,
}

/// `data.AllocSize` and `data.AllocSizeRange` of `NVOS32_PARAMETERS`.
const SIZE: Fields = Fields { flags: 0x34, attr: 0x38, size: 0x58 };
const SIZE_RANGE: Fields = Fields { flags: 0x34, attr: 0x38, size: 0x50 };
/// `NV_MEMORY_ALLOCATION_PARAMS`
const CLASS: Fields = Fields { flags: 8, attr: 0x18, size: 0x40 };
/// `limit` of `NVOS02_PARAMETERS`.
const LIMIT: u16 = 0x20;

/// Memory that a call asks for, or got.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Memory {
    attr: u32,
    size: u64,
}

impl Memory {
    /// What is in the call now, if it allocates memory of the card.
    fn of(prepared: &Prepared<'_>) -> Option<Self> {
        if !matches!(prepared.kind(), FileKind::Ctl | FileKind::Gpu) {
            return None;
        }
        let argument = prepared.argument();
        let is_local = u32_at(argument, 0xc) == MEMORY_LOCAL;
        match prepared.nr() {
            escape::VID_HEAP_CONTROL => match u64::from(u32_at(argument, 8)) {
                HEAP_ALLOC => Self::at(argument, &SIZE),
                HEAP_ALLOC_RANGE => Self::at(argument, &SIZE_RANGE),
                _ => None,
            },
            escape::ALLOC if is_local => {
                // The class is video memory wherever its attributes say it is.
                let memory = Self::at(prepared.params()?, &CLASS);
                memory.map(|memory| Self { attr: memory.attr & !LOCATION, ..memory })
            }
            escape::ALLOC_MEMORY if is_local => {
                Some(Self { attr: 0, size: u64_at(argument, LIMIT).saturating_add(1) })
            }
            _ => None,
        }
    }

    fn at(block: &[u8], fields: &Fields) -> Option<Self> {
        let memory = Self { attr: u32_at(block, fields.attr), size: u64_at(block, fields.size) };
        (u32_at(block, fields.flags) & VIRTUAL == 0).then_some(memory)
    }

    fn is_video(self) -> bool {
        matches!(self.attr & LOCATION, 0 | ANYWHERE)
    }

    /// Bytes that RM takes for it at most: whole pages, whose size it may choose.
    fn whole(self) -> u64 {
        let page: u64 = match self.attr >> PAGE_SIZE_AT & 3 {
            1 => 4 << 10,
            2 => 64 << 10,
            0 if self.size < 2 << 20 => 64 << 10,
            _ => 2 << 20,
        };
        self.size.max(1).checked_next_multiple_of(page).unwrap_or(u64::MAX)
    }
}

impl Session {
    /// Room in the guest's budget for the video memory that the call will allocate; RM's status
    /// where there is none.
    pub(super) fn charge(&self, prepared: &Prepared<'_>) -> Result<Option<Block>, (Verdict, u32)> {
        let memory = Memory::of(prepared).filter(|memory| memory.is_video());
        let block = memory.map(|memory| Block::charge(&self.upstream, memory.whole()));
        block.transpose().map_err(|_| (Verdict::Limit, status::NO_MEMORY))
    }

    /// Whether a duplicate would keep memory that another process is charged for, or has
    /// registered. How much that is nobody knows here, and the other may be the first to go: then
    /// it would be nobody's.
    pub(super) fn duplicates_unseen(&self, argument: &[u8]) -> bool {
        let source = lock(&self.objects).owner(u32_at(argument, 0xc));
        let may_be_registered = self.start.compiled.capabilities & Capability::Compute as u32 != 0;
        source.is_none()
            && (may_be_registered
                || usage(&self.upstream, 0).is_ok_and(|it| it.budget != NO_BUDGET))
    }

    /// What RM gave of it.
    pub(super) fn charged(&self, mut block: Block, prepared: &Prepared<'_>) -> Arc<Block> {
        match Memory::of(prepared) {
            Some(memory) if !memory.is_video() => block.settle(0),
            // NVOS02 has no answer to that.
            Some(memory) if prepared.nr() != escape::ALLOC_MEMORY => block.settle(memory.size),
            _ => {}
        }
        Arc::new(block)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;
    use crate::transport::link::{Receiver, Sender};

    fn memory(attr: u32, size: u64) -> Memory {
        Memory { attr, size }
    }

    #[test]
    fn memory_is_the_cards_unless_it_is_said_to_be_the_machines() {
        assert!(memory(0, 1).is_video());
        assert!(memory(ANYWHERE, 1).is_video());
        assert!(!memory(1 << 25, 1).is_video());
    }

    #[test]
    fn room_is_made_for_whole_pages_of_the_size_that_rm_may_choose() {
        for (attr, size, whole) in [
            (1 << PAGE_SIZE_AT, 1, 4096),
            (2 << PAGE_SIZE_AT, 1, 65536),
            (3 << PAGE_SIZE_AT, 1, 2 << 20),
            (0, 0, 65536),
            (0, 65537, 2 * 65536),
            (0, (2 << 20) + 1, 4 << 20),
            (0, u64::MAX, u64::MAX),
        ] {
            assert_eq!(memory(attr, size).whole(), whole, "{attr:#x} {size}");
        }
    }

    #[test]
    fn the_last_owner_of_a_block_gives_it_back() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let sender = Sender::new(ours, Duration::from_secs(1)).unwrap();
        let mut broker = Receiver::new(theirs);
        broker.set_patience(Some(Duration::from_millis(50))).unwrap();
        let block = Arc::new(Block::had(&Arc::new(Upstream::new(sender)), 4096));
        let duplicate = Arc::clone(&block);
        let heard = broker.receive().unwrap().unwrap();
        assert_eq!((heard.kind, heard.words), (Kind::Charge, [4096, 1, 0, 0]));
        drop(block);
        assert!(broker.receive().is_err(), "a duplicate keeps it");
        drop(duplicate);
        let heard = broker.receive().unwrap().unwrap();
        assert_eq!((heard.kind, heard.words[0]), (Kind::Credit, 4096));
    }
}
