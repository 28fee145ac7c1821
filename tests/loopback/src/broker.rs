//! The backend's process.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::{Options, Result};

const NAME: &str = "vhost-user-nvguest";
/// How long the backend may take to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// A backend that was started here.
pub struct Broker {
    child: Child,
}

impl Broker {
    /// Starts the backend; it listens on `backend` in the folder.
    pub fn start(options: &Options, folder: &Path) -> Result<Self> {
        let named = options.backend.clone();
        let named = named.or_else(|| std::env::var_os("NVGUEST_BACKEND").map(PathBuf::from));
        let binary = named.map_or_else(|| crate::beside(NAME), Ok)?;
        let socket = folder.join("backend");
        let child = Command::new(&binary)
            .arg("--host")
            .arg(&options.host)
            .arg("--socket-path")
            .arg(&socket)
            .args(nix::unistd::geteuid().is_root().then_some("--allow-root"))
            .args(&options.backend_arg)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .map_err(|error| format!("{} was not started: {error}", binary.display()))?;
        let mut broker = Self { child };
        let start = Instant::now();
        while !socket.exists() {
            if let Some(status) = broker.child.try_wait()? {
                return Err(format!("{} ended: {status}", binary.display()).into());
            }
            if start.elapsed() > PATIENCE {
                return Err(format!("{} does not listen", binary.display()).into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(broker)
    }

    /// Waits for its end, which the end of its guest brings.
    pub fn end(mut self) {
        let start = Instant::now();
        while matches!(self.child.try_wait(), Ok(None)) && start.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Drop for Broker {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}
