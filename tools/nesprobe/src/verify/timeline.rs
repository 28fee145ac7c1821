//! Timeline semaphores, and a wait that sleeps.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::checks::{Checks, Seen};
use crate::error::Result;
use crate::sys;
use crate::vk::{Device, Fence, Timeline, Waited};

/// Within which anything that is to come has come.
const LIMIT: Duration = Duration::from_secs(30);

/// How long nothing is let come.
const PAUSE: Duration = Duration::from_millis(300);

/// Steps of the walk that host and device take by turns.
const STEPS: u64 = 64;

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    checks.run("timeline-device", || from_device(device));
    checks.run("timeline-host", || from_host(device));
    checks.run("timeline-turns", || by_turns(device));
    checks.run("fence-sleep", || sleeps(device));
}

fn from_device(device: &Arc<Device>) -> Result<Seen> {
    let timeline = Timeline::new(device, 1)?;
    timeline.pass(&device.graphics, 1, 7, None)?;
    let got = format!("{:?} at {}", timeline.wait_for(7, LIMIT)?, timeline.value()?);
    let expected = format!("{:?} at 7", Waited::Signalled);
    Ok(Seen::equal("signalled by the device, waited for by the host", expected, got))
}

/// The device waits for the host: before its signal nothing happens, after it everything.
fn from_host(device: &Arc<Device>) -> Result<Seen> {
    let timeline = Timeline::new(device, 0)?;
    timeline.pass(&device.graphics, 1, 2, None)?;
    let early = timeline.wait_for(2, PAUSE / 3);
    timeline.signal(1)?;
    let got = format!("{:?}, {:?} at {}", early?, timeline.wait_for(2, LIMIT)?, timeline.value()?);
    let expected = format!("{:?}, {:?} at 2", Waited::Late, Waited::Signalled);
    Ok(Seen::equal("signalled by the host, waited for by the device", expected, got))
}

/// Each step of the host lets the device take one.
fn by_turns(device: &Arc<Device>) -> Result<Seen> {
    let timeline = Timeline::new(device, 0)?;
    for step in 0..STEPS {
        timeline.pass(&device.graphics, step * 2 + 1, step * 2 + 2, None)?;
        timeline.signal(step * 2 + 1)?;
        if timeline.wait_for(step * 2 + 2, LIMIT)? == Waited::Late {
            break;
        }
    }
    let what = format!("host and device by turns, {STEPS} steps each");
    Ok(Seen::equal(&what, STEPS * 2, timeline.value()?))
}

/// A wait of 300 ms takes next to no processor time.
fn sleeps(device: &Arc<Device>) -> Result<Seen> {
    let timeline = Timeline::new(device, 0)?;
    let mut fence = Fence::new(device)?;
    timeline.pass(&device.graphics, 1, 2, Some(&mut fence))?;
    let (time, cpu) = thread::scope(|scope| {
        let signaller = scope.spawn(|| {
            thread::sleep(PAUSE);
            timeline.signal(1)
        });
        let (begin, cpu) = (Instant::now(), sys::thread_time());
        let waited = fence.wait();
        let (time, cpu) = (begin.elapsed(), sys::thread_time()?.saturating_sub(cpu?));
        // PANIC: the thread has nothing that panics; if it did, so should we.
        signaller.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        waited.map(|()| (time, cpu))
    })?;
    if time < PAUSE / 2 {
        return Ok(Seen::Differs {
            expected: format!("a wait of {PAUSE:?}"),
            got: format!("one of {time:?}"),
        });
    }
    if cpu > time / 2 {
        return Ok(Seen::Differs {
            expected: "a wait that sleeps".to_owned(),
            got: format!("{cpu:?} of processor time in a wait of {time:?}"),
        });
    }
    Ok(Seen::Same("the wait for a fence sleeps".to_owned()))
}
