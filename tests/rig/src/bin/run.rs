//! `nvguest-run`: the bundle's program. It runs guests on a machine that has
//! nothing of ours but the bundle's folder.

#![forbid(unsafe_code)]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use nvguest_rig::cli::{guest, GuestArgs};
use nvguest_rig::process::capture;
use nvguest_rig::{nvidia, Assets};

/// Runs guests that share this machine's NVIDIA card, or a simulated one.
///
/// Needs an x86-64 Linux machine and root; nothing is installed. The first run
/// unpacks QEMU and a kernel beside this program.
#[derive(Debug, Parser)]
#[command(version, name = "nvguest-run")]
struct Cli {
    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Boot guests and run a command in each
    Guest(Box<GuestArgs>),
    /// Boot one guest and run nvidia-smi in it, or rmprobe without a card
    Demo,
    /// Print the path of a binary of the bundle, to run it on this machine
    Path {
        /// Its name, like rmprobe
        name: String,
    },
}

fn main() -> ExitCode {
    match act() {
        Ok(code) => code,
        Err(error) => {
            eprintln!("nvguest-run: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act() -> Result<ExitCode> {
    let cli = Cli::parse();
    let here = std::env::current_exe().context("find this program")?;
    let here = here.parent().unwrap_or(Path::new("/")).to_owned();
    let assets = Assets::at(unpacked(&here)?);
    match cli.command {
        Action::Guest(args) => guest(&assets, &args),
        Action::Demo => {
            let line = if nvidia::has_card() { "nvidia-smi" } else { "rmprobe" };
            guest(&assets, &GuestArgs::running(line))
        }
        Action::Path { name } => {
            println!("{}", assets.binary(&name).display());
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// The bundle's archives: what comes from Debian, and what is ours.
const ARCHIVES: [&str; 2] = ["system.tar.xz", "ours.tar.xz"];

/// The bundle's contents, unpacked once. The bundle carries the program that
/// unpacks them: not every machine has one for this format.
fn unpacked(here: &Path) -> Result<PathBuf> {
    let place = here.join("contents");
    let stamp = place.join("stamp");
    let identity = |name: &str| {
        let path = here.join(name);
        let meta = fs::metadata(&path).with_context(|| format!("look at {}", path.display()))?;
        Ok::<_, anyhow::Error>(format!("{name} {} {:?}\n", meta.len(), meta.modified().ok()))
    };
    let identity = ARCHIVES.into_iter().map(identity).collect::<Result<String>>()?;
    if fs::read_to_string(&stamp).is_ok_and(|text| text == identity) {
        return Ok(place);
    }
    eprintln!("» unpack the bundle into {} (once)", place.display());
    if place.exists() {
        fs::remove_dir_all(&place).with_context(|| format!("remove {}", place.display()))?;
    }
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    for name in ARCHIVES {
        let mut tar = Command::new(here.join("busybox"));
        tar.args(["tar", "-xJf"]).arg(here.join(name)).arg("-C").arg(&place);
        capture(&mut tar)?;
    }
    fs::write(&stamp, identity).with_context(|| format!("write {}", stamp.display()))?;
    Ok(place)
}
