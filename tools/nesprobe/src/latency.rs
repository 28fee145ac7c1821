//! `--latency`: what a submission takes that has nothing to do: its one command buffer holds a
//! barrier and no work.

use std::time::Instant;

use serde::Serialize;

use crate::error::Result;
use crate::report;
use crate::setup::Setup;
use crate::stats::Stats;
use crate::vk::{Commands, Fence, Physical};

/// Submissions before the first that counts.
const WARM_UP: u32 = 10;

#[derive(Debug, Serialize)]
struct Summary<'a> {
    device: &'a Physical,
    instance_ms: f64,
    device_ms: f64,
    first_submit_us: f64,
    submits: u32,
    submit_us: Option<Stats>,
}

/// Times submissions without work, each waited for with a fence.
pub fn latency(setup: &Setup, count: u32, as_json: bool) -> Result<()> {
    let device = &setup.device;
    let empty = Commands::record(device, &device.graphics, |_| ())?;
    let mut fence = Fence::new(device)?;
    let mut once = || {
        let begin = Instant::now();
        device.submit(&device.graphics, &empty, &mut fence)?;
        fence.wait()?;
        let time = begin.elapsed();
        fence.reset()?;
        Ok(time.as_secs_f64() * 1e6)
    };
    let first_submit_us = once()?;
    for _ in 0..WARM_UP {
        once()?;
    }
    let times: Vec<f64> = (0..count).map(|_| once()).collect::<Result<_>>()?;
    let summary = Summary {
        device: &device.physical,
        instance_ms: setup.instance_time.as_secs_f64() * 1e3,
        device_ms: setup.device_time.as_secs_f64() * 1e3,
        first_submit_us,
        submits: count,
        submit_us: Stats::of(times),
    };
    if as_json {
        return report::json(&summary);
    }
    tell(&summary);
    Ok(())
}

fn tell(it: &Summary<'_>) {
    report::device(it.device);
    report::line(format_args!(
        "set-up ms  instance {:.3}, device {:.3}",
        it.instance_ms, it.device_ms
    ));
    report::line(format_args!("first us   {:.1}", it.first_submit_us));
    if let Some(stats) = &it.submit_us {
        let text = report::stats(stats);
        report::line(format_args!("submit us  {text}  of {}", it.submits));
    }
}
