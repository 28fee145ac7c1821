//! `nvguest run`: a backend and its QEMU, from one file or from flags.
//!
//! It is what README shows by hand, and `--print` says it without doing it.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitCode, ExitStatus};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde::Deserialize;
use serde_json::json;

use crate::guests;
use crate::out;
use crate::qmp::Qmp;
use crate::runtime::{self, Noted};
use crate::vm::{Device, DEVICE, PORT};

/// A guest lets go of its device within this, or is not going to.
const LET_GO: Duration = Duration::from_secs(3);
/// A backend listens within this, or is not going to.
const PATIENCE: Duration = Duration::from_secs(20);
/// How often the two are looked after.
const LOOK: Duration = Duration::from_millis(100);
/// Of our root port: no other port of the machine may have it.
const CHASSIS: u8 = 222;

/// Start a backend and its QEMU.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// What the guest is, as TOML; packaging/guest.toml is a sample. Flags override it.
    file: Option<PathBuf>,
    /// What admins call the guest.
    #[arg(long)]
    name: Option<String>,
    /// The guest's memory, e.g. 2G.
    #[arg(long)]
    memory: Option<String>,
    /// The guest's processors.
    #[arg(long)]
    cpus: Option<u32>,
    /// QEMU's accelerator: kvm, or tcg,thread=multi.
    #[arg(long)]
    accel: Option<String>,
    /// Say the two command lines, and start nothing.
    #[arg(long)]
    print: bool,
    /// More of QEMU's own arguments: disks, networks, a screen.
    #[arg(last = true)]
    qemu: Vec<String>,
}

/// A guest, as its file has it.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Spec {
    name: String,
    backend: Backend,
    qemu: Qemu,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Backend {
    program: String,
    args: Vec<String>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Qemu {
    program: String,
    memory: String,
    cpus: u32,
    accel: String,
    /// Processes with queues of their own; each takes two of the device's.
    slots: u32,
    args: Vec<String>,
}

impl Default for Backend {
    fn default() -> Self {
        Self { program: "vhost-user-nvguest".into(), args: Vec::new() }
    }
}

impl Default for Qemu {
    fn default() -> Self {
        Self {
            program: "qemu-system-x86_64".into(),
            memory: "2G".into(),
            cpus: 2,
            accel: "kvm".into(),
            slots: 16,
            args: Vec::new(),
        }
    }
}

impl Spec {
    fn of(args: &Args) -> Result<Self> {
        let mut spec = match &args.file {
            Some(path) => Self::read(path)?,
            None => Self::default(),
        };
        let Args { name, memory, cpus, accel, .. } = args;
        spec.name = name.clone().unwrap_or(spec.name);
        spec.qemu.memory = memory.clone().unwrap_or(spec.qemu.memory);
        spec.qemu.cpus = cpus.unwrap_or(spec.qemu.cpus);
        spec.qemu.accel = accel.clone().unwrap_or(spec.qemu.accel);
        spec.qemu.args.extend(args.qemu.iter().cloned());
        if spec.name.is_empty() {
            bail!("the guest has no name; give --name, or name = \"…\" in a file");
        }
        Ok(spec)
    }

    fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path)
            .with_context(|| format!("{} cannot be read", path.display()))?;
        toml::from_str(&text).with_context(|| format!("{} is not a guest's file", path.display()))
    }

    fn folder(&self) -> PathBuf {
        guests::folder(&self.name)
    }

    fn socket(&self) -> PathBuf {
        self.folder().join("vhost.sock")
    }

    fn backend_command(&self) -> Vec<String> {
        let own = [self.backend.program.clone(), "--name".into(), self.name.clone()];
        own.into_iter().chain(self.backend.args.iter().cloned()).collect()
    }

    fn qemu_command(&self) -> Vec<String> {
        let Qemu { program, memory, cpus, accel, slots, args } = &self.qemu;
        let cpu = if accel.starts_with("kvm") { "host" } else { "max" };
        // QEMU takes a doubled comma for one.
        let quoted = |path: PathBuf| path.display().to_string().replace(',', ",,");
        let (socket, monitor) = (quoted(self.socket()), quoted(runtime::monitor(&self.folder())));
        let queues = 2 + 2 * slots;
        let own = [
            program.clone(),
            "-accel".into(),
            accel.clone(),
            "-cpu".into(),
            cpu.into(),
            "-smp".into(),
            cpus.to_string(),
            "-m".into(),
            memory.clone(),
            "-object".into(),
            format!("memory-backend-memfd,id=mem,size={memory},share=on"),
            "-machine".into(),
            "q35,memory-backend=mem".into(),
            // Both for `nvguest recover`: a monitor, and a slot that a device can be taken out of.
            "-qmp".into(),
            format!("unix:{monitor},server=on,wait=off"),
            "-device".into(),
            format!("pcie-root-port,id={PORT},chassis={CHASSIS}"),
            "-chardev".into(),
            format!("socket,id=nv,path={socket}"),
            "-device".into(),
            format!(
                "vhost-user-test-device-pci,id={DEVICE},bus={PORT},chardev=nv,virtio-id=38,\
                 num_vqs={queues},vq_size=256,config_size=64"
            ),
        ];
        own.into_iter().chain(args.iter().cloned()).collect()
    }
}

/// Starts both, and ends as QEMU does.
pub fn run(args: &Args, json: bool) -> Result<ExitCode> {
    let spec = Spec::of(args)?;
    let (backend, qemu) = (spec.backend_command(), spec.qemu_command());
    if args.print {
        if json {
            out::json(&json!({"backend": backend, "qemu": qemu}))?;
        } else {
            out::say(&format!("{} &\n{}\n", shell(&backend), shell(&qemu)))?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    let mut serving = Serving { child: start(&backend)?, said: false };
    serving.await_socket(&spec.socket())?;
    let _noted = Noted::write(&spec.folder(), &backend)?;
    let mut machine = start(&qemu)?;
    let status = loop {
        if let Some(status) = machine.try_wait().context("Waiting for QEMU failed")? {
            break status;
        }
        if let Some(status) = serving.gone() {
            bereaved(&spec, status, &mut machine)?;
        }
        std::thread::sleep(LOOK);
    };
    Ok(code(status))
}

fn start(command: &[String]) -> Result<Child> {
    let (program, args) = command.split_first().context("An empty command")?;
    let started = Command::new(program).args(args).spawn();
    started.with_context(|| {
        format!("{program} cannot be started; nvguest doctor says what is missing")
    })
}

/// QEMU has lost its backend, and its guest's maps soon lead to memory that is somebody else's:
/// the guest lets go of the device, or ends.
fn bereaved(spec: &Spec, status: ExitStatus, machine: &mut Child) -> Result<()> {
    let name = &spec.name;
    match withdraw(&runtime::monitor(&spec.folder())) {
        Ok(true) => {
            eprintln!(
                "nvguest: the backend ended with {status}, and the guest has no card now; `nvguest \
                 recover {name}` gives it another"
            );
            return Ok(());
        }
        Ok(false) => eprintln!(
            "nvguest: the backend ended with {status}, and the guest does not let go of its maps \
             within {LET_GO:?}; its QEMU is ended, start it again"
        ),
        Err(error) => eprintln!(
            "nvguest: the backend ended with {status}, and the guest's maps cannot be taken away: \
             {error:#}; its QEMU is ended, start it again"
        ),
    }
    machine.kill().context("Ending QEMU failed")
}

/// Whether the guest is without a device that has no backend.
fn withdraw(monitor: &Path) -> Result<bool> {
    let mut qmp = Qmp::connect(monitor)?;
    match Device::find(&mut qmp)? {
        Some(device) if !device.connected => device.take_out(&mut qmp, LET_GO),
        _ => Ok(true),
    }
}

/// A backend, whose end is waited for.
struct Serving {
    child: Child,
    /// Its end was said.
    said: bool,
}

impl Serving {
    /// How it ended before its QEMU did, said once.
    fn gone(&mut self) -> Option<ExitStatus> {
        let ended = self.child.try_wait().ok().flatten();
        // One that hears its QEMU go ends well.
        let gone = ended.filter(|status| !status.success() && !self.said);
        self.said |= gone.is_some();
        gone
    }

    /// QEMU may start once somebody listens; the socket may be a dead backend's.
    fn await_socket(&mut self, socket: &Path) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        while !guests::is_listening(socket) {
            if let Some(status) = self.child.try_wait().context("Looking for the backend failed")? {
                bail!("the backend ended with {status} before it served; it said why above");
            }
            if Instant::now() >= deadline {
                bail!("the backend does not listen on {} after {PATIENCE:?}", socket.display());
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }

    fn ends_within(&mut self, patience: Duration) -> bool {
        let deadline = Instant::now() + patience;
        while matches!(self.child.try_wait(), Ok(None)) {
            if Instant::now() >= deadline {
                return false;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        true
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        // A backend whose QEMU is gone ends by itself. One that QEMU never came to is told, and
        // takes its sockets along; one that does not hear is killed.
        if !self.ends_within(Duration::from_secs(2)) {
            // CAST: a pid is a positive i32.
            let _ = kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM);
            if !self.ends_within(Duration::from_secs(10)) {
                let _ = self.child.kill();
                let _ = self.child.wait();
            }
        }
    }
}

/// A process's status as our own.
fn code(status: ExitStatus) -> ExitCode {
    ExitCode::from(status.code().and_then(|code| u8::try_from(code).ok()).unwrap_or(1))
}

/// A command as a shell reads it.
fn shell(command: &[String]) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    let words = command.iter().map(|word| match word.chars().all(plain) && !word.is_empty() {
        true => word.clone(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    });
    words.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sample_is_a_guest_s_file() {
        let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/guest.toml");
        let spec = Spec::read(Path::new(sample)).unwrap();
        assert_eq!(spec.name, "web");
        assert!(spec.qemu_command().contains(&"q35,memory-backend=mem".to_owned()));
    }

    #[test]
    fn a_word_that_is_none_is_named() {
        let error = toml::from_str::<Spec>("nmae = \"web\"").unwrap_err().to_string();
        assert!(error.contains("nmae"), "{error}");
    }

    #[test]
    fn a_shell_reads_what_is_printed() {
        let words = ["a b".to_owned(), "it's".to_owned(), "-m".to_owned(), String::new()];
        assert_eq!(shell(&words), r"'a b' 'it'\''s' -m ''");
    }
}
