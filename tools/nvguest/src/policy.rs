//! `nvguest policy …`

use std::path::PathBuf;

use anyhow::{bail, Result};
use nvguest_abi::explain::{capabilities, explain, Explanation};
use nvguest_abi::policy::Policy;
use nvguest_abi::release::{from_proc_version, Release};
use nvguest_abi::store::Store;

use crate::out;

/// Where the driver says which release it is.
pub const PROC_VERSION: &str = "/proc/driver/nvidia/version";

/// Questions about the policy.
#[derive(clap::Subcommand, Debug)]
pub enum Command {
    /// What a control, class, escape or UVM command is, who may issue it, and why.
    Explain {
        /// A number (0x20800102), a name, or part of one.
        what: String,
        /// Driver release; the host's own without it, or the newest measured without a driver.
        #[arg(long)]
        release: Option<Release>,
        /// The guest's capabilities: utility, graphics, video, compute, display.
        #[arg(long, default_value = "utility,graphics,video", value_parser = capabilities)]
        capabilities: u32,
        /// Folder of profiles; the built-in ones without it.
        #[arg(long)]
        profiles: Option<PathBuf>,
        /// Take the nearest older profile for a release that was not measured.
        #[arg(long)]
        allow_unmeasured: bool,
    },
}

/// Answers.
pub fn run(command: &Command, json: bool) -> Result<()> {
    let Command::Explain { what, release, capabilities, profiles, allow_unmeasured } = command;
    let store = match profiles {
        Some(folder) => Store::from_dir(folder)?,
        None => Store::embedded()?,
    };
    let release = match release {
        Some(release) => release.clone(),
        None => host(&store)?,
    };
    let resolved = store.resolve(&release, *allow_unmeasured)?;
    if let Some(notice) = resolved.notice() {
        eprintln!("nvguest: {notice}");
    }
    let found = explain(&resolved.profile, Policy::built_in(), what, *capabilities);
    if found.is_empty() {
        bail!("release {release} has nothing called {what}; try part of NVIDIA's name, or a number like 0x20800102");
    }
    if json {
        return out::json(&found);
    }
    out::say(&found.iter().map(spell).collect::<String>())
}

/// The host's release, or the newest measured on a machine without the driver.
fn host(store: &Store) -> Result<Release> {
    if let Ok(text) = std::fs::read_to_string(PROC_VERSION) {
        return Ok(from_proc_version(&text)?);
    }
    let measured = store.measured();
    let Some(newest) = measured.last() else {
        bail!("there is no profile; name one with --release")
    };
    eprintln!("nvguest: no driver here; the newest profile is {newest}");
    Ok((*newest).clone())
}

fn spell(e: &Explanation) -> String {
    let name = if e.name.is_empty() { "(no name in any source)" } else { &e.name };
    let size = e.size.map_or("of any size".to_owned(), |size| format!("{size} bytes"));
    let opened = if e.opened_by.is_empty() { "nothing".to_owned() } else { e.opened_by.join(", ") };
    format!(
        "{} {:#010x} {name}\n  parameters  {size}\n  RM's mark   {}\n  verdict     {}\n  \
         opened by   {opened}\n  why         {}\n",
        e.kind, e.number, e.access, e.verdict, e.why
    )
}
