//! The rig: boots guests under QEMU and runs commands in them.
//!
//! - `rig`        what a test holds: N guests, each with a backend of its own
//! - `guest`      one guest: commands, files, signals, its kernel's log
//! - `channel`    the host's end of the agent's port
//! - `proto`      the messages on it
//! - `qemu`       QEMU's command line
//! - `qmp`        QEMU's control socket
//! - `accel`      KVM where a guest really runs under it, else emulation
//! - `process`    child processes that never outlive us
//! - `assets`     where QEMU, kernels, image and binaries lie
//! - `nvidia`     the host's card and its user-mode libraries
//! - `image`      builds the guest's image; `cpio` is its format
//! - `provision`  gets QEMU, kernels and their headers from Debian's archive
//! - `cli`        the `guest` command, shared by xtask and the bundle
//!
//! ```no_run
//! # fn main() -> anyhow::Result<()> {
//! use nvguest_rig::{Host, Rig};
//! let rig = Rig::builder().kernel("6.12").guests(2).host(Host::Sim).boot()?;
//! let output = rig.guest(0).run(["rmprobe", "--json"])?;
//! assert!(output.success(), "{output}");
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod accel;
pub mod assets;
mod channel;
pub mod cli;
pub mod cpio;
mod guest;
pub mod image;
pub mod nvidia;
pub mod process;
pub mod proto;
pub mod provision;
mod qemu;
pub mod qmp;
mod rig;

pub use accel::Accel;
pub use assets::Assets;
pub use channel::Event;
pub use guest::{Command, Guest, Output, Process};
pub use rig::{Builder, Host, Rig};
