//! Runs the fuzz targets of `tests/fuzz`, on the stable compiler.
//!
//! What `cargo fuzz` does with a nightly one: the code is built with LLVM's coverage counters
//! and AddressSanitizer, which stable compilers have and only hide, and linked with libFuzzer.
//! All targets are one program, and as many run at a time as there are processors.
//!
//! - [`pack`]: the same for a machine without a compiler

mod pack;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::Instant;

use anyhow::{bail, Context, Result};
use clap::Args;
use nvguest_rig::provision::{provide_fuzzing, step};

use crate::prepare::{cargo, root, run, TARGET};

/// The compiler with coverage counters and AddressSanitizer for our own crates, and for those
/// that parse virtqueues and vhost-user for us.
const WRAPPER: &str = "tests/fuzz/rustc.sh";
/// Bytes of an input at most.
const MAX_INPUT: &str = "-max_len=8192";
/// Seconds of a target that are worth their start.
const LEAST: u64 = 10;

/// What to fuzz, and for how long.
#[derive(Debug, Args)]
pub struct FuzzArgs {
    /// The targets; all if none is named
    targets: Vec<String>,

    /// How long each target runs
    #[arg(long, default_value_t = 60)]
    seconds: u64,

    /// Put what found something new, or lies in target/fuzz/seeds, into the corpora
    #[arg(long)]
    keep: bool,

    /// Run nothing: pack what it takes into a folder, for a machine with more processors
    #[arg(long, value_name = "FOLDER", conflicts_with_all = ["targets", "keep"])]
    pack: Option<PathBuf>,
}

/// Runs some targets, or all.
pub fn fuzz(args: &FuzzArgs) -> Result<ExitCode> {
    let all = targets()?;
    if let Some(unknown) = args.targets.iter().find(|&name| !all.contains(name)) {
        bail!("there is no target {unknown}; there are {}", all.join(", "));
    }
    let chosen = if args.targets.is_empty() { &all } else { &args.targets };
    build()?;
    if let Some(folder) = &args.pack {
        return pack::pack(&all, folder);
    }
    at_once(chosen, args.seconds)?;
    if args.keep {
        for target in chosen {
            step(&format!("keep what {target} found"), || keep(target))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs every target for so many seconds, as a part of the tests: for fewer where that would
/// not be done in time, but not for fewer than ten.
pub fn briefly(seconds: u64, until: Instant) -> Result<()> {
    build()?;
    let targets = targets()?;
    let turns = targets.len().div_ceil(processors()).max(1) as u64;
    let left = until.saturating_duration_since(Instant::now()).as_secs();
    at_once(&targets, seconds.min(LEAST.max(left / turns)))
}

fn processors() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// Runs the targets, as many at a time as there are processors. What one finds does not keep
/// the others from running.
fn at_once(targets: &[String], seconds: u64) -> Result<()> {
    let what = format!("fuzz {} targets for {seconds} s each", targets.len());
    step(&what, || {
        let left = Mutex::new(targets.iter());
        let next = || left.lock().unwrap_or_else(PoisonError::into_inner).next();
        let run_some = || {
            let mut outcome = Ok(());
            while let Some(target) = next() {
                outcome = outcome.and(live(target, seconds));
            }
            outcome
        };
        thread::scope(|scope| {
            let runs: Vec<_> = (0..processors()).map(|_| scope.spawn(run_some)).collect();
            runs.into_iter().try_for_each(|run| {
                // PANIC: the thread's own goes on here.
                run.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            })
        })
    })
}

/// Their names: each has a corpus.
fn targets() -> Result<Vec<String>> {
    let folder = root().join("tests/fuzz/corpus");
    let entries = folder.read_dir().with_context(|| format!("read {}", folder.display()))?;
    let name = |entry: std::fs::DirEntry| entry.file_name().to_string_lossy().into_owned();
    let mut names: Vec<String> = entries.flatten().map(name).collect();
    names.sort();
    Ok(names)
}

/// Folders below `target/fuzz`: what is built, what was found, what failed.
fn place(name: &str) -> PathBuf {
    root().join("target/fuzz").join(name)
}

fn build() -> Result<()> {
    provide_fuzzing()?;
    step("build the fuzz targets", || {
        let manifest = "tests/fuzz/fuzz/Cargo.toml";
        // With a target named, build scripts go without what the wrapper adds.
        let words = ["build", "--quiet", "--release", "--bins", "--target", TARGET];
        let mut command = cargo(&words);
        command.args(["--manifest-path", manifest, "--target-dir"]).arg(place(""));
        command.env("RUSTC_WRAPPER", root().join(WRAPPER)).env("RUSTFLAGS", "--cfg fuzzing");
        // A compiler that is told so believes itself a nightly one.
        run(command.env("RUSTC_BOOTSTRAP", "1"))
    })
}

/// libFuzzer's program.
fn program() -> PathBuf {
    place(TARGET).join("release/fuzz")
}

/// libFuzzer on a target.
fn fuzzer(target: &str) -> Command {
    let mut command = Command::new(program());
    // The targets' processes live for the whole run, and what they keep is no leak.
    command.env("ASAN_OPTIONS", "detect_leaks=0:detect_odr_violation=0").stdin(Stdio::null());
    command.env("FUZZ_TARGET", target);
    command
}

fn corpus(target: &str) -> PathBuf {
    root().join("tests/fuzz/corpus").join(target)
}

fn live(target: &str, seconds: u64) -> Result<()> {
    let (found, failed) = (place("corpus").join(target), place("artifacts").join(target));
    for folder in [&found, &failed] {
        std::fs::create_dir_all(folder).with_context(|| format!("make {}", folder.display()))?;
    }
    let output = fuzzer(target)
        .arg(format!("-max_total_time={seconds}"))
        .arg(format!("-artifact_prefix={}/", failed.display()))
        .args([MAX_INPUT, "-timeout=20", "-rss_limit_mb=4096", "-print_final_stats=1"])
        .args([found, corpus(target)])
        .output()
        .with_context(|| format!("start {target}"))?;
    let text = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        bail!("{text}\n{target} failed; its input lies in {}", failed.display());
    }
    println!("  {target}: {}", summary(&text));
    Ok(())
}

/// Executions and coverage, from what libFuzzer says.
fn summary(text: &str) -> String {
    let word_after = |line: &str, what: &str| {
        let mut words = line.split_whitespace();
        words.find(|word| *word == what).and_then(|_| words.next()).map(str::to_owned)
    };
    let unknown = || "?".to_owned();
    let executed = text.lines().find_map(|l| word_after(l, "stat::number_of_executed_units:"));
    let covered = text.lines().rev().find(|line| line.contains(" cov: ")).unwrap_or_default();
    format!(
        "{} executions, {} edges, {} features",
        executed.unwrap_or_else(unknown),
        word_after(covered, "cov:").unwrap_or_else(unknown),
        word_after(covered, "ft:").unwrap_or_else(unknown),
    )
}

/// Adds to the corpus what reaches something that nothing in it reaches.
fn keep(target: &str) -> Result<()> {
    let into = corpus(target);
    std::fs::create_dir_all(&into).with_context(|| format!("make {}", into.display()))?;
    let seeds = place("seeds").join(target);
    let from = [place("corpus").join(target), seeds];
    let from = from.iter().filter(|folder: &&PathBuf| Path::exists(folder));
    let mut command = fuzzer(target);
    command.args(["-merge=1", MAX_INPUT, "-timeout=20"]).arg(into).args(from);
    run(command.stderr(Stdio::null()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_has_executions_and_coverage() {
        let text = "#8 NEW cov: 5 ft: 6 corp: 1/1b\n#9 DONE cov: 826 ft: 2337 corp: 106/953b\n\
                    stat::number_of_executed_units: 6968\n";
        assert_eq!(summary(text), "6968 executions, 826 edges, 2337 features");
        assert_eq!(summary(""), "? executions, ? edges, ? features");
    }

    #[test]
    fn the_targets_are_those_that_have_a_corpus() {
        let code = std::fs::read_to_string(root().join("tests/fuzz/src/lib.rs")).unwrap();
        for target in targets().unwrap() {
            assert!(code.contains(&format!("name: \"{target}\"")), "{target}");
        }
    }
}
