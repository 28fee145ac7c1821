//! A line for each call, which `--trace` shows with names and `--compare` compares. The format
//! is nvrecord's, with what each buffer held when the call was over behind it.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::OnceLock;
use std::time::Instant;

use nix::libc;

use crate::board::Entry;
use crate::files::{self, Node};
use crate::line::Line;
use crate::process::Errno;
use crate::talk;

#[path = "../../../tools/nvrecord/src/decode.rs"]
mod decode;

/// Bytes of a buffer that are written down at most.
const LONGEST: usize = 4096;

fn log() -> Option<&'static OwnedFd> {
    static LOG: OnceLock<Option<OwnedFd>> = OnceLock::new();
    LOG.get_or_init(|| {
        let path = std::env::var_os(talk::TRACE)?;
        let file = std::fs::OpenOptions::new().append(true).create(true).open(path).ok()?;
        Some(crate::process::hidden(file.into()))
    })
    .as_ref()
}

/// Whether calls are traced.
pub fn is_on() -> bool {
    log().is_some()
}

fn begin() -> Line {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `now` is a timespec that the call fills; gettid takes nothing.
    let thread = unsafe {
        libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut now);
        libc::gettid()
    };
    Line::begin(now.tv_sec, now.tv_nsec, thread)
}

/// Writes a line. Errno stays as it was.
fn write(mut line: Line) {
    let Some(log) = log() else { return };
    let bytes = line.end();
    // SAFETY: errno's address is valid for this thread; the bytes live until write returns.
    unsafe {
        let errno = *libc::__errno_location();
        libc::write(log.as_raw_fd(), bytes.as_ptr().cast(), bytes.len());
        *libc::__errno_location() = errno;
    }
}

/// The node of a file.
pub fn node_of(entry: &Entry) -> &'static Node {
    let number = entry.node.load(Ordering::Relaxed);
    let nodes = files::nodes();
    nodes.iter().find(|node| node.number == number).unwrap_or(&nodes[0])
}

fn name_of(fd: c_int) -> Option<&'static str> {
    let node = files::native(fd).or_else(|| files::of(fd).map(|(_, entry)| node_of(entry)))?;
    Some(&node.name)
}

/// What the buffers of a call held when it was over.
#[derive(Default)]
pub struct Seen(Vec<Vec<u8>>);

impl Seen {
    /// A buffer of the caller's.
    pub fn buffer(&mut self, user: u64, length: u32, _flags: u32) {
        let length = (length as usize).min(LONGEST);
        let mut bytes = vec![0; length];
        read(user, &mut bytes);
        self.0.push(bytes);
    }
}

/// Copies from an address that may be none.
fn read(from: u64, bytes: &mut [u8]) {
    let ours = libc::iovec { iov_base: bytes.as_mut_ptr().cast(), iov_len: bytes.len() };
    let theirs = libc::iovec {
        // CAST: addresses have 64 bits.
        iov_base: std::ptr::with_exposed_provenance_mut(from as usize),
        iov_len: bytes.len(),
    };
    // SAFETY: the kernel checks the other side's range; ours is the slice.
    unsafe {
        let count =
            libc::process_vm_readv(libc::getpid(), &raw const ours, 1, &raw const theirs, 1, 0);
        if count < 0 && *libc::__errno_location() == libc::EPERM {
            std::ptr::copy_nonoverlapping(
                theirs.iov_base.cast::<u8>(),
                bytes.as_mut_ptr(),
                bytes.len(),
            );
        }
    }
}

/// An ioctl being traced.
pub struct Call {
    line: Line,
    node: &'static Node,
    cmd: u32,
    argument: *mut c_void,
    before: Vec<u8>,
    seen: Seen,
    start: Instant,
}

impl Call {
    /// Before it is made.
    pub fn begin(node: &'static Node, (cmd, argument): (u32, *mut c_void)) -> Self {
        let length = decode::size(cmd.into()).min(decode::HEAD);
        let mut before = vec![0; if decode::is_rm(cmd.into()) { length } else { 0 }];
        read(argument.expose_provenance() as u64, &mut before);
        let (line, seen) = (begin(), Seen::default());
        Self { line, node, cmd, argument, before, seen, start: Instant::now() }
    }

    /// Where its buffers are shown.
    pub fn seen(&mut self) -> Option<&mut Seen> {
        Some(&mut self.seen)
    }

    /// When it is over.
    pub fn end(mut self, outcome: Result<c_int, Errno>) {
        let took = self.start.elapsed();
        let mut after = vec![0; self.before.len()];
        read(self.argument.expose_provenance() as u64, &mut after);
        let call = decode::Call {
            node: &self.node.name,
            request: self.cmd.into(),
            before: &self.before,
            after: &after,
            ret: outcome.unwrap_or(-1),
        };
        call.describe(&mut self.line);
        if let Err(errno) = outcome {
            self.line.put(format_args!(" errno={errno}"));
        }
        self.line.put(format_args!(" us={}", took.as_micros()));
        for buffer in &self.seen.0 {
            self.line.put(format_args!(" data="));
            for byte in buffer {
                self.line.put(format_args!("{byte:02x}"));
            }
        }
        write(self.line);
    }
}

/// An open, which may have failed.
pub fn open(path: &[u8], fd: c_int) {
    if is_on() {
        let mut line = begin();
        let errno = if fd < 0 { crate::next::errno() } else { 0 };
        let path = String::from_utf8_lossy(path);
        line.put(format_args!("open path={path} descriptor={fd} errno={errno}"));
        write(line);
    }
}

/// A close, if of a file of NVIDIA's.
pub fn close(fd: c_int) {
    if let Some(node) = name_of(fd).filter(|_| is_on()) {
        let mut line = begin();
        line.put(format_args!("close node={node} descriptor={fd}"));
        write(line);
    }
}

/// A map.
pub fn map(fd: c_int, length: usize, protection: c_int, (failed, start): (bool, Instant)) {
    if let Some(node) = name_of(fd).filter(|_| is_on()) {
        let errno = if failed { crate::next::errno() } else { 0 };
        let mut line = begin();
        line.put(format_args!(
            "mmap node={node} length={length:#x} protection={protection:#x} errno={errno} us={}",
            start.elapsed().as_micros()
        ));
        write(line);
    }
}

/// A poll of files of NVIDIA's among others.
pub fn poll(fds: &[libc::pollfd], outcome: Result<c_int, Errno>) {
    if !is_on() {
        return;
    }
    for one in fds {
        if let Some(node) = name_of(one.fd) {
            let mut line = begin();
            line.put(format_args!(
                "poll node={node} events={:#x} revents={:#x} ret={}",
                one.events,
                one.revents,
                outcome.unwrap_or(-1)
            ));
            write(line);
        }
    }
}
