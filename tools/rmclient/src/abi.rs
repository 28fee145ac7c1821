//! The driver's kernel interface as far as our own programs speak it (x86-64, releases 535 to 595).
//!
//! What the backend knows of it comes from profiles. This is what probes and tests are written
//! against, by hand, so that a wrong profile has something to fail on. Names and numbers are NVIDIA's: `nv_escape.h`, `nv-ioctl-numbers.h`, `nvos.h`, `class/*.h`,
//! `ctrl/*.h` of the open kernel modules. The structs hold no padding but named fields.
#![allow(missing_docs, reason = "NVIDIA's headers document every field")]

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Numbers of calls on `/dev/nvidiactl` and `/dev/nvidia0`.
pub mod escape {
    /// Frees an object.
    pub const RM_FREE: u32 = 0x29;
    /// Calls a method of an object.
    pub const RM_CONTROL: u32 = 0x2a;
    /// Makes an object.
    pub const RM_ALLOC: u32 = 0x2b;
    /// Makes an object that shares another's resource.
    pub const RM_DUP_OBJECT: u32 = 0x34;
    /// Lets others have an object.
    pub const RM_SHARE: u32 = 0x35;
    /// Talks to a bus of the board.
    pub const RM_I2C_ACCESS: u32 = 0x39;
    /// Reads and writes the driver's registry.
    pub const RM_ACCESS_REGISTRY: u32 = 0x4d;
    /// Reads the driver's own log.
    pub const RM_NVLOG_CTRL: u32 = 0x5f;
    /// Sets memory blocks on line.
    pub const SET_NUMA_STATUS: u32 = 216;
    /// Older way to allocate memory.
    pub const RM_VID_HEAP_CONTROL: u32 = 0x4a;
    /// Arms a file with memory, to be mapped by mmap.
    pub const RM_MAP_MEMORY: u32 = 0x4e;
    /// Undoes RM's side of it.
    pub const RM_UNMAP_MEMORY: u32 = 0x4f;
    /// Takes a queued event.
    pub const RM_GET_EVENT_DATA: u32 = 0x52;
    /// Tells RM where a mapping really is.
    pub const RM_UPDATE_DEVICE_MAPPING_INFO: u32 = 0x5e;
    /// The cards.
    pub const CARD_INFO: u32 = 200;
    /// Joins a file to a control file's clients.
    pub const REGISTER_FD: u32 = 201;
    /// Makes a file receive events.
    pub const ALLOC_OS_EVENT: u32 = 206;
    /// Undoes it.
    pub const FREE_OS_EVENT: u32 = 207;
    /// Compares or asks the release.
    pub const CHECK_VERSION_STR: u32 = 210;
    /// Keeps cards in use by a file.
    pub const ATTACH_GPUS_TO_FD: u32 = 212;
    /// How the host blocks memory.
    pub const SYS_PARAMS: u32 = 214;
    /// Whether the card came up.
    pub const WAIT_OPEN_COMPLETE: u32 = 218;
    /// No call has this number.
    pub const NONE: u32 = 0x7f;

    /// Calls whose argument reaches nothing else, or is all zeroes here.
    pub const WITHOUT_POINTER: [u32; 18] = [
        RM_SHARE,
        RM_I2C_ACCESS,
        RM_ACCESS_REGISTRY,
        RM_NVLOG_CTRL,
        SET_NUMA_STATUS,
        RM_FREE,
        RM_DUP_OBJECT,
        RM_MAP_MEMORY,
        RM_UNMAP_MEMORY,
        RM_UPDATE_DEVICE_MAPPING_INFO,
        CARD_INFO,
        REGISTER_FD,
        ALLOC_OS_EVENT,
        FREE_OS_EVENT,
        CHECK_VERSION_STR,
        ATTACH_GPUS_TO_FD,
        WAIT_OPEN_COMPLETE,
        NONE,
    ];
}

/// Classes of objects.
pub mod class {
    /// `NV01_ROOT_CLIENT`
    pub const CLIENT: u32 = 0x41;
    /// `NV01_DEVICE_0`
    pub const DEVICE: u32 = 0x80;
    /// `NV20_SUBDEVICE_0`
    pub const SUBDEVICE: u32 = 0x2080;
    /// `NV01_MEMORY_SYSTEM`
    pub const SYSTEM_MEMORY: u32 = 0x3e;
    /// `NV01_MEMORY_LOCAL_USER`
    pub const VIDEO_MEMORY: u32 = 0x40;
    /// `NV01_EVENT_OS_EVENT`
    pub const OS_EVENT: u32 = 0x79;
    /// `KEPLER_CHANNEL_GROUP_A`
    pub const CHANNEL_GROUP: u32 = 0xa06c;
    /// The page that work is submitted with, newest first (Blackwell, Hopper, Ampere, Turing, Volta).
    pub const USERMODE: [u32; 5] = [0xc761, 0xc661, 0xc561, 0xc461, 0xc361];
}

/// Commands of RM_CONTROL.
pub mod control {
    /// `NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS`
    pub const ATTACHED_IDS: u32 = 0x201;
    /// `NV0000_CTRL_CMD_GPU_GET_ID_INFO_V2`
    pub const ID_INFO: u32 = 0x205;
    /// `NV0000_CTRL_CMD_GPU_GET_PROBED_IDS`
    pub const PROBED_IDS: u32 = 0x214;
    /// `NV2080_CTRL_CMD_GPU_GET_NAME_STRING`
    pub const NAME_STRING: u32 = 0x2080_0110;
    /// `NV2080_CTRL_CMD_GPU_GET_GID_INFO`
    pub const GID_INFO: u32 = 0x2080_014a;
    /// `NV2080_CTRL_CMD_EVENT_SET_NOTIFICATION`
    pub const SET_NOTIFICATION: u32 = 0x2080_0301;
    /// `NV2080_CTRL_CMD_EVENT_SET_TRIGGER`: fires the software event of the card
    pub const SET_TRIGGER: u32 = 0x2080_0302;
    /// `NV2080_CTRL_CMD_EVENT_SET_TRIGGER_FIFO`: fires one event by handle, as Vulkan does to
    /// signal a timeline semaphore from the CPU
    pub const SET_TRIGGER_FIFO: u32 = 0x2080_0308;
    /// `NV2080_CTRL_CMD_TIMER_GET_TIME`
    pub const GET_TIME: u32 = 0x2080_0403;
    /// `NV2080_CTRL_CMD_FB_GET_INFO`
    pub const FB_GET_INFO: u32 = 0x2080_1301;
    /// `NV2080_CTRL_CMD_FB_GET_INFO_V2`
    pub const FB_GET_INFO_V2: u32 = 0x2080_1303;
    /// `NVA06C_CTRL_CMD_SET_TIMESLICE`, in µs
    pub const SET_TIMESLICE: u32 = 0xa06c_0103;
    /// `NVA06C_CTRL_CMD_GET_TIMESLICE`
    pub const GET_TIMESLICE: u32 = 0xa06c_0104;
    /// `NVA06C_CTRL_CMD_PREEMPT`
    pub const PREEMPT: u32 = 0xa06c_0105;
    /// `NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN`
    pub const WORK_TOKEN: u32 = 0xc36f_0108;
    /// No class has it.
    pub const NONE: u32 = 0x2080_0fff;
}

/// `nvstatuscodes.h`
pub mod status {
    /// `NV_OK`
    pub const OK: u32 = 0;
    /// `NV_ERR_INVALID_ARGUMENT`
    pub const INVALID_ARGUMENT: u32 = 0x1f;
    /// `NV_ERR_NO_MEMORY`
    pub const NO_MEMORY: u32 = 0x51;
}

/// Bits of an event's notify index.
pub mod notify {
    /// `NV2080_NOTIFIERS_SW`
    pub const SOFTWARE: u32 = 0;
    /// `NV2080_NOTIFIERS_FIFO_EVENT_MTHD`
    pub const FIFO: u32 = 35;
    /// `NV01_EVENT_WITHOUT_EVENT_DATA`
    pub const WITHOUT_DATA: u32 = 0x1000_0000;
    /// `NV01_EVENT_NONSTALL_INTR`
    pub const NON_STALL: u32 = 0x0800_0000;
}

/// NVOS64
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Alloc {
    pub client: u32,
    pub parent: u32,
    pub handle: u32,
    pub class: u32,
    pub params: u64,
    pub rights: u64,
    pub params_size: u32,
    pub flags: u32,
    pub status: u32,
    pub pad: u32,
}

/// NVOS54
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Control {
    pub client: u32,
    pub object: u32,
    pub command: u32,
    pub flags: u32,
    pub params: u64,
    pub params_size: u32,
    pub status: u32,
}

/// `NVOS57_PARAMETERS`, with `RS_SHARE_POLICY` in it
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Share {
    pub client: u32,
    pub object: u32,
    pub target: u32,
    pub access: u32,
    pub kind: u16,
    pub action: u8,
    pub pad: u8,
    pub status: u32,
}

/// NVOS00
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Free {
    pub client: u32,
    pub parent: u32,
    pub handle: u32,
    pub status: u32,
}

/// NVOS55
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Dup {
    pub client: u32,
    pub parent: u32,
    pub handle: u32,
    pub source_client: u32,
    pub source: u32,
    pub flags: u32,
    pub status: u32,
}

/// NVOS33 with a file
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Map {
    pub client: u32,
    pub device: u32,
    pub memory: u32,
    pub pad: u32,
    pub offset: u64,
    pub length: u64,
    pub linear: u64,
    pub status: u32,
    pub flags: u32,
    pub fd: i32,
    pub pad2: u32,
}

/// NVOS34
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Unmap {
    pub client: u32,
    pub device: u32,
    pub memory: u32,
    pub pad: u32,
    pub linear: u64,
    pub status: u32,
    pub flags: u32,
}

/// NVOS56
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct UpdateMapping {
    pub client: u32,
    pub device: u32,
    pub memory: u32,
    pub pad: u32,
    pub old: u64,
    pub new: u64,
    pub status: u32,
    pub pad2: u32,
}

/// NVOS32 with the member `AllocSize`; of `Free`, `memory` is at the same place and `kind` is its flags
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Heap {
    pub client: u32,
    pub parent: u32,
    pub function: u32,
    pub vaspace: u32,
    pub heap: u16,
    pub pad: u16,
    pub status: u32,
    pub total: u64,
    pub free: u64,
    pub owner: u32,
    pub memory: u32,
    pub kind: u32,
    pub flags: u32,
    pub attr: u32,
    pub format: u32,
    pub comptag: [u32; 6],
    pub size: u64,
    pub alignment: u64,
    pub offset: u64,
    pub limit: u64,
    pub address: u64,
    pub range: [u64; 2],
    pub rest: [u64; 5],
}

/// NVOS32 with the member `AllocOsDesc`
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct HeapDescriptor {
    pub client: u32,
    pub parent: u32,
    pub function: u32,
    pub vaspace: u32,
    pub heap: u16,
    pub pad: u16,
    pub status: u32,
    pub total: u64,
    pub free: u64,
    pub memory: u32,
    pub kind: u32,
    pub flags: u32,
    pub attr: u32,
    pub attr2: u32,
    pub pad2: u32,
    pub descriptor: u64,
    pub limit: u64,
    pub descriptor_type: u32,
    pub pad3: u32,
    pub rest: [u64; 12],
}

/// NV_MEMORY_ALLOCATION_PARAMS
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Memory {
    pub owner: u32,
    pub kind: u32,
    pub flags: u32,
    pub width: u32,
    pub height: u32,
    pub pitch: u32,
    pub attr: u32,
    pub attr2: u32,
    pub more: [u32; 4],
    pub range: [u64; 2],
    pub size: u64,
    pub alignment: u64,
    pub offset: u64,
    pub limit: u64,
    pub address: u64,
    pub rest: [u32; 6],
}

/// NV0005_ALLOC_PARAMETERS
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Event {
    pub parent_client: u32,
    pub source: u32,
    pub class: u32,
    pub notify: u32,
    pub data: u64,
}

/// nv_ioctl_alloc_os_event_t, nv_ioctl_free_os_event_t
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct OsEvent {
    pub client: u32,
    pub device: u32,
    pub fd: u32,
    pub status: u32,
}

/// NVOS41
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct GetEvent {
    pub event: u64,
    pub more: u32,
    pub status: u32,
}

/// NvUnixEvent
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct UnixEvent {
    pub object: u32,
    pub notify: u32,
    pub info32: u32,
    pub info16: u16,
    pub pad: u16,
}

/// nv_ioctl_card_info_t
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct CardInfo {
    pub valid: u8,
    pub pad: [u8; 3],
    pub domain: u32,
    pub bus: u8,
    pub slot: u8,
    pub function: u8,
    pub pad2: u8,
    pub vendor: u16,
    pub device: u16,
    pub gpu_id: u32,
    pub irq: u16,
    pub pad3: u16,
    pub addresses: [u64; 4],
    pub minor: u32,
    pub name: [u8; 10],
    pub pad4: [u8; 2],
}

/// nv_ioctl_rm_api_version_t
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
pub struct Version {
    pub command: u32,
    pub reply: u32,
    pub release: [u8; 64],
}

const _: () = {
    assert!(size_of::<Alloc>() == 48 && size_of::<Control>() == 32 && size_of::<Free>() == 16);
    assert!(size_of::<Dup>() == 28 && size_of::<Map>() == 56 && size_of::<Unmap>() == 32);
    assert!(size_of::<UpdateMapping>() == 40 && size_of::<Heap>() == 184);
    assert!(size_of::<Memory>() == 128 && size_of::<Event>() == 24 && size_of::<OsEvent>() == 16);
    assert!(size_of::<GetEvent>() == 16 && size_of::<UnixEvent>() == 16);
    assert!(size_of::<CardInfo>() == 72 && size_of::<Version>() == 72);
};
