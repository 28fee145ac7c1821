//! What is publicly known of releases newer than any whose sources were at hand.

use serde::Deserialize;

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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Facts {
    fact: Vec<Fact>,
}

/// Every fact, oldest first.
pub fn facts() -> Vec<Fact> {
    toml::from_str::<Facts>(LATER).map(|facts| facts.fact).unwrap_or_default()
}

/// What is known that holds for `host`, as the end of a clause; nothing if nothing is.
pub fn known(host: &Release) -> String {
    let facts = facts();
    let holds = |fact: &&Fact| fact.since.parse::<Release>().is_ok_and(|since| since <= *host);
    let says: Vec<String> =
        facts.iter().filter(holds).map(|f| format!("{} ({})", f.says, f.source)).collect();
    if says.is_empty() {
        return String::new();
    }
    format!("; known of it: {}", says.join("; "))
}
