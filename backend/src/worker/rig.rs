//! What tests of a worker's parts stand on.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use nvguest_abi::FileKind;

use super::session::{Common, Session};
use super::start::{HostKind, Process, Start};
use super::upstream::Upstream;
use crate::budgets::VramMode;
use crate::host::sim::{SimCards, SimHost, SimOptions};
use crate::host::Node;
use crate::rate::Rates;
use crate::transport::link::{Kind, Message, Receiver, Sender};
use crate::transport::page::SlotPage;
use crate::transport::trace::Trace;

/// A broker that lets its worker have all that it asks for.
pub fn broker() -> Arc<Upstream> {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let sender = Sender::new(ours, Duration::from_secs(1)).unwrap();
    let upstream = Arc::new(Upstream::new(sender));
    let answered = Arc::clone(&upstream);
    let mut receiver = Receiver::new(theirs);
    receiver.set_patience(Some(Duration::from_secs(1))).unwrap();
    std::thread::spawn(move || {
        while let Ok(Some(message)) = receiver.receive() {
            let words = [0, message.words[1], 0, 0];
            answered.hear(Message { kind: Kind::Held, words, ..message });
        }
    });
    upstream
}

/// Worker 1 of a guest that has a control node and a simulated card's.
pub fn start() -> Start {
    let node = |kind, minor| Some(Node { path: String::new(), kind, minor, gpu_id: 6 });
    Start {
        worker: 1,
        host: HostKind::Sim,
        process: Process::default(),
        poll_us: 0,
        max_placements: 0,
        arena_size: 0,
        max_own_placements: 0,
        lines: 0,
        disables: 0,
        own_disables: 0,
        own_user: false,
        vram_mode: VramMode::Limit,
        weight: 10,
        compiled: Arc::default(),
        nodes: Arc::new(vec![node(FileKind::Ctl, 255), node(FileKind::Gpu, 0)]),
    }
}

/// A session of that worker.
pub fn session() -> Session {
    let card = SimCards::create(1, SimCards::DEFAULT_SIZE).unwrap();
    let host = Arc::new(SimHost::new(card, SimOptions::default()).unwrap());
    let common = Common {
        page: Arc::new(SlotPage::create().unwrap()),
        rates: Arc::new(Rates::create().unwrap()),
        trace: Trace::create().unwrap(),
        arena: None,
    };
    Session::new(start(), host, broker(), common).unwrap()
}
