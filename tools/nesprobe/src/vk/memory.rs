//! Memory, buffers, images.

use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use ash::vk;

use super::external::HostPages;
use super::Device;
use crate::error::{Called, Error, Result};

/// Where memory should lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Wish {
    /// Nearest to the device.
    Device,
    /// Where the host can read and write it.
    Host,
    /// In this memory type.
    Type(u32),
}

/// A memory type of a device.
#[derive(Debug, Clone, Copy)]
pub struct MemoryType {
    /// Its number.
    pub index: u32,
    /// The heap that it takes from.
    pub heap: u32,
    /// What it can do.
    pub flags: vk::MemoryPropertyFlags,
}

impl Device {
    /// Every memory type.
    pub fn memory_types(&self) -> impl Iterator<Item = MemoryType> + '_ {
        let types = self.memory.memory_types_as_slice();
        (0u32..).zip(types).map(|(index, it)| MemoryType {
            index,
            heap: it.heap_index,
            flags: it.property_flags,
        })
    }

    fn find(&self, wish: Wish, allowed: u32) -> Result<MemoryType> {
        use vk::MemoryPropertyFlags as Flags;
        let host = Flags::HOST_VISIBLE | Flags::HOST_COHERENT;
        let wanted: &[Flags] = match wish {
            Wish::Device => &[Flags::DEVICE_LOCAL, Flags::empty()],
            Wish::Host => &[host | Flags::HOST_CACHED, host],
            Wish::Type(_) => &[Flags::empty()],
        };
        let fits = |it: &MemoryType| match wish {
            Wish::Type(index) => it.index == index,
            _ => allowed & (1 << it.index) != 0,
        };
        let mut found = wanted.iter().filter_map(|flags| {
            self.memory_types().find(|it| fits(it) && it.flags.contains(*flags))
        });
        found.next().ok_or_else(|| {
            Error::Unfit(format!("no memory type of {allowed:#x} is what {wish:?} asks for"))
        })
    }
}

/// Device memory.
pub struct Memory {
    pub(super) raw: vk::DeviceMemory,
    /// Where the host sees it.
    mapped: Option<NonNull<u8>>,
    coherent: bool,
    size: u64,
    device: Arc<Device>,
    // INVARIANT: freed after `raw`, which may be made of these pages.
    _pages: Option<HostPages>,
}

impl Memory {
    pub(super) fn allocate(
        device: &Arc<Device>,
        info: &vk::MemoryAllocateInfo<'_>,
    ) -> Result<Memory> {
        // SAFETY: callers fill `info` for this device; what it points to is borrowed.
        let raw = unsafe { device.raw.allocate_memory(info, None) }.called("vkAllocateMemory")?;
        let (size, device) = (info.allocation_size, device.clone());
        Ok(Memory { raw, mapped: None, coherent: true, size, device, _pages: None })
    }

    /// Memory of a type; mapped if the host can see it.
    pub fn new(device: &Arc<Device>, size: u64, kind: &MemoryType) -> Result<Memory> {
        let info =
            vk::MemoryAllocateInfo::default().allocation_size(size).memory_type_index(kind.index);
        let mut memory = Memory::allocate(device, &info)?;
        if kind.flags.contains(vk::MemoryPropertyFlags::HOST_VISIBLE) {
            memory.coherent = kind.flags.contains(vk::MemoryPropertyFlags::HOST_COHERENT);
            let (raw, flags) = (memory.raw, vk::MemoryMapFlags::empty());
            // SAFETY: the memory is host-visible and not mapped yet.
            let place = unsafe { device.raw.map_memory(raw, 0, vk::WHOLE_SIZE, flags) };
            memory.mapped = NonNull::new(place.called("vkMapMemory")?.cast());
        }
        Ok(memory)
    }

    /// Memory made of these pages, which it keeps.
    pub(super) fn made_of(mut self, pages: HostPages) -> Memory {
        self.mapped = Some(pages.place());
        self._pages = Some(pages);
        self
    }

    fn place(&self, length: usize) -> Result<NonNull<u8>> {
        match self.mapped {
            Some(place) if length as u64 <= self.size => Ok(place),
            Some(_) => Err(Error::Unfit(format!("{length} bytes are more than the memory has"))),
            None => Err(Error::Unfit("the host cannot see this memory".to_owned())),
        }
    }

    fn range(&self) -> [vk::MappedMemoryRange<'static>; 1] {
        [vk::MappedMemoryRange::default().memory(self.raw).size(vk::WHOLE_SIZE)]
    }

    /// Writes bytes at its beginning, from the host.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        let place = self.place(bytes.len())?;
        // SAFETY: `place` has room for them. The host only touches the memory while no
        // submission uses it.
        unsafe { place.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
        if self.coherent {
            return Ok(());
        }
        // SAFETY: the memory is mapped.
        unsafe { self.device.raw.flush_mapped_memory_ranges(&self.range()) }
            .called("vkFlushMappedMemoryRanges")
    }

    /// Reads so many bytes from its beginning, from the host.
    pub fn read(&self, length: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; length];
        self.read_into(&mut bytes)?;
        Ok(bytes)
    }

    /// Fills `bytes` from its beginning, from the host.
    pub fn read_into(&self, bytes: &mut [u8]) -> Result<()> {
        let place = self.place(bytes.len())?;
        if !self.coherent {
            // SAFETY: the memory is mapped.
            unsafe { self.device.raw.invalidate_mapped_memory_ranges(&self.range()) }
                .called("vkInvalidateMappedMemoryRanges")?;
        }
        // SAFETY: as in `write`.
        unsafe { place.as_ptr().copy_to_nonoverlapping(bytes.as_mut_ptr(), bytes.len()) };
        Ok(())
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: what is bound to the memory owns it, and is gone before. Freeing unmaps.
        unsafe { self.device.raw.free_memory(self.raw, None) };
    }
}

/// A buffer without memory.
pub(super) struct Unbound {
    pub(super) raw: vk::Buffer,
    pub(super) needs: vk::MemoryRequirements,
    size: u64,
    device: Arc<Device>,
}

impl Unbound {
    /// A buffer to copy from and to and to compute in, of memory that comes from these handles.
    pub(super) fn new(
        device: &Arc<Device>,
        size: u64,
        handles: vk::ExternalMemoryHandleTypeFlags,
    ) -> Result<Unbound> {
        let mut external = vk::ExternalMemoryBufferCreateInfo::default().handle_types(handles);
        let mut info = vk::BufferCreateInfo::default().size(size).usage(USAGE);
        if !handles.is_empty() {
            info = info.push_next(&mut external);
        }
        // SAFETY: the device is alive, and what `info` points to outlives the call.
        let raw = unsafe { device.raw.create_buffer(&info, None) }.called("vkCreateBuffer")?;
        // SAFETY: the buffer is the device's.
        let needs = unsafe { device.raw.get_buffer_memory_requirements(raw) };
        Ok(Unbound { raw, needs, size, device: device.clone() })
    }

    pub(super) fn bind(self, memory: Memory) -> Result<Rc<Buffer>> {
        // SAFETY: both are the device's, the buffer has no memory yet, and callers took the
        // memory's size and type from the buffer's needs.
        unsafe { self.device.raw.bind_buffer_memory(self.raw, memory.raw, 0) }
            .called("vkBindBufferMemory")?;
        Ok(Rc::new(Buffer { bare: self, memory }))
    }
}

impl Drop for Unbound {
    fn drop(&mut self) {
        // SAFETY: Commands that use the buffer own it, so none is left.
        unsafe { self.device.raw.destroy_buffer(self.raw, None) };
    }
}

/// What every buffer is for.
pub(super) const USAGE: vk::BufferUsageFlags = vk::BufferUsageFlags::from_raw(
    vk::BufferUsageFlags::TRANSFER_SRC.as_raw()
        | vk::BufferUsageFlags::TRANSFER_DST.as_raw()
        | vk::BufferUsageFlags::STORAGE_BUFFER.as_raw(),
);

/// A buffer with memory of its own.
pub struct Buffer {
    // INVARIANT: dropped before the memory.
    bare: Unbound,
    memory: Memory,
}

impl Buffer {
    /// A buffer of so many bytes.
    pub fn new(device: &Arc<Device>, size: u64, wish: Wish) -> Result<Rc<Buffer>> {
        let bare = Unbound::new(device, size, vk::ExternalMemoryHandleTypeFlags::empty())?;
        let kind = device.find(wish, bare.needs.memory_type_bits)?;
        let memory = Memory::new(device, bare.needs.size, &kind)?;
        bare.bind(memory)
    }

    /// A buffer that the host wrote these bytes to.
    pub fn holding(device: &Arc<Device>, bytes: &[u8]) -> Result<Rc<Buffer>> {
        let buffer = Buffer::new(device, bytes.len() as u64, Wish::Host)?;
        buffer.memory.write(bytes)?;
        Ok(buffer)
    }

    /// The memory types that a buffer of this size can lie in, as bits.
    pub fn types(device: &Arc<Device>, size: u64) -> Result<u32> {
        let bare = Unbound::new(device, size, vk::ExternalMemoryHandleTypeFlags::empty())?;
        Ok(bare.needs.memory_type_bits)
    }

    pub(super) fn raw(&self) -> vk::Buffer {
        self.bare.raw
    }

    /// Its size in bytes.
    pub fn size(&self) -> u64 {
        self.bare.size
    }

    /// Writes bytes at its beginning, from the host.
    pub fn write(&self, bytes: &[u8]) -> Result<()> {
        self.memory.write(bytes)
    }

    /// All of it, read from the host.
    pub fn read(&self) -> Result<Vec<u8>> {
        // CAST: 64-bit only.
        self.memory.read(self.bare.size as usize)
    }

    /// Its beginning, read from the host.
    pub fn read_into(&self, bytes: &mut [u8]) -> Result<()> {
        self.memory.read_into(bytes)
    }
}

/// An image with memory of its own.
pub(super) struct Image {
    pub(super) raw: vk::Image,
    pub(super) view: vk::ImageView,
    _memory: Memory,
    device: Arc<Device>,
}

impl Image {
    /// A render target that can be copied from and to.
    pub(super) fn new(
        device: &Arc<Device>,
        format: vk::Format,
        (width, height): (u32, u32),
        aspect: vk::ImageAspectFlags,
    ) -> Result<Image> {
        let attachment = if aspect.contains(vk::ImageAspectFlags::DEPTH) {
            vk::ImageUsageFlags::DEPTH_STENCIL_ATTACHMENT
        } else {
            vk::ImageUsageFlags::COLOR_ATTACHMENT
        };
        let copies = vk::ImageUsageFlags::TRANSFER_SRC | vk::ImageUsageFlags::TRANSFER_DST;
        let info = vk::ImageCreateInfo::default()
            .image_type(vk::ImageType::TYPE_2D)
            .format(format)
            .extent(vk::Extent3D { width, height, depth: 1 })
            .mip_levels(1)
            .array_layers(1)
            .samples(vk::SampleCountFlags::TYPE_1)
            .tiling(vk::ImageTiling::OPTIMAL)
            .usage(attachment | copies);
        // SAFETY: every device has both formats of ours for these uses.
        let raw = unsafe { device.raw.create_image(&info, None) }.called("vkCreateImage")?;
        Image::finish(device, raw, format, aspect).inspect_err(|_| {
            // SAFETY: nothing uses the image; its view and memory, if any, are gone.
            unsafe { device.raw.destroy_image(raw, None) };
        })
    }

    fn finish(
        device: &Arc<Device>,
        raw: vk::Image,
        format: vk::Format,
        aspect: vk::ImageAspectFlags,
    ) -> Result<Image> {
        // SAFETY: the image is the device's.
        let needs = unsafe { device.raw.get_image_memory_requirements(raw) };
        let mut kind = device.find(Wish::Device, needs.memory_type_bits)?;
        // The host never looks into an image.
        kind.flags = vk::MemoryPropertyFlags::empty();
        let memory = Memory::new(device, needs.size, &kind)?;
        // SAFETY: size and type are what the image needs, and it has no memory yet.
        unsafe { device.raw.bind_image_memory(raw, memory.raw, 0) }.called("vkBindImageMemory")?;
        let info = vk::ImageViewCreateInfo::default()
            .image(raw)
            .view_type(vk::ImageViewType::TYPE_2D)
            .format(format)
            .subresource_range(whole(aspect));
        // SAFETY: the image has memory, and the view is of its own format.
        let view =
            unsafe { device.raw.create_image_view(&info, None) }.called("vkCreateImageView")?;
        Ok(Image { raw, view, _memory: memory, device: device.clone() })
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        // SAFETY: Commands that use the image own it, so none is left.
        unsafe {
            self.device.raw.destroy_image_view(self.view, None);
            self.device.raw.destroy_image(self.raw, None);
        }
    }
}

/// The one level and layer of our images.
pub(super) fn whole(aspect: vk::ImageAspectFlags) -> vk::ImageSubresourceRange {
    vk::ImageSubresourceRange::default().aspect_mask(aspect).level_count(1).layer_count(1)
}
