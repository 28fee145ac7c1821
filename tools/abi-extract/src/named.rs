//! What no table of NVIDIA's says and a person has read in its sources: which struct an
//! escape takes, and which numbers are file descriptors. Offsets are never written here:
//! each field is looked up in the release at hand, and a field that has gone is an error.

use nvguest_abi::profile::Direction;

/// A file descriptor: field, kinds of file, values for "none".
pub type Fd = (&'static str, &'static str, &'static str);
/// A pointer: field, field that counts, bytes of an element as C, direction.
pub type Ptr = (&'static str, Option<&'static str>, &'static str, Direction);

/// An escape: NVIDIA's name and what its argument is.
#[derive(Clone, Copy)]
pub struct Escape {
    /// `NV_ESC_…`.
    pub name: &'static str,
    /// The struct; another name after `|` where releases differ.
    pub layout: &'static str,
    /// Field of RM's status.
    pub status: Option<&'static str>,
    /// Field that picks a layout.
    pub select: Option<&'static str>,
    /// The argument is an array of these.
    pub array: bool,
    /// Pointers.
    pub pointers: &'static [Ptr],
    /// Descriptors.
    pub files: &'static [Fd],
}

const PLAIN: Escape = Escape {
    name: "",
    layout: "",
    status: Some("status"),
    select: None,
    array: false,
    pointers: &[],
    files: &[],
};

const fn plain(name: &'static str, layout: &'static str) -> Escape {
    Escape { name, layout, ..PLAIN }
}

const fn bare(name: &'static str, layout: &'static str) -> Escape {
    Escape { status: None, ..plain(name, layout) }
}

const IN: Direction = Direction::In;
const OUT: Direction = Direction::Out;
const INOUT: Direction = Direction::Inout;

/// Every escape that some release routes.
pub const ESCAPES: &[Escape] = &[
    Escape {
        status: Some("params.status"),
        files: &[("fd", "ctl gpu", "negative foreign")],
        ..plain("NV_ESC_RM_ALLOC_MEMORY", "nv_ioctl_nvos02_parameters_with_fd")
    },
    plain("NV_ESC_RM_ALLOC_OBJECT", "NVOS05_PARAMETERS"),
    plain("NV_ESC_RM_FREE", "NVOS00_PARAMETERS"),
    Escape { select: Some("cmd"), ..plain("NV_ESC_RM_CONTROL", "NVOS54_PARAMETERS") },
    Escape { select: Some("hClass"), ..plain("NV_ESC_RM_ALLOC", "NVOS21_PARAMETERS") },
    Escape {
        select: Some("hClass"),
        pointers: &[("pRightsRequested", None, "sizeof(RS_ACCESS_MASK)", INOUT)],
        ..plain("NV_ESC_RM_ALLOC", "NVOS64_PARAMETERS")
    },
    plain("NV_ESC_RM_DUP_OBJECT", "NVOS55_PARAMETERS"),
    plain("NV_ESC_RM_SHARE", "NVOS57_PARAMETERS"),
    Escape {
        pointers: &[("paramStructPtr", Some("paramSize"), "1", INOUT)],
        ..plain("NV_ESC_RM_I2C_ACCESS", "NVOS_I2C_ACCESS_PARAMS")
    },
    Escape {
        pointers: &[
            ("phClients", Some("numChannels"), "sizeof(NvU32)", IN),
            ("phDevices", Some("numChannels"), "sizeof(NvU32)", IN),
            ("phChannels", Some("numChannels"), "sizeof(NvU32)", IN),
        ],
        ..plain("NV_ESC_RM_IDLE_CHANNELS", "NVOS30_PARAMETERS")
    },
    Escape { select: Some("function"), ..plain("NV_ESC_RM_VID_HEAP_CONTROL", "NVOS32_PARAMETERS") },
    Escape {
        pointers: &[
            ("pDevNode", Some("DevNodeLength"), "1", IN),
            ("pParmStr", Some("ParmStrLength"), "1", IN),
            ("pBinaryData", Some("BinaryDataLength"), "1", INOUT),
        ],
        ..plain("NV_ESC_RM_ACCESS_REGISTRY", "NVOS38_PARAMETERS")
    },
    Escape {
        status: Some("params.status"),
        files: &[("fd", "ctl gpu", "negative")],
        ..plain("NV_ESC_RM_MAP_MEMORY", "nv_ioctl_nvos33_parameters_with_fd")
    },
    plain("NV_ESC_RM_UNMAP_MEMORY", "NVOS34_PARAMETERS"),
    Escape {
        pointers: &[("pEvent", None, "sizeof(NvUnixEvent)", OUT)],
        ..plain("NV_ESC_RM_GET_EVENT_DATA", "NVOS41_PARAMETERS")
    },
    plain("NV_ESC_RM_ALLOC_CONTEXT_DMA2", "NVOS39_PARAMETERS"),
    plain("NV_ESC_RM_MAP_MEMORY_DMA", "NVOS46_PARAMETERS"),
    plain("NV_ESC_RM_UNMAP_MEMORY_DMA", "NVOS47_PARAMETERS"),
    plain("NV_ESC_RM_BIND_CONTEXT_DMA", "NVOS49_PARAMETERS"),
    plain("NV_ESC_RM_UPDATE_DEVICE_MAPPING_INFO", "NVOS56_PARAMETERS"),
    bare("NV_ESC_RM_LOCKLESS_DIAGNOSTIC", "NV_LOCKLESS_DIAGNOSTIC_PARAMS"),
    bare("NV_ESC_RM_NVLOG_CTRL", "NV_NVLOG_CTRL_PARAMS"),
    Escape { array: true, ..bare("NV_ESC_CARD_INFO", "nv_ioctl_card_info_t") },
    Escape {
        files: &[("ctl_fd", "ctl", "")],
        ..bare("NV_ESC_REGISTER_FD", "nv_ioctl_register_fd_t")
    },
    Escape {
        status: Some("Status"),
        files: &[("fd", "ctl gpu", "")],
        ..plain("NV_ESC_ALLOC_OS_EVENT", "nv_ioctl_alloc_os_event_t")
    },
    Escape {
        status: Some("Status"),
        files: &[("fd", "ctl gpu", "")],
        ..plain("NV_ESC_FREE_OS_EVENT", "nv_ioctl_free_os_event_t")
    },
    bare("NV_ESC_STATUS_CODE", "nv_ioctl_status_code_t"),
    bare("NV_ESC_CHECK_VERSION_STR", "nv_ioctl_rm_api_version_t"),
    bare("NV_ESC_IOCTL_XFER_CMD", "nv_ioctl_xfer_t"),
    Escape { array: true, ..bare("NV_ESC_ATTACH_GPUS_TO_FD", "NvU32") },
    plain("NV_ESC_QUERY_DEVICE_INTR", "nv_ioctl_query_device_intr_t|nv_ioctl_query_device_intr"),
    bare("NV_ESC_SYS_PARAMS", "nv_ioctl_sys_params_t"),
    bare("NV_ESC_NUMA_INFO", "nv_ioctl_numa_info_t"),
    bare("NV_ESC_SET_NUMA_STATUS", "nv_ioctl_set_numa_status_t"),
    Escape {
        files: &[("fd", "ctl gpu", "negative foreign")],
        ..plain("NV_ESC_EXPORT_TO_DMABUF_FD", "nv_ioctl_export_to_dma_buf_fd_t")
    },
    bare("NV_ESC_WAIT_OPEN_COMPLETE", "nv_ioctl_wait_open_complete_t"),
];

/// The escape whose argument names another call: its fields.
pub const INDIRECT: (&str, [(&str, u32); 3]) =
    ("NV_ESC_IOCTL_XFER_CMD", [("cmd", 0), ("size", 4), ("ptr", 8)]);

/// Controls with descriptors: the parameters' struct, and the descriptors.
pub const CONTROL_FDS: &[(&str, Fd)] = &[
    ("NV0000_CTRL_OS_UNIX_EXPORT_OBJECT_TO_FD_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_UNIX_IMPORT_OBJECT_FROM_FD_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_GET_GPU_INFO_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_UNIX_GET_EXPORT_OBJECT_INFO_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_UNIX_CREATE_EXPORT_OBJECT_FD_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_UNIX_EXPORT_OBJECTS_TO_FD_PARAMS", ("fd", "ctl", "negative")),
    ("NV0000_CTRL_OS_UNIX_IMPORT_OBJECTS_FROM_FD_PARAMS", ("fd", "ctl", "negative")),
    ("NV00FD_CTRL_ATTACH_GPU_PARAMS", ("devDescriptor", "gpu", "negative")),
    ("NV00FD_CTRL_REGISTER_EVENT_PARAMS", ("pOsEvent", "ctl gpu", "negative zero")),
    ("NV00E0_CTRL_EXPORT_MEM_PARAMS", ("devDescriptor", "cap", "negative")),
    ("NV0000_CTRL_CLIENT_SUBSCRIBE_TO_IMEX_CHANNEL_PARAMS", ("devDescriptor", "cap", "negative")),
];

/// Classes with descriptors: the parameters' struct, and the descriptors.
pub const CLASS_FDS: &[(&str, Fd)] = &[
    ("NV0005_ALLOC_PARAMETERS", ("data", "ctl gpu", "")),
    ("NV000F_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NVC637_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NVC638_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NVC639_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NVC640_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NV00F1_ALLOCATION_PARAMETERS", ("capDescriptor", "cap", "negative")),
    ("NV00F1_ALLOCATION_PARAMETERS", ("pOsEvent", "ctl gpu", "negative zero")),
    ("NV00F9_ALLOCATION_PARAMETERS", ("pOsEvent", "ctl gpu", "negative zero")),
    ("NV00FD_ALLOCATION_PARAMETERS", ("pOsEvent", "ctl gpu", "negative zero")),
    ("NV_EVENT_BUFFER_ALLOC_PARAMETERS", ("notificationHandle", "ctl gpu", "negative zero")),
];

/// Descriptors of `nvidia-uvm`'s commands, by the field's name.
pub const UVM_FDS: &[Fd] = &[("rmCtrlFd", "ctl", "negative"), ("uvmFd", "uvm", "")];

/// Buffers of `nvidia-uvm`'s commands that the caller shares with it: command, and pointer.
/// The tools' commands pin them for good, and the policy refuses all of those.
pub const UVM_POINTERS: &[(&str, Ptr)] = &[
    ("UVM_TOOLS_READ_PROCESS_MEMORY", ("buffer", Some("size"), "1", OUT)),
    ("UVM_TOOLS_WRITE_PROCESS_MEMORY", ("buffer", Some("size"), "1", IN)),
];

/// Pointers in the parameters of controls any caller may issue that neither of RM's tables
/// lists: the struct, the field, what the driver does with it.
pub const STRAY_POINTERS: &[(&str, Ptr)] = &[
    // RmIdleChannels copies the three lists in.
    ("NV0000_CTRL_GPU_IDLE_CHANNELS_PARAMS", ("phClients", Some("numChannels"), "4", IN)),
    ("NV0000_CTRL_GPU_IDLE_CHANNELS_PARAMS", ("phDevices", Some("numChannels"), "4", IN)),
    ("NV0000_CTRL_GPU_IDLE_CHANNELS_PARAMS", ("phChannels", Some("numChannels"), "4", IN)),
    // The name is never written.
    ("NV0000_CTRL_GPU_GET_ID_INFO_PARAMS", ("szName", None, "0", Direction::None)),
    // Refused with anything but null, unless the caller is the kernel.
    (
        "NV2080_CTRL_FIFO_DISABLE_CHANNELS_PARAMS",
        ("pRunlistPreemptEvent", None, "0", Direction::None),
    ),
    // Answered NOT_SUPPORTED before the pointer is looked at.
    ("NV0000_CTRL_GPU_PUSH_UCODE_IMAGE_PARAMS", ("pData", None, "0", Direction::None)),
    ("NV0000_CTRL_GPU_PUSH_GSP_UCODE_PARAMS", ("pData", None, "0", Direction::None)),
];
