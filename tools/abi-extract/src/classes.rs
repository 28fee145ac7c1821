//! `resource_list.h`: which classes there are, and what RM copies with each.

use std::collections::BTreeMap;

use anyhow::{bail, Context, Result};
use nvguest_abi::profile::{Access, Class, Params};

use crate::ctext;
use crate::probe::{Answers, Probe, Type, Value};

/// An `RS_ENTRY`, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    label: String,
    name: String,
    params: Params,
    layout: Option<String>,
    parents: String,
    access: Access,
    flags: String,
}

/// Reads every entry.
pub fn parse(file: &str, text: &str, macros: &BTreeMap<String, String>) -> Result<Vec<Entry>> {
    let text = ctext::resolve_conditionals(file, &ctext::without_comments(text), macros)?;
    let mut entries = Vec::new();
    for (line, fields) in ctext::calls(&text, "RS_ENTRY") {
        let label = format!("{file}:{line}");
        let [name, _internal, _multi, parents, params, _priority, flags, rights] = &fields[..]
        else {
            bail!("{label}: an RS_ENTRY of {} fields; 8 are understood", fields.len());
        };
        if rights != "RS_ACCESS_NONE" {
            bail!("{label}: rights not understood: {rights}");
        }
        let (params, layout) = params_of(&label, params)?;
        let (access, flags) = flags_of(&label, flags)?;
        let parents = parents_of(&label, parents)?;
        entries.push(Entry { label, name: name.clone(), params, layout, parents, access, flags });
    }
    if entries.is_empty() {
        bail!("{file}: no RS_ENTRY");
    }
    Ok(entries)
}

fn params_of(label: &str, text: &str) -> Result<(Params, Option<String>)> {
    let inner = |prefix: &str| {
        text.strip_prefix(prefix)?.strip_prefix('(')?.strip_suffix(')').map(|t| t.trim().to_owned())
    };
    match (text, inner("RS_OPTIONAL"), inner("RS_REQUIRED")) {
        ("RS_NONE", ..) => Ok((Params::None, None)),
        (_, Some(layout), _) => Ok((Params::Optional, Some(layout))),
        (_, _, Some(layout)) => Ok((Params::Required, Some(layout))),
        _ => bail!("{label}: parameters not understood: {text}"),
    }
}

fn flags_of(label: &str, text: &str) -> Result<(Access, String)> {
    let mut access = Access::Kernel;
    let mut names = Vec::new();
    for word in text.split('|') {
        let Some(name) = word.trim().strip_prefix("RS_FLAGS_") else {
            bail!("{label}: flags not understood: {text}");
        };
        match name {
            "INTERNAL_ONLY" => access = Access::Internal,
            "ALLOC_NON_PRIVILEGED" if access == Access::Kernel => access = Access::User,
            "ALLOC_PRIVILEGED" if access == Access::Kernel => access = Access::Admin,
            "NONE" | "ALLOC_KERNEL_PRIVILEGED" => {}
            name => names.push(name),
        }
    }
    names.sort_unstable();
    Ok((access, names.join(" ")))
}

fn parents_of(label: &str, text: &str) -> Result<String> {
    match text {
        "RS_ROOT_OBJECT" => return Ok("root".to_owned()),
        "RS_ANY_PARENT" => return Ok("any".to_owned()),
        _ => {}
    }
    let inner = text.strip_prefix("RS_LIST").and_then(ctext::parenthesised);
    let inner = inner.with_context(|| format!("{label}: parents not understood: {text}"))?;
    let mut names = Vec::new();
    for (_, fields) in ctext::calls(inner, "classId") {
        names.extend(fields);
    }
    if names.len() != ctext::arguments(inner).len() {
        bail!("{label}: parents not understood: {text}");
    }
    Ok(names.join(" "))
}

/// The entries of a release, asked of the compiler.
pub struct Asked(Vec<(Entry, Value, Option<Type>)>);

impl Asked {
    /// Asks for every number and struct.
    pub fn ask(entries: Vec<Entry>, probe: &mut Probe) -> Self {
        Self(
            entries
                .into_iter()
                .map(|entry| {
                    let number = probe.value(&entry.label, &entry.name);
                    let kind = entry.layout.as_ref().map(|name| probe.layout(&entry.label, name));
                    (entry, number, kind)
                })
                .collect(),
        )
    }

    /// The classes, and each one's params type for the layouts' section.
    pub fn finish(self, answers: &Answers) -> Result<BTreeMap<u32, (Class, Option<Type>)>> {
        let mut classes = BTreeMap::new();
        for (entry, number, kind) in self.0 {
            let number = answers.value32(number)?;
            // Root classes carry no mark: whoever may open the device may make a client.
            let access = if entry.parents == "root" { Access::User } else { entry.access };
            let class = Class {
                name: entry.name,
                access,
                params: entry.params,
                size: kind.map_or(0, |kind| answers.layout(kind).size),
                layout: entry.layout.unwrap_or_default(),
                parents: entry.parents,
                flags: entry.flags,
                files: Vec::new(),
            };
            if classes.insert(number, (class, kind)).is_some() {
                bail!("{}: class {number:#x} is listed twice", entry.label);
            }
        }
        Ok(classes)
    }
}
