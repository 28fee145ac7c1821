//! What a program and the launcher say to each other, on a Unix socket: a frame is
//! ten words and perhaps bytes and descriptors.

use std::io::{self, IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

use nix::libc;
use nix::sys::socket::{recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags, UnixAddr};

/// Where the launcher listens, for the programs it starts.
pub const SOCKET: &str = "NVGUEST_LOOPBACK";
/// Where a program writes its calls.
pub const TRACE: &str = "NVGUEST_LOOPBACK_TRACE";
/// Set: the caller's pointers are copied from without asking the kernel whether they are good.
pub const TRUSTING: &str = "NVGUEST_LOOPBACK_TRUSTING";
/// Microseconds that a caller looks at its queue before it sleeps.
pub const POLL: &str = "NVGUEST_LOOPBACK_POLL_US";
/// Set: calls are traced and go to the host's own driver.
pub const NATIVE: &str = "NVGUEST_LOOPBACK_NATIVE";

/// Words of a frame.
pub const WORDS: usize = 10;
/// Descriptors of a frame at most.
const FDS: usize = 4;

/// What a frame asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Ask {
    /// I am process (tgid, start, euid). Answer: the memory's size, the slot, the anchor's
    /// number, the queue's place, its size, the heap's place and size; the board, the
    /// guest's memory and, with a slot, its kick and call.
    Attach = 1,
    /// Answer: the board.
    Look = 3,
    /// Send these bytes on the broker's queue; words: room. Answer: the reply.
    Request = 2,
    /// What is at this offset of the window? Answer: the descriptor, its offset, writable.
    Placement = 4,
    /// File (word 1): the other end of its stand-in. No answer.
    Register = 5,
}

impl Ask {
    /// The question with this number.
    pub fn from_word(word: u64) -> Option<Self> {
        [Self::Attach, Self::Look, Self::Request, Self::Placement, Self::Register]
            .into_iter()
            .find(|ask| *ask as u64 == word)
    }
}

/// A frame.
#[derive(Debug, Default)]
pub struct Frame {
    /// What is asked, or 0 and the errno; then what that needs.
    pub words: [u64; WORDS],
    /// Bytes behind it.
    pub bytes: Vec<u8>,
    /// Descriptors with it.
    pub fds: Vec<OwnedFd>,
}

/// Sends a frame; the bytes' length goes into the last word.
pub fn send(socket: RawFd, words: &[u64], bytes: &[u8], fds: &[RawFd]) -> io::Result<()> {
    let mut head = [0; WORDS * 8];
    for (at, word) in words.iter().enumerate() {
        head[8 * at..][..8].copy_from_slice(&word.to_le_bytes());
    }
    head[8 * (WORDS - 1)..].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
    let message = [ControlMessage::ScmRights(fds)];
    let control = if fds.is_empty() { &[][..] } else { &message[..] };
    let parts = [IoSlice::new(&head), IoSlice::new(bytes)];
    let flags = MsgFlags::MSG_NOSIGNAL;
    let sent = loop {
        match sendmsg::<UnixAddr>(socket, &parts, control, flags, None) {
            Err(nix::Error::EINTR) => {}
            sent => break sent?,
        }
    };
    let mut left = (head.len() + bytes.len()) - sent;
    while left > 0 {
        let from = if left > bytes.len() {
            return Err(io::ErrorKind::WriteZero.into());
        } else {
            &bytes[bytes.len() - left..]
        };
        match nix::sys::socket::send(socket, from, flags) {
            Ok(count) => left -= count,
            Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Receives a frame; `None` at the end.
pub fn receive(socket: RawFd) -> io::Result<Option<Frame>> {
    let mut frame = Frame::default();
    let mut head = [0; WORDS * 8];
    let mut have = 0;
    while have < head.len() {
        let mut space = nix::cmsg_space!([RawFd; FDS]);
        let mut parts = [IoSliceMut::new(&mut head[have..])];
        let flags = MsgFlags::MSG_CMSG_CLOEXEC;
        let received = match recvmsg::<UnixAddr>(socket, &mut parts, Some(&mut space), flags) {
            Err(nix::Error::EINTR) => continue,
            received => received?,
        };
        for message in received.cmsgs()? {
            if let ControlMessageOwned::ScmRights(fds) = message {
                // SAFETY: the kernel has just made them for us.
                frame.fds.extend(fds.iter().map(|&fd| unsafe { OwnedFd::from_raw_fd(fd) }));
            }
        }
        match received.bytes {
            0 if have == 0 => return Ok(None),
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => have += count,
        }
    }
    for (at, word) in frame.words.iter_mut().enumerate() {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&head[8 * at..][..8]);
        *word = u64::from_le_bytes(bytes);
    }
    let length = usize::try_from(frame.words[WORDS - 1]).unwrap_or(usize::MAX);
    if length > 4 << 20 {
        return Err(io::ErrorKind::InvalidData.into());
    }
    frame.bytes.resize(length, 0);
    let mut have = 0;
    while have < length {
        match nix::sys::socket::recv(socket, &mut frame.bytes[have..], MsgFlags::empty()) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => have += count,
            Err(nix::Error::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(Some(frame))
}

/// The name that a stand-in's other end is bound to, which is how a process that gets a
/// descriptor learns which file it is.
pub fn name_of(launcher: u32, index: usize) -> String {
    format!("nvguest-loopback/{launcher}/{index}")
}

/// The file that a descriptor stands for.
pub fn file_of(fd: RawFd, launcher: u32) -> Option<usize> {
    // SAFETY: a sockaddr_un of zeroes is one.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    // CAST: 110 bytes.
    let mut length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes there.
    let outcome = unsafe { libc::getpeername(fd, (&raw mut address).cast(), &raw mut length) };
    if outcome != 0 || i32::from(address.sun_family) != libc::AF_UNIX {
        return None;
    }
    let count = (length as usize).checked_sub(size_of::<libc::sa_family_t>())?;
    // CAST: C's char is a byte.
    let bytes: Vec<u8> = address.sun_path.get(1..count)?.iter().map(|&c| c as u8).collect();
    let text = std::str::from_utf8(&bytes).ok()?;
    let mut parts = text.strip_prefix("nvguest-loopback/")?.split('/');
    let ours = parts.next()?.parse() == Ok(launcher);
    parts.next()?.parse().ok().filter(|_| ours)
}

/// Moves a descriptor out of the way of those that a program counts on.
pub fn aside(fd: OwnedFd) -> OwnedFd {
    for least in [900, 200] {
        // SAFETY: duplicates a descriptor that is ours.
        let moved = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_DUPFD_CLOEXEC, least) };
        if moved >= 0 {
            // SAFETY: just made, and nobody else's.
            return unsafe { OwnedFd::from_raw_fd(moved) };
        }
    }
    fd
}
