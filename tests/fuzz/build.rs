//! The guest module's own interpreter of the schema, in user space and with sanitizers.

use std::path::Path;
use std::process::Command;

fn main() {
    let module = Path::new("../../guest-module");
    let sources = ["tests/gather.c", "rules.c", "schema.c"].map(|file| module.join(file));
    for file in ["schema.h", "virtio_nvguest.h", "tests/shim.h", "tests/memory.h"] {
        println!("cargo::rerun-if-changed={}", module.join(file).display());
    }
    sources.iter().for_each(|file| println!("cargo::rerun-if-changed={}", file.display()));
    let out = Path::new(&std::env::var_os("OUT_DIR").expect("cargo says where")).join("gather");
    let words = ["-std=gnu11", "-O1", "-g", "-fsanitize=address,undefined"];
    let built = Command::new(std::env::var_os("CC").unwrap_or_else(|| "cc".into()))
        .args(words)
        // A packed one runs where no compiler's libraries are.
        .args(["-static-libasan", "-static-libubsan"])
        .args(["-fno-sanitize-recover=all", "-Wall", "-Wextra", "-I"])
        .arg(module)
        .arg("-o")
        .arg(&out)
        .args(sources)
        .status()
        .expect("a C compiler");
    assert!(built.success(), "the guest module's interpreter does not build");
    println!("cargo::rustc-env=NVGUEST_GATHER={}", out.display());
}
