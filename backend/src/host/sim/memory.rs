//! Memory objects: a range of a card, a memory file of the machine, or the doorbell page.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use super::cards::{Cards, Range, Wanted};
use crate::marshal::scratch::Registered;
use crate::transport::shared::sealed_file;

/// What the machine's memory is allocated in.
pub const PAGE: u64 = 4096;
/// Bytes of the page that work is submitted with (`NVC361`).
pub const DOORBELL: u64 = 64 << 10;

/// Memory behind one object and its duplicates. Dropped with the last of them.
#[derive(Debug)]
pub struct Memory {
    /// Bytes, whole granules or pages.
    pub size: u64,
    store: Store,
}

#[derive(Debug)]
enum Store {
    Video {
        cards: Arc<Cards>,
        card: u32,
        range: Range,
        owner: AtomicU64,
        abandoned: AtomicBool,
    },
    /// Made when it is first mapped, read or written: many objects never are.
    System(OnceLock<Arc<File>>),
    Doorbell {
        card: u32,
        file: Arc<File>,
    },
    /// The program's own, which RM pinned.
    Registered(Registered),
}

/// Where a VMM finds memory.
#[derive(Clone, Debug)]
pub enum Source {
    /// At this offset of the cards' file.
    Card(u64),
    /// At the start of this memory file.
    Own(Arc<File>),
}

impl Memory {
    /// Allocates video memory for the open file `owner`; `None` if there is not enough.
    pub fn video(cards: &Arc<Cards>, owner: u64, wanted: &Wanted) -> io::Result<Option<Self>> {
        let range = cards.allocate(owner, wanted)?;
        Ok(range.map(|range| Self {
            size: range.length,
            store: Store::Video {
                cards: Arc::clone(cards),
                card: wanted.card,
                range,
                owner: owner.into(),
                abandoned: false.into(),
            },
        }))
    }

    /// Allocates the machine's memory.
    pub fn system(size: u64) -> Option<Self> {
        let size = size.max(1).checked_next_multiple_of(PAGE)?;
        Some(Self { size, store: Store::System(OnceLock::new()) })
    }

    /// A card's doorbell page, behind `file`.
    pub fn doorbell(card: u32, file: Arc<File>) -> Self {
        Self { size: DOORBELL, store: Store::Doorbell { card, file } }
    }

    /// Memory that the program registered.
    pub fn registered(memory: Registered) -> Self {
        Self { size: memory.length(), store: Store::Registered(memory) }
    }

    /// The card whose node maps it; none: the control node does.
    pub fn card(&self) -> Option<u32> {
        match self.store {
            Store::Video { card, .. } | Store::Doorbell { card, .. } => Some(card),
            Store::System(_) | Store::Registered(_) => None,
        }
    }

    /// Whether the program registered it: RM maps no such memory.
    pub fn is_registered(&self) -> bool {
        matches!(self.store, Store::Registered(_))
    }

    /// Whether it is video memory.
    pub fn is_video(&self) -> bool {
        matches!(self.store, Store::Video { .. })
    }

    /// Where it is.
    pub fn source(&self) -> io::Result<Source> {
        Ok(match &self.store {
            Store::Video { range, .. } => Source::Card(range.offset),
            Store::Doorbell { file, .. } => Source::Own(Arc::clone(file)),
            Store::System(_) => Source::Own(self.system_file()?),
            Store::Registered(_) => return Err(io::ErrorKind::Unsupported.into()),
        })
    }

    /// Offset in video memory, as the card counts.
    pub fn card_offset(&self) -> u64 {
        match &self.store {
            Store::Video { cards, card, range, .. } => range.offset - cards.base(*card),
            _ => 0,
        }
    }

    /// The number of the open file that it belongs to.
    pub fn owner(&self) -> Option<u64> {
        match &self.store {
            Store::Video { owner, .. } => Some(owner.load(Ordering::Relaxed)),
            _ => None,
        }
    }

    /// Leaves it to the lock of its owner's file: other processes may hold duplicates of that.
    pub fn abandon(&self) {
        if let Store::Video { abandoned, .. } = &self.store {
            abandoned.store(true, Ordering::Relaxed);
        }
    }

    /// Makes it belong to another open file.
    pub fn give(&self, heir: u64) -> io::Result<()> {
        match &self.store {
            Store::Video { cards, range, owner, .. } => {
                cards.give(owner.swap(heir, Ordering::Relaxed), *range, heir)
            }
            _ => Ok(()),
        }
    }

    /// Reads the word at `offset`, as the card does.
    pub fn read_u32(&self, offset: u64) -> io::Result<u32> {
        let mut bytes = [0; 4];
        match &self.store {
            Store::Video { cards, range, .. } => {
                cards.read_at(range.offset + offset, &mut bytes)?
            }
            Store::Doorbell { file, .. } => file.read_exact_at(&mut bytes, offset)?,
            Store::System(_) => self.system_file()?.read_exact_at(&mut bytes, offset)?,
            Store::Registered(Registered::Arena(piece)) => {
                piece.file().read_exact_at(&mut bytes, piece.offset + offset)?;
            }
            Store::Registered(Registered::Guest(pages)) => {
                return pages.read_u32(offset).ok_or_else(outside);
            }
        }
        Ok(u32::from_le_bytes(bytes))
    }

    /// Writes the word at `offset`, as the card does.
    pub fn write_u32(&self, offset: u64, value: u32) -> io::Result<()> {
        let bytes = value.to_le_bytes();
        match &self.store {
            Store::Video { cards, range, .. } => cards.write_at(range.offset + offset, &bytes),
            Store::Doorbell { file, .. } => file.write_all_at(&bytes, offset),
            Store::System(_) => self.system_file()?.write_all_at(&bytes, offset),
            Store::Registered(Registered::Arena(piece)) => {
                piece.file().write_all_at(&bytes, piece.offset + offset)
            }
            Store::Registered(Registered::Guest(pages)) => {
                pages.write_u32(offset, value).ok_or_else(outside)
            }
        }
    }

    fn system_file(&self) -> io::Result<Arc<File>> {
        let Store::System(cell) = &self.store else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        if let Some(file) = cell.get() {
            return Ok(Arc::clone(file));
        }
        let file = Arc::new(sealed_file("nvguest-system-memory", self.size)?);
        Ok(Arc::clone(cell.get_or_init(|| file)))
    }
}

fn outside() -> io::Error {
    io::ErrorKind::UnexpectedEof.into()
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Store::Video { cards, range, owner, abandoned, .. } = &mut self.store {
            if !*abandoned.get_mut() {
                if let Err(error) = cards.free(*owner.get_mut(), *range) {
                    tracing::error!(%error, "simulated card: video memory could not be freed");
                }
            }
        }
    }
}
