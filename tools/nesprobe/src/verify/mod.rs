//! `--verify`: what the device answers, by exact value.
//!
//! - [`drawing`]: pixels, edges, depth, blending
//! - [`work`]: compute and copies, on each kind of queue
//! - [`memory`]: every memory type
//! - [`timeline`]: timeline semaphores, and a wait that sleeps
//! - [`external`]: memory shared with another process
//! - [`host_memory`]: memory of this process, used by the device
//!
//! A line is the same wherever the same is seen: two machines' lines can be compared as text.

mod drawing;
pub mod external;
mod host_memory;
mod memory;
mod timeline;
mod work;

use serde::Serialize;

use crate::checks::Checks;
use crate::error::Result;
use crate::setup::Setup;
use crate::vk::Physical;

#[derive(Serialize)]
struct Header<'a> {
    device: &'a Physical,
}

/// Runs every check. Whether all went well.
pub fn verify(setup: &Setup, as_json: bool) -> Result<bool> {
    let device = &setup.device;
    let mut checks = Checks::new(as_json);
    drawing::check(device, &mut checks);
    work::check(device, &mut checks);
    memory::check(device, &mut checks);
    timeline::check(device, &mut checks);
    external::check(device, &mut checks);
    host_memory::check(device, &mut checks);
    checks.end(&Header { device: &device.physical })
}

/// Words that are all different, of so many bytes; another seed makes others.
fn pattern(seed: u32, bytes: usize) -> Vec<u8> {
    let word = |at: u32| (at ^ seed << 28).wrapping_mul(2_654_435_761).to_ne_bytes();
    (0..).map(word).take(bytes / 4).flatten().collect()
}
