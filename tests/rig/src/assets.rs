//! Where QEMU, kernels, the guests' image and our binaries lie.
//!
//! `.rig/` in the work tree and an unpacked bundle have the same form:
//!
//! ```text
//! qemu/root/               an unpacked QEMU with its own loader and libraries
//! kernels/6.12/vmlinux     a kernel, ready to start without decompression
//! kernels/6.12/vmlinuz     the default kernel as boot loaders start it
//! kernels/6.12/release     its release
//! kernels/6.12/image       the guests' image for it (an initial RAM disk)
//! systemd/root/            a tree whose first process can be systemd
//! bin/                     the backend and the tools, statically linked
//! nvidia/                  copies of the host's NVIDIA libraries, where needed
//! accel                    whether KVM can run a guest on this boot
//! ```

use std::env;
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};

/// Names the folder, over the usual places.
pub const ENV: &str = "NVGUEST_RIG";

/// The kernels that guests are run on, oldest first. Each names the series
/// that it stands for in Debian's archive.
pub const KERNELS: [&str; 3] = ["6.1", "6.12", "7"];

/// The kernel of a guest that asks for none.
pub const DEFAULT_KERNEL: &str = "6.12";

/// A provisioned folder.
#[derive(Debug, Clone)]
pub struct Assets {
    root: PathBuf,
}

impl Assets {
    /// The assets in this folder, which need not be complete.
    pub fn at(root: impl Into<PathBuf>) -> Assets {
        Assets { root: root.into() }
    }

    /// The folder that [`ENV`] names, else `.rig` above the current folder.
    pub fn find() -> Result<Assets> {
        if let Some(root) = env::var_os(ENV) {
            return Assets::at(root).checked();
        }
        let here = env::current_dir().context("find the current folder")?;
        match here.ancestors().map(|it| it.join(".rig")).find(|it| it.is_dir()) {
            Some(root) => Assets::at(root).checked(),
            None => bail!(
                "no .rig folder in {} or above it; run `cargo xtask install` first, \
                 or set {ENV} to a provisioned folder",
                here.display()
            ),
        }
    }

    fn checked(self) -> Result<Assets> {
        if !self.qemu_binary().exists() {
            bail!(
                "{} holds no QEMU; run `cargo xtask install` to provision it",
                self.root.display()
            );
        }
        Ok(self)
    }

    /// The folder itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The tree that QEMU is unpacked in.
    pub fn qemu_root(&self) -> PathBuf {
        self.root.join("qemu/root")
    }

    /// The tree whose first process can be systemd.
    pub fn systemd_root(&self) -> PathBuf {
        self.root.join("systemd/root")
    }

    fn qemu_binary(&self) -> PathBuf {
        self.qemu_root().join("usr/bin/qemu-system-x86_64")
    }

    /// The words that start QEMU with its own loader, libraries and firmware.
    pub fn qemu_command(&self) -> Vec<String> {
        let root = self.qemu_root();
        let path = |tail: &str| root.join(tail).to_string_lossy().into_owned();
        vec![
            path("usr/lib64/ld-linux-x86-64.so.2"),
            "--library-path".to_owned(),
            path("usr/lib/x86_64-linux-gnu"),
            path("usr/bin/qemu-system-x86_64"),
            "-L".to_owned(),
            path("usr/share/qemu"),
            "-L".to_owned(),
            path("usr/share/seabios"),
        ]
    }

    /// The folder of a kernel.
    pub fn kernel(&self, series: &str) -> PathBuf {
        self.root.join("kernels").join(series)
    }

    /// The kernels that have an image to boot, oldest first.
    pub fn bootable(&self) -> Vec<&'static str> {
        let has = |series: &&str| {
            self.kernel(series).join("image").exists()
                && self.kernel(series).join("vmlinux").exists()
        };
        KERNELS.into_iter().filter(has).collect()
    }

    /// A binary of ours.
    pub fn binary(&self, name: &str) -> PathBuf {
        self.root.join("bin").join(name)
    }

    /// The backend.
    pub fn backend(&self) -> PathBuf {
        self.binary("vhost-user-nvguest")
    }
}
