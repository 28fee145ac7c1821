//! The host's release → the profile that serves it, or one sentence that helps.

use crate::compiled::Compiled;
use crate::profile::Profile;
use crate::release::Release;
use crate::store::{Store, StoreError};
use crate::Capability;

/// How a profile was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum How {
    /// The host's release was measured.
    Measured,
    /// The nearest older measured release of its branch.
    SameBranch,
    /// An older branch's, because the admin insisted: for diagnosis, without compute.
    Unmeasured,
}

/// A profile for a host.
#[derive(Debug)]
pub struct Resolved {
    /// The host's release.
    pub host: Release,
    /// The profile.
    pub profile: Profile,
    /// How it was found.
    pub how: How,
}

/// Why no profile serves a host. The caller's exit code is 78.
#[derive(Debug, thiserror::Error)]
pub enum ResolveError {
    /// Older than anything measured.
    #[error("driver {host} is older than the first profile ({first}); install {first} or newer")]
    TooOld {
        /// The host's release.
        host: Release,
        /// The oldest measured.
        first: Release,
    },
    /// A branch that was never measured.
    #[error(
        "driver {host} is of branch {}, which was not measured (profiles: {measured}){known}; \
         measure it with `abi-extract --from <its open sources> --out <folder>` and name the folder \
         with --profiles, or pass --allow-unmeasured (for diagnosis only: compute is off)",
        host.branch()
    )]
    UnmeasuredBranch {
        /// The host's release.
        host: Release,
        /// The oldest and the newest measured.
        measured: String,
        /// What is publicly known of it, as the end of a clause.
        known: String,
    },
    /// In a measured branch, before its first measured release.
    #[error(
        "driver {host} is older than the first measured release of its branch ({branch_first}); \
         install {branch_first} or newer, or measure {host} with \
         `abi-extract --from <its open sources> --out <folder>`"
    )]
    BeforeBranch {
        /// The host's release.
        host: Release,
        /// The branch's oldest measured.
        branch_first: Release,
    },
    /// The profiles themselves are broken.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Resolved {
    /// What a worker needs; without compute where the profile is another branch's.
    pub fn compile(&self, capabilities: u32) -> Compiled {
        let without_compute = capabilities & !(Capability::Compute as u32);
        let capabilities = if self.how == How::Unmeasured { without_compute } else { capabilities };
        let mut compiled = self.profile.compile(capabilities);
        compiled.release = self.host.to_string();
        compiled
    }

    /// The line for log and metrics where the profile is not the host's own.
    pub fn notice(&self) -> Option<String> {
        let (host, profile) = (&self.host, &self.profile.release);
        match self.how {
            How::Measured => None,
            How::SameBranch => Some(format!("{host}: profile {profile}, same branch")),
            How::Unmeasured => {
                Some(format!("{host}: profile {profile}, another branch; for diagnosis only"))
            }
        }
    }
}

impl Store {
    /// The profile that serves a host with this release.
    pub fn resolve(
        &self,
        host: &Release,
        allow_unmeasured: bool,
    ) -> Result<Resolved, ResolveError> {
        let measured = self.measured();
        let (Some(first), Some(last)) = (measured.first(), measured.last()) else {
            return Err(StoreError::NotMeasured(host.to_string()).into());
        };
        let found = |release: &Release, how| {
            let mut profile = self.load(release)?;
            if how == How::SameBranch {
                crate::later::complete(&mut profile, host);
            }
            Ok(Resolved { host: host.clone(), profile, how })
        };
        if self.profile_of(host).is_some() {
            return found(host, How::Measured);
        }
        if host < *first {
            return Err(ResolveError::TooOld { host: host.clone(), first: (*first).clone() });
        }
        let mut branch = measured.iter().filter(|release| release.branch() == host.branch());
        let branch_first = branch.clone().next();
        if let Some(nearest) = branch.rfind(|release| *release < &host) {
            return found(nearest, How::SameBranch);
        }
        if allow_unmeasured {
            if let Some(nearest) = measured.iter().rfind(|release| *release < &host) {
                return found(nearest, How::Unmeasured);
            }
        }
        Err(match branch_first {
            Some(branch_first) => ResolveError::BeforeBranch {
                host: host.clone(),
                branch_first: (*branch_first).clone(),
            },
            None => ResolveError::UnmeasuredBranch {
                host: host.clone(),
                measured: format!("{first} to {last}"),
                known: crate::later::known(host),
            },
        })
    }
}
