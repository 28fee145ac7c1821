//! `trace`: the calls of the guest as a stream of lines, for one admin at a time.
//!
//! ```text
//! → {"schema":1,"request":"trace"}                add "slow_ns":1000000 and "errors":true
//! ← {"schema":1,"answer":{"release":"580.159.04","profile":"580.142"}}
//! ← {"schema":1,"at_ns":…,"took_ns":…,"process":100,"kind":"ioctl","file":"ctl",
//!    "what":"control","number":545259778,"errno":0,"status":0}
//! ← {"schema":1,"lost":12}                        calls that went by unread
//! ```
//!
//! It ends when whoever asked goes away or does not read. Numbers have no names here: who asks
//! has the profile.
#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::Duration;

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nvguest_abi::FileKind;
use serde_json::{json, Value};

use super::admin::SCHEMA;
use super::Broker;
use crate::errno::Errno;
use crate::policy::What;
use crate::transport::trace::{Reader, Record, Trace, Wanted};
use crate::wire::Kind;

/// Bytes that are gathered before they are sent.
const BATCH: usize = 64 << 10;
/// Whoever reads slower than this is dropped.
const PATIENCE: Duration = Duration::from_secs(5);

/// The guest's calls, and whether somebody looks.
pub struct Tracing {
    ring: Trace,
    taken: AtomicBool,
}

impl Tracing {
    /// Nobody looks.
    pub fn create() -> Result<Self, Errno> {
        Ok(Self { ring: Trace::create()?, taken: AtomicBool::new(false) })
    }

    /// What workers write in.
    pub fn ring(&self) -> &Trace {
        &self.ring
    }
}

/// Shows `client` what is wanted of the guest's calls, until it has enough.
pub fn start(broker: &Arc<Broker>, client: UnixStream, wanted: Wanted) -> Result<(), String> {
    if broker.trace.taken.swap(true, Ordering::AcqRel) {
        return Err("somebody traces this guest already, and one at a time may; end that".into());
    }
    let broker = Arc::clone(broker);
    let looking = Looking(Arc::clone(&broker));
    let started =
        std::thread::Builder::new().name("trace".into()).stack_size(256 << 10).spawn(move || {
            if let Err(error) = looking.show(&client, wanted) {
                tracing::debug!(%error, "a trace ended");
            }
        });
    started.map(drop).map_err(|error| format!("the trace's thread cannot be started: {error}"))
}

/// Somebody looks, as long as this lives.
struct Looking(Arc<Broker>);

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.trace.ring.set(None);
        self.0.trace.taken.store(false, Ordering::Release);
    }
}

impl Looking {
    fn show(&self, mut client: &UnixStream, wanted: Wanted) -> io::Result<()> {
        client.set_write_timeout(Some(PATIENCE))?;
        let ring = &self.0.trace.ring;
        let mut reader = Reader::new(ring);
        ring.set(Some(wanted));
        let compiled = &self.0.compiled;
        let head = json!({"release": compiled.release, "profile": compiled.profile});
        writeln!(client, "{}", json!({"schema": SCHEMA, "answer": head}))?;
        while !is_gone(client)? {
            let mut batch = Batch { client, text: String::new(), sent: Ok(()) };
            reader.take(|record| batch.add(&line(&record)));
            match reader.lost() {
                0 => {}
                lost => batch.add(&json!({"schema": SCHEMA, "lost": lost})),
            }
            batch.end()?;
        }
        Ok(())
    }
}

/// Waits for the next look; whether nobody is there any more to look. Whoever says something
/// more has had enough.
fn is_gone(client: &UnixStream) -> io::Result<bool> {
    // CAST: a few milliseconds.
    let wait = PollTimeout::from(Reader::INTERVAL.as_millis() as u16);
    let mut fds = [PollFd::new(client.as_fd(), PollFlags::POLLIN)];
    match poll(&mut fds, wait) {
        Err(nix::Error::EINTR) => Ok(false),
        count => Ok(count? > 0),
    }
}

/// Lines on their way.
struct Batch<'a> {
    client: &'a UnixStream,
    text: String,
    sent: io::Result<()>,
}

impl Batch<'_> {
    fn add(&mut self, line: &Value) {
        if self.sent.is_err() {
            return;
        }
        self.text.push_str(&line.to_string());
        self.text.push('\n');
        if self.text.len() >= BATCH {
            self.send();
        }
    }

    fn send(&mut self) {
        self.sent = self.client.write_all(self.text.as_bytes());
        self.text.clear();
    }

    fn end(mut self) -> io::Result<()> {
        if self.sent.is_ok() {
            self.send();
        }
        self.sent
    }
}

/// A call as a line. A worker may have written anything: what has no name has none here.
fn line(record: &Record) -> Value {
    let what = record.what.and_then(|(part, number)| What::from_parts(part.into(), number.into()));
    let (what, number) = what.map(parts).unzip();
    json!({
        "schema": SCHEMA,
        "at_ns": record.at_ns,
        "took_ns": record.took_ns,
        "process": record.tgid,
        "kind": Kind::from_number(record.kind.into()).map(Kind::name),
        "file": FileKind::from_number(record.file).map(file),
        "what": what,
        "number": number,
        "errno": record.errno,
        "status": record.status,
    })
}

fn parts(what: What) -> (&'static str, u32) {
    match what {
        What::Escape(_, nr) => ("escape", nr),
        What::Control(command) => ("control", command),
        What::Class(class) => ("class", class),
        What::VidHeap(function) => ("vidheap", function),
        What::Uvm(nr) => ("uvm", nr),
    }
}

fn file(kind: FileKind) -> &'static str {
    match kind {
        FileKind::Ctl => "ctl",
        FileKind::Gpu => "gpu",
        FileKind::Uvm => "uvm",
        FileKind::Modeset => "modeset",
        FileKind::Cap => "cap",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_made_up_has_no_name() {
        let junk = Record { kind: 99, file: 77, what: Some((200, 1)), ..Record::default() };
        let line = line(&junk);
        assert!(line["kind"].is_null() && line["file"].is_null() && line["what"].is_null());
        assert!(line["number"].is_null() && line["status"].is_null());
    }

    #[test]
    fn a_call_is_told_with_its_numbers() {
        let record =
            Record { kind: 6, file: 0, what: Some((16, 7)), errno: 5, ..Record::default() };
        let line = line(&record);
        assert_eq!((&line["kind"], &line["what"]), (&"ioctl".into(), &"control".into()));
        assert_eq!((&line["number"], &line["errno"]), (&7.into(), &5.into()));
    }
}
