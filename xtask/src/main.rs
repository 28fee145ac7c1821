//! The commands of this repository: `cargo xtask demo`, `cargo xtask test` and
//! the parts that they are made of.
//!
//! - `prepare`  provisions `.rig`, builds binaries, module and images
//! - `demo`     boots a guest and runs the main job in it
//! - `test`     runs every check and every test, guest boots included
//! - `security` writes the table of attacks in SECURITY.md
//! - `fuzz`     runs the fuzz targets
//! - `miri`     interprets tests of `unsafe` code
//! - `bundle`   packs all of it into a folder that runs elsewhere

#![forbid(unsafe_code)]

mod bundle;
mod demo;
#[cfg(test)]
mod dependencies;
mod fuzz;
mod miri;
mod prepare;
mod security;
mod test;
#[cfg(test)]
mod unsafe_code;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use nvguest_rig::cli::{guest, GuestArgs};
use nvguest_rig::Assets;

/// The commands of this repository.
///
/// `demo` and `test` need no arguments. On a fresh Debian 12 or 13 machine they
/// say what they install and fetch, then do it; a second run needs no network.
/// Everything fetched stays in .rig/, everything built in target/.
#[derive(Debug, Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask", version)]
struct Cli {
    /// Run what the last call built: nothing is built or fetched
    #[arg(long, global = true)]
    no_build: bool,

    #[command(subcommand)]
    command: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Boot a guest and run the main job in it: nvidia-smi, or rmprobe without a card
    Demo,
    /// Run every check and every test, guest boots included
    Test(test::TestArgs),
    /// Run the fuzz targets: every parser of untrusted bytes
    Fuzz(fuzz::FuzzArgs),
    /// Run tests of `unsafe` code under Miri, which needs a nightly compiler
    Miri,
    /// Boot guests and run a command in each
    Guest(Box<GuestArgs>),
    /// Pack QEMU, a kernel and our binaries into a folder that runs on another machine
    Bundle(bundle::BundleArgs),
    /// Write the table of attacks in SECURITY.md anew, from the names of tests
    Security,
    /// Provision .rig and build everything, and stop there
    Install,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match act(&cli) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("xtask: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn act(cli: &Cli) -> Result<ExitCode> {
    let assets = |quiet| {
        if cli.no_build {
            return Assets::find();
        }
        prepare::everything(quiet)
    };
    match &cli.command {
        Action::Demo => demo::demo(&assets(false)?),
        Action::Test(args) => test::test(args, || assets(false)),
        Action::Fuzz(args) => fuzz::fuzz(args),
        Action::Miri => miri::miri(),
        Action::Guest(args) => guest(&assets(args.json)?, args),
        Action::Bundle(args) => bundle::bundle(&assets(false)?, args),
        Action::Security => security::write(),
        Action::Install => {
            let assets = assets(false)?;
            println!("Ready: {}. Next: cargo xtask demo", assets.root().display());
            Ok(ExitCode::SUCCESS)
        }
    }
}
