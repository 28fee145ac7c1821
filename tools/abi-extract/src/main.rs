//! Measures the kernel interface of NVIDIA's driver releases from their own open sources: the
//! command. The library beside it does the work.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::Instant;

use abi_extract::{args, folder, history, measure, show, tree};
use anyhow::{bail, Result};
use clap::Parser;
use nvguest_abi::profile::Profile;
use nvguest_abi::release::Release;
use nvguest_abi::store::Store;

fn main() -> ExitCode {
    match run(args::Cli::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("abi-extract: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: args::Cli) -> Result<()> {
    match cli.command {
        None => run_measure(&cli.measure),
        Some(args::Command::Diff { old, new, profiles }) => {
            let store = store(profiles.as_deref())?;
            print(&show::difference(&load(&store, &old)?, &load(&store, &new)?))
        }
        Some(args::Command::Show { release, what, profiles }) => {
            let profile = load(&store(profiles.as_deref())?, &release)?;
            print(&show::profile(&profile, what.as_deref())?)
        }
        Some(args::Command::History { profiles }) => {
            print(&history::document(&store(profiles.as_deref())?)?)
        }
    }
}

fn store(folder: Option<&Path>) -> Result<Store> {
    Ok(match folder {
        Some(folder) => Store::from_dir(folder)?,
        None => Store::embedded()?,
    })
}

fn print(text: &str) -> Result<()> {
    match std::io::stdout().write_all(text.as_bytes()) {
        // Who reads may have had enough.
        Err(error) if error.kind() != std::io::ErrorKind::BrokenPipe => Err(error.into()),
        _ => Ok(()),
    }
}

/// A release's profile under its own name, also where the file is an equal release's.
fn load(store: &Store, release: &Release) -> Result<Profile> {
    Ok(Profile { release: release.to_string(), ..store.load(release)? })
}

fn run_measure(args: &args::Measure) -> Result<()> {
    match (&args.git, &args.from) {
        (Some(repository), None) => measure_tags(repository, args),
        (None, Some(tree)) => measure_tree(tree, args),
        _ => bail!("nothing to measure; give --git REPO or --from TREE"),
    }
}

fn measure_tree(tree: &Path, args: &args::Measure) -> Result<()> {
    let started = Instant::now();
    let profile = measure::measure(&tree::Tree::from_dir(tree)?)?;
    eprintln!("{}", summary(&profile, started));
    if !args.check {
        eprintln!("{}: {}", profile.release, folder::add(&args.out, &profile)?);
        return Ok(());
    }
    let known = Store::from_dir(&args.out)?.load(&profile.release.parse()?)?;
    if folder::same(&known, &profile) {
        eprintln!("{}: 0 differences", profile.release);
        return Ok(());
    }
    print!("{}", show::difference(&known, &profile));
    bail!("{}: the folder says otherwise", profile.release)
}

fn measure_tags(repository: &Path, args: &args::Measure) -> Result<()> {
    let started = Instant::now();
    let tags: Vec<String> = tree::tags(repository)?
        .into_iter()
        .filter(|tag| tag.parse().is_ok_and(|release| args.tags.has(&release)))
        .collect();
    if tags.is_empty() {
        bail!("{} has no tag that is meant", repository.display());
    }
    let profiles = measure_all(repository, &tags, args.jobs.max(1))?;
    let files = folder::build(&profiles)?;
    let bytes: usize = files.values().map(String::len).sum();
    let differences = if args.check {
        folder::differences(&args.out, &files)?
    } else {
        folder::write(&args.out, &files)?;
        Vec::new()
    };
    for difference in &differences {
        println!("{difference}");
    }
    println!(
        "{} releases, {} distinct profiles, {bytes} bytes, {} differences, {:.0} s",
        profiles.len(),
        files.len() - 1,
        differences.len(),
        started.elapsed().as_secs_f64(),
    );
    if !differences.is_empty() {
        bail!("{} does not hold what was measured", args.out.display());
    }
    Ok(())
}

/// Measures every tag, a few at a time, and gives them in the order of the tags.
fn measure_all(repository: &Path, tags: &[String], jobs: usize) -> Result<Vec<Profile>> {
    let next = Mutex::new(0..tags.len());
    let done = Mutex::new(vec![None; tags.len()]);
    let one = |index: usize| -> Result<Profile> {
        let tag = &tags[index];
        let started = Instant::now();
        let tree = tree::Tree::from_git(repository, tag)?;
        let profile = measure::measure(&tree)?;
        if profile.release != *tag {
            bail!("its version.mk says {}", profile.release);
        }
        eprintln!("[{}/{}] {}", index + 1, tags.len(), summary(&profile, started));
        Ok(profile)
    };
    let work = || {
        while let Some(index) = take(&next) {
            match one(index) {
                Ok(profile) => lock(&done)[index] = Some(profile),
                Err(error) => {
                    eprintln!("[{}/{}] {}: {error:#}", index + 1, tags.len(), tags[index])
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(work);
        }
    });
    let done = done.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    let failed: Vec<&str> =
        tags.iter().zip(&done).filter(|(_, p)| p.is_none()).map(|(t, _)| t.as_str()).collect();
    if !failed.is_empty() {
        bail!(
            "{} of {} releases could not be measured: {}",
            failed.len(),
            tags.len(),
            failed.join(" ")
        );
    }
    Ok(done.into_iter().flatten().collect())
}

fn take(next: &Mutex<std::ops::Range<usize>>) -> Option<usize> {
    lock(next).next()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn summary(profile: &Profile, started: Instant) -> String {
    format!(
        "{:<11} {:4.1} s  {} controls, {} classes, {} escapes, {} UVM, {} NVKMS, {} DRM commands",
        profile.release,
        started.elapsed().as_secs_f64(),
        profile.controls.len(),
        profile.classes.len(),
        profile.escapes.len(),
        profile.uvm.len(),
        profile.nvkms.len(),
        profile.drm.len(),
    )
}
