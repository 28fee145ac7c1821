//! The vhost-user backend of nvguest; `main.rs` has the map of the house.

pub mod args;
pub mod broker;
pub mod budgets;
pub mod descriptors;
pub mod errno;
pub mod host;
pub mod limits;
pub mod log;
pub mod marshal;
pub mod policy;
pub mod profile;
pub mod rate;
pub mod sandbox;
pub mod starter;
pub mod sync;
pub mod transport;
pub mod wire;
pub mod worker;
