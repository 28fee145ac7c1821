//! Answers the host: one thread reads the port, every command has its own.

use std::collections::BTreeMap;
use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::sync::{Arc, Mutex, PoisonError};

use anyhow::{bail, Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_rig::proto::{read_frame, write_frame, FromGuest, ToGuest};

use crate::run::Running;
use crate::setup;

/// The port's sending half, shared by the threads of all commands.
#[derive(Clone)]
pub struct Host(Arc<Mutex<File>>);

impl Host {
    /// Sends one frame. A host that is gone ends the guest through the
    /// reading side, so a failure here has nobody to be told to.
    pub fn send(&self, message: &FromGuest, data: &[u8]) {
        let mut port = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Err(error) = write_frame(&mut *port, message, data) {
            eprintln!("nvguest-agent: write to the port: {error}");
        }
    }

    fn answer(&self, id: u32, outcome: Result<Vec<u8>>) {
        match outcome {
            Ok(data) => self.send(&FromGuest::Done { id }, &data),
            Err(error) => {
                self.send(&FromGuest::Failed { id, error: format!("{error:#}") }, &[]);
            }
        }
    }
}

/// Serves the host until it says power off or closes the port.
pub fn serve() -> Result<()> {
    let port = setup::open_port()?;
    let mut reading = port.try_clone().context("duplicate the port")?;
    let host = Host(Arc::new(Mutex::new(port)));
    let Some((ToGuest::Setup(setup), _)) = read_frame(&mut reading).context("read the port")?
    else {
        bail!("the host's first message was not a setup");
    };
    host.send(&FromGuest::Ready(setup::become_guest(&setup)), &[]);

    let mut commands = BTreeMap::new();
    while let Some((message, data)) = read_frame(&mut reading).context("read the port")? {
        match message {
            ToGuest::Setup(_) => bail!("the host sent a second setup"),
            ToGuest::Run { id, mut command } => {
                for (name, value) in &setup.env {
                    command.env.entry(name.clone()).or_insert_with(|| value.clone());
                }
                commands.insert(id, Running::new(id, command, host.clone()));
            }
            ToGuest::Go { id } => with(&commands, id, Running::go),
            ToGuest::Stdin { id } => with(&commands, id, |command| command.input(data)),
            ToGuest::Signal { id, signal } => with(&commands, id, |it| it.signal(signal)),
            ToGuest::Kill { id, pid, signal } => host.answer(id, send_signal(pid, signal)),
            ToGuest::Read { id, path } => {
                host.answer(id, fs::read(&path).with_context(|| format!("read {path}")));
            }
            ToGuest::Write { id, path, mode } => host.answer(id, write_file(&path, mode, &data)),
            ToGuest::PowerOff => return Ok(()),
        }
    }
    Ok(())
}

fn with(commands: &BTreeMap<u32, Running>, id: u32, act: impl FnOnce(&Running)) {
    if let Some(command) = commands.get(&id) {
        act(command);
    }
}

fn send_signal(pid: i32, signal: i32) -> Result<Vec<u8>> {
    let signal = Signal::try_from(signal).with_context(|| format!("signal {signal}"))?;
    kill(Pid::from_raw(pid), signal).with_context(|| format!("send {signal} to {pid}"))?;
    Ok(Vec::new())
}

fn write_file(path: &str, mode: u32, data: &[u8]) -> Result<Vec<u8>> {
    fs::write(path, data).with_context(|| format!("write {path}"))?;
    fs::set_permissions(path, Permissions::from_mode(mode))
        .with_context(|| format!("set the mode of {path}"))?;
    Ok(Vec::new())
}
