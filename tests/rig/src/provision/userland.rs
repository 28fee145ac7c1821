//! What a guest's programs are linked against: the C library, what NVIDIA's
//! user mode needs beside itself, and busybox.

use std::path::PathBuf;

use anyhow::Result;

use super::archive::{unpack, Archive};
use super::Folder;

/// Single packages, without their dependencies: Mesa and its compiler are
/// among those of the loaders, and no guest of ours uses them.
const PACKAGES: [&str; 18] = [
    "busybox-static",
    "libbsd0",
    "libc6",
    "libegl1",
    "libgcc-s1",
    "libgl1",
    "libgles2",
    "libglvnd0",
    "libglx0",
    "libmd0",
    "libopengl0",
    "libstdc++6",
    "libvulkan1",
    "libx11-6",
    "libxau6",
    "libxcb1",
    "libxdmcp6",
    "libxext6",
];

pub fn make(folder: &Folder, archive: &Archive) -> Result<()> {
    let packages = archive.candidates(&PACKAGES, "trixie")?;
    let root = folder.fresh("userland/root")?;
    for package in archive.fetch(&packages)? {
        unpack(&package, &root)?;
    }
    Ok(())
}

/// The folder of the unpacked shared libraries.
pub fn library_folder(folder: &Folder) -> PathBuf {
    folder.path("userland/root/usr/lib/x86_64-linux-gnu")
}
