//! Arguments and parameters as the driver lays them out on x86-64, release 580.
//!
//! Names and order are those of `nvos.h`, `nv-ioctl.h` and `class/*.h` of NVIDIA's open kernel
//! modules.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

macro_rules! layout {
    ($($(#[$doc:meta])* $name:ident: $size:literal { $($field:ident: $kind:ty,)* })*) => {$(
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
        #[repr(C)]
        pub struct $name { $(pub $field: $kind,)* }
        const _: () = assert!(size_of::<$name>() == $size);
    )*};
}

layout! {
    /// `NVOS00_PARAMETERS`: RM_FREE
    Free: 16 { client: u32, parent: u32, handle: u32, status: u32, }
    /// `NVOS21_PARAMETERS`: RM_ALLOC, older
    Alloc21: 32 {
        client: u32, parent: u32, handle: u32, class: u32, params: u64, params_size: u32,
        status: u32,
    }
    /// `NVOS64_PARAMETERS`: RM_ALLOC
    Alloc64: 48 {
        client: u32, parent: u32, handle: u32, class: u32, params: u64, rights: u64,
        params_size: u32, flags: u32, status: u32, pad: u32,
    }
    /// `NVOS54_PARAMETERS`: RM_CONTROL
    Control: 32 {
        client: u32, object: u32, command: u32, flags: u32, params: u64, params_size: u32,
        status: u32,
    }
    /// `NVOS55_PARAMETERS`: RM_DUP_OBJECT
    Dup: 28 {
        client: u32, parent: u32, handle: u32, source_client: u32, source: u32, flags: u32,
        status: u32,
    }
    /// `NVOS32_PARAMETERS`: VID_HEAP_CONTROL, with its member `AllocSize`
    Heap: 184 {
        client: u32, parent: u32, function: u32, vaspace: u32, ivc_heap: u16, pad: u16,
        status: u32, total: u64, free: u64, owner: u32, memory: u32, kind: u32, flags: u32,
        attr: u32, format: u32, hints: [u32; 6], size: u64, alignment: u64, offset: u64,
        limit: u64, address: u64, range: [u64; 2], rest: [u64; 5],
    }
    /// `NVOS32_PARAMETERS`, with its member `AllocOsDesc`
    HeapDescriptor: 184 {
        client: u32, parent: u32, function: u32, vaspace: u32, ivc_heap: u16, pad: u16,
        status: u32, total: u64, free: u64, memory: u32, kind: u32, flags: u32, attr: u32,
        attr2: u32, pad2: u32, descriptor: u64, limit: u64, descriptor_type: u32, pad3: u32,
        rest: [u64; 12],
    }
    /// `nv_ioctl_nvos33_parameters_with_fd`: RM_MAP_MEMORY
    Map: 56 {
        client: u32, device: u32, memory: u32, pad: u32, offset: u64, length: u64, linear: u64,
        status: u32, flags: u32, fd: i32, pad2: u32,
    }
    /// `NVOS34_PARAMETERS`: RM_UNMAP_MEMORY
    Unmap: 32 {
        client: u32, device: u32, memory: u32, pad: u32, linear: u64, status: u32, flags: u32,
    }
    /// `NVOS56_PARAMETERS`: RM_UPDATE_DEVICE_MAPPING_INFO
    Update: 40 {
        client: u32, device: u32, memory: u32, pad: u32, old: u64, new: u64, status: u32,
        pad2: u32,
    }
    /// `NVOS41_PARAMETERS`: RM_GET_EVENT_DATA
    GetEvent: 16 { event: u64, more: u32, status: u32, }
    /// `NvUnixEvent`
    UnixEvent: 16 { object: u32, notify: u32, info32: u32, info16: u16, pad: u16, }
    /// `nv_ioctl_alloc_os_event_t` and `nv_ioctl_free_os_event_t`
    OsEvent: 16 { client: u32, device: u32, fd: u32, status: u32, }
    /// `nv_ioctl_rm_api_version_t`
    Version: 72 { command: u32, reply: u32, release: [u8; 64], }
    /// `nv_ioctl_card_info_t`
    CardInfo: 72 {
        valid: u8, pad: [u8; 3], domain: u32, bus: u8, slot: u8, function: u8, pad2: u8,
        vendor: u16, device: u16, gpu_id: u32, irq: u16, pad3: u16, reg_address: u64,
        reg_size: u64, fb_address: u64, fb_size: u64, minor: u32, name: [u8; 10], pad4: u16,
    }
    /// `NV_MEMORY_ALLOCATION_PARAMS`
    Memory: 128 {
        owner: u32, kind: u32, flags: u32, width: u32, height: u32, pitch: u32, attr: u32,
        attr2: u32, more: [u32; 4], range: [u64; 2], size: u64, alignment: u64, offset: u64,
        limit: u64, address: u64, rest: [u32; 6],
    }
    /// `NV0005_ALLOC_PARAMETERS`
    Event: 24 { parent_client: u32, source: u32, class: u32, notify: u32, data: u64, }
    /// `NV2080_CTRL_EVENT_SET_NOTIFICATION_PARAMS`
    SetNotification: 20 { event: u32, action: u32, state: u32, info32: u32, info16: u32, }
    /// `NVA06C_CTRL_PREEMPT_PARAMS`
    Preempt: 8 { wait: u8, manual: u8, pad: u16, timeout_us: u32, }
}
