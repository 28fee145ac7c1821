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

/// The bundle's contents, unpacked once. The bundle carries the program that
/// unpacks them: not every machine has one for this format.
fn unpacked(here: &Path) -> Result<PathBuf> {
    let packed = here.join("contents.tar.xz");
    let place = here.join("contents");
    let stamp = place.join("stamp");
    let meta = fs::metadata(&packed).with_context(|| format!("look at {}", packed.display()))?;
    let identity = format!("{} {:?}", meta.len(), meta.modified().ok());
    if fs::read_to_string(&stamp).is_ok_and(|text| text == identity) {
        return Ok(place);
    }
    eprintln!("» unpack {} (once)", packed.display());
    if place.exists() {
        fs::remove_dir_all(&place).with_context(|| format!("remove {}", place.display()))?;
    }
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    let mut tar = Command::new(here.join("busybox"));
    tar.args(["tar", "-xJf"]).arg(&packed).arg("-C").arg(&place);
    capture(&mut tar)?;
    fs::write(&stamp, identity).with_context(|| format!("write {}", stamp.display()))?;
    Ok(place)
}
