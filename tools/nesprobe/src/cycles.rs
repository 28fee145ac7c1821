//! `--cycles`: what making and destroying devices leaves behind.

use serde::Serialize;

use crate::error::Result;
use crate::report;
use crate::setup::Setup;
use crate::sys::{self, Holdings};
use crate::vk::{Commands, Device, Physical, Queues};

/// One device of so many has every queue that it can have; the others have one, and take less time.
const EVERY_QUEUE: u32 = 8;

/// What the process held. The first cycle fills what the driver keeps for good; what grows from
/// then on is lost.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    device: &'a Physical,
    cycles: u32,
    start: Holdings,
    after_first: Holdings,
    end: Holdings,
}

/// Makes a logical device, has it do something and destroys it, again and again, until it is asked
/// to end.
pub fn cycles(setup: Setup, count: u32, as_json: bool) -> Result<()> {
    let Setup { instance, device, .. } = setup;
    let physical = device.physical.clone();
    drop(device);
    sys::catch_stop()?;
    let start = sys::holdings()?;
    let mut made = 0;
    let mut after_first = start;
    for turn in 1..=count {
        let queues = if turn % EVERY_QUEUE == 1 { Queues::Every } else { Queues::Graphics };
        let device = Device::open(&instance, &physical, queues)?;
        Commands::run(&device, &device.graphics, |_| ())?;
        drop(device);
        if turn == 1 {
            after_first = sys::holdings()?;
        }
        if turn % count.div_ceil(100) == 0 || turn == count {
            eprintln!("nesprobe: {turn} of {count}");
        }
        made = turn;
        if sys::stopped() {
            break;
        }
    }
    let end = sys::holdings()?;
    let summary = Summary { device: &physical, cycles: made, start, after_first, end };
    if as_json {
        return report::json(&summary);
    }
    report::device(&physical);
    report::line(format_args!("{made} devices made and destroyed"));
    for (when, it) in [("start", start), ("after one", after_first), ("end", end)] {
        let Holdings { fds, maps, rss_kib } = it;
        report::line(format_args!("{when:<9}  fds {fds}  maps {maps}  rss {rss_kib} KiB"));
    }
    Ok(())
}
