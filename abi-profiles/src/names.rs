//! What the numbers of a call are called, by the profile of the release that answers it.

use crate::profile::Profile;
use crate::release::Release;
use crate::store::Store;

/// What numbers are called in one release.
pub struct Names(Option<Profile>);

impl Names {
    /// The names of a release; none if it was never measured.
    pub fn of(release: &str) -> Self {
        let find = || {
            let release: Release = release.parse().ok()?;
            Some(Store::embedded().ok()?.resolve(&release, true).ok()?.profile)
        };
        Self(find())
    }

    /// The name of a `control`, `class`, `escape` or `uvm` command.
    pub fn call(&self, what: &str, number: u32) -> Option<&str> {
        let profile = self.0.as_ref()?;
        match what {
            "control" => Some(&profile.controls.get(&number)?.name),
            "class" => Some(&profile.classes.get(&number)?.name),
            "escape" => {
                let found = profile.escapes.iter().find(|(_, escape)| escape.nr == number);
                // A second struct of one number is NAME/STRUCT.
                found.map(|(name, _)| name.split('/').next().unwrap_or(name))
            }
            "uvm" => Some(&profile.uvm.get(&number)?.name),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_number_has_the_name_that_its_release_gives_it() {
        let names = Names::of("580.159.04");
        assert_eq!(names.call("control", 0x201), Some("NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS"));
        assert_eq!(names.call("class", 0x41), Some("NV01_ROOT_CLIENT"));
        assert_eq!(names.call("escape", 0x2b), Some("NV_ESC_RM_ALLOC"));
        assert_eq!(names.call("control", 0xffff_ffff), None);
        assert_eq!(Names::of("no release").call("control", 0x201), None);
    }
}
