//! Every memory type.

use std::sync::Arc;

use super::pattern;
use crate::checks::{Checks, Seen};
use crate::error::Result;
use crate::vk::{Buffer, Commands, Device, Memory, MemoryPropertyFlags as Flags, MemoryType, Wish};

/// Bytes that are allocated of each.
const SIZE: u64 = 1 << 20;

/// Flags that have a name, and types that have any other need a feature that is not asked for.
const NAMED: [(Flags, &str); 5] = [
    (Flags::DEVICE_LOCAL, "DEVICE_LOCAL"),
    (Flags::HOST_VISIBLE, "HOST_VISIBLE"),
    (Flags::HOST_COHERENT, "HOST_COHERENT"),
    (Flags::HOST_CACHED, "HOST_CACHED"),
    (Flags::LAZILY_ALLOCATED, "LAZILY_ALLOCATED"),
];

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    for kind in device.memory_types() {
        checks.run(&format!("memory-type-{}", kind.index), || check_type(device, &kind));
    }
}

fn check_type(device: &Arc<Device>, kind: &MemoryType) -> Result<Seen> {
    let about = format!("heap {}, {}", kind.heap, name(kind.flags));
    let known = NAMED.iter().fold(Flags::empty(), |all, (flag, _)| all | *flag);
    if !known.contains(kind.flags) {
        return Ok(Seen::Nothing(format!("{about}: needs a feature that is not asked for")));
    }
    let is_visible = kind.flags.contains(Flags::HOST_VISIBLE);
    if Buffer::types(device, SIZE)? & (1 << kind.index) == 0 {
        let memory = Memory::new(device, SIZE, kind)?;
        if !is_visible {
            return Ok(Seen::Same(format!("{about}: allocated; no buffer can lie in it")));
        }
        let words = pattern(kind.index, SIZE as usize);
        memory.write(&words)?;
        let read = memory.read(words.len())?;
        return Ok(Seen::words(&format!("{about}: written and read by the host"), &words, &read));
    }
    let by_device = through_device(device, kind)?;
    if !is_visible || !matches!(by_device, Seen::Same(_)) {
        return Ok(match by_device {
            Seen::Same(what) => Seen::Same(format!("{about}: {what}")),
            other => other,
        });
    }
    through_host(device, kind, &about)
}

/// The device fills it and copies it to where the host looks.
fn through_device(device: &Arc<Device>, kind: &MemoryType) -> Result<Seen> {
    let words = pattern(kind.index + 1, SIZE as usize);
    let from = Buffer::holding(device, &words)?;
    let buffer = Buffer::new(device, SIZE, Wish::Type(kind.index))?;
    let back = Buffer::new(device, SIZE, Wish::Host)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.copy(&from, &buffer);
        recorder.copy(&buffer, &back);
    })?;
    Ok(Seen::words("written and read by the device", &words, &back.read()?))
}

/// The host writes and the device reads; the device writes and the host reads.
fn through_host(device: &Arc<Device>, kind: &MemoryType, about: &str) -> Result<Seen> {
    let words = pattern(kind.index + 2, SIZE as usize);
    let buffer = Buffer::new(device, SIZE, Wish::Type(kind.index))?;
    let far = Buffer::new(device, SIZE, Wish::Device)?;
    buffer.write(&words)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.copy(&buffer, &far);
        recorder.fill(&buffer, 0x5a5a_5a5a);
    })?;
    let filled = Seen::words("", &vec![0x5a; words.len()], &buffer.read()?);
    if filled != Seen::Same(String::new()) {
        return Ok(filled);
    }
    Commands::run(device, &device.graphics, |recorder| recorder.copy(&far, &buffer))?;
    let what = format!("{about}: written and read by the device and the host");
    Ok(Seen::words(&what, &words, &buffer.read()?))
}

fn name(flags: Flags) -> String {
    let names: Vec<&str> =
        NAMED.iter().filter(|(flag, _)| flags.contains(*flag)).map(|(_, name)| *name).collect();
    if names.is_empty() {
        "no flags".to_owned()
    } else {
        names.join("|")
    }
}
