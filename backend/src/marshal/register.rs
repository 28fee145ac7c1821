//! The one call that is not the guest's: memory of the arena, registered with RM.
//!
//! It stands in for an allocation of system memory, of which RM keeps what it would of its
//! own: client, parent, handle, kind. The pointer in it is a [`Piece`]'s, written by the
//! frame; nothing of the guest's can become one. Offsets are those of `NVOS32_PARAMETERS`
//! (`nvos.h`) with `data.AllocOsDesc`.

use super::scratch::Scratch;
use crate::host::{Host, HostFile};
use crate::transport::shared::Piece;

/// `_IOWR('F', NV_ESC_RM_VID_HEAP_CONTROL, NVOS32_PARAMETERS)`
const HEAP_CONTROL: u32 = 0xc000_4600 | (HEAP_SIZE as u32) << 16 | 0x4a;
/// Bytes of `NVOS32_PARAMETERS`.
pub const HEAP_SIZE: usize = 184;
/// `NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR`; `NVOS32_DESCRIPTOR_TYPE_VIRTUAL_ADDRESS` is 0.
const ALLOC_OS_DESCRIPTOR: u32 = 27;
const STATUS: usize = 0x14;
const MEMORY: usize = 0x28;
const DESCRIPTOR: usize = 0x40;
const LIMIT: usize = 0x48;

/// What the object is to be: words as the allocation that it stands in for has them.
#[derive(Clone, Copy, Debug)]
pub struct Registration {
    /// The client.
    pub client: u32,
    /// The device.
    pub parent: u32,
    /// The object's handle, if `flags` say that it is given.
    pub handle: u32,
    /// `NVOS32_TYPE_*`.
    pub kind: u32,
    /// `NVOS32_ALLOC_FLAGS_*`.
    pub flags: u32,
    /// `NVOS32_ATTR_*`.
    pub attr: u32,
    /// `NVOS32_ATTR2_*`.
    pub attr2: u32,
}

impl Registration {
    /// Asks RM. The object's handle; RM's status, or `None` for it if there was no answer,
    /// where it is not made.
    pub fn make(
        &self,
        host: &dyn Host,
        file: &HostFile,
        scratch: &mut Scratch,
        piece: &Piece,
    ) -> Result<u32, Option<u32>> {
        let mut bytes = [0; HEAP_SIZE];
        let words = [
            (0, self.client),
            (4, self.parent),
            (8, ALLOC_OS_DESCRIPTOR),
            (MEMORY, self.handle),
            (0x2c, self.kind),
            (0x30, self.flags),
            (0x34, self.attr),
            (0x38, self.attr2),
        ];
        for (at, word) in words {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
        bytes[LIMIT..LIMIT + 8].copy_from_slice(&(piece.length - 1).to_le_bytes());
        let mut frame = scratch.frame();
        let argument = frame.block_of(&bytes, 0).map_err(|_| None)?;
        frame.register(argument, DESCRIPTOR, piece.clone().into()).map_err(|_| None)?;
        host.ioctl(file, HEAP_CONTROL, &mut frame).map_err(|_| None)?;
        let word = |at: usize| {
            let bytes = frame.bytes(argument).get(at..at + 4)?;
            bytes.try_into().ok().map(u32::from_le_bytes)
        };
        match word(STATUS) {
            Some(nvguest_abi::status::OK) => word(MEMORY).ok_or(None),
            status => Err(status),
        }
    }
}
