//! QEMU 11.1, unpacked beside the machine's own.

use std::process::Command;

use anyhow::{bail, Context, Result};

use super::archive::{unpack, Archive};
use super::Folder;
use crate::assets::Assets;
use crate::process::capture;

/// The first series with the device that carries ours, and the only one tried.
const MAJOR: &str = "11";

/// The device that a backend of any kind can stand behind.
const DEVICE: &str = "vhost-user-test-device-pci";

pub fn make(folder: &Folder, archive: &Archive) -> Result<()> {
    let packages = archive.closure(&["qemu-system-x86"], "trixie-backports")?;
    let root = folder.fresh("qemu/root")?;
    for package in archive.fetch(&packages)? {
        unpack(&package, &root)?;
    }
    for dead_weight in ["usr/share/doc", "usr/share/man", "usr/share/locale"] {
        let path = root.join(dead_weight);
        if path.exists() {
            std::fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    check(&Assets::at(folder.path("")))
}

/// Whether the unpacked QEMU starts, and is one that can carry our device.
fn check(assets: &Assets) -> Result<()> {
    let ask = |words: &[&str]| {
        let argv = assets.qemu_command();
        let mut command = Command::new(&argv[0]);
        command.args(&argv[1..]).args(words);
        Ok::<_, anyhow::Error>(String::from_utf8_lossy(&capture(&mut command)?).into_owned())
    };
    let version = ask(&["--version"])?;
    let version = version.lines().next().unwrap_or_default();
    if !version.contains(&format!(" version {MAJOR}.")) {
        bail!("the archive's QEMU is `{version}`; the rig knows series {MAJOR}");
    }
    if !ask(&["-device", "help"])?.contains(DEVICE) {
        bail!("{version} has no {DEVICE}; the rig needs a build that lets users create it");
    }
    Ok(())
}
