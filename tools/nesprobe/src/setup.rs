//! From nothing to a logical device, and how long that takes.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::error::Result;
use crate::vk::{choose, Device, Instance, Queues};

/// A logical device, and what it took to get it.
pub struct Setup {
    /// The instance.
    pub instance: Arc<Instance>,
    /// The device.
    pub device: Arc<Device>,
    /// Loading the loader and making the instance.
    pub instance_time: Duration,
    /// Asking for the devices and making the logical one.
    pub device_time: Duration,
}

impl Setup {
    /// Makes a logical device of the one that `--device` names.
    pub fn new(wish: Option<&str>) -> Result<Setup> {
        let begin = Instant::now();
        let instance = Instance::new()?;
        let instance_time = begin.elapsed();
        let begin = Instant::now();
        let devices = instance.devices()?;
        let device = Device::open(&instance, choose(&devices, wish)?, Queues::Every)?;
        Ok(Setup { instance, device, instance_time, device_time: begin.elapsed() })
    }
}
