//! Compiles `shaders/` to SPIR-V.

use std::path::{Path, PathBuf};
use std::{env, fs};

use naga::back::spv;
use naga::front::glsl;
use naga::valid::{Capabilities, ValidationFlags, Validator};
use naga::ShaderStage;

fn main() {
    println!("cargo:rerun-if-changed=shaders");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for entry in fs::read_dir("shaders").expect("read shaders/") {
        let path = entry.expect("read shaders/").path();
        let words = compile(&path).unwrap_or_else(|why| panic!("{}: {why}", path.display()));
        let name = path.file_name().expect("a file has a name").to_string_lossy().into_owned();
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        fs::write(out.join(format!("{name}.spv")), bytes).expect("write SPIR-V");
    }
}

fn compile(path: &Path) -> Result<Vec<u32>, String> {
    let stage = match path.extension().and_then(|it| it.to_str()) {
        Some("vert") => ShaderStage::Vertex,
        Some("frag") => ShaderStage::Fragment,
        Some("comp") => ShaderStage::Compute,
        _ => return Err("its name ends in neither .vert, .frag nor .comp".to_owned()),
    };
    let source = fs::read_to_string(path).map_err(|error| error.to_string())?;
    let module = glsl::Frontend::default()
        .parse(&glsl::Options::from(stage), &source)
        .map_err(|error| error.emit_to_string(&source))?;
    let info = Validator::new(ValidationFlags::all(), Capabilities::PUSH_CONSTANT)
        .validate(&module)
        .map_err(|error| error.emit_to_string(&source))?;
    // What is written is what is run: naga neither turns the picture over nor
    // counts the turns of a loop to prove that it ends.
    let options = spv::Options {
        flags: spv::WriterFlags::empty(),
        force_loop_bounding: false,
        ..spv::Options::default()
    };
    spv::write_vec(&module, &info, &options, None).map_err(|error| error.to_string())
}
