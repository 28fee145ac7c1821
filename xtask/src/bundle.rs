//! Packs QEMU, a kernel, the image and our binaries into a folder that runs on
//! another x86-64 machine as root, without the network.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::{bail, Context, Result};
use clap::Args;
use nvguest_rig::assets::{DEFAULT_KERNEL, KERNELS};
use nvguest_rig::process::capture;
use nvguest_rig::provision::step;
use nvguest_rig::Assets;

use crate::prepare::{note_commit, root, run};

/// The most that a bundle may take.
const LIMIT_MIB: u64 = 60;

/// Where and what.
#[derive(Debug, Args)]
pub struct BundleArgs {
    /// The folder to make
    #[arg(long, default_value = ".bundle")]
    out: PathBuf,

    /// The kernel to pack
    #[arg(long, default_value = DEFAULT_KERNEL, value_parser = KERNELS)]
    kernel: String,
}

/// Firmware that QEMU reads to start our machine.
const FIRMWARE: [&str; 6] = [
    "usr/share/seabios/bios-256k.bin",
    "usr/share/qemu/kvmvapic.bin",
    "usr/share/qemu/linuxboot_dma.bin",
    "usr/share/qemu/pvh.bin",
    "usr/share/qemu/multiboot_dma.bin",
    "usr/share/qemu/trace-events-all",
];

/// Makes the bundle. What comes from Debian is packed once and kept; what is
/// ours is packed every time.
pub fn bundle(assets: &Assets, args: &BundleArgs) -> Result<ExitCode> {
    let out = root().join(&args.out);
    let kept = assets.root().join("bundle").join(&args.kernel);
    let system = kept.join("system.tar.xz");
    fresh(&out)?;
    if !is_newer(&system, &assets.kernel(&args.kernel).join("release")) {
        step("compress QEMU and the kernel (about 60 s of processor time, once)", || {
            let stage = kept.join("stage");
            fresh(&stage)?;
            gather_system(assets, &Assets::at(&stage), &args.kernel)?;
            pack(&stage, &system)
        })?;
    }
    copy(&system, &out.join("system.tar.xz"))?;
    step("compress the image and the binaries", || {
        let stage = kept.join("stage");
        fresh(&stage)?;
        gather_ours(assets, &Assets::at(&stage), &args.kernel)?;
        pack(&stage, &out.join("ours.tar.xz"))
    })?;
    copy(&assets.root().join("userland/root/usr/bin/busybox"), &out.join("busybox"))?;
    copy(&assets.binary("nvguest-run"), &out.join("nvguest-run"))?;
    note_commit(&out)?;
    fs::write(out.join("README"), README).context("write the bundle's README")?;
    report(&out)
}

fn is_newer(file: &Path, than: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|it| it.modified()).ok();
    time(file).is_some() && time(file) > time(than)
}

/// Packs a stage and removes it.
fn pack(stage: &Path, packed: &Path) -> Result<()> {
    let script = "tar -c --owner=0 --group=0 --sort=name -C \"$1\" . | xz -T0 -3 > \"$2\"";
    let fresh = packed.with_extension("new");
    let mut command = Command::new("bash");
    command.args(["-o", "pipefail", "-c", script, "bash"]).arg(stage).arg(&fresh);
    run(&mut command)?;
    fs::rename(&fresh, packed).with_context(|| format!("rename to {}", packed.display()))?;
    fs::remove_dir_all(stage).with_context(|| format!("remove {}", stage.display()))
}

const README: &str = "\
A bundle of nvguest: guests that share this machine's NVIDIA card, with all they need.
Run as root on an x86-64 Linux machine; nothing is installed, nothing is fetched.

  ./nvguest-run demo
  ./nvguest-run guest --run nvidia-smi --host nvidia
  ./nvguest-run guest --run rmprobe --host sim
  ./nvguest-run guest --help

NVIDIA's libraries are taken from this machine. The first run unpacks the archives
into contents/ beside this file; to be rid of it all, remove this folder.
";

fn fresh(folder: &Path) -> Result<()> {
    if folder.exists() {
        fs::remove_dir_all(folder).with_context(|| format!("remove {}", folder.display()))?;
    }
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))
}

/// QEMU and the kernel, in the form of `.rig`, with nothing that a guest does
/// not need.
fn gather_system(assets: &Assets, staged: &Assets, kernel: &str) -> Result<()> {
    let (from, to) = (assets.qemu_root(), staged.qemu_root());
    let mut files: BTreeSet<PathBuf> = FIRMWARE.iter().map(PathBuf::from).collect();
    files.insert("usr/bin/qemu-system-x86_64".into());
    files.insert("usr/lib64/ld-linux-x86-64.so.2".into());
    files.extend(libraries(assets)?);
    for file in &files {
        // Links are followed: a library has one name, the one it is asked for by.
        let source = fs::canonicalize(from.join(file))
            .with_context(|| format!("find {}", from.join(file).display()))?;
        copy(&source, &to.join(file))?;
    }
    for name in ["vmlinux", "release"] {
        copy(&assets.kernel(kernel).join(name), &staged.kernel(kernel).join(name))?;
    }
    if kernel != DEFAULT_KERNEL {
        // The bundle's one kernel is the one that a guest gets unasked.
        symlink(kernel, staged.kernel(DEFAULT_KERNEL)).context("link the default kernel")?;
    }
    Ok(())
}

/// The image and our binaries.
fn gather_ours(assets: &Assets, staged: &Assets, kernel: &str) -> Result<()> {
    copy(&assets.kernel(kernel).join("image"), &staged.kernel(kernel).join("image"))?;
    let place = assets.root().join("bin");
    for entry in fs::read_dir(&place).context("read the binaries")?.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if !["nvguest-agent", "nvguest-run"].contains(&name.as_str()) {
            copy(&entry.path(), &staged.binary(&name))?;
        }
    }
    Ok(())
}

/// The libraries that QEMU is linked against, as its loader finds them.
fn libraries(assets: &Assets) -> Result<Vec<PathBuf>> {
    let argv = assets.qemu_command();
    let [loader, option, folder, program, ..] = argv.as_slice() else {
        bail!("QEMU's command line has only {} words", argv.len());
    };
    let mut command = Command::new(loader);
    command.args([option, folder, "--list", program]);
    let text = capture(&mut command)?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let root = assets.qemu_root();
    // libc.so.6 => /…/libc.so.6 (0x…)
    let path = |line: &str| {
        let path = line.split("=> ").nth(1)?.split(" (").next()?;
        Path::new(path).strip_prefix(&root).ok().map(Path::to_owned)
    };
    Ok(text.lines().filter_map(path).collect())
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().unwrap_or(to);
    fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    fs::copy(from, to).with_context(|| format!("copy {}", from.display())).map(drop)
}

fn report(out: &Path) -> Result<ExitCode> {
    let mut total = 0;
    for entry in fs::read_dir(out).with_context(|| format!("read {}", out.display()))?.flatten() {
        let size = entry.metadata().context("look at the bundle")?.len();
        total += size;
        println!("  {:>6.1} MiB  {}", mib(size), entry.file_name().to_string_lossy());
    }
    println!("  {:>6.1} MiB  in all, of at most {LIMIT_MIB}", mib(total));
    if total > LIMIT_MIB << 20 {
        bail!("the bundle is larger than {LIMIT_MIB} MiB; leave out what was added last");
    }
    println!("On the other machine, as root: {}/nvguest-run demo", out.display());
    Ok(ExitCode::SUCCESS)
}

/// Bytes in MiB.
pub fn mib(bytes: u64) -> f64 {
    // CAST: sizes here are far below 2^52.
    bytes as f64 / f64::from(1 << 20)
}
