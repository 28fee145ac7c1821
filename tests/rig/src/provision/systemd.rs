//! A tree whose first process can be systemd, to try units in.

use std::fs;
use std::os::unix::fs::symlink;

use anyhow::{Context, Result};

use super::archive::{unpack, Archive};
use super::Folder;

const FOLDERS: [&str; 8] = ["dev", "mnt", "proc", "root", "run", "sys", "tmp", "usr/lib64"];

const LINKS: [(&str, &str); 4] =
    [("bin", "usr/bin"), ("sbin", "usr/sbin"), ("lib", "usr/lib"), ("lib64", "usr/lib64")];

/// With the groups that our units name; a machine has them from other packages.
const FILES: [(&str, &str); 3] = [
    ("etc/passwd", "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n"),
    ("etc/group", "root:x:0:\nvideo:x:44:\nlibvirt-qemu:x:106:\nnogroup:x:65534:\n"),
    ("etc/machine-id", "6e7667756573740000000000000000aa\n"),
];

/// Docs are dead weight; and what prepares a machine at its start takes long, and finds nothing
/// to prepare here.
const LEFT_OUT: [&str; 7] = [
    "usr/lib/systemd/system-generators",
    "usr/lib/systemd/system/local-fs.target.wants",
    "usr/lib/systemd/system/sockets.target.wants",
    "usr/lib/systemd/system/sysinit.target.wants",
    "usr/lib/systemd/system/timers.target.wants",
    "usr/share/doc",
    "usr/share/man",
];

pub fn make(folder: &Folder, archive: &Archive) -> Result<()> {
    // Without libbpf, systemd does not hold units to their DevicePolicy.
    let packages = archive.closure(&["systemd", "libbpf1"], "trixie")?;
    let root = folder.fresh("systemd/root")?;
    for path in FOLDERS {
        fs::create_dir_all(root.join(path)).with_context(|| format!("create {path}"))?;
    }
    for (link, target) in LINKS {
        symlink(target, root.join(link)).with_context(|| format!("link {link}"))?;
    }
    for package in archive.fetch(&packages)? {
        unpack(&package, &root)?;
    }
    for path in LEFT_OUT {
        fs::remove_dir_all(root.join(path)).with_context(|| format!("remove {path}"))?;
    }
    for (path, text) in FILES {
        fs::write(root.join(path), text).with_context(|| format!("write {path}"))?;
    }
    Ok(())
}
