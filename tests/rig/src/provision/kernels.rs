//! Kernels to boot and the modules that a guest needs of them.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};

use super::archive::{unpack, Archive, Package};
use super::Folder;
use crate::assets::{DEFAULT_KERNEL, KERNELS};
use crate::process::capture;

/// Modules that a guest loads, in order. What a kernel has built in, or does
/// not know, is left out.
const MODULES: [&str; 11] = [
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_console",
    "netfs",
    "fscache",
    "9pnet",
    "9pnet_virtio",
    "9p",
];

pub fn make(folder: &Folder, archive: &Archive) -> Result<()> {
    for series in KERNELS {
        let image = image_package(archive, series)?;
        make_one(folder, archive, series, &image)
            .with_context(|| format!("kernel {series} ({})", image.version))?;
    }
    Ok(())
}

/// The package that the archive's newest kernel of a series is in.
pub fn image_package(archive: &Archive, series: &str) -> Result<Package> {
    let meta = archive.newest("linux-image-amd64", &format!("{series}."))?;
    let name = archive.depends(&meta)?.into_iter().find(|it| it.starts_with("linux-image-"));
    let name =
        name.with_context(|| format!("linux-image-amd64 {} names no kernel", meta.version))?;
    Ok(Package { name, version: meta.version })
}

/// The release that a kernel's package is named for.
pub fn release(image: &Package) -> &str {
    image.name.strip_prefix("linux-image-").unwrap_or(&image.name)
}

fn make_one(folder: &Folder, archive: &Archive, series: &str, image: &Package) -> Result<()> {
    let release = release(image);
    let mut packages = vec![image.clone()];
    // Newer packages are split in three.
    for part in ["linux-binary-", "linux-modules-"] {
        packages.extend(archive.versions(&format!("{part}{release}"))?.into_iter().take(1));
    }
    let tree = folder.fresh(&format!("kernels/{series}/tree"))?;
    for package in archive.fetch(&packages)? {
        unpack(&package, &tree)?;
    }
    let files = walk(&tree)?;
    let place = folder.path(&format!("kernels/{series}"));
    write(&place.join("vmlinux"), &decompressed_kernel(&compressed_kernel(&files)?)?)?;
    write(&place.join("release"), release.as_bytes())?;
    fs::create_dir_all(place.join("modules")).context("create the folder of modules")?;
    let mut order = String::new();
    for name in MODULES {
        let Some(file) = files.iter().find(|it| is_module(it, name)) else { continue };
        write(&place.join(format!("modules/{name}.ko")), &decompressed_module(file)?)?;
        order.push_str(&format!("{name}.ko\n"));
    }
    write(&place.join("modules/order"), order.as_bytes())?;
    fs::remove_dir_all(&tree).context("remove the unpacked package")
}

/// The default kernel as its package has it, for guests that begin in firmware's hands or
/// start it themselves.
pub fn keep_compressed(folder: &Folder, archive: &Archive) -> Result<()> {
    let place = folder.path(&format!("kernels/{DEFAULT_KERNEL}"));
    let release = fs::read_to_string(place.join("release")).context("read a kernel's release")?;
    let all = archive.versions(&format!("linux-image-{release}"))?;
    let image = all.first().with_context(|| {
        let old = folder.path("");
        format!("the archive has no Linux {release} any more; remove {}", old.display())
    })?;
    let tree = folder.fresh(&format!("kernels/{DEFAULT_KERNEL}/tree"))?;
    for package in archive.fetch(std::slice::from_ref(image))? {
        unpack(&package, &tree)?;
    }
    let compressed = compressed_kernel(&walk(&tree)?)?;
    fs::rename(&compressed, place.join("vmlinuz")).context("keep the kernel")?;
    fs::remove_dir_all(&tree).context("remove the unpacked package")
}

fn compressed_kernel(files: &[PathBuf]) -> Result<PathBuf> {
    let found = files.iter().find(|it| it.to_string_lossy().contains("vmlinuz"));
    found.cloned().context("the package holds no vmlinuz")
}

fn is_module(path: &Path, name: &str) -> bool {
    let file = path.file_name().unwrap_or_default().to_string_lossy();
    file.strip_prefix(name).is_some_and(|rest| rest == ".ko" || rest == ".ko.xz")
}

fn walk(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))? {
        let entry = entry.with_context(|| format!("read {}", folder.display()))?;
        let kind = entry.file_type().context("look at a file's type")?;
        if kind.is_dir() {
            found.extend(walk(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}

fn decompressed_module(path: &Path) -> Result<Vec<u8>> {
    if path.extension().is_some_and(|it| it == "xz") {
        return capture(Command::new("xz").arg("-dc").arg(path));
    }
    fs::read(path).with_context(|| format!("read {}", path.display()))
}

/// The kernel inside a bzImage. QEMU starts it through its PVH entry, which
/// saves the guest from decompressing it: 2 to 6 s of emulation.
fn decompressed_kernel(path: &Path) -> Result<Vec<u8>> {
    let image = fs::read(path).with_context(|| format!("read {}", path.display()))?;
    let payload = payload(&image).with_context(|| format!("{} is no bzImage", path.display()))?;
    let program = match payload {
        [0x28, 0xb5, 0x2f, 0xfd, ..] => "zstd",
        [0xfd, b'7', b'z', b'X', b'Z', ..] => "xz",
        _ => bail!("{} is compressed in a way that the rig does not know", path.display()),
    };
    let packed = path.with_extension("payload");
    write(&packed, payload)?;
    let input = fs::File::open(&packed).context("open the kernel's payload")?;
    let output = Command::new(program)
        .args(["-dcq"])
        .stdin(input)
        .stderr(Stdio::piped())
        .output()
        .with_context(|| format!("start {program}"))?;
    // What follows the payload is no part of it, and makes the program complain.
    if !output.stdout.starts_with(b"\x7fELF") {
        bail!(
            "{program} did not make a kernel of {}: {}",
            path.display(),
            String::from_utf8_lossy(&output.stderr)
        );
    }
    Ok(output.stdout)
}

/// By the header of the Linux boot protocol: set-up sectors at 0x1f1, the
/// payload's offset and length at 0x248.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word =
        |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    if image.get(0x202..0x206)? != b"HdrS" {
        return None;
    }
    let begin = (usize::from(*image.get(0x1f1)?) + 1) * 512 + word(0x248)?;
    image.get(begin..begin + word(0x24c)?)
}

fn write(path: &Path, data: &[u8]) -> Result<()> {
    fs::write(path, data).with_context(|| format!("write {}", path.display()))
}
