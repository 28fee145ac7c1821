//! The load: a triangle over the whole picture, recorded once for each frame in flight.

use std::rc::Rc;
use std::sync::Arc;

use crate::args::Wait;
use crate::error::Result;
use crate::shaders;
use crate::vk::{
    Buffer, Commands, Device, Draw, Fence, Graphics, Stamps, Style, Target, Waited, Wish,
};

/// Frames that are ready to be submitted.
pub struct Load {
    device: Arc<Device>,
    slots: Vec<Slot>,
    target: Rc<Target>,
    pipeline: Rc<Graphics>,
}

/// What one frame in flight takes.
struct Slot {
    commands: Commands,
    fence: Fence,
    clock: Option<Clock>,
}

/// Two time stamps of the device, and the memory that the device puts them in.
struct Clock {
    stamps: Rc<Stamps>,
    memory: Rc<Buffer>,
}

impl Load {
    /// Makes all that so many frames in flight take.
    pub fn new(device: &Arc<Device>, extent: (u32, u32), cost: u32, slots: u32) -> Result<Load> {
        let target = Target::new(device, extent, false)?;
        let code = [shaders::SCREEN, shaders::COST];
        let pipeline = Graphics::new(device, &target, code, Style::PLAIN)?;
        let slots = (0..slots)
            .map(|_| {
                let clock = (device.graphics.timestamp_bits > 0).then(|| Clock::new(device));
                let clock = clock.transpose()?;
                let commands = record(device, &target, &pipeline, cost, clock.as_ref())?;
                Ok(Slot { commands, fence: Fence::new(device)?, clock })
            })
            .collect::<Result<_>>()?;
        Ok(Load { device: device.clone(), slots, target, pipeline })
    }

    /// Records anew, at another cost. No frame may be in flight.
    pub fn set_cost(&mut self, cost: u32) -> Result<()> {
        for slot in &mut self.slots {
            let clock = slot.clock.as_ref();
            slot.commands = record(&self.device, &self.target, &self.pipeline, cost, clock)?;
        }
        Ok(())
    }

    /// How many frames can be in flight.
    pub fn slots(&self) -> usize {
        self.slots.len()
    }

    /// Submits a slot's frame.
    pub fn submit(&mut self, slot: usize) -> Result<()> {
        let slot = &mut self.slots[slot];
        self.device.submit(&self.device.graphics, &slot.commands, &mut slot.fence)
    }

    /// Waits for a slot's frame.
    pub fn wait(&self, slot: usize, how: Wait) -> Result<()> {
        let fence = &self.slots[slot].fence;
        match how {
            Wait::Block => fence.wait(),
            Wait::Spin => {
                while !fence.is_signalled()? {
                    std::hint::spin_loop();
                }
                Ok(())
            }
        }
    }

    /// Waits for a slot's frame, for so long at most.
    pub fn wait_for(&self, slot: usize, limit: std::time::Duration) -> Result<Waited> {
        self.slots[slot].fence.wait_for(limit)
    }

    /// After a slot's frame is done: how long the device says it took, in milliseconds.
    pub fn finish(&mut self, slot: usize) -> Result<Option<f64>> {
        let slot = &mut self.slots[slot];
        slot.fence.reset()?;
        slot.clock.as_ref().map(|clock| clock.milliseconds(&self.device)).transpose()
    }
}

impl Clock {
    fn new(device: &Arc<Device>) -> Result<Clock> {
        let memory = Buffer::new(device, 16, Wish::Host)?;
        Ok(Clock { stamps: Stamps::new(device)?, memory })
    }

    fn milliseconds(&self, device: &Device) -> Result<f64> {
        let mut bytes = [0; 16];
        self.memory.read_into(&mut bytes)?;
        let [begin, end] = [&bytes[..8], &bytes[8..]]
            .map(|it| it.iter().rev().fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)));
        let ticks = elapsed(begin, end, device.graphics.timestamp_bits);
        Ok(device.physical.nanoseconds(ticks) / 1e6)
    }
}

/// Ticks from one stamp to a later one, of a counter that begins anew after so many bits.
fn elapsed(begin: u64, end: u64, bits: u32) -> u64 {
    let mask = u64::MAX >> (64 - bits.clamp(1, 64));
    end.wrapping_sub(begin) & mask
}

fn record(
    device: &Arc<Device>,
    target: &Rc<Target>,
    pipeline: &Rc<Graphics>,
    cost: u32,
    clock: Option<&Clock>,
) -> Result<Commands> {
    let constants = cost.to_ne_bytes().to_vec();
    let draw = [Draw { pipeline: pipeline.clone(), constants, vertices: 3, scissor: None }];
    Commands::record(device, &device.graphics, |recorder| match clock {
        Some(Clock { stamps, memory }) => {
            recorder.stamped(stamps, memory, |it| it.draw(target, [0.0; 4], &draw));
        }
        None => recorder.draw(target, [0.0; 4], &draw),
    })
}

#[cfg(test)]
mod tests {
    use super::elapsed;

    #[test]
    fn a_device_clock_that_began_anew_is_read_right() {
        assert_eq!(elapsed(100, 350, 64), 250);
        assert_eq!(elapsed(0xffff_fff0, 0x10, 32), 0x20);
    }
}
