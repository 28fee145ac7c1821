//! SPIR-V that `build.rs` made of `shaders/`.

macro_rules! spirv {
    ($name:literal) => {
        include_bytes!(concat!(env!("OUT_DIR"), "/", $name, ".spv"))
    };
}

/// A triangle that covers everything.
pub const SCREEN: &[u8] = spirv!("screen.vert");
/// Arithmetic, as much as is asked for.
pub const COST: &[u8] = spirv!("cost.frag");
/// A rectangle.
pub const RECTANGLE: [&[u8]; 2] = [spirv!("rectangle.vert"), spirv!("rectangle.frag")];
/// A function of each word of a buffer.
pub const SCRAMBLE: &[u8] = spirv!("scramble.comp");
