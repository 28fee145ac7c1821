//! The process that starts workers, because the broker itself can open and run nothing.
//!
//! It is the same binary, started by the broker before that confines itself, and hears three
//! words of it: start a worker, remove the sockets, and write the metrics file. Nothing of a
//! guest reaches it but the counts in that. A
//! domain of Landlock is inherited, so the broker's own could only be as narrow as a
//! worker's; threads of one process share memory, so a wider thread in the broker would
//! be no border.
#![forbid(unsafe_code)]

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, IoSlice, Read, Seek, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result};
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nix::sys::memfd::{memfd_create, MFdFlags};
use nix::sys::socket::{
    sendmsg, socketpair, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType,
};

use crate::sandbox::{self, seccomp, Mode, Plan};
use crate::sync::lock;
use crate::transport::link::receive_some;
use crate::transport::process::Process;

/// What the broker says: start a worker, remove what is left over, write the metrics that
/// are in the memory file which comes along.
const START: u8 = b's';
const REMOVE: u8 = b'r';
const PUBLISH: u8 = b'p';
/// Bytes of metrics at most.
const MAX_METRICS: u64 = 1 << 20;
/// An answer: an errno or 0, and a pid.
const ANSWER: usize = 8;

/// The broker's side.
#[derive(Debug)]
pub struct Starter(Mutex<OwnedFd>);

/// A worker that was started.
#[derive(Debug)]
pub struct Started {
    /// Its process id on the host, to be shown.
    pub pid: i32,
    /// Its process.
    pub process: Process,
    /// The broker's end of the link.
    pub link: UnixStream,
}

impl Starter {
    /// Starts it. It ends when this is dropped, or its process gone.
    pub fn launch(mode: Mode, plan: &Plan) -> Result<Self> {
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, theirs) = socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags)?;
        let mut command = ourselves(mode);
        command.arg("--starter").stdin(Stdio::from(theirs));
        for node in &plan.nodes {
            command.arg("--node").arg(node);
        }
        for file in &plan.leftovers {
            command.arg("--leftover").arg(file);
        }
        if let Some(file) = &plan.publish {
            command.arg("--publish").arg(file);
        }
        command.spawn().context("Starting the starter failed")?;
        Ok(Self(Mutex::new(ours)))
    }

    /// Whoever answers on `link` is the starter.
    #[cfg(feature = "fuzzing")]
    pub fn on(link: OwnedFd) -> Self {
        Self(Mutex::new(link))
    }

    /// Starts a worker.
    pub fn start(&self) -> io::Result<Started> {
        let (pid, fds) = self.ask(START, &[])?;
        let [link, process]: [OwnedFd; 2] =
            fds.try_into().map_err(|_| io::Error::from(io::ErrorKind::InvalidData))?;
        Ok(Started { pid, process: Process::from_fd(process), link: link.into() })
    }

    /// Removes what this backend would leave over.
    pub fn remove(&self) -> io::Result<()> {
        self.ask(REMOVE, &[]).map(drop)
    }

    /// Writes the metrics file.
    pub fn publish(&self, text: &[u8]) -> io::Result<()> {
        let memory = File::from(memfd_create(c"nvguest-metrics", MFdFlags::MFD_CLOEXEC)?);
        (&memory).write_all(text)?;
        self.ask(PUBLISH, &[memory.as_raw_fd()]).map(drop)
    }

    fn ask(&self, word: u8, with: &[RawFd]) -> io::Result<(i32, Vec<OwnedFd>)> {
        let starter = lock(&self.0);
        send(&starter, &[word], with)?;
        let mut answer = [0; ANSWER];
        let mut fds = Vec::new();
        let length = receive_some(&*starter, &mut answer, &mut fds)?;
        if length != ANSWER {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let [a, b, c, d, pid @ ..] = answer;
        match i32::from_le_bytes([a, b, c, d]) {
            0 => Ok((i32::from_le_bytes(pid), fds)),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }
}

/// Our own program once more, as it was when it was started.
fn ourselves(mode: Mode) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.args(["--sandbox", mode.name()]).stdout(Stdio::null());
    command
}

/// The starter's own side: serves the broker on `link` until that is gone.
pub fn run(link: OwnedFd, mode: Mode, plan: &Plan) -> Result<()> {
    sandbox::starter(mode, plan)?;
    let mut children = Vec::new();
    let mut removed = false;
    loop {
        wait(&link, &mut children)?;
        let mut word = [0];
        let mut fds = Vec::new();
        let length = receive_some(&link, &mut word, &mut fds);
        if length.context("Reading from the broker failed")? == 0 {
            // A broker that was killed could not say it. After one that did, the sockets may
            // be its successor's.
            if !removed {
                remove(plan).context("Removing a killed broker's sockets failed")?;
            }
            return Ok(());
        }
        let outcome = match word[0] {
            START => start_worker(mode, &mut children),
            REMOVE => {
                removed = true;
                remove(plan).map(|()| (0, Vec::new()))
            }
            PUBLISH => publish(plan, fds).map(|()| (0, Vec::new())),
            _ => Err(io::ErrorKind::InvalidInput.into()),
        };
        answer(&link, outcome).context("Answering the broker failed")?;
    }
}

/// Waits for a word, and sees off the workers that end meanwhile.
fn wait(link: &OwnedFd, children: &mut Vec<(Child, Process)>) -> io::Result<()> {
    loop {
        let mut fds = vec![PollFd::new(link.as_fd(), PollFlags::POLLIN)];
        fds.extend(
            children.iter().map(|(_, process)| PollFd::new(process.as_fd(), PollFlags::POLLIN)),
        );
        match poll(&mut fds, PollTimeout::NONE) {
            Err(nix::Error::EINTR) => continue,
            outcome => outcome?,
        };
        let asked = fds[0].any().unwrap_or(true);
        children.retain_mut(|(child, _)| match child.try_wait() {
            Ok(Some(status)) => {
                // By a signal if it was before the worker's own list was in place.
                let refused = status.code() == Some(seccomp::EXIT)
                    || status.signal() == Some(nix::libc::SIGSYS);
                if refused || status.core_dumped() {
                    tracing::error!(pid = child.id(), %status, "a worker was ended");
                }
                false
            }
            _ => true,
        });
        if asked {
            return Ok(());
        }
    }
}

fn start_worker(
    mode: Mode,
    children: &mut Vec<(Child, Process)>,
) -> io::Result<(i32, Vec<OwnedFd>)> {
    let (ours, theirs) = UnixStream::pair()?;
    let theirs = Stdio::from(OwnedFd::from(theirs));
    let mut child = ourselves(mode).arg("--worker").stdin(theirs).spawn()?;
    // CAST: a pid is a positive i32.
    let pid = child.id() as i32;
    let handed_on = Process::of_child(pid)
        .and_then(|process| Ok((process.as_fd().try_clone_to_owned()?, process)));
    match handed_on {
        Ok((copy, process)) => {
            children.push((child, process));
            Ok((pid, vec![ours.into(), copy]))
        }
        Err(error) => {
            // It ends by itself, with its link: no list of ours has `kill`.
            drop(ours);
            let _ = child.wait();
            Err(error)
        }
    }
}

fn remove(plan: &Plan) -> io::Result<()> {
    for file in &plan.leftovers {
        match std::fs::remove_file(file) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    Ok(())
}

/// Writes the metrics beside their file first: who reads finds a whole one.
fn publish(plan: &Plan, mut fds: Vec<OwnedFd>) -> io::Result<()> {
    let (Some(path), Some(memory)) = (&plan.publish, fds.pop()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let mut text = Vec::new();
    let mut memory = File::from(memory);
    memory.rewind()?;
    memory.take(MAX_METRICS).read_to_end(&mut text)?;
    let new = beside(path);
    let _ = std::fs::remove_file(&new);
    // Landlock lets us write there, not read.
    let mut file = OpenOptions::new().write(true).create_new(true).open(&new)?;
    file.set_permissions(Permissions::from_mode(0o644))?;
    file.write_all(&text)?;
    std::fs::rename(&new, path)
}

/// Where metrics are written before they are whole; collectors read `*.prom` only.
fn beside(path: &Path) -> PathBuf {
    let mut new = path.as_os_str().to_owned();
    new.push(".new");
    new.into()
}

fn answer(link: &OwnedFd, outcome: io::Result<(i32, Vec<OwnedFd>)>) -> io::Result<()> {
    let (errno, pid, fds) = match outcome {
        Ok((pid, fds)) => (0, pid, fds),
        Err(error) => (error.raw_os_error().unwrap_or(nix::libc::EIO), 0, Vec::new()),
    };
    let fds: Vec<RawFd> = fds.iter().map(AsRawFd::as_raw_fd).collect();
    send(link, &[errno.to_le_bytes(), pid.to_le_bytes()].concat(), &fds)
}

fn send(link: &OwnedFd, bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let rights = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &rights[..] };
    let parts = [IoSlice::new(bytes)];
    sendmsg::<()>(link.as_raw_fd(), &parts, control, MsgFlags::MSG_NOSIGNAL, None)?;
    Ok(())
}
