//! `nvguest`: what an admin asks.
//!
//! - `policy explain`: what a control or class is, who may issue it, and why
//!
//! Exit codes: 0, 1 where what was asked for is not there, 2 for a wrong command line,
//! 78 where no profile serves the release.

mod policy;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

#[derive(Parser, Debug)]
#[command(name = "nvguest", version, about = "Questions about nvguest, answered")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// What a guest may do.
    Policy {
        #[command(subcommand)]
        command: policy::Command,
    },
}

fn main() -> ExitCode {
    let Command::Policy { command } = Cli::parse().command;
    match policy::run(&command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvguest: {error:#}");
            let profile = error.is::<nvguest_abi::resolve::ResolveError>();
            ExitCode::from(if profile { 78 } else { 1 })
        }
    }
}
