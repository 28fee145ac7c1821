//! What the kernel interface of each NVIDIA driver release is: data, and pure functions over it.
//!
//! - [`release`]: release numbers, and the host's
//! - [`profile`]: what is measured of a release; [`store`]: the checked-in profiles;
//!   [`check`]: what must hold of one
//! - [`resolve`]: the host's release → the profile that serves it; [`later`]: what is known of
//!   newer ones
//! - [`policy`]: may a guest?; [`explain`]: the same for people
//! - [`names`]: what numbers are called
//! - [`rules`]: the gather rules that guest module and worker both walk
//! - [`compiled`]: all that a worker needs of a profile, in one blob
//!   ([`profile::Profile::compile`] makes it)
#![forbid(unsafe_code)]

pub mod check;
mod compile;
pub mod compiled;
pub mod explain;
pub mod later;
pub mod names;
pub mod policy;
pub mod profile;
pub mod release;
pub mod resolve;
pub mod rules;
pub mod store;

/// What a file of the driver is. The number is the wire's `enum nvg_file_kind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum FileKind {
    /// `/dev/nvidiactl`: everything that is not of one card.
    Ctl = 0,
    /// `/dev/nvidia0` and on: one card.
    Gpu = 1,
    /// `/dev/nvidia-uvm`.
    Uvm = 2,
    /// `/dev/nvidia-modeset`.
    Modeset = 3,
    /// `/dev/nvidia-caps/*`: opened and passed on, never asked.
    Cap = 4,
}

impl FileKind {
    /// Every kind, in the order of its number.
    pub const ALL: [Self; 5] = [Self::Ctl, Self::Gpu, Self::Uvm, Self::Modeset, Self::Cap];

    /// The kind with this number.
    pub fn from_number(number: u8) -> Option<Self> {
        Self::ALL.get(usize::from(number)).copied()
    }

    /// Its bit in [`rules::Rule::fd_kinds`].
    pub fn bit(self) -> u32 {
        1 << self as u8
    }
}

/// What a guest may use a card for: NVIDIA's own words. The numbers are the wire's `NVG_CAP_*`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Capability {
    /// `nvidia-smi`, NVML.
    Utility = 1 << 0,
    /// Vulkan, OpenGL.
    Graphics = 1 << 1,
    /// NVDEC, NVENC, Vulkan Video.
    Video = 1 << 2,
    /// CUDA: nvidia-uvm and registered guest memory.
    Compute = 1 << 3,
    /// Screens.
    Display = 1 << 4,
}

/// NVIDIA's own status codes (`nvstatuscodes.h`) that we answer with.
pub mod status {
    /// `NV_OK`
    pub const OK: u32 = 0;
    /// `NV_ERR_INSUFFICIENT_RESOURCES`
    pub const INSUFFICIENT_RESOURCES: u32 = 0x1a;
    /// `NV_ERR_INSUFFICIENT_PERMISSIONS`
    pub const INSUFFICIENT_PERMISSIONS: u32 = 0x1b;
    /// `NV_ERR_INVALID_ADDRESS`
    pub const INVALID_ADDRESS: u32 = 0x1e;
    /// `NV_ERR_INVALID_ARGUMENT`
    pub const INVALID_ARGUMENT: u32 = 0x1f;
    /// `NV_ERR_INVALID_CLASS`
    pub const INVALID_CLASS: u32 = 0x22;
    /// `NV_ERR_INVALID_CLIENT`
    pub const INVALID_CLIENT: u32 = 0x23;
    /// `NV_ERR_INVALID_LIMIT`
    pub const INVALID_LIMIT: u32 = 0x2e;
    /// `NV_ERR_INVALID_OBJECT_HANDLE`
    pub const INVALID_OBJECT_HANDLE: u32 = 0x33;
    /// `NV_ERR_NO_MEMORY`
    pub const NO_MEMORY: u32 = 0x51;
    /// `NV_ERR_NOT_SUPPORTED`
    pub const NOT_SUPPORTED: u32 = 0x56;
    /// `NV_ERR_OBJECT_NOT_FOUND`
    pub const OBJECT_NOT_FOUND: u32 = 0x57;
    /// `NV_ERR_STATE_IN_USE`
    pub const STATE_IN_USE: u32 = 0x63;
}
