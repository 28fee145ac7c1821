//! The sources of one release: a directory, or a tag of a git repository.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};

/// What the measurement reads of a release.
const NEEDED: &[&str] = &[
    "version.mk",
    "kernel-open/common/inc",
    "kernel-open/nvidia/nv.c",
    "kernel-open/nvidia-drm",
    "kernel-open/nvidia-uvm",
    "src/common/inc",
    "src/common/modeset",
    "src/common/sdk/nvidia/inc",
    "src/common/unix/common/inc",
    "src/common/unix/nvidia-3d/interface",
    "src/nvidia/arch/nvalloc/unix/include",
    "src/nvidia/arch/nvalloc/unix/src",
    GENERATED,
    "src/nvidia/inc/kernel/rmapi",
    "src/nvidia/interface",
    "src/nvidia/src/kernel/rmapi",
    "src/nvidia-modeset/interface",
    "src/nvidia-modeset/src/nvkms.c",
];

/// NVIDIA's generated sources: of a tag, the tables alone are unpacked.
const GENERATED: &str = "src/nvidia/generated";
const GENERATED_TABLES: &str = "src/nvidia/generated/g_*_nvoc.c";

/// A release's sources on disk, and a place for the compiler's files.
pub struct Tree {
    root: PathBuf,
    scratch: tempfile::TempDir,
}

impl Tree {
    /// Sources that are on disk already.
    pub fn from_dir(root: &Path) -> Result<Self> {
        if !root.join("src/nvidia/generated").is_dir() {
            bail!(
                "{} does not hold NVIDIA's open kernel modules (no src/nvidia/generated); \
                 unpack the release's source archive there",
                root.display()
            );
        }
        Ok(Self { root: root.to_owned(), scratch: scratch()? })
    }

    /// A tag of a repository, unpacked as far as needed.
    pub fn from_git(repository: &Path, tag: &str) -> Result<Self> {
        let scratch = scratch()?;
        let root = scratch.path().join("tree");
        std::fs::create_dir(&root)?;
        let present = git(repository, &["ls-tree", "--name-only", tag, "--"], NEEDED)?;
        let present: Vec<&str> = present.lines().collect();
        if present.is_empty() {
            bail!("tag {tag} holds none of the sources that are measured");
        }
        let mut archive = Command::new("git")
            .arg("--git-dir")
            .arg(repository)
            .args(["archive", "--format=tar", tag, "--"])
            .args(
                present.iter().map(|path| if *path == GENERATED { GENERATED_TABLES } else { path }),
            )
            .stdout(Stdio::piped())
            .spawn()
            .context("git did not start")?;
        let pipe = archive.stdout.take().context("git gave no output")?;
        let status = Command::new("tar").arg("x").arg("-C").arg(&root).stdin(pipe).status()?;
        if !archive.wait()?.success() || !status.success() {
            bail!("tag {tag} could not be unpacked from {}", repository.display());
        }
        Ok(Self { root, scratch })
    }

    /// The release that the sources say they are.
    pub fn release(&self) -> Result<String> {
        let text = self.text("version.mk")?;
        let line = text.lines().find_map(|line| line.strip_prefix("NVIDIA_VERSION"));
        let version = line.and_then(|line| line.split_once('=')).map(|(_, value)| value.trim());
        version.map(str::to_owned).context("version.mk: no NVIDIA_VERSION")
    }

    /// A path in the tree.
    pub fn path(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    /// Where the compiler's files go.
    pub fn scratch(&self) -> &Path {
        self.scratch.path()
    }

    /// A file's text.
    pub fn text(&self, path: &str) -> Result<String> {
        let bytes = std::fs::read(self.path(path))
            .with_context(|| format!("{path} of this release could not be read"))?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// The files directly in a folder whose names pass `keep`, sorted, as paths in the tree.
    pub fn files(&self, folder: &str, keep: impl Fn(&str) -> bool) -> Result<Vec<String>> {
        let mut names = Vec::new();
        let entries = std::fs::read_dir(self.path(folder))
            .with_context(|| format!("folder {folder} of this release could not be read"))?;
        for entry in entries {
            let name = entry?.file_name().to_string_lossy().into_owned();
            if keep(&name) {
                names.push(format!("{folder}/{name}"));
            }
        }
        names.sort();
        Ok(names)
    }
}

fn scratch() -> Result<tempfile::TempDir> {
    tempfile::Builder::new().prefix("abi-extract-").tempdir().context("no temporary folder")
}

fn git(repository: &Path, before: &[&str], paths: &[&str]) -> Result<String> {
    let output = Command::new("git")
        .arg("--git-dir")
        .arg(repository)
        .args(before)
        .args(paths)
        .output()
        .context("git did not start")?;
    if !output.status.success() {
        bail!(
            "git {} failed in {}: {}",
            before.join(" "),
            repository.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The tags of a repository that are releases, oldest first.
pub fn tags(repository: &Path) -> Result<Vec<String>> {
    let listed = git(repository, &["tag"], &[])?;
    let mut tags: Vec<(nvguest_abi::release::Release, String)> =
        listed.lines().filter_map(|tag| Some((tag.parse().ok()?, tag.to_owned()))).collect();
    tags.sort();
    Ok(tags.into_iter().map(|(_, tag)| tag).collect())
}
