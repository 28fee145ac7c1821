//! A picture drawn with OpenGL.

use glow::HasContext;

use super::egl::Context;
use crate::error::{Error, Result};
use crate::picture::{colour, Picture, Rectangle, GROUND, SIZE};

const VERTEX: &str = "#version 330 core
uniform vec4 corners;
uniform float depth;
void main() {
    float right = float((50 >> gl_VertexID) & 1);
    float bottom = float((44 >> gl_VertexID) & 1);
    gl_Position = vec4(mix(corners.xy, corners.zw, vec2(right, bottom)), depth * 2.0 - 1.0, 1.0);
}
";

const FRAGMENT: &str = "#version 330 core
uniform vec4 colour;
out vec4 shown;
void main() {
    shown = colour;
}
";

/// How a rectangle meets what is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// It takes its place.
    Replace,
    /// Where it is nearer, it takes its place.
    Nearer,
    /// Both are added.
    Add,
}

/// Something to draw into and with.
///
/// What it makes goes with the context, which outlives it.
pub struct Canvas<'a> {
    gl: &'a glow::Context,
    uniforms: [Option<glow::UniformLocation>; 3],
}

// SAFETY of every block below: the context is current on this thread as long as it is borrowed,
// and every name that is used is one that it made.
impl Canvas<'_> {
    /// A picture with depth, and the two shaders.
    pub fn new(context: &Context) -> Result<Canvas<'_>> {
        let gl = &context.gl;
        attach(gl)?;
        let program = program(gl)?;
        // CAST: a constant, far below 2^31.
        let size = SIZE as i32;
        // SAFETY: see above.
        let uniforms = unsafe {
            let vertices = gl.create_vertex_array().map_err(Error::Gl)?;
            gl.bind_vertex_array(Some(vertices));
            gl.use_program(Some(program));
            gl.viewport(0, 0, size, size);
            ["corners", "colour", "depth"].map(|name| gl.get_uniform_location(program, name))
        };
        Ok(Canvas { gl, uniforms })
    }

    /// Draws rectangles and reads the picture back. Rows begin at -1, as they do with Vulkan.
    pub fn draw(&self, style: Style, scene: &[Rectangle]) -> Result<Picture> {
        self.begin(style);
        for rectangle in scene {
            self.one(rectangle);
        }
        let gl = self.gl;
        let mut bytes = vec![0; (SIZE * SIZE * 4) as usize];
        let into = glow::PixelPackData::Slice(Some(&mut bytes));
        // CAST: a constant, far below 2^31.
        let size = SIZE as i32;
        // SAFETY: see above; the slice has room for the picture.
        let error = unsafe {
            gl.read_pixels(0, 0, size, size, glow::RGBA, glow::UNSIGNED_BYTE, into);
            gl.get_error()
        };
        if error != glow::NO_ERROR {
            return Err(Error::Gl(format!("OpenGL drew with error {error:#x}")));
        }
        Ok(Picture::read(&bytes))
    }

    fn begin(&self, style: Style) {
        let gl = self.gl;
        let [red, green, blue, alpha] = colour(GROUND);
        let set = |what, on| {
            // SAFETY: see above.
            unsafe {
                if on {
                    gl.enable(what)
                } else {
                    gl.disable(what)
                }
            }
        };
        set(glow::BLEND, style == Style::Add);
        set(glow::DEPTH_TEST, style == Style::Nearer);
        // SAFETY: see above.
        unsafe {
            gl.blend_func(glow::ONE, glow::ONE);
            gl.depth_func(glow::LESS);
            gl.clear_color(red, green, blue, alpha);
            gl.clear(glow::COLOR_BUFFER_BIT | glow::DEPTH_BUFFER_BIT);
        }
    }

    fn one(&self, rectangle: &Rectangle) {
        let [left, top, right, bottom, red, green, blue, alpha, far] = rectangle.constants();
        let [corners, colour, depth] = self.uniforms.each_ref().map(Option::as_ref);
        let gl = self.gl;
        // SAFETY: see above.
        unsafe {
            gl.uniform_4_f32(corners, left, top, right, bottom);
            gl.uniform_4_f32(colour, red, green, blue, alpha);
            gl.uniform_1_f32(depth, far);
            gl.draw_arrays(glow::TRIANGLES, 0, 6);
        }
    }
}

/// Colour and depth to draw into.
fn attach(gl: &glow::Context) -> Result<()> {
    let parts =
        [(glow::COLOR_ATTACHMENT0, glow::RGBA8), (glow::DEPTH_ATTACHMENT, glow::DEPTH_COMPONENT24)];
    // CAST: a constant, far below 2^31.
    let size = SIZE as i32;
    // SAFETY: the context is current, and every name is one that it made.
    unsafe {
        let frame = gl.create_framebuffer().map_err(Error::Gl)?;
        gl.bind_framebuffer(glow::FRAMEBUFFER, Some(frame));
        for (attachment, format) in parts {
            let part = gl.create_renderbuffer().map_err(Error::Gl)?;
            gl.bind_renderbuffer(glow::RENDERBUFFER, Some(part));
            gl.renderbuffer_storage(glow::RENDERBUFFER, format, size, size);
            let (frame, kind) = (glow::FRAMEBUFFER, glow::RENDERBUFFER);
            gl.framebuffer_renderbuffer(frame, attachment, kind, Some(part));
        }
        match gl.check_framebuffer_status(glow::FRAMEBUFFER) {
            glow::FRAMEBUFFER_COMPLETE => Ok(()),
            other => Err(Error::Gl(format!("OpenGL takes no such framebuffer: {other:#x}"))),
        }
    }
}

fn program(gl: &glow::Context) -> Result<glow::Program> {
    // SAFETY: the context is current, and every name is one that it made.
    unsafe {
        let program = gl.create_program().map_err(Error::Gl)?;
        for (stage, source) in [(glow::VERTEX_SHADER, VERTEX), (glow::FRAGMENT_SHADER, FRAGMENT)] {
            let shader = gl.create_shader(stage).map_err(Error::Gl)?;
            gl.shader_source(shader, source);
            gl.compile_shader(shader);
            if !gl.get_shader_compile_status(shader) {
                return Err(Error::Gl(gl.get_shader_info_log(shader)));
            }
            gl.attach_shader(program, shader);
        }
        gl.link_program(program);
        if !gl.get_program_link_status(program) {
            return Err(Error::Gl(gl.get_program_info_log(program)));
        }
        Ok(program)
    }
}
