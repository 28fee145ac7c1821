//! The messages: the Rust half of `guest-module/virtio_nvguest.h`, which says what each field means.
//!
//! `tests/wire_header.rs` compiles the header and compares every size and offset.
#![allow(missing_docs, reason = "the C header documents every field")]

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// Unregistered: a name in stock QEMU's table that no Linux driver claims.
pub const VIRTIO_ID: u32 = 38;
pub const MAGIC: u32 = 0x5447_564e;
pub const VERSION: u16 = 1;

/// Bytes of the device's configuration space.
pub const CONFIG_SIZE: usize = 64;
/// Queues of the broker: control and events. Those of worker slots follow in pairs.
pub const BROKER_QUEUES: usize = 2;
pub const MAX_SLOTS: usize = 31;
pub const NO_SLOT: u32 = u32::MAX;
/// Virtio shared-memory region of the window.
pub const SHM_WINDOW: u8 = 1;

/// Bytes of one request at most, header included: RM's largest parameters (229,392) and room.
pub const MAX_REQUEST: u32 = 1 << 20;
/// Bytes of one reply at most.
pub const MAX_RESPONSE: u32 = 1 << 20;
/// Buffers that one call reaches, beside its argument.
pub const MAX_SEGMENTS: u32 = 7;
/// Registrations of a guest at a time, and the highest number of one.
pub const MAX_REGISTRATIONS: u32 = 4096;

macro_rules! wire {
    ($($(#[$meta:meta])* struct $name:ident { $($field:ident: $type:ty,)* })*) => { $(
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        #[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
        #[repr(C)]
        pub struct $name { $(pub $field: $type,)* }
    )* };
}

wire! {
    struct Config {
        magic: U32,
        version: U16,
        slots: U16,
        window_size: U64,
        reserved: [U32; 12],
    }

    struct Caller {
        tgid: U32,
        euid: U32,
        start_ns: U64,
    }

    struct ReqHeader {
        kind: U32,
        file: U32,
        len: U32,
        reserved: U32,
        caller: Caller,
    }

    struct RespHeader {
        status: U32,
        len: U32,
    }

    /// Follows [`ReqHeader`]; so do all bodies below that are not replies.
    struct HelloReq {
        version: U32,
        flags: U32,
    }

    /// Follows [`RespHeader`]; so do all replies below.
    struct HelloResp {
        version: U32,
        caps: U32,
        driver: [u8; 32],
        profile: [u8; 32],
        window_size: U64,
        max_request: U32,
        max_response: U32,
        max_segments: U32,
        max_files: U32,
        max_placements: U32,
        nodes_len: U32,
        schema_len: U32,
        epoch: U32,
    }

    struct ReadReq {
        offset: U32,
        size: U32,
    }

    struct OpenReq {
        node: U32,
        flags: U32,
    }

    struct OpenResp {
        file: U32,
        slot: U32,
    }

    struct IoctlReq {
        cmd: U32,
        arg_len: U32,
        nsegs: U16,
        nfds: U16,
        reserved: U32,
    }

    struct FdRecord {
        segment: U16,
        offset: U16,
        file: U32,
    }

    struct IoctlResp {
        ret: U32,
        arg_len: U32,
    }

    struct Pages {
        registration: U32,
        error: U32,
        held: U32,
        reserved: U32,
    }

    struct Run {
        address: U64,
        length: U64,
    }

    struct MapReq {
        offset: U64,
        length: U64,
        prot: U32,
        reserved: U32,
    }

    struct MapResp {
        window_offset: U64,
        length: U64,
        placement: U32,
        cache: u8,
        flags: u8,
        reserved: U16,
    }

    struct UnmapReq {
        placement: U32,
        reserved: U32,
    }

    struct ClockResp {
        monotonic_ns: U64,
        realtime_ns: U64,
        raw_ns: U64,
    }

    struct Event {
        kind: U32,
        file: U32,
        mask: U32,
        more: U32,
    }

    struct NodeHeader {
        kind: U16,
        mode: U16,
        file_kind: u8,
        reserved: [u8; 3],
        major: U32,
        minor: U32,
        name_len: U32,
        data_len: U32,
    }
}

/// `nvg_req.type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    Hello = 1,
    Nodes = 2,
    Schema = 3,
    Open = 4,
    Close = 5,
    Ioctl = 6,
    Map = 7,
    Unmap = 8,
    Arm = 9,
    Clock = 10,
}

impl Kind {
    /// Every kind, in the order of its number, which begins at 1.
    pub const ALL: [Self; 10] = [
        Self::Hello,
        Self::Nodes,
        Self::Schema,
        Self::Open,
        Self::Close,
        Self::Ioctl,
        Self::Map,
        Self::Unmap,
        Self::Arm,
        Self::Clock,
    ];

    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL.get((number as usize).wrapping_sub(1)).copied()
    }

    /// Its name in tallies and logs.
    pub fn name(self) -> &'static str {
        match self {
            Self::Hello => "hello",
            Self::Nodes => "nodes",
            Self::Schema => "schema",
            Self::Open => "open",
            Self::Close => "close",
            Self::Ioctl => "ioctl",
            Self::Map => "map",
            Self::Unmap => "unmap",
            Self::Arm => "arm",
            Self::Clock => "clock",
        }
    }
}

/// `nvg_hello.flags`: close what the previous driver instance held.
pub const HELLO_FRESH: u32 = 1 << 0;

pub const PROT_READ: u32 = 1 << 0;
pub const PROT_WRITE: u32 = 1 << 1;

/// `nvg_map_resp.flags`.
pub const MAP_READ_ONLY: u8 = 1 << 0;

/// `nvg_map_resp.cache`: how the guest must map the range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Cache {
    WriteBack = 0,
    WriteCombine = 1,
    Uncached = 2,
}

pub const EVENT_READY: u32 = 1;
pub const EVENT_LOST: u32 = 2;
pub const EVENT_RELEASED: u32 = 3;

pub const NODE_CDEV: u16 = 1;
pub const NODE_PROC: u16 = 2;
pub const NODE_MODULE: u16 = 3;
pub const NODE_PCI: u16 = 4;

/// The worker that a file's handle names. With the bit that no handle has it names none.
pub fn file_worker(file: u32) -> u16 {
    // CAST: 16 bits are left.
    (file >> 16) as u16
}

/// The handle of a worker's file.
pub fn file_handle(worker: u16, number: u16) -> u32 {
    u32::from(worker & 0x7fff) << 16 | u32::from(number)
}

/// `length` rounded up to the padding of variable parts.
pub fn padded(length: usize) -> usize {
    length.next_multiple_of(8)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_count_from_one_and_everything_else_is_unknown() {
        for (i, kind) in Kind::ALL.into_iter().enumerate() {
            assert_eq!(Kind::from_number(i as u32 + 1), Some(kind));
        }
        for number in [0, 11, u32::MAX] {
            assert_eq!(Kind::from_number(number), None);
        }
    }

    #[test]
    fn a_handle_names_its_worker_in_31_bits() {
        let handle = file_handle(0x7fff, 0xffff);
        assert_eq!(handle, 0x7fff_ffff);
        assert_eq!(file_worker(handle), 0x7fff);
        assert!(file_worker(handle | 1 << 31) > 0x7fff);
    }
}
