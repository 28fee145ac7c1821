//! Child processes that never outlive us.
//!
//! Every child is killed when its handle is dropped, and by the kernel when
//! this process dies in any other way. That bond is to the *thread* that
//! started the child, so one thread that lives as long as the process starts
//! them all.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Sender};
use std::sync::{Mutex, OnceLock, PoisonError};

use anyhow::{Context, Result};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;

type Order = (Command, Sender<io::Result<Child>>);

/// Starts the command; it dies when this process does.
fn spawn_bound(command: Command) -> io::Result<Child> {
    static SPAWNER: OnceLock<Mutex<Sender<Order>>> = OnceLock::new();
    let spawner = SPAWNER.get_or_init(|| {
        let (orders, inbox) = channel::<Order>();
        std::thread::spawn(move || {
            while let Ok((mut command, answer)) = inbox.recv() {
                let _asker_gone = answer.send(command.spawn());
            }
        });
        Mutex::new(orders)
    });
    let (answer, outcome) = channel();
    let sent = spawner.lock().unwrap_or_else(PoisonError::into_inner).send((command, answer));
    sent.map_err(|_| io::Error::other("the thread that starts processes is gone"))?;
    outcome.recv().map_err(io::Error::other)?
}

/// A child process of the rig, with its output in a log file.
#[derive(Debug)]
pub struct Daemon {
    name: String,
    child: Child,
    log: PathBuf,
}

impl Daemon {
    /// Starts `argv`, its standard output and error going to `log`.
    pub fn start(name: &str, argv: &[String], log: &Path) -> Result<Daemon> {
        let file = File::create(log).with_context(|| format!("create {}", log.display()))?;
        let copy = file.try_clone().with_context(|| format!("duplicate {}", log.display()))?;
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--"]).args(argv);
        command.stdin(Stdio::null()).stdout(file).stderr(copy);
        let child =
            spawn_bound(command).with_context(|| format!("start {name} ({})", argv.join(" ")))?;
        Ok(Daemon { name: name.to_owned(), child, log: log.to_owned() })
    }

    /// The process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// How it ended, once it has.
    pub fn ended(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().with_context(|| format!("look at {}", self.name))
    }

    /// Sends a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        let pid = i32::try_from(self.pid()).context("a pid past 31 bits")?;
        kill(Pid::from_raw(pid), signal).with_context(|| format!("send {signal} to {}", self.name))
    }

    /// Waits for its end.
    pub fn wait(&mut self) -> Result<ExitStatus> {
        self.child.wait().with_context(|| format!("wait for {}", self.name))
    }

    /// The last lines of its log, for a person to read.
    pub fn log_tail(&self, lines: usize) -> String {
        tail(&self.log, lines)
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _already_gone = self.child.kill();
        let _reaped = self.child.wait();
    }
}

/// The last lines of a file; what could not be read is said in its place.
pub fn tail(path: &Path, lines: usize) -> String {
    match std::fs::read(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let all: Vec<&str> = text.lines().collect();
            all[all.len().saturating_sub(lines)..].join("\n")
        }
        Err(error) => format!("(could not read {}: {error})", path.display()),
    }
}

/// Runs a command to its end and returns its standard output; an error carries
/// what it wrote to standard error.
pub fn capture(command: &mut Command) -> Result<Vec<u8>> {
    let shown = show(command);
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("start {}", command.get_program().to_string_lossy()))?;
    if !output.status.success() {
        anyhow::bail!(
            "{shown} ended with {}:\n{}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(output.stdout)
}

/// The command as a person would type it.
pub fn show(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words.map(|word| word.to_string_lossy()).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_dies_with_its_handle() {
        let folder = tempfile::tempdir().unwrap();
        let argv = ["sleep".to_owned(), "600".to_owned()];
        let daemon = Daemon::start("sleep", &argv, &folder.path().join("log")).unwrap();
        let pid = Pid::from_raw(i32::try_from(daemon.pid()).unwrap());
        assert!(kill(pid, None).is_ok());
        drop(daemon);
        assert!(kill(pid, None).is_err());
    }

    #[test]
    fn the_error_of_a_failed_command_carries_what_it_said() {
        let error = capture(Command::new("sh").args(["-c", "echo because >&2; exit 3"]));
        let text = format!("{:#}", error.unwrap_err());
        assert!(text.contains("because") && text.contains('3'), "{text}");
    }
}
