//! Which files a process may open, by Landlock.
//!
//! Each list is all that there is: what is not on it cannot be opened, run, made or
//! removed. Domains only ever shrink: a worker has the starter's, less what it takes to
//! start. Memory files are no files of a folder, and open to their holders.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use landlock::{
    Access, AccessFs, BitFlags, CompatLevel, Compatible, PathBeneath, PathFd, Ruleset, RulesetAttr,
    RulesetCreated, RulesetCreatedAttr, Scope, ABI,
};
use nix::libc;

use super::Plan;

/// The newest that we know; an older kernel enforces what it knows of it.
const KNOWN: ABI = ABI::V6;
/// Where programs find the libraries that the linker was not told of.
const LINKER_CACHE: &str = "/etc/ld.so.cache";
/// Read for a guest that asks what a native program would (`NV_ESC_SYS_PARAMS`).
const BLOCK_SIZE: &str = "/sys/devices/system/memory/block_size_bytes";
/// Standard output of workers.
const NULL: &str = "/dev/null";

/// The ABI of Landlock that this kernel enforces, 0 for none.
pub fn level() -> u32 {
    const VERSION: u32 = 1;
    let nothing = std::ptr::null::<u8>();
    // SAFETY: with this flag the call only answers a number.
    let level = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, nothing, 0, VERSION) };
    u32::try_from(level).unwrap_or(0)
}

fn node_access() -> BitFlags<AccessFs> {
    AccessFs::ReadFile | AccessFs::WriteFile | AccessFs::IoctlDev
}

fn ruleset() -> Result<Ruleset> {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::BestEffort);
    Ok(ruleset.handle_access(AccessFs::from_all(KNOWN))?)
}

/// Signals and abstract sockets, too, end at the domain's border.
fn scoped() -> Result<Ruleset> {
    Ok(ruleset()?.scope(Scope::AbstractUnixSocket | Scope::Signal)?)
}

/// No file at all.
pub fn nothing() -> Result<()> {
    enforce(ruleset()?.create()?)
}

/// The nodes; our own program and its libraries, to run workers; what is to be removed
/// or written. It reaches no process but those workers, and no abstract socket.
pub fn starter(plan: &Plan) -> Result<()> {
    let mut rules = scoped()?.create()?;
    for program in programs()? {
        rules = allow(rules, &program, AccessFs::ReadFile | AccessFs::Execute)?;
    }
    for file in [LINKER_CACHE, BLOCK_SIZE] {
        rules = allow(rules, Path::new(file), AccessFs::ReadFile)?;
    }
    rules = allow(rules, Path::new(NULL), AccessFs::ReadFile | AccessFs::WriteFile)?;
    for node in &plan.nodes {
        rules = allow(rules, node, node_access())?;
    }
    let folders: BTreeSet<PathBuf> = plan.leftovers.iter().map(|file| folder(file)).collect();
    for folder in folders {
        rules = allow(rules, &folder, AccessFs::RemoveFile)?;
    }
    if let Some(file) = &plan.publish {
        let writes = AccessFs::MakeReg | AccessFs::WriteFile | AccessFs::RemoveFile;
        rules = allow(rules, &folder(file), writes)?;
    }
    enforce(rules)
}

/// The nodes, and nothing of its own to run or remove. It can reach no process and no
/// abstract socket that is not its own.
pub fn worker(nodes: &[PathBuf]) -> Result<()> {
    let mut rules = scoped()?.create()?;
    for node in nodes {
        rules = allow(rules, node, node_access())?;
    }
    enforce(allow(rules, Path::new(BLOCK_SIZE), AccessFs::ReadFile)?)
}

/// What is not there needs no rule.
fn allow(
    rules: RulesetCreated,
    path: &Path,
    access: impl Into<BitFlags<AccessFs>>,
) -> Result<RulesetCreated> {
    match PathFd::new(path) {
        Ok(fd) => Ok(rules.add_rule(PathBeneath::new(fd, access.into()))?),
        Err(_) => {
            tracing::debug!(path = %path.display(), "not there, so not opened to anybody");
            Ok(rules)
        }
    }
}

fn enforce(rules: RulesetCreated) -> Result<()> {
    rules.restrict_self().map(drop).context("Landlock refused the rules")
}

fn folder(file: &Path) -> PathBuf {
    match file.parent() {
        Some(folder) if folder != Path::new("") => folder.to_owned(),
        _ => PathBuf::from("."),
    }
}

/// The files that this program runs from: itself, the linker, its libraries.
fn programs() -> Result<BTreeSet<PathBuf>> {
    let maps = std::fs::read_to_string("/proc/self/maps").context("Reading our own map failed")?;
    let mapped = maps.lines().filter_map(|line| line.split_once('/').map(|(_, path)| path));
    let mut found: BTreeSet<PathBuf> =
        mapped.map(|path| PathBuf::from(format!("/{path}"))).collect();
    found.insert("/proc/self/exe".into());
    found.retain(|path| path.is_file());
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_relative_socket_lies_in_the_current_folder() {
        assert_eq!(folder(Path::new("nv.sock")), Path::new("."));
        assert_eq!(folder(Path::new("/run/nv.sock")), Path::new("/run"));
    }

    #[test]
    fn this_program_is_among_what_it_runs_from() {
        assert!(programs().unwrap().contains(&std::env::current_exe().unwrap()));
    }
}
