//! What a worker that is no more what it was tells its broker: the broker goes on, ends it if
//! it must, and keeps nothing of it.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

use nvguest_frontend::wire::file_handle;
use vhost_user_nvguest::transport::link::{Kind, Outgoing, Receiver, Sender, FIRST_VIEW};
use vhost_user_nvguest::transport::shared::sealed_file;

use crate::hostile::Setup;
use crate::input::Input;

/// Messages of one script at most.
const MAX_MESSAGES: usize = 64;
/// What a worker may say, and two things that it may not.
pub const KINDS: [Kind; 17] = [
    Kind::Ready,
    Kind::Reply,
    Kind::Place,
    Kind::Unplace,
    Kind::Fetch,
    Kind::Exported,
    Kind::Event,
    Kind::Files,
    Kind::Stopped,
    Kind::Refused,
    Kind::Take,
    Kind::Give,
    Kind::Show,
    Kind::Hide,
    Kind::Hold,
    Kind::Start,
    Kind::Placed,
];

/// Starts a worker, sends a script of messages, and begins anew.
pub fn run(data: &[u8]) {
    static SETUP: OnceLock<Setup> = OnceLock::new();
    let setup = SETUP.get_or_init(|| Setup::start("files=100"));
    let mut input = Input::new(data);
    let (opening, number, link) = setup.worker(100);
    let worker = Hostile::on(link);
    for _ in 0..MAX_MESSAGES {
        if input.is_empty() || say(&worker.sender, &mut input, number).is_err() {
            break;
        }
    }
    worker.leave();
    setup.begin_anew();
    setup.opened(opening);
}

/// A worker's end of a link.
pub struct Hostile {
    /// To write to the broker.
    pub sender: Sender,
    link: UnixStream,
    listener: JoinHandle<()>,
}

impl Hostile {
    /// Reads all that the broker says, so that the broker never waits.
    pub fn on(link: UnixStream) -> Self {
        let mut receiver = Receiver::new(link.try_clone().expect("a socket"));
        let listener =
            std::thread::spawn(move || while matches!(receiver.receive(), Ok(Some(_))) {});
        let patience = Duration::from_secs(5);
        let sender = Sender::new(link.try_clone().expect("a socket"), patience);
        Self { sender: sender.expect("a socket"), link, listener }
    }

    /// Ends, as a process does that is killed.
    pub fn leave(self) {
        // The broker may have hung up first.
        let _ = self.link.shutdown(Shutdown::Both);
        self.listener.join().expect("it only reads");
    }
}

/// Sends one message.
pub fn say(sender: &Sender, input: &mut Input<'_>, number: u16) -> std::io::Result<()> {
    let kind = KINDS[input.below(KINDS.len())];
    let (tag, bits) = (u64::from(input.u8()), input.u8());
    let words = [(); 4].map(|()| word(input, number));
    let payload = input.bytes(usize::from(bits >> 2));
    let files = [memory().as_raw_fd(); 3];
    let fds: &[RawFd] = files.get(..usize::from(bits & 3)).unwrap_or(&[]);
    sender.send(kind, Outgoing { tag, words, payload, fds })
}

/// A file that can be mapped.
fn memory() -> &'static File {
    static MEMORY: OnceLock<File> = OnceLock::new();
    MEMORY.get_or_init(|| sealed_file("hostile", 1 << 24).expect("a file"))
}

/// A number that means something, or any.
fn word(input: &mut Input<'_>, worker: u16) -> u64 {
    let (how, byte) = (input.u8(), input.u8());
    match how % 6 {
        0 => byte.into(),
        1 => u64::from(byte) << 12,
        2 => u64::from(byte) << 16,
        3 => file_handle(worker ^ u16::from(how >> 7), byte.into()).into(),
        4 => u64::from(FIRST_VIEW) + u64::from(byte),
        _ => input.u64(),
    }
}
