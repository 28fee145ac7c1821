//! Calls: which numbers there are, on which node, and those that are not about objects.
//!
//! The rules are the driver's (`nvidia_ioctl`, `rm_ioctl`, `RmIoctl`): the number's low eight bits
//! and its size count; a wrong size, node or number is EINVAL; RM's own verdict is a status in
//! the argument of a call that succeeds.

use std::os::fd::RawFd;
use std::sync::Arc;

use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes, KnownLayout};

use super::client::Client;
use super::file::{Armed, SimFile};
use super::layout::{CardInfo, GetEvent, Map, OsEvent, Unmap, Update, Version};
use super::memory::{Memory, PAGE};
use super::{identity, status, Inner};
use crate::errno::Errno;
use crate::marshal::scratch::{Frame, Registered};

/// What the driver copies of an indirect call at most, and we of a direct one.
const MAX_ARGUMENT: usize = 16384;

/// One call being made.
pub struct Call<'a, 'f> {
    pub(super) inner: &'a Arc<Inner>,
    pub(super) file: &'a Arc<SimFile>,
    frame: &'a mut Frame<'f>,
    nr: u32,
    size: usize,
    at: u64,
}

/// What a handler gives back: RM's verdict is in the argument already.
pub type Answer = Result<i32, Errno>;

impl<'a, 'f> Call<'a, 'f> {
    /// The call `cmd` on `file`, whose argument is the frame's first block.
    pub fn new(
        inner: &'a Arc<Inner>,
        file: &'a Arc<SimFile>,
        cmd: u32,
        frame: &'a mut Frame<'f>,
    ) -> Self {
        let at = frame.argument().addr() as u64;
        Self { inner, file, frame, nr: cmd & 0xff, size: (cmd >> 16 & 0x3fff) as usize, at }
    }

    /// Makes it.
    pub fn run(mut self) -> Answer {
        match self.nr {
            0x2b => self.alloc(),
            206 => self.os_event(true),
            207 => self.os_event(false),
            0x52 => self.get_event(),
            201 => self.register_file(),
            218 => self.open_complete(),
            _ if self.file.card.is_none() => self.run_control_node(),
            215 => self.numa_info(),
            _ => Err(Errno::EINVAL),
        }
    }

    fn run_control_node(&mut self) -> Answer {
        match self.nr {
            0x2a => self.control(),
            0x29 => self.free(),
            0x34 => self.duplicate(),
            0x4a => self.heap(),
            0x4e => self.map(),
            0x4f => self.unmap(),
            0x5e => self.update_mapping(),
            200 => self.card_info(),
            210 => self.version(),
            212 => self.attach(),
            214 => self.sys_params(),
            _ => Err(Errno::EINVAL),
        }
    }

    /// Bytes of the argument.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The argument, which must have exactly this layout's size.
    pub fn argument<T: FromBytes + KnownLayout + Immutable>(&mut self) -> Result<T, Errno> {
        if self.size != size_of::<T>() {
            return Err(Errno::EINVAL);
        }
        let bytes = self.argument_bytes()?;
        T::read_from_bytes(bytes).map_err(|_| Errno::EINVAL)
    }

    fn argument_bytes(&mut self) -> Result<&mut [u8], Errno> {
        if self.size > MAX_ARGUMENT {
            return Err(Errno::EINVAL);
        }
        let (at, size) = (self.at, self.size);
        self.follow(at, size, "an argument at")
    }

    /// Writes the argument back; the call itself succeeds.
    pub fn answer<T: IntoBytes + Immutable>(&mut self, argument: &T) -> Answer {
        self.argument_bytes()?.copy_from_slice(argument.as_bytes());
        Ok(0)
    }

    /// The `size` bytes that a pointer leads to.
    pub fn follow(&mut self, at: u64, size: usize, what: &str) -> Result<&mut [u8], Errno> {
        let inner = self.inner;
        self.frame.follow(at, size).ok_or_else(|| inner.fault(what, at, Errno::EFAULT))
    }

    /// The memory that this call registers, which must be just this.
    pub fn registered(&self, at: u64, length: u64) -> Result<Registered, Errno> {
        let memory = self.frame.registered(at, length).cloned();
        memory.ok_or_else(|| self.inner.fault("registered memory at", at, Errno::EFAULT))
    }

    /// The file that a descriptor in the argument names.
    pub fn named_file(&self, fd: RawFd) -> Result<Arc<SimFile>, Errno> {
        // CAST: the bits of a descriptor, for the log.
        let number = u64::from(fd as u32);
        self.inner.file(fd).ok_or_else(|| self.inner.fault("descriptor", number, Errno::EBADF))
    }

    /// A client that this call may use.
    pub fn client(&self, handle: u32) -> Option<Arc<Client>> {
        self.inner.client(handle, self.file)
    }

    /// CARD_INFO: an array with a place for each card, or EINVAL.
    fn card_info(&mut self) -> Answer {
        const PLACE: usize = size_of::<CardInfo>();
        let cards = self.inner.cards.all();
        let bytes = self.argument_bytes()?;
        bytes.fill(0);
        let mut places = bytes.chunks_exact_mut(PLACE);
        for card in cards {
            let place = places.next().ok_or(Errno::EINVAL)?;
            let mut info = CardInfo::new_zeroed();
            info.valid = 1;
            (info.bus, info.slot) = (card.bus, card.slot);
            [info.vendor, info.device] = identity::PCI_ID;
            (info.gpu_id, info.minor) = (card.gpu_id(), card.number);
            place.copy_from_slice(info.as_bytes());
        }
        Ok(0)
    }

    /// CHECK_VERSION_STR: 0 compares, '1' compares the branch, '2' asks. A difference is EINVAL
    /// and tells the right release all the same.
    fn version(&mut self) -> Answer {
        let mut argument: Version = self.argument()?;
        let own = self.inner.options.release.as_bytes();
        let end = argument.release.iter().position(|&byte| byte == 0).unwrap_or(64);
        let given = &argument.release[..end];
        let branch =
            |release: &[u8]| release.split(|&byte| byte == b'.').next().map(<[u8]>::to_vec);
        let same = match argument.command {
            0 => given == own,
            command if command == u32::from(b'1') => branch(given) == branch(own),
            command if command == u32::from(b'2') => true,
            _ => return Err(Errno::EINVAL),
        };
        argument.reply = 1;
        argument.release = [0; 64];
        let kept = own.len().min(63);
        argument.release[..kept].copy_from_slice(&own[..kept]);
        self.answer(&argument)?;
        if same {
            Ok(0)
        } else {
            Err(Errno::EINVAL)
        }
    }

    /// ATTACH_GPUS_TO_FD: once a file, zeroes are skipped.
    fn attach(&mut self) -> Answer {
        let (file, cards) = (self.file, &self.inner.cards);
        let bytes = self.argument_bytes()?;
        if bytes.is_empty() || bytes.len() % 4 != 0 || file.state().attached {
            return Err(Errno::EINVAL);
        }
        let known =
            |id: &[u8]| id == [0; 4] || cards.all().any(|card| card.gpu_id().to_le_bytes() == id);
        if !bytes.chunks_exact(4).all(known) {
            return Err(Errno::EINVAL);
        }
        file.state().attached = true;
        Ok(0)
    }

    /// REGISTER_FD: this file joins a control file's clients, once.
    fn register_file(&mut self) -> Answer {
        let fd: i32 = self.argument()?;
        if fd < 0 {
            return Err(Errno::EINVAL);
        }
        let control = self.named_file(fd)?;
        let itself = control.number == self.file.number;
        if control.card.is_some() || itself || control.state().joined.is_some() {
            return Err(Errno::EINVAL);
        }
        let mut state = self.file.state();
        if state.joined.is_some() {
            return Err(Errno::EINVAL);
        }
        state.joined = Some(control.number);
        Ok(0)
    }

    /// WAIT_OPEN_COMPLETE: the card is up.
    fn open_complete(&mut self) -> Answer {
        let _: [u32; 2] = self.argument()?;
        self.answer(&[0_u32; 2])
    }

    /// SYS_PARAMS: the machine's memory block size is taken as it comes.
    fn sys_params(&mut self) -> Answer {
        let _: u64 = self.argument()?;
        Ok(0)
    }

    /// NUMA_INFO: the card's memory is no NUMA node.
    fn numa_info(&mut self) -> Answer {
        const SIZE: usize = 560;
        if self.size != SIZE {
            return Err(Errno::EINVAL);
        }
        let mut answer = [0_u8; SIZE];
        answer[..4].copy_from_slice(&(-1_i32).to_le_bytes());
        self.answer(&answer)
    }

    /// ALLOC_OS_EVENT and FREE_OS_EVENT: the file that the call is made on receives the events;
    /// the number in the argument is only their key.
    fn os_event(&mut self, add: bool) -> Answer {
        let mut argument: OsEvent = self.argument()?;
        // CAST: a descriptor travels as its bits.
        self.named_file(argument.fd as i32)?;
        let (client, fd) = (argument.client, argument.fd);
        argument.status = if add {
            self.inner.events().add_key(client, fd, Arc::clone(self.file))
        } else {
            self.inner.events().remove_key(client, fd)
        };
        self.answer(&argument)
    }

    /// RM_GET_EVENT_DATA: takes the oldest event with data.
    fn get_event(&mut self) -> Answer {
        let mut argument: GetEvent = self.argument()?;
        argument.status = status::OPERATING_SYSTEM;
        let out = self.follow(argument.event, 16, "an event buffer at")?;
        out.fill(0);
        let file = self.file;
        if let Some((event, more)) = file.take() {
            self.follow(argument.event, 16, "an event buffer at")?
                .copy_from_slice(event.as_bytes());
            argument.more = more.into();
            argument.status = status::OK;
        }
        self.answer(&argument)
    }

    /// RM_MAP_MEMORY: arms a file.
    fn map(&mut self) -> Answer {
        let mut argument: Map = self.argument()?;
        argument.status = match self.map_memory(&mut argument)? {
            Ok(()) => status::OK,
            Err(status) => status,
        };
        self.answer(&argument)
    }

    fn map_memory(&self, argument: &mut Map) -> Result<Result<(), u32>, Errno> {
        /// `NVOS33_FLAGS_CACHING_TYPE`, bits 25:23.
        const CACHING: u32 = 7 << 23;
        const WRITE_COMBINED: u32 = 2 << 23;
        const DEFAULT: u32 = 6 << 23;
        let Some(client) = self.client(argument.client) else {
            return Ok(Err(status::INVALID_CLIENT));
        };
        let memory = match mappable(&client, argument) {
            Ok(memory) => memory,
            Err(status) => return Ok(Err(status)),
        };
        if argument.fd < 0 {
            return Ok(Err(status::INVALID_ARGUMENT));
        }
        let target = self.named_file(argument.fd)?;
        if target.card != memory.card() {
            return Ok(Err(status::INVALID_ARGUMENT));
        }
        let start = argument.offset - argument.offset % PAGE;
        let end = (argument.offset + argument.length).next_multiple_of(PAGE);
        let source = memory.source()?;
        let mut state = target.state();
        if state.armed.is_some() {
            return Ok(Err(status::STATE_IN_USE));
        }
        // NVOS33_FLAGS_ACCESS: 1 is read only.
        let writable = argument.flags & 3 != 1;
        state.armed = Some(Armed { source, offset: start, length: end - start, writable });
        drop(state);
        let caching = if memory.is_video() { WRITE_COMBINED } else { DEFAULT };
        argument.flags = argument.flags & !CACHING | caching;
        argument.linear =
            client.owned().add_mapping(argument.memory, argument.offset, argument.length);
        Ok(Ok(()))
    }

    /// RM_UNMAP_MEMORY: RM forgets a mapping; the file stays armed.
    fn unmap(&mut self) -> Answer {
        let mut argument: Unmap = self.argument()?;
        argument.status = match self.client(argument.client) {
            Some(client) => client.owned().remove_mapping(argument.memory, argument.linear),
            None => status::INVALID_CLIENT,
        };
        self.answer(&argument)
    }

    /// RM_UPDATE_DEVICE_MAPPING_INFO: both addresses are names, not pointers to follow.
    fn update_mapping(&mut self) -> Answer {
        let mut argument: Update = self.argument()?;
        argument.status = match self.client(argument.client) {
            Some(client) => {
                client.owned().rename_mapping(argument.memory, argument.old, argument.new)
            }
            None => status::INVALID_CLIENT,
        };
        self.answer(&argument)
    }
}

/// The memory that a map names, if the range lies in it.
fn mappable(client: &Client, argument: &Map) -> Result<Arc<Memory>, u32> {
    let owned = client.owned();
    if owned.get(argument.device).is_none() {
        return Err(status::OBJECT_NOT_FOUND);
    }
    let object = owned.get(argument.memory).ok_or(status::OBJECT_NOT_FOUND)?;
    let memory = object.memory.as_ref().ok_or(status::INVALID_OBJECT)?;
    if memory.is_registered() {
        return Err(status::NOT_SUPPORTED);
    }
    let end = argument.offset.checked_add(argument.length);
    if argument.length == 0 || end.is_none_or(|end| end > memory.size) {
        return Err(status::INVALID_LIMIT);
    }
    Ok(Arc::clone(memory))
}
