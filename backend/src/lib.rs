//! The vhost-user backend of nvguest; `main.rs` has the map of the house.
#![warn(missing_docs)]

pub mod errno;
pub mod host;
pub mod marshal;
pub mod wire;
