//! `nesprobe`: a calibrated load for a card, and checks of what it answers.
//!
//! - [`args`]: the command line
//! - [`setup`]: from nothing to a logical device
//! - [`bench`], [`calibrate`], [`frames`], [`load`]: the load, and how it is measured
//! - [`latency`], [`cycles`]: what small things cost, and leave behind
//! - [`verify`], [`checks`], [`picture`]: checks by exact value
//! - [`gl`]: OpenGL through EGL
//! - [`vk`], [`sys`]: Vulkan and the system, behind types that free themselves
//! - [`stats`], [`report`], [`error`], [`shaders`]
//!
//! Vulkan and EGL are loaded at run time: where they are missing, the program says so.
#![deny(unsafe_code)]

mod args;
mod bench;
mod calibrate;
mod checks;
mod cycles;
mod error;
mod frames;
#[allow(unsafe_code)]
mod gl;
mod latency;
mod load;
mod picture;
mod report;
mod setup;
mod shaders;
mod stats;
#[allow(unsafe_code)]
mod sys;
mod verify;
#[allow(unsafe_code)]
mod vk;

use std::process::ExitCode;

use clap::Parser;

use crate::args::Args;
use crate::error::Result;
use crate::setup::Setup;

fn main() -> ExitCode {
    let args = Args::parse();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("nesprobe: {error}");
            error.exit()
        }
    }
}

/// Whether all went well.
fn run(args: &Args) -> Result<bool> {
    let wish = args.device.as_deref();
    if args.list {
        return list(args.json).map(|()| true);
    }
    if args.gl {
        return gl::verify(wish, args.json);
    }
    let setup = Setup::new(wish)?;
    if args.verify {
        return verify::verify(&setup, args.json);
    }
    if args.import {
        verify::external::import(&setup)?;
    } else if let Some(count) = args.latency {
        latency::latency(&setup, count, args.json)?;
    } else if let Some(count) = args.cycles {
        cycles::cycles(setup, count, args.json)?;
    } else {
        bench::bench(&setup, args)?;
    }
    Ok(true)
}

fn list(as_json: bool) -> Result<()> {
    let devices = vk::Instance::new()?.devices()?;
    if as_json {
        return report::json(&devices);
    }
    report::devices(&devices);
    Ok(())
}
