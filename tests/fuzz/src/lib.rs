//! What is fuzzed: every parser of untrusted bytes, each as a function of bytes.
//!
//! A target fails by panicking. `tests/replay.rs` runs the corpora through them without
//! any fuzzer; `fuzz/` has a libFuzzer program for each, which `cargo xtask fuzz` runs.
//!
//! - [`input`]: bytes as a script of small decisions
//! - [`profiles`]: the measured profiles, for those that need one
//!
//! Of a guest:
//! - [`chain`]: virtqueues in its memory
//! - [`broker`]: what it asks on queue 0
//! - [`message`]: what a process of it asks its worker
//! - [`marshal`]: an ioctl on its way to the driver
//! - [`policy`]: verdicts and answers
//! - [`pages`]: memory that a program of it registers
//! - [`interpreters`]: the schema as the guest module follows it, and as Rust does
//!
//! Of a worker that is no more what it was:
//! - [`link`]: how it writes to its broker, and [`worker`]: what; [`hostile`] is the broker
//! - [`page`]: what it left behind
//! - [`window`]: in which order it, and its guest, let go
//!
//! Of an admin:
//! - [`admin`]: what is asked and set
//!
//! Of a broker:
//! - [`schema`]: gather rules, and the blob they come in
//! - [`start`]: what it tells a worker first

pub mod admin;
pub mod broker;
pub mod chain;
pub mod hostile;
pub mod input;
pub mod interpreters;
pub mod link;
pub mod marshal;
pub mod message;
pub mod page;
pub mod pages;
pub mod policy;
pub mod profiles;
pub mod schema;
pub mod start;
pub mod window;
pub mod worker;

/// A target and its name, which is its corpus's too.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// Its name.
    pub name: &'static str,
    /// Panics if the bytes do what none may.
    pub run: fn(&[u8]),
}

/// Every target.
pub const TARGETS: [Target; 14] = [
    Target { name: "admin", run: admin::run },
    Target { name: "broker", run: broker::run },
    Target { name: "chain", run: chain::run },
    Target { name: "interpreters", run: interpreters::run },
    Target { name: "link", run: link::run },
    Target { name: "marshal", run: marshal::run },
    Target { name: "message", run: message::run },
    Target { name: "page", run: page::run },
    Target { name: "pages", run: pages::run },
    Target { name: "policy", run: policy::run },
    Target { name: "schema", run: schema::run },
    Target { name: "start", run: start::run },
    Target { name: "window", run: window::run },
    Target { name: "worker", run: worker::run },
];
