//! Clients and their objects: a tree under each client, as RM's resource server keeps it.

use std::collections::HashMap;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::memory::Memory;
use super::status;

/// What is known of a class.
#[derive(Clone, Copy, Debug)]
pub struct Class {
    /// Its number.
    pub number: u32,
    /// Bytes that RM copies of its parameters, whatever the caller says.
    pub size: usize,
    /// Whether it needs them.
    pub required: bool,
    /// Classes that its parent may have; none: any.
    pub parents: &'static [u32],
}

/// `NV01_ROOT_CLIENT`; the other two numbers of the root class mean it too.
pub const CLIENT: u32 = 0x41;
/// `NV01_DEVICE_0`
pub const DEVICE: u32 = 0x80;
/// `NV20_SUBDEVICE_0`
pub const SUBDEVICE: u32 = 0x2080;
/// `NV01_MEMORY_SYSTEM`
pub const SYSTEM_MEMORY: u32 = 0x3e;
/// `NV01_MEMORY_LOCAL_USER`
pub const VIDEO_MEMORY: u32 = 0x40;
/// `NV50_MEMORY_VIRTUAL`
pub const VIRTUAL_MEMORY: u32 = 0x50a0;
/// `NV01_MEMORY_SYSTEM_OS_DESCRIPTOR`
pub const REGISTERED_MEMORY: u32 = 0x71;
/// `NV01_EVENT`, which names the real class in its parameters.
pub const EVENT: u32 = 0x05;
/// `NV01_EVENT_OS_EVENT`
pub const OS_EVENT: u32 = 0x79;
/// `HOPPER_USERMODE_A`
pub const USERMODE: u32 = 0xc661;
/// `KEPLER_CHANNEL_GROUP_A`
pub const CHANNEL_GROUP: u32 = 0xa06c;
/// `HOPPER_CHANNEL_GPFIFO_A`
pub const CHANNEL: u32 = 0xc86f;

/// `kfifoChannelGroupGetDefaultTimeslice_GV100`
const DEFAULT_SLICE_US: u64 = 1024;

const fn class(number: u32, size: usize, required: bool, parents: &'static [u32]) -> Class {
    Class { number, size, required, parents }
}

/// The classes that exist here: number, size and parents from `resource_list.h`.
pub const CLASSES: &[Class] = &[
    class(DEVICE, 56, false, &[CLIENT]),
    class(SUBDEVICE, 4, false, &[DEVICE]),
    class(SYSTEM_MEMORY, 128, true, &[DEVICE]),
    class(VIDEO_MEMORY, 128, true, &[DEVICE, SUBDEVICE]),
    class(VIRTUAL_MEMORY, 128, true, &[DEVICE]),
    class(REGISTERED_MEMORY, 48, true, &[DEVICE]),
    // NV01_MEMORY_VIRTUAL
    class(0x70, 24, true, &[DEVICE]),
    // FERMI_VASPACE_A
    class(0x90f1, 56, true, &[DEVICE]),
    class(EVENT, 24, true, &[]),
    class(OS_EVENT, 24, true, &[]),
    class(USERMODE, 2, false, &[SUBDEVICE]),
    class(CHANNEL_GROUP, 20, true, &[DEVICE]),
    class(CHANNEL, 368, true, &[DEVICE, CHANNEL_GROUP]),
];

/// The class with this number.
pub fn class_of(number: u32) -> Option<&'static Class> {
    CLASSES.iter().find(|class| class.number == number)
}

/// What is behind a handle.
#[derive(Clone, Debug)]
pub struct Object {
    /// Its class.
    pub class: u32,
    /// The handle that it is freed with.
    pub parent: u32,
    /// The card that it is of; a client is of none.
    pub card: Option<u32>,
    /// Its memory, if it is such.
    pub memory: Option<Arc<Memory>>,
    /// The number of its channel, if it is one.
    pub channel: Option<u32>,
    /// The time slice, in µs, of a channel group.
    pub slice: Option<Arc<AtomicU64>>,
}

impl Object {
    /// One without memory.
    pub fn plain(class: u32, parent: u32, card: Option<u32>) -> Self {
        let slice = (class == CHANNEL_GROUP).then(|| Arc::new(DEFAULT_SLICE_US.into()));
        Self { class, parent, card, memory: None, channel: None, slice }
    }
}

/// What a client owns.
#[derive(Debug, Default)]
pub struct Owned {
    objects: HashMap<u32, Object>,
    /// Mappings as RM knows them: (memory, name).
    mappings: Vec<(u32, u64)>,
    next_handle: u32,
    next_linear: u64,
}

/// A client.
#[derive(Debug)]
pub struct Client {
    /// Its handle, of which the driver has one.
    pub handle: u32,
    /// The control file that made it.
    pub owner: u64,
    owned: Mutex<Owned>,
}

/// First handle that RM itself picks for an object.
const PICKED: u32 = 0xcaf0_0000;
/// First name of a mapping; like an address, with the offset in its page.
const LINEAR: u64 = 0x7f00_0000_0000;

impl Client {
    /// A client without objects but itself.
    pub fn new(handle: u32, owner: u64) -> Self {
        let mut owned = Owned { next_handle: PICKED, next_linear: LINEAR, ..Owned::default() };
        owned.objects.insert(handle, Object::plain(CLIENT, 0, None));
        Self { handle, owner, owned: Mutex::new(owned) }
    }

    /// What it owns.
    pub fn owned(&self) -> MutexGuard<'_, Owned> {
        self.owned.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Owned {
    /// The object with this handle.
    pub fn get(&self, handle: u32) -> Option<&Object> {
        self.objects.get(&handle)
    }

    /// The card that the object with this handle is of.
    pub fn card_of(&self, handle: u32) -> Option<u32> {
        self.get(handle)?.card
    }

    /// Whether an object of `class` may be made under `parent` with `handle`, and the handle it
    /// gets; the status that RM answers otherwise.
    pub fn place(&mut self, handle: u32, parent: u32, class: &Class) -> Result<u32, u32> {
        let Some(above) = self.objects.get(&parent) else { return Err(status::OBJECT_NOT_FOUND) };
        if !class.parents.is_empty() && !class.parents.contains(&above.class) {
            return Err(status::INVALID_OBJECT_PARENT);
        }
        if handle == 0 {
            while self.objects.contains_key(&self.next_handle) {
                self.next_handle += 1;
            }
            return Ok(self.next_handle);
        }
        if self.objects.contains_key(&handle) {
            return Err(status::INSERT_DUPLICATE_NAME);
        }
        Ok(handle)
    }

    /// Adds an object at a handle that [`Owned::place`] gave.
    pub fn insert(&mut self, handle: u32, object: Object) {
        self.objects.insert(handle, object);
    }

    /// Removes an object and all under it, children first; gives the handles and the objects.
    pub fn remove(&mut self, handle: u32) -> Vec<(u32, Object)> {
        let mut order = vec![handle];
        let mut next = 0;
        while let Some(&parent) = order.get(next) {
            let under = self.objects.iter().filter(|(_, object)| object.parent == parent);
            order.extend(under.map(|(&handle, _)| handle).filter(|&child| child != parent));
            next += 1;
        }
        self.mappings.retain(|(memory, _)| !order.contains(memory));
        order.into_iter().rev().filter_map(|handle| self.objects.remove_entry(&handle)).collect()
    }

    /// Every object's memory.
    pub fn memories(&self) -> impl Iterator<Item = &Arc<Memory>> {
        self.objects.values().filter_map(|object| object.memory.as_ref())
    }

    /// A name for a new mapping of `memory` that begins at `offset`.
    pub fn add_mapping(&mut self, memory: u32, offset: u64, length: u64) -> u64 {
        let linear = self.next_linear + offset % super::memory::PAGE;
        self.next_linear += length.next_multiple_of(super::memory::PAGE) + super::memory::PAGE;
        self.mappings.push((memory, linear));
        linear
    }

    /// Forgets a mapping.
    pub fn remove_mapping(&mut self, memory: u32, linear: u64) -> u32 {
        let Some(at) = self.mappings.iter().position(|&known| known == (memory, linear)) else {
            return status::OBJECT_NOT_FOUND;
        };
        self.mappings.swap_remove(at);
        status::OK
    }

    /// Gives a mapping the program's own name.
    pub fn rename_mapping(&mut self, memory: u32, old: u64, new: u64) -> u32 {
        let Some(known) = self.mappings.iter_mut().find(|known| **known == (memory, old)) else {
            return status::OBJECT_NOT_FOUND;
        };
        known.1 = new;
        status::OK
    }
}
