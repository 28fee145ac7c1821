//! The checks. A check's name and verdict are the same wherever the driver answers;
//! its detail (a size, a name) may differ.

mod errors;
mod events;
mod identity;
mod memory;
mod objects;
mod parallel;
mod vmas;

use rmclient::{Card, Result};

/// One check.
#[derive(Clone, Copy)]
pub struct Check {
    /// Its name, as `--only` takes it.
    pub name: &'static str,
    /// What it shows.
    pub about: &'static str,
    /// Gives a detail for the verdict line.
    pub run: fn(&Card) -> Result<String>,
}

/// Every check, in the order of running.
pub const ALL: &[&[Check]] = &[
    identity::CHECKS,
    objects::CHECKS,
    memory::CHECKS,
    vmas::CHECKS,
    events::CHECKS,
    parallel::CHECKS,
    errors::CHECKS,
];

const fn check(name: &'static str, about: &'static str, run: fn(&Card) -> Result<String>) -> Check {
    Check { name, about, run }
}
