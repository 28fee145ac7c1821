//! The vhost-user device: what the frontend sets up, answered without waiting for anything.
//!
//! `VhostUserBackendReqHandler` of the `vhost` crate is implemented here directly, not
//! through the daemon of `vhost-user-backend`: its memory table would map the echoes
//! of our own placements, and its threads would serve queues that are a worker's.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard};

use nix::fcntl::{fcntl, FcntlArg, OFlag};
use vhost::vhost_user::message::{
    VhostUserConfigFlags, VhostUserInflight, VhostUserLog, VhostUserMemoryRegion,
    VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVirtioFeatures, VhostUserVringAddrFlags,
    VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandler};
use virtio_bindings::virtio_config::VIRTIO_F_VERSION_1;
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};
use zerocopy::IntoBytes;

use super::Broker;
use crate::transport::ring::{Memory, RingConfig, MAX_QUEUE_SIZE};
use crate::wire;
use crate::worker::start::{map_memory, Region};

/// What the frontend must agree to, with the name and the reason for each.
const NEEDED: [(VhostUserProtocolFeatures, &str, &str); 4] = [
    (VhostUserProtocolFeatures::CONFIG, "CONFIG", "the guest finds the device by it"),
    (VhostUserProtocolFeatures::MQ, "MQ", "there are at least two queues"),
    (VhostUserProtocolFeatures::BACKEND_REQ, "BACKEND_REQ", "the window is asked for through it"),
    (
        VhostUserProtocolFeatures::BACKEND_SEND_FD,
        "BACKEND_SEND_FD",
        "memory is placed by descriptor",
    ),
];

/// What a window takes: mapping, the barrier, and answers to both.
const WINDOW: VhostUserProtocolFeatures = VhostUserProtocolFeatures::SHMEM
    .union(VhostUserProtocolFeatures::SHARED_OBJECT)
    .union(VhostUserProtocolFeatures::REPLY_ACK);

/// A region of the guest's RAM, and where the frontend has it.
struct RamRegion {
    region: Region,
    user: u64,
    fd: OwnedFd,
}

/// A queue as the frontend set it up.
#[derive(Default)]
pub struct Vring {
    config: RingConfig,
    placed: bool,
    enabled: bool,
    kick: Option<OwnedFd>,
    call: Option<OwnedFd>,
    started: bool,
}

/// What it takes to serve a queue.
pub struct QueueParts {
    /// Where it is.
    pub config: RingConfig,
    /// Rung by the guest.
    pub kick: OwnedFd,
    /// Rings the guest.
    pub call: OwnedFd,
}

/// All that the frontend has told us.
pub struct Device {
    features: u64,
    protocol: VhostUserProtocolFeatures,
    ram: Vec<RamRegion>,
    memory: Option<Arc<Memory>>,
    vrings: Vec<Vring>,
}

impl Device {
    /// A device with so many queues.
    pub fn new(queues: usize) -> Self {
        let vrings = std::iter::repeat_with(Vring::default).take(queues).collect();
        let protocol = VhostUserProtocolFeatures::empty();
        Self { features: 0, protocol, ram: Vec::new(), memory: None, vrings }
    }

    /// Whether the frontend can map, and tell when it has.
    pub fn can_map(&self) -> bool {
        self.protocol.contains(WINDOW)
    }

    /// The guest's memory as it is mapped here.
    pub fn memory(&self) -> Option<Arc<Memory>> {
        self.memory.clone()
    }

    /// The guest's memory for a worker: its regions, and their files.
    pub fn share_memory(&self) -> std::io::Result<(Vec<Region>, Vec<OwnedFd>)> {
        let regions = self.ram.iter().map(|ram| ram.region).collect();
        let fds = self.ram.iter().map(|ram| ram.fd.try_clone()).collect::<std::io::Result<_>>()?;
        Ok((regions, fds))
    }

    /// Duplicates of what serves a started queue.
    pub fn parts(&self, index: usize) -> Option<QueueParts> {
        let vring = self.vrings.get(index).filter(|vring| vring.started)?;
        let kick = vring.kick.as_ref()?.try_clone().ok()?;
        let call = vring.call.as_ref()?.try_clone().ok()?;
        Some(QueueParts { config: vring.config, kick, call })
    }

    /// Notes how far a queue was served, for whoever serves it next.
    pub fn set_position(&mut self, index: usize, next_available: u16) {
        if let Some(vring) = self.vrings.get_mut(index) {
            vring.config.next_available = next_available;
        }
    }

    fn vring(&mut self, index: u32) -> Result<&mut Vring> {
        self.vrings.get_mut(index as usize).ok_or(Error::InvalidOperation("there is no such queue"))
    }

    /// Guest-physical address of a frontend address.
    fn translate(&self, user: u64) -> Result<u64> {
        self.ram
            .iter()
            .find_map(|ram| {
                let offset = user.checked_sub(ram.user)?;
                (offset < ram.region.size).then(|| ram.region.address + offset)
            })
            .ok_or(Error::InvalidOperation("a queue lies outside of guest memory"))
    }

    /// Marks a queue started if nothing is missing any more; `true` if it just became so.
    fn try_start(&mut self, index: usize) -> bool {
        let always = self.features & VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits() == 0;
        let memory = self.memory.is_some();
        let Some(vring) = self.vrings.get_mut(index) else { return false };
        let complete = memory
            && vring.placed
            && (vring.enabled || always)
            && vring.kick.is_some()
            && vring.call.is_some();
        let news = complete && !vring.started;
        vring.started |= complete;
        news
    }
}

/// The device as the protocol thread serves it.
pub struct Frontend {
    broker: Arc<Broker>,
}

impl Frontend {
    /// Serves for `broker`.
    pub fn new(broker: Arc<Broker>) -> Self {
        Self { broker }
    }

    fn device(&self) -> MutexGuard<'_, Device> {
        self.broker.device()
    }

    fn try_start(&self, index: u32) {
        let index = index as usize;
        let started = self.device().try_start(index);
        if started {
            tracing::debug!(queue = index, "started");
            self.broker.queue_started(index);
        }
    }
}

impl VhostUserBackendReqHandler for Frontend {
    fn set_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_owner(&self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&self) -> Result<()> {
        Ok(())
    }

    fn get_features(&self) -> Result<u64> {
        Ok(1 << VIRTIO_F_VERSION_1
            | 1 << VIRTIO_RING_F_INDIRECT_DESC
            | 1 << VIRTIO_RING_F_EVENT_IDX
            | VhostUserVirtioFeatures::PROTOCOL_FEATURES.bits())
    }

    fn set_features(&self, features: u64) -> Result<()> {
        let event_idx = u16::from(features & 1 << VIRTIO_RING_F_EVENT_IDX != 0);
        let mut device = self.device();
        device.features = features;
        for vring in &mut device.vrings {
            vring.config.event_idx = event_idx;
        }
        Ok(())
    }

    fn set_mem_table(
        &self,
        table: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<vhost::VhostUserMemoryRegionBase>>> {
        let mut ram = Vec::new();
        for (entry, file) in table.iter().zip(files) {
            // QEMU sends each placement back as if it were guest RAM. Such a file is not
            // mapped, held or refused.
            if self.broker.window.is_echo(file.as_fd()) {
                continue;
            }
            let region = Region {
                address: entry.guest_phys_addr,
                size: entry.memory_size,
                offset: entry.mmap_offset,
            };
            ram.push(RamRegion { region, user: entry.user_addr, fd: file.into() });
        }
        let mut device = self.device();
        let same = ram.len() == device.ram.len()
            && ram.iter().zip(&device.ram).all(|(a, b)| (a.region, a.user) == (b.region, b.user));
        if same && device.memory.is_some() {
            return Ok(None);
        }
        device.ram = ram;
        let shared = device.share_memory().map_err(Error::ReqHandlerError)?;
        let memory = map_memory(&shared.0, shared.1)
            .map_err(|error| Error::ReqHandlerError(std::io::Error::other(error)))?;
        device.memory = Some(memory);
        drop(device);
        self.broker.memory_changed();
        Ok(None)
    }

    fn set_vring_num(&self, index: u32, num: u32) -> Result<()> {
        let size = u16::try_from(num).ok().filter(|&size| size.is_power_of_two());
        let size = size.filter(|&size| size <= MAX_QUEUE_SIZE);
        self.device().vring(index)?.config.size =
            size.ok_or(Error::InvalidOperation("the queue's size is no power of two up to 1024"))?;
        Ok(())
    }

    fn set_vring_addr(
        &self,
        index: u32,
        _flags: VhostUserVringAddrFlags,
        descriptor: u64,
        used: u64,
        available: u64,
        _log: u64,
    ) -> Result<()> {
        let mut device = self.device();
        let descriptors = device.translate(descriptor)?;
        let used = device.translate(used)?;
        let available = device.translate(available)?;
        let vring = device.vring(index)?;
        vring.config = RingConfig { descriptors, available, used, ..vring.config };
        vring.placed = true;
        drop(device);
        self.try_start(index);
        Ok(())
    }

    fn set_vring_base(&self, index: u32, base: u32) -> Result<()> {
        let base = u16::try_from(base)
            .map_err(|_| Error::InvalidOperation("a queue position has 16 bits"))?;
        self.device().vring(index)?.config.next_available = base;
        Ok(())
    }

    fn get_vring_base(&self, index: u32) -> Result<VhostUserVringState> {
        self.broker.queue_stopped(index as usize);
        let mut device = self.device();
        let vring = device.vring(index)?;
        vring.started = false;
        vring.kick = None;
        vring.call = None;
        let base = vring.config.next_available;
        Ok(VhostUserVringState::new(index, base.into()))
    }

    fn set_vring_kick(&self, index: u8, fd: Option<File>) -> Result<()> {
        let kick = fd.map(OwnedFd::from);
        if let Some(kick) = &kick {
            // Whoever reads it must never wait: another may have read it first.
            let flags = FcntlArg::F_SETFL(OFlag::O_RDWR | OFlag::O_NONBLOCK);
            fcntl(kick, flags).map_err(|error| Error::ReqHandlerError(error.into()))?;
        }
        self.device().vring(index.into())?.kick = kick;
        self.try_start(index.into());
        Ok(())
    }

    fn set_vring_call(&self, index: u8, fd: Option<File>) -> Result<()> {
        let mut device = self.device();
        let vring = device.vring(index.into())?;
        vring.call = fd.map(OwnedFd::from);
        let moved = vring.started;
        drop(device);
        if moved {
            // QEMU swaps the descriptor when the guest masks or unmasks its interrupt.
            self.broker.call_changed(index.into());
        } else {
            self.try_start(index.into());
        }
        Ok(())
    }

    fn set_vring_err(&self, _index: u8, _fd: Option<File>) -> Result<()> {
        Ok(())
    }

    fn get_protocol_features(&self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::BACKEND_SEND_FD
            | VhostUserProtocolFeatures::SHMEM
            | VhostUserProtocolFeatures::SHARED_OBJECT)
    }

    fn set_protocol_features(&self, features: u64) -> Result<()> {
        let features = VhostUserProtocolFeatures::from_bits_truncate(features);
        for (feature, name, reason) in NEEDED {
            if !features.contains(feature) {
                tracing::error!(
                    "the VMM lacks the vhost-user protocol feature {name} ({reason}); QEMU 11.1 \
                     and newer have it (-device vhost-user-test-device-pci)"
                );
                return Err(Error::FeatureMismatch);
            }
        }
        if !features.contains(WINDOW) {
            tracing::warn!(
                "the VMM lacks SHMEM (QEMU 11.1 and newer have it): nothing can be mapped, so only \
                 what needs no mapping works"
            );
        }
        self.device().protocol = features;
        Ok(())
    }

    fn get_queue_num(&self) -> Result<u64> {
        Ok(self.device().vrings.len() as u64)
    }

    fn set_vring_enable(&self, index: u32, enable: bool) -> Result<()> {
        self.device().vring(index)?.enabled = enable;
        self.try_start(index);
        Ok(())
    }

    fn get_config(&self, offset: u32, size: u32, _flags: VhostUserConfigFlags) -> Result<Vec<u8>> {
        let config = self.broker.config();
        // Exactly as many bytes as were asked for: some VMMs end otherwise.
        let mut bytes = config.as_bytes().get(offset as usize..).unwrap_or(&[]).to_vec();
        bytes.resize(size as usize, 0);
        Ok(bytes)
    }

    fn set_config(&self, _offset: u32, _buf: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        Ok(())
    }

    fn set_backend_req_fd(&self, backend: Backend) {
        if self.device().can_map() {
            backend.set_reply_ack_flag(true);
            backend.set_shmem_flag(true);
            backend.set_shared_object_flag(true);
            self.broker.window.connect(backend);
        }
    }

    fn get_shmem_config(&self) -> Result<VhostUserShMemConfig> {
        let mut sizes = [0; wire::SHM_WINDOW as usize + 1];
        sizes[usize::from(wire::SHM_WINDOW)] = self.broker.window.size();
        Ok(VhostUserShMemConfig::new(1, &sizes))
    }

    fn set_gpu_socket(&self, _gpu: GpuBackend) -> Result<()> {
        Err(Error::InvalidOperation("no GPU socket is served"))
    }

    fn get_shared_object(&self, _uuid: VhostUserSharedMsg) -> Result<File> {
        Err(Error::InvalidOperation("no shared object is served"))
    }

    fn get_inflight_fd(&self, _: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        Err(Error::InvalidOperation("in-flight tracking is not offered"))
    }

    fn set_inflight_fd(&self, _: &VhostUserInflight, _file: File) -> Result<()> {
        Err(Error::InvalidOperation("in-flight tracking is not offered"))
    }

    fn get_max_mem_slots(&self) -> Result<u64> {
        Err(Error::InvalidOperation("memory slots are not offered"))
    }

    fn add_mem_region(
        &self,
        _region: &VhostUserSingleMemoryRegion,
        _fd: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<vhost::VhostUserMemoryRegionBase>> {
        Err(Error::InvalidOperation("memory slots are not offered"))
    }

    fn remove_mem_region(&self, _region: &VhostUserSingleMemoryRegion) -> Result<()> {
        Err(Error::InvalidOperation("memory slots are not offered"))
    }

    fn set_device_state_fd(
        &self,
        _direction: vhost::vhost_user::message::VhostTransferStateDirection,
        _phase: vhost::vhost_user::message::VhostTransferStatePhase,
        _fd: File,
    ) -> Result<Option<File>> {
        Err(Error::InvalidOperation("the device cannot be migrated"))
    }

    fn check_device_state(&self) -> Result<()> {
        Err(Error::InvalidOperation("the device cannot be migrated"))
    }

    fn set_log_base(&self, _log: &VhostUserLog, _file: File) -> Result<()> {
        Err(Error::InvalidOperation("the device cannot be migrated"))
    }
}

/// A device behind a lock that no thread holds while it waits for another.
pub type Shared = Mutex<Device>;
