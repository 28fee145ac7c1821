//! Gets QEMU, kernels, their headers and the guests' libraries from Debian's
//! archive, into one folder and nowhere else.
//!
//! - `archive`  a private apt: the machine's own mirror, our own lists and cache
//! - `host`     the few packages that the machine itself must have
//! - `qemu`     QEMU 11.1, unpacked beside the machine's own
//! - `kernels`  kernels to boot and the modules that a guest needs of them
//! - `builder`  a tree with compilers and headers, to build the guest module in
//! - `systemd` a tree whose first process can be systemd
//! - `userland` what a guest's programs are linked against
//!
//! Each part leaves a stamp; a part whose stamp is there is not looked at
//! again, so a second run needs no network.

mod archive;
mod builder;
mod host;
mod kernels;
mod qemu;
mod systemd;
mod userland;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{bail, Context, Result};

pub use builder::{build_module, ModuleBuild};
pub use userland::library_folder;

use archive::Archive;

/// Raised when a part has to be made again on machines that have it.
const RECIPE: &str = "1";

/// The suites that the parts come from, whatever the machine itself runs.
const SUITES: [&str; 3] = ["bookworm", "trixie", "trixie-backports"];

type Make = fn(&Folder, &Archive) -> Result<()>;

/// Part, what it brings, and how it is made.
const PARTS: [(&str, &str, Make); 6] = [
    ("qemu", "QEMU 11.1 with its libraries (40 MB)", qemu::make),
    ("kernels", "Linux 6.1, 6.12 and 7.x with modules (300 MB)", kernels::make),
    ("vmlinuz", "Linux 6.12 as boot loaders start it (110 MB)", kernels::keep_compressed),
    ("builder", "kernel headers, gcc and make, to build the guest module (130 MB)", builder::make),
    ("userland", "busybox, the C library and the Vulkan loader for guests (7 MB)", userland::make),
    ("systemd", "systemd, to try the units under it (15 MB)", systemd::make),
];

/// A folder that is provisioned, or is to be.
#[derive(Debug, Clone)]
pub struct Folder {
    root: PathBuf,
}

impl Folder {
    /// The folder at this path.
    pub fn at(root: impl Into<PathBuf>) -> Folder {
        Folder { root: root.into() }
    }

    /// A path inside.
    pub fn path(&self, tail: &str) -> PathBuf {
        self.root.join(tail)
    }

    fn stamp(&self, part: &str) -> PathBuf {
        self.path("stamps").join(part)
    }

    fn has(&self, part: &str) -> bool {
        fs::read_to_string(self.stamp(part)).is_ok_and(|text| text == RECIPE)
    }

    /// An empty folder inside.
    fn fresh(&self, tail: &str) -> Result<PathBuf> {
        let path = self.path(tail);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
        fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        Ok(path)
    }
}

/// Provisions the folder: says first what it will fetch and install, then does
/// what is not done yet.
pub fn provision(root: &Path) -> Result<Folder> {
    let folder = Folder::at(root);
    let missing: Vec<_> = PARTS.iter().filter(|(part, ..)| !folder.has(part)).collect();
    let packages = host::missing_packages();
    if missing.is_empty() && packages.is_empty() {
        return Ok(folder);
    }
    if !nix::unistd::geteuid().is_root() {
        bail!("provisioning unpacks device nodes and builds in a chroot; run it as root");
    }
    say("This machine lacks:");
    if !packages.is_empty() {
        say(&format!("  - with apt-get install: {}", packages.join(" ")));
    }
    for (_, what, _) in &missing {
        say(&format!("  - into {}: {what}", root.display()));
    }
    say("Packages come from the mirror in this machine's own apt sources.");
    host::install(&packages)?;
    if missing.is_empty() {
        return Ok(folder);
    }
    let archive = step("read the archive's lists", || Archive::open(&folder, &SUITES))?;
    for (part, what, make) in missing {
        step(&format!("fetch and unpack {what}"), || make(&folder, &archive))?;
        let stamp = folder.stamp(part);
        fs::create_dir_all(folder.path("stamps")).context("create the folder of stamps")?;
        fs::write(&stamp, RECIPE).with_context(|| format!("write {}", stamp.display()))?;
    }
    archive.discard_packages()?;
    Ok(folder)
}

/// Has the machine render with Vulkan and OpenGL, in software if it has no
/// other way: says what it will install, then does.
pub fn provide_renderers() -> Result<()> {
    let packages = host::missing_renderers();
    if !packages.is_empty() {
        say(&format!("The tests need, with apt-get install: {}", packages.join(" ")));
    }
    host::install(&packages)
}

/// Has the machine compile libFuzzer: says what it will install, then does.
pub fn provide_fuzzing() -> Result<()> {
    let packages = host::missing_for_fuzzing();
    if !packages.is_empty() {
        say(&format!("Fuzzing needs, with apt-get install: {}", packages.join(" ")));
    }
    host::install(&packages)
}

static QUIET: AtomicBool = AtomicBool::new(false);

/// Sends what is said of the steps to standard error, for callers whose own
/// output is data.
pub fn quiet(on: bool) {
    QUIET.store(on, Ordering::Relaxed);
}

fn say(text: &str) {
    if QUIET.load(Ordering::Relaxed) {
        eprintln!("{text}");
    } else {
        println!("{text}");
    }
}

/// Does one step, saying so before and how long it took after.
pub fn step<T>(what: &str, act: impl FnOnce() -> Result<T>) -> Result<T> {
    say(&format!("» {what}"));
    let begin = Instant::now();
    let outcome = act().with_context(|| what.to_owned())?;
    let taken = begin.elapsed();
    if taken.as_secs() >= 2 {
        say(&format!("  done in {:.0} s", taken.as_secs_f64()));
    }
    Ok(outcome)
}
