//! The agent of a test guest: its first process, and the host's hand in it.
//!
//! - `main`    the first process: mounts what Linux needs, starts the server,
//!   reaps orphans, powers off when the server ends
//! - `setup`   becomes the guest that the host asks for: name, shares, module
//! - `serve`   answers the host over the port
//! - `run`     runs commands and streams their output
//! - `kexec`   has the kernel start another, which busybox cannot

mod kexec;
mod run;
mod serve;
mod setup;

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, ExitCode};

use anyhow::{bail, Context, Result};
use nix::mount::{mount, MsFlags};
use nix::sys::reboot::{reboot, RebootMode};
use nix::sys::wait::{waitpid, WaitStatus};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let outcome = match arguments[..] {
        ["serve"] => serve::serve(),
        ["kexec", kernel, image] => kexec::kexec(kernel, image),
        [] if std::process::id() == 1 => init(),
        _ => {
            println!(
                "nvguest-agent {}: the first process of a guest of nvguest's rig.\n\
                 It is started by the guest's kernel; on a host, run `cargo xtask guest --help`.",
                env!("CARGO_PKG_VERSION")
            );
            Ok(())
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvguest-agent: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// The life of the first process. Returning from it panics the kernel, which
/// ends the guest too: QEMU runs with `-no-reboot`.
fn init() -> Result<()> {
    let outcome = mount_all().and_then(|()| run_server());
    if let Err(error) = &outcome {
        eprintln!("nvguest-agent: {error:#}");
    }
    nix::unistd::sync();
    reboot(RebootMode::RB_POWER_OFF).context("power off")?;
    Ok(())
}

fn mount_all() -> Result<()> {
    let plan = [
        ("proc", "/proc", "proc"),
        ("sysfs", "/sys", "sysfs"),
        ("devtmpfs", "/dev", "devtmpfs"),
        ("devpts", "/dev/pts", "devpts"),
        ("tmpfs", "/dev/shm", "tmpfs"),
        ("tmpfs", "/tmp", "tmpfs"),
        ("tmpfs", "/run", "tmpfs"),
    ];
    for (source, target, kind) in plan {
        std::fs::create_dir_all(target).with_context(|| format!("create {target}"))?;
        mount(Some(source), target, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("mount {kind} on {target}"))?;
    }
    if !Path::new("/dev/fd").exists() {
        symlink("/proc/self/fd", "/dev/fd").context("link /dev/fd")?;
    }
    Ok(())
}

/// Starts the server as a process of its own, so that its children are its
/// own to wait for and orphans fall to the first process.
fn run_server() -> Result<()> {
    let server = Command::new("/init").arg("serve").spawn().context("start the agent's server")?;
    let server = i32::try_from(server.id()).context("the server's pid")?;
    loop {
        match waitpid(None, None) {
            Ok(WaitStatus::Exited(pid, 0)) if pid.as_raw() == server => return Ok(()),
            Ok(status) if status.pid().is_some_and(|pid| pid.as_raw() == server) => {
                bail!("the agent's server ended with {status:?}")
            }
            Ok(_) | Err(nix::errno::Errno::EINTR) => {}
            Err(error) => return Err(error).context("wait for processes"),
        }
    }
}
