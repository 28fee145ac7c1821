//! Rooms whose `unsafe` is memory alone, interpreted: bytes outside of an object, of one that is
//! gone or never written, and borrows that overlap are found where they happen.
//!
//! The rest of `unsafe` is a question to the kernel, which Miri does not have: ioctls, maps of
//! files and devices, descriptors that a message brought, handlers of signals, calls into C.

use std::process::{Command, ExitCode, Stdio};

use anyhow::{bail, Result};
use nvguest_rig::provision::step;

use crate::prepare::{root, run};

/// Packages, and those of their tests that ask nothing of the kernel that Miri lacks.
const ROOMS: [(&str, &[&str]); 2] = [
    (
        "vhost-user-nvguest",
        &[
            "marshal::scratch",
            "marshal::tests::calls",
            "marshal::tests::hostile",
            "marshal::tests::refusals",
        ],
    ),
    ("nvguest-frontend", &["gather"]),
];
/// Tests open /dev/null, and a driver takes addresses as numbers.
const FLAGS: &str = "-Zmiri-disable-isolation -Zmiri-permissive-provenance";

/// Runs them to the end: seven minutes of one processor, three of them to build.
pub fn miri() -> Result<ExitCode> {
    let installed = nightly(&["miri", "--version"]).stdout(Stdio::null()).status();
    if !installed.is_ok_and(|status| status.success()) {
        bail!(
            "there is no Miri; install it with \
             rustup toolchain install nightly --component miri rust-src"
        );
    }
    for (package, tests) in ROOMS {
        step(&format!("run tests of {package} under Miri"), || {
            let words = ["miri", "test", "--locked", "--lib", "--package", package, "--"];
            run(nightly(&words).args(tests).env("MIRIFLAGS", FLAGS))
        })?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Cargo of a nightly compiler, whichever runs this.
fn nightly(words: &[&str]) -> Command {
    let mut command = Command::new("rustup");
    command.args(["run", "nightly", "cargo"]).args(words).current_dir(root());
    command
}
