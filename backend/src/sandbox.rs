//! What these processes may not do.
//!
//! Here so far: no new privileges, no files that others can read. Landlock and
//! seccomp are not in place yet; SECURITY.md will say what holds when they are.

use anyhow::{Context, Result};
use nix::sys::prctl;
use nix::sys::stat::{umask, Mode};

/// Of the broker, before it serves.
pub fn broker() -> Result<()> {
    common()
}

/// Of a worker, before it hears of the guest.
pub fn worker() -> Result<()> {
    common()
}

fn common() -> Result<()> {
    umask(Mode::from_bits_truncate(0o077));
    prctl::set_no_new_privs().context("Giving up new privileges failed")
}

/// What is in place, for `--check`.
pub fn describe() -> &'static str {
    "no new privileges; no Landlock, no seccomp"
}
