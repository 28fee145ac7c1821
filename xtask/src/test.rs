//! Runs every check and every test, guest boots included.

use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use anyhow::Result;
use clap::Args;
use nvguest_rig::provision::{provide_renderers, step};
use nvguest_rig::Assets;

use crate::fuzz;
use crate::prepare::{cargo, root, run};

/// When fuzzing is to be done, so that a slow machine has its guests booted within half an hour.
const FUZZED: Duration = Duration::from_secs(18 * 60);

/// What `cargo xtask test` can leave out.
#[derive(Debug, Args)]
pub struct TestArgs {
    /// Leave out the tests that boot guests
    #[arg(long)]
    no_guests: bool,

    /// Run only the guest tests whose name holds this text, and nothing else
    #[arg(long, value_name = "TEXT", conflicts_with = "no_guests")]
    guests: Option<String>,

    /// How long each fuzz target runs: shorter, but 10 s, where that would not be done 18 minutes
    /// from the start. 0 leaves them out
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    fuzz_seconds: u64,
}

/// Formatting, lints, unit tests, fuzz targets, the module on every kernel, guests.
pub fn test(args: &TestArgs, assets: impl FnOnce() -> Result<Assets>) -> Result<ExitCode> {
    let begin = Instant::now();
    if let Some(text) = &args.guests {
        guests(&assets()?, Some(text))?;
    } else {
        step("check formatting", || run(&mut cargo(&["fmt", "--all", "--check"])))?;
        step("check lints", || {
            let words = ["clippy", "--quiet", "--workspace", "--all-targets", "--"];
            run(cargo(&words).args(["-D", "warnings"]))
        })?;
        provide_renderers()?;
        step("run the tests that need no guest", || {
            // With a renderer installed, no test may leave itself out for want of one.
            run(cargo(&["test", "--workspace"]).env("NESPROBE_MUST_RUN", "1"))
        })?;
        step("check the guest module's interpreter in user space", || {
            run(Command::new("make").args(["-C", "guest-module", "check"]).current_dir(root()))
        })?;
        if args.fuzz_seconds > 0 {
            fuzz::briefly(args.fuzz_seconds, begin + FUZZED)?;
        }
        if !args.no_guests {
            guests(&assets()?, None)?;
        }
    }
    println!("All of it took {:.0} s.", begin.elapsed().as_secs_f64());
    Ok(ExitCode::SUCCESS)
}

/// Tests that boot guests are marked `ignore`, so that a plain `cargo test`
/// runs anywhere and says why it leaves them out.
fn guests(assets: &Assets, text: Option<&str>) -> Result<()> {
    step("run the tests that boot guests", || {
        let mut command = cargo(&["test", "--package", "nvguest-rig", "--test", "*", "--"]);
        command.args(["--ignored", "--test-threads", "1", "--nocapture"]).args(text);
        run(command.env(nvguest_rig::assets::ENV, assets.root()))
    })
}
