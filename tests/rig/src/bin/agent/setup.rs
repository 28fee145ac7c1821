//! Becoming the guest that the host asks for.

use std::ffi::CString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use nix::kmod::{finit_module, ModuleInitFlags};
use nix::mount::{mount, MsFlags};
use nvguest_rig::proto::{Ready, Setup, Share, MODULE, PORT};

/// Modules of the kernel, in the order in which they load, one path a line.
const ORDER: &str = "/lib/nvguest/modules";

/// Loads the kernel's own modules of one kind: the port's are virtio's, and all
/// others are those of the host's folders.
fn load_kernels_own(virtio: bool) -> Result<()> {
    let order = fs::read_to_string(ORDER).with_context(|| format!("read {ORDER}"))?;
    let is_virtio = |path: &&str| path.contains("/virtio");
    for path in order.lines().filter(|path| is_virtio(path) == virtio) {
        load_module(Path::new(path), "")?;
    }
    Ok(())
}

/// Finds the port to the host.
pub fn open_port() -> Result<File> {
    load_kernels_own(true)?;
    let node = find_port()?;
    File::options()
        .read(true)
        .write(true)
        .open(&node)
        .with_context(|| format!("open {}", node.display()))
}

/// The port's name reaches sysfs a moment after its device.
fn find_port() -> Result<PathBuf> {
    let class = Path::new("/sys/class/virtio-ports");
    for _ in 0..5000 {
        for entry in fs::read_dir(class).into_iter().flatten().flatten() {
            let name = fs::read_to_string(entry.path().join("name")).unwrap_or_default();
            if name.trim() == PORT {
                return Ok(Path::new("/dev").join(entry.file_name()));
            }
        }
        std::thread::sleep(std::time::Duration::from_millis(2));
    }
    anyhow::bail!("no virtio-serial port is named {PORT}; add it to QEMU's command line")
}

/// Carries out the host's first message. What fails is told, not fatal: the
/// host decides what it can do without.
pub fn become_guest(setup: &Setup) -> Ready {
    let mut problems = Vec::new();
    let mut tell = |outcome: Result<()>| {
        if let Err(error) = outcome {
            problems.push(format!("{error:#}"));
        }
    };
    tell(nix::unistd::sethostname(&setup.name).context("set the host name"));
    if !setup.shares.is_empty() {
        tell(load_kernels_own(false));
    }
    for share in &setup.shares {
        tell(mount_share(share));
    }
    if let Some(params) = &setup.module_params {
        tell(load_module(Path::new(MODULE), params));
    }
    Ready {
        kernel: read_word("/proc/sys/kernel/osrelease"),
        uptime: read_word("/proc/uptime").parse().unwrap_or(0.0),
        nodes: nvidia_nodes(),
        problems,
    }
}

fn mount_share(share: &Share) -> Result<()> {
    let options = "trans=virtio,version=9p2000.L,msize=524288,cache=loose";
    fs::create_dir_all(&share.path).with_context(|| format!("create {}", share.path))?;
    mount(
        Some(share.tag.as_str()),
        share.path.as_str(),
        Some("9p"),
        MsFlags::MS_RDONLY,
        Some(options),
    )
    .with_context(|| format!("mount the host's folder {} on {}", share.tag, share.path))
}

fn load_module(path: &Path, params: &str) -> Result<()> {
    let file = File::open(path).with_context(|| format!("open the module {}", path.display()))?;
    let params = CString::new(params).context("module parameters")?;
    match finit_module(&file, &params, ModuleInitFlags::empty()) {
        Ok(()) | Err(nix::errno::Errno::EEXIST) => Ok(()),
        Err(error) => Err(error)
            .with_context(|| format!("load {}; the guest's dmesg says why", path.display())),
    }
}

fn nvidia_nodes() -> Vec<String> {
    let mut nodes: Vec<String> = fs::read_dir("/dev")
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name.starts_with("nvidia"))
        .collect();
    nodes.sort();
    nodes
}

fn read_word(path: &str) -> String {
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().next().unwrap_or_default().to_owned()
}
