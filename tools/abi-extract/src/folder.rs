//! Many profiles as a folder: a root, differences, and an index of what is equal.

use std::collections::BTreeMap;
use std::path::Path;

use anyhow::{bail, Context, Result};
use nvguest_abi::profile::Profile;
use nvguest_abi::release::Release;
use nvguest_abi::store::INDEX;

use crate::write;

/// The files of a folder, by name.
pub type Files = BTreeMap<String, String>;

/// The folder for these profiles, oldest first. The oldest is the root; each other names as
/// its parent the older profile that it differs least from.
pub fn build(profiles: &[Profile]) -> Result<Files> {
    let mut distinct: Vec<&Profile> = Vec::new();
    let mut equal: Vec<(&str, &str)> = Vec::new();
    let mut files = Files::new();
    for profile in profiles {
        if let Some(same) = distinct.iter().rev().find(|other| same(other, profile)) {
            equal.push((&profile.release, &same.release));
            continue;
        }
        files.insert(format!("{}.toml", profile.release), difference(&distinct, profile));
        distinct.push(profile);
    }
    if distinct.is_empty() {
        bail!("no release to write");
    }
    files.insert(INDEX.to_owned(), index(&equal));
    Ok(files)
}

/// The text of a profile next to older ones.
pub fn difference(older: &[&Profile], profile: &Profile) -> String {
    let texts = older.iter().rev().map(|parent| write::file(profile, Some(parent)));
    texts.min_by_key(String::len).unwrap_or_else(|| write::file(profile, None))
}

/// Whether two releases have the same interface.
pub fn same(one: &Profile, other: &Profile) -> bool {
    let renamed = Profile { release: other.release.clone(), ..one.clone() };
    renamed == *other
}

/// The text of the index.
pub fn index(equal: &[(&str, &str)]) -> String {
    let mut text =
        String::from("# Releases whose interface is that of another, byte for byte.\n[equal]\n");
    for (release, profile) in equal {
        text += &format!("\"{release}\" = \"{profile}\"\n");
    }
    text
}

/// Reads the profiles of a folder.
pub fn read(folder: &Path) -> Result<Files> {
    let mut files = Files::new();
    for entry in std::fs::read_dir(folder).with_context(|| format!("{}", folder.display()))? {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if name.ends_with(".toml") {
            files.insert(name, std::fs::read_to_string(&path)?);
        }
    }
    Ok(files)
}

/// Makes the folder hold these files and no other profile.
pub fn write(folder: &Path, files: &Files) -> Result<()> {
    std::fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    for name in read(folder)?.keys().filter(|name| !files.contains_key(*name)) {
        std::fs::remove_file(folder.join(name))?;
    }
    for (name, text) in files {
        std::fs::write(folder.join(name), text).with_context(|| name.clone())?;
    }
    Ok(())
}

/// Names of files that differ, are missing or are there without a reason.
pub fn differences(folder: &Path, files: &Files) -> Result<Vec<String>> {
    let there = read(folder)?;
    let names: std::collections::BTreeSet<&String> = there.keys().chain(files.keys()).collect();
    Ok(names
        .into_iter()
        .filter_map(|name| match (there.get(name), files.get(name)) {
            (Some(one), Some(other)) if one == other => None,
            (Some(_), Some(_)) => Some(format!("{name}: not what is measured")),
            (None, _) => Some(format!("{name}: missing")),
            (_, None) => Some(format!("{name}: of no tag that was measured")),
        })
        .collect())
}

/// Adds one measured release to a folder; says which file or line it became.
pub fn add(folder: &Path, profile: &Profile) -> Result<String> {
    let store = nvguest_abi::store::Store::from_dir(folder)?;
    let release: Release = profile.release.parse()?;
    let mut older = Vec::new();
    for other in store.profiles().filter(|other| **other < release) {
        older.push(store.load(other)?);
    }
    let name = format!("{release}.toml");
    if let Some(equal) = older.iter().rev().find(|other| same(other, profile)) {
        let path = folder.join(INDEX);
        let mut text = std::fs::read_to_string(&path).unwrap_or_else(|_| index(&[]));
        let line = format!("\"{release}\" = \"{}\"\n", equal.release);
        if !text.contains(&line) {
            text += &line;
            std::fs::write(&path, text)?;
        }
        return Ok(format!("equal to {}; noted in {INDEX}", equal.release));
    }
    let text = difference(&older.iter().collect::<Vec<_>>(), profile);
    std::fs::write(folder.join(&name), text)?;
    Ok(format!("written to {name}"))
}
