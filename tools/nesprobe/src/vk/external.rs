//! Memory that comes from, or goes to, somewhere else.

use std::alloc::{alloc_zeroed, dealloc, Layout};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;

use ash::vk;

use super::memory::{Memory, Unbound, USAGE};
use super::{Buffer, Device};
use crate::error::{Called, Error, Result};

const FD: vk::ExternalMemoryHandleTypeFlags = vk::ExternalMemoryHandleTypeFlags::OPAQUE_FD;
const HOST: vk::ExternalMemoryHandleTypeFlags =
    vk::ExternalMemoryHandleTypeFlags::HOST_ALLOCATION_EXT;

/// What another process has to know of exported memory to import it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Exported {
    /// Bytes of the buffer.
    pub size: u64,
    /// Bytes of the memory.
    pub memory: u64,
    /// The memory type.
    pub kind: u32,
}

/// A buffer whose memory another process can import, and the descriptor to do it by.
pub fn export(device: &Arc<Device>, size: u64) -> Result<(Rc<Buffer>, OwnedFd, Exported)> {
    let features = features(device, FD);
    if !features.contains(vk::ExternalMemoryFeatureFlags::EXPORTABLE) {
        return Err(Error::Unfit("the device exports no buffer as a descriptor".to_owned()));
    }
    let bare = Unbound::new(device, size, FD)?;
    let (bits, bytes) = (bare.needs.memory_type_bits, bare.needs.size);
    let local = |it: &super::MemoryType| {
        bits & (1 << it.index) != 0 && it.flags.contains(vk::MemoryPropertyFlags::DEVICE_LOCAL)
    };
    let kind = device.memory_types().find(local).map_or(bits.trailing_zeros(), |it| it.index);
    let mut export = vk::ExportMemoryAllocateInfo::default().handle_types(FD);
    let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(bare.raw);
    let mut info = vk::MemoryAllocateInfo::default()
        .allocation_size(bytes)
        .memory_type_index(kind)
        .push_next(&mut export);
    if features.contains(vk::ExternalMemoryFeatureFlags::DEDICATED_ONLY) {
        info = info.push_next(&mut dedicated);
    }
    let memory = Memory::allocate(device, &info)?;
    let extension = ash::khr::external_memory_fd::Device::new(&device.instance.raw, &device.raw);
    let which = vk::MemoryGetFdInfoKHR::default().memory(memory.raw).handle_type(FD);
    // SAFETY: the extension is on (callers look), and the memory was made to be exported.
    let fd = unsafe { extension.get_memory_fd(&which) }.called("vkGetMemoryFdKHR")?;
    // SAFETY: the descriptor is new, and ours by the call's contract.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok((bare.bind(memory)?, fd, Exported { size, memory: bytes, kind }))
}

/// A buffer in memory that another process exported.
pub fn import_fd(device: &Arc<Device>, fd: OwnedFd, exported: Exported) -> Result<Rc<Buffer>> {
    let features = features(device, FD);
    if !features.contains(vk::ExternalMemoryFeatureFlags::IMPORTABLE) {
        return Err(Error::Unfit("the device imports no buffer from a descriptor".to_owned()));
    }
    let bare = Unbound::new(device, exported.size, FD)?;
    let fd = fd.into_raw_fd();
    let mut import = vk::ImportMemoryFdInfoKHR::default().handle_type(FD).fd(fd);
    let mut dedicated = vk::MemoryDedicatedAllocateInfo::default().buffer(bare.raw);
    let mut info = vk::MemoryAllocateInfo::default()
        .allocation_size(exported.memory)
        .memory_type_index(exported.kind)
        .push_next(&mut import);
    if features.contains(vk::ExternalMemoryFeatureFlags::DEDICATED_ONLY) {
        info = info.push_next(&mut dedicated);
    }
    let memory = Memory::allocate(device, &info).inspect_err(|_| {
        // SAFETY: an import that failed has not taken the descriptor.
        drop(unsafe { OwnedFd::from_raw_fd(fd) });
    })?;
    bare.bind(memory)
}

fn features(
    device: &Device,
    handle: vk::ExternalMemoryHandleTypeFlags,
) -> vk::ExternalMemoryFeatureFlags {
    let info = vk::PhysicalDeviceExternalBufferInfo::default().usage(USAGE).handle_type(handle);
    let mut found = vk::ExternalBufferProperties::default();
    let instance = &device.instance.raw;
    // SAFETY: the device is the instance's, and speaks Vulkan 1.2.
    unsafe {
        instance.get_physical_device_external_buffer_properties(
            device.physical.raw,
            &info,
            &mut found,
        );
    }
    found.external_memory_properties.external_memory_features
}

/// Zeroed pages of this process.
pub struct HostPages {
    place: NonNull<u8>,
    layout: Layout,
}

impl HostPages {
    /// So many bytes, rounded up to and aligned for what the device can import.
    pub fn new(device: &Device, size: u64) -> Result<HostPages> {
        let mut host = vk::PhysicalDeviceExternalMemoryHostPropertiesEXT::default();
        let mut all = vk::PhysicalDeviceProperties2::default().push_next(&mut host);
        let instance = &device.instance.raw;
        // SAFETY: the extension is there (callers look).
        unsafe { instance.get_physical_device_properties2(device.physical.raw, &mut all) };
        let align = host.min_imported_host_pointer_alignment.max(4096);
        // CAST: 64-bit only.
        let layout = Layout::from_size_align(size.next_multiple_of(align) as usize, align as usize)
            .map_err(|_| Error::Unfit(format!("no host memory is aligned to {align}")))?;
        // SAFETY: the size is not zero: callers ask for some bytes.
        let place = NonNull::new(unsafe { alloc_zeroed(layout) });
        let place = place.ok_or_else(|| Error::Unfit(format!("no {size} bytes are left")))?;
        Ok(HostPages { place, layout })
    }

    pub(super) fn place(&self) -> NonNull<u8> {
        self.place
    }
}

impl Drop for HostPages {
    fn drop(&mut self) {
        // SAFETY: the pages were allocated with this layout, and whoever imported them is gone.
        unsafe { dealloc(self.place.as_ptr(), self.layout) };
    }
}

/// A buffer in memory of this process; reading and writing it goes to those pages.
pub fn import_host(device: &Arc<Device>, pages: HostPages) -> Result<Rc<Buffer>> {
    let pointer = pages.place.as_ptr().cast();
    let extension = ash::ext::external_memory_host::Device::new(&device.instance.raw, &device.raw);
    let mut found = vk::MemoryHostPointerPropertiesEXT::default();
    let ask = extension.fp().get_memory_host_pointer_properties_ext;
    // SAFETY: the extension is on (callers look), and the pointer is to pages of ours.
    unsafe { ask(device.raw.handle(), HOST, pointer, &mut found) }
        .result()
        .called("vkGetMemoryHostPointerPropertiesEXT")?;
    let size = pages.layout.size() as u64;
    let bare = Unbound::new(device, size, HOST)?;
    let bits = found.memory_type_bits & bare.needs.memory_type_bits;
    if bits == 0 {
        return Err(Error::Unfit("no memory type takes both these pages and a buffer".to_owned()));
    }
    let mut import = vk::ImportMemoryHostPointerInfoEXT::default().handle_type(HOST);
    import.p_host_pointer = pointer;
    let info = vk::MemoryAllocateInfo::default()
        .allocation_size(size)
        .memory_type_index(bits.trailing_zeros())
        .push_next(&mut import);
    let memory = Memory::allocate(device, &info)?.made_of(pages);
    bare.bind(memory)
}
