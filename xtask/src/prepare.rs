//! Provisions `.rig`, builds binaries, the guest module and the images.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};
use nvguest_rig::assets::KERNELS;
use nvguest_rig::image::{self, Parts};
use nvguest_rig::provision::{build_module, library_folder, provision, step, Folder};
use nvguest_rig::Assets;

/// Binaries are linked statically: the same file runs on the build machine, in
/// every guest and on whatever machine a bundle is taken to.
const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs of `tools/` that run on a developer's machine only.
const HOST_TOOLS: [&str; 1] = ["abi-extract"];

/// The root of the work tree.
pub fn root() -> PathBuf {
    let xtask = Path::new(env!("CARGO_MANIFEST_DIR"));
    xtask.parent().unwrap_or(xtask).to_owned()
}

/// Cargo, in the work tree.
pub fn cargo(words: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(words).current_dir(root());
    command
}

/// Runs a command with its output on ours.
pub fn run(command: &mut Command) -> Result<()> {
    let shown = nvguest_rig::process::show(command);
    let status = command.stdin(Stdio::null()).status().with_context(|| format!("start {shown}"))?;
    if !status.success() {
        bail!("{shown} ended with {status}");
    }
    Ok(())
}

/// All that guests need. `quiet` keeps standard output for the caller.
pub fn everything(quiet: bool) -> Result<Assets> {
    nvguest_rig::provision::quiet(quiet);
    let folder = provision(&root().join(".rig"))?;
    let assets = Assets::at(folder.path(""));
    step("build the backend and the tools", || binaries(&assets))?;
    for series in KERNELS {
        module(&folder, series)?;
    }
    let tools = guest_tools(&assets)?;
    let parts = Parts {
        assets: &assets,
        agent: &assets.binary("nvguest-agent"),
        tools: &tools,
        libraries: &library_folder(&folder),
    };
    step("make the guests' images", || {
        KERNELS.iter().try_for_each(|series| image::build(&parts, series).map(drop))
    })?;
    Ok(assets)
}

/// Builds the guest module for one kernel, without a warning.
pub fn module(folder: &Folder, series: &str) -> Result<()> {
    let sources = root().join("guest-module");
    step(&format!("build the guest module for Linux {series}"), || {
        build_module(folder, series, &sources).map(drop)
    })
}

/// The programs of `tools/` that guests have.
fn tool_names() -> Result<Vec<String>> {
    let tools = root().join("tools");
    let entries = fs::read_dir(&tools).with_context(|| format!("read {}", tools.display()))?;
    let mut names: Vec<String> = entries
        .flatten()
        .filter(|entry| entry.path().join("src/main.rs").exists())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| !HOST_TOOLS.contains(&name.as_str()))
        .collect();
    names.sort();
    Ok(names)
}

fn guest_tools(assets: &Assets) -> Result<Vec<PathBuf>> {
    Ok(tool_names()?.iter().map(|name| assets.binary(name)).collect())
}

fn binaries(assets: &Assets) -> Result<()> {
    let tools = tool_names()?;
    let mut words = vec!["build", "--quiet", "--release", "--target", TARGET, "--bins"];
    for package in ["vhost-user-nvguest", "nvguest-rig"] {
        words.extend(["--package", package]);
    }
    for tool in &tools {
        words.extend(["--package", tool]);
    }
    run(cargo(&words).env("RUSTFLAGS", "-C target-feature=+crt-static"))?;
    let built = root().join("target").join(TARGET).join("release");
    let place = assets.root().join("bin");
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    let ours = ["vhost-user-nvguest", "nvguest-agent", "nvguest-run"];
    for name in ours.into_iter().chain(tools.iter().map(String::as_str)) {
        let (from, to) = (built.join(name), place.join(name));
        let fresh = place.join(format!("{name}.new"));
        run(Command::new("strip").arg("-o").arg(&fresh).arg(&from))?;
        fs::rename(&fresh, &to).with_context(|| format!("rename to {}", to.display()))?;
    }
    Ok(())
}
