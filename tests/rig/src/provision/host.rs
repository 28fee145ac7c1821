//! The few packages that the machine itself must have.

use std::path::Path;
use std::process::Command;

use anyhow::{bail, Context, Result};

/// A program that the rig calls, and the package that brings it.
const PROGRAMS: [(&str, &str); 7] = [
    ("cc", "gcc"),
    ("dpkg-deb", "dpkg"),
    ("make", "make"),
    ("tar", "tar"),
    ("unshare", "util-linux"),
    ("xz", "xz-utils"),
    ("zstd", "zstd"),
];

/// Vulkan and OpenGL in software, for the tests of what runs on them, and the
/// package that brings each part.
const RENDERERS: [(&str, &str); 5] = [
    ("/usr/lib/x86_64-linux-gnu/libvulkan.so.1", "libvulkan1"),
    ("/usr/lib/x86_64-linux-gnu/libvulkan_lvp.so", "mesa-vulkan-drivers"),
    ("/usr/lib/x86_64-linux-gnu/libEGL.so.1", "libegl1"),
    ("/usr/lib/x86_64-linux-gnu/libEGL_mesa.so.0", "libegl-mesa0"),
    ("/usr/lib/x86_64-linux-gnu/dri/swrast_dri.so", "libgl1-mesa-dri"),
];

/// Packages that are needed to render and not there.
pub fn missing_renderers() -> Vec<&'static str> {
    RENDERERS.iter().filter(|(file, _)| !Path::new(file).exists()).map(|(_, it)| *it).collect()
}

/// Packages that libFuzzer needs and that are not there.
pub fn missing_for_fuzzing() -> Vec<&'static str> {
    if on_path("c++") {
        return Vec::new();
    }
    vec!["g++"]
}

/// Packages that are needed and not there.
pub fn missing_packages() -> Vec<&'static str> {
    let mut missing: Vec<&str> =
        PROGRAMS.iter().filter(|(program, _)| !on_path(program)).map(|(_, it)| *it).collect();
    // A static C library, for binaries that run in any guest and on any host.
    if !Path::new("/usr/lib/x86_64-linux-gnu/libc.a").exists() {
        missing.push("libc6-dev");
    }
    missing
}

fn on_path(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|folder| folder.join(program).is_file())
}

/// Installs them with the machine's own apt.
pub fn install(packages: &[&str]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    super::step(&format!("apt-get install {}", packages.join(" ")), || {
        apt(&["update"])?;
        let mut words = vec!["install", "-y", "--no-install-recommends"];
        words.extend(packages);
        apt(&words)
    })
}

fn apt(words: &[&str]) -> Result<()> {
    let status = Command::new("apt-get")
        .arg("-q")
        .args(words)
        .env("DEBIAN_FRONTEND", "noninteractive")
        .status()
        .context("start apt-get; the rig needs a Debian machine")?;
    if !status.success() {
        bail!("apt-get {} ended with {status}", words.join(" "));
    }
    Ok(())
}
