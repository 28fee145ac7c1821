//! A logical device and its queues.

use std::sync::{Arc, Mutex, PoisonError};

use ash::vk;

use super::commands::Commands;
use super::sync::Fence;
use super::{Instance, Physical};
use crate::error::{Called, Error, Result};

/// A queue, and the family that it is of.
#[derive(Debug)]
pub struct Queue {
    pub(super) raw: Mutex<vk::Queue>,
    pub(super) family: u32,
    /// Bits that count in a time stamp; 0 if the queue takes none.
    pub(super) timestamp_bits: u32,
}

/// A logical device.
pub struct Device {
    pub(super) raw: ash::Device,
    pub(super) instance: Arc<Instance>,
    /// What it is a device of.
    pub physical: Physical,
    /// A queue that draws, computes and copies.
    pub graphics: Queue,
    /// A queue of a family that computes and does not draw, where there is one.
    pub compute: Option<Queue>,
    /// A queue of a family that only copies, where there is one.
    pub transfer: Option<Queue>,
    pub(super) memory: vk::PhysicalDeviceMemoryProperties,
}

/// Which queues a device is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Queues {
    /// The one that draws, computes and copies.
    Graphics,
    /// That one, and one of each family that only computes or only copies.
    Every,
}

/// The families that have a queue here.
struct Families {
    graphics: u32,
    compute: Option<u32>,
    transfer: Option<u32>,
}

impl Device {
    /// Makes a logical device.
    pub fn open(
        instance: &Arc<Instance>,
        physical: &Physical,
        queues: Queues,
    ) -> Result<Arc<Device>> {
        // SAFETY: the device is the instance's; each Physical comes from it.
        let families =
            unsafe { instance.raw.get_physical_device_queue_family_properties(physical.raw) };
        let chosen = Families::of(&families, queues)?;
        let raw = create(instance, physical, &chosen)?;
        // SAFETY: as above.
        let memory = unsafe { instance.raw.get_physical_device_memory_properties(physical.raw) };
        let queue = |family: u32| {
            let bits = families.get(family as usize).map_or(0, |it| it.timestamp_valid_bits);
            // SAFETY: the device was made with one queue of this family.
            let handle = unsafe { raw.get_device_queue(family, 0) };
            Queue { raw: Mutex::new(handle), family, timestamp_bits: bits }
        };
        Ok(Arc::new(Device {
            graphics: queue(chosen.graphics),
            compute: chosen.compute.map(queue),
            transfer: chosen.transfer.map(queue),
            raw,
            instance: instance.clone(),
            physical: physical.clone(),
            memory,
        }))
    }

    /// Gives work to a queue; the fence is signalled when it is done.
    pub fn submit(&self, queue: &Queue, commands: &Commands, fence: &mut Fence) -> Result<()> {
        let buffers = [commands.raw];
        let work = [vk::SubmitInfo::default().command_buffers(&buffers)];
        self.submit_raw(queue, &work, fence.raw)
    }

    pub(super) fn submit_raw(
        &self,
        queue: &Queue,
        work: &[vk::SubmitInfo<'_>],
        fence: vk::Fence,
    ) -> Result<()> {
        let queue = queue.raw.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the lock keeps the queue to this thread. What the work uses is alive until it
        // is done: Commands hold it, and wait for the device before they are dropped.
        unsafe { self.raw.queue_submit(*queue, work, fence) }.called("vkQueueSubmit")
    }

    /// Waits until every queue is done.
    pub(super) fn idle(&self) {
        // SAFETY: no queue is used by another thread: the fields that could be are behind locks,
        // and no thread of ours submits while another drops what it made.
        // A lost device is idle too.
        let _ = unsafe { self.raw.device_wait_idle() };
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.idle();
        // SAFETY: whatever was made from the device holds an Arc of it, so nothing is left.
        unsafe { self.raw.destroy_device(None) };
    }
}

impl Families {
    fn of(families: &[vk::QueueFamilyProperties], queues: Queues) -> Result<Families> {
        use vk::QueueFlags as Flags;
        let find = |has: Flags, lacks: Flags| {
            let fits = |it: &vk::QueueFamilyProperties| {
                it.queue_flags.contains(has) && !it.queue_flags.intersects(lacks)
            };
            // CAST: the number of families came as a u32.
            families.iter().position(fits).map(|it| it as u32)
        };
        let graphics = find(Flags::GRAPHICS | Flags::COMPUTE, Flags::empty()).ok_or_else(|| {
            Error::Unfit("the device has no queue that draws and computes".to_owned())
        })?;
        if queues == Queues::Graphics {
            return Ok(Families { graphics, compute: None, transfer: None });
        }
        Ok(Families {
            graphics,
            compute: find(Flags::COMPUTE, Flags::GRAPHICS),
            transfer: find(
                Flags::TRANSFER,
                Flags::GRAPHICS
                    | Flags::COMPUTE
                    | Flags::VIDEO_DECODE_KHR
                    | Flags::VIDEO_ENCODE_KHR
                    | Flags::OPTICAL_FLOW_NV,
            ),
        })
    }
}

fn create(instance: &Instance, physical: &Physical, families: &Families) -> Result<ash::Device> {
    let priority = [1.0];
    let wanted = [Some(families.graphics), families.compute, families.transfer];
    let queues: Vec<_> = wanted
        .into_iter()
        .flatten()
        .map(|family| {
            vk::DeviceQueueCreateInfo::default()
                .queue_family_index(family)
                .queue_priorities(&priority)
        })
        .collect();
    let extensions: Vec<_> =
        [ash::khr::external_memory_fd::NAME, ash::ext::external_memory_host::NAME]
            .into_iter()
            .filter(|name| physical.has(name))
            .map(|name| name.as_ptr())
            .collect();
    let mut timeline =
        vk::PhysicalDeviceTimelineSemaphoreFeatures::default().timeline_semaphore(true);
    let info = vk::DeviceCreateInfo::default()
        .queue_create_infos(&queues)
        .enabled_extension_names(&extensions)
        .push_next(&mut timeline);
    // SAFETY: what `info` points to outlives the call; Vulkan 1.2 has timeline semaphores always.
    unsafe { instance.raw.create_device(physical.raw, &info, None) }.called("vkCreateDevice")
}
