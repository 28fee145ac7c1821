//! Profiles for people: one looked at, two compared.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use anyhow::{bail, Result};
use nvguest_abi::profile::{Control, Profile};

use crate::write;

/// A profile whole, or the rows whose number or name `what` gives.
pub fn profile(profile: &Profile, what: Option<&str>) -> Result<String> {
    let text = write::file(profile, None);
    let Some(what) = what else { return Ok(text) };
    let wanted = match what.strip_prefix("0x").map(|digits| u32::from_str_radix(digits, 16)) {
        Some(Ok(number)) => format!("0x{number:08x}"),
        _ => what.to_uppercase(),
    };
    let mut found = String::new();
    let mut heading = "";
    let mut shown = "";
    for line in text.lines() {
        if line.starts_with('[') {
            heading = line;
        }
        let (key, row) = line.split_once(" = {").unwrap_or((line, ""));
        let name = row.split('"').nth(1).unwrap_or_default();
        if row.is_empty()
            || !(key.to_uppercase().contains(&wanted.to_uppercase()) || name.contains(&wanted))
        {
            continue;
        }
        if shown != heading {
            let _ = writeln!(found, "{heading}");
            shown = heading;
        }
        let _ = writeln!(found, "{line}");
    }
    if found.is_empty() {
        bail!("release {} has nothing called {what}", profile.release);
    }
    Ok(found)
}

/// What changed in one section: lines for added, removed and changed.
pub struct Changes {
    /// The section.
    pub section: &'static str,
    /// New names.
    pub added: Vec<String>,
    /// Gone names.
    pub removed: Vec<String>,
    /// Name, and what is different.
    pub changed: Vec<(String, String)>,
}

/// All that changed between two releases, section by section.
pub fn changes(old: &Profile, new: &Profile) -> Vec<Changes> {
    let sections = vec![
        section(
            "escapes",
            &old.escapes,
            &new.escapes,
            |key, _| key.clone(),
            |a, b| {
                let size = sizes(a.size, b.size);
                join([size, moved(a.layout != b.layout || (a.size == b.size && a != b), "changed")])
            },
        ),
        section("controls", &old.controls, &new.controls, |_, c| c.name.clone(), control),
        section(
            "classes",
            &old.classes,
            &new.classes,
            |_, c| c.name.clone(),
            |a, b| {
                join([
                    sizes(a.size, b.size),
                    words("access", a.access.name(), b.access.name()),
                    words("parameters", a.params.name(), b.params.name()),
                    moved(a.parents != b.parents, "parents"),
                    moved(a.flags != b.flags, "flags"),
                ])
            },
        ),
        section("uvm", &old.uvm, &new.uvm, |_, c| c.name.clone(), command),
        section(
            "nvkms",
            &by_name(&old.nvkms),
            &by_name(&new.nvkms),
            |key, _| key.clone(),
            |a, b| {
                join([
                    sizes(a.1.size, b.1.size),
                    words("number", &a.0.to_string(), &b.0.to_string()),
                ])
            },
        ),
        section("drm", &old.drm, &new.drm, |_, c| c.name.clone(), command),
        section(
            "structs",
            &old.structs,
            &new.structs,
            |key, _| key.clone(),
            |a, b| {
                let same_size = a.size == b.size && a.fields != b.fields;
                join([sizes(a.size, b.size), moved(same_size, "same size, other fields")])
            },
        ),
    ];
    let some = |c: &Changes| !(c.added.is_empty() && c.removed.is_empty() && c.changed.is_empty());
    sections.into_iter().filter(some).collect()
}

type Commands = BTreeMap<u32, nvguest_abi::profile::Command>;

fn by_name(commands: &Commands) -> BTreeMap<String, (u32, nvguest_abi::profile::Command)> {
    commands.iter().map(|(&nr, c)| (c.name.clone(), (nr, c.clone()))).collect()
}

fn section<K: Ord, V: PartialEq>(
    section: &'static str,
    old: &BTreeMap<K, V>,
    new: &BTreeMap<K, V>,
    name: impl Fn(&K, &V) -> String,
    change: impl Fn(&V, &V) -> String,
) -> Changes {
    let mut changes =
        Changes { section, added: Vec::new(), removed: Vec::new(), changed: Vec::new() };
    for (key, value) in new {
        match old.get(key) {
            None => changes.added.push(name(key, value)),
            Some(before) if before != value => {
                let mut what = change(before, value);
                if what.is_empty() {
                    what = "details".to_owned();
                }
                changes.changed.push((name(key, value), what));
            }
            Some(_) => {}
        }
    }
    let gone = old.iter().filter(|(key, _)| !new.contains_key(key));
    changes.removed.extend(gone.map(|(key, value)| name(key, value)));
    changes
}

fn control(a: &Control, b: &Control) -> String {
    let same_size = a.size == b.size && a.layout != b.layout;
    join([
        sizes(a.size, b.size),
        moved(same_size, "same size, fields moved"),
        words("access", a.access.name(), b.access.name()),
        words("name", &a.name, &b.name),
        moved(a.pointers != b.pointers, "pointers"),
        moved(a.files != b.files, "descriptors"),
        moved(a.converted_to != b.converted_to, "converter"),
        moved(a.wild != b.wild, "unexplained fields"),
        moved(a.flags != b.flags || a.rights != b.rights, "flags"),
    ])
}

fn command(a: &nvguest_abi::profile::Command, b: &nvguest_abi::profile::Command) -> String {
    join([sizes(a.size, b.size), words("name", &a.name, &b.name)])
}

fn sizes(a: u32, b: u32) -> String {
    if a == b {
        String::new()
    } else {
        format!("{a} → {b} bytes")
    }
}

fn words(what: &str, a: &str, b: &str) -> String {
    if a == b {
        String::new()
    } else {
        format!("{what} {a} → {b}")
    }
}

fn moved(yes: bool, what: &str) -> String {
    if yes {
        what.to_owned()
    } else {
        String::new()
    }
}

fn join<const N: usize>(parts: [String; N]) -> String {
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join(", ")
}

/// A readable list of what changed.
pub fn difference(old: &Profile, new: &Profile) -> String {
    let mut text = format!("{} → {}\n", old.release, new.release);
    let changes = changes(old, new);
    if changes.is_empty() {
        text += "nothing\n";
    }
    for change in changes {
        let _ = writeln!(text, "\n{}", change.section);
        for name in change.added {
            let _ = writeln!(text, "  + {name}");
        }
        for name in change.removed {
            let _ = writeln!(text, "  - {name}");
        }
        for (name, what) in change.changed {
            let _ = writeln!(text, "  ~ {name}: {what}");
        }
    }
    text
}
