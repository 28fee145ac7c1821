//! The checked-in profiles: reading them, following parents to the root.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use crate::profile::{FileForm, Profile};
use crate::release::Release;

/// (release, JSON) of every profile in `releases/`, and (release, profile) of the index.
type Embedded = (&'static [(&'static str, &'static str)], &'static [(&'static str, &'static str)]);
static EMBEDDED: Embedded = include!(concat!(env!("OUT_DIR"), "/releases.rs"));

/// Name of the file that says which releases are equal to another.
pub const INDEX: &str = "index.toml";

/// What is wrong with a folder of profiles.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder or a file in it cannot be read.
    #[error("profile file {file} cannot be read: {source}")]
    Unreadable {
        /// The file.
        file: String,
        /// Why.
        source: std::io::Error,
    },
    /// Not the form that a profile has.
    #[error("profile file {file}: {message}")]
    Form {
        /// The file.
        file: String,
        /// What is wrong.
        message: String,
    },
    /// A parent that is not there.
    #[error("profile {child} names parent {parent}, and there is no {parent}.toml")]
    MissingParent {
        /// The profile.
        child: String,
        /// Its parent.
        parent: String,
    },
    /// Parents that lead back to where they began.
    #[error("profile {0} is its own ancestor")]
    Cycle(String),
    /// A release that was never measured.
    #[error("release {0} is not measured")]
    NotMeasured(String),
}

/// The profiles at hand.
#[derive(Default)]
pub struct Store {
    files: BTreeMap<Release, Text>,
    equal: BTreeMap<Release, Release>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    #[serde(default)]
    equal: BTreeMap<String, String>,
}

/// A file's text: TOML as checked in, or JSON that the build made of it, which reads faster.
enum Text {
    Toml(String),
    Json(&'static str),
}

impl Store {
    /// The profiles that this program was built with.
    pub fn embedded() -> Result<Self, StoreError> {
        let (files, equal) = EMBEDDED;
        let release = |text: &str| parse_release("the built-in profiles", text);
        let mut store = Self::default();
        for (name, text) in files {
            store.files.insert(release(name)?, Text::Json(text));
        }
        for (one, other) in equal {
            store.equal.insert(release(one)?, release(other)?);
        }
        Ok(store)
    }

    /// The profiles in a folder.
    pub fn from_dir(folder: &Path) -> Result<Self, StoreError> {
        let unreadable = |path: &Path| {
            let file = path.display().to_string();
            move |source| StoreError::Unreadable { file, source }
        };
        let mut files = Vec::new();
        for entry in std::fs::read_dir(folder).map_err(unreadable(folder))? {
            let path = entry.map_err(unreadable(folder))?.path();
            let Some(name) = path.file_name().and_then(|name| name.to_str()) else { continue };
            if name.ends_with(".toml") {
                let text = std::fs::read_to_string(&path).map_err(unreadable(&path))?;
                files.push((name.to_owned(), text));
            }
        }
        Self::new(files)
    }

    /// Profiles from (file name, text).
    pub fn new(files: impl IntoIterator<Item = (String, String)>) -> Result<Self, StoreError> {
        let mut store = Self::default();
        for (name, text) in files {
            if name == INDEX {
                store.equal = index(&text)?;
            } else {
                let release = name.trim_end_matches(".toml");
                store.files.insert(parse_release(&name, release)?, Text::Toml(text));
            }
        }
        for (release, profile) in &store.equal {
            if !store.files.contains_key(profile) {
                let (child, parent) = (release.to_string(), profile.to_string());
                return Err(StoreError::MissingParent { child, parent });
            }
        }
        Ok(store)
    }

    /// Every measured release, oldest first.
    pub fn measured(&self) -> Vec<&Release> {
        let mut releases: Vec<_> = self.files.keys().chain(self.equal.keys()).collect();
        releases.sort();
        releases
    }

    /// Every distinct profile, oldest first.
    pub fn profiles(&self) -> impl Iterator<Item = &Release> {
        self.files.keys()
    }

    /// The measured release whose file says what `release` is.
    pub fn profile_of(&self, release: &Release) -> Option<&Release> {
        match self.files.get_key_value(release) {
            Some((profile, _)) => Some(profile),
            None => self.equal.get(release),
        }
    }

    /// The profile of a measured release, with all that it has from its ancestors.
    pub fn load(&self, release: &Release) -> Result<Profile, StoreError> {
        let not_measured = || StoreError::NotMeasured(release.to_string());
        let mut next = Some(self.profile_of(release).ok_or_else(not_measured)?.clone());
        let mut chain: Vec<FileForm> = Vec::new();
        while let Some(release) = next {
            if chain.iter().any(|form| form.release == release.as_str()) {
                return Err(StoreError::Cycle(release.to_string()));
            }
            let Some(text) = self.files.get(&release) else {
                let child = chain.last().map_or(String::new(), |form| form.release.clone());
                return Err(StoreError::MissingParent { child, parent: release.to_string() });
            };
            let form = parse(&release, text)?;
            next = match &form.parent {
                Some(parent) => Some(parse_release(release.as_str(), parent)?),
                None => None,
            };
            chain.push(form);
        }
        let mut profile = Profile::default();
        while let Some(form) = chain.pop() {
            apply(&mut profile, form)?;
        }
        crate::check::check(&profile)?;
        Ok(profile)
    }
}

fn form_error(file: &str, message: impl ToString) -> StoreError {
    StoreError::Form { file: file.to_owned(), message: message.to_string() }
}

fn parse_release(file: &str, text: &str) -> Result<Release, StoreError> {
    text.parse().map_err(|error| form_error(file, error))
}

fn index(text: &str) -> Result<BTreeMap<Release, Release>, StoreError> {
    let index: Index = toml::from_str(text).map_err(|error| form_error(INDEX, error))?;
    let pairs = index.equal.iter();
    pairs
        .map(|(one, other)| Ok((parse_release(INDEX, one)?, parse_release(INDEX, other)?)))
        .collect()
}

fn parse(release: &Release, text: &Text) -> Result<FileForm, StoreError> {
    let file = format!("{release}.toml");
    let form: FileForm = match text {
        Text::Toml(text) => toml::from_str(text).map_err(|error| form_error(&file, error))?,
        Text::Json(text) => serde_json::from_str(text).map_err(|error| form_error(&file, error))?,
    };
    if form.release != release.as_str() {
        return Err(form_error(&file, format!("it says that it is release {}", form.release)));
    }
    Ok(form)
}

fn apply(profile: &mut Profile, form: FileForm) -> Result<(), StoreError> {
    let file = format!("{}.toml", form.release);
    profile.release = form.release;
    for (section, keys) in form.removed {
        for key in keys {
            let number = || number(&file, &key);
            let found = match section.as_str() {
                "escapes" => profile.escapes.remove(&key).is_some(),
                "structs" => profile.structs.remove(&key).is_some(),
                "controls" => profile.controls.remove(&number()?).is_some(),
                "classes" => profile.classes.remove(&number()?).is_some(),
                "uvm" => profile.uvm.remove(&number()?).is_some(),
                "nvkms" => profile.nvkms.remove(&number()?).is_some(),
                "drm" => profile.drm.remove(&number()?).is_some(),
                _ => return Err(form_error(&file, format!("no section is called {section}"))),
            };
            if !found {
                let message = format!("it removes {key} of {section}, which its parent lacks");
                return Err(form_error(&file, message));
            }
        }
    }
    profile.escapes.extend(form.escapes);
    profile.structs.extend(form.structs);
    numbered(&file, &mut profile.controls, form.controls)?;
    numbered(&file, &mut profile.classes, form.classes)?;
    numbered(&file, &mut profile.uvm, form.uvm)?;
    numbered(&file, &mut profile.nvkms, form.nvkms)?;
    numbered(&file, &mut profile.drm, form.drm)
}

fn numbered<T>(
    file: &str,
    into: &mut BTreeMap<u32, T>,
    from: BTreeMap<String, T>,
) -> Result<(), StoreError> {
    for (key, value) in from {
        into.insert(number(file, &key)?, value);
    }
    Ok(())
}

fn number(file: &str, key: &str) -> Result<u32, StoreError> {
    let digits = key.strip_prefix("0x").and_then(|digits| u32::from_str_radix(digits, 16).ok());
    digits.ok_or_else(|| form_error(file, format!("key {key} is not a number like 0x20800102")))
}
