//! The link: whatever the other side writes, in whatever pieces and with whatever
//! descriptors, is a message or the end, and leaves no descriptor behind.

use std::io::{IoSlice, Read};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use nix::sys::socket::{sendmsg, ControlMessage, MsgFlags};
use vhost_user_nvguest::transport::link::{Receiver, MAX_PAYLOAD};

use crate::input::Input;

/// Pieces of one script at most.
const MAX_PIECES: usize = 64;
/// Descriptors that one piece can bring: as many as the kernel passes on.
const MAX_FDS: usize = 253;

/// Writes the script's pieces, each with its descriptors, and reads them all.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (ours, theirs) = UnixStream::pair().expect("a socket");
    let (watched, passed) = UnixStream::pair().expect("a socket");
    ours.set_nonblocking(true).expect("a socket");
    for _ in 0..MAX_PIECES {
        if input.is_empty() {
            break;
        }
        let count = input.u8();
        // Mostly none: each costs a descriptor.
        let fds = if count & 0xc0 == 0xc0 { usize::from(input.u8()).min(MAX_FDS) } else { 0 };
        let piece = input.bytes(usize::from(count & 0x3f));
        let fds = vec![passed.as_raw_fd(); fds];
        let rights = [ControlMessage::ScmRights(&fds)];
        let control = if fds.is_empty() { &[][..] } else { &rights[..] };
        let flags = MsgFlags::MSG_NOSIGNAL;
        if sendmsg::<()>(ours.as_raw_fd(), &[IoSlice::new(piece)], control, flags, None).is_err() {
            break;
        }
    }
    drop((ours, passed));
    let mut receiver = Receiver::new(theirs);
    while let Ok(Some(message)) = receiver.receive() {
        assert!(message.payload.len() <= MAX_PAYLOAD && message.fds.len() <= MAX_FDS);
        let _ = message.outcome();
    }
    drop(receiver);
    // Its other end is gone: nobody kept a descriptor of it.
    watched.set_read_timeout(Some(Duration::from_secs(5))).expect("a socket");
    assert_eq!((&watched).read(&mut [0]).ok(), Some(0), "a descriptor stayed");
}
