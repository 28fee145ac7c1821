//! The VMM's part: sets the device up as QEMU does, and answers the backend's requests.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserMMap, VhostUserMMapFlags,
    VhostUserProtocolFeatures, VhostUserSharedMsg, VhostUserVirtioFeatures,
};
use vhost::vhost_user::{
    Frontend, FrontendReqHandler, HandlerResult, VhostUserFrontend, VhostUserFrontendReqHandler,
};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use zerocopy::FromBytes;

use crate::memory::{Memory, GPA};
use crate::ring::Ring;
use crate::window::{Hole, Place, Source};
use crate::{wire, Error, Result};

const VERSION_1: u64 = 1 << 32;
const EVENT_IDX: u64 = 1 << 29;
const INDIRECT: u64 = 1 << 28;

/// Where the window is in the guest's physical address space.
const WINDOW_GPA: u64 = 1 << 40;
/// Regions of a memory table at most, as in QEMU.
const MAX_REGIONS: usize = 8;

/// How the frontend behaves.
#[derive(Clone, Debug)]
pub struct Options {
    /// Worker slots to set up; 0 for a VMM with two queues only.
    pub slots: usize,
    /// Entries of each queue.
    pub queue_size: u16,
    /// Negotiate `VIRTIO_F_EVENT_IDX`.
    pub event_idx: bool,
    /// Negotiate and use `VIRTIO_F_INDIRECT_DESC`.
    pub indirect: bool,
    /// Buffers to post on each event queue.
    pub event_buffers: u16,
    /// How long a caller looks at its queue before it sleeps.
    pub poll: Duration,
    /// When a caller gives up.
    pub patience: Duration,
    /// Acknowledge maps and unmaps before they take effect, as stock QEMU does.
    pub late: Late,
    /// Send each placement back in the memory table, as stock QEMU does.
    pub echo: bool,
    /// Look at the event queues instead of sleeping for their interrupts: takes a core.
    pub attentive: bool,
    /// Protocol features that this VMM does not have.
    pub lacking: VhostUserProtocolFeatures,
    /// What the guest finds where nothing is mapped.
    pub hole: Hole,
    /// Bytes of guest memory for large requests.
    pub heap: usize,
}

/// When a map or unmap takes effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Late {
    /// Before it is acknowledged.
    Never,
    /// With the backend's next request of any kind: what a barrier relies on.
    UntilNextRequest,
    /// With the next map or unmap: as if the backend had no barrier. For controls
    /// that show that a test can fail.
    UntilNextMap,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            slots: 16,
            queue_size: 256,
            event_idx: true,
            indirect: true,
            event_buffers: 64,
            poll: Duration::from_micros(30),
            patience: Duration::from_secs(20),
            late: Late::UntilNextRequest,
            echo: true,
            attentive: false,
            lacking: VhostUserProtocolFeatures::empty(),
            hole: Hole::Zero,
            heap: 64 << 20,
        }
    }
}

impl Options {
    fn features(&self) -> u64 {
        let mut features = VERSION_1 | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits();
        features |= if self.event_idx { EVENT_IDX } else { 0 };
        features |= if self.indirect { INDIRECT } else { 0 };
        features
    }
}

/// A vhost-user device as a VMM has it.
pub struct Vmm {
    frontend: Frontend,
    /// What the guest reads at probe.
    pub config: wire::Config,
    /// Queues that the backend offers.
    pub queues: usize,
    handler: Option<Arc<Requests>>,
}

impl Vmm {
    /// Connects, agrees on features and asks what the device is.
    pub fn connect(stream: UnixStream, options: &Options) -> Result<Self> {
        let queues = wire::BROKER_QUEUES + 2 * options.slots;
        let mut frontend = Frontend::from_stream(stream, queues as u64);
        frontend.set_owner()?;
        let offered = frontend.get_features()?;
        if options.features() & !offered != 0 {
            return Err(Error::Malformed("GET_FEATURES"));
        }
        let ours = VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::SHMEM
            | VhostUserProtocolFeatures::SHARED_OBJECT;
        let agreed = frontend.get_protocol_features()? & (ours - options.lacking);
        frontend.set_protocol_features(agreed)?;
        if agreed.contains(VhostUserProtocolFeatures::REPLY_ACK) {
            frontend.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let offered = usize::try_from(frontend.get_queue_num()?).unwrap_or(0);
        let flags = VhostUserConfigFlags::empty();
        // CAST: 64 bytes.
        let size = wire::CONFIG_SIZE as u32;
        let (_, bytes) = frontend.get_config(0, size, flags, &[0; wire::CONFIG_SIZE])?;
        let config =
            wire::Config::read_from_bytes(&bytes).map_err(|_| Error::Malformed("GET_CONFIG"))?;
        Ok(Self { frontend, config, queues: offered, handler: None })
    }

    /// Sizes of the shared-memory regions, by number.
    pub fn shmem(&mut self) -> Result<Vec<u64>> {
        Ok(self.frontend.get_shmem_config()?.memory_sizes.to_vec())
    }

    /// The protocol itself, for what has no method here.
    pub fn frontend(&self) -> Frontend {
        self.frontend.clone()
    }

    /// Opens the channel on which the backend asks for placements.
    pub fn serve(
        &mut self,
        memory: Arc<Memory>,
        place: Arc<dyn Place>,
        options: &Options,
    ) -> Result<()> {
        let requests = Arc::new(Requests {
            frontend: self.frontend.clone(),
            memory,
            place,
            late: options.late,
            echo: options.echo,
            state: Mutex::default(),
        });
        self.handler = Some(Arc::clone(&requests));
        let mut handler =
            FrontendReqHandler::new(requests).map_err(vhost::Error::VhostUserProtocol)?;
        handler.set_reply_ack_flag(!options.lacking.contains(VhostUserProtocolFeatures::REPLY_ACK));
        self.frontend.set_backend_request_fd(&handler.get_tx_raw_fd())?;
        std::thread::Builder::new().name("vmm-requests".into()).spawn(move || {
            use vhost::vhost_user::Error;
            loop {
                match handler.handle_request() {
                    // What we refused the backend was told.
                    Ok(_) | Err(Error::ReqHandlerError(_)) => {}
                    Err(_) => return,
                }
            }
        })?;
        Ok(())
    }

    /// Agrees on the device's features and sends the memory table.
    pub fn start(&self, memory: &Memory, options: &Options) -> Result<()> {
        self.frontend.set_features(options.features())?;
        self.frontend.set_mem_table(&[ram(memory)])?;
        Ok(())
    }

    /// Starts a queue at the position `base`.
    pub fn start_queue(&self, index: usize, ring: &Ring, base: u16) -> Result<()> {
        let mut frontend = self.frontend.clone();
        let layout = ring.layout;
        let user = |offset: usize| ring.memory.address() + offset as u64;
        frontend.set_vring_num(index, layout.size)?;
        frontend.set_vring_base(index, base)?;
        let config = VringConfigData {
            queue_max_size: layout.size,
            queue_size: layout.size,
            flags: 0,
            desc_table_addr: user(layout.descriptors()),
            used_ring_addr: user(layout.used()),
            avail_ring_addr: user(layout.available()),
            log_addr: None,
        };
        frontend.set_vring_addr(index, &config)?;
        frontend.set_vring_kick(index, &ring.kick)?;
        frontend.set_vring_call(index, &ring.call)?;
        frontend.set_vring_enable(index, true)?;
        Ok(())
    }

    /// Stops a queue; returns how far it was served.
    pub fn stop_queue(&self, index: usize) -> Result<u16> {
        let base = self.frontend.get_vring_base(index)?;
        u16::try_from(base).map_err(|_| Error::Malformed("GET_VRING_BASE"))
    }

    /// Sends a memory table with another region behind the first.
    pub fn plug(&self, memory: &Memory, more: &Memory) -> Result<()> {
        let behind =
            VhostUserMemoryRegionInfo { guest_phys_addr: GPA + memory.size() as u64, ..ram(more) };
        self.frontend.set_mem_table(&[ram(memory), behind])?;
        Ok(())
    }

    /// Sends a memory table with the first region alone.
    pub fn unplug(&self, memory: &Memory) -> Result<()> {
        self.frontend.set_mem_table(&[ram(memory)])?;
        Ok(())
    }

    /// Maps and unmaps that the backend has asked for.
    pub fn asked(&self) -> (u64, u64) {
        self.handler.as_ref().map_or((0, 0), |handler| handler.state().asked)
    }
}

fn ram(memory: &Memory) -> VhostUserMemoryRegionInfo {
    VhostUserMemoryRegionInfo {
        guest_phys_addr: GPA,
        memory_size: memory.size() as u64,
        userspace_addr: memory.address(),
        mmap_offset: 0,
        mmap_handle: memory.fd().as_raw_fd(),
    }
}

/// A placement, as the memory table names it.
struct Placed {
    at: u64,
    length: u64,
    source: Source,
    fd: OwnedFd,
}

enum Change {
    Map(Placed),
    Unmap(u64, u64),
}

#[derive(Default)]
struct State {
    late: Option<Change>,
    placed: Vec<Placed>,
    asked: (u64, u64),
}

/// Answers the backend. One thread calls this, as QEMU's main loop would.
struct Requests {
    frontend: Frontend,
    memory: Arc<Memory>,
    place: Arc<dyn Place>,
    late: Late,
    echo: bool,
    state: Mutex<State>,
}

impl Requests {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: Change) -> io::Result<u64> {
        self.settle()?;
        if self.late == Late::Never {
            self.apply(change)?;
        } else {
            self.state().late = Some(change);
        }
        Ok(0)
    }

    /// What was acknowledged takes effect.
    fn settle(&self) -> io::Result<()> {
        let late = self.state().late.take();
        late.map_or(Ok(()), |change| self.apply(change))
    }

    fn apply(&self, change: Change) -> io::Result<()> {
        match change {
            Change::Map(placed) => {
                self.place.map(placed.at, placed.length, placed.fd.as_fd(), placed.source)?;
                self.state().placed.push(placed);
            }
            Change::Unmap(at, length) => {
                self.place.unmap(at, length)?;
                self.state().placed.retain(|placed| placed.at != at);
            }
        }
        if self.echo {
            self.send_table()?;
        }
        Ok(())
    }

    /// As QEMU does whenever the guest's memory changes: past eight regions it only complains.
    fn send_table(&self) -> io::Result<()> {
        let state = self.state();
        if state.placed.len() >= MAX_REGIONS {
            return Ok(());
        }
        let placed = state.placed.iter().map(|placed| VhostUserMemoryRegionInfo {
            guest_phys_addr: WINDOW_GPA + placed.at,
            memory_size: placed.length,
            userspace_addr: WINDOW_GPA + placed.at,
            mmap_offset: placed.source.offset,
            mmap_handle: placed.fd.as_raw_fd(),
        });
        let table: Vec<_> = std::iter::once(ram(&self.memory)).chain(placed).collect();
        // Not while the lock is held: the backend may be waiting for us.
        let fds: Vec<OwnedFd> =
            state.placed.iter().map(|placed| placed.fd.try_clone()).collect::<io::Result<_>>()?;
        drop(state);
        let outcome = self.frontend.set_mem_table(&table);
        drop(fds);
        outcome.map(drop).map_err(io::Error::other)
    }
}

impl VhostUserFrontendReqHandler for Requests {
    fn shmem_map(&self, request: &VhostUserMMap, fd: &dyn AsRawFd) -> HandlerResult<u64> {
        self.state().asked.0 += 1;
        if request.shmid != wire::SHM_WINDOW {
            return Err(io::Error::from_raw_os_error(nix::libc::EINVAL));
        }
        // SAFETY: the crate keeps the file open during the call.
        let fd = unsafe { BorrowedFd::borrow_raw(fd.as_raw_fd()) }.try_clone_to_owned()?;
        let flags = VhostUserMMapFlags::from_bits_truncate(request.flags);
        let source = Source {
            offset: request.fd_offset,
            writable: flags.contains(VhostUserMMapFlags::WRITABLE),
        };
        let (at, length) = (request.shm_offset, request.len);
        self.change(Change::Map(Placed { at, length, source, fd }))
    }

    fn shmem_unmap(&self, request: &VhostUserMMap) -> HandlerResult<u64> {
        self.state().asked.1 += 1;
        self.change(Change::Unmap(request.shm_offset, request.len))
    }

    fn shared_object_remove(&self, _uuid: &VhostUserSharedMsg) -> HandlerResult<u64> {
        if self.late != Late::UntilNextMap {
            self.settle()?;
        }
        // There is no such object.
        Err(io::Error::from_raw_os_error(nix::libc::ENOENT))
    }
}
