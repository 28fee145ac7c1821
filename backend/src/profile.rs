//! The profile of the host's driver release.

use std::fmt::Display;
use std::path::Path;

use nvguest_abi::compiled::Compiled;
use nvguest_abi::release::Release;
use nvguest_abi::store::Store;

/// No profile fits; the text says which release, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoProfile(String);

impl NoProfile {
    fn because(error: impl Display) -> Self {
        Self(error.to_string())
    }
}

/// Resolves `release` and compiles its profile for a guest's capabilities. `folder`
/// has profiles that an admin measured, in place of those built in.
pub fn resolve(
    release: &str,
    capabilities: u32,
    folder: Option<&Path>,
    allow_unmeasured: bool,
) -> Result<Compiled, NoProfile> {
    let release: Release = release.parse().map_err(NoProfile::because)?;
    let store = folder.map_or_else(Store::embedded, Store::from_dir);
    let store = store.map_err(NoProfile::because)?;
    let resolved = store.resolve(&release, allow_unmeasured).map_err(NoProfile::because)?;
    if let Some(notice) = resolved.notice() {
        tracing::info!("{notice}");
    }
    Ok(resolved.compile(capabilities))
}
