//! Vulkan behind types that free themselves, and all `unsafe` that it takes.
//!
//! - [`instance`]: the loader, the devices that it finds, and what they are
//! - [`device`]: a logical device and its queues
//! - [`memory`]: memory, buffers, images
//! - [`pipeline`]: render targets and pipelines
//! - [`commands`]: recording; what is recorded keeps what it uses alive
//! - [`clock`]: the device's own clock
//! - [`sync`]: fences and timeline semaphores
//! - [`external`]: memory that comes from, or goes to, somewhere else
//!
//! Each type holds the [`Device`] that it was made from, so that a device goes
//! last whatever the order in which a caller drops things.

mod clock;
mod commands;
mod device;
mod external;
mod instance;
mod memory;
mod pipeline;
mod sync;

pub use ash::vk::MemoryPropertyFlags;
pub use clock::Clock;
pub use commands::{Commands, Draw, Recorder};
pub use device::{Device, Queue, Queues};
pub use external::{export, import_fd, import_host, Exported, HostPages};
pub use instance::{choose, Instance, Physical};
pub use memory::{Buffer, Memory, MemoryType, Wish};
pub use pipeline::{Blend, Compute, Graphics, Style, Target};
pub use sync::{Fence, Timeline, Waited};
