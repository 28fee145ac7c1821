//! Embeds the checked-in profiles: a table of (file name, text).

use std::fmt::Write as _;
use std::path::Path;

fn main() {
    println!("cargo::rerun-if-changed=releases");
    let root = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&root).join("releases");
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("the crate has a folder of releases")
        .map(|entry| entry.expect("the folder can be read").file_name())
        .map(|name| name.to_string_lossy().into_owned())
        .filter(|name| name.ends_with(".toml"))
        .collect();
    names.sort();
    let mut table = String::from("&[\n");
    for name in names {
        let path = folder.join(&name);
        println!("cargo::rerun-if-changed={}", path.display());
        let _ = writeln!(table, "({name:?}, include_str!({:?})),", path.display().to_string());
    }
    table.push_str("]\n");
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("releases.rs"), table).expect("OUT_DIR is writable");
}
