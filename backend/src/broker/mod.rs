//! The broker: what one guest shares among its processes, and the life of their workers.
//!
//! It opens no NVIDIA device, makes no RM call and parses almost nothing of the
//! guest's: stock QEMU cannot survive a backend that dies.
//!
//! - [`device`]: what the frontend sets up
//! - [`control`]: queues 0 and 1, and the thread that serves them
//! - [`workers`]: which process has which worker and slot
//! - [`worker`]: one worker, from the broker's side
//! - [`window`]: what is placed in the guest's memory window
//! - [`arena`]: the memory file in it that system memory comes from
//! - [`ranges`]: where there is room, in either
//! - [`placer`]: the thread that asks the VMM for it
//! - [`shares`]: who holds how much of what the guest has
//! - [`video`]: the guest's budget of the card's memory
//! - [`nodes`]: what the guest is told to create
//! - [`admin`]: what an admin can ask and set
//! - [`report`]: the state of the guest, for admins and metrics
//! - [`metrics`]: the same for Prometheus
//! - [`trace`]: the guest's calls, for an admin who looks

pub mod admin;
pub mod arena;
pub mod control;
pub mod device;
pub mod metrics;
pub mod nodes;
pub mod placer;
pub mod ranges;
pub mod report;
pub mod shares;
pub mod trace;
pub mod video;
pub mod window;
pub mod worker;
pub mod workers;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::Duration;

use anyhow::{Context, Result};
use nvguest_abi::compiled::Compiled;
use vhost::vhost_user::{BackendReqHandler, Error as VhostError};

use crate::budgets::{Budgets, VramMode, WEIGHTS};
use crate::host::Node;
use crate::limits::{Limits, Live, Resource};
use crate::rate::Rates;
use crate::sandbox;
use crate::starter::Starter;
use crate::sync::lock;
use crate::wire;
use crate::worker::start::HostKind;
use arena::Arena;
use control::Control;
use device::{Device, Frontend};
use nodes::Nodes;
use placer::Placer;
use shares::Shares;
use trace::Tracing;
use video::Video;
use window::Window;
use workers::Workers;

/// Workers of a guest that is gone are waited for so long.
const GOING: Duration = Duration::from_secs(5);

/// What a broker is started with.
pub struct Settings {
    /// The host's profile.
    pub compiled: Arc<Compiled>,
    /// What the guest must create.
    pub nodes: Nodes,
    /// Which driver workers ask.
    pub host: HostKind,
    /// The simulated card, for [`HostKind::Sim`].
    pub card: Option<OwnedFd>,
    /// Bytes of window.
    pub window_size: u64,
    /// Bytes of it that are the arena; 0 for none.
    pub arena_size: u64,
    /// How long a worker looks at its queue before it sleeps, in µs.
    pub poll_us: u32,
    /// Limits of the guest.
    pub limits: Limits,
    /// Its memory and time of the card.
    pub budgets: Budgets,
    /// No other guest's backend runs as this user.
    pub own_user: bool,
    /// What admins call the guest.
    pub name: Option<String>,
}

/// The state of one guest.
pub struct Broker {
    /// Which driver workers ask.
    pub host: HostKind,
    /// The simulated card.
    pub card: Option<OwnedFd>,
    /// What admins call the guest.
    pub name: Option<String>,
    /// Limits of the guest.
    pub limits: Arc<Live>,
    /// Worker slots.
    pub slots: usize,
    /// No other guest's backend runs as this user.
    pub own_user: bool,
    /// How long a worker looks at its queue before it sleeps, in µs.
    pub poll_us: u32,
    /// The host's profile, and its blob for the workers.
    pub compiled: Arc<Compiled>,
    /// See [`Broker::compiled`].
    pub compiled_blob: Vec<u8>,
    /// The SCHEMA blob.
    pub schema: Vec<u8>,
    /// The NODES blob.
    pub nodes: Vec<u8>,
    /// Devices by their position among the nodes.
    pub devices: Arc<Vec<Option<Node>>>,
    /// The memory window.
    pub window: Window,
    /// Queues 0 and 1.
    pub control: Control,
    /// Who asks the VMM for placements.
    pub placer: Placer,
    /// Worker processes.
    pub workers: Workers,
    /// What each holds of the guest's share.
    pub shares: Shares,
    /// What each holds of the card's memory.
    pub video: Video,
    /// What the guest is shown of its budget.
    pub vram_mode: VramMode,
    /// How often something was done lately.
    pub rates: Arc<Rates>,
    /// Their calls, while an admin looks.
    pub trace: Tracing,
    /// Who starts them.
    pub starter: Starter,
    /// What confines this process, to be shown.
    pub sandbox: sandbox::State,
    /// The guest's share of the card's time.
    weight: AtomicU32,
    /// RM's status where the card refused a time slice; 0 if it never did.
    slice_refused: AtomicU32,
    device: device::Shared,
}

impl Broker {
    /// A broker that serves nobody yet.
    pub fn new(settings: Settings, starter: Starter, sandbox: sandbox::State) -> Result<Arc<Self>> {
        let Settings { compiled, nodes, host, card, window_size, arena_size, .. } = settings;
        let Settings { poll_us, limits, budgets, own_user, name, .. } = settings;
        let queues = wire::BROKER_QUEUES + 2 * limits.slots;
        let arena = match arena_size {
            0 => None,
            // A process leaves half of it to the others.
            size => Some(Arena::create(size, limits.process(Resource::Arena).min(size / 2))?),
        };
        let (slots, limits) = (limits.slots, Live::new(limits));
        Ok(Arc::new(Self {
            name,
            host,
            card,
            limits: Arc::clone(&limits),
            slots,
            own_user,
            poll_us,
            compiled_blob: compiled.to_bytes(),
            schema: compiled.rules.to_schema(),
            compiled,
            nodes: nodes.blob,
            devices: Arc::new(nodes.devices),
            window: Window::new(window_size, arena, Arc::clone(&limits)),
            control: Control::new().context("Setting up the control thread failed")?,
            placer: Placer::default(),
            workers: Workers::new(Arc::clone(&limits)),
            shares: Shares::new(limits),
            video: Video::new(budgets.vram),
            vram_mode: budgets.mode,
            weight: AtomicU32::new(budgets.weight),
            slice_refused: AtomicU32::new(0),
            rates: Arc::new(Rates::create().context("Making the page of rates failed")?),
            trace: Tracing::create().context("Making the ring of traces failed")?,
            starter,
            sandbox,
            device: device::Shared::new(Device::new(queues)),
        }))
    }

    /// Serves one frontend until it hangs up.
    pub fn serve(self: &Arc<Self>, connection: UnixStream) -> Result<()> {
        control::start(self)?;
        self.placer.start(self)?;
        let frontend = Arc::new(Frontend::new(Arc::clone(self)));
        let mut handler = BackendReqHandler::from_stream(connection, frontend);
        let outcome = loop {
            match handler.handle_request() {
                Ok(()) => {}
                Err(VhostError::Disconnected | VhostError::PartialMessage) => break Ok(()),
                Err(VhostError::SocketBroken(error)) => break Err(error.into()),
                // The frontend was told, if it asked to be; the device goes on.
                Err(error @ (VhostError::InvalidParam | VhostError::InvalidOperation(_))) => {
                    tracing::warn!(%error, "a request of the VMM was refused");
                }
                Err(error) => break Err(error).context("Serving the VMM failed"),
            }
        };
        self.workers.end_all();
        if !self.workers.await_empty(GOING) {
            tracing::warn!("workers are still ending; the kernel takes back what they hold");
        }
        outcome
    }

    /// Gives the guest another budget of the card's memory, from now on;
    /// [`crate::budgets::NO_BUDGET`] for none. What it has allocated stays.
    pub fn set_vram(&self, bytes: u64) {
        self.video.set_budget(bytes);
    }

    /// Gives the guest another share of the card's time, for its live channel groups too;
    /// beyond [`WEIGHTS`] it is the nearest of them.
    pub fn set_weight(&self, weight: u32) {
        let weight = weight.clamp(*WEIGHTS.start(), *WEIGHTS.end());
        // Before the workers are told: one that starts meanwhile begins with it.
        self.weight.store(weight, Ordering::Release);
        self.workers.weight_changed(weight);
    }

    /// The guest's share of the card's time.
    pub fn weight(&self) -> u32 {
        self.weight.load(Ordering::Acquire)
    }

    /// RM's status where the card refused a time slice.
    pub fn slice_refused(&self) -> Option<u32> {
        Some(self.slice_refused.load(Ordering::Acquire)).filter(|&status| status != 0)
    }

    /// The card refused a time slice; the first time is said.
    fn slice_was_refused(&self, status: u32) {
        if self.slice_refused.swap(status, Ordering::AcqRel) == 0 {
            tracing::warn!(
                status = format_args!("{status:#x}"),
                "the card refuses time slices: the guest's weight has no effect on all of its work"
            );
        }
    }

    /// The device; held for moments only.
    pub fn device(&self) -> MutexGuard<'_, Device> {
        lock(&self.device)
    }

    /// Bytes of the guest's window; 0 if the frontend cannot map.
    pub fn window_size(&self) -> u64 {
        if self.device().can_map() {
            self.window.size()
        } else {
            0
        }
    }

    /// What the guest reads at probe.
    pub fn config(&self) -> wire::Config {
        wire::Config {
            magic: wire::MAGIC.into(),
            version: wire::VERSION.into(),
            // CAST: at most MAX_SLOTS.
            slots: (self.slots as u16).into(),
            window_size: self.window_size().into(),
            reserved: Default::default(),
        }
    }

    /// A queue has all that it takes.
    pub fn queue_started(self: &Arc<Self>, index: usize) {
        match slot_of(index) {
            None => self.control.begin(self, index),
            Some(slot) => self.slot_started(slot),
        }
    }

    /// A slot is usable once both of its queues are.
    fn slot_started(self: &Arc<Self>, slot: usize) {
        let (control, events) = queues_of(slot);
        let ready = {
            let device = self.device();
            device.parts(control).is_some() && device.parts(events).is_some()
        };
        if ready {
            self.workers.slot_ready(self, slot);
        }
    }

    /// The frontend takes a queue back; returns once it is not touched any more.
    pub fn queue_stopped(self: &Arc<Self>, index: usize) {
        match slot_of(index) {
            None => self.control.end(self, index),
            Some(slot) => self.workers.slot_gone(self, slot),
        }
    }

    /// The frontend wants its interrupts elsewhere.
    pub fn call_changed(&self, index: usize) {
        let Some(parts) = self.device().parts(index) else { return };
        match slot_of(index) {
            None => self.control.set_call(index, parts.call),
            Some(slot) => {
                let events = index % 2 == 1;
                self.workers.set_call(slot, events, parts.call.as_fd());
            }
        }
    }

    /// The guest has other memory now: whoever serves a queue maps it anew.
    pub fn memory_changed(self: &Arc<Self>) {
        for index in 0..wire::BROKER_QUEUES {
            if self.device().parts(index).is_some() {
                self.control.end(self, index);
                self.control.begin(self, index);
            }
        }
        for slot in 0..self.slots {
            if self.device().parts(queues_of(slot).0).is_some() {
                self.workers.slot_gone(self, slot);
                self.slot_started(slot);
            }
        }
    }
}

/// The slot that a queue belongs to; `None` for the broker's own.
pub fn slot_of(index: usize) -> Option<usize> {
    index.checked_sub(wire::BROKER_QUEUES).map(|index| index / 2)
}

/// A slot's control and event queues.
pub fn queues_of(slot: usize) -> (usize, usize) {
    let control = wire::BROKER_QUEUES + 2 * slot;
    (control, control + 1)
}
