//! A worker: the process that holds one guest process's files and makes its calls.
//!
//! - [`start`]: what the broker tells it first
//! - [`upstream`]: its side of the link to the broker
//! - [`serve`]: the threads that take requests and give replies
//! - [`session`]: its files, and the requests that open, close and wait
//! - [`calls`]: the requests that reach the driver
//! - [`cards`]: which of the host's cards they name and tell of, and [`clients`], whose clients;
//!   `places`, where
//! - [`arena`]: system memory that costs no placement, and [`arena_calls`], which concern it
//! - [`registered`]: memory of the guest program's own that RM is given
//! - [`coherency`]: system memory is write-back, and the card snoops
//! - [`mapping`]: what the driver armed, and where it is placed in the window
//! - [`objects`]: which RM object goes when another is freed, and what it holds
//! - [`exports`]: objects that go to a file and come back
//! - [`video`]: memory of the card, and [`shown`], what the guest is told of it
//! - [`slices`]: time of the card
//! - [`share`]: what it holds of the guest's share
//! - [`traced`]: what an admin who looks is shown of a call
//! - [`watch`]: which files are ready
//! - [`readiness`]: of one file: an edge and an arm make one report

pub mod arena;
pub mod arena_calls;
pub mod calls;
pub mod cards;
pub mod clients;
pub mod coherency;
pub mod exports;
pub mod mapping;
pub mod objects;
mod places;
pub mod readiness;
pub mod registered;
#[cfg(test)]
mod rig;
pub mod serve;
pub mod session;
pub mod share;
pub mod shown;
pub mod slices;
pub mod start;
pub mod traced;
pub mod upstream;
pub mod video;
pub mod watch;

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{bail, ensure, Context, Result};
use zerocopy::FromBytes;

use crate::host::linux::LinuxHost;
use crate::host::sim::{SimHost, SimOptions};
use crate::host::Host;
use crate::log;
use crate::rate::Rates;
use crate::sandbox::{self, Mode};
use crate::transport::link::{Kind, Message, Outgoing, Receiver, Sender};
use crate::transport::page::SlotPage;
use crate::transport::ring::{Ring, RingConfig};
use crate::transport::shared::Shared;
use crate::transport::trace::Trace;
use arena::Arena;
use exports::Kept;
use serve::Server;
use session::{Common, Session};
use start::{HostKind, Region, Start};
use upstream::Upstream;

/// Threads that serve one guest process: so many of its calls can be under way at once.
const SERVERS: usize = 4;
/// A broker that does not read for so long is gone for us.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves one guest process until the broker lets go of `link`.
pub fn run(link: UnixStream, mode: Mode) -> Result<()> {
    let sender = Sender::new(link.try_clone()?, PATIENCE)?;
    let mut receiver = Receiver::new(link);
    let Some(first) = receiver.receive().context("Reading the start message failed")? else {
        return Ok(());
    };
    let worker = Worker::start(first, sender, mode)?;
    worker.upstream.tell(Kind::Ready, Outgoing::default())?;
    while let Some(message) = receiver.receive().context("Reading from the broker failed")? {
        worker.hear(message)?;
    }
    Ok(())
}

struct Worker {
    upstream: Arc<Upstream>,
    session: Arc<Session>,
    server: Arc<Server>,
    page: Arc<SlotPage>,
}

impl Worker {
    fn start(mut first: Message, sender: Sender, mode: Mode) -> Result<Self> {
        ensure!(first.kind == Kind::Start, "The broker's first message was {:?}", first.kind);
        ensure!(first.fds.len() > 2, "The start message came without its pages");
        let page = Arc::new(SlotPage::open(first.fds.remove(0))?);
        let rates = Arc::new(Rates::open(first.fds.remove(0))?);
        let trace = Trace::open(first.fds.remove(0))?;
        let start = Start::decode(&first).context("The start message is malformed")?;
        log::limit(&rates, start.lines);
        sandbox::worker(mode, start.host, &start.nodes)?;
        let upstream = Arc::new(Upstream::new(sender));
        let arena = open_arena(&start, &mut first.fds, &upstream)?;
        let host = open_host(&start, first.fds)?;
        let common = Common { page: Arc::clone(&page), rates, trace, arena };
        let session = Arc::new(Session::new(start, host, Arc::clone(&upstream), common)?);
        let server = Server::start(SERVERS, Arc::clone(&session), Arc::clone(&upstream))?;
        watch::Watcher::start(Arc::clone(&session))?;
        Ok(Self { upstream, session, server, page })
    }

    fn hear(&self, message: Message) -> Result<()> {
        match message.kind {
            Kind::Rings => self.rings(message),
            Kind::Stop => {
                self.server.stop();
                self.session.watcher().stop();
                self.upstream.tell(Kind::Stopped, answer(&message))?;
                Ok(())
            }
            Kind::Request => {
                self.server.submit(message);
                Ok(())
            }
            Kind::Export => {
                // CAST: a handle has 31 bits.
                let exported = self.session.export(message.words[0] as u32);
                let (words, fd) = match &exported {
                    Ok((fd, kind, kept)) => {
                        let [range, bytes] = kept.as_ref().map_or([0; 2], Kept::to_words);
                        ([0, u64::from(*kind as u8), range, bytes], Some(fd))
                    }
                    Err(errno) => ([u64::from(errno.status()), 0, 0, 0], None),
                };
                let fds: Vec<_> = fd.iter().map(|fd| fd.as_raw_fd()).collect();
                let out = Outgoing { tag: message.tag, words, fds: &fds, ..Outgoing::default() };
                self.upstream.tell(Kind::Exported, out)?;
                Ok(())
            }
            Kind::Call => {
                let call = message.fds.into_iter().next().context("Call came without its fd")?;
                match message.words[0] {
                    0 => self.server.set_call(call),
                    _ => self.session.watcher().set_call(call),
                }
                Ok(())
            }
            Kind::Placed
            | Kind::Unplaced
            | Kind::Fetched
            | Kind::Taken
            | Kind::Held
            | Kind::Regions
            | Kind::Charged => {
                self.upstream.hear(message);
                Ok(())
            }
            Kind::Weight => {
                let session = Arc::clone(&self.session);
                session.set_weight(u32::try_from(message.words[0]).unwrap_or(0));
                // The driver may take its time, and others wait for what else comes here.
                let weighing = std::thread::Builder::new().name("weight".into());
                weighing.stack_size(256 << 10).spawn(move || session.weigh_all())?;
                Ok(())
            }
            kind => bail!("The broker sent {kind:?}, which is a worker's to send"),
        }
    }

    /// Begins to serve a slot's queues. Descriptors: four of the queues, then the memory's.
    fn rings(&self, mut message: Message) -> Result<()> {
        ensure!(message.fds.len() > 4, "Rings came with {} descriptors", message.fds.len());
        let regions = message.fds.split_off(4);
        let [kick, call, events_kick, events_call]: [OwnedFd; 4] =
            message.fds.try_into().map_err(|_| anyhow::anyhow!("Rings came without its queues"))?;
        let (configs, table) = <[RingConfig]>::ref_from_prefix_with_elems(&message.payload, 2)
            .map_err(|_| anyhow::anyhow!("Rings is too short"))?;
        let memory = start::map_memory(Region::parse(table)?, regions)?;
        let control =
            Ring::new(configs[0], Arc::clone(&memory), Some(call), Some(Arc::clone(&self.page)))?;
        let events = Ring::new(configs[1], memory, Some(events_call), None)?;
        // CAST: slots are few.
        self.session.set_slot(message.words[0] as u32);
        self.session.watcher().begin(events, events_kick, Arc::clone(&self.page));
        self.server.begin(control, kick);
        Ok(())
    }
}

fn answer(message: &Message) -> Outgoing<'static> {
    Outgoing { tag: message.tag, ..Outgoing::default() }
}

fn open_arena(
    start: &Start,
    fds: &mut Vec<OwnedFd>,
    upstream: &Arc<Upstream>,
) -> Result<Option<Arena>> {
    if start.arena_size == 0 {
        return Ok(None);
    }
    ensure!(!fds.is_empty(), "The start message came without the arena");
    let shared =
        Shared::map(fds.remove(0), start.arena_size).context("Mapping the arena failed")?;
    Ok(Some(Arena::new(shared, Arc::clone(upstream))?))
}

fn open_host(start: &Start, mut fds: Vec<OwnedFd>) -> Result<Arc<dyn Host>> {
    Ok(match start.host {
        HostKind::Nvidia => Arc::new(LinuxHost),
        HostKind::Sim => {
            ensure!(!fds.is_empty(), "The start message came without the simulated card");
            let options = SimOptions::from_environment(&start.compiled.release);
            let host = SimHost::new(fds.remove(0), options)
                .context("Opening the simulated card failed")?;
            Arc::new(host)
        }
    })
}
