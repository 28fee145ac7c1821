//! Fences and timeline semaphores.

use std::sync::Arc;
use std::time::Duration;

use ash::vk;

use super::{Device, Queue};
use crate::error::{Called, Result};

/// The limit of a wait that should have none.
const LONG: Duration = Duration::from_secs(60);

/// How a wait with a limit ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waited {
    /// What was waited for came.
    Signalled,
    /// The limit came first.
    Late,
}

/// A fence. It takes part in one submission at a time: submitting borrows it mutably.
pub struct Fence {
    pub(super) raw: vk::Fence,
    device: Arc<Device>,
}

impl Fence {
    /// A fence that is not signalled.
    pub fn new(device: &Arc<Device>) -> Result<Fence> {
        let info = vk::FenceCreateInfo::default();
        // SAFETY: the device is alive.
        let raw = unsafe { device.raw.create_fence(&info, None) }.called("vkCreateFence")?;
        Ok(Fence { raw, device: device.clone() })
    }

    /// Waits in one call of `vkWaitForFences`.
    pub fn wait(&self) -> Result<()> {
        match self.wait_for(LONG)? {
            Waited::Signalled => Ok(()),
            Waited::Late => Err(vk::Result::TIMEOUT).called("vkWaitForFences for 60 s"),
        }
    }

    /// Waits in one call of `vkWaitForFences`, for so long at most.
    pub fn wait_for(&self, limit: Duration) -> Result<Waited> {
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: the fence is the device's.
        waited(unsafe { self.device.raw.wait_for_fences(&[self.raw], true, limit) })
            .called("vkWaitForFences")
    }

    /// Asks without waiting.
    pub fn is_signalled(&self) -> Result<bool> {
        // SAFETY: the fence is the device's.
        unsafe { self.device.raw.get_fence_status(self.raw) }.called("vkGetFenceStatus")
    }

    /// Makes it ready for the next submission.
    pub fn reset(&mut self) -> Result<()> {
        // SAFETY: the fence is the device's; callers reset it after they have waited for it.
        unsafe { self.device.raw.reset_fences(&[self.raw]) }.called("vkResetFences")
    }
}

impl Drop for Fence {
    fn drop(&mut self) {
        if !self.is_signalled().unwrap_or(true) {
            self.device.idle();
        }
        // SAFETY: no submission that is not done uses it.
        unsafe { self.device.raw.destroy_fence(self.raw, None) };
    }
}

/// A timeline semaphore.
pub struct Timeline {
    raw: vk::Semaphore,
    device: Arc<Device>,
}

impl Timeline {
    /// A timeline that stands at this value.
    pub fn new(device: &Arc<Device>, value: u64) -> Result<Timeline> {
        let mut kind = vk::SemaphoreTypeCreateInfo::default()
            .semaphore_type(vk::SemaphoreType::TIMELINE)
            .initial_value(value);
        let info = vk::SemaphoreCreateInfo::default().push_next(&mut kind);
        // SAFETY: devices are made with timeline semaphores.
        let raw = unsafe { device.raw.create_semaphore(&info, None) };
        Ok(Timeline { raw: raw.called("vkCreateSemaphore")?, device: device.clone() })
    }

    /// The value that it stands at.
    pub fn value(&self) -> Result<u64> {
        // SAFETY: the semaphore is the device's, and a timeline.
        unsafe { self.device.raw.get_semaphore_counter_value(self.raw) }
            .called("vkGetSemaphoreCounterValue")
    }

    /// Raises it from the host.
    pub fn signal(&self, value: u64) -> Result<()> {
        let info = vk::SemaphoreSignalInfo::default().semaphore(self.raw).value(value);
        // SAFETY: as above.
        unsafe { self.device.raw.signal_semaphore(&info) }.called("vkSignalSemaphore")
    }

    /// Waits on the host until it stands at the value or beyond.
    pub fn wait_for(&self, value: u64, limit: Duration) -> Result<Waited> {
        let (semaphores, values) = ([self.raw], [value]);
        let info = vk::SemaphoreWaitInfo::default().semaphores(&semaphores).values(&values);
        let limit = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        // SAFETY: as above.
        waited(unsafe { self.device.raw.wait_semaphores(&info, limit) }).called("vkWaitSemaphores")
    }

    /// Has a queue wait for one value and raise it to another, with no other work.
    pub fn pass(&self, queue: &Queue, from: u64, to: u64, fence: Option<&mut Fence>) -> Result<()> {
        let (semaphores, from, to) = ([self.raw], [from], [to]);
        let stages = [vk::PipelineStageFlags::ALL_COMMANDS];
        let mut values = vk::TimelineSemaphoreSubmitInfo::default()
            .wait_semaphore_values(&from)
            .signal_semaphore_values(&to);
        let work = [vk::SubmitInfo::default()
            .wait_semaphores(&semaphores)
            .wait_dst_stage_mask(&stages)
            .signal_semaphores(&semaphores)
            .push_next(&mut values)];
        let fence = fence.map_or(vk::Fence::null(), |it| it.raw);
        self.device.submit_raw(queue, &work, fence)
    }
}

impl Drop for Timeline {
    fn drop(&mut self) {
        self.device.idle();
        // SAFETY: the device is idle, so no submission uses it.
        unsafe { self.device.raw.destroy_semaphore(self.raw, None) };
    }
}

fn waited(result: ash::prelude::VkResult<()>) -> ash::prelude::VkResult<Waited> {
    match result {
        Ok(()) => Ok(Waited::Signalled),
        Err(vk::Result::TIMEOUT) => Ok(Waited::Late),
        Err(error) => Err(error),
    }
}
