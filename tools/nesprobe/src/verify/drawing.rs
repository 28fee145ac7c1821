//! Pixels, edges, depth, blending.

use std::rc::Rc;
use std::sync::Arc;

use crate::checks::{Checks, Seen};
use crate::error::Result;
use crate::picture::{
    channels, colour, nearer, replace, Colour, Picture, Pixel, Rectangle, GROUND, SCENE, SIZE,
};
use crate::shaders;
use crate::vk::{Blend, Buffer, Commands, Device, Draw, Graphics, Style, Target, Wish};

/// Blending, and what becomes of a pixel.
type Meeting = (&'static str, Blend, fn(Pixel, &Rectangle) -> Pixel);

const MEETINGS: [Meeting; 4] = [
    ("blend-add", Blend::Add, |a, b| channels(u8::saturating_add)(a, b)),
    ("blend-subtract", Blend::Subtract, |a, b| channels(u8::saturating_sub)(a, b)),
    ("blend-max", Blend::Max, |a, b| channels(u8::max)(a, b)),
    ("blend-alpha", Blend::Alpha, by_alpha),
];

pub fn check(device: &Arc<Device>, checks: &mut Checks) {
    checks.run("pixels", || {
        let expected = Picture::expect(GROUND, &SCENE, replace);
        Ok(Seen::picture(&expected, &draw(device, Style::PLAIN, GROUND, &SCENE)?))
    });
    checks.run("scissor", || scissor(device));
    checks.run("edges", || edges(device));
    checks.run("depth", || {
        let expected = Picture::expect(GROUND, &SCENE, nearer);
        let style = Style { blend: Blend::Replace, depth: true };
        Ok(Seen::picture(&expected, &draw(device, style, GROUND, &SCENE)?))
    });
    checks.run("depth-values", || depth_values(device));
    for (name, blend, meet) in MEETINGS {
        checks.run(name, || {
            let scene = if blend == Blend::Alpha { opaque_or_clear() } else { SCENE };
            let expected = Picture::expect(GROUND, &scene, meet);
            Ok(Seen::picture(
                &expected,
                &draw(device, Style { blend, depth: false }, GROUND, &scene)?,
            ))
        });
    }
}

/// Alphas between 0 and 1 may be rounded either way; those two may not.
fn opaque_or_clear() -> [Rectangle; 8] {
    let mut scene = SCENE;
    for (at, rectangle) in scene.iter_mut().enumerate() {
        rectangle.colour[3] = if at % 3 == 2 { 0 } else { 0xff };
    }
    scene
}

fn by_alpha(below: Pixel, drawn: &Rectangle) -> Pixel {
    if drawn.colour[3] == 0xff {
        return replace(below, drawn);
    }
    below
}

/// Two triangles make a rectangle: each pixel of their common edge is drawn once. A pixel drawn
/// twice would be added to twice.
fn edges(device: &Arc<Device>) -> Result<Seen> {
    let once: Colour = [1, 1, 1, 1];
    let at = [[0, 0, 512, 512], [1, 2, 510, 77], [130, 3, 131, 509], [17, 19, 499, 503]];
    let scene = at.map(|at| Rectangle { at, colour: once, depth: 0 });
    let expected = Picture::expect([0; 4], &scene, channels(u8::saturating_add));
    let style = Style { blend: Blend::Add, depth: false };
    Ok(Seen::picture(&expected, &draw(device, style, [0; 4], &scene)?))
}

/// What is drawn over everything is seen where the scissor leaves it.
fn scissor(device: &Arc<Device>) -> Result<Seen> {
    let expected = Picture::expect(GROUND, &SCENE, replace);
    let target = Target::new(device, (SIZE, SIZE), false)?;
    let pipeline = Graphics::new(device, &target, shaders::RECTANGLE, Style::PLAIN)?;
    let draws = SCENE.map(|it| {
        let [left, top, right, bottom] = it.at;
        let over_everything = Rectangle { at: [0, 0, SIZE, SIZE], ..it };
        let scissor = Some([left, top, right - left, bottom - top]);
        Draw { scissor, ..as_draw(&pipeline, &over_everything) }
    });
    Ok(Seen::picture(&expected, &render(device, &target, GROUND, &draws)?))
}

/// The depths themselves, where they are exact: 0 is 0 and 1 is 65535.
fn depth_values(device: &Arc<Device>) -> Result<Seen> {
    let target = Target::new(device, (SIZE, SIZE), true)?;
    let style = Style { blend: Blend::Replace, depth: true };
    let pipeline = Graphics::new(device, &target, shaders::RECTANGLE, style)?;
    let near = Rectangle { at: [100, 50, 300, 150], colour: GROUND, depth: 0 };
    let buffer = Buffer::new(device, u64::from(SIZE * SIZE * 2), Wish::Host)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.draw(&target, colour(GROUND), &[as_draw(&pipeline, &near)]);
        recorder.read_depth(&target, &buffer);
    })?;
    let bytes = buffer.read()?;
    let count = |value: [u8; 2]| bytes.chunks_exact(2).filter(|it| **it == value).count();
    let got = format!("0={} 65535={}", count([0, 0]), count([0xff, 0xff]));
    let expected = format!("0={} 65535={}", 200 * 100, SIZE * SIZE - 200 * 100);
    Ok(Seen::equal(&expected.clone(), expected, got))
}

/// Draws rectangles and reads the picture back.
fn draw(
    device: &Arc<Device>,
    style: Style,
    ground: Colour,
    scene: &[Rectangle],
) -> Result<Picture> {
    let target = Target::new(device, (SIZE, SIZE), style.depth)?;
    let pipeline = Graphics::new(device, &target, shaders::RECTANGLE, style)?;
    let draws: Vec<Draw> = scene.iter().map(|it| as_draw(&pipeline, it)).collect();
    render(device, &target, ground, &draws)
}

fn as_draw(pipeline: &Rc<Graphics>, rectangle: &Rectangle) -> Draw {
    let constants = rectangle.constants().iter().flat_map(|it| it.to_ne_bytes()).collect();
    Draw { pipeline: pipeline.clone(), constants, vertices: 6, scissor: None }
}

fn render(
    device: &Arc<Device>,
    target: &Rc<Target>,
    ground: Colour,
    draws: &[Draw],
) -> Result<Picture> {
    let buffer = Buffer::new(device, u64::from(SIZE * SIZE * 4), Wish::Host)?;
    Commands::run(device, &device.graphics, |recorder| {
        recorder.draw(target, colour(ground), draws);
        recorder.read_colour(target, &buffer);
    })?;
    Ok(Picture::read(&buffer.read()?))
}
