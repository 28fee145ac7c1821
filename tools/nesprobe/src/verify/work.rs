//! Compute and copies, on each kind of queue.

use std::sync::Arc;

use super::pattern;
use crate::checks::{Checks, Seen};
use crate::error::Result;
use crate::picture::SIZE;
use crate::shaders;
use crate::vk::{Buffer, Commands, Compute, Device, Queue, Target, Wish};

/// Words that are computed.
const WORDS: usize = 1 << 18;

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    checks.run("compute", || compute(device, &device.graphics));
    checks.run("compute-queue", || match &device.compute {
        Some(queue) => compute(device, queue),
        None => Ok(Seen::Nothing("no family of queues computes and does not draw".to_owned())),
    });
    checks.run("copy", || copy(device, &device.graphics));
    checks.run("copy-queue", || match &device.transfer {
        Some(queue) => copy(device, queue),
        None => Ok(Seen::Nothing("no family of queues only copies".to_owned())),
    });
    checks.run("copy-image", || copy_image(device));
}

/// What `scramble.comp` makes of a word.
fn scramble(word: u32) -> u32 {
    let step = |value: u32, _| value.wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    let value = (0..16).fold(word, step);
    value ^ (value >> 15)
}

fn compute(device: &Arc<Device>, queue: &Queue) -> Result<Seen> {
    let words = pattern(1, WORDS * 4);
    let input = Buffer::holding(device, &words)?;
    let work = Buffer::new(device, input.size(), Wish::Device)?;
    let output = Buffer::new(device, input.size(), Wish::Host)?;
    let pipeline = Compute::new(device, shaders::SCRAMBLE, &work)?;
    Commands::run(device, queue, |recorder| {
        recorder.copy(&input, &work);
        recorder.compute(&pipeline);
        recorder.copy(&work, &output);
    })?;
    let word = |it: &[u8]| u32::from_ne_bytes([it[0], it[1], it[2], it[3]]);
    let expected: Vec<u8> =
        words.chunks_exact(4).flat_map(|it| scramble(word(it)).to_ne_bytes()).collect();
    Ok(Seen::words(&format!("{WORDS} words computed"), &expected, &output.read()?))
}

fn copy(device: &Arc<Device>, queue: &Queue) -> Result<Seen> {
    let words = pattern(2, 1 << 22);
    let from = Buffer::holding(device, &words)?;
    let far = Buffer::new(device, from.size(), Wish::Device)?;
    let back = Buffer::new(device, from.size(), Wish::Host)?;
    Commands::run(device, queue, |recorder| {
        recorder.copy(&from, &far);
        recorder.copy(&far, &back);
    })?;
    Ok(Seen::words("4 MiB to the device and back", &words, &back.read()?))
}

fn copy_image(device: &Arc<Device>) -> Result<Seen> {
    // CAST: a constant, far below 2^32.
    let words = pattern(3, (SIZE * SIZE * 4) as usize);
    let from = Buffer::holding(device, &words)?;
    let back = Buffer::new(device, from.size(), Wish::Host)?;
    let target = Target::new(device, (SIZE, SIZE), false)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.write_colour(&from, &target);
        recorder.read_colour(&target, &back);
    })?;
    Ok(Seen::words("1 MiB to an image and back", &words, &back.read()?))
}
