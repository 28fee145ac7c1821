//! A client of RM without NVIDIA's libraries, for our own programs: a control file, a client, a
//! device and a subdevice on it, memory and its mappings.
//!
//! - [`abi`]: the driver's numbers and structs
//! - [`sys`]: the system calls, and all `unsafe`
#![deny(unsafe_code)]

pub mod abi;
#[allow(unsafe_code)]
pub mod sys;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use nix::libc;
use zerocopy::{FromBytes, Immutable, IntoBytes};

use crate::abi::{class, control, escape, status};
use crate::sys::Mapping;

/// Node of everything that is not of one card.
pub const CONTROL_NODE: &str = "/dev/nvidiactl";

/// Why a check failed.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// A call that should have worked.
    #[error("{what} answered {outcome}")]
    Call {
        /// What it was for.
        what: String,
        /// The answer.
        outcome: Outcome,
    },
    /// A call that should have been refused in a certain way.
    #[error("{what} answered {outcome} where {expected} is right")]
    Expected {
        /// What it was for.
        what: String,
        /// The answer.
        outcome: Outcome,
        /// The answer that is right.
        expected: Outcome,
    },
    /// A system call.
    #[error("{what}: {source}")]
    Io {
        /// What it was for.
        what: String,
        /// How it failed.
        source: io::Error,
    },
    /// Anything else.
    #[error("{0}")]
    Wrong(String),
    /// What others do on the card hides what was looked for.
    #[error("{0}")]
    Disturbed(String),
}

/// Shorthand.
pub type Result<T, E = Failure> = std::result::Result<T, E>;

/// Makes [`Failure::Wrong`].
pub fn wrong<T>(what: impl Into<String>) -> Result<T> {
    Err(Failure::Wrong(what.into()))
}

/// Adds to an [`io::Error`] what failed.
pub fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Failure {
    let what = what.into();
    |source| Failure::Io { what, source }
}

/// How the driver answered: an errno of the call, or else RM's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The ioctl failed.
    Errno(i32),
    /// The ioctl worked and RM says this.
    Status(u32),
}

impl Outcome {
    /// Success.
    pub const OK: Self = Self::Status(status::OK);

    /// Passes on success alone.
    pub fn ok(self, what: impl Into<String>) -> Result<()> {
        match self {
            Self::OK => Ok(()),
            outcome => Err(Failure::Call { what: what.into(), outcome }),
        }
    }

    /// Passes on one answer alone.
    pub fn expect(self, expected: Self, what: impl Into<String>) -> Result<()> {
        match self {
            outcome if outcome == expected => Ok(()),
            outcome => Err(Failure::Expected { what: what.into(), outcome, expected }),
        }
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Errno(number) => io::Error::from_raw_os_error(number).fmt(f),
            Self::Status(status) => write!(f, "status {status:#x}"),
        }
    }
}

/// Makes a call whose argument is `argument`; `status` reads RM's status out of it.
pub fn call<T: IntoBytes + FromBytes + Immutable>(
    file: &File,
    nr: u32,
    argument: &mut T,
    params: Option<&mut [u8]>,
    status: impl FnOnce(&T) -> u32,
) -> Outcome {
    match sys::call(file, nr, argument.as_mut_bytes(), params) {
        Ok(()) => Outcome::Status(status(argument)),
        Err(error) => Outcome::Errno(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

/// Opens a node.
pub fn open(path: impl AsRef<Path>) -> Result<File> {
    let path = path.as_ref();
    sys::open(path).map_err(io(path.display().to_string()))
}

/// The card that is probed.
#[derive(Clone, Debug)]
pub struct Card {
    /// Its node.
    pub node: PathBuf,
    /// RM's number for it.
    pub gpu_id: u32,
    /// Where it is, as `lspci` writes it.
    pub pci: String,
    /// Its device instance.
    pub instance: u32,
}

/// The cards that the driver tells of.
pub fn cards(ctl: &File) -> Result<Vec<Card>> {
    let mut infos = [abi::CardInfo::default(); 32];
    call(ctl, escape::CARD_INFO, &mut infos, None, |_| status::OK).ok("CARD_INFO")?;
    let valid = infos.iter().filter(|info| info.valid != 0);
    Ok(valid
        .map(|info| Card {
            node: format!("/dev/nvidia{}", info.minor).into(),
            gpu_id: info.gpu_id,
            pci: format!(
                "{:04x}:{:02x}:{:02x}.{}",
                info.domain, info.bus, info.slot, info.function
            ),
            instance: 0,
        })
        .collect())
}

/// What RM_MAP_MEMORY answers.
#[derive(Clone, Copy, Debug)]
pub struct Armed {
    /// RM's name for the mapping.
    pub linear: u64,
    /// How it is to be cached: 0 cached, 1 uncached, 2 write-combined, 5 write-back.
    pub caching: u32,
}

/// A client of RM on a control file of its own.
#[derive(Debug)]
pub struct Client {
    /// Its control file.
    pub ctl: File,
    /// Its handle.
    pub handle: u32,
    next: AtomicU32,
}

impl Client {
    /// Opens a control file and makes a client.
    pub fn new() -> Result<Self> {
        Self::on(open(CONTROL_NODE)?)
    }

    /// Makes a client on a control file.
    pub fn on(ctl: File) -> Result<Self> {
        let mut root = abi::Alloc { class: class::CLIENT, ..Default::default() };
        call(&ctl, escape::RM_ALLOC, &mut root, None, |a| a.status).ok("making a client")?;
        Ok(Self { ctl, handle: root.handle, next: AtomicU32::new(0x5a00_0001) })
    }

    /// The same control file in the name of a client that may be anybody's.
    pub fn posing_as(&self, handle: u32) -> Result<Self> {
        let ctl = self.ctl.try_clone().map_err(io("duplicating a descriptor"))?;
        Ok(Self { ctl, handle, next: AtomicU32::new(0x5b00_0001) })
    }

    /// A handle that this client has not used.
    pub fn fresh(&self) -> u32 {
        self.next.fetch_add(1, Ordering::Relaxed)
    }

    /// Makes an object with a handle of the caller's choice, on `file`.
    pub fn alloc_on(
        &self,
        file: &File,
        names: (u32, u32),
        class: u32,
        params: Option<&mut [u8]>,
    ) -> Outcome {
        let (parent, handle) = names;
        let size = params.as_ref().map_or(0, |params| params.len());
        let mut argument = abi::Alloc {
            client: self.handle,
            parent,
            handle,
            class,
            params_size: u32::try_from(size).expect("parameters are small"),
            ..Default::default()
        };
        call(file, escape::RM_ALLOC, &mut argument, params, |a| a.status)
    }

    /// Makes an object under `parent`, and gives its handle.
    pub fn alloc(&self, parent: u32, class: u32, params: Option<&mut [u8]>) -> Result<u32> {
        let handle = self.fresh();
        self.alloc_on(&self.ctl, (parent, handle), class, params)
            .ok(format!("making an object of class {class:#x}"))?;
        Ok(handle)
    }

    /// Calls a method.
    pub fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Outcome {
        let mut argument = abi::Control {
            client: self.handle,
            object,
            command,
            params_size: u32::try_from(params.len()).expect("parameters are small"),
            ..Default::default()
        };
        let params = if params.is_empty() { None } else { Some(params) };
        call(&self.ctl, escape::RM_CONTROL, &mut argument, params, |a| a.status)
    }

    /// Calls a method whose parameters grew from release to release: tries each size.
    pub fn control_of_size(
        &self,
        object: u32,
        command: u32,
        sizes: &[usize],
        set: impl Fn(&mut [u8]),
    ) -> Result<Vec<u8>> {
        let mut last = Outcome::OK;
        for &size in sizes {
            let mut params = vec![0; size];
            set(&mut params);
            last = self.control(object, command, &mut params);
            if last == Outcome::OK {
                return Ok(params);
            }
            if last != Outcome::Status(status::INVALID_ARGUMENT) {
                break;
            }
        }
        Err(Failure::Call { what: format!("control {command:#x}"), outcome: last })
    }

    /// Frees an object.
    pub fn free(&self, parent: u32, handle: u32) -> Outcome {
        let mut argument = abi::Free { client: self.handle, parent, handle, status: 0 };
        call(&self.ctl, escape::RM_FREE, &mut argument, None, |a| a.status)
    }

    /// Makes an object here that shares `object` of `other`.
    pub fn duplicate(&self, parent: u32, other: &Client, object: u32) -> Result<u32> {
        let (outcome, handle) = self.try_duplicate(parent, (other.handle, object));
        outcome.ok("RM_DUP_OBJECT").map(|()| handle)
    }

    /// The same of a client and an object that may be anybody's.
    pub fn try_duplicate(&self, parent: u32, source: (u32, u32)) -> (Outcome, u32) {
        let handle = self.fresh();
        let mut argument = abi::Dup {
            client: self.handle,
            parent,
            handle,
            source_client: source.0,
            source: source.1,
            ..Default::default()
        };
        let outcome = call(&self.ctl, escape::RM_DUP_OBJECT, &mut argument, None, |a| a.status);
        (outcome, handle)
    }

    /// Arms `file` with memory.
    pub fn arm(&self, device: u32, memory: u32, range: (u64, u64), fd: i32) -> (Outcome, Armed) {
        let mut argument = abi::Map {
            client: self.handle,
            device,
            memory,
            offset: range.0,
            length: range.1,
            fd,
            ..Default::default()
        };
        let outcome = call(&self.ctl, escape::RM_MAP_MEMORY, &mut argument, None, |a| a.status);
        (outcome, Armed { linear: argument.linear, caching: argument.flags >> 23 & 7 })
    }

    /// Undoes RM's side of a mapping.
    pub fn unmap(&self, device: u32, memory: u32, linear: u64) -> Outcome {
        let mut argument =
            abi::Unmap { client: self.handle, device, memory, linear, ..Default::default() };
        call(&self.ctl, escape::RM_UNMAP_MEMORY, &mut argument, None, |a| a.status)
    }
}

/// Memory that was allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// On the card.
    Video,
    /// In the machine.
    System,
}

/// A client with a device and a subdevice of a card.
#[derive(Debug)]
pub struct Session {
    /// The client.
    pub client: Client,
    /// The card.
    pub card: Card,
    /// The card's file, registered to the control file.
    pub card_file: File,
    /// The device.
    pub device: u32,
    /// The subdevice.
    pub subdevice: u32,
}

impl Session {
    /// Opens everything.
    pub fn open(card: &Card) -> Result<Self> {
        let client = Client::new()?;
        let card_file = open(&card.node)?;
        register(&card_file, &client.ctl).ok("REGISTER_FD")?;
        let mut params = [0_u8; 56];
        params[..4].copy_from_slice(&card.instance.to_le_bytes());
        let device = client.alloc(client.handle, class::DEVICE, Some(&mut params))?;
        let subdevice = client.alloc(device, class::SUBDEVICE, Some(&mut [0; 4]))?;
        Ok(Self { client, card: card.clone(), card_file, device, subdevice })
    }

    /// Allocates memory, and gives its handle.
    pub fn memory(&self, place: Place, size: u64) -> Result<u32> {
        let mut params = abi::Memory { owner: self.client.handle, size, ..Default::default() };
        let class = match place {
            Place::Video => class::VIDEO_MEMORY,
            Place::System => {
                // NVOS32_ATTR_LOCATION_PCI
                params.attr = 1 << 25;
                class::SYSTEM_MEMORY
            }
        };
        let handle = self.client.alloc(self.device, class, Some(params.as_mut_bytes()))?;
        if params.size < size {
            return wrong(format!(
                "asked for {size} bytes of {place:?} memory, got {}",
                params.size
            ));
        }
        Ok(handle)
    }

    /// Registers memory of this process; the object's handle.
    pub fn register(&self, address: u64, bytes: u64) -> (Outcome, u32) {
        let mut argument = abi::HeapDescriptor {
            client: self.client.handle,
            parent: self.device,
            function: 27,
            memory: self.client.fresh(),
            // NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED, _MAP_NOT_REQUIRED
            flags: 0xc000,
            // NVOS32_ATTR_LOCATION_PCI, _PHYSICALITY_NONCONTIGUOUS, _COHERENCY_WRITE_BACK
            attr: 1 << 25 | 1 << 27 | 5 << 29,
            descriptor: address,
            limit: bytes.wrapping_sub(1),
            ..Default::default()
        };
        let ctl = &self.client.ctl;
        let answer = |argument: &abi::HeapDescriptor| argument.status;
        let outcome = call(ctl, escape::RM_VID_HEAP_CONTROL, &mut argument, None, answer);
        (outcome, argument.memory)
    }

    /// What the card says of its memory: `NV2080_CTRL_FB_GET_INFO_V2_INDEX_*`; sizes are in KiB.
    pub fn fb_info(&self, index: u8) -> Result<u32> {
        let sizes = [1028, 460, 444, 436];
        let client = &self.client;
        let params =
            client.control_of_size(self.subdevice, control::FB_GET_INFO_V2, &sizes, |params| {
                params[0] = 1;
                params[4] = index;
            })?;
        Ok(u32::from_le_bytes(params[8..12].try_into().expect("four bytes")))
    }

    /// A new file that memory of this place is mapped through.
    pub fn map_file(&self, place: Place) -> Result<File> {
        match place {
            Place::Video => open(&self.card.node),
            Place::System => open(CONTROL_NODE),
        }
    }

    /// Arms a new file with memory and maps it.
    pub fn map(&self, place: Place, memory: u32, length: u64) -> Result<Mapped> {
        let file = self.map_file(place)?;
        let (outcome, armed) =
            self.client.arm(self.subdevice, memory, (0, length), file.as_raw_fd());
        outcome.ok("RM_MAP_MEMORY")?;
        let bytes = usize::try_from(length).expect("64-bit");
        let mapping = Mapping::new(&file, bytes).map_err(io(format!("mapping {length} bytes")))?;
        Ok(Mapped { mapping, armed, file })
    }

    /// Undoes RM's side of a mapping.
    pub fn unmap(&self, memory: u32, mapped: Mapped) -> Result<()> {
        let linear = mapped.armed.linear;
        drop(mapped);
        self.client.unmap(self.subdevice, memory, linear).ok("RM_UNMAP_MEMORY")
    }
}

/// Memory in this process's address space.
#[derive(Debug)]
pub struct Mapped {
    /// The memory.
    pub mapping: Mapping,
    /// What RM said.
    pub armed: Armed,
    /// The armed file.
    pub file: File,
}

/// Joins `file` to the clients of the control file `ctl`.
pub fn register(file: &File, ctl: &File) -> Outcome {
    let mut number = ctl.as_raw_fd();
    call(file, escape::REGISTER_FD, &mut number, None, |_| status::OK)
}

/// The number of a card's device instance.
pub fn instance_of(client: &Client, gpu_id: u32) -> Result<u32> {
    let mut params = [0_u32; 8];
    params[0] = gpu_id;
    client
        .control(client.handle, control::ID_INFO, params.as_mut_bytes())
        .ok("GPU_GET_ID_INFO_V2")?;
    Ok(params[2])
}

/// A card of the host: the first, or the one with this minor number.
pub fn find_card(minor: Option<u32>) -> Result<Card> {
    let client = Client::new()?;
    let cards = cards(&client.ctl)?;
    let wanted = minor.map(|minor| format!("/dev/nvidia{minor}"));
    let found = cards
        .iter()
        .find(|card| wanted.as_ref().is_none_or(|node| card.node.as_os_str() == node.as_str()));
    let Some(card) = found else {
        return wrong(format!("the driver has {} cards and none is {wanted:?}", cards.len()));
    };
    let mut card = card.clone();
    // A card that nobody holds open is not attached, and has no instance before that.
    let _open = open(&card.node)?;
    card.instance = instance_of(&client, card.gpu_id)?;
    Ok(card)
}
