//! Memory shared with another process, by descriptor.
//!
//! The other process is this program, started again with a socket as its standard input. It says
//! on its standard output what it saw.

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::sync::Arc;

use super::pattern;
use crate::checks::{Checks, Seen};
use crate::error::{Error, Result, Tried};
use crate::report;
use crate::setup::Setup;
use crate::sys;
use crate::vk::{export, import_fd, Buffer, Commands, Device, Exported, Wish};

/// Bytes that are shared.
const SIZE: usize = 1 << 20;

/// What the other process says when all is as it should be.
const FINE: &str = "fine";

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    checks.run("external-fd", || {
        if !device.physical.has(ash::khr::external_memory_fd::NAME) {
            return Ok(Seen::Nothing("no VK_KHR_external_memory_fd".to_owned()));
        }
        share(device)
    });
}

fn share(device: &Arc<Device>) -> Result<Seen> {
    let (shared, fd, exported) = export(device, SIZE as u64)?;
    let ours = Buffer::holding(device, &pattern(4, SIZE))?;
    Commands::run(device, &device.graphics, |recorder| recorder.copy(&ours, &shared))?;
    let said = other_process(device, &fd, exported)?;
    if said != FINE {
        return Ok(Seen::Differs { expected: FINE.to_owned(), got: said });
    }
    let back = Buffer::new(device, SIZE as u64, Wish::Host)?;
    Commands::run(device, &device.graphics, |recorder| recorder.copy(&shared, &back))?;
    let what = "1 MiB shared with another process, each saw what the other wrote";
    Ok(Seen::words(what, &pattern(5, SIZE), &back.read()?))
}

/// Has the other process do its part; what it says.
fn other_process(device: &Device, fd: &OwnedFd, exported: Exported) -> Result<String> {
    let (here, there) = UnixStream::pair().tried("make a pair of sockets")?;
    let program = std::env::current_exe().tried("find this program")?;
    let child = Command::new(&program)
        .args(["--import", "--device", &device.physical.uuid])
        .stdin(Stdio::from(OwnedFd::from(there)))
        .stdout(Stdio::piped())
        .spawn()
        .tried(format!("start {}", program.display()))?;
    let Exported { size, memory, kind } = exported;
    let message: Vec<u8> =
        [size, memory, u64::from(kind)].iter().flat_map(|it| it.to_ne_bytes()).collect();
    let sent = sys::send_fd(&here, &message, fd);
    let output = child.wait_with_output().tried("wait for the other process")?;
    sent?;
    let said = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    let silent = format!("the other process ended with {}", output.status);
    Ok(if said.is_empty() { silent } else { said })
}

/// `--import`: the other process.
pub fn import(setup: &Setup) -> Result<()> {
    let device = &setup.device;
    let mut message = [0; 24];
    let fd = sys::receive_fd(&std::io::stdin(), &mut message)?;
    let number = |at: usize| {
        let bytes = message[at * 8..].iter().take(8).rev();
        bytes.fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte))
    };
    let kind = u32::try_from(number(2))
        .map_err(|_| Error::Unfit(format!("{} is no memory type", number(2))))?;
    let shared = import_fd(device, fd, Exported { size: number(0), memory: number(1), kind })?;
    let seen = Buffer::new(device, shared.size(), Wish::Host)?;
    let theirs = Buffer::holding(device, &pattern(5, SIZE))?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.copy(&shared, &seen);
        recorder.copy(&theirs, &shared);
    })?;
    let said = match Seen::words(FINE, &pattern(4, SIZE), &seen.read()?) {
        Seen::Same(fine) => fine,
        other => format!("{other:?}"),
    };
    report::line(format_args!("{said}"));
    Ok(())
}
