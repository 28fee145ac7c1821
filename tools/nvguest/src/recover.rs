//! `nvguest recover`: a guest whose backend died gets a new one, where QEMU can do it.
//!
//! The device is taken out of the running guest and put in again, by QMP. Nothing is started or
//! taken out that the next step could not follow.

use std::fs::OpenOptions;
use std::io::ErrorKind;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde::Serialize;

use crate::guests::{self, Guest};
use crate::out;
use crate::qmp::Qmp;
use crate::runtime;
use crate::vm::{self, Device};

/// A backend listens within this, or is not going to.
const PATIENCE: Duration = Duration::from_secs(20);

/// Give a guest whose backend died a new one, where QEMU can do it.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Its name, or the path of its admin socket.
    guest: String,
    /// QEMU's monitor (-qmp unix:SOCKET,server=on,wait=off); found for guests of `nvguest run`.
    #[arg(long, value_name = "SOCKET")]
    qmp: Option<PathBuf>,
    /// The root port for a new device, where none is left in QEMU to learn it from.
    #[arg(long)]
    bus: Option<String>,
    /// Seconds that the guest has to let go of the device, and to take the new one.
    #[arg(long, default_value_t = 15, value_name = "SECONDS")]
    wait: u64,
    /// The new backend's command; known for guests of `nvguest run`, and needless where one
    /// listens already.
    #[arg(last = true)]
    backend: Vec<String>,
}

/// What came of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    /// Backend and QEMU were well.
    Needless,
    /// The guest has its card again; programs that had it open do not.
    Recovered,
    /// The device is there, and the guest has not taken it yet.
    Waiting,
    /// Only a restart of the VM helps.
    Restart,
}

/// A step that was taken, and what was found.
#[derive(Debug, Serialize)]
struct Step {
    step: &'static str,
    found: String,
}

/// What was done so far; said at once, or at the end as JSON.
struct Story {
    json: bool,
    steps: Vec<Step>,
}

impl Story {
    fn tell(&mut self, step: &'static str, found: impl Into<String>) -> Result<()> {
        let step = Step { step, found: found.into() };
        if !self.json {
            out::say(&format!("{:9} {}\n", step.step, step.found))?;
        }
        self.steps.push(step);
        Ok(())
    }

    fn end(self, guest: &str, outcome: Outcome) -> Result<ExitCode> {
        if self.json {
            let Self { steps, .. } = self;
            out::json(&serde_json::json!({"guest": guest, "outcome": outcome, "steps": steps}))?;
        }
        let well = matches!(outcome, Outcome::Needless | Outcome::Recovered);
        Ok(if well { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}

/// Says what state backend and QEMU are in, and does what helps.
pub fn run(args: &Args, json: bool) -> Result<ExitCode> {
    let mut story = Story { json, steps: Vec::new() };
    let outcome = recover(args, &mut story)?;
    story.end(&args.guest, outcome)
}

fn recover(args: &Args, story: &mut Story) -> Result<Outcome> {
    let guest = guests::located(&args.guest);
    let folder = guest.folder();
    let backend = guest.status().ok();
    let pid = backend.as_ref().map(|status| status["pid"].to_string());
    story.tell("backend", pid.map_or("none answers".into(), |pid| format!("pid {pid} answers")))?;

    let monitor = args.qmp.clone().unwrap_or_else(|| runtime::monitor(folder));
    let mut qmp = match Qmp::connect(&monitor) {
        Ok(qmp) => qmp,
        Err(error) => {
            story.tell("QEMU", format!("{error:#}"))?;
            let todo = "is it gone? Then start the VM again. Has it another monitor? Then give \
                        --qmp; without one only a restart of the VM helps";
            story.tell("so", todo)?;
            return Ok(Outcome::Restart);
        }
    };
    let state = qmp.execute("query-status", serde_json::json!({}))?;
    let state = state["status"].as_str().unwrap_or("in no known state").to_owned();
    story.tell("QEMU", format!("{} answers, {state}", qmp.version))?;

    let device = Device::find(&mut qmp)?;
    story.tell("device", device.as_ref().map_or_else(|| "none is there".into(), describe))?;
    if device.as_ref().is_some_and(|device| device.connected) {
        story
            .tell("so", "nothing is to be done: QEMU has a backend (one that is stuck: kill it)")?;
        return Ok(Outcome::Needless);
    }
    let device = device.unwrap_or_else(|| Device::absent(args.bus.as_deref()));
    let socket = device.socket.clone().unwrap_or_else(|| folder.join("vhost.sock"));
    let command = new_backend(args, folder, &socket)?;

    let limit = Duration::from_secs(args.wait);
    if !taken_out(&device, &mut qmp, limit, story)? {
        return Ok(Outcome::Restart);
    }
    if let Some(command) = command {
        let pid = start(&command, &socket, &folder.join("backend.log"))?;
        story.tell("backend", format!("started, pid {pid}, listens on {}", socket.display()))?;
    }
    device.put_in(&mut qmp, &socket).with_context(|| {
        format!("the guest has no card now; run this again once {} can be had", socket.display())
    })?;
    story.tell("device", format!("a new one is on {}", device.bus))?;
    greeted(&guest, limit, story)
}

fn describe(device: &Device) -> String {
    let backend = if device.connected { "a backend" } else { "no backend any more" };
    format!("{} on bus {}, with {backend}", device.id, device.bus)
}

/// The command of a new backend; `None` if one listens already.
fn new_backend(args: &Args, folder: &Path, socket: &Path) -> Result<Option<Vec<String>>> {
    if guests::is_listening(socket) {
        return Ok(None);
    }
    if !args.backend.is_empty() {
        return Ok(Some(args.backend.clone()));
    }
    runtime::backend(folder).map(Some).with_context(|| {
        format!(
            "no backend listens on {}; start one there (systemctl start nvguest@{}.socket), or \
             give its command behind --",
            socket.display(),
            args.guest
        )
    })
}

/// Whether the device is out; says why not.
fn taken_out(device: &Device, qmp: &mut Qmp, limit: Duration, story: &mut Story) -> Result<bool> {
    let found = match device.take_out(qmp, limit) {
        Ok(true) => return story.tell("device", "is out of the guest").map(|()| true),
        Ok(false) => format!("the guest does not let go of it within {} s", limit.as_secs()),
        Err(error) if vm::refusal(&error).is_some() => error.to_string(),
        Err(error) => return Err(error),
    };
    story.tell("device", found)?;
    let todo = "only a restart of the VM helps. A device behind a pcie-root-port could be taken \
                out, in a guest whose kernel does hotplug; nvguest run puts it there";
    story.tell("so", todo)?;
    Ok(false)
}

/// Starts a backend that outlives us, and waits until it listens. Its log is a file: whoever
/// reads ours waits for its end otherwise.
fn start(command: &[String], socket: &Path, log: &Path) -> Result<u32> {
    let (program, args) = command.split_first().context("An empty command")?;
    let file = OpenOptions::new().create(true).append(true).open(log);
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(file.map_or_else(|_| Stdio::null(), Stdio::from))
        .process_group(0)
        .spawn()
        .with_context(|| format!("{program} cannot be started"))?;
    let deadline = Instant::now() + PATIENCE;
    while !guests::is_listening(socket) {
        if let Some(status) = child.try_wait().context("Looking for the backend failed")? {
            bail!("the new backend ended with {status}; {} says why", log.display());
        }
        if Instant::now() >= deadline {
            let _ = child.kill();
            bail!(
                "the new backend does not listen on {} after {PATIENCE:?}; does its command say \
                 so? Its log is {}",
                socket.display(),
                log.display()
            );
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok(child.id())
}

/// Waits for the guest's greeting.
fn greeted(guest: &Guest, limit: Duration, story: &mut Story) -> Result<Outcome> {
    let deadline = Instant::now() + limit;
    loop {
        match guest.status() {
            Ok(status) if status["requests"]["hello"].as_u64() > Some(0) => {
                let todo = "the guest has its card again; programs that had it open must be \
                            started again";
                story.tell("so", todo)?;
                return Ok(Outcome::Recovered);
            }
            Err(error) if error.is::<std::io::Error>() && is_hidden(&error) => {
                story.tell("so", "the device is in; the new backend answers another user")?;
                return Ok(Outcome::Waiting);
            }
            _ if Instant::now() >= deadline => {
                let found = format!(
                    "the device is in, but the guest says nothing within {} s; is \
                     virtio_nvguest.ko loaded there? If so, and it stays so, restart the VM",
                    limit.as_secs()
                );
                story.tell("so", found)?;
                return Ok(Outcome::Waiting);
            }
            _ => std::thread::sleep(Duration::from_millis(100)),
        }
    }
}

fn is_hidden(error: &anyhow::Error) -> bool {
    let kind = error.downcast_ref::<std::io::Error>().map(std::io::Error::kind);
    kind == Some(ErrorKind::PermissionDenied)
}
