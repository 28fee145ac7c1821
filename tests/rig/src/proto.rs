//! What the host and the agent in a guest say to each other over the
//! virtio-serial port `nvguest.agent`.
//!
//! A frame is two little-endian 32-bit lengths, a JSON message of the first
//! length and raw bytes of the second. Bytes carry output, input and files, so
//! that nothing is ever re-encoded. Messages that belong to one command carry
//! the id that the host chose for it.

use std::collections::BTreeMap;
use std::io::{self, Read, Write};

use serde::{de::DeserializeOwned, Deserialize, Serialize};

/// The name of the port, under `/sys/class/virtio-ports/*/name` in the guest.
pub const PORT: &str = "nvguest.agent";

/// Where the image keeps the module that carries the driver's calls.
pub const MODULE: &str = "/lib/nvguest/virtio_nvguest.ko";

/// The longest message or payload that either side accepts.
const LIMIT: u32 = 64 << 20;

/// Host to agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ToGuest {
    /// The first message: become this guest, then answer [`FromGuest::Ready`].
    Setup(Setup),
    /// Start a command. With `hold` it answers `Held` and waits for `Go`.
    Run {
        /// The host's name for the command.
        id: u32,
        /// What to start, and how.
        command: Command,
    },
    /// Start a held command now.
    Go {
        /// The command.
        id: u32,
    },
    /// Bytes for the command's standard input; no bytes close it.
    Stdin {
        /// The command.
        id: u32,
    },
    /// Send a signal to the command's process group.
    Signal {
        /// The command.
        id: u32,
        /// A Linux signal number.
        signal: i32,
    },
    /// Send a signal to any process of the guest.
    Kill {
        /// The id of the answer.
        id: u32,
        /// The process.
        pid: i32,
        /// A Linux signal number.
        signal: i32,
    },
    /// Read a file whole.
    Read {
        /// The id of the answer.
        id: u32,
        /// Its path in the guest.
        path: String,
    },
    /// Write the frame's bytes to a file.
    Write {
        /// The id of the answer.
        id: u32,
        /// Its path in the guest.
        path: String,
        /// Its permission bits.
        mode: u32,
    },
    /// Power the guest off.
    PowerOff,
}

/// Agent to host.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum FromGuest {
    /// The guest is set up.
    Ready(Ready),
    /// A held command is prepared.
    Held {
        /// The command.
        id: u32,
    },
    /// A command runs.
    Started {
        /// The command.
        id: u32,
        /// Its process, in the guest.
        pid: u32,
    },
    /// Bytes of a command's standard output.
    Stdout {
        /// The command.
        id: u32,
    },
    /// Bytes of a command's standard error.
    Stderr {
        /// The command.
        id: u32,
    },
    /// A command has ended.
    Exit {
        /// The command.
        id: u32,
        /// Its exit code, unless a signal ended it.
        code: Option<i32>,
        /// The signal that ended it.
        signal: Option<i32>,
        /// From start to end, by the guest's clock.
        micros: u64,
        /// The agent ended it because its time was up.
        timed_out: bool,
    },
    /// A request without output is done; bytes are a file's.
    Done {
        /// The request.
        id: u32,
    },
    /// A request could not be carried out.
    Failed {
        /// The request.
        id: u32,
        /// What failed, and why.
        error: String,
    },
}

impl FromGuest {
    /// The request that the message answers, if it answers one.
    pub fn id(&self) -> Option<u32> {
        match self {
            FromGuest::Ready(_) => None,
            FromGuest::Held { id }
            | FromGuest::Started { id, .. }
            | FromGuest::Stdout { id }
            | FromGuest::Stderr { id }
            | FromGuest::Exit { id, .. }
            | FromGuest::Done { id }
            | FromGuest::Failed { id, .. } => Some(*id),
        }
    }
}

/// What a guest is to become.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Setup {
    /// The guest's host name.
    pub name: String,
    /// Load [`MODULE`] with these parameters; `None` leaves it alone.
    pub module_params: Option<String>,
    /// Folders of the host to mount read-only.
    pub shares: Vec<Share>,
    /// Environment of every command.
    pub env: BTreeMap<String, String>,
}

/// A folder of the host, mounted read-only in the guest over 9p.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Share {
    /// The name of the 9p device.
    pub tag: String,
    /// Where the guest mounts it.
    pub path: String,
}

/// What a guest is.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    /// The release of the running kernel.
    pub kernel: String,
    /// Seconds from the kernel's start until the agent could answer.
    pub uptime: f64,
    /// The device nodes that the module made.
    pub nodes: Vec<String>,
    /// What went wrong on the way, one sentence each.
    pub problems: Vec<String>,
}

/// A command to start in the guest.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Command {
    /// The program and its arguments.
    pub argv: Vec<String>,
    /// Added to the guest's environment.
    pub env: BTreeMap<String, String>,
    /// The folder to start in.
    pub cwd: Option<String>,
    /// Keep standard input open for `Stdin` messages.
    pub stdin: bool,
    /// Give it a terminal of its own, with standard input open.
    pub terminal: bool,
    /// Prepare only; start on `Go`.
    pub hold: bool,
    /// End it after this many milliseconds.
    pub timeout_ms: u64,
}

/// Writes one frame.
pub fn write_frame<M: Serialize>(to: &mut impl Write, message: &M, data: &[u8]) -> io::Result<()> {
    let json = serde_json::to_vec(message)?;
    let mut frame = Vec::with_capacity(8 + json.len() + data.len());
    for len in [json.len(), data.len()] {
        let len = u32::try_from(len).map_err(io::Error::other)?;
        frame.extend_from_slice(&len.to_le_bytes());
    }
    frame.extend_from_slice(&json);
    frame.extend_from_slice(data);
    to.write_all(&frame)?;
    to.flush()
}

/// Reads one frame; `None` when the other side has closed between frames.
pub fn read_frame<M: DeserializeOwned>(from: &mut impl Read) -> io::Result<Option<(M, Vec<u8>)>> {
    let mut header = [0; 8];
    if from.read(&mut header[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut header[1..])?;
    let [a, b, c, d, e, f, g, h] = header;
    let json = read_part(from, u32::from_le_bytes([a, b, c, d]))?;
    let data = read_part(from, u32::from_le_bytes([e, f, g, h]))?;
    Ok(Some((serde_json::from_slice(&json)?, data)))
}

fn read_part(from: &mut impl Read, len: u32) -> io::Result<Vec<u8>> {
    if len > LIMIT {
        return Err(io::Error::other(format!(
            "a frame announces {len} bytes, over the limit of {LIMIT}"
        )));
    }
    let mut bytes = vec![0; len as usize];
    from.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_comes_back_as_it_was_sent() {
        let mut wire = Vec::new();
        write_frame(&mut wire, &FromGuest::Stdout { id: 7 }, b"\0raw\xff").unwrap();
        write_frame(&mut wire, &FromGuest::Held { id: 8 }, b"").unwrap();
        let mut from = wire.as_slice();
        let (message, data) = read_frame::<FromGuest>(&mut from).unwrap().unwrap();
        assert_eq!((message.id(), data.as_slice()), (Some(7), b"\0raw\xff".as_slice()));
        let (message, data) = read_frame::<FromGuest>(&mut from).unwrap().unwrap();
        assert_eq!((message.id(), data.len()), (Some(8), 0));
        assert!(read_frame::<FromGuest>(&mut from).unwrap().is_none());
    }

    #[test]
    fn a_frame_longer_than_the_limit_is_refused() {
        let wire = [0xff; 8];
        assert!(read_frame::<FromGuest>(&mut wire.as_slice()).is_err());
    }

    #[test]
    fn a_frame_that_ends_early_is_an_error_and_not_an_end() {
        let mut wire = Vec::new();
        write_frame(&mut wire, &ToGuest::PowerOff, b"abc").unwrap();
        wire.pop();
        assert!(read_frame::<ToGuest>(&mut wire.as_slice()).is_err());
    }
}
