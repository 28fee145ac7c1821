//! What a guest process asks its worker: any requests are answered, honestly, and nothing
//! stays when its files are closed.
//!
//! The worker is a real one on the simulated card, which counts pointers and descriptors that
//! are not the worker's own. Its broker is a thread here, whose arena is the real one and
//! believes nothing.

use std::collections::HashSet;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use vhost_user_nvguest::broker::arena::Arena;
use vhost_user_nvguest::broker::nodes::Nodes;
use vhost_user_nvguest::broker::shares::Shares;
use vhost_user_nvguest::budgets::VramMode;
use vhost_user_nvguest::errno::Errno;
use vhost_user_nvguest::host::facts::Facts;
use vhost_user_nvguest::host::sim::{SimCards, SimHost, SimOptions};
use vhost_user_nvguest::host::{Host, Node};
use vhost_user_nvguest::limits::{Limits, Live, TABLE};
use vhost_user_nvguest::marshal::Scratch;
use vhost_user_nvguest::rate::Rates;
use vhost_user_nvguest::transport::link::{Kind, Message, Receiver, Sender};
use vhost_user_nvguest::transport::page::SlotPage;
use vhost_user_nvguest::transport::shared::Shared;
use vhost_user_nvguest::transport::trace::Trace;
use vhost_user_nvguest::wire;
use vhost_user_nvguest::worker::arena::Arena as WorkerArena;
use vhost_user_nvguest::worker::serve::{Bench, Server};
use vhost_user_nvguest::worker::session::{Common, Session};
use vhost_user_nvguest::worker::start::{HostKind, Process, Start};
use vhost_user_nvguest::worker::upstream::Upstream;
use zerocopy::FromBytes;

use crate::input::Input;
use crate::profiles::measured;

/// Requests of one script at most.
const MAX_REQUESTS: usize = 64;
const ARENA: u64 = 16 << 20;
/// The one control that takes as long as the caller says, on the simulated card too.
const PREEMPT: u32 = 0xa06c_0105;
const PATIENCE: Duration = Duration::from_secs(5);
/// The worker's number, and the process that it serves.
const WORKER: u16 = 1;
const PROCESS: Process = Process { tgid: 100, start_ns: 1_000_000_007 };
/// The profile whose layouts the simulated card has: 580's.
const RELEASE: &str = "580.142";

/// Serves a script of requests, each as long as the two bytes before it say, with as much
/// room for its reply as the two bytes before those.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let (worker, broker) = Worker::start();
    let broker = std::thread::spawn(move || broker.run());
    let mut bench = Bench { scratch: Scratch::new().expect("address space"), reply: Vec::new() };
    for tag in 0..MAX_REQUESTS {
        if input.is_empty() {
            break;
        }
        let (room, length) = (input.u16(), input.u16());
        let request = from_our_process(input.bytes(length.into()));
        if request.windows(4).any(|word| word == PREEMPT.to_le_bytes()) {
            continue;
        }
        worker.ask(tag as u64, room.into(), request);
        worker.server.serve_submitted(&mut bench);
    }
    for file in worker.session.all_files() {
        worker.session.close(&file);
    }
    assert_eq!(worker.host.faults(), 0, "the driver saw something that is not the worker's");
    drop(worker);
    let broker = broker.join().expect("the broker believes its worker");
    assert_eq!(broker.arena.usage(), (0, 0), "nothing of the arena stays");
    assert!(broker.placed.is_empty(), "nothing is placed any more: {:?}", broker.placed);
}

/// Requests of other processes never reach a worker but by its broker's mistake.
fn from_our_process(bytes: &[u8]) -> Vec<u8> {
    let mut request = bytes.to_vec();
    if let Ok((header, _)) = wire::ReqHeader::mut_from_prefix(&mut request) {
        header.caller.tgid = PROCESS.tgid.into();
        header.caller.start_ns = PROCESS.start_ns.into();
    }
    request
}

struct Worker {
    session: Arc<Session>,
    server: Arc<Server>,
    host: Arc<SimHost>,
}

fn nodes() -> Arc<Vec<Option<Node>>> {
    static NODES: OnceLock<Arc<Vec<Option<Node>>>> = OnceLock::new();
    Arc::clone(NODES.get_or_init(|| Arc::new(Nodes::new(&Facts::of_sim(1)).devices)))
}

fn compiled() -> Arc<nvguest_abi::compiled::Compiled> {
    static COMPILED: OnceLock<Arc<nvguest_abi::compiled::Compiled>> = OnceLock::new();
    let find = || {
        let mut all = (0..=u8::MAX).map(measured);
        Arc::new(all.find(|compiled| compiled.profile == RELEASE).expect("measured").clone())
    };
    Arc::clone(COMPILED.get_or_init(find))
}

impl Worker {
    fn start() -> (Self, Broker) {
        let (ours, theirs) = UnixStream::pair().expect("a socket");
        let arena = Arena::create(ARENA, ARENA / 2).expect("an arena");
        arena.placed();
        let upstream = Arc::new(Upstream::new(Sender::new(ours, PATIENCE).expect("a socket")));
        let file = arena.file().as_fd().try_clone_to_owned().expect("a descriptor");
        let shared = Shared::map(file, ARENA).expect("address space");
        let its_arena = WorkerArena::new(shared, Arc::clone(&upstream)).expect("address space");
        let card = SimCards::create(1, SimCards::DEFAULT_SIZE).expect("a card");
        let host = Arc::new(SimHost::new(card, SimOptions::default()).expect("a card"));
        let page = Arc::new(SlotPage::create().expect("a page"));
        let driver: Arc<dyn Host> = Arc::<SimHost>::clone(&host);
        let rates = Arc::new(Rates::create().expect("a page"));
        let trace = Trace::create().expect("a ring");
        let common = Common { page, rates, trace, arena: Some(its_arena) };
        let session = Session::new(start(), driver, Arc::clone(&upstream), common);
        let session = Arc::new(session.expect("a page"));
        let broker = Broker::new(theirs, Arc::downgrade(&upstream), arena);
        let server = Server::start(0, Arc::clone(&session), upstream).expect("no threads");
        (Self { session, server, host }, broker)
    }

    fn ask(&self, tag: u64, room: u64, payload: Vec<u8>) {
        let words = [room, 0, 0, 0];
        self.server.submit(Message { kind: Kind::Request, tag, words, payload, fds: Vec::new() });
    }
}

fn start() -> Start {
    Start {
        worker: WORKER,
        host: HostKind::Sim,
        process: PROCESS,
        poll_us: 0,
        max_placements: 256,
        max_own_placements: 256,
        lines: 10,
        disables: 200,
        own_disables: 50,
        own_user: false,
        vram_mode: VramMode::Limit,
        weight: 10,
        arena_size: ARENA,
        compiled: compiled(),
        nodes: nodes(),
    }
}

/// A broker that takes its worker at its word, and at that alone.
struct Broker {
    receiver: Receiver,
    worker: Weak<Upstream>,
    arena: Arena,
    shares: Shares,
    placed: HashSet<u64>,
    last: u64,
}

impl Broker {
    fn new(link: UnixStream, worker: Weak<Upstream>, arena: Arena) -> Self {
        let limits: Limits = "files=16,objects=64,clients=4".parse().expect("limits");
        let (placed, last) = Default::default();
        let (receiver, shares) = (Receiver::new(link), Shares::new(Live::new(limits)));
        Self { receiver, worker, arena, shares, placed, last }
    }

    /// Hears the worker until it is gone.
    fn run(mut self) -> Self {
        while let Some(message) = self.receiver.receive().expect("a worker speaks clearly") {
            self.hear(&message);
        }
        self
    }

    fn hear(&mut self, message: &Message) {
        let [first, second, ..] = message.words;
        let view = |word: u64| u32::try_from(word).expect("a view has a number");
        match message.kind {
            Kind::Reply => check(&message.payload),
            Kind::Place => self.place(message),
            Kind::Unplace => {
                // The first time it may keep the range; the second lets go of it.
                let found = self.placed.contains(&first);
                if second == 0 {
                    self.placed.remove(&first);
                }
                self.answer(message, Kind::Unplaced, found.then_some([0; 2]).ok_or(Errno::EINVAL));
            }
            Kind::Fetch => self.answer(message, Kind::Fetched, Err(Errno::ENODEV)),
            Kind::Take => {
                let taken = self.arena.take(WORKER, first).map(|at| [at, 0]);
                self.answer(message, Kind::Taken, taken);
            }
            Kind::Give => self.arena.give(WORKER, first).expect("it had that"),
            Kind::Show => self.arena.show(WORKER, first, view(second)).expect("it had that"),
            Kind::Hide => self.arena.hide(WORKER, view(first)).expect("it showed that"),
            Kind::Hold => {
                let resource = usize::try_from(first).ok().and_then(|index| TABLE.get(index));
                let resource = resource.expect("a resource has a number").resource;
                let granted = self.shares.hold(WORKER, resource, second);
                self.answer(message, Kind::Held, granted.map(|granted| [granted, 0]));
            }
            // There is no budget.
            Kind::Charge => self.answer(message, Kind::Charged, Ok([first, u64::MAX])),
            Kind::Files | Kind::Refused | Kind::Event | Kind::Credit | Kind::Sliced => {}
            kind => panic!("a worker does not say {kind:?}"),
        }
    }

    fn place(&mut self, message: &Message) {
        assert_eq!(message.fds.len(), 2, "a mapping and its owner");
        self.last += 1;
        self.placed.insert(self.last);
        let at = ARENA + (self.last << 32);
        self.answer(message, Kind::Placed, Ok([self.last, at]));
    }

    fn answer(&self, message: &Message, kind: Kind, outcome: Result<[u64; 2], Errno>) {
        let words = match outcome {
            Ok([one, other]) => [0, one, other, 0],
            Err(errno) => [u64::from(errno.status()), 0, 0, 0],
        };
        let (payload, fds) = Default::default();
        let answer = Message { kind, tag: message.tag, words, payload, fds };
        // Who asked waits for it, and so is there.
        self.worker.upgrade().expect("a worker").hear(answer);
    }
}

/// A reply says how long it is, and an errno is one.
fn check(reply: &[u8]) {
    let (header, _) = wire::RespHeader::read_from_prefix(reply).expect("a whole header");
    assert_eq!(header.len.get() as usize, reply.len());
    assert!(header.status.get() < 4096 && reply.len() <= wire::MAX_RESPONSE as usize);
}
