//! The backend's processes: started for a test, observed, and gone at its end.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use serde_json::Value;

use crate::{Error, Result};

/// How long anything of the backend may take that a test waits for.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// A broker and its workers.
pub struct Backend {
    child: Child,
    folder: tempfile::TempDir,
}

/// What a process holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Held {
    /// Open descriptors.
    pub fds: usize,
    /// Memory of its own, in KiB: neither of files nor of the guest.
    pub own_kib: u64,
    /// Resident memory, in KiB.
    pub rss_kib: u64,
}

impl Backend {
    /// Starts `binary` with the simulated card, and waits until it listens.
    pub fn start(binary: impl AsRef<Path>) -> Result<Self> {
        Self::with(binary, &[], &[])
    }

    /// The same with more arguments and environment.
    pub fn with(
        binary: impl AsRef<Path>,
        args: &[&str],
        environment: &[(&str, &str)],
    ) -> Result<Self> {
        Self::launch(Command::new(binary.as_ref()), args, environment, tempfile::tempdir()?)
    }

    /// Starts `binary` as another user; only root can.
    pub fn of_user(binary: impl AsRef<Path>, user: u32) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        std::os::unix::fs::chown(folder.path(), Some(user), Some(user))?;
        let mut command = Command::new(binary.as_ref());
        command.uid(user).gid(user);
        Self::launch(command, &[], &[], folder)
    }

    fn launch(
        mut command: Command,
        args: &[&str],
        environment: &[(&str, &str)],
        folder: tempfile::TempDir,
    ) -> Result<Self> {
        let log = std::fs::File::create(folder.path().join("log"))?;
        let child = command
            .arg("--host=sim")
            .arg("--socket-path")
            .arg(folder.path().join("socket"))
            .arg("--admin-socket")
            .arg(folder.path().join("admin"))
            .args(nix::unistd::geteuid().is_root().then_some("--allow-root"))
            .args(args)
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stderr(log)
            .spawn()?;
        let mut backend = Self { child, folder };
        // A socket is there a moment before it listens; that for admins is the last.
        let listens = |backend: &mut Self| {
            backend.socket().exists() && UnixStream::connect(backend.admin()).is_ok()
                || !matches!(backend.child.try_wait(), Ok(None))
        };
        if !wait_until(PATIENCE, || listens(&mut backend)) || !backend.socket().exists() {
            return Err(Error::Io(std::io::Error::other(format!(
                "the backend does not listen: {}",
                backend.log()
            ))));
        }
        Ok(backend)
    }

    /// Where it listens.
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("socket")
    }

    /// Where it answers admins.
    pub fn admin(&self) -> PathBuf {
        self.folder.path().join("admin")
    }

    /// The broker's process id.
    pub fn pid(&self) -> i32 {
        // CAST: a pid is a positive i32.
        self.child.id() as i32
    }

    /// What the broker and its workers wrote so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }

    /// What the broker says of itself.
    pub fn status(&self) -> Result<Value> {
        let mut reply = self.ask(r#"{"schema":1,"request":"status"}"#)?;
        Ok(reply["answer"].take())
    }

    /// What the broker answers to a line on its admin socket.
    pub fn ask(&self, line: &str) -> Result<Value> {
        let mut text = String::new();
        let mut stream = UnixStream::connect(self.admin())?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(format!("{line}\n").as_bytes())?;
        stream.read_to_string(&mut text)?;
        serde_json::from_str(&text).map_err(|_| Error::Malformed("the admin socket"))
    }

    /// Workers: number, process id on the host, process id in the guest.
    pub fn workers(&self) -> Result<Vec<(u16, i32, u32)>> {
        let status = self.status()?;
        let number = |value: &Value| value.as_i64().unwrap_or(-1);
        let workers = status["workers"].as_array().cloned().unwrap_or_default();
        let read = |worker: &Value| {
            let field = |name: &str| i32::try_from(number(&worker[name])).ok();
            let worker_number = u16::try_from(field("worker")?).ok()?;
            Some((worker_number, field("pid")?, u32::try_from(field("guest_tgid")?).ok()?))
        };
        Ok(workers.iter().filter_map(read).collect())
    }

    /// The worker of a guest process, on the host.
    pub fn worker_of(&self, tgid: u32) -> Option<i32> {
        self.workers().ok()?.into_iter().find(|worker| worker.2 == tgid).map(|worker| worker.1)
    }

    /// Sends the broker a signal.
    pub fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.pid()), signal)?)
    }

    /// How the broker ended, waiting so long for it.
    pub fn ended(&mut self, patience: Duration) -> Option<ExitStatus> {
        let mut status = None;
        wait_until(patience, || {
            status = self.child.try_wait().ok().flatten();
            status.is_some()
        });
        status
    }

    /// What the broker holds.
    pub fn held(&self) -> Result<Held> {
        held(self.pid())
    }
}

impl Drop for Backend {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
        if std::thread::panicking() {
            eprintln!("the backend's log:\n{}", self.log());
        }
    }
}

/// What a process holds.
pub fn held(pid: i32) -> Result<Held> {
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))?.count();
    let rollup = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?;
    let field = |name: &str| {
        let line = rollup.lines().find(|line| line.starts_with(name))?;
        line.split_ascii_whitespace().nth(1)?.parse::<u64>().ok()
    };
    let (Some(own_kib), Some(rss_kib)) = (field("Anonymous:"), field("Rss:")) else {
        return Err(Error::Malformed("smaps_rollup"));
    };
    Ok(Held { fds, own_kib, rss_kib })
}

/// Whether a process is there and not dead.
pub fn is_alive(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat"))
        .ok()
        .and_then(|stat| stat.rsplit(')').next()?.trim().chars().next())
        .is_some_and(|state| state != 'Z' && state != 'X')
}

/// Looks again and again until something is so; `false` if it is not so in time.
pub fn wait_until(patience: Duration, mut so: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + patience;
    while !so() {
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    true
}
