//! The default mode: a load, measured.

use std::fmt::Write as _;
use std::fs;
use std::time::Duration;

use serde::Serialize;

use crate::args::{Args, Load as Options, Wait};
use crate::calibrate::{calibrate, Point};
use crate::error::{Result, Tried};
use crate::frames::{self, Frame, Plan, Run};
use crate::load::Load;
use crate::report;
use crate::setup::Setup;
use crate::stats::{self, Stats};
use crate::sys;
use crate::vk::Physical;

/// What is said of a run. Times are milliseconds unless their names say otherwise.
#[derive(Debug, Serialize)]
struct Summary<'a> {
    device: &'a Physical,
    width: u32,
    height: u32,
    cost: u32,
    passes: u32,
    calibrated_ms: Option<f64>,
    frames_in_flight: u32,
    wait: &'static str,
    target_fps: Option<f64>,
    warmup_frames: usize,
    frames: usize,
    seconds: f64,
    fps: f64,
    frame_ms: Option<Stats>,
    submit_ms: Option<Stats>,
    gpu_ms: Option<f64>,
    late_frames: Option<usize>,
    cpu_s: f64,
    cpu_s_total: f64,
    interrupted: bool,
}

/// What a run came to.
struct Measured {
    /// Frames before those that count.
    warm: usize,
    /// What calibration found.
    found: Option<Point>,
    run: Run,
}

/// Draws, and says how long it took.
pub fn bench(setup: &Setup, args: &Args) -> Result<()> {
    let options = &args.load;
    let measured = measure(setup, options, args.json)?;
    if let Some(path) = &options.csv {
        let text = csv(&measured.run.frames);
        fs::write(path, text).tried(format!("write {}", path.display()))?;
    }
    let summary = summarise(setup, options, &measured)?;
    if args.json {
        return report::json(&summary);
    }
    tell(&summary);
    Ok(())
}

fn measure(setup: &Setup, options: &Options, quiet: bool) -> Result<Measured> {
    let Options { cost, wait, .. } = *options;
    let mut load = Load::new(&setup.device, options)?;
    let plan = Plan { time: options.warmup, frames: usize::MAX, period: None, wait };
    let warm = frames::draw(&mut load, &plan)?.frames.len();
    let target = options.calibrate;
    let found = target.map(|ms| calibrate(&mut load, ms, cost, wait)).transpose()?;
    if let Some(point) = found.filter(|_| !quiet) {
        report::line(format_args!("cost       {} takes {:.3} ms a frame", point.cost, point.ms));
    }
    if options.barrier {
        barrier()?;
    }
    sys::catch_stop()?;
    let period = options.fps.map(|fps| Duration::from_secs_f64(1.0 / fps));
    let run = frames::draw(&mut load, &Plan { time: options.seconds, period, ..plan })?;
    Ok(Measured { warm, found, run })
}

/// Says that all is ready and waits for a line.
fn barrier() -> Result<()> {
    report::line(format_args!("ready"));
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).map(drop).tried("wait for a line on standard input")
}

fn summarise<'a>(setup: &'a Setup, options: &Options, measured: &Measured) -> Result<Summary<'a>> {
    let Measured { warm, found, run } = measured;
    let frames = &run.frames;
    let seconds = run.time.as_secs_f64();
    // CAST: a float is exact for more frames than any run has.
    let fps = frames.len() as f64 / seconds;
    Ok(Summary {
        device: &setup.device.physical,
        width: options.width,
        height: options.height,
        cost: found.map_or(options.cost, |it| it.cost),
        passes: options.passes,
        calibrated_ms: found.map(|it| it.ms),
        frames_in_flight: options.frames_in_flight,
        wait: match options.wait {
            Wait::Block => "block",
            Wait::Spin => "spin",
        },
        target_fps: options.fps,
        warmup_frames: *warm,
        frames: frames.len(),
        seconds,
        fps,
        frame_ms: Stats::of(frames.iter().map(|it| it.wall.as_secs_f64() * 1e3)),
        submit_ms: Stats::of(frames.iter().map(|it| it.submit.as_secs_f64() * 1e3)),
        gpu_ms: stats::mean(frames.iter().filter_map(|it| it.gpu_ms)),
        late_frames: options.fps.map(|_| frames.iter().filter(|it| it.late).count()),
        cpu_s: run.cpu.as_secs_f64(),
        cpu_s_total: sys::cpu_time()?.as_secs_f64(),
        interrupted: sys::stopped(),
    })
}

fn tell(it: &Summary<'_>) {
    report::device(it.device);
    report::line(format_args!(
        "load       {}x{}, cost {} in {} passes, {} in flight, wait: {}",
        it.width, it.height, it.cost, it.passes, it.frames_in_flight, it.wait
    ));
    report::line(format_args!("warm-up    {} frames, left out", it.warmup_frames));
    let early = if it.interrupted { ", ended early" } else { "" };
    report::line(format_args!(
        "frames     {} in {:.3} s{early}, {:.2} fps",
        it.frames, it.seconds, it.fps
    ));
    if let Some(stats) = &it.frame_ms {
        report::line(format_args!("frame ms   {}", report::stats(stats)));
    }
    if let Some(stats) = &it.submit_ms {
        report::line(format_args!("submit ms  {}", report::stats(stats)));
    }
    if let Some(ms) = it.gpu_ms {
        report::line(format_args!("gpu ms     mean {ms:.3}"));
    }
    if let (Some(late), Some(fps)) = (it.late_frames, it.target_fps) {
        report::line(format_args!("late       {late} of {} at {fps} fps", it.frames));
    }
    report::line(format_args!(
        "cpu s      {:.3} in the run, {:.3} since the process began",
        it.cpu_s, it.cpu_s_total
    ));
}

fn csv(frames: &[Frame]) -> String {
    let mut text = String::from("frame,begin_ms,frame_ms,submit_ms,gpu_ms,late\n");
    for (index, frame) in frames.iter().enumerate() {
        let ms = |time: Duration| time.as_secs_f64() * 1e3;
        let gpu = frame.gpu_ms.map(|it| format!("{it:.6}")).unwrap_or_default();
        let late = u8::from(frame.late);
        let (begin, wall, submit) = (ms(frame.begin), ms(frame.wall), ms(frame.submit));
        // PANIC: writing to a String cannot fail; the result is of no interest.
        let _ = writeln!(text, "{index},{begin:.6},{wall:.6},{submit:.6},{gpu},{late}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_frame_is_a_line_with_what_is_known_of_it() {
        let ms = Duration::from_millis;
        let frames = [
            Frame { begin: ms(0), wall: ms(4), submit: ms(1), gpu_ms: Some(3.5), late: false },
            Frame { begin: ms(10), wall: ms(12), submit: ms(2), gpu_ms: None, late: true },
        ];
        let text = csv(&frames);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[1], "0,0.000000,4.000000,1.000000,3.500000,0");
        assert_eq!(lines[2], "1,10.000000,12.000000,2.000000,,1");
    }
}
