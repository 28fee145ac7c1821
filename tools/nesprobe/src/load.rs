//! The load: a triangle over the whole picture, recorded once for each frame in flight.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::args::Wait;
use crate::error::Result;
use crate::shaders;
use crate::vk::{Clock, Commands, Device, Draw, Fence, Graphics, Style, Target, Waited};

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
    clock: Option<Rc<Clock>>,
}

impl Load {
    /// Makes all that so many frames in flight take.
    pub fn new(device: &Arc<Device>, extent: (u32, u32), cost: u32, slots: u32) -> Result<Load> {
        let target = Target::new(device, extent, false)?;
        let code = [shaders::SCREEN, shaders::COST];
        let pipeline = Graphics::new(device, &target, code, Style::PLAIN)?;
        let slots = (0..slots)
            .map(|_| {
                let clock = Clock::new(device, &device.graphics)?;
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
    pub fn wait_for(&self, slot: usize, limit: Duration) -> Result<Waited> {
        self.slots[slot].fence.wait_for(limit)
    }

    /// After a slot's frame is done: how long the device says it took, in milliseconds.
    pub fn finish(&mut self, slot: usize) -> Result<Option<f64>> {
        let slot = &mut self.slots[slot];
        slot.fence.reset()?;
        slot.clock.as_ref().map(|it| it.milliseconds()).transpose()
    }
}

fn record(
    device: &Arc<Device>,
    target: &Rc<Target>,
    pipeline: &Rc<Graphics>,
    cost: u32,
    clock: Option<&Rc<Clock>>,
) -> Result<Commands> {
    let constants = cost.to_ne_bytes().to_vec();
    let draw = [Draw { pipeline: pipeline.clone(), constants, vertices: 3, scissor: None }];
    Commands::record(device, &device.graphics, |recorder| match clock {
        Some(clock) => recorder.timed(clock, |it| it.draw(target, [0.0; 4], &draw)),
        None => recorder.draw(target, [0.0; 4], &draw),
    })
}
