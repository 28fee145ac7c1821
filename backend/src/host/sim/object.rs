//! Calls that make, share and free objects.

use std::collections::hash_map::Entry;
use std::sync::{Arc, PoisonError};

use zerocopy::{FromBytes, FromZeros, IntoBytes};

use super::cards::Wanted;
use super::channel::Channels;
use super::client::{self, class_of, Class, Client, Object};
use super::escape::{Answer, Call};
use super::layout::{self, Alloc21, Alloc64, Dup, Free, Heap, HeapDescriptor};
use super::memory::Memory;
use super::{events, status, Inner};
use crate::errno::Errno;
use crate::marshal::scratch::Registered;

/// `NVOS32_ATTR_LOCATION`: 0 is video memory.
const LOCATION: u32 = 3 << 25;
/// `NVOS32_ALLOC_FLAGS_VIRTUAL`
const VIRTUAL: u32 = 0x8_0000;
/// `NVOS32_ALLOC_FLAGS_MEMORY_HANDLE_PROVIDED`
const HANDLE_PROVIDED: u32 = 0x4000;
/// `NVOS32_FUNCTION_ALLOC_OS_DESCRIPTOR`
const REGISTER: u32 = 27;
/// Client handles: base, and how many there are.
const CLIENTS: u32 = 0xc1d0_0000;
const CLIENT_BITS: u64 = 0xf_ffff;

/// What RM_ALLOC asks, in either form.
struct Request {
    client: u32,
    parent: u32,
    handle: u32,
    class: u32,
    params: u64,
}

impl Inner {
    /// Ends what belonged to objects that were removed from a client.
    pub fn objects_freed(&self, client: u32, removed: &[(u32, Object)]) {
        for (handle, object) in removed {
            let channels = object.card.and_then(|card| self.channels(card));
            if let (Some(token), Some(channels)) = (object.channel, channels) {
                channels.remove(token);
            }
            self.events().object_freed(client, *handle);
        }
    }

    /// RM_FREE of any object; one that is not there counts as freed.
    fn free(&self, client: &Arc<Client>, handle: u32) -> u32 {
        let removed = client.owned().remove(handle);
        self.objects_freed(client.handle, &removed);
        if handle == client.handle {
            let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
            clients.remove(&handle);
            drop(clients);
            self.events().client_freed(handle);
        }
        status::OK
    }

    fn new_client(&self, owner: u64) -> Result<u32, Errno> {
        loop {
            // CAST: masked to 20 bits.
            let number = (self.cards.client_number()? & CLIENT_BITS) as u32;
            let handle = CLIENTS + number;
            let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
            if let Entry::Vacant(place) = clients.entry(handle) {
                place.insert(Arc::new(Client::new(handle, owner)));
                return Ok(handle);
            }
        }
    }
}

impl Call<'_, '_> {
    /// RM_ALLOC in its two forms.
    pub(super) fn alloc(&mut self) -> Answer {
        if self.size() == size_of::<Alloc21>() {
            let mut argument: Alloc21 = self.argument()?;
            let Alloc21 { client, parent, handle, class, params, .. } = argument;
            (argument.status, argument.handle) =
                self.alloc_object(&Request { client, parent, handle, class, params })?;
            return self.answer(&argument);
        }
        let mut argument: Alloc64 = self.argument()?;
        let Alloc64 { client, parent, handle, class, params, .. } = argument;
        if argument.rights != 0 {
            self.follow(argument.rights, 4, "an access mask at")?;
        }
        (argument.status, argument.handle) =
            self.alloc_object(&Request { client, parent, handle, class, params })?;
        self.answer(&argument)
    }

    /// Gives the status and the handle.
    fn alloc_object(&mut self, request: &Request) -> Result<(u32, u32), Errno> {
        let on_control = self.file.card.is_none();
        if matches!(request.class, 0 | 1 | client::CLIENT) {
            if !on_control {
                return Err(Errno::EINVAL);
            }
            return Ok((status::OK, self.inner.new_client(self.file.number)?));
        }
        if !on_control && !matches!(request.class, client::EVENT | client::OS_EVENT) {
            return Err(Errno::EINVAL);
        }
        let refused = |status| Ok((status, request.handle));
        let Some(client) = self.client(request.client) else {
            return refused(status::INVALID_OBJECT_HANDLE);
        };
        let known =
            class_of(request.class).filter(|class| class.number != client::REGISTERED_MEMORY);
        let Some(class) = known else { return refused(status::INVALID_CLASS) };
        let mut params = [0_u8; 512];
        let params = &mut params[..class.size];
        match request.params {
            0 if class.required => return refused(status::INVALID_ARGUMENT),
            0 => (),
            at => params.copy_from_slice(self.follow(at, class.size, "class parameters at")?),
        }
        let placed = client.owned().place(request.handle, request.parent, class);
        let handle = match placed {
            Ok(handle) => handle,
            Err(status) => return refused(status),
        };
        let status = self.make(&client, (handle, request.parent), class, params)?;
        if status == status::OK && request.params != 0 {
            let out = self.follow(request.params, class.size, "class parameters at")?;
            out.copy_from_slice(params);
        }
        Ok((status, handle))
    }

    /// Makes the object itself. `params` become what RM writes back.
    fn make(
        &mut self,
        client: &Arc<Client>,
        names: (u32, u32),
        class: &Class,
        params: &mut [u8],
    ) -> Result<u32, Errno> {
        let (handle, parent) = names;
        let card = client.owned().card_of(parent);
        let mut object = Object::plain(class.number, parent, card);
        match class.number {
            client::DEVICE => match self.device(params) {
                Ok(card) => object.card = Some(card),
                Err(status) => return Ok(status),
            },
            client::VIDEO_MEMORY | client::SYSTEM_MEMORY => {
                let Ok(wanted) = layout::Memory::mut_from_bytes(params) else {
                    return Err(Errno::EINVAL);
                };
                match self.allocate(client, (class.number, card), wanted)? {
                    Ok(memory) => object.memory = Some(memory),
                    Err(status) => return Ok(status),
                }
            }
            client::EVENT | client::OS_EVENT => {
                let Ok(event) = layout::Event::read_from_bytes(params) else {
                    return Err(Errno::EINVAL);
                };
                let status = self.make_event(client, handle, class.number, &event)?;
                if status != status::OK {
                    return Ok(status);
                }
                object.class = client::OS_EVENT;
            }
            client::USERMODE => object.memory = Some(self.channels(card)?.page()?),
            client::CHANNEL => match self.userd(client, params) {
                Ok(userd) => {
                    object.channel = Some(self.channels(card)?.add(self.inner, userd)?);
                }
                Err(status) => return Ok(status),
            },
            _ => (),
        }
        client.owned().insert(handle, object);
        Ok(status::OK)
    }

    /// The card of a new device (`NV0080_ALLOC_PARAMETERS`: deviceId), which this process must have
    /// open.
    fn device(&self, params: &[u8]) -> Result<u32, u32> {
        let card = params.first_chunk().map_or(0, |&id| u32::from_le_bytes(id));
        if self.inner.cards.all().all(|known| known.number != card) {
            return Err(status::INVALID_CLASS);
        }
        let accessible = self.inner.is_accessible(card);
        accessible.then_some(card).ok_or(status::INSUFFICIENT_PERMISSIONS)
    }

    /// What this process has of a device's card. Parents are devices or below them.
    fn channels(&self, card: Option<u32>) -> Result<&Channels, Errno> {
        card.and_then(|card| self.inner.channels(card)).ok_or(Errno::EINVAL)
    }

    fn allocate(
        &self,
        client: &Client,
        (class, card): (u32, Option<u32>),
        wanted: &mut layout::Memory,
    ) -> Result<Result<Arc<Memory>, u32>, Errno> {
        let memory = if class == client::VIDEO_MEMORY {
            let clear = self.inner.options.clear_video_memory;
            let align = if wanted.alignment <= 1 << 40 { wanted.alignment } else { 0 };
            let card = card.ok_or(Errno::EINVAL)?;
            let wanted = Wanted { card, size: wanted.size, align, clear };
            Memory::video(&self.inner.cards, client.owner, &wanted)?
        } else {
            // More than the card has is refused: a mistake, not a program's need.
            Memory::system(wanted.size).filter(|memory| memory.size <= 1 << 40)
        };
        let Some(memory) = memory else { return Ok(Err(status::NO_MEMORY)) };
        wanted.size = memory.size;
        wanted.offset = memory.card_offset();
        wanted.limit = memory.size - 1;
        Ok(Ok(Arc::new(memory)))
    }

    fn make_event(
        &self,
        client: &Client,
        handle: u32,
        class: u32,
        event: &layout::Event,
    ) -> Result<u32, Errno> {
        if class == client::EVENT && event.class != client::OS_EVENT {
            return Ok(status::INVALID_CLASS);
        }
        let (source, notify) = (event.source, event.notify);
        let Some(card) = client.owned().get(source).map(|object| object.card) else {
            return Ok(status::OBJECT_NOT_FOUND);
        };
        // CAST: the descriptor's number is the low half of a pointer-sized field.
        let fd = event.data as u32;
        self.named_file(fd as i32)?;
        let names = (client.handle, handle);
        Ok(self.inner.events().add(names, events::Wanted { source, card, notify, fd }))
    }

    /// Where a new channel's USERD is (`NV_CHANNEL_ALLOC_PARAMS`: hUserdMemory[0], userdOffset[0]).
    fn userd(&self, client: &Client, params: &[u8]) -> Result<Option<(Arc<Memory>, u64)>, u32> {
        let word = |at: usize| {
            params.get(at..at + 4).and_then(|b| b.try_into().ok()).map(u32::from_le_bytes)
        };
        let long = |at: usize| {
            params.get(at..at + 8).and_then(|b| b.try_into().ok()).map(u64::from_le_bytes)
        };
        let (Some(handle), Some(offset)) = (word(0x20), long(0x40)) else {
            return Err(status::INVALID_ARGUMENT);
        };
        if handle == 0 {
            return Ok(None);
        }
        let owned = client.owned();
        let memory = owned.get(handle).and_then(|object| object.memory.as_ref());
        let memory = memory.ok_or(status::OBJECT_NOT_FOUND)?;
        if offset % 512 != 0 || offset.checked_add(512).is_none_or(|end| end > memory.size) {
            return Err(status::INVALID_ARGUMENT);
        }
        Ok(Some((Arc::clone(memory), offset)))
    }

    /// RM_FREE.
    pub(super) fn free(&mut self) -> Answer {
        let mut argument: Free = self.argument()?;
        argument.status = match self.client(argument.client) {
            Some(client) => self.inner.free(&client, argument.handle),
            None => status::INVALID_CLIENT,
        };
        self.answer(&argument)
    }

    /// RM_DUP_OBJECT: another handle for the same memory.
    pub(super) fn duplicate(&mut self) -> Answer {
        let mut argument: Dup = self.argument()?;
        match self.duplicate_object(&argument) {
            Ok(handle) => (argument.status, argument.handle) = (status::OK, handle),
            Err(status) => argument.status = status,
        }
        self.answer(&argument)
    }

    fn duplicate_object(&self, argument: &Dup) -> Result<u32, u32> {
        let client = self.client(argument.client).ok_or(status::INVALID_CLIENT)?;
        let source = self.inner.any_client(argument.source_client).ok_or(status::INVALID_CLIENT)?;
        let mut object =
            source.owned().get(argument.source).cloned().ok_or(status::OBJECT_NOT_FOUND)?;
        if object.memory.is_none() {
            return Err(status::NOT_SUPPORTED);
        }
        let class = class_of(object.class).ok_or(status::INVALID_CLASS)?;
        let mut owned = client.owned();
        let handle = owned.place(argument.handle, argument.parent, class)?;
        (object.parent, object.card) = (argument.parent, owned.card_of(argument.parent));
        owned.insert(handle, object);
        Ok(handle)
    }

    /// VID_HEAP_CONTROL: the older way to allocate (function 2) and free (3) memory.
    pub(super) fn heap(&mut self) -> Answer {
        let mut argument: Heap = self.argument()?;
        if argument.function == REGISTER {
            return self.register();
        }
        let Some(client) = self.client(argument.client) else {
            argument.status = status::INVALID_CLIENT;
            return self.answer(&argument);
        };
        argument.status = match argument.function {
            2 => self.heap_allocate(&client, &mut argument)?,
            3 => self.inner.free(&client, argument.memory),
            _ => status::NOT_SUPPORTED,
        };
        let card = client.owned().card_of(argument.parent);
        if let Some(usage) = card.map(|card| self.inner.cards.usage(card)).transpose()? {
            argument.total = usage.total;
            argument.free = usage.total.saturating_sub(usage.used);
        }
        self.answer(&argument)
    }

    /// VID_HEAP_CONTROL, function 27: registers the program's own memory. It must be what
    /// marshalling registers with just this call.
    fn register(&mut self) -> Answer {
        let mut argument: HeapDescriptor = self.argument()?;
        let (at, length) = (argument.descriptor, argument.limit.wrapping_add(1));
        let memory = self.registered(at, length)?;
        argument.status = match self.client(argument.client) {
            None => status::INVALID_CLIENT,
            Some(_) if argument.descriptor_type != 0 => status::NOT_SUPPORTED,
            Some(client) => match register(&client, &argument, memory) {
                Ok(handle) => {
                    argument.memory = handle;
                    status::OK
                }
                Err(status) => status,
            },
        };
        self.answer(&argument)
    }

    fn heap_allocate(&mut self, client: &Arc<Client>, argument: &mut Heap) -> Result<u32, Errno> {
        let number = match argument.attr & LOCATION {
            _ if argument.flags & VIRTUAL != 0 => client::VIRTUAL_MEMORY,
            0 => client::VIDEO_MEMORY,
            _ => client::SYSTEM_MEMORY,
        };
        let Some(class) = class_of(number) else { return Ok(status::INVALID_CLASS) };
        let asked = if argument.flags & HANDLE_PROVIDED != 0 { argument.memory } else { 0 };
        let placed = client.owned().place(asked, argument.parent, class);
        let handle = match placed {
            Ok(handle) => handle,
            Err(status) => return Ok(status),
        };
        let mut wanted = layout::Memory::new_zeroed();
        (wanted.size, wanted.alignment) = (argument.size, argument.alignment);
        let status = self.make(client, (handle, argument.parent), class, wanted.as_mut_bytes())?;
        if status == status::OK {
            argument.memory = handle;
            if number != client::VIRTUAL_MEMORY {
                (argument.size, argument.offset) = (wanted.size, wanted.offset);
                argument.limit = wanted.limit;
            }
        }
        Ok(status)
    }
}

fn register(client: &Client, argument: &HeapDescriptor, memory: Registered) -> Result<u32, u32> {
    let class = class_of(client::REGISTERED_MEMORY).ok_or(status::INVALID_CLASS)?;
    let asked = if argument.flags & HANDLE_PROVIDED != 0 { argument.memory } else { 0 };
    let mut owned = client.owned();
    let handle = owned.place(asked, argument.parent, class)?;
    let mut object = Object::plain(class.number, argument.parent, owned.card_of(argument.parent));
    object.memory = Some(Arc::new(Memory::registered(memory)));
    owned.insert(handle, object);
    Ok(handle)
}
