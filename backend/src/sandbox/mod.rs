//! What these processes may not do.
//!
//! - [`privileges`]: no root, no capability, no new ones; limits
//! - [`landlock`]: which files a process may open
//! - [`seccomp`]: which system calls it may make; [`calls`] are the lists
//!
//! | process | files it can open | system calls |
//! |---|---|---|
//! | broker | none | [`calls::of_broker`]; any other fails with EPERM, and is said |
//! | starter | the nodes, what it takes to run a worker | [`calls::of_starter`]; any other fails with EPERM, and is said |
//! | worker | the nodes | [`calls::of_worker`]; any other ends the worker, and is said |
//!
//! A refused call does not end the broker because its end is the end of QEMU, while a
//! call that fails is one that this program handles anyway; nor the starter, without which
//! there would be no more workers. It never happens in any
//! unless somebody has taken the process over, or a library has learnt a new call.

pub mod calls;
pub mod landlock;
pub mod privileges;
pub mod seccomp;

use std::fmt;
use std::path::PathBuf;

use anyhow::{bail, Context, Result};
use clap::ValueEnum;

use crate::host::Node;
use crate::worker::start::HostKind;

/// How much of it there must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Mode {
    /// All of it, or the backend does not start.
    On,
    /// What this kernel has; what it lacks is said.
    BestEffort,
    /// Neither Landlock nor seccomp. For diagnosis only.
    Off,
}

impl Mode {
    /// The word of the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::On => "on",
            Self::BestEffort => "best-effort",
            Self::Off => "off",
        }
    }
}

/// What is in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    /// What was asked for.
    pub mode: Mode,
    /// The ABI of Landlock that rules; 0 for none.
    pub landlock: u32,
    /// Whether system calls are filtered.
    pub seccomp: bool,
    /// The user.
    pub user: u32,
    /// Whether any capability is held.
    pub capable: bool,
}

impl State {
    /// What this kernel would give.
    pub fn possible(mode: Mode) -> Self {
        let wanted = mode != Mode::Off;
        let landlock = if wanted { landlock::level() } else { 0 };
        let seccomp = wanted && seccomp::is_there();
        let (user, capable) = privileges::held();
        Self { mode, landlock, seccomp, user, capable }
    }

    /// Refuses to go on with less than was asked for; says it otherwise.
    pub fn check(&self) -> Result<()> {
        let lacks = match (self.landlock, self.seccomp) {
            _ if self.mode == Mode::Off => {
                tracing::warn!("--sandbox off: neither Landlock nor seccomp confines this backend");
                return Ok(());
            }
            (0, true) => "Landlock (add it to the kernel's lsm= list)",
            (_, false) => "seccomp (CONFIG_SECCOMP_FILTER)",
            _ => return Ok(()),
        };
        if self.mode == Mode::On {
            bail!("--sandbox on: this kernel lacks {lacks}; give best-effort to go without");
        }
        tracing::warn!("the sandbox has gaps: this kernel lacks {lacks}");
        Ok(())
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: ", self.mode.name())?;
        match self.landlock {
            0 => write!(f, "no Landlock, ")?,
            abi => write!(f, "Landlock ABI {abi}, ")?,
        }
        f.write_str(if self.seccomp { "seccomp" } else { "no seccomp" })?;
        write!(f, ", user {} with{} capabilities", self.user, if self.capable { "" } else { "out" })
    }
}

/// Of the broker, before it serves and before its second thread. It opens nothing
/// from here on: what it needs is open, and workers are the starter's to start.
pub fn broker(mode: Mode) -> Result<State> {
    let state = State::possible(mode);
    if state.landlock > 0 {
        landlock::nothing().context("Confining the broker failed")?;
    }
    if state.seccomp {
        let refusal = seccomp::Refusal::Fails;
        seccomp::confine(&calls::of_broker(), calls::ABSENT_FROM_BROKER, refusal)
            .context("Confining the broker failed")?;
    }
    Ok(state)
}

/// What the starter may open and remove.
#[derive(Clone, Debug, Default)]
pub struct Plan {
    /// The nodes that workers open; none for the simulated card.
    pub nodes: Vec<PathBuf>,
    /// What is removed at the broker's word.
    pub leftovers: Vec<PathBuf>,
    /// What is written at the broker's word.
    pub publish: Option<PathBuf>,
}

/// Of the starter, before it hears of the broker. Every worker inherits it.
pub fn starter(mode: Mode, plan: &Plan) -> Result<()> {
    privileges::give_up()?;
    let state = State::possible(mode);
    if state.landlock > 0 {
        landlock::starter(plan).context("Confining the starter failed")?;
    }
    if state.seccomp {
        let host = if plan.nodes.is_empty() { HostKind::Sim } else { HostKind::Nvidia };
        let refusal = seccomp::Refusal::Fails;
        seccomp::confine(&calls::of_starter(host), calls::ABSENT, refusal)
            .context("Confining the starter failed")?;
    }
    Ok(())
}

/// Of a worker, before it hears of the guest and before its second thread.
pub fn worker(mode: Mode, host: HostKind, nodes: &[Option<Node>]) -> Result<()> {
    let state = State::possible(mode);
    let nodes: Vec<&Node> = match host {
        HostKind::Nvidia => nodes.iter().flatten().collect(),
        HostKind::Sim => Vec::new(),
    };
    if state.landlock > 0 {
        let paths: Vec<PathBuf> = nodes.iter().map(|node| PathBuf::from(&node.path)).collect();
        landlock::worker(&paths).context("Confining a worker failed")?;
    }
    if state.seccomp {
        let kinds: Vec<_> = nodes.iter().map(|node| node.kind).collect();
        let refusal = seccomp::Refusal::Ends;
        seccomp::confine(&calls::of_worker(host, &kinds), calls::ABSENT, refusal)
            .context("Confining a worker failed")?;
    }
    Ok(())
}
