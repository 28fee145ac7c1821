//! Streams of lines of JSON: a backend's, and QEMU's.

use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use anyhow::{anyhow, ensure, Result};
use serde_json::Value;

/// A line of JSON.
pub fn parse(line: &[u8]) -> Result<Value> {
    serde_json::from_slice(line).map_err(|error| anyhow!("its answer is no JSON: {error}"))
}

/// A stream of lines of JSON.
pub struct Lines {
    stream: UnixStream,
    read: Vec<u8>,
}

impl Lines {
    /// What comes on a stream from now on.
    pub fn new(stream: UnixStream) -> Self {
        Self { stream, read: Vec::new() }
    }

    /// Says a line.
    pub fn say(&mut self, line: &Value) -> Result<()> {
        Ok(self.stream.write_all(format!("{line}\n").as_bytes())?)
    }

    /// Bytes of a line at most.
    const LONGEST: usize = 1 << 20;

    /// The next line; `None` if the other side ended, or at the deadline.
    pub fn next(&mut self, deadline: Option<Instant>) -> Result<Option<Value>> {
        loop {
            if let Some(end) = self.read.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                return parse(&line).map(Some);
            }
            ensure!(self.read.len() < Self::LONGEST, "a line of its answer does not end");
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(None);
            }
            self.stream.set_read_timeout(left)?;
            let mut bytes = [0; 64 << 10];
            match self.stream.read(&mut bytes) {
                Ok(0) => return Ok(None),
                Ok(count) => self.read.extend_from_slice(&bytes[..count]),
                Err(error) if is_late(&error) => {}
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(None),
                Err(error) => return Err(error.into()),
            }
        }
    }
}

fn is_late(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted)
}
