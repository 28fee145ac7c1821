//! One guest: commands, files, signals, its kernel's log.

use std::fmt;
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use nix::sys::signal::Signal;
use serde_json::json;

use crate::channel::{Channel, Event};
use crate::process::Daemon;
use crate::proto::{self, FromGuest, Ready, ToGuest};
use crate::qmp::Qmp;

/// How long a command may run unless it says otherwise.
const TIMEOUT: Duration = Duration::from_secs(180);

/// How long a guest may take to be up again.
const REBOOT: Duration = Duration::from_secs(90);

/// A booted guest, its QEMU and its backend.
#[derive(Debug)]
pub struct Guest {
    pub(crate) name: String,
    pub(crate) channel: Channel,
    pub(crate) ready: Ready,
    pub(crate) setup: proto::Setup,
    /// The folder of its kernel and image.
    pub(crate) kernel: PathBuf,
    pub(crate) folder: PathBuf,
    pub(crate) qemu: Daemon,
    pub(crate) backend: Option<Daemon>,
    pub(crate) serial: PathBuf,
}

impl Guest {
    /// The guest's name: `guest0`, `guest1`, …
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What the guest said of itself when it was up.
    pub fn ready(&self) -> &Ready {
        &self.ready
    }

    /// QEMU's process on the host.
    pub fn qemu_pid(&self) -> u32 {
        self.qemu.pid()
    }

    /// The backend's process on the host, if this guest has one.
    pub fn backend_pid(&self) -> Option<u32> {
        self.backend.as_ref().map(Daemon::pid)
    }

    /// A command to be run in the guest.
    pub fn command<S: Into<String>>(&self, argv: impl IntoIterator<Item = S>) -> Command<'_> {
        let argv = argv.into_iter().map(Into::into).collect();
        let timeout_ms = u64::try_from(TIMEOUT.as_millis()).unwrap_or(u64::MAX);
        let inner = proto::Command { argv, timeout_ms, ..proto::Command::default() };
        Command { guest: self, inner, input: None }
    }

    /// Runs a command to its end.
    pub fn run<S: Into<String>>(&self, argv: impl IntoIterator<Item = S>) -> Result<Output> {
        self.command(argv).run()
    }

    /// Runs a line of shell to its end.
    pub fn shell(&self, line: &str) -> Result<Output> {
        self.run(["sh", "-c", line])
    }

    /// Reads a file of the guest's.
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        self.channel.ask(|id| ToGuest::Read { id, path: path.to_owned() }, &[])
    }

    /// Writes a file in the guest.
    pub fn write(&self, path: &str, mode: u32, data: &[u8]) -> Result<()> {
        let request = |id| ToGuest::Write { id, path: path.to_owned(), mode };
        self.channel.ask(request, data).map(drop)
    }

    /// Sends a signal to any process of the guest.
    pub fn kill(&self, pid: u32, signal: Signal) -> Result<()> {
        let pid = i32::try_from(pid).context("a pid past 31 bits")?;
        let signal = signal as i32;
        self.channel.ask(|id| ToGuest::Kill { id, pid, signal }, &[]).map(drop)
    }

    /// The guest kernel's log so far.
    pub fn dmesg(&self) -> Result<String> {
        Ok(self.run(["dmesg"])?.stdout_text())
    }

    /// A connection to QEMU's control socket.
    pub fn qmp(&self) -> Result<Qmp> {
        Qmp::connect(&self.qmp_socket())
    }

    /// What the backend's admin socket says of the guest.
    pub fn status(&self) -> Result<serde_json::Value> {
        let mut socket =
            UnixStream::connect(self.folder.join("admin")).context("ask the admin socket")?;
        socket.write_all(b"{\"schema\":1,\"request\":\"status\"}\n").context("ask the backend")?;
        let mut answer: serde_json::Value =
            serde_json::from_reader(socket).context("read the backend's answer")?;
        Ok(answer["answer"].take())
    }

    /// Waits until what `cause` does has reset the machine, and the guest is up and set up again.
    pub fn reboot_by(&self, cause: impl FnOnce(&mut Qmp) -> Result<()>) -> Result<Ready> {
        let mut qmp = self.qmp()?;
        qmp.execute("set-action", json!({"reboot": "reset", "panic": "none"}))?;
        cause(&mut qmp)?;
        qmp.event("RESET")?;
        self.set_up_again()
    }

    /// Has the guest's kernel start the same kernel anew, past firmware and reset, and waits until
    /// the guest is set up again.
    pub fn kexec(&self) -> Result<Ready> {
        for name in ["vmlinuz", "image"] {
            let path = self.kernel.join(name);
            let data = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            self.write(&format!("/tmp/{name}"), 0o600, &data)?;
        }
        let mut qmp = self.qmp()?;
        let started = self.command(["/init", "kexec", "/tmp/vmlinuz", "/tmp/image"]).spawn()?;
        // Its port is closed when the old kernel leaves its devices, or the new one resets them.
        qmp.event("VSERPORT_CHANGE")?;
        drop(started);
        self.set_up_again()
    }

    fn set_up_again(&self) -> Result<Ready> {
        let ready = self.channel.set_up(self.setup.clone(), REBOOT)?;
        match ready.problems.first() {
            Some(problem) => bail!("{problem}"),
            None => Ok(ready),
        }
    }

    /// Has the guest sleep in a state of `/sys/power/state`, wakes it after `meanwhile`, and says
    /// how long that took.
    pub fn sleep(&self, state: &str, meanwhile: impl FnOnce()) -> Result<Duration> {
        let mut qmp = self.qmp()?;
        let asleep = self.command(["sh", "-c", &format!("echo {state} > /sys/power/state")]);
        let asleep = asleep.spawn()?;
        qmp.event("SUSPEND")?;
        meanwhile();
        let begin = Instant::now();
        qmp.execute("system_wakeup", json!({}))?;
        let output = asleep.wait()?;
        match output.success() {
            true => Ok(begin.elapsed()),
            false => bail!("{output}"),
        }
    }

    /// Kills QEMU as a crash of the host's would, and waits for its end.
    pub fn kill_qemu(&mut self) -> Result<()> {
        self.qemu.signal(Signal::SIGKILL)?;
        self.qemu.wait().map(drop)
    }

    /// QEMU's process, to be waited for.
    pub fn qemu_mut(&mut self) -> &mut Daemon {
        &mut self.qemu
    }

    /// Its control socket, of one client at a time.
    pub fn qmp_socket(&self) -> PathBuf {
        self.folder.join("qmp")
    }

    /// The guest's backend, to be signalled or waited for.
    pub fn backend_mut(&mut self) -> Option<&mut Daemon> {
        self.backend.as_mut()
    }

    /// The last lines of every log of this guest, for a failure's report.
    pub fn logs(&self) -> String {
        report(&self.name, &self.serial, Some(&self.qemu), self.backend.as_ref())
    }
}

/// The last lines of every log of a guest, booted or not.
pub(crate) fn report(
    name: &str,
    serial: &Path,
    qemu: Option<&Daemon>,
    backend: Option<&Daemon>,
) -> String {
    let mut text = String::new();
    let mut part = |what: &str, log: String| {
        if !log.trim().is_empty() {
            text.push_str(&format!("--- {name}: {what}, last lines\n{log}\n"));
        }
    };
    part("console", crate::process::tail(serial, 40));
    part("QEMU", qemu.map(|it| it.log_tail(20)).unwrap_or_default());
    part("backend", backend.map(|it| it.log_tail(40)).unwrap_or_default());
    text
}

/// A command being put together.
#[derive(Debug, Clone)]
pub struct Command<'a> {
    guest: &'a Guest,
    inner: proto::Command,
    input: Option<Vec<u8>>,
}

impl<'a> Command<'a> {
    /// Sets a variable of its environment.
    pub fn env(mut self, name: &str, value: &str) -> Self {
        self.inner.env.insert(name.to_owned(), value.to_owned());
        self
    }

    /// Sets the folder it starts in.
    pub fn cwd(mut self, path: &str) -> Self {
        self.inner.cwd = Some(path.to_owned());
        self
    }

    /// Gives it this standard input, whole.
    pub fn stdin(mut self, data: impl Into<Vec<u8>>) -> Self {
        self.inner.stdin = true;
        self.input = Some(data.into());
        self
    }

    /// Keeps its standard input open for [`Process::input`].
    pub fn input_later(mut self) -> Self {
        self.inner.stdin = true;
        self
    }

    /// Gives it a terminal of its own; input comes through [`Process::input`].
    pub fn terminal(mut self) -> Self {
        self.inner.terminal = true;
        self
    }

    /// Ends it after this long.
    pub fn timeout(mut self, limit: Duration) -> Self {
        self.inner.timeout_ms = u64::try_from(limit.as_millis()).unwrap_or(u64::MAX);
        self
    }

    /// Only prepares it; [`Process::go`] starts it. [`crate::Rig::together`]
    /// does both for several guests.
    pub fn hold(mut self) -> Self {
        self.inner.hold = true;
        self
    }

    /// Starts it.
    pub fn spawn(self) -> Result<Process<'a>> {
        let guest = self.guest;
        let (id, inbox) = guest.channel.listen();
        let patience = Duration::from_millis(self.inner.timeout_ms).saturating_add(GRACE);
        let held = self.inner.hold;
        let shown = self.inner.argv.join(" ");
        let mut process = Process { guest, id, inbox, patience, shown, pid: None };
        guest.channel.send(&ToGuest::Run { id, command: self.inner }, &[])?;
        if held {
            process.expect_held()?;
        } else {
            process.expect_start()?;
        }
        if let Some(input) = &self.input {
            process.input(input)?;
            process.input(&[])?;
        }
        Ok(process)
    }

    /// Runs it to its end.
    pub fn run(self) -> Result<Output> {
        self.spawn()?.wait()
    }
}

/// How much longer than a command's own limit the host waits for its end.
const GRACE: Duration = Duration::from_secs(15);

/// A command that runs in a guest, or is held there.
#[derive(Debug)]
pub struct Process<'a> {
    guest: &'a Guest,
    id: u32,
    inbox: Receiver<Event>,
    patience: Duration,
    shown: String,
    pid: Option<u32>,
}

impl Process<'_> {
    /// Its process in the guest; 0 while it is held.
    pub fn pid(&self) -> u32 {
        self.pid.unwrap_or(0)
    }

    /// Starts it, if it was held.
    pub fn go(&mut self) -> Result<()> {
        self.guest.channel.send(&ToGuest::Go { id: self.id }, &[])
    }

    /// Gives it standard input; no bytes close it.
    pub fn input(&self, data: &[u8]) -> Result<()> {
        self.guest.channel.send(&ToGuest::Stdin { id: self.id }, data)
    }

    /// A sender of standard input for another thread.
    pub(crate) fn id(&self) -> u32 {
        self.id
    }

    /// Signals its process group.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let message = ToGuest::Signal { id: self.id, signal: signal as i32 };
        self.guest.channel.send(&message, &[])
    }

    /// Waits for its end and collects its output.
    pub fn wait(self) -> Result<Output> {
        let mut output = Output { command: self.shown.clone(), ..Output::default() };
        self.wait_with(|message, data| match message {
            FromGuest::Stdout { .. } => output.stdout.extend_from_slice(data),
            FromGuest::Stderr { .. } => output.stderr.extend_from_slice(data),
            FromGuest::Exit { code, signal, micros, timed_out, .. } => {
                output.code = *code;
                output.signal = *signal;
                output.duration = Duration::from_micros(*micros);
                output.timed_out = *timed_out;
            }
            _ => {}
        })?;
        Ok(output)
    }

    /// Waits until its output holds this text, and returns what came so far.
    pub fn wait_for(&mut self, text: &str) -> Result<String> {
        let mut seen = Vec::new();
        while !String::from_utf8_lossy(&seen).contains(text) {
            match self.next()? {
                (FromGuest::Stdout { .. } | FromGuest::Stderr { .. }, data) => seen.extend(data),
                (other, _) => bail!(
                    "{} ended with {other:?} and never said {text:?}; it said: {}",
                    self.shown,
                    String::from_utf8_lossy(&seen)
                ),
            }
        }
        Ok(String::from_utf8_lossy(&seen).into_owned())
    }

    /// Hands every message on as it comes, up to and including its end.
    pub fn wait_with(mut self, mut see: impl FnMut(&FromGuest, &[u8])) -> Result<()> {
        loop {
            let (message, data) = self.next()?;
            see(&message, &data);
            if matches!(message, FromGuest::Exit { .. }) {
                return Ok(());
            }
        }
    }

    fn expect_held(&mut self) -> Result<()> {
        match self.next()? {
            (FromGuest::Held { .. }, _) => Ok(()),
            (other, _) => bail!("{} was to be held but answered {other:?}", self.shown),
        }
    }

    fn expect_start(&mut self) -> Result<()> {
        self.next().map(drop)?;
        self.pid.context("the agent sent output before it told of a start").map(drop)
    }

    fn next(&mut self) -> Result<Event> {
        let what = &self.shown;
        match self.inbox.recv_timeout(self.patience) {
            Ok((FromGuest::Failed { error, .. }, _)) => bail!("in {}: {error}", self.guest.name),
            Ok(event) => {
                if let FromGuest::Started { pid, .. } = &event.0 {
                    self.pid = Some(*pid);
                }
                Ok(event)
            }
            Err(RecvTimeoutError::Disconnected) => {
                bail!("the guest ended while {what} ran in it\n{}", self.guest.logs())
            }
            Err(RecvTimeoutError::Timeout) => {
                bail!("{what}: no word from the guest's agent\n{}", self.guest.logs())
            }
        }
    }
}

impl Drop for Process<'_> {
    fn drop(&mut self) {
        self.guest.channel.forget(self.id);
    }
}

/// How a command ended, and what it said.
#[derive(Debug, Clone, Default)]
pub struct Output {
    /// The command.
    pub command: String,
    /// Its exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// From start to end, by the guest's clock.
    pub duration: Duration,
    /// It was ended because its time was up.
    pub timed_out: bool,
    /// Its standard output.
    pub stdout: Vec<u8>,
    /// Its standard error.
    pub stderr: Vec<u8>,
}

impl Output {
    /// It ended with 0.
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }

    /// Its standard output as text.
    pub fn stdout_text(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    /// Its standard error as text.
    pub fn stderr_text(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    /// How it ended, in words.
    pub fn verdict(&self) -> String {
        match (self.timed_out, self.code, self.signal) {
            (true, ..) => format!("ended when its {:.0?} were up", self.duration),
            (_, Some(code), _) => format!("exit code {code}"),
            (_, _, Some(signal)) => format!("ended by signal {signal}"),
            _ => "ended in an unknown way".to_owned(),
        }
    }
}

impl fmt::Display for Output {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}: {} after {:.3?}", self.command, self.verdict(), self.duration)?;
        for (name, text) in [("stdout", self.stdout_text()), ("stderr", self.stderr_text())] {
            if !text.is_empty() {
                writeln!(f, "--- {name}\n{}", text.trim_end())?;
            }
        }
        Ok(())
    }
}
