//! The socket between the broker and a worker: framed messages, descriptors along with them.
//!
//! Each side takes the other's messages for untrusted bytes: a length over
//! [`MAX_PAYLOAD`], an unknown kind or too many descriptors end the link, and with it the
//! worker.

use std::io::{self, IoSlice, IoSliceMut, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Mutex;
use std::time::Duration;

use nix::sys::socket::{recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::sync::lock;
use crate::wire;

/// Bytes of payload at most: a whole request or reply, or the start message.
pub const MAX_PAYLOAD: usize = wire::MAX_REQUEST as usize + 4096;
/// Descriptors of one message at most.
const MAX_FDS: usize = 16;
/// What the kernel passes on at once at most (`SCM_MAX_FD`). With less room for them it
/// would hand over as many as fit, and nobody would know their numbers to close them.
const MAX_PASSED: usize = 253;

/// Placements whose numbers begin here are views of the arena, numbered by their worker.
pub const FIRST_VIEW: u32 = 1 << 31;

/// What a message says. The broker sends the first group, a worker the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Kind {
    /// Payload: see [`crate::worker::start`]; fds: page, rates, trace, host's own.
    Start = 1,
    /// `[slot]`; payload: two ring configurations, then the regions of guest memory;
    /// fds: kick, call, kick, call, then one for each region.
    Rings = 3,
    /// Stop using the rings; answered by [`Kind::Stopped`].
    Stop = 4,
    /// A guest's request that came on the broker's queue; answered by [`Kind::Reply`].
    Request = 5,
    /// `[errno, placement, window offset]`: answers [`Kind::Place`].
    Placed = 6,
    /// `[errno]`: answers [`Kind::Unplace`].
    Unplaced = 7,
    /// `[errno, file kind, range, bytes]`; fd: the file. Answers [`Kind::Fetch`]. A range of
    /// the arena that the file keeps is the asker's too: its offset plus one. If that is 0 the
    /// file keeps so much of the card's memory.
    Fetched = 8,
    /// `[file]`: hand out this file; answered by [`Kind::Exported`].
    Export = 9,
    /// `[0 for the control queue, 1 for events]`; fd: what rings the guest from now on.
    Call = 10,
    /// `[errno, offset in the arena]`: answers [`Kind::Take`].
    Taken = 11,
    /// `[errno, amount]`: answers [`Kind::Hold`].
    Held = 12,
    /// `[errno, bytes that the guest has, budget, reserve]`: answers [`Kind::Charge`].
    Charged = 13,
    /// `[weight]`: the guest's share of the card's time.
    Weight = 14,
    /// `[errno]`; payload: the regions of guest memory; fds: one for each. Answers
    /// [`Kind::Memory`].
    Regions = 15,

    /// The worker serves.
    Ready = 32,
    /// Payload: the reply.
    Reply = 33,
    /// `[offset, length, writable]`; fds: the mapping, the file whose client owns it.
    Place = 34,
    /// `[placement, 1 to keep its range]`.
    Unplace = 35,
    /// `[file]`: a file of another worker.
    Fetch = 36,
    /// `[errno, file kind, range, bytes]`; fd: the file; the others as in [`Kind::Fetched`].
    Exported = 37,
    /// `[kind, file or registration, mask, more]`: an event for the broker's queue.
    Event = 38,
    /// `[open files]`, when the first opened or the last closed.
    Files = 39,
    /// The rings are not touched any more.
    Stopped = 40,
    /// `[verdict, kind of thing, number, count so far]`.
    Refused = 41,
    /// `[bytes]`: a range of the arena.
    Take = 42,
    /// `[offset]`: RM has let go of a range.
    Give = 43,
    /// `[offset, view]`: the guest is about to be told of a range.
    Show = 44,
    /// `[view]`: the guest has let go of it.
    Hide = 45,
    /// `[resource, amount]`: so much of the guest's share is needed here.
    Hold = 46,
    /// `[bytes, 1 if it has them already]`: video memory is about to be allocated.
    Charge = 47,
    /// `[bytes]`: RM has freed video memory.
    Credit = 48,
    /// `[status]`: the card refused a time slice.
    Sliced = 49,
    /// Which is the guest's memory?
    Memory = 50,
}

impl Kind {
    const ALL: [Self; 33] = [
        Self::Start,
        Self::Rings,
        Self::Stop,
        Self::Request,
        Self::Placed,
        Self::Unplaced,
        Self::Fetched,
        Self::Export,
        Self::Call,
        Self::Taken,
        Self::Held,
        Self::Charged,
        Self::Weight,
        Self::Regions,
        Self::Ready,
        Self::Reply,
        Self::Place,
        Self::Unplace,
        Self::Fetch,
        Self::Exported,
        Self::Event,
        Self::Files,
        Self::Stopped,
        Self::Refused,
        Self::Take,
        Self::Give,
        Self::Show,
        Self::Hide,
        Self::Hold,
        Self::Charge,
        Self::Credit,
        Self::Sliced,
        Self::Memory,
    ];

    fn from_number(number: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|&kind| kind as u32 == number)
    }
}

#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C, packed)]
struct Header {
    kind: u32,
    len: u32,
    tag: u64,
    words: [u64; 4],
}

/// One message.
#[derive(Debug)]
pub struct Message {
    /// What it says.
    pub kind: Kind,
    /// Joins an answer to its question.
    pub tag: u64,
    /// Small numbers; [`Kind`] says which.
    pub words: [u64; 4],
    /// Bytes.
    pub payload: Vec<u8>,
    /// Descriptors that came along.
    pub fds: Vec<OwnedFd>,
}

impl Message {
    /// The errno in the first word of an answer.
    pub fn outcome(&self) -> Result<(), crate::errno::Errno> {
        match i32::try_from(self.words[0]) {
            Ok(0) => Ok(()),
            Ok(errno) if errno > 0 && errno < 4096 => Err(crate::errno::Errno(errno)),
            _ => Err(crate::errno::Errno::EPROTO),
        }
    }
}

/// What to send: borrowed, so that nothing is copied for it.
#[derive(Default)]
pub struct Outgoing<'a> {
    /// Joins an answer to its question.
    pub tag: u64,
    /// Small numbers.
    pub words: [u64; 4],
    /// Bytes.
    pub payload: &'a [u8],
    /// Descriptors to send along.
    pub fds: &'a [RawFd],
}

/// A side of the link that several threads send on.
pub struct Sender(Mutex<UnixStream>);

impl Sender {
    /// Sends; gives up after `patience` if the other side does not read.
    pub fn new(stream: UnixStream, patience: Duration) -> io::Result<Self> {
        stream.set_write_timeout(Some(patience))?;
        Ok(Self(Mutex::new(stream)))
    }

    /// Sends one message whole.
    pub fn send(&self, kind: Kind, message: Outgoing<'_>) -> io::Result<()> {
        let header = Header {
            kind: kind as u32,
            len: u32::try_from(message.payload.len())
                .ok()
                .filter(|&len| len as usize <= MAX_PAYLOAD)
                .ok_or(io::ErrorKind::InvalidInput)?,
            tag: message.tag,
            words: message.words,
        };
        let mut stream = lock(&self.0);
        let parts = [IoSlice::new(header.as_bytes()), IoSlice::new(message.payload)];
        let rights = [ControlMessage::ScmRights(message.fds)];
        let control = if message.fds.is_empty() { &[][..] } else { &rights[..] };
        let sent = loop {
            let flags = MsgFlags::MSG_NOSIGNAL;
            match sendmsg::<()>(stream.as_raw_fd(), &parts, control, flags, None) {
                Err(nix::Error::EINTR) => {}
                result => break result?,
            }
        };
        let header_left = header.as_bytes().get(sent..).unwrap_or(&[]);
        stream.write_all(header_left)?;
        let payload_sent = sent.saturating_sub(header.as_bytes().len());
        stream.write_all(message.payload.get(payload_sent..).unwrap_or(&[]))
    }
}

/// The side of the link that one thread reads.
pub struct Receiver(UnixStream);

impl Receiver {
    /// Reads from `stream`.
    pub fn new(stream: UnixStream) -> Self {
        Self(stream)
    }

    /// How long [`Receiver::receive`] waits before it fails with `WouldBlock`.
    pub fn set_patience(&self, patience: Option<Duration>) -> io::Result<()> {
        self.0.set_read_timeout(patience)
    }

    /// The next message; `None` when the other side is gone.
    pub fn receive(&mut self) -> io::Result<Option<Message>> {
        let mut header = [0; size_of::<Header>()];
        let mut fds = Vec::new();
        let mut filled = 0;
        while filled < header.len() {
            match receive_some(&self.0, &mut header[filled..], &mut fds)? {
                0 if filled == 0 => return Ok(None),
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                count => filled += count,
            }
        }
        let invalid = || io::Error::from(io::ErrorKind::InvalidData);
        let header = Header::read_from_bytes(&header).map_err(|_| invalid())?;
        let kind = Kind::from_number(header.kind).ok_or_else(invalid)?;
        let length = usize::try_from(header.len).map_err(|_| invalid())?;
        if length > MAX_PAYLOAD {
            return Err(invalid());
        }
        let mut payload = vec![0; length];
        self.0.read_exact(&mut payload)?;
        Ok(Some(Message { kind, tag: header.tag, words: header.words, payload, fds }))
    }
}

/// Receives what there is, and the descriptors that came along.
pub fn receive_some(
    stream: &impl AsRawFd,
    buffer: &mut [u8],
    fds: &mut Vec<OwnedFd>,
) -> io::Result<usize> {
    let mut space = nix::cmsg_space!([RawFd; MAX_PASSED]);
    let mut parts = [IoSliceMut::new(buffer)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let received = loop {
        match recvmsg::<()>(stream.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Err(nix::Error::EINTR) => {}
            result => break result?,
        }
    };
    for message in received.cmsgs()? {
        if let ControlMessageOwned::ScmRights(raw) = message {
            // SAFETY: the kernel has just made these descriptors for us, and nobody else
            // knows their numbers.
            fds.extend(raw.into_iter().map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }));
        }
    }
    if fds.len() > MAX_FDS {
        return Err(io::ErrorKind::InvalidData.into());
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (Sender, Receiver, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let raw = ours.try_clone().unwrap();
        (Sender::new(ours, Duration::from_secs(1)).unwrap(), Receiver::new(theirs), raw)
    }

    #[test]
    fn a_message_arrives_whole_with_its_descriptors() {
        let (sender, mut receiver, raw) = pair();
        let payload = vec![7; 300_000];
        let reader = std::thread::spawn(move || receiver.receive().unwrap().unwrap());
        let fds = [raw.as_raw_fd(), 0];
        let words = [1, 2, 3, 4];
        sender.send(Kind::Reply, Outgoing { tag: 9, words, payload: &payload, fds: &fds }).unwrap();
        let message = reader.join().unwrap();
        assert_eq!((message.kind, message.tag, message.words), (Kind::Reply, 9, words));
        assert_eq!(message.payload, payload);
        assert_eq!(message.fds.len(), 2);
    }

    #[test]
    fn an_unknown_kind_or_an_overlong_payload_ends_the_link() {
        for (kind, len) in [(999u32, 0u32), (Kind::Reply as u32, MAX_PAYLOAD as u32 + 1)] {
            let (_sender, mut receiver, mut raw) = pair();
            let header = Header { kind, len, tag: 0, words: [0; 4] };
            raw.write_all(header.as_bytes()).unwrap();
            assert!(receiver.receive().is_err());
        }
    }

    #[test]
    fn descriptors_too_many_end_the_link_and_are_closed() {
        for count in [MAX_FDS + 1, MAX_PASSED] {
            let (sender, mut receiver, _raw) = pair();
            let (ours, theirs) = UnixStream::pair().unwrap();
            let fds = vec![theirs.as_raw_fd(); count];
            sender.send(Kind::Ready, Outgoing { fds: &fds, ..Outgoing::default() }).unwrap();
            drop(theirs);
            assert!(receiver.receive().is_err(), "{count}");
            ours.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
            let gone = (&ours).read(&mut [0]);
            assert_eq!(gone.unwrap(), 0, "nobody has the other end any more");
        }
    }

    #[test]
    fn a_closed_link_reads_as_none() {
        let (sender, mut receiver, raw) = pair();
        drop((sender, raw));
        assert!(receiver.receive().unwrap().is_none());
    }
}
