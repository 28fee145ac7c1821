//! The guest module's own interpreter of the schema becomes part of the library.

fn main() {
    let module = "../../guest-module";
    for file in ["rules.c", "schema.c", "schema.h", "virtio_nvguest.h", "tests/shim.h"] {
        println!("cargo::rerun-if-changed={module}/{file}");
    }
    println!("cargo::rerun-if-changed=c/call.c");
    cc::Build::new()
        .file(format!("{module}/rules.c"))
        .file(format!("{module}/schema.c"))
        .file("c/call.c")
        .include(module)
        .std("gnu11")
        .flag("-Wno-unused-parameter")
        .flag("-Wno-sign-compare")
        .flag("-fvisibility=hidden")
        .opt_level(2)
        .compile("nvguest_schema");
}
