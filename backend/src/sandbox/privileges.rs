//! Who these processes are: nobody in particular.
#![forbid(unsafe_code)]

use std::io;

use anyhow::{bail, Context, Result};
use caps::{CapSet, Capability};
use nix::sched::{unshare, CloneFlags};
use nix::sys::prctl;
use nix::sys::resource::{getrlimit, setrlimit, Resource};
use nix::sys::stat::{umask, Mode};
use nix::unistd::{geteuid, getuid};

/// Descriptors below which a guest would meet our limit before its own: three for each of
/// its files in a worker, and as many for all workers and placements in the broker.
const FEW_FILES: u64 = 4096;

/// Refuses to be started by an administrator, unless that is what he wants.
pub fn check(allow_root: bool) -> Result<()> {
    let root = getuid().is_root() || geteuid().is_root();
    let admin = has(Capability::CAP_SYS_ADMIN);
    let who = match (root, admin) {
        (false, false) => return Ok(()),
        (true, _) => "root",
        (false, true) => "a user with CAP_SYS_ADMIN",
    };
    if !allow_root {
        bail!(
            "started as {who}, which a guest must not profit from; start it as a user of its own \
             for each guest, or give --allow-root (--help says what that opens)"
        );
    }
    tracing::warn!(
        "started as {who}: every capability is given up, so the driver takes workers for ordinary \
         callers, but files that belong to this user are protected by the sandbox alone"
    );
    Ok(())
}

fn has(capability: Capability) -> bool {
    caps::has_cap(None, CapSet::Permitted, capability).unwrap_or(false)
}

/// A network of this process's own, with nothing in it; whether there could be one. Without
/// the privilege for it nothing is lost: no list of system calls has `socket`.
pub fn leave_network() -> bool {
    has(Capability::CAP_SYS_ADMIN) && unshare(CloneFlags::CLONE_NEWNET).is_ok()
}

/// Gives up every capability and the ways to new ones, and what else nobody needs. Without
/// CAP_SYS_ADMIN the driver takes a caller for an ordinary one, whatever its user
/// (`os_is_administrator` is `capable(CAP_SYS_ADMIN)`).
pub fn give_up() -> Result<()> {
    umask(Mode::from_bits_truncate(0o077));
    prctl::set_no_new_privs().context("Giving up new privileges failed")?;
    if has(Capability::CAP_SETPCAP) {
        caps::clear(None, CapSet::Bounding).context("Giving up capabilities failed")?;
    }
    for set in [CapSet::Ambient, CapSet::Effective, CapSet::Permitted, CapSet::Inheritable] {
        caps::clear(None, set).context("Giving up capabilities failed")?;
    }
    prctl::set_dumpable(false).context("Becoming undumpable failed")?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0).context("Forbidding core files failed")
}

/// Raises the limit of descriptors as far as it goes, and says when that is not far.
pub fn raise_files() -> Result<()> {
    let (soft, hard) =
        getrlimit(Resource::RLIMIT_NOFILE).context("Reading RLIMIT_NOFILE failed")?;
    if soft < hard {
        setrlimit(Resource::RLIMIT_NOFILE, hard, hard).context("Raising RLIMIT_NOFILE failed")?;
    }
    if hard < FEW_FILES {
        tracing::warn!(
            "a process may hold {hard} descriptors only: a guest with many files or processes \
             will be refused more; raise RLIMIT_NOFILE (systemd: LimitNOFILE=65536)"
        );
    }
    Ok(())
}

/// The user, and whether it holds any capability.
pub fn held() -> (u32, bool) {
    let held = |set| caps::read(None, set).is_ok_and(|held| !held.is_empty());
    (geteuid().as_raw(), held(CapSet::Permitted) || held(CapSet::Effective))
}

/// Descriptors that this process may hold.
pub fn files() -> io::Result<u64> {
    Ok(getrlimit(Resource::RLIMIT_NOFILE)?.0)
}
