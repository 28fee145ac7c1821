//! The device's own clock.

use std::rc::Rc;
use std::sync::Arc;

use ash::vk;

use super::{Buffer, Device, Queue, Wish};
use crate::error::{Called, Result};

/// Two time stamps, and the memory that the device puts them in, so that reading them is no call.
pub struct Clock {
    pub(super) stamps: vk::QueryPool,
    pub(super) memory: Rc<Buffer>,
    /// Bits of a stamp that count.
    bits: u32,
    device: Arc<Device>,
}

impl Clock {
    /// A clock for work of this queue; none if the queue has none.
    pub fn new(device: &Arc<Device>, queue: &Queue) -> Result<Option<Rc<Clock>>> {
        if queue.timestamp_bits == 0 {
            return Ok(None);
        }
        let memory = Buffer::new(device, 16, Wish::Host)?;
        let info =
            vk::QueryPoolCreateInfo::default().query_type(vk::QueryType::TIMESTAMP).query_count(2);
        // SAFETY: the device is alive.
        let stamps = unsafe { device.raw.create_query_pool(&info, None) };
        let stamps = stamps.called("vkCreateQueryPool")?;
        let bits = queue.timestamp_bits;
        Ok(Some(Rc::new(Clock { stamps, memory, bits, device: device.clone() })))
    }

    /// How long the work took that was timed last, in milliseconds.
    pub fn milliseconds(&self) -> Result<f64> {
        let mut bytes = [0; 16];
        self.memory.read_into(&mut bytes)?;
        let [begin, end] = [&bytes[..8], &bytes[8..]]
            .map(|it| it.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)));
        // CAST: a float is exact for more ticks than any frame takes.
        let ticks = elapsed(begin, end, self.bits) as f64;
        Ok(ticks * self.device.physical.nanoseconds_per_tick / 1e6)
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        // SAFETY: Commands that use the pool own it, so none is left.
        unsafe { self.device.raw.destroy_query_pool(self.stamps, None) };
    }
}

/// Ticks from one stamp to a later one, of a counter that begins anew after so many bits.
fn elapsed(begin: u64, end: u64, bits: u32) -> u64 {
    let mask = u64::MAX >> (64 - bits.clamp(1, 64));
    end.wrapping_sub(begin) & mask
}

#[cfg(test)]
mod tests {
    use super::elapsed;

    #[test]
    fn a_clock_that_began_anew_is_read_right() {
        assert_eq!(elapsed(100, 350, 64), 250);
        assert_eq!(elapsed(0xffff_fff0, 0x10, 32), 0x20);
    }
}
