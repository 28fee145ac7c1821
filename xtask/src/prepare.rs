//! Provisions `.rig`, builds binaries, the guest module and the images.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{bail, Context, Result};
use nvguest_rig::assets::KERNELS;
use nvguest_rig::image::{self, Parts};
use nvguest_rig::process::capture;
use nvguest_rig::provision::{build_module, library_folder, provision, step, Folder};
use nvguest_rig::Assets;

/// Binaries are linked statically where they can be: the same file runs on the
/// build machine, in every guest and on whatever machine a bundle is taken to.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Programs of `tools/` that load libraries at run time, which a static binary cannot.
const LOADING_TOOLS: [&str; 1] = ["nesprobe"];

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

/// Writes into a folder that goes elsewhere of what commit it is, and whether of more than that.
pub fn note_commit(folder: &Path) -> Result<()> {
    let commit = capture(Command::new("git").args(["describe", "--always", "--dirty"]))?;
    fs::write(folder.join("commit"), commit).context("write the commit")
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
    let (loading, linked): (Vec<&str>, Vec<&str>) =
        tools.iter().map(String::as_str).partition(|name| LOADING_TOOLS.contains(name));
    let mut packages = vec!["vhost-user-nvguest", "nvguest-rig"];
    packages.extend(&linked);
    let mut command = build(&packages);
    run(command.args(["--target", TARGET]).env("RUSTFLAGS", "-C target-feature=+crt-static"))?;
    // Built without naming a target they lie in a folder of their own, so neither kind of
    // building undoes the other's.
    run(&mut build(&loading))?;
    let place = assets.root().join("bin");
    fs::create_dir_all(&place).with_context(|| format!("create {}", place.display()))?;
    let built = root().join("target");
    let ours = ["vhost-user-nvguest", "nvguest-agent", "nvguest-run"];
    for name in ours.iter().chain(&linked) {
        install(&built.join(TARGET).join("release").join(name), &place)?;
    }
    loading.iter().try_for_each(|name| install(&built.join("release").join(name), &place))
}

/// The command that builds the programs of these packages.
fn build(packages: &[&str]) -> Command {
    let mut command = cargo(&["build", "--quiet", "--release", "--bins"]);
    for package in packages {
        command.args(["--package", package]);
    }
    command
}

/// Puts a program into a folder, without what only a debugger needs.
fn install(program: &Path, place: &Path) -> Result<()> {
    let to = place.join(program.file_name().unwrap_or_default());
    let fresh = to.with_extension("new");
    run(Command::new("strip").arg("-o").arg(&fresh).arg(program))?;
    fs::rename(&fresh, &to).with_context(|| format!("rename to {}", to.display()))
}
