//! A broker in this process, between a guest and a VMM that are real and workers that are not:
//! each is the end of a link, for a test to write to.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{channel, Receiver, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use nix::sys::eventfd::EventFd;
use nix::sys::socket::{
    recv, sendmsg, socketpair, AddressFamily, ControlMessage, MsgFlags, SockFlag, SockType,
};
use nvguest_frontend::guest::{header, message};
use nvguest_frontend::queue::Token;
use nvguest_frontend::wire::{self, NO_SLOT};
use nvguest_frontend::{Guest, Options};
use vhost_user_nvguest::broker::nodes::Nodes;
use vhost_user_nvguest::broker::{Broker, Settings};
use vhost_user_nvguest::budgets::{Budgets, VramMode, NO_BUDGET};
use vhost_user_nvguest::host::facts::Facts;
use vhost_user_nvguest::sandbox::{Mode, State};
use vhost_user_nvguest::starter::Starter;
use vhost_user_nvguest::worker::start::HostKind;
use zerocopy::{FromBytes, IntoBytes};

use crate::profiles::measured;

/// What the broker may take for anything.
const PATIENCE: Duration = Duration::from_secs(20);
const WINDOW: u64 = 1 << 30;
const ARENA: u64 = 16 << 20;

/// A guest and its broker.
pub struct Setup {
    /// The broker.
    pub broker: Arc<Broker>,
    /// Its guest.
    pub guest: Arc<Guest>,
    started: Mutex<Receiver<UnixStream>>,
}

impl Setup {
    /// A guest that has said hello, with these limits.
    pub fn start(limits: &str) -> Self {
        let (link, theirs) = pair(SockType::SeqPacket);
        let (new, started) = channel();
        std::thread::spawn(move || start_workers(&theirs, &new));
        let settings = Settings {
            compiled: Arc::new(measured(9).clone()),
            nodes: Nodes::new(&Facts::of_sim(1)),
            host: HostKind::Sim,
            card: None,
            window_size: WINDOW,
            arena_size: ARENA,
            poll_us: 0,
            limits: limits.parse().expect("limits"),
            own_user: false,
            budgets: Budgets { vram: NO_BUDGET, mode: VramMode::Limit, weight: 10 },
            name: None,
        };
        let sandbox = State::possible(Mode::Off);
        let broker = Broker::new(settings, Starter::on(link), sandbox).expect("a broker");
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let serving = Arc::clone(&broker);
        std::thread::spawn(move || serving.serve(ours));
        let options = Options { poll: Duration::ZERO, ..Options::default() };
        let sink = Arc::new(|_: wire::Event| ());
        let guest = Guest::start(theirs, options, Arc::default(), sink).expect("a device");
        let setup = Self { broker, guest, started: Mutex::new(started) };
        setup.begin_anew();
        setup
    }

    /// The guest's driver begins anew: whatever was left is gone.
    pub fn begin_anew(&self) {
        let hello = wire::HelloReq {
            version: u32::from(wire::VERSION).into(),
            flags: wire::HELLO_FRESH.into(),
        };
        let asked =
            message(header(wire::Kind::Hello, 0, wire::Caller::default()), hello.as_bytes());
        let reply = self.guest.request(NO_SLOT, &asked, 4096).expect("an answer");
        let (header, _) = wire::RespHeader::read_from_prefix(&reply).expect("a whole reply");
        assert_eq!(header.status.get(), 0, "the broker is well, and its workers are gone");
        assert!(self.broker.workers.list().is_empty());
        assert_eq!(self.broker.window.usage(), (0, 0));
        let arena = self.broker.window.arena().expect("there is one");
        assert_eq!((arena.is_placed(), arena.usage()), (true, (0, 0)));
    }

    /// A worker, by the OPEN of a guest process, which waits for its answer; its number, and
    /// the end of its link.
    pub fn worker(&self, tgid: u32) -> (Token, u16, UnixStream) {
        let caller = wire::Caller { tgid: tgid.into(), ..wire::Caller::default() };
        let open =
            message(header(wire::Kind::Open, 0, caller), wire::OpenReq::default().as_bytes());
        let token = self.guest.queue(NO_SLOT).submit(&open, 64).expect("room in the queue");
        let started = self.started.lock().unwrap_or_else(PoisonError::into_inner);
        let link = started.recv_timeout(PATIENCE).expect("the broker starts a worker");
        let workers = self.broker.workers.list();
        (token, workers.last().map_or(0, |worker| worker.0), link)
    }

    /// Waits for the answer to an OPEN, whatever it is.
    pub fn opened(&self, token: Token) {
        self.guest.queue(NO_SLOT).wait(token, &mut [0; 64]).expect("an answer");
    }
}

fn pair(kind: SockType) -> (OwnedFd, OwnedFd) {
    socketpair(AddressFamily::Unix, kind, None, SockFlag::SOCK_CLOEXEC).expect("a socket")
}

/// The starter's part: a link, and something that reads as a process that has ended.
fn start_workers(broker: &OwnedFd, new: &Sender<UnixStream>) {
    while matches!(recv(broker.as_raw_fd(), &mut [0], MsgFlags::empty()), Ok(1)) {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let process = EventFd::from_value(1).expect("a counter");
        // Before the answer: who waits for a worker finds its link.
        if new.send(theirs).is_err() {
            return;
        }
        let fds = [ours.as_raw_fd(), process.as_raw_fd()];
        let rights = [ControlMessage::ScmRights(&fds)];
        let parts = [std::io::IoSlice::new(&[0; 8])];
        let flags = MsgFlags::MSG_NOSIGNAL;
        sendmsg::<()>(broker.as_raw_fd(), &parts, &rights, flags, None).expect("a broker");
    }
}
