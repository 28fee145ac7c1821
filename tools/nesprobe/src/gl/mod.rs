//! `--gl`: OpenGL through EGL, by exact value and without a screen.
//!
//! - [`egl`]: devices, displays and contexts
//! - [`draw`]: a picture drawn with OpenGL

mod draw;
mod egl;

use serde::Serialize;

use crate::checks::{Checks, Seen};
use crate::error::Result;
use crate::picture::{channels, nearer, replace, Picture, GROUND, SCENE};
use crate::report;
use draw::{Canvas, Style};
use egl::Context;

#[derive(Serialize)]
struct About {
    vendor: String,
    renderer: String,
    version: String,
    display: String,
}

/// Runs every check. Whether all went well.
pub fn verify(wish: Option<&str>, as_json: bool) -> Result<bool> {
    let context = Context::open(wish)?;
    let canvas = Canvas::new(&context)?;
    let [vendor, renderer, version] = context.strings().clone();
    let about = About { vendor, renderer, version, display: context.display().to_owned() };
    if !as_json {
        report::line(format_args!("vendor     {}", about.vendor));
        report::line(format_args!("renderer   {}", about.renderer));
        report::line(format_args!("version    {}", about.version));
        report::line(format_args!("display    {}", about.display));
    }
    let mut checks = Checks::new(as_json);
    checks.run("gl-pixels", || {
        let expected = Picture::expect(GROUND, &SCENE, replace);
        Ok(Seen::picture(&expected, &canvas.draw(Style::Replace, &SCENE)?))
    });
    checks.run("gl-depth", || {
        let expected = Picture::expect(GROUND, &SCENE, nearer);
        Ok(Seen::picture(&expected, &canvas.draw(Style::Nearer, &SCENE)?))
    });
    checks.run("gl-blend-add", || {
        let expected = Picture::expect(GROUND, &SCENE, channels(u8::saturating_add));
        Ok(Seen::picture(&expected, &canvas.draw(Style::Add, &SCENE)?))
    });
    checks.end(&about)
}
