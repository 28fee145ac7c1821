//! QEMU's monitor, QMP: a command and its answer, and events between them.
//!
//! Messages are as QEMU's `docs/interop/qmp-spec.rst` has them.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

use crate::lines::Lines;

/// QEMU answers within this; longer only if its main loop is stuck.
const PATIENCE: Duration = Duration::from_secs(10);
/// Events that are kept while an answer is awaited. Older ones are forgotten.
const MAX_EVENTS: usize = 256;

/// A connection to QEMU.
pub struct Qmp {
    lines: Lines,
    events: VecDeque<Value>,
    /// QEMU's version, e.g. 11.1.3.
    pub version: String,
}

/// QEMU refused a command.
#[derive(Debug)]
pub struct Refusal {
    /// The command.
    pub command: String,
    /// QEMU's words.
    pub reason: String,
}

impl std::fmt::Display for Refusal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "QEMU refuses {}: {}", self.command, self.reason)
    }
}

impl std::error::Error for Refusal {}

impl Qmp {
    /// Connects to the monitor behind a socket, and greets.
    pub fn connect(socket: &Path) -> Result<Self> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("QEMU's monitor {} cannot be reached", socket.display()))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let (lines, events) = (Lines::new(stream), VecDeque::new());
        let mut qmp = Self { lines, events, version: String::new() };
        let Some(greeting) = qmp.lines.next(Some(Instant::now() + PATIENCE))? else {
            bail!(
                "{} says nothing within {PATIENCE:?}: QEMU serves one client of a monitor at a \
                 time, so another has it (libvirt?); give QEMU a second -qmp",
                socket.display()
            )
        };
        let version = &greeting["QMP"]["version"]["qemu"];
        if !version.is_object() {
            bail!("{} is no monitor of QEMU: it says {greeting}", socket.display());
        }
        qmp.version = ["major", "minor", "micro"].map(|part| version[part].to_string()).join(".");
        qmp.execute("qmp_capabilities", json!({}))?;
        Ok(qmp)
    }

    /// Has a command done and returns its answer; [`Refusal`] if QEMU refuses it.
    pub fn execute(&mut self, command: &str, arguments: Value) -> Result<Value> {
        let deadline = Instant::now() + PATIENCE;
        let gone = || format!("QEMU did not answer {command}");
        self.lines.say(&json!({"execute": command, "arguments": arguments})).with_context(gone)?;
        loop {
            let mut line =
                self.lines.next(Some(deadline)).with_context(gone)?.with_context(gone)?;
            if line["event"].is_string() {
                self.keep(line);
            } else if let Some(reason) = line["error"]["desc"].as_str() {
                let (command, reason) = (command.to_owned(), reason.to_owned());
                return Err(Refusal { command, reason }.into());
            } else {
                return Ok(line["return"].take());
            }
        }
    }

    /// Waits for an event of which `wanted` is so; whether it came in time.
    pub fn await_event(
        &mut self,
        name: &str,
        wanted: impl Fn(&Value) -> bool,
        patience: Duration,
    ) -> Result<bool> {
        let deadline = Instant::now() + patience;
        loop {
            while let Some(event) = self.events.pop_front() {
                if event["event"] == name && wanted(&event["data"]) {
                    return Ok(true);
                }
            }
            match self.lines.next(Some(deadline))? {
                Some(line) if line["event"].is_string() => self.keep(line),
                Some(_) => {}
                None if Instant::now() >= deadline => return Ok(false),
                None => bail!("QEMU ended while {name} was awaited"),
            }
        }
    }

    fn keep(&mut self, event: Value) {
        if self.events.len() >= MAX_EVENTS {
            self.events.pop_front();
        }
        self.events.push_back(event);
    }
}

#[cfg(test)]
pub mod fake {
    //! A monitor that answers as it was told to.

    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::UnixListener;
    use std::path::{Path, PathBuf};
    use std::thread::JoinHandle;

    use serde_json::Value;

    /// Listens in `folder`; `answer` says for each command what lines come back, and none end
    /// the connection. The thread returns the commands.
    pub fn start(
        folder: &Path,
        answer: impl Fn(&str, &Value) -> Vec<Value> + Send + 'static,
    ) -> (PathBuf, JoinHandle<Vec<String>>) {
        let socket = folder.join("qmp.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let serving = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let greeting = r#"{"QMP":{"version":{"qemu":{"micro":3,"minor":1,"major":11}}}}"#;
            writeln!(stream, "{greeting}").unwrap();
            let mut said = Vec::new();
            let lines = BufReader::new(stream.try_clone().unwrap()).lines();
            for line in lines.map_while(Result::ok) {
                let command: Value = serde_json::from_str(&line).unwrap();
                let name = command["execute"].as_str().unwrap().to_owned();
                let lines = match name.as_str() {
                    "qmp_capabilities" => vec![serde_json::json!({"return": {}})],
                    name => answer(name, &command["arguments"]),
                };
                said.push(name);
                if lines.is_empty() {
                    break;
                }
                for line in lines {
                    writeln!(stream, "{line}").unwrap();
                }
            }
            said
        });
        (socket, serving)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHORT: Duration = Duration::from_millis(50);

    #[test]
    fn events_between_a_command_and_its_answer_are_not_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, serving) = fake::start(folder.path(), |_, _| {
            vec![
                json!({"event": "RESUME", "data": {}}),
                json!({"event": "DEVICE_DELETED", "data": {"device": "other"}}),
                json!({"return": {"running": true}}),
                json!({"event": "DEVICE_DELETED", "data": {"device": "nv"}}),
            ]
        });
        let mut qmp = Qmp::connect(&socket).unwrap();
        assert_eq!(qmp.version, "11.1.3");
        assert_eq!(qmp.execute("query-status", json!({})).unwrap()["running"], true);
        let ours = |data: &Value| data["device"] == "nv";
        assert!(qmp.await_event("DEVICE_DELETED", ours, PATIENCE).unwrap());
        assert!(!qmp.await_event("DEVICE_DELETED", ours, SHORT).unwrap());
        drop(qmp);
        assert_eq!(serving.join().unwrap(), ["qmp_capabilities", "query-status"]);
    }

    #[test]
    fn a_refusal_has_qemu_s_own_words() {
        let folder = tempfile::tempdir().unwrap();
        let desc = "Bus 'pcie.0' does not support hotplugging";
        let refuse = move |_: &str, _: &Value| vec![json!({"error": {"class": "G", "desc": desc}})];
        let (socket, _serving) = fake::start(folder.path(), refuse);
        let mut qmp = Qmp::connect(&socket).unwrap();
        let error = qmp.execute("device_del", json!({"id": "nv"})).unwrap_err();
        assert!(error.is::<Refusal>());
        assert_eq!(error.to_string(), format!("QEMU refuses device_del: {desc}"));
    }

    #[test]
    fn a_qemu_that_ends_meanwhile_is_told_from_one_that_is_slow() {
        let folder = tempfile::tempdir().unwrap();
        let (socket, _serving) = fake::start(folder.path(), |_, _| Vec::new());
        let mut qmp = Qmp::connect(&socket).unwrap();
        let error = qmp.execute("device_del", json!({})).unwrap_err();
        assert!(format!("{error:#}").contains("did not answer device_del"), "{error:#}");
        let error = qmp.await_event("DEVICE_DELETED", |_| true, PATIENCE).unwrap_err();
        assert!(error.to_string().contains("QEMU ended"), "{error}");
    }

    #[test]
    fn what_is_no_monitor_is_said_to_be_none() {
        let folder = tempfile::tempdir().unwrap();
        let error = Qmp::connect(&folder.path().join("none")).err().unwrap();
        assert!(format!("{error:#}").contains("cannot be reached"), "{error:#}");
    }
}
