//! The load: triangles over the whole picture, recorded once for each frame in flight.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::args::{Load as Options, Wait};
use crate::error::Result;
use crate::shaders;
use crate::vk::{Clock, Commands, Device, Draw, Fence, Graphics, Recorder, Style, Target, Waited};

/// Frames that are ready to be submitted.
pub struct Load {
    device: Arc<Device>,
    slots: Vec<Slot>,
    target: Rc<Target>,
    pipeline: Rc<Graphics>,
    passes: u32,
}

/// What one frame in flight takes.
struct Slot {
    commands: Commands,
    fence: Fence,
    clock: Option<Rc<Clock>>,
}

impl Load {
    /// Makes all that the frames in flight take.
    pub fn new(device: &Arc<Device>, options: &Options) -> Result<Load> {
        let target = Target::new(device, (options.width, options.height), false)?;
        let code = [shaders::SCREEN, shaders::COST];
        let pipeline = Graphics::new(device, &target, code, Style::PLAIN)?;
        let slots = (0..options.frames_in_flight)
            .map(|_| {
                let clock = Clock::new(device, &device.graphics)?;
                let commands = Commands::record(device, &device.graphics, |_| {})?;
                Ok(Slot { commands, fence: Fence::new(device)?, clock })
            })
            .collect::<Result<_>>()?;
        let passes = options.passes;
        let mut load = Load { device: device.clone(), slots, target, pipeline, passes };
        load.set_cost(options.cost)?;
        Ok(load)
    }

    /// Records anew, at another cost. No frame may be in flight.
    pub fn set_cost(&mut self, cost: u32) -> Result<()> {
        for slot in 0..self.slots.len() {
            self.slots[slot].commands = self.record(cost, self.slots[slot].clock.as_ref())?;
        }
        Ok(())
    }

    fn record(&self, cost: u32, clock: Option<&Rc<Clock>>) -> Result<Commands> {
        let constants = cost.to_ne_bytes().to_vec();
        let pipeline = self.pipeline.clone();
        let draw = [Draw { pipeline, constants, vertices: 3, scissor: None }];
        let frame = |recorder: &mut Recorder<'_>| {
            for pass in 0..self.passes {
                if pass > 0 {
                    recorder.barrier();
                }
                recorder.draw(&self.target, [0.0; 4], &draw);
            }
        };
        Commands::record(&self.device, &self.device.graphics, |recorder| match clock {
            Some(clock) => recorder.timed(clock, frame),
            None => frame(recorder),
        })
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
