//! `nvguest`: what an admin asks, and starts.
//!
//! - `list`, `show`, `refusals`, `metrics` ([`show`]): the guests of this host, and one of them
//! - `limits` ([`limits`]): what a guest may have
//! - `top` ([`top`]): what guests do, live
//! - `trace` ([`trace`]): the calls of a guest, one by one
//! - `run` ([`run`]): a backend and its QEMU, from one file
//! - `recover` ([`recover`]): a new backend for a guest whose backend died ([`vm`], by [`qmp`])
//! - `doctor` ([`doctor`]): whether this host can do it, and what to do if not
//! - `policy explain` ([`policy`]): what a control or class is, who may issue it, and why
//!
//! Backends are found by their admin sockets ([`guests`]).
//!
//! Exit codes: 0, 1 where what was asked for is not there or failed, 2 for a wrong command
//! line, 78 where no profile serves the release.
#![forbid(unsafe_code)]

mod doctor;
mod guests;
mod limits;
mod lines;
mod out;
mod policy;
mod qmp;
mod recover;
mod run;
mod runtime;
mod show;
mod status;
mod top;
mod trace;
mod vm;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Ask and limit the guests that share this host's NVIDIA card.
#[derive(Parser, Debug)]
#[command(name = "nvguest", version)]
struct Cli {
    /// Answer as JSON.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// The guests of this host.
    List,
    /// What guests do, live.
    Top(top::Args),
    /// The state of a guest.
    Show {
        /// Its name, or the path of its admin socket.
        guest: String,
    },
    /// What a guest was refused, the most frequent first.
    Refusals {
        /// Its name, or the path of its admin socket.
        guest: String,
    },
    /// The metrics of a guest, as Prometheus reads them.
    Metrics {
        /// Its name, or the path of its admin socket.
        guest: String,
    },
    /// The calls of a guest, as they are served.
    Trace(trace::Args),
    /// What a guest may have; change it with KEY=VALUE.
    Limits(limits::Args),
    /// Start a backend and its QEMU.
    Run(run::Args),
    /// Give a guest whose backend died a new one.
    Recover(recover::Args),
    /// Whether this host can share its card, and what to do if not.
    Doctor(doctor::Args),
    /// What a guest may do.
    Policy {
        #[command(subcommand)]
        command: policy::Command,
    },
}

fn main() -> ExitCode {
    let Cli { json, command } = Cli::parse();
    match answer(&command, json) {
        Ok(code) => code,
        Err(error) => {
            eprintln!("nvguest: {error:#}");
            let profile = error.is::<nvguest_abi::resolve::ResolveError>();
            ExitCode::from(if profile { 78 } else { 1 })
        }
    }
}

fn answer(command: &Command, json: bool) -> Result<ExitCode> {
    match command {
        Command::List => show::list(json)?,
        Command::Top(args) => top::run(args, json)?,
        Command::Show { guest } => show::show(guest, json)?,
        Command::Refusals { guest } => show::refusals(guest, json)?,
        Command::Metrics { guest } => show::metrics(guest, json)?,
        Command::Trace(args) => trace::run(args, json)?,
        Command::Limits(args) => limits::run(args, json)?,
        Command::Run(args) => return run::run(args, json),
        Command::Recover(args) => return recover::run(args, json),
        Command::Doctor(args) => return doctor::run(args, json),
        Command::Policy { command } => policy::run(command, json)?,
    }
    Ok(ExitCode::SUCCESS)
}
