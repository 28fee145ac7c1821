//! Objects that go to a file, and come back from it: their memory lives as long as the file.

use std::sync::Arc;

use super::arena::Extent;
use super::calls::{escape, u32_at};
use super::objects::Holds;
use super::registered::Registration;
use super::session::{Named, Session};
use super::video::Block;
use crate::marshal::Prepared;
use crate::sync::lock;

/// `NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD`: type 0, object 0xc. `_IMPORT_OBJECT_FROM_FD`:
/// type 4, object 0x10. An object of RM is type 1.
const EXPORT_OBJECT: u32 = 0x3d05;
const IMPORT_OBJECT: u32 = 0x3d06;
const OBJECT_TYPE_RM: u32 = 1;

/// Memory that is kept by a file.
#[derive(Clone)]
pub enum Kept {
    /// A range of the arena.
    Range(Arc<Extent>),
    /// Memory of the card.
    Video(Arc<Block>),
    /// Memory of the guest's.
    Guest(Arc<Registration>),
}

impl Kept {
    /// What an object holds, if it is anybody's memory.
    pub fn of(holds: Holds) -> Option<Self> {
        match holds {
            Holds::Video(block) => Some(Self::Video(block)),
            Holds::Guest(registration) => Some(Self::Guest(registration)),
            Holds::Nothing | Holds::System | Holds::Time(_) => None,
        }
    }

    /// What another worker that fetches the file is told of it: a range of the arena plus one
    /// or 0, and bytes of the card's memory.
    pub fn to_words(&self) -> [u64; 2] {
        match self {
            Self::Range(extent) => [extent.offset() + 1, 0],
            Self::Video(block) => [0, block.bytes()],
            // It goes to no other worker.
            Self::Guest(_) => [0; 2],
        }
    }
}

/// The object that a control is to export to a file: its client and itself.
pub fn exported(prepared: &Prepared<'_>) -> Option<(u32, u32)> {
    let (argument, params) = (prepared.argument(), prepared.params()?);
    let exports = prepared.nr() == escape::CONTROL && u32_at(argument, 8) == EXPORT_OBJECT;
    (exports && u32_at(params, 0) == OBJECT_TYPE_RM)
        .then_some((u32_at(argument, 0), u32_at(params, 0xc)))
}

impl Session {
    /// What a control did with an object and a file.
    pub(super) fn passed_on(&self, named: &Named<'_>, prepared: &Prepared<'_>) {
        let (client, command) = (u32_at(prepared.argument(), 0), u32_at(prepared.argument(), 8));
        let at = match command {
            EXPORT_OBJECT => 0,
            IMPORT_OBJECT => 4,
            _ => return,
        };
        let Some(params) = prepared.params() else { return };
        if u32_at(params, at) != OBJECT_TYPE_RM {
            return;
        }
        let (parent, object) = (u32_at(params, at + 8), u32_at(params, at + 0xc));
        match command {
            EXPORT_OBJECT => self.exported(named, client, object),
            _ => self.imported(named, (client, object), parent),
        }
    }

    fn exported(&self, named: &Named<'_>, client: u32, object: u32) {
        let Some(file) = named.first() else { return };
        let kept = match lock(&self.objects).holds(client, object) {
            Holds::Video(block) => Some(Kept::Video(block)),
            _ => self.arena.as_ref().and_then(|a| a.extent(client, object)).map(Kept::Range),
        };
        lock(&file.keeps).extend(kept);
    }

    fn imported(&self, named: &Named<'_>, (client, object): (u32, u32), parent: u32) {
        let kept = named.exported();
        let holds = match &kept {
            Some(Kept::Video(block)) => Holds::Video(Arc::clone(block)),
            // Of the arena, or RM's own: the card's would be known.
            _ => Holds::System,
        };
        lock(&self.objects).made(client, object, parent, holds);
        let Some(arena) = &self.arena else { return };
        match kept {
            Some(Kept::Range(extent)) => arena.own(client, object, extent),
            _ => arena.forget(client, object),
        }
    }
}
