//! The host's card and its user-mode libraries.
//!
//! A guest runs the host's own libraries: they are shared with it read-only
//! and never copied into the image. Where they have a folder to themselves, as
//! in containers, that folder is shared; where they lie among the system's
//! libraries, as on a desktop, copies are kept in one of ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use crate::assets::Assets;
use crate::process::capture;

/// What guests need of the host to run its driver's user mode.
#[derive(Debug)]
pub struct UserMode {
    /// The host's folder.
    pub folder: PathBuf,
    /// Where guests have it.
    pub at: String,
    /// The environment that makes it found.
    pub env: Vec<(String, String)>,
}

/// Whether the host has a card that answers through NVIDIA's driver.
pub fn has_card() -> bool {
    Path::new("/dev/nvidiactl").exists()
}

/// Finds the libraries.
pub fn user_mode(assets: &Assets) -> Result<UserMode> {
    let libraries = listed()?;
    let mut of_nvml =
        libraries.iter().filter(|it| named(it).starts_with("libnvidia-ml.so")).peekable();
    if of_nvml.peek().is_none() {
        bail!(
            "`ldconfig -p` lists no libnvidia-ml.so; install the user-mode libraries of the \
             driver that runs on this host, or use `--host sim`"
        );
    }
    let own = of_nvml.find_map(|it| own_folder(it)).filter(|it| it.join("bin/nvidia-smi").exists());
    let folder = match own {
        Some(folder) => folder,
        None => copied(assets, &libraries)?,
    };
    let at = "/usr/local/nvidia".to_owned();
    let env = environment(&folder, &at, &libraries);
    Ok(UserMode { folder, at, env })
}

/// The libraries that the host's loader knows, each file once.
fn listed() -> Result<Vec<PathBuf>> {
    let ldconfig = ["/sbin/ldconfig", "/usr/sbin/ldconfig"];
    let program = ldconfig.into_iter().find(|it| Path::new(it).exists()).unwrap_or("ldconfig");
    let text = capture(Command::new(program).arg("-p"))?;
    let text = String::from_utf8_lossy(&text).into_owned();
    let mut found: Vec<PathBuf> = text
        .lines()
        .filter(|line| line.contains("x86-64"))
        .filter_map(|line| line.split("=> ").nth(1))
        .map(|path| PathBuf::from(path.trim()))
        .filter(|path| is_nvidia(&named(path)))
        .collect();
    found.sort();
    found.dedup();
    Ok(found)
}

fn named(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// By name: what NVIDIA's driver package brings for user mode.
fn is_nvidia(name: &str) -> bool {
    const PREFIXES: [&str; 9] = [
        "libnvidia-",
        "libcuda.so",
        "libcudadebugger.so",
        "libnvcuvid.so",
        "libnvoptix.so",
        "libGLX_nvidia.so",
        "libEGL_nvidia.so",
        "libGLESv1_CM_nvidia.so",
        "libGLESv2_nvidia.so",
    ];
    PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

/// The outermost folder named for NVIDIA above a library, if there is one.
fn own_folder(library: &Path) -> Option<PathBuf> {
    let above: Vec<&Path> = library.ancestors().skip(1).collect();
    let named_so = |path: &&&Path| named(path).contains("nvidia");
    above.iter().rev().find(named_so).map(|path| path.to_path_buf())
}

/// What Vulkan's and EGL's loaders find NVIDIA's libraries by: the variable that
/// names it to them, and where it lies in the folder that guests get.
const MANIFESTS: [(&str, &str); 2] = [
    ("VK_DRIVER_FILES", "share/vulkan/icd.d/nvidia_icd.json"),
    ("__EGL_VENDOR_LIBRARY_FILENAMES", "share/glvnd/egl_vendor.d/10_nvidia.json"),
];

/// Copies of the libraries and manifests, refreshed when the driver's release
/// changes.
fn copied(assets: &Assets, libraries: &[PathBuf]) -> Result<PathBuf> {
    let folder = assets.root().join("nvidia");
    let stamp = folder.join("copied");
    let mut files: Vec<(PathBuf, PathBuf)> =
        libraries.iter().map(|it| (it.clone(), folder.join("lib").join(named(it)))).collect();
    for (_, tail) in MANIFESTS {
        files.extend(of_the_system(tail).map(|it| (it, folder.join(tail))));
    }
    let wanted = files.iter().map(|(it, _)| fs::canonicalize(it).unwrap_or_else(|_| it.clone()));
    let wanted = wanted.map(|it| it.display().to_string()).collect::<Vec<_>>().join("\n");
    if fs::read_to_string(&stamp).is_ok_and(|have| have == wanted) {
        return Ok(folder);
    }
    eprintln!("  copying {} NVIDIA files of this host for its guests", files.len());
    for (from, to) in &files {
        copy(from, to)?;
    }
    let smi = Path::new("/usr/bin/nvidia-smi");
    // Containers may have a script in its place that only works in them.
    if fs::read(smi).is_ok_and(|bytes| bytes.starts_with(b"\x7fELF")) {
        copy(smi, &folder.join("bin/nvidia-smi"))?;
    }
    fs::write(&stamp, wanted).with_context(|| format!("write {}", stamp.display()))?;
    Ok(folder)
}

/// A manifest of the system, where packages or an administrator put it.
fn of_the_system(tail: &str) -> Option<PathBuf> {
    let inside = tail.strip_prefix("share/").unwrap_or(tail);
    let mut places = ["/etc", "/usr/local/share", "/usr/share"].into_iter();
    places.find_map(|it| Some(Path::new(it).join(inside)).filter(|it| it.exists()))
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    if let Some(folder) = to.parent() {
        fs::create_dir_all(folder).with_context(|| format!("create {}", folder.display()))?;
    }
    fs::copy(from, to)
        .with_context(|| format!("copy {} to {}", from.display(), to.display()))
        .map(drop)
}

/// Every path is the host's with the shared folder's own name exchanged.
fn environment(folder: &Path, at: &str, libraries: &[PathBuf]) -> Vec<(String, String)> {
    let mut folders: Vec<String> = libraries
        .iter()
        .filter_map(|it| it.parent())
        .filter_map(|it| it.strip_prefix(folder).ok())
        .map(|tail| Path::new(at).join(tail).display().to_string())
        .collect();
    folders.sort();
    folders.dedup();
    if folders.is_empty() {
        folders.push(format!("{at}/lib"));
    }
    let mut env = vec![
        ("PATH".to_owned(), format!("{at}/bin")),
        ("LD_LIBRARY_PATH".to_owned(), folders.join(":")),
    ];
    for (name, tail) in MANIFESTS {
        if folder.join(tail).exists() {
            env.push((name.to_owned(), format!("{at}/{tail}")));
        }
    }
    env
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_named_for_nvidia_is_shared_whole() {
        let library = Path::new("/usr/local/nvidia/lib64/libnvidia-ml.so.1");
        assert_eq!(own_folder(library), Some(PathBuf::from("/usr/local/nvidia")));
        assert_eq!(own_folder(Path::new("/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")), None);
    }

    #[test]
    fn the_guest_finds_the_libraries_where_the_share_has_them() {
        let libraries = [PathBuf::from("/opt/nvidia/lib64/libnvidia-ml.so.1")];
        let env = environment(Path::new("/opt/nvidia"), "/usr/local/nvidia", &libraries);
        let want = ("LD_LIBRARY_PATH".to_owned(), "/usr/local/nvidia/lib64".to_owned());
        assert!(env.contains(&want), "{env:?}");
    }

    #[test]
    fn the_guest_is_told_of_manifests_that_the_folder_has() {
        let folder = tempfile::tempdir().unwrap();
        let manifest = folder.path().join(MANIFESTS[0].1);
        fs::create_dir_all(manifest.parent().unwrap()).unwrap();
        fs::write(manifest, "{}").unwrap();
        let env = environment(folder.path(), "/usr/local/nvidia", &[]);
        let has = |name| env.iter().any(|(it, value)| it == name && value.ends_with(".json"));
        assert!(has("VK_DRIVER_FILES") && !has("__EGL_VENDOR_LIBRARY_FILENAMES"), "{env:?}");
    }
}
