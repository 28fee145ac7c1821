//! Render targets and pipelines.

use std::rc::Rc;
use std::sync::Arc;

use ash::vk;

use super::memory::Image;
use super::{Buffer, Device};
use crate::error::{Called, Result};

/// The format of every colour: a byte for each of red, green, blue, alpha.
const COLOUR: vk::Format = vk::Format::R8G8B8A8_UNORM;

/// The one format of depth that every device has.
const DEPTH: vk::Format = vk::Format::D16_UNORM;

/// Bytes of push constants that every pipeline has.
pub(super) const CONSTANTS: u32 = 64;

/// The stages that see them.
pub(super) const STAGES: vk::ShaderStageFlags = vk::ShaderStageFlags::from_raw(
    vk::ShaderStageFlags::VERTEX.as_raw() | vk::ShaderStageFlags::FRAGMENT.as_raw(),
);

/// Something to draw into: colour and, if asked for, depth.
pub struct Target {
    pub(super) pass: vk::RenderPass,
    pub(super) frame: vk::Framebuffer,
    pub(super) colour: Image,
    pub(super) depth: Option<Image>,
    /// Its width and height in pixels.
    pub extent: (u32, u32),
    device: Arc<Device>,
}

impl Target {
    /// A target of this size.
    pub fn new(device: &Arc<Device>, extent: (u32, u32), with_depth: bool) -> Result<Rc<Target>> {
        let colour = Image::new(device, COLOUR, extent, vk::ImageAspectFlags::COLOR)?;
        let depth = with_depth
            .then(|| Image::new(device, DEPTH, extent, vk::ImageAspectFlags::DEPTH))
            .transpose()?;
        let pass = render_pass(device, with_depth)?;
        let views: Vec<_> =
            [Some(&colour), depth.as_ref()].into_iter().flatten().map(|it| it.view).collect();
        let info = vk::FramebufferCreateInfo::default()
            .render_pass(pass)
            .attachments(&views)
            .width(extent.0)
            .height(extent.1)
            .layers(1);
        // SAFETY: the views are of the pass's formats and of this size.
        let frame = unsafe { device.raw.create_framebuffer(&info, None) };
        let frame = frame.called("vkCreateFramebuffer").inspect_err(|_| {
            // SAFETY: nothing uses the pass.
            unsafe { device.raw.destroy_render_pass(pass, None) };
        })?;
        Ok(Rc::new(Target { pass, frame, colour, depth, extent, device: device.clone() }))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // SAFETY: Commands that use the target own it, so none is left.
        unsafe {
            self.device.raw.destroy_framebuffer(self.frame, None);
            self.device.raw.destroy_render_pass(self.pass, None);
        }
    }
}

/// Clears, draws, and leaves the attachments ready to be copied from.
fn render_pass(device: &Device, with_depth: bool) -> Result<vk::RenderPass> {
    let attachment = |format| {
        vk::AttachmentDescription::default()
            .format(format)
            .samples(vk::SampleCountFlags::TYPE_1)
            .load_op(vk::AttachmentLoadOp::CLEAR)
            .store_op(vk::AttachmentStoreOp::STORE)
            .final_layout(vk::ImageLayout::TRANSFER_SRC_OPTIMAL)
    };
    let attachments = [attachment(COLOUR), attachment(DEPTH)];
    let used = if with_depth { &attachments[..] } else { &attachments[..1] };
    let colours = [vk::AttachmentReference::default()
        .attachment(0)
        .layout(vk::ImageLayout::COLOR_ATTACHMENT_OPTIMAL)];
    let depth = vk::AttachmentReference::default()
        .attachment(1)
        .layout(vk::ImageLayout::DEPTH_STENCIL_ATTACHMENT_OPTIMAL);
    let mut subpass = vk::SubpassDescription::default().color_attachments(&colours);
    if with_depth {
        subpass = subpass.depth_stencil_attachment(&depth);
    }
    let subpasses = [subpass];
    let every = vk::PipelineStageFlags::ALL_COMMANDS;
    let drawing = vk::PipelineStageFlags::ALL_GRAPHICS;
    let access = vk::AccessFlags::MEMORY_READ | vk::AccessFlags::MEMORY_WRITE;
    let order = vk::SubpassDependency::default().src_access_mask(access).dst_access_mask(access);
    let outside = vk::SUBPASS_EXTERNAL;
    let dependencies = [
        order.src_subpass(outside).src_stage_mask(every).dst_subpass(0).dst_stage_mask(drawing),
        order.src_subpass(0).src_stage_mask(drawing).dst_subpass(outside).dst_stage_mask(every),
    ];
    let info = vk::RenderPassCreateInfo::default()
        .attachments(used)
        .subpasses(&subpasses)
        .dependencies(&dependencies);
    // SAFETY: what `info` points to outlives the call.
    unsafe { device.raw.create_render_pass(&info, None) }.called("vkCreateRenderPass")
}

/// How a colour meets the one that is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blend {
    /// It takes its place.
    Replace,
    /// Both are added.
    Add,
    /// It is taken from the one that is there.
    Subtract,
    /// The greater of each channel.
    Max,
    /// By its alpha.
    Alpha,
}

/// What a graphics pipeline does, besides its shaders.
#[derive(Debug, Clone, Copy)]
pub struct Style {
    /// How colours meet.
    pub blend: Blend,
    /// Whether only what is nearer is drawn.
    pub depth: bool,
}

impl Style {
    /// The colour drawn last stays.
    pub const PLAIN: Style = Style { blend: Blend::Replace, depth: false };

    fn attachment(self) -> vk::PipelineColorBlendAttachmentState {
        use vk::{BlendFactor as Factor, BlendOp as Op};
        let (from, onto, op) = match self.blend {
            Blend::Replace => (Factor::ONE, Factor::ZERO, Op::ADD),
            Blend::Add => (Factor::ONE, Factor::ONE, Op::ADD),
            Blend::Subtract => (Factor::ONE, Factor::ONE, Op::REVERSE_SUBTRACT),
            Blend::Max => (Factor::ONE, Factor::ONE, Op::MAX),
            Blend::Alpha => (Factor::SRC_ALPHA, Factor::ONE_MINUS_SRC_ALPHA, Op::ADD),
        };
        vk::PipelineColorBlendAttachmentState::default()
            .blend_enable(self.blend != Blend::Replace)
            .src_color_blend_factor(from)
            .dst_color_blend_factor(onto)
            .color_blend_op(op)
            .src_alpha_blend_factor(from)
            .dst_alpha_blend_factor(onto)
            .alpha_blend_op(op)
            .color_write_mask(vk::ColorComponentFlags::RGBA)
    }
}

/// A graphics pipeline without vertex buffers and descriptors: push constants are all it has.
pub struct Graphics {
    pub(super) raw: vk::Pipeline,
    pub(super) layout: Layout,
    device: Arc<Device>,
}

impl Graphics {
    /// A pipeline of two shaders for targets such as this one.
    pub fn new(
        device: &Arc<Device>,
        target: &Target,
        shaders: [&[u8]; 2],
        style: Style,
    ) -> Result<Rc<Graphics>> {
        let layout = Layout::new(device, &[])?;
        let [vertex, fragment] = shaders;
        let (vertex, fragment) = (Shader::new(device, vertex)?, Shader::new(device, fragment)?);
        let stages = [
            vertex.stage(vk::ShaderStageFlags::VERTEX),
            fragment.stage(vk::ShaderStageFlags::FRAGMENT),
        ];
        let vertices = vk::PipelineVertexInputStateCreateInfo::default();
        let triangles = vk::PipelineInputAssemblyStateCreateInfo::default()
            .topology(vk::PrimitiveTopology::TRIANGLE_LIST);
        let viewport =
            vk::PipelineViewportStateCreateInfo::default().viewport_count(1).scissor_count(1);
        let raster = vk::PipelineRasterizationStateCreateInfo::default().line_width(1.0);
        let samples = vk::PipelineMultisampleStateCreateInfo::default()
            .rasterization_samples(vk::SampleCountFlags::TYPE_1);
        let depth = vk::PipelineDepthStencilStateCreateInfo::default()
            .depth_test_enable(style.depth)
            .depth_write_enable(style.depth)
            .depth_compare_op(vk::CompareOp::LESS);
        let attachments = [style.attachment()];
        let blend = vk::PipelineColorBlendStateCreateInfo::default().attachments(&attachments);
        let dynamic = vk::PipelineDynamicStateCreateInfo::default()
            .dynamic_states(&[vk::DynamicState::VIEWPORT, vk::DynamicState::SCISSOR]);
        let info = [vk::GraphicsPipelineCreateInfo::default()
            .stages(&stages)
            .vertex_input_state(&vertices)
            .input_assembly_state(&triangles)
            .viewport_state(&viewport)
            .rasterization_state(&raster)
            .multisample_state(&samples)
            .depth_stencil_state(&depth)
            .color_blend_state(&blend)
            .dynamic_state(&dynamic)
            .layout(layout.raw)
            .render_pass(target.pass)];
        // SAFETY: what `info` points to outlives the call; the shaders are ours and have the
        // push constants of the layout.
        let made =
            unsafe { device.raw.create_graphics_pipelines(vk::PipelineCache::null(), &info, None) };
        let raw = only(made).called("vkCreateGraphicsPipelines")?;
        Ok(Rc::new(Graphics { raw, layout, device: device.clone() }))
    }
}

impl Drop for Graphics {
    fn drop(&mut self) {
        // SAFETY: Commands that use the pipeline own it, so none is left.
        unsafe { self.device.raw.destroy_pipeline(self.raw, None) };
    }
}

/// Invocations of a group of our compute shaders.
const GROUP: u64 = 64;

/// A compute pipeline over one buffer, with an invocation for each of its words.
pub struct Compute {
    pub(super) raw: vk::Pipeline,
    pub(super) groups: u32,
    pub(super) layout: Layout,
    pub(super) set: vk::DescriptorSet,
    pool: vk::DescriptorPool,
    _buffer: Rc<Buffer>,
    device: Arc<Device>,
}

impl Compute {
    /// A pipeline of one shader, whose binding 0 is the buffer.
    pub fn new(device: &Arc<Device>, shader: &[u8], buffer: &Rc<Buffer>) -> Result<Rc<Compute>> {
        let binding = vk::DescriptorSetLayoutBinding::default()
            .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(1)
            .stage_flags(vk::ShaderStageFlags::COMPUTE);
        let layout = Layout::new(device, &[binding])?;
        let shader = Shader::new(device, shader)?;
        let info = [vk::ComputePipelineCreateInfo::default()
            .stage(shader.stage(vk::ShaderStageFlags::COMPUTE))
            .layout(layout.raw)];
        // SAFETY: what `info` points to outlives the call; the shader is ours and has the binding.
        let made =
            unsafe { device.raw.create_compute_pipelines(vk::PipelineCache::null(), &info, None) };
        let raw = only(made).called("vkCreateComputePipelines")?;
        let mut compute = Compute {
            raw,
            // CAST: a buffer of 2^40 bytes is none that we make.
            groups: (buffer.size() / 4 / GROUP) as u32,
            layout,
            set: vk::DescriptorSet::null(),
            pool: vk::DescriptorPool::null(),
            _buffer: buffer.clone(),
            device: device.clone(),
        };
        compute.describe(buffer)?;
        Ok(Rc::new(compute))
    }

    fn describe(&mut self, buffer: &Buffer) -> Result<()> {
        let device = &self.device.raw;
        let sizes = [vk::DescriptorPoolSize::default()
            .ty(vk::DescriptorType::STORAGE_BUFFER)
            .descriptor_count(1)];
        let info = vk::DescriptorPoolCreateInfo::default().max_sets(1).pool_sizes(&sizes);
        // SAFETY: what `info` points to outlives the call.
        self.pool = unsafe { device.create_descriptor_pool(&info, None) }
            .called("vkCreateDescriptorPool")?;
        let layouts = [self.layout.set];
        let info = vk::DescriptorSetAllocateInfo::default()
            .descriptor_pool(self.pool)
            .set_layouts(&layouts);
        // SAFETY: the pool is fresh and has room for the one set.
        let sets = unsafe { device.allocate_descriptor_sets(&info) };
        self.set =
            only(sets.map_err(|error| (Vec::new(), error))).called("vkAllocateDescriptorSets")?;
        let whole =
            [vk::DescriptorBufferInfo::default().buffer(buffer.raw()).range(vk::WHOLE_SIZE)];
        let write = [vk::WriteDescriptorSet::default()
            .dst_set(self.set)
            .descriptor_type(vk::DescriptorType::STORAGE_BUFFER)
            .buffer_info(&whole)];
        // SAFETY: no submission uses the set yet.
        unsafe { device.update_descriptor_sets(&write, &[]) };
        Ok(())
    }
}

impl Drop for Compute {
    fn drop(&mut self) {
        // SAFETY: Commands that use the pipeline own it, so none is left; the set goes with the
        // pool, and a null pool is none.
        unsafe {
            self.device.raw.destroy_descriptor_pool(self.pool, None);
            self.device.raw.destroy_pipeline(self.raw, None);
        }
    }
}

/// What a pipeline is given: push constants, and a set of descriptors for compute.
pub(super) struct Layout {
    pub(super) raw: vk::PipelineLayout,
    set: vk::DescriptorSetLayout,
    device: Arc<Device>,
}

impl Layout {
    fn new(
        device: &Arc<Device>,
        bindings: &[vk::DescriptorSetLayoutBinding<'_>],
    ) -> Result<Layout> {
        let info = vk::DescriptorSetLayoutCreateInfo::default().bindings(bindings);
        // SAFETY: what `info` points to outlives the call.
        let set = unsafe { device.raw.create_descriptor_set_layout(&info, None) }
            .called("vkCreateDescriptorSetLayout")?;
        let mut layout = Layout { raw: vk::PipelineLayout::null(), set, device: device.clone() };
        let sets = [set];
        let constants = [vk::PushConstantRange::default().stage_flags(STAGES).size(CONSTANTS)];
        let info = vk::PipelineLayoutCreateInfo::default()
            .set_layouts(&sets)
            .push_constant_ranges(&constants);
        // SAFETY: as above; every device has 128 bytes of push constants.
        layout.raw = unsafe { device.raw.create_pipeline_layout(&info, None) }
            .called("vkCreatePipelineLayout")?;
        Ok(layout)
    }
}

impl Drop for Layout {
    fn drop(&mut self) {
        // SAFETY: the pipeline that owns the layout is gone; a null layout is none.
        unsafe {
            self.device.raw.destroy_pipeline_layout(self.raw, None);
            self.device.raw.destroy_descriptor_set_layout(self.set, None);
        }
    }
}

/// A shader module, which only lives until its pipeline is made.
struct Shader<'a> {
    raw: vk::ShaderModule,
    device: &'a Device,
}

impl<'a> Shader<'a> {
    fn new(device: &'a Device, bytes: &[u8]) -> Result<Shader<'a>> {
        let word = |it: &[u8]| it.iter().rev().fold(0, |sum, byte| sum << 8 | u32::from(*byte));
        let words: Vec<u32> = bytes.chunks_exact(4).map(word).collect();
        let info = vk::ShaderModuleCreateInfo::default().code(&words);
        // SAFETY: the words are SPIR-V that naga made and validated when this was built.
        let raw = unsafe { device.raw.create_shader_module(&info, None) };
        Ok(Shader { raw: raw.called("vkCreateShaderModule")?, device })
    }

    fn stage(&self, stage: vk::ShaderStageFlags) -> vk::PipelineShaderStageCreateInfo<'static> {
        vk::PipelineShaderStageCreateInfo::default().stage(stage).module(self.raw).name(c"main")
    }
}

impl Drop for Shader<'_> {
    fn drop(&mut self) {
        // SAFETY: a pipeline does not need its modules once it is made.
        unsafe { self.device.raw.destroy_shader_module(self.raw, None) };
    }
}

/// The one handle of a call that makes several.
fn only<T>(
    made: std::result::Result<Vec<T>, (Vec<T>, vk::Result)>,
) -> std::result::Result<T, vk::Result> {
    let made = made.map_err(|(_, error)| error)?;
    made.into_iter().next().ok_or(vk::Result::ERROR_UNKNOWN)
}
