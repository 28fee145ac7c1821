//! Devices, displays and contexts.

use std::ffi::c_void;
use std::rc::Rc;

use glow::HasContext;
use khronos_egl as egl;

use crate::error::{Error, Result};

type Egl = egl::DynamicInstance<egl::EGL1_5>;

/// `EGL_PLATFORM_DEVICE_EXT`.
const PLATFORM_DEVICE: egl::Enum = 0x313F;

/// `EGL_PLATFORM_SURFACELESS_MESA`.
const PLATFORM_SURFACELESS: egl::Enum = 0x31DD;

/// `eglQueryDevicesEXT` of EGL_EXT_device_enumeration.
type QueryDevices = extern "system" fn(egl::Int, *mut *mut c_void, *mut egl::Int) -> egl::Boolean;

/// A current context of OpenGL 3.3 or newer, without a window.
pub struct Context {
    pub(super) gl: glow::Context,
    /// Vendor, renderer, version.
    strings: [String; 3],
    label: String,
    display: egl::Display,
    context: egl::Context,
    surface: Option<egl::Surface>,
    // INVARIANT: dropped last: everything else lies in the library that it keeps loaded.
    egl: Rc<Egl>,
}

impl Context {
    /// On the device of this number, or the first whose renderer has this in its name; unasked,
    /// the first that works.
    pub fn open(wish: Option<&str>) -> Result<Context> {
        // SAFETY: the library named libEGL.so.1 is EGL; starting it has no requirement of its own.
        let egl = unsafe { Egl::load_required_from_filename("libEGL.so.1") };
        let egl = Rc::new(egl.map_err(|error| Error::NoEgl(plain(&error)))?);
        let displays = displays(&egl);
        let number = wish.and_then(|it| it.parse::<usize>().ok());
        let mut seen = Vec::new();
        for (index, (label, display)) in displays.into_iter().enumerate() {
            let is_wanted = number.is_none_or(|it| it == index);
            match Context::on(&egl, label.clone(), display) {
                Ok(context) if is_wanted && (number.is_some() || context.is(wish)) => {
                    return Ok(context);
                }
                Ok(context) => seen.push(format!("{label} is {}", context.strings[1])),
                Err(error) => seen.push(format!("{label}: {error}")),
            }
        }
        Err(nothing(wish, &seen))
    }

    fn is(&self, wish: Option<&str>) -> bool {
        let renderer = self.strings[1].to_lowercase();
        wish.is_none_or(|it| renderer.contains(&it.to_lowercase()))
    }

    fn on(egl: &Rc<Egl>, label: String, display: egl::Display) -> Result<Context> {
        egl.initialize(display).map_err(failed("eglInitialize"))?;
        egl.bind_api(egl::OPENGL_API).map_err(failed("eglBindAPI"))?;
        let wanted =
            [egl::SURFACE_TYPE, egl::PBUFFER_BIT, egl::RENDERABLE_TYPE, egl::OPENGL_BIT, egl::NONE];
        let config =
            egl.choose_first_config(display, &wanted).map_err(failed("eglChooseConfig"))?;
        let config = config.ok_or_else(|| Error::Gl("EGL has no config for OpenGL".to_owned()))?;
        let wanted = [
            egl::CONTEXT_MAJOR_VERSION,
            3,
            egl::CONTEXT_MINOR_VERSION,
            3,
            egl::CONTEXT_OPENGL_PROFILE_MASK,
            egl::CONTEXT_OPENGL_CORE_PROFILE_BIT,
            egl::NONE,
        ];
        let context = egl
            .create_context(display, config, None, &wanted)
            .map_err(failed("eglCreateContext"))?;
        let surface = make_current(egl, display, config, context)?;
        let address = |name: &str| {
            egl.get_proc_address(name).map_or(std::ptr::null(), |it| it as *const c_void)
        };
        // SAFETY: the context is current, and the addresses are those of its functions.
        let gl = unsafe { glow::Context::from_loader_function(address) };
        let names = [glow::VENDOR, glow::RENDERER, glow::VERSION];
        // SAFETY: the context is current.
        let strings = names.map(|name| unsafe { gl.get_parameter_string(name) });
        Ok(Context { gl, strings, label, display, context, surface, egl: egl.clone() })
    }

    /// Vendor, renderer, version.
    pub fn strings(&self) -> &[String; 3] {
        &self.strings
    }

    /// Which display it is on.
    pub fn display(&self) -> &str {
        &self.label
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // What fails here fails at the end of the process.
        let _ = self.egl.make_current(self.display, None, None, None);
        if let Some(surface) = self.surface {
            let _ = self.egl.destroy_surface(self.display, surface);
        }
        let _ = self.egl.destroy_context(self.display, self.context);
        let _ = self.egl.terminate(self.display);
    }
}

/// Makes a context current without a surface, or with one of a single pixel where it must have one.
fn make_current(
    egl: &Egl,
    display: egl::Display,
    config: egl::Config,
    context: egl::Context,
) -> Result<Option<egl::Surface>> {
    if egl.make_current(display, None, None, Some(context)).is_ok() {
        return Ok(None);
    }
    let size = [egl::WIDTH, 1, egl::HEIGHT, 1, egl::NONE];
    let surface = egl
        .create_pbuffer_surface(display, config, &size)
        .map_err(failed("eglCreatePbufferSurface"))?;
    egl.make_current(display, Some(surface), Some(surface), Some(context))
        .map_err(failed("eglMakeCurrent"))?;
    Ok(Some(surface))
}

/// A display for each device; where devices cannot be listed, the one without a surface.
fn displays(egl: &Egl) -> Vec<(String, egl::Display)> {
    let on = |platform, native| {
        // SAFETY: the native display is a device that EGL listed, or the default one.
        unsafe { egl.get_platform_display(platform, native, &[egl::ATTRIB_NONE]) }.ok()
    };
    let devices = devices(egl).into_iter().enumerate();
    let mut found: Vec<_> = devices
        .filter_map(|(index, it)| Some((format!("device {index}"), on(PLATFORM_DEVICE, it)?)))
        .collect();
    if found.is_empty() {
        let surfaceless = on(PLATFORM_SURFACELESS, egl::DEFAULT_DISPLAY);
        found.extend(surfaceless.map(|it| ("no device, surfaceless".to_owned(), it)));
    }
    found
}

fn devices(egl: &Egl) -> Vec<*mut c_void> {
    let Some(function) = egl.get_proc_address("eglQueryDevicesEXT") else {
        return Vec::new();
    };
    // SAFETY: EGL_EXT_device_enumeration gives the function of this name this type; EGL returns
    // null, which is None here, for a name that it does not know.
    let query: QueryDevices = unsafe { std::mem::transmute(function) };
    let mut devices = [std::ptr::null_mut(); 64];
    let mut count = 0;
    // The list has room for 64, which is what the function is told.
    if query(64, devices.as_mut_ptr(), &mut count) != egl::TRUE {
        return Vec::new();
    }
    devices.into_iter().take(usize::try_from(count).unwrap_or(0)).collect()
}

fn nothing(wish: Option<&str>, seen: &[String]) -> Error {
    let seen = if seen.is_empty() { "EGL lists no device".to_owned() } else { seen.join("; ") };
    Error::NoDevice(match wish {
        Some(wish) => format!("no device with OpenGL is {wish:?}: {seen}"),
        None => format!(
            "no device has OpenGL: {seen}; install a driver, or name its manifest in \
             __EGL_VENDOR_LIBRARY_FILENAMES (NVIDIA's is 10_nvidia.json)"
        ),
    })
}

fn failed(call: &'static str) -> impl Fn(egl::Error) -> Error {
    move |error| Error::Gl(format!("{call}: {error}"))
}

fn plain<E: std::error::Error>(error: &E) -> String {
    let source = error.source().map(ToString::to_string);
    source.unwrap_or_else(|| error.to_string())
}
