//! Simulated cards: enough of NVIDIA's RM, inside the worker, for every path to run.
//!
//! - `cards`: video memory that all workers share, and who owns which part
//! - `memory`: what is behind memory objects
//! - `file`, `events`: open files and what makes them readable
//! - `client`: clients and their objects
//! - `channel`: a doorbell that completes work
//! - `escape`, `object`, `control`, `layout`: calls and their arguments
//! - `identity`: who a card says it is
//!
//! It answers as release 580 does, status for status, as far as `rmprobe` asks; the answers were
//! compared with an H200's. It is strict where a real driver is not: a pointer that is not of the
//! call's own memory, or a descriptor that is none of this host's files, is an error in the log,
//! counted in [`SimHost::faults`], and fails the call.
//!
//! A card can be used by a process that has its node open, as with RM (`osIsGpuAccessible`); all
//! of them are always attached, as persistence mode keeps them.
//!
//! Not simulated: what work says (methods, shaders, copies), GPU virtual addresses, UVM, NVKMS,
//! dma-buf, exported objects, the older way to register memory (RM_ALLOC_MEMORY), files, objects and events of one worker used by another (video
//! memory itself is shared), layouts of other releases than 580.
#![forbid(unsafe_code)]

mod cards;
mod channel;
mod client;
mod control;
mod escape;
mod events;
mod file;
pub mod identity;
mod layout;
mod memory;
mod object;
#[cfg(test)]
mod several;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use nix::libc;
use nvguest_abi::FileKind;

use self::cards::Cards;
pub use self::cards::SimCards;
use self::channel::Channels;
use self::client::Client;
use self::events::Events;
use self::file::SimFile;
use self::memory::{Source, PAGE};
use super::{Host, HostFile, HostMapping, Node};
use crate::errno::Errno;
use crate::marshal::scratch::Frame;

/// RM's status codes (`nvstatuscodes.h`): those of the profile crate and some more.
mod status {
    pub use nvguest_abi::status::{
        INSUFFICIENT_PERMISSIONS, INSUFFICIENT_RESOURCES, INVALID_ARGUMENT, INVALID_CLASS,
        INVALID_CLIENT, INVALID_OBJECT_HANDLE, NOT_SUPPORTED, NO_MEMORY, OBJECT_NOT_FOUND, OK,
        STATE_IN_USE,
    };
    /// `NV_ERR_INSERT_DUPLICATE_NAME`
    pub const INSERT_DUPLICATE_NAME: u32 = 0x19;
    /// `NV_ERR_INVALID_EVENT`
    pub const INVALID_EVENT: u32 = 0x28;
    /// `NV_ERR_INVALID_LIMIT`
    pub const INVALID_LIMIT: u32 = 0x2e;
    /// `NV_ERR_INVALID_OBJECT`
    pub const INVALID_OBJECT: u32 = 0x31;
    /// `NV_ERR_INVALID_OBJECT_PARENT`
    pub const INVALID_OBJECT_PARENT: u32 = 0x36;
    /// `NV_ERR_INVALID_STATE`
    pub const INVALID_STATE: u32 = 0x40;
    /// `NV_ERR_OPERATING_SYSTEM`
    pub const OPERATING_SYSTEM: u32 = 0x59;
    /// `NV_ERR_TIMEOUT`
    pub const TIMEOUT: u32 = 0x65;
}

/// How simulated cards behave.
#[derive(Clone, Debug)]
pub struct SimOptions {
    /// The release that it answers as; the layouts are 580's in any case.
    pub release: String,
    /// Whether video memory is zero when allocated, as RM's is. Without, whoever gets memory
    /// reads what its last owner left.
    pub clear_video_memory: bool,
    /// Whether PREEMPT of a channel group with a time-out of [`CRASH_US`] ends this process by
    /// SIGABRT, to test what a dead worker leaves behind.
    pub crash_on_request: bool,
    /// Whether SET_TIMESLICE is refused.
    pub keep_slices: bool,
}

impl SimOptions {
    /// Those that the environment of the broker, which its workers inherit, asks for:
    /// `NVGUEST_SIM_KEEP_MEMORY=1` hands out video memory as its last owner left it,
    /// `NVGUEST_SIM_CRASH=1` lets a guest crash its worker, `NVGUEST_SIM_KEEP_SLICES=1` refuses
    /// time slices.
    pub fn from_environment(release: &str) -> Self {
        let set = |name: &str| std::env::var_os(name).is_some_and(|value| value == "1");
        Self {
            release: release.into(),
            clear_video_memory: !set("NVGUEST_SIM_KEEP_MEMORY"),
            crash_on_request: set("NVGUEST_SIM_CRASH"),
            keep_slices: set("NVGUEST_SIM_KEEP_SLICES"),
        }
    }
}

/// The time-out in microseconds that means "abort", if the options allow it.
pub const CRASH_US: u32 = 0xdead_dead;

impl Default for SimOptions {
    fn default() -> Self {
        Self {
            release: identity::RELEASE.into(),
            clear_video_memory: true,
            crash_on_request: false,
            keep_slices: false,
        }
    }
}

/// The simulated cards, from the side of one worker.
#[derive(Debug)]
pub struct SimHost {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    cards: Arc<Cards>,
    options: SimOptions,
    /// Open files by descriptor.
    files: RwLock<HashMap<RawFd, Arc<SimFile>>>,
    /// Clients by handle.
    clients: RwLock<HashMap<u32, Arc<Client>>>,
    events: Mutex<Events>,
    /// Of each card.
    channels: Vec<Channels>,
    faults: AtomicU64,
}

impl SimHost {
    /// Takes hold of the cards that [`SimCards::create`] made. Needs `/proc/self/fd`.
    pub fn new(cards: OwnedFd, options: SimOptions) -> io::Result<Self> {
        let cards = Arc::new(Cards::attach(cards)?);
        let channels = cards.all().map(|card| Channels::of(card.number)).collect();
        Ok(Self {
            inner: Arc::new(Inner {
                cards,
                options,
                files: RwLock::default(),
                clients: RwLock::default(),
                events: Mutex::default(),
                channels,
                faults: AtomicU64::new(0),
            }),
        })
    }

    /// How many pointers and descriptors were found that are not this worker's: our own mistakes.
    pub fn faults(&self) -> u64 {
        self.inner.faults.load(Ordering::Relaxed)
    }
}

impl Inner {
    fn file(&self, fd: RawFd) -> Option<Arc<SimFile>> {
        self.files.read().unwrap_or_else(PoisonError::into_inner).get(&fd).cloned()
    }

    /// A client that calls on `file` may use: its own, or one of the control file it joined.
    fn client(&self, handle: u32, file: &SimFile) -> Option<Arc<Client>> {
        let client = self.any_client(handle)?;
        let own = client.owner == file.number || file.state().joined == Some(client.owner);
        own.then_some(client)
    }

    fn any_client(&self, handle: u32) -> Option<Arc<Client>> {
        self.clients.read().unwrap_or_else(PoisonError::into_inner).get(&handle).cloned()
    }

    /// Whether this process has the card's node open (`osIsGpuAccessible`).
    fn is_accessible(&self, card: u32) -> bool {
        let files = self.files.read().unwrap_or_else(PoisonError::into_inner);
        files.values().any(|file| file.card == Some(card))
    }

    /// The channels that this process has of the card.
    fn channels(&self, card: u32) -> Option<&Channels> {
        self.channels.get(usize::try_from(card).ok()?)
    }

    fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts and reports something that must not reach a driver.
    fn fault(&self, what: &str, value: u64, errno: Errno) -> Errno {
        self.faults.fetch_add(1, Ordering::Relaxed);
        tracing::error!("simulated card: {what} {value:#x} is not this worker's own");
        errno
    }

    /// What the close of a control file ends (`RmFreeUnusedClients`). Its video memory is left to
    /// the lock of the file, whose duplicates may still be open elsewhere.
    fn clients_closed(&self, number: u64) {
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        let (gone, left): (HashMap<_, _>, HashMap<_, _>) =
            clients.drain().partition(|(_, client)| client.owner == number);
        *clients = left;
        for client in gone.values() {
            let owned = client.owned();
            for memory in owned.memories().filter(|memory| memory.owner() == Some(number)) {
                let holds = |other: &&Arc<Client>| {
                    other.owned().memories().any(|shared| Arc::ptr_eq(shared, memory))
                };
                match clients.values().find(holds) {
                    None => memory.abandon(),
                    Some(heir) => {
                        if let Err(error) = memory.give(heir.owner) {
                            tracing::error!(%error, "simulated card: memory found no new owner");
                        }
                    }
                }
            }
        }
        drop(clients);
        for (handle, client) in gone {
            let removed = client.owned().remove(handle);
            self.objects_freed(handle, &removed);
            self.events().client_freed(handle);
        }
    }
}

impl Host for SimHost {
    fn open(&self, node: &Node, _flags: u32) -> Result<HostFile, Errno> {
        let cards = &self.inner.cards;
        let card = match node.kind {
            FileKind::Ctl => None,
            FileKind::Gpu if cards.all().any(|card| card.number == node.minor) => Some(node.minor),
            _ => return Err(Errno::ENXIO),
        };
        let (number, fd) = cards.open_file()?;
        let (file, ready) = SimFile::new(number, card)?;
        let mut files = self.inner.files.write().unwrap_or_else(PoisonError::into_inner);
        files.insert(fd.as_raw_fd(), Arc::new(file));
        Ok(HostFile { fd, ready: Some(ready), kind: node.kind })
    }

    fn ioctl(&self, file: &HostFile, cmd: u32, frame: &mut Frame<'_>) -> Result<i32, Errno> {
        let sim = self.inner.file(file.number()).ok_or(Errno::EBADF)?;
        escape::Call::new(&self.inner, &sim, cmd, frame).run()
    }

    fn mapping(
        &self,
        file: &HostFile,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<HostMapping, Errno> {
        let sim = self.inner.file(file.number()).ok_or(Errno::EBADF)?;
        let armed = sim.state().armed.clone().ok_or(Errno::EINVAL)?;
        let length = length.checked_next_multiple_of(PAGE).filter(|&length| length != 0);
        let length = length.filter(|_| offset == 0).ok_or(Errno::EINVAL)?;
        // nvidia_mmap_helper: a card's node maps all of it, the control node may map less.
        match sim.kind() {
            FileKind::Ctl if length > armed.length => return Err(Errno(libc::ERANGE)),
            FileKind::Gpu if length != armed.length => return Err(Errno::ENXIO),
            _ => (),
        }
        if writable && !armed.writable {
            return Err(Errno(libc::EACCES));
        }
        Ok(match armed.source {
            // A card's node is a description without clients, so that this duplicate keeps no
            // memory alive, as a mapped node of a real card does not.
            Source::Card(start) => {
                HostMapping { fd: file.fd.try_clone()?, offset: start + armed.offset, length }
            }
            Source::Own(memory) => HostMapping {
                fd: memory.as_fd().try_clone_to_owned()?,
                offset: armed.offset,
                length,
            },
        })
    }

    fn pending(&self, file: &HostFile) -> bool {
        self.inner.file(file.number()).is_some_and(|sim| sim.has_data())
    }

    fn close(&self, file: HostFile) {
        let mut files = self.inner.files.write().unwrap_or_else(PoisonError::into_inner);
        let Some(sim) = files.remove(&file.number()) else { return };
        drop(files);
        self.inner.events().file_closed(sim.number);
        self.inner.clients_closed(sim.number);
    }
}
