//! Scenes whose every pixel is known, and pictures to compare.
//!
//! Everything lies on whole pixels of a picture whose size is a power of two, and every colour is
//! one that eight bits hold: what must come out is exact on any conformant implementation.

use std::collections::BTreeMap;

/// Width and height.
pub const SIZE: u32 = 512;

/// Red, green, blue, alpha.
pub type Colour = [u8; 4];

/// A rectangle of one colour.
#[derive(Debug, Clone, Copy)]
pub struct Rectangle {
    /// Left, top, right, bottom, in pixels.
    pub at: [u32; 4],
    /// Its colour.
    pub colour: Colour,
    /// How far it is, in eighths of all that can be seen.
    pub depth: u8,
}

const fn rectangle(at: [u32; 4], colour: Colour, depth: u8) -> Rectangle {
    Rectangle { at, colour, depth }
}

/// What is there before anything is drawn.
pub const GROUND: Colour = [0x10, 0x20, 0x30, 0xff];

/// Rectangles that hide parts of one another, with edges at odd pixels.
pub const SCENE: [Rectangle; 8] = [
    rectangle([0, 0, 256, 256], [0xff, 0x00, 0x00, 0xff], 6),
    rectangle([128, 64, 384, 320], [0x00, 0xff, 0x00, 0xff], 2),
    rectangle([37, 101, 411, 203], [0x00, 0x00, 0xff, 0xff], 4),
    rectangle([300, 300, 511, 512], [0xff, 0xff, 0x00, 0x80], 1),
    rectangle([201, 7, 202, 509], [0x00, 0xff, 0xff, 0x40], 5),
    rectangle([3, 401, 499, 402], [0xff, 0x00, 0xff, 0x01], 3),
    rectangle([350, 250, 450, 350], [0x7f, 0x80, 0x81, 0xfe], 0),
    rectangle([511, 0, 512, 1], [0xff, 0xff, 0xff, 0x00], 7),
];

impl Rectangle {
    /// What the shaders are told: corners in [-1, 1], colour, depth.
    pub fn constants(&self) -> [f32; 9] {
        // CAST: exact; sizes are small, and the picture's is a power of two.
        let [left, top, right, bottom] =
            self.at.map(|pixel| pixel as f32 * 2.0 / SIZE as f32 - 1.0);
        let [red, green, blue, alpha] = colour(self.colour);
        let depth = f32::from(self.depth) / 8.0;
        [left, top, right, bottom, red, green, blue, alpha, depth]
    }

    fn covers(&self, x: u32, y: u32) -> bool {
        let [left, top, right, bottom] = self.at;
        (left..right).contains(&x) && (top..bottom).contains(&y)
    }
}

/// A colour as the shaders have it.
pub fn colour(bytes: Colour) -> [f32; 4] {
    bytes.map(|byte| f32::from(byte) / 255.0)
}

/// A pixel while it is drawn to.
#[derive(Debug, Clone, Copy)]
pub struct Pixel {
    /// Its colour.
    pub colour: Colour,
    /// The depth of what it shows, in eighths.
    pub depth: u8,
}

/// Colours, row by row.
#[derive(Debug, PartialEq, Eq)]
pub struct Picture(Vec<Colour>);

impl Picture {
    /// What was read from an implementation.
    pub fn read(bytes: &[u8]) -> Picture {
        let pixel = |it: &[u8]| [it[0], it[1], it[2], it[3]];
        Picture(bytes.chunks_exact(4).map(pixel).collect())
    }

    /// What rectangles must give, drawn in this order, where `meet` says what becomes of a pixel.
    pub fn expect(
        ground: Colour,
        scene: &[Rectangle],
        meet: impl Fn(Pixel, &Rectangle) -> Pixel,
    ) -> Picture {
        let pixel = |at: u32| {
            let covering = scene.iter().filter(|it| it.covers(at % SIZE, at / SIZE));
            covering.fold(Pixel { colour: ground, depth: 8 }, &meet).colour
        };
        Picture((0..SIZE * SIZE).map(pixel).collect())
    }

    /// How many pixels have each colour.
    pub fn counts(&self) -> BTreeMap<Colour, u32> {
        let mut counts = BTreeMap::new();
        for colour in &self.0 {
            *counts.entry(*colour).or_default() += 1;
        }
        counts
    }

    /// The counts as text.
    pub fn tally(&self) -> String {
        let name = |it: &Colour| it.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        let counts = self.counts();
        let mut each: Vec<String> = counts
            .iter()
            .take(16)
            .map(|(colour, count)| format!("{}={count}", name(colour)))
            .collect();
        if counts.len() > 16 {
            each.push(format!("and {} more", counts.len() - 16));
        }
        each.join(" ")
    }

    /// Where two pictures differ first.
    pub fn first_difference(&self, other: &Picture) -> Option<String> {
        let pairs = self.0.iter().zip(&other.0);
        let at = pairs.clone().position(|(a, b)| a != b)?;
        let count = pairs.filter(|(a, b)| a != b).count();
        let (x, y) = (at % SIZE as usize, at / SIZE as usize);
        Some(format!("{count} pixels differ, the first at {x},{y}"))
    }
}

/// The colour drawn last stays.
pub fn replace(_: Pixel, drawn: &Rectangle) -> Pixel {
    Pixel { colour: drawn.colour, depth: drawn.depth }
}

/// What is nearer stays.
pub fn nearer(below: Pixel, drawn: &Rectangle) -> Pixel {
    if drawn.depth < below.depth {
        replace(below, drawn)
    } else {
        below
    }
}

/// Each channel by itself.
pub fn channels(f: impl Fn(u8, u8) -> u8) -> impl Fn(Pixel, &Rectangle) -> Pixel {
    move |below, drawn| {
        let colour = std::array::from_fn(|at| f(below.colour[at], drawn.colour[at]));
        Pixel { colour, depth: below.depth }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scene_shows_what_was_drawn_last() {
        let counts = Picture::expect(GROUND, &SCENE, replace).counts();
        assert_eq!(counts[&[0xff, 0xff, 0xff, 0x00]], 1);
        // 100 x 100, of which nothing is hidden.
        assert_eq!(counts[&[0x7f, 0x80, 0x81, 0xfe]], 10_000);
        // 496 pixels in a row, hidden nowhere.
        assert_eq!(counts[&[0xff, 0x00, 0xff, 0x01]], 496);
        assert_eq!(counts.values().sum::<u32>(), SIZE * SIZE);
        assert_eq!(counts.len(), 9);
    }

    #[test]
    fn corners_on_pixels_are_exact() {
        let [left, top, right, bottom, ..] =
            Rectangle { at: [0, 128, 511, 512], ..SCENE[0] }.constants();
        assert_eq!((left, top, bottom), (-1.0, -0.5, 1.0));
        assert_eq!((right + 1.0) * 256.0, 511.0);
    }

    #[test]
    fn a_difference_is_placed() {
        let one = Picture::expect(GROUND, &[], replace);
        let other = Picture::expect(GROUND, &[Rectangle { at: [7, 2, 9, 3], ..SCENE[0] }], replace);
        assert_eq!(one.first_difference(&other).unwrap(), "2 pixels differ, the first at 7,2");
        assert_eq!(one.first_difference(&one), None);
    }
}
