//! The few RM calls that tests and benches make, with real pointers in real structs.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use rmclient::abi::{class, control, escape, notify, Control};
use rmclient::abi::{Alloc, Dup, Event, Free, GetEvent, Heap, HeapDescriptor};
use rmclient::abi::{Map, Memory, OsEvent, Unmap};
use rmclient::Place;
use zerocopy::IntoBytes;

use crate::gather::ByHandle;
use crate::{Error, File, Mapping, Process, Result};

/// FIFO event, of finished work, without data.
const NOTIFY_WORK: u32 = notify::FIFO | notify::NON_STALL | notify::WITHOUT_DATA;

/// `NV2080_CTRL_EVENT_SET_NOTIFICATION_ACTION_REPEAT`
const REPEAT: u32 = 2;

/// An error if RM's status is not 0: what failed, and the status.
fn check(what: &'static str, status: u32) -> Result<()> {
    if status == 0 {
        return Ok(());
    }
    Err(Error::Io(std::io::Error::other(format!("{what}: RM's status is {status:#x}"))))
}

fn pointer(bytes: &mut [u8]) -> u64 {
    if bytes.is_empty() {
        0
    } else {
        bytes.as_mut_ptr().expose_provenance() as u64
    }
}

/// A client of RM on a control file, with a device and a subdevice.
pub struct Client {
    /// The control file.
    pub ctl: File,
    /// The client's handle.
    pub root: u32,
    /// The number of the card, which its node has too.
    pub card: u32,
    /// The device's.
    pub device: u32,
    /// The subdevice's.
    pub subdevice: u32,
    next: AtomicU32,
}

impl Client {
    /// Opens a control file and makes a client, and a device and a subdevice of the first card.
    pub fn new(process: &Arc<Process>) -> Result<Self> {
        Self::on(process, 0)
    }

    /// The same of another card.
    pub fn on(process: &Arc<Process>, card: u32) -> Result<Self> {
        let mut client = Self::bare(process, card)?;
        // RM makes devices for who has the card open, and does not ask again.
        let node = client.node()?;
        client.device = client.device_of(card)?;
        node.close()?;
        client.subdevice = client.make(client.device, class::SUBDEVICE, &mut [0; 4])?;
        Ok(client)
    }

    /// Opens a control file and makes a client without a device.
    pub fn bare(process: &Arc<Process>, card: u32) -> Result<Self> {
        let ctl = process.open("nvidiactl")?;
        let mut root = Alloc { class: class::CLIENT, ..Alloc::default() };
        // SAFETY: there is no pointer in it.
        unsafe { ctl.rm(escape::RM_ALLOC, &mut root, &ByHandle)? };
        check("making a client", root.status)?;
        let next = AtomicU32::new(0x5a00_0001);
        Ok(Self { ctl, root: root.handle, card, device: 0, subdevice: 0, next })
    }

    /// A device of a card.
    pub fn device_of(&self, card: u32) -> Result<u32> {
        let mut params = [0; 56];
        params[..4].copy_from_slice(&card.to_le_bytes());
        self.make(self.root, class::DEVICE, &mut params)
    }

    /// Opens the card's node.
    pub fn node(&self) -> Result<File> {
        self.ctl.process.open(&format!("nvidia{}", self.card))
    }

    /// The same client, its calls on another queue.
    pub fn on_slot(&self, slot: u32) -> Self {
        Self {
            ctl: File { slot, ..self.ctl.clone() },
            root: self.root,
            card: self.card,
            device: self.device,
            subdevice: self.subdevice,
            next: AtomicU32::new(self.next.fetch_add(1 << 16, Ordering::Relaxed)),
        }
    }

    /// RM_ALLOC; the object's handle.
    pub fn make(&self, parent: u32, class: u32, params: &mut [u8]) -> Result<u32> {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        self.make_on(&self.ctl, (parent, handle), class, params)?;
        Ok(handle)
    }

    /// RM_ALLOC on another file.
    pub fn make_on(
        &self,
        file: &File,
        names: (u32, u32),
        class: u32,
        params: &mut [u8],
    ) -> Result<()> {
        let mut argument = Alloc {
            client: self.root,
            parent: names.0,
            handle: names.1,
            class,
            params: pointer(params),
            params_size: u32::try_from(params.len()).expect("INVARIANT: parameters are small"),
            ..Alloc::default()
        };
        // SAFETY: the pointer leads to `params`.
        unsafe { file.rm(escape::RM_ALLOC, &mut argument, &ByHandle)? };
        check("making an object", argument.status)
    }

    /// RM_CONTROL; RM's status.
    pub fn control(&self, object: u32, command: u32, params: &mut [u8]) -> Result<u32> {
        let mut argument = Control {
            client: self.root,
            object,
            command,
            flags: 0,
            params: pointer(params),
            params_size: u32::try_from(params.len()).expect("INVARIANT: parameters are small"),
            status: u32::MAX,
        };
        // SAFETY: the pointer leads to `params`.
        unsafe { self.ctl.rm(escape::RM_CONTROL, &mut argument, &ByHandle)? };
        Ok(argument.status)
    }

    /// A call that RM answers at once: the ids of attached cards.
    pub fn attached_ids(&self) -> Result<u32> {
        let mut params = [0_u32; 32];
        let status = self.control(self.root, control::ATTACHED_IDS, params.as_mut_bytes())?;
        check("GPU_GET_ATTACHED_IDS", status)?;
        Ok(params[0])
    }

    /// FB_GET_INFO_V2 of some indexes; the values, most of them in KiB.
    pub fn fb_info<const N: usize>(&self, indexes: [u32; N]) -> Result<[u32; N]> {
        let mut params = [0_u32; 257];
        params[0] = N as u32;
        for (entry, index) in params[1..].chunks_exact_mut(2).zip(indexes) {
            entry[0] = index;
        }
        let bytes = params.as_mut_bytes();
        check("FB_GET_INFO_V2", self.control(self.subdevice, control::FB_GET_INFO_V2, bytes)?)?;
        Ok(std::array::from_fn(|at| params[2 + 2 * at]))
    }

    /// FB_GET_INFO of one index.
    pub fn fb_info_one(&self, index: u32) -> Result<u32> {
        let mut list = [index, 0];
        let mut params = [1, pointer(list.as_mut_bytes())];
        let bytes = params.as_mut_bytes();
        check("FB_GET_INFO", self.control(self.subdevice, control::FB_GET_INFO, bytes)?)?;
        Ok(list[1])
    }

    /// RM_FREE.
    pub fn free(&self, parent: u32, handle: u32) -> Result<()> {
        let mut argument = Free { client: self.root, parent, handle, status: u32::MAX };
        // SAFETY: there is no pointer in it.
        unsafe { self.ctl.rm(escape::RM_FREE, &mut argument, &ByHandle)? };
        check("RM_FREE", argument.status)
    }

    /// Memory of `size` bytes.
    pub fn memory(&self, place: Place, size: u64) -> Result<u32> {
        let mut params = Memory { owner: self.root, size, ..Memory::default() };
        let class = match place {
            Place::Video => class::VIDEO_MEMORY,
            Place::System => {
                // NVOS32_ATTR_LOCATION_PCI
                params.attr = 1 << 25;
                class::SYSTEM_MEMORY
            }
        };
        self.make(self.device, class, params.as_mut_bytes())
    }

    /// VID_HEAP_CONTROL, `AllocSize`, of system memory with these bits of `NVOS32_ATTR`, as
    /// Vulkan allocates; what RM answers.
    pub fn heap(&self, attr: u32, size: u64) -> Result<Heap> {
        // NVOS32_ATTR_LOCATION_PCI
        self.heap_with(attr | 1 << 25, size)
    }

    /// The same of any memory; an attribute of 0 is video memory.
    pub fn heap_with(&self, attr: u32, size: u64) -> Result<Heap> {
        let mut argument = Heap {
            client: self.root,
            parent: self.device,
            function: 2,
            owner: self.root,
            attr,
            size,
            status: u32::MAX,
            ..Heap::default()
        };
        // SAFETY: there is no pointer in it that anybody follows.
        unsafe { self.ctl.rm(escape::RM_VID_HEAP_CONTROL, &mut argument, &ByHandle)? };
        check("VID_HEAP_CONTROL", argument.status)?;
        Ok(argument)
    }

    /// VID_HEAP_CONTROL, `AllocOsDesc`: registers memory of the program; RM's status and the
    /// object's handle.
    pub fn register(&self, user: u64, bytes: u64) -> Result<(u32, u32)> {
        let mut argument = HeapDescriptor {
            client: self.root,
            parent: self.device,
            function: 27,
            // NVOS32_ATTR_LOCATION_PCI, _PHYSICALITY_NONCONTIGUOUS, _COHERENCY_WRITE_BACK
            attr: 1 << 25 | 1 << 27 | 5 << 29,
            descriptor: user,
            limit: bytes.wrapping_sub(1),
            status: u32::MAX,
            ..HeapDescriptor::default()
        };
        // SAFETY: whatever is at its one address, the guest's memory is all that is pinned.
        unsafe { self.ctl.rm(escape::RM_VID_HEAP_CONTROL, &mut argument, &ByHandle)? };
        assert_eq!((argument.descriptor, argument.descriptor_type), (user, 0), "the program's own");
        Ok((argument.status, argument.memory))
    }

    /// RM_DUP_OBJECT of another client's object below our device; RM's status and the handle.
    pub fn duplicate(&self, other: &Self, object: u32) -> Result<(u32, u32)> {
        let handle = self.next.fetch_add(1, Ordering::Relaxed);
        let mut argument = Dup {
            client: self.root,
            parent: self.device,
            handle,
            source_client: other.root,
            source: object,
            flags: 0,
            status: u32::MAX,
        };
        // SAFETY: there is no pointer in it.
        unsafe { self.ctl.rm(escape::RM_DUP_OBJECT, &mut argument, &ByHandle)? };
        Ok((argument.status, handle))
    }

    /// RM_MAP_MEMORY: arms `file` with all of `memory`; RM's status and name for it.
    pub fn arm(&self, file: &File, memory: u32, length: u64) -> Result<(u32, u64)> {
        let mut argument = Map {
            client: self.root,
            device: self.subdevice,
            memory,
            length,
            // CAST: a handle has 31 bits.
            fd: file.handle as i32,
            status: u32::MAX,
            ..Map::default()
        };
        // SAFETY: there is no pointer in it that anybody follows.
        unsafe { self.ctl.rm(escape::RM_MAP_MEMORY, &mut argument, &ByHandle)? };
        Ok((argument.status, argument.linear))
    }

    /// Arms a new file with memory and maps it, as user mode does.
    pub fn map(&self, place: Place, memory: u32, length: u64) -> Result<Mapped> {
        let file = match place {
            Place::Video => self.node()?,
            Place::System => self.ctl.process.open("nvidiactl")?,
        };
        let (status, linear) = self.arm(&file, memory, length)?;
        check("RM_MAP_MEMORY", status)?;
        let mapping = file.map(length, true)?;
        Ok(Mapped { file, mapping, linear })
    }

    /// RM_UNMAP_MEMORY.
    pub fn forget(&self, memory: u32, linear: u64) -> Result<()> {
        let mut argument = Unmap {
            client: self.root,
            device: self.subdevice,
            memory,
            linear,
            status: u32::MAX,
            ..Unmap::default()
        };
        // SAFETY: there is no pointer in it.
        unsafe { self.ctl.rm(escape::RM_UNMAP_MEMORY, &mut argument, &ByHandle)? };
        check("RM_UNMAP_MEMORY", argument.status)
    }

    /// A card's file that becomes readable when [`Client::fire`] says so; the event.
    pub fn event(&self) -> Result<(File, u32)> {
        self.event_of(NOTIFY_WORK)
    }

    /// A card's file with an event with data, which stays until it is taken.
    pub fn event_with_data(&self) -> Result<File> {
        let (file, _) = self.event_of(notify::SOFTWARE)?;
        let mut params = [notify::SOFTWARE, REPEAT, 0, 0, 0];
        let bytes = params.as_mut_bytes();
        let status = self.control(self.subdevice, control::SET_NOTIFICATION, bytes)?;
        check("EVENT_SET_NOTIFICATION", status)?;
        let status = self.control(self.subdevice, control::SET_TRIGGER, &mut [])?;
        check("EVENT_SET_TRIGGER", status)?;
        Ok(file)
    }

    fn event_of(&self, notify: u32) -> Result<(File, u32)> {
        let file = self.node()?;
        // CAST: a handle has 31 bits.
        let mut ctl = self.ctl.handle as i32;
        // SAFETY: there is no pointer in either.
        unsafe {
            file.rm(escape::REGISTER_FD, &mut ctl, &ByHandle)?;
            let mut key = OsEvent { client: self.root, fd: file.handle, ..OsEvent::default() };
            file.rm(escape::ALLOC_OS_EVENT, &mut key, &ByHandle)?;
            check("ALLOC_OS_EVENT", key.status)?;
        }
        let event = self.next.fetch_add(1, Ordering::Relaxed);
        let mut params = Event {
            source: self.subdevice,
            class: class::OS_EVENT,
            notify,
            data: file.handle.into(),
            ..Event::default()
        };
        let names = (self.subdevice, event);
        self.make_on(&file, names, class::OS_EVENT, params.as_mut_bytes())?;
        Ok((file, event))
    }

    /// Asks `file` for an event with data. There is none: those of [`Client::event`] have none.
    pub fn take_data(&self, file: &File) -> Result<()> {
        let mut event = [0_u32; 4];
        // CAST: the address of what RM would write to.
        let mut argument = GetEvent { event: event.as_mut_ptr() as u64, ..GetEvent::default() };
        // SAFETY: its one pointer leads to a whole event.
        unsafe { file.rm(escape::RM_GET_EVENT_DATA, &mut argument, &ByHandle)? };
        check("RM_GET_EVENT_DATA", argument.status)
    }

    /// Fires an event.
    pub fn fire(&self, mut event: u32) -> Result<()> {
        let params = event.as_mut_bytes();
        let status = self.control(self.subdevice, control::SET_TRIGGER_FIFO, params)?;
        check("EVENT_SET_TRIGGER_FIFO", status)
    }
}

/// Memory in the window.
pub struct Mapped {
    /// The file that is armed with it.
    pub file: File,
    /// Place it is.
    pub mapping: Mapping,
    /// RM's name for it.
    pub linear: u64,
}

impl Mapped {
    /// Unmaps it and closes its file.
    pub fn close(&self) -> Result<()> {
        self.file.unmap(&self.mapping)?;
        self.file.close()
    }
}
