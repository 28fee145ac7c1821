//! QEMU's own control socket.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

/// How long QEMU may take for an answer or an event.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection. QEMU serves one at a time.
#[derive(Debug)]
pub struct Qmp {
    socket: BufReader<UnixStream>,
}

impl Qmp {
    /// Connects to a guest's QEMU.
    pub fn connect(path: &Path) -> Result<Self> {
        let socket =
            UnixStream::connect(path).with_context(|| format!("connect to {}", path.display()))?;
        socket.set_read_timeout(Some(PATIENCE)).context("set a time limit on QMP")?;
        let mut qmp = Self { socket: BufReader::new(socket) };
        qmp.next()?;
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Carries out a command and returns its answer.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let line = json!({"execute": command, "arguments": arguments});
        writeln!(self.socket.get_mut(), "{line}").context("write to QEMU")?;
        loop {
            let mut message = self.next()?;
            if message.get("error").is_some() {
                bail!("QEMU refuses {line}: {}", message["error"]);
            }
            if message.get("return").is_some() {
                return Ok(message["return"].take());
            }
        }
    }

    /// Waits for an event from now on.
    pub fn event(&mut self, name: &str) -> Result<()> {
        while self.next()?["event"] != name {}
        Ok(())
    }

    fn next(&mut self) -> Result<Value> {
        let mut line = String::new();
        if self.socket.read_line(&mut line).context("read from QEMU")? == 0 {
            bail!("QEMU has closed its control socket");
        }
        serde_json::from_str(&line).with_context(|| format!("read {line:?} of QEMU"))
    }
}
