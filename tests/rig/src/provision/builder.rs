//! A tree with compilers and headers, to build the guest module in.
//!
//! The kernels' build tools are linked against Debian 13's C library and their
//! flags are its compiler's, so on an older machine they run in a chroot of
//! their own. Nothing is mounted on the machine: the chroot's `/proc` lives in
//! a mount namespace that ends with the build.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};
use nix::sys::stat::{makedev, mknod, Mode, SFlag};

use super::archive::{unpack, Archive, Package};
use super::{kernels, Folder};
use crate::assets::KERNELS;

/// What a kernel's build calls, besides its compiler.
const TOOLS: [&str; 7] = ["make", "dash", "coreutils", "sed", "grep", "mawk", "binutils"];

/// Folders and links that packages expect to find.
const LINKS: [(&str, &str); 5] = [
    ("bin", "usr/bin"),
    ("sbin", "usr/sbin"),
    ("lib", "usr/lib"),
    ("lib64", "usr/lib64"),
    ("usr/bin/awk", "mawk"),
];

pub fn make(folder: &Folder, archive: &Archive) -> Result<()> {
    let mut tools: Vec<String> = TOOLS.map(str::to_owned).into();
    let mut packages = Vec::new();
    for series in KERNELS {
        let image = kernels::image_package(archive, series)?;
        let headers = headers_of(archive, &image)?;
        for name in headers.iter().filter_map(|it| compiler(&it.name)) {
            tools.push(name);
        }
        let is_package = |it: &&Package| it.name.starts_with("linux-");
        packages.extend(headers.iter().filter(is_package).cloned());
        // Debian 13's kernels bring the libraries that their tools need.
        if series != "6.1" {
            let kbuild = headers.iter().find(|it| it.name.starts_with("linux-kbuild-"));
            tools.extend(kbuild.map(|it| format!("{}={}", it.name, it.version)));
        }
    }
    tools.sort();
    tools.dedup();
    let names: Vec<&str> = tools.iter().map(String::as_str).collect();
    packages.extend(archive.closure(&names, "trixie")?);
    packages.sort_by(|a, b| a.name.cmp(&b.name));
    packages.dedup();

    let root = folder.fresh("builder/root")?;
    for part in ["usr/bin", "usr/sbin", "usr/lib", "usr/lib64", "dev", "proc", "tmp", "build"] {
        fs::create_dir_all(root.join(part)).with_context(|| format!("create {part}"))?;
    }
    for (link, target) in LINKS {
        symlink(target, root.join(link)).with_context(|| format!("link {link}"))?;
    }
    for package in archive.fetch(&packages)? {
        unpack(&package, &root)?;
    }
    finish(&root)
}

/// Headers of a kernel, what they are built with among their dependencies.
fn headers_of(archive: &Archive, image: &Package) -> Result<Vec<Package>> {
    let release = kernels::release(image);
    let own = Package { name: format!("linux-headers-{release}"), version: image.version.clone() };
    let mut found = Vec::new();
    for name in archive.depends(&own)? {
        if compiler(&name).is_some() && !name.starts_with("linux-") {
            found.push(Package { name, version: String::new() });
            continue;
        }
        let wanted = ["linux-headers-", "linux-kbuild-", "linux-compiler-"];
        if wanted.iter().any(|prefix| name.starts_with(prefix)) {
            let all = archive.versions(&name)?;
            let same = all.iter().find(|it| it.version == image.version).or(all.first());
            found.extend(same.cloned());
        }
    }
    found.push(own);
    Ok(found)
}

/// `gcc-14` of `gcc-14`, `gcc-14-for-host` and `linux-compiler-gcc-14-x86`.
fn compiler(name: &str) -> Option<String> {
    let tail = &name[name.find("gcc-")? + 4..];
    let digits: String = tail.chars().take_while(char::is_ascii_digit).collect();
    (!digits.is_empty()).then(|| format!("gcc-{digits}"))
}

fn finish(root: &Path) -> Result<()> {
    let null = root.join("dev/null");
    mknod(&null, SFlag::S_IFCHR, Mode::from_bits_truncate(0o666), makedev(1, 3))
        .with_context(|| format!("make the device {}", null.display()))?;
    fs::set_permissions(&null, std::os::unix::fs::PermissionsExt::from_mode(0o666))
        .context("open the null device to all")?;
    for dead_weight in ["usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"] {
        let path = root.join(dead_weight);
        if path.exists() {
            fs::remove_dir_all(&path).with_context(|| format!("remove {}", path.display()))?;
        }
    }
    // Without the kernel's own image beside the headers, modules are built
    // without BTF, which needs a tool of 20 MB and no guest of ours reads.
    let sources = root.join("usr/src");
    for entry in fs::read_dir(&sources).context("read the headers")?.flatten() {
        let image = entry.path().join("vmlinux");
        if image.exists() {
            fs::remove_file(&image).with_context(|| format!("remove {}", image.display()))?;
        }
    }
    Ok(())
}

/// What a build of the guest module made.
#[derive(Debug)]
pub struct ModuleBuild {
    /// The module.
    pub module: PathBuf,
    /// What the build printed.
    pub log: String,
    /// The sources were those of the last build, which still stands.
    pub cached: bool,
}

/// Builds the guest module for one kernel. A warning is a failure.
pub fn build_module(folder: &Folder, series: &str, sources: &Path) -> Result<ModuleBuild> {
    let root = folder.path("builder/root");
    let place = folder.path(&format!("kernels/{series}"));
    let release = fs::read_to_string(place.join("release"))
        .with_context(|| format!("kernel {series} is not provisioned"))?;
    let module = place.join("virtio_nvguest.ko");
    let inside = format!("build/{series}");
    let work = root.join(&inside);
    if module.exists() && same_sources(sources, &work)? {
        let log = fs::read_to_string(place.join("module.log")).unwrap_or_default();
        return Ok(ModuleBuild { module, log, cached: true });
    }
    let _nothing_there = fs::remove_file(&module);
    if work.exists() {
        fs::remove_dir_all(&work).with_context(|| format!("remove {}", work.display()))?;
    }
    copy_sources(sources, &work)?;
    let script = "mount -t proc proc \"$1/proc\" && exec chroot \"$1\" /usr/bin/env -i \
                  PATH=/usr/bin DEB_BUILD_ARCH=amd64 DEB_HOST_ARCH=amd64 \
                  make -C \"$2\" KDIR=\"$3\" 2>&1";
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .arg(&root)
        .arg(format!("/{inside}"))
        .arg(format!("/usr/src/linux-headers-{release}"))
        .output()
        .context("start unshare")?;
    let log = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    let built = work.join("virtio_nvguest.ko");
    if !output.status.success() || !built.exists() {
        bail!("the guest module does not build for {release}:\n{log}");
    }
    let warnings: Vec<&str> = log.lines().filter(|line| is_warning(line)).collect();
    if !warnings.is_empty() {
        bail!("the guest module builds with warnings for {release}:\n{}", warnings.join("\n"));
    }
    fs::copy(&built, &module).with_context(|| format!("copy {}", built.display()))?;
    fs::write(place.join("module.log"), &log).context("keep the build's log")?;
    Ok(ModuleBuild { module, log, cached: false })
}

/// The compiler's and modpost's, not the build system's remarks about itself.
fn is_warning(line: &str) -> bool {
    line.contains(": warning:") || line.starts_with("WARNING: modpost:")
}

fn source_files(folder: &Path) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder).with_context(|| format!("read {}", folder.display()))?;
    let mut files: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| is_source(path)).collect();
    files.sort();
    if files.is_empty() {
        bail!("{} holds no module sources", folder.display());
    }
    Ok(files)
}

fn is_source(path: &Path) -> bool {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let generated = name.ends_with(".mod.c");
    let wanted = name.ends_with(".c") || name.ends_with(".h");
    path.is_file() && !generated && (wanted || name == "Makefile" || name == "Kbuild")
}

fn same_sources(sources: &Path, built: &Path) -> Result<bool> {
    if !built.exists() {
        return Ok(false);
    }
    let contents = |folder: &Path| -> Result<Vec<(PathBuf, Vec<u8>)>> {
        let files = source_files(folder)?;
        let read = |path: PathBuf| {
            let data = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
            Ok((PathBuf::from(path.file_name().unwrap_or_default()), data))
        };
        files.into_iter().map(read).collect()
    };
    Ok(contents(sources)? == contents(built)?)
}

fn copy_sources(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("create {}", to.display()))?;
    for file in source_files(from)? {
        let copy = to.join(file.file_name().unwrap_or_default());
        fs::copy(&file, &copy).with_context(|| format!("copy {}", file.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_compiler_is_read_from_the_headers_dependencies() {
        assert_eq!(compiler("gcc-14-for-host").as_deref(), Some("gcc-14"));
        assert_eq!(compiler("linux-compiler-gcc-12-x86").as_deref(), Some("gcc-12"));
        assert_eq!(compiler("linux-kbuild-6.1"), None);
    }

    #[test]
    fn remarks_of_the_build_system_are_no_warnings() {
        assert!(is_warning("main.c:3:5: warning: unused variable"));
        assert!(!is_warning("warning: the compiler differs from the one used to build the kernel"));
    }
}
