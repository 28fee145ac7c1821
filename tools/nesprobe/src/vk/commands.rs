//! Recording; what is recorded keeps what it uses alive.

use std::any::Any;
use std::rc::Rc;
use std::sync::Arc;

use ash::vk;

use super::memory::whole;
use super::pipeline::{CONSTANTS, STAGES};
use super::{Buffer, Clock, Compute, Device, Fence, Graphics, Queue, Target};
use crate::error::{Called, Result};

/// A recorded command buffer, to be submitted as often as one likes.
pub struct Commands {
    pub(super) raw: vk::CommandBuffer,
    pool: vk::CommandPool,
    // INVARIANT: holds everything that the commands use, until the device is done with them.
    kept: Vec<Rc<dyn Any>>,
    device: Arc<Device>,
}

impl Commands {
    /// Records commands for a queue. What they write can be read by the host afterwards.
    pub fn record(
        device: &Arc<Device>,
        queue: &Queue,
        write: impl FnOnce(&mut Recorder<'_>),
    ) -> Result<Commands> {
        let info = vk::CommandPoolCreateInfo::default().queue_family_index(queue.family);
        // SAFETY: the family is one that the device was made with.
        let pool =
            unsafe { device.raw.create_command_pool(&info, None) }.called("vkCreateCommandPool")?;
        let (raw, kept) = (vk::CommandBuffer::null(), Vec::new());
        let mut commands = Commands { raw, pool, kept, device: device.clone() };
        let info =
            vk::CommandBufferAllocateInfo::default().command_pool(pool).command_buffer_count(1);
        // SAFETY: the pool is the device's.
        let made = unsafe { device.raw.allocate_command_buffers(&info) };
        commands.raw = made
            .and_then(|it| it.first().copied().ok_or(vk::Result::ERROR_UNKNOWN))
            .called("vkAllocateCommandBuffers")?;
        // SAFETY: the command buffer is fresh.
        unsafe {
            device.raw.begin_command_buffer(commands.raw, &vk::CommandBufferBeginInfo::default())
        }
        .called("vkBeginCommandBuffer")?;
        let mut recorder = Recorder { commands: &mut commands };
        write(&mut recorder);
        recorder.barrier();
        // SAFETY: the command buffer is being recorded.
        unsafe { device.raw.end_command_buffer(commands.raw) }.called("vkEndCommandBuffer")?;
        Ok(commands)
    }

    /// Records commands, runs them once and waits for them.
    pub fn run(
        device: &Arc<Device>,
        queue: &Queue,
        write: impl FnOnce(&mut Recorder<'_>),
    ) -> Result<()> {
        let commands = Commands::record(device, queue, write)?;
        let mut fence = Fence::new(device)?;
        device.submit(queue, &commands, &mut fence)?;
        fence.wait()
    }
}

impl Drop for Commands {
    fn drop(&mut self) {
        self.device.idle();
        // SAFETY: the device is idle, so the commands are done. The buffer goes with the pool.
        unsafe { self.device.raw.destroy_command_pool(self.pool, None) };
    }
}

/// Something to draw: triangles without vertex buffers.
#[derive(Clone)]
pub struct Draw {
    /// The pipeline.
    pub pipeline: Rc<Graphics>,
    /// Its push constants, 64 bytes at most.
    pub constants: Vec<u8>,
    /// How many vertices.
    pub vertices: u32,
    /// Left, top, width and height of what may be drawn to; all of it unless told.
    pub scissor: Option<[u32; 4]>,
}

/// Writes commands.
pub struct Recorder<'a> {
    commands: &'a mut Commands,
}

// SAFETY of every block below: the command buffer is being recorded, its family's queue does what
// is recorded, and what it uses is kept in `Commands::kept`.
impl Recorder<'_> {
    fn keep<T: Any>(&mut self, what: &Rc<T>) {
        self.commands.kept.push(what.clone());
    }

    fn with(&self) -> (&ash::Device, vk::CommandBuffer) {
        (&self.commands.device.raw, self.commands.raw)
    }

    /// Everything before is done, and seen by everything after and the host.
    pub fn barrier(&mut self) {
        let every = vk::PipelineStageFlags::ALL_COMMANDS;
        let after = every | vk::PipelineStageFlags::HOST;
        let access = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let order = [vk::MemoryBarrier::default().src_access_mask(access).dst_access_mask(access)];
        let (device, raw) = self.with();
        let flags = vk::DependencyFlags::empty();
        // SAFETY: see above.
        unsafe { device.cmd_pipeline_barrier(raw, every, after, flags, &order, &[], &[]) };
    }

    /// Fills a buffer with a word.
    pub fn fill(&mut self, buffer: &Rc<Buffer>, word: u32) {
        self.keep(buffer);
        let (device, raw) = self.with();
        // SAFETY: see above.
        unsafe { device.cmd_fill_buffer(raw, buffer.raw(), 0, vk::WHOLE_SIZE, word) };
        self.barrier();
    }

    /// Copies as much of a buffer as the other has room for.
    pub fn copy(&mut self, from: &Rc<Buffer>, to: &Rc<Buffer>) {
        self.keep(from);
        self.keep(to);
        let all = [vk::BufferCopy::default().size(from.size().min(to.size()))];
        let (device, raw) = self.with();
        // SAFETY: see above; the region lies in both.
        unsafe { device.cmd_copy_buffer(raw, from.raw(), to.raw(), &all) };
        self.barrier();
    }

    /// Clears a target to a colour and the greatest depth, and draws.
    pub fn draw(&mut self, target: &Rc<Target>, clear: [f32; 4], draws: &[Draw]) {
        self.keep(target);
        let (width, height) = target.extent;
        let area = vk::Rect2D::default().extent(vk::Extent2D { width, height });
        let values = [
            vk::ClearValue { color: vk::ClearColorValue { float32: clear } },
            vk::ClearValue { depth_stencil: vk::ClearDepthStencilValue { depth: 1.0, stencil: 0 } },
        ];
        let begin = vk::RenderPassBeginInfo::default()
            .render_pass(target.pass)
            .framebuffer(target.frame)
            .render_area(area)
            .clear_values(&values);
        // CAST: no device has images so large that a float is not exact.
        let viewport = [vk::Viewport {
            width: width as f32,
            height: height as f32,
            max_depth: 1.0,
            ..Default::default()
        }];
        let (device, raw) = self.with();
        // SAFETY: see above.
        unsafe {
            device.cmd_begin_render_pass(raw, &begin, vk::SubpassContents::INLINE);
            device.cmd_set_viewport(raw, 0, &viewport);
        }
        for draw in draws {
            self.one(draw, area);
        }
        let (device, raw) = self.with();
        // SAFETY: see above.
        unsafe { device.cmd_end_render_pass(raw) };
    }

    fn one(&mut self, draw: &Draw, area: vk::Rect2D) {
        self.keep(&draw.pipeline);
        // CAST: a scissor lies in a target, whose size is far below 2^31.
        let cut = |[x, y, width, height]: [u32; 4]| vk::Rect2D {
            offset: vk::Offset2D { x: x as i32, y: y as i32 },
            extent: vk::Extent2D { width, height },
        };
        let scissor = [draw.scissor.map_or(area, cut)];
        let constants = &draw.constants[..draw.constants.len().min(CONSTANTS as usize)];
        let (device, raw) = self.with();
        let pipeline = &draw.pipeline;
        // SAFETY: see above.
        unsafe {
            device.cmd_set_scissor(raw, 0, &scissor);
            device.cmd_bind_pipeline(raw, vk::PipelineBindPoint::GRAPHICS, pipeline.raw);
            device.cmd_push_constants(raw, pipeline.layout.raw, STAGES, 0, constants);
            device.cmd_draw(raw, draw.vertices, 1, 0, 0);
        }
    }

    /// Copies the colours of a target that was drawn into a buffer.
    pub fn read_colour(&mut self, target: &Rc<Target>, to: &Rc<Buffer>) {
        self.read_image(target, target.colour.raw, vk::ImageAspectFlags::COLOR, to);
    }

    /// Copies the depths of a target that was drawn into a buffer.
    pub fn read_depth(&mut self, target: &Rc<Target>, to: &Rc<Buffer>) {
        if let Some(depth) = &target.depth {
            self.read_image(target, depth.raw, vk::ImageAspectFlags::DEPTH, to);
        }
    }

    fn read_image(
        &mut self,
        target: &Rc<Target>,
        image: vk::Image,
        aspect: vk::ImageAspectFlags,
        to: &Rc<Buffer>,
    ) {
        self.keep(target);
        self.keep(to);
        let layout = vk::ImageLayout::TRANSFER_SRC_OPTIMAL;
        let region = [region(target, aspect, to)];
        let (device, raw) = self.with();
        // SAFETY: see above; drawing left the image in this layout.
        unsafe { device.cmd_copy_image_to_buffer(raw, image, layout, to.raw(), &region) };
        self.barrier();
    }

    /// Copies a buffer into the colours of a target, which can then be read like a drawn one.
    pub fn write_colour(&mut self, from: &Rc<Buffer>, target: &Rc<Target>) {
        self.keep(target);
        self.keep(from);
        let (image, colour) = (target.colour.raw, vk::ImageAspectFlags::COLOR);
        let writable = vk::ImageLayout::TRANSFER_DST_OPTIMAL;
        self.change(image, vk::ImageLayout::UNDEFINED, writable);
        let region = [region(target, colour, from)];
        let (device, raw) = self.with();
        // SAFETY: see above; the image was just put into this layout.
        unsafe { device.cmd_copy_buffer_to_image(raw, from.raw(), image, writable, &region) };
        self.change(image, writable, vk::ImageLayout::TRANSFER_SRC_OPTIMAL);
    }

    fn change(&mut self, image: vk::Image, from: vk::ImageLayout, to: vk::ImageLayout) {
        let every = vk::PipelineStageFlags::ALL_COMMANDS;
        let access = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
        let change = [vk::ImageMemoryBarrier::default()
            .image(image)
            .old_layout(from)
            .new_layout(to)
            .src_access_mask(access)
            .dst_access_mask(access)
            .src_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
            .dst_queue_family_index(vk::QUEUE_FAMILY_IGNORED)
            .subresource_range(whole(vk::ImageAspectFlags::COLOR))];
        let (device, raw) = self.with();
        let flags = vk::DependencyFlags::empty();
        // SAFETY: see above; callers name the layout that the image is in.
        unsafe { device.cmd_pipeline_barrier(raw, every, every, flags, &[], &[], &change) };
    }

    /// Computes every word of the pipeline's buffer.
    pub fn compute(&mut self, compute: &Rc<Compute>) {
        self.keep(compute);
        let (device, raw) = self.with();
        let (at, layout) = (vk::PipelineBindPoint::COMPUTE, compute.layout.raw);
        // SAFETY: see above.
        unsafe {
            device.cmd_bind_pipeline(raw, at, compute.raw);
            device.cmd_bind_descriptor_sets(raw, at, layout, 0, &[compute.set], &[]);
            device.cmd_dispatch(raw, compute.groups, 1, 1);
        }
        self.barrier();
    }

    /// Times `work` by the device's own clock.
    pub fn timed(&mut self, clock: &Rc<Clock>, work: impl FnOnce(&mut Self)) {
        self.keep(clock);
        let (device, raw) = self.with();
        // SAFETY: see above; the pool has two queries.
        unsafe {
            device.cmd_reset_query_pool(raw, clock.stamps, 0, 2);
            let begin = vk::PipelineStageFlags::TOP_OF_PIPE;
            device.cmd_write_timestamp(raw, begin, clock.stamps, 0);
        }
        work(self);
        let (device, raw) = self.with();
        let (to, flags) =
            (clock.memory.raw(), vk::QueryResultFlags::TYPE_64 | vk::QueryResultFlags::WAIT);
        // SAFETY: as above; the clock's memory has room for both.
        unsafe {
            let end = vk::PipelineStageFlags::BOTTOM_OF_PIPE;
            device.cmd_write_timestamp(raw, end, clock.stamps, 1);
            device.cmd_copy_query_pool_results(raw, clock.stamps, 0, 2, to, 0, 8, flags);
        }
    }
}

/// All of a target, to or from a buffer that has room for it.
fn region(target: &Target, aspect: vk::ImageAspectFlags, buffer: &Buffer) -> vk::BufferImageCopy {
    let (width, height) = target.extent;
    let pixel = if aspect.contains(vk::ImageAspectFlags::COLOR) { 4 } else { 2 };
    let needed = u64::from(width) * u64::from(height) * pixel;
    // PANIC: must: the device would go beyond the buffer.
    assert!(buffer.size() >= needed, "{} bytes are no room for a picture", buffer.size());
    let layers = vk::ImageSubresourceLayers::default().aspect_mask(aspect).layer_count(1);
    vk::BufferImageCopy::default().image_subresource(layers).image_extent(vk::Extent3D {
        width,
        height,
        depth: 1,
    })
}
