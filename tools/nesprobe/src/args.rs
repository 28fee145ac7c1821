//! The command line, and nothing else.

use std::path::PathBuf;
use std::time::Duration;

use clap::{ArgGroup, Parser, ValueEnum};

/// A calibrated load for a card, and checks of what it answers; without a screen.
#[derive(Debug, Clone, Parser)]
#[command(version, after_help = AFTER, group = ArgGroup::new("mode"))]
pub struct Args {
    /// The device: its number, a part of its name, or its UUID; else the first that is no software
    #[arg(long, value_name = "N|NAME|UUID")]
    pub device: Option<String>,

    /// One JSON object on the last line of standard output, instead of text
    #[arg(long)]
    pub json: bool,

    /// Name the devices
    #[arg(long, group = "mode", help_heading = "Modes")]
    pub list: bool,

    /// Check drawing, depth, blending, compute, copies, memory, timelines and sharing, by value
    #[arg(long, group = "mode", help_heading = "Modes")]
    pub verify: bool,

    /// Check drawing with OpenGL through EGL, by value; knows devices by number and name
    #[arg(long, group = "mode", help_heading = "Modes")]
    pub gl: bool,

    /// Make N logical devices, one after another, and say what the process holds before and after
    #[arg(long, value_name = "N", group = "mode", help_heading = "Modes")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub cycles: Option<u32>,

    /// Time N submissions without work, each waited for
    #[arg(long, value_name = "N", group = "mode", help_heading = "Modes")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    pub latency: Option<u32>,

    /// The load's options.
    #[command(flatten)]
    pub load: Load,

    /// The other process of a check of --verify.
    #[arg(long, hide = true, group = "mode")]
    pub import: bool,
}

/// What is drawn, for how long and how often.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Load")]
pub struct Load {
    /// Dependent steps of arithmetic for each pixel of a pass
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub cost: u32,

    /// Draw the picture so many times a frame, each time at the cost and when the last is done;
    /// a card that several programs use goes from one to another only where a draw ends
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub passes: u32,

    /// Find the cost whose median frame takes MS, within 1 %, then run with it
    #[arg(long, value_name = "MS", value_parser = positive, conflicts_with = "mode")]
    pub calibrate: Option<f64>,

    /// Width of the picture
    #[arg(long, value_name = "PIXELS", default_value_t = 1920)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub width: u32,

    /// Height of the picture
    #[arg(long, value_name = "PIXELS", default_value_t = 1080)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16384))]
    pub height: u32,

    /// How long to measure
    #[arg(long, value_name = "S", default_value = "10", value_parser = seconds)]
    pub seconds: Duration,

    /// How long to draw before that; these frames are counted and left out
    #[arg(long, value_name = "S", default_value = "1", value_parser = seconds)]
    pub warmup: Duration,

    /// Begin so many frames a second instead of one after another; a frame that is not done when
    /// the next is due is late
    #[arg(long, value_name = "N", value_parser = positive)]
    pub fps: Option<f64>,

    /// Frames that may be submitted and not done
    #[arg(long, value_name = "N", default_value_t = 1)]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=16))]
    pub frames_in_flight: u32,

    /// How to wait for a frame: in one vkWaitForFences, or by asking again and again
    #[arg(
        long,
        value_name = "block|spin",
        value_enum,
        default_value_t,
        hide_possible_values = true
    )]
    pub wait: Wait,

    /// Write every measured frame to a file
    #[arg(long, value_name = "FILE", conflicts_with = "mode")]
    pub csv: Option<PathBuf>,

    /// When warm and calibrated print `ready`, then wait for a line on standard input
    #[arg(long, conflicts_with = "mode")]
    pub barrier: bool,
}

/// How to wait for a frame.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Wait {
    /// In one vkWaitForFences.
    #[default]
    Block,
    /// With vkGetFenceStatus, again and again.
    Spin,
}

const AFTER: &str = "\
Unless a mode is named, a triangle is drawn over a whole off-screen picture again and again, one
frame at a time. A frame lasts from its submission until its fence was seen signalled. Once warm it
is a vkQueueSubmit, a vkWaitForFences and a vkResetFences: nothing is made, recorded or allocated.
Ctrl-C ends the run early and prints what was measured.

Examples:
  nesprobe --calibrate 10 --seconds 30 --csv frames.csv   a load of 10 ms a frame
  nesprobe --cost 5000 --fps 60                           a paced load; counts late frames
  nesprobe --verify > here.txt                            text to compare with another machine's

Exit status:
  0  all went well
  1  a check failed, or a call did
  2  the command line makes no sense here
  3  there is no Vulkan loader, no EGL, or no device

Columns of --csv: frame, begin_ms since the run began, frame_ms from submission to fence, gpu_ms by
the card's own clock (empty if it has none), late (0 or 1).";

fn positive(text: &str) -> Result<f64, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    let fits = (1e-3..=1e6).contains(&number);
    fits.then_some(number).ok_or_else(|| "must be between 0.001 and 1000000".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number of seconds".to_owned())?;
    let fits = (0.0..=1e6).contains(&number);
    let wrong = || "must be between 0 and 1000000 seconds".to_owned();
    fits.then(|| Duration::from_secs_f64(number)).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(line: &str) -> Result<Args, clap::Error> {
        Args::try_parse_from(std::iter::once("nesprobe").chain(line.split_whitespace()))
    }

    #[test]
    fn the_command_line_is_well_formed() {
        use clap::CommandFactory;
        Args::command().debug_assert();
    }

    #[test]
    fn the_options_are_those_that_testers_know() {
        let line = "--device 1 --cost 7 --width 640 --height 480 --seconds 0.5 --warmup 0 \
                    --fps 59.94 --frames-in-flight 2 --wait spin --json";
        let args = parse(line).unwrap();
        assert_eq!(args.device.as_deref(), Some("1"));
        assert_eq!((args.load.width, args.load.height, args.load.cost), (640, 480, 7));
        assert_eq!(args.load.seconds, Duration::from_millis(500));
        assert_eq!(args.load.warmup, Duration::ZERO);
        assert_eq!((args.load.frames_in_flight, args.load.wait), (2, Wait::Spin));
    }

    #[test]
    fn two_modes_at_once_are_refused() {
        assert!(parse("--verify --gl").is_err());
        assert!(parse("--latency 5 --cycles 5").is_err());
    }

    #[test]
    fn options_of_the_load_alone_are_refused_in_a_mode() {
        assert!(parse("--verify --csv frames.csv").is_err());
        assert!(parse("--latency 5 --barrier").is_err());
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        for line in
            ["--fps 0", "--fps nan", "--fps 1e-300", "--calibrate -1", "--seconds -1", "--width 0"]
        {
            assert!(parse(line).is_err(), "{line}");
        }
        assert!(parse("--frames-in-flight 17").is_err());
    }
}
