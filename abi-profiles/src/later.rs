//! What is publicly known of releases whose sources were not at hand.

use serde::Deserialize;

use crate::profile::{Access, Control, Profile};
use crate::release::Release;

static LATER: &str = include_str!("../policy/later.toml");

/// A public fact.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Fact {
    /// The first release it holds for.
    pub since: String,
    /// What is known.
    pub says: String,
    /// Where from.
    pub source: String,
}

/// A control without pointers that came to a branch after its last measured release.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LaterControl {
    /// The first release of the branch that has it.
    pub since: String,
    /// The command.
    pub command: u32,
    /// NVIDIA's name.
    pub name: String,
    /// Bytes of its parameters.
    pub size: u32,
    /// Where from.
    pub source: String,
}

/// All that is known.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Later {
    /// Facts to tell.
    pub fact: Vec<Fact>,
    /// Controls to add.
    pub control: Vec<LaterControl>,
}

/// The file, read.
pub fn later() -> Later {
    toml::from_str(LATER).expect("INVARIANT: a test reads the built-in file")
}

/// Adds the controls that `host` has and the profile of an older release of its branch lacks.
pub fn complete(profile: &mut Profile, host: &Release) {
    for known in later().control {
        let holds = known
            .since
            .parse::<Release>()
            .is_ok_and(|since| since.branch() == host.branch() && since <= *host);
        if holds {
            profile.controls.entry(known.command).or_insert_with(|| Control {
                name: known.name,
                size: known.size,
                access: Access::User,
                flags: String::new(),
                rights: 0,
                layout: String::new(),
                converted_to: None,
                pointers: Vec::new(),
                files: Vec::new(),
                wild: String::new(),
            });
        }
    }
}

/// What is known that holds for `host`, as the end of a clause; nothing if nothing is.
pub fn known(host: &Release) -> String {
    let facts = later().fact;
    let holds = |fact: &&Fact| fact.since.parse::<Release>().is_ok_and(|since| since <= *host);
    let says: Vec<String> =
        facts.iter().filter(holds).map(|f| format!("{} ({})", f.says, f.source)).collect();
    if says.is_empty() {
        return String::new();
    }
    format!("; known of it: {}", says.join("; "))
}
