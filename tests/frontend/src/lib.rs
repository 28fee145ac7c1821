//! A fake frontend: VMM and guest driver in one process, over the real vhost-user socket.
//!
//! What stock QEMU and the guest module do together is done here without a VM, so
//! that tests, benches and the loop-back guest speak the real protocol to the real
//! backend. There is no global state, and everything is usable from several threads.
//!
//! - [`vmm`]: sets the device up as QEMU does, and answers the backend's requests
//! - [`window`]: the shared-memory region, in this process
//! - [`memory`], [`ring`], [`queue`]: guest memory, virtqueues, requests on them
//! - [`events`]: the event queues, and who waits for which file
//! - `record`: requests kept in a folder, for the fuzzers
//! - [`guest`]: messages that concern the guest as a whole
//! - [`process`]: a guest process and its files
//! - [`gather`]: follows the schema through a caller's memory
//! - [`pins`]: memory that programs register
//! - [`rm`]: the few RM calls that tests make
//! - [`backend`]: starts and observes the backend's processes

pub mod backend;
pub mod error;
pub mod events;
pub mod gather;
pub mod guest;
pub mod memory;
pub mod pins;
pub mod process;
pub mod queue;
mod record;
pub mod ring;
pub mod rm;
pub mod vmm;
pub mod window;
#[path = "../../../backend/src/wire.rs"]
pub mod wire;

pub use error::{Error, Result};
pub use guest::Guest;
pub use process::{File, Mapping, Process};
pub use vmm::Options;
