//! Runs the fuzz targets of `tests/fuzz`, on the stable compiler.
//!
//! What `cargo fuzz` does with a nightly one: the code is built with LLVM's coverage counters
//! and AddressSanitizer, which stable compilers have and only hide, and linked with libFuzzer.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};

use anyhow::{bail, Context, Result};
use clap::Args;
use nvguest_rig::provision::{provide_fuzzing, step};

use crate::prepare::{cargo, root, run};

/// What the flags below are for; the target is named so that build scripts go without them.
const TARGET: &str = "x86_64-unknown-linux-gnu";
const FLAGS: [&str; 7] = [
    "--cfg fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
];
/// Bytes of an input at most.
const MAX_INPUT: &str = "-max_len=8192";

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
}

/// Runs some targets, or all.
pub fn fuzz(args: &FuzzArgs) -> Result<ExitCode> {
    let all = targets()?;
    if let Some(unknown) = args.targets.iter().find(|&name| !all.contains(name)) {
        bail!("there is no target {unknown}; there are {}", all.join(", "));
    }
    let chosen = if args.targets.is_empty() { &all } else { &args.targets };
    build()?;
    for target in chosen {
        live(target, args.seconds)?;
        if args.keep {
            step(&format!("keep what {target} found"), || keep(target))?;
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// Runs every target for a moment, as a part of the tests.
pub fn briefly(seconds: u64) -> Result<()> {
    build()?;
    targets()?.iter().try_for_each(|target| live(target, seconds))
}

fn targets() -> Result<Vec<String>> {
    let folder = root().join("tests/fuzz/fuzz/fuzz_targets");
    let entries = folder.read_dir().with_context(|| format!("read {}", folder.display()))?;
    let name = |path: PathBuf| Some(path.file_stem()?.to_string_lossy().into_owned());
    let mut names: Vec<String> = entries.flatten().filter_map(|entry| name(entry.path())).collect();
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
        let words = ["build", "--quiet", "--release", "--bins", "--target", TARGET];
        let mut command = cargo(&words);
        command.args(["--manifest-path", manifest, "--target-dir"]).arg(place(""));
        // A compiler that is told so believes itself a nightly one.
        run(command.env("RUSTC_BOOTSTRAP", "1").env("RUSTFLAGS", FLAGS.join(" ")))
    })
}

/// libFuzzer's program for a target.
fn program(target: &str) -> Command {
    let mut command = Command::new(place(TARGET).join("release").join(target));
    // The targets' processes live for the whole run, and what they keep is no leak.
    command.env("ASAN_OPTIONS", "detect_leaks=0:detect_odr_violation=0").stdin(Stdio::null());
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
    step(&format!("fuzz {target} for {seconds} s"), || {
        let output = program(target)
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
        println!("    {}", summary(&text));
        Ok(())
    })
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
    let mut command = program(target);
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
    fn every_target_has_a_corpus() {
        for target in targets().unwrap() {
            assert!(corpus(&target).is_dir(), "{target}");
        }
    }
}
