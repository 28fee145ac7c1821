//! How things are said on standard output.

use std::fmt::Arguments;
use std::io::{stdout, Write};

use serde::Serialize;

use crate::error::{Result, Tried};
use crate::stats::Stats;
use crate::vk::Physical;

/// One line, seen at once by whoever reads a pipe. A reader that has gone is no error.
pub fn line(text: Arguments<'_>) {
    let mut out = stdout().lock();
    let _ = writeln!(out, "{text}").and_then(|()| out.flush());
}

/// One line of JSON.
pub fn json(value: &impl Serialize) -> Result<()> {
    let text = serde_json::to_string(value).tried("write JSON")?;
    line(format_args!("{text}"));
    Ok(())
}

/// What is worked on.
pub fn device(it: &Physical) {
    line(format_args!("device     {} ({})", it.name, it.uuid));
    line(format_args!("driver     {}, Vulkan {}", it.driver, it.vulkan));
}

/// The devices, one a line.
pub fn devices(all: &[Physical]) {
    for it in all {
        line(format_args!(
            "{}  {}  {}  {}  Vulkan {}  {} MiB  {}",
            it.index, it.name, it.kind, it.driver, it.vulkan, it.memory_mib, it.uuid
        ));
    }
}

/// Mean, percentiles and the greatest, without the unit.
pub fn stats(it: &Stats) -> String {
    format!(
        "mean {:.3}  p50 {:.3}  p90 {:.3}  p99 {:.3}  p99.9 {:.3}  max {:.3}",
        it.mean, it.p50, it.p90, it.p99, it.p999, it.max
    )
}
