//! The guests of this host: their backends' admin sockets, and how to ask there.
//!
//! A backend with a name listens on `nvguest/NAME/admin.sock` under `$XDG_RUNTIME_DIR`, or
//! under `/run` without that.

use std::collections::BTreeMap;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use serde_json::{json, Value};

use crate::lines::{self, Lines};

/// Version of the admin protocol that this speaks.
pub const SCHEMA: u64 = 1;
/// A backend answers within this, or is stuck.
const PATIENCE: Duration = Duration::from_secs(5);

/// A guest's backend.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Its name.
    pub name: String,
    /// Where it answers.
    pub socket: PathBuf,
}

/// Why a backend did not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Silence {
    /// Nobody listens.
    Gone,
    /// It is another user's.
    Foreign,
}

/// The folders that hold a folder for each guest.
pub fn folders() -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let roots = own.map(PathBuf::from).into_iter().chain([PathBuf::from("/run")]);
    roots.map(|root| root.join("nvguest")).collect()
}

/// Where the sockets of a new guest go.
pub fn folder(name: &str) -> PathBuf {
    folders().swap_remove(0).join(name)
}

/// A guest by its name, or by the path of its admin socket, whether its backend lives or not.
pub fn located(name: &str) -> Guest {
    if name.contains('/') {
        return Guest { name: name.to_owned(), socket: name.into() };
    }
    let known = folders().into_iter().map(|folder| folder.join(name)).find(|it| it.exists());
    let socket = known.unwrap_or_else(|| folder(name)).join("admin.sock");
    Guest { name: name.to_owned(), socket }
}

/// Every guest, by name.
pub fn all() -> Vec<Guest> {
    let mut found = BTreeMap::new();
    for folder in folders() {
        let Ok(entries) = folder.read_dir() else { continue };
        for entry in entries.flatten() {
            let socket = entry.path().join("admin.sock");
            // A folder of another user's hides its socket, but not itself.
            let hidden = matches!(socket.symlink_metadata(),
                Err(error) if error.kind() == ErrorKind::PermissionDenied);
            if let (Ok(name), true) = (entry.file_name().into_string(), hidden || socket.exists()) {
                found.entry(name.clone()).or_insert(Guest { name, socket });
            }
        }
    }
    found.into_values().collect()
}

/// The guest with this name, or behind this socket.
pub fn named(name: &str) -> Result<Guest> {
    if name.contains('/') {
        return Ok(located(name));
    }
    let all = all();
    let names: Vec<&str> = all.iter().map(|guest| guest.name.as_str()).collect();
    let known = if names.is_empty() {
        "none is here; start backends with --name, or give the path of an admin socket".to_owned()
    } else {
        format!("there are {}", names.join(", "))
    };
    all.iter()
        .find(|guest| guest.name == name)
        .cloned()
        .with_context(|| format!("there is no guest {name:?}: {known}"))
}

impl Guest {
    /// Where all its sockets are.
    pub fn folder(&self) -> &Path {
        self.socket.parent().unwrap_or(Path::new("."))
    }

    /// The state of the guest.
    pub fn status(&self) -> Result<Value> {
        self.ask(json!({"request": "status"}))
    }

    /// Asks, and returns the answer.
    pub fn ask(&self, request: Value) -> Result<Value> {
        let reply = exchange(&self.socket, request).with_context(|| self.unheard())?;
        self.answer(&reply)
    }

    /// Asks for a stream, and returns the answer and what follows it.
    pub fn watch(&self, request: Value) -> Result<(Value, Lines)> {
        let stream = send(&self.socket, request).with_context(|| self.unheard())?;
        let mut lines = Lines::new(stream);
        let first = lines.next(Some(Instant::now() + PATIENCE)).with_context(|| self.unheard())?;
        Ok((self.answer(&first.with_context(|| self.unheard())?)?, lines))
    }

    fn answer(&self, reply: &Value) -> Result<Value> {
        if let Some(error) = reply["error"].as_str() {
            bail!("the backend of {} refuses: {error}", self.name);
        }
        if reply["schema"].as_u64() != Some(SCHEMA) {
            bail!(
                "the backend of {} speaks schema {} and this program {SCHEMA}; use the nvguest \
                 that came with it",
                self.name,
                reply["schema"]
            );
        }
        Ok(reply["answer"].clone())
    }

    /// Why it does not answer, if it is one of the reasons that have a name.
    pub fn silence(error: &anyhow::Error) -> Option<Silence> {
        match error.downcast_ref::<std::io::Error>()?.kind() {
            ErrorKind::ConnectionRefused | ErrorKind::NotFound => Some(Silence::Gone),
            ErrorKind::PermissionDenied => Some(Silence::Foreign),
            _ => None,
        }
    }

    fn unheard(&self) -> String {
        format!(
            "{} does not answer on {}; is its backend there (nvguest list), and yours (or are \
             you root)?",
            self.name,
            self.socket.display()
        )
    }
}

/// Whether a process listens on a stream socket. Asked in a way that cannot connect: a backend
/// serves one connection, and this is none.
pub fn is_listening(socket: &Path) -> bool {
    let asked = UnixDatagram::unbound().and_then(|datagram| datagram.connect(socket));
    match asked {
        Err(error) => error.raw_os_error() == Some(nix::libc::EPROTOTYPE),
        Ok(()) => false,
    }
}

fn send(socket: &Path, mut request: Value) -> Result<UnixStream> {
    request["schema"] = SCHEMA.into();
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(format!("{request}\n").as_bytes())?;
    Ok(stream)
}

fn exchange(socket: &Path, request: Value) -> Result<Value> {
    let mut reply = String::new();
    send(socket, request)?.read_to_string(&mut reply)?;
    lines::parse(reply.as_bytes())
}
