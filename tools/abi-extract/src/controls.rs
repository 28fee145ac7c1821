//! The tables of exported methods: which controls there are.

use std::collections::BTreeMap;

use anyhow::{bail, Context, Result};
use nvguest_abi::profile::{Access, Control};

use crate::ctext;
use crate::probe::{Answers, Probe, Type};

/// A row of an exported-method table, as text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// File and row, for messages.
    pub label: String,
    /// The command.
    pub command: u32,
    /// Value of the flags.
    pub flags: u64,
    /// Rights on the object.
    pub rights: u32,
    /// The parameters' type, if there are any.
    pub params: Option<String>,
    /// The handler.
    pub handler: String,
}

/// Reads every row of a generated file, and checks that there are as many as it says.
pub fn parse(file: &str, text: &str) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut declared = 0usize;
    let mut row = BTreeMap::new();
    for line in text.lines() {
        let line = line.trim();
        // A comment before the number until 590, a designated initialiser since 595.
        let count = line.strip_prefix("/*numEntries=*/").or(line.strip_prefix(".numEntries="));
        if let Some(count) = count {
            declared += count
                .trim()
                .trim_end_matches(',')
                .parse::<usize>()
                .with_context(|| format!("{file}: number of entries not understood: {line}"))?;
        }
        let Some((key, value)) = line.strip_prefix("/*").and_then(|l| l.split_once("=*/")) else {
            continue;
        };
        row.insert(key.to_owned(), value.trim().trim_end_matches(',').to_owned());
        if key == "func" {
            let label = format!("{file} row {}", rows.len());
            rows.push(finish(label, &row)?);
            row.clear();
        }
    }
    if rows.len() != declared {
        bail!(
            "{file}: it declares {declared} exported methods, {} rows were understood",
            rows.len()
        );
    }
    Ok(rows)
}

fn finish(label: String, row: &BTreeMap<String, String>) -> Result<Row> {
    let text =
        |key: &str| row.get(key).map(String::as_str).with_context(|| format!("{label}: no {key}"));
    let number = |key: &str| {
        let text = text(key)?;
        ctext::literal(text).with_context(|| format!("{label}: {key} is not a number: {text}"))
    };
    let size = ctext::without_comments(text("paramSize")?);
    let params = match size.trim() {
        "0" => None,
        size => match size.strip_prefix("sizeof(").and_then(|rest| rest.strip_suffix(')')) {
            Some(name) => Some(name.trim().to_owned()),
            None => bail!("{label}: size of parameters not understood: {size}"),
        },
    };
    Ok(Row {
        command: u32::try_from(number("methodId")?)?,
        flags: number("flags")?,
        rights: u32::try_from(number("accessRight")?)?,
        params,
        handler: text("func")?.trim_matches('"').to_owned(),
        label,
    })
}

/// The names of flags that this release's `control.h` gives.
pub struct Flags(Vec<(u64, String)>);

impl Flags {
    /// Reads `control.h`.
    pub fn parse(text: &str) -> Result<Self> {
        let mut flags = Vec::new();
        for line in ctext::without_comments(text).lines() {
            let mut words = line.split_whitespace();
            let (Some("#define"), Some(name)) = (words.next(), words.next()) else { continue };
            let Some(name) = name.strip_prefix("RMCTRL_FLAGS_") else { continue };
            let body: Vec<&str> = words.collect();
            match ctext::literal(&body.join(" ")) {
                Some(bit) if bit.is_power_of_two() => flags.push((bit, name.to_owned())),
                // Nought is "none", and other macros combine or test bits.
                _ => {}
            }
        }
        if !flags.iter().any(|(_, name)| name == "NON_PRIVILEGED") {
            bail!("control.h: no RMCTRL_FLAGS_NON_PRIVILEGED; its form has changed");
        }
        flags.sort();
        Ok(Self(flags))
    }

    /// Who may call, and the names of the other flags.
    pub fn decode(&self, label: &str, mut value: u64) -> Result<(Access, String)> {
        let mut names = Vec::new();
        for (bit, name) in &self.0 {
            if value & bit != 0 {
                names.push(name.as_str());
                value &= !bit;
            }
        }
        if value != 0 {
            bail!("{label}: flag {value:#x} has no name in control.h");
        }
        let has = |name| names.contains(&name);
        let access = match () {
            () if has("INTERNAL") => Access::Internal,
            () if has("NON_PRIVILEGED") => Access::User,
            () if has("PRIVILEGED") => Access::Admin,
            () => Access::Kernel,
        };
        names.retain(|name| !["INTERNAL", "NON_PRIVILEGED", "PRIVILEGED"].contains(name));
        names.sort_unstable();
        Ok((access, names.join(" ")))
    }
}

/// NVIDIA's name for a command, from the macros of the headers.
pub fn name(row: &Row, macros_by_value: &BTreeMap<u64, Vec<String>>) -> String {
    let class = row.command >> 16;
    let prefix = format!("NV{class:04X}_CTRL_");
    let candidates = macros_by_value.get(&u64::from(row.command)).map_or(&[][..], Vec::as_slice);
    let params = row.params.as_deref().unwrap_or_default();
    let fits = |name: &str| {
        let stem = params.strip_suffix("_PARAMS").unwrap_or(params);
        name == stem || name.replacen("_CTRL_CMD_", "_CTRL_", 1) == stem
    };
    // A small number is the value of many macros; one with a class in it, of hardly any other.
    let named = |name: &&String| {
        let own = name.starts_with(&prefix) || class != 0;
        own && (name.contains("_CTRL_CMD_") || fits(name))
    };
    candidates
        .iter()
        .filter(named)
        .min_by_key(|name| (!fits(name), !name.starts_with(&prefix), name.len(), name.as_str()))
        .cloned()
        .unwrap_or_else(|| row.handler.clone())
}

/// The rows of a release, asked of the compiler.
pub struct Asked(Vec<(Row, Option<Type>)>);

impl Asked {
    /// Asks for every parameter struct.
    pub fn ask(rows: Vec<Row>, probe: &mut Probe) -> Self {
        Self(
            rows.into_iter()
                .map(|row| {
                    let kind = row.params.as_ref().map(|name| probe.layout(&row.label, name));
                    (row, kind)
                })
                .collect(),
        )
    }

    /// The controls. A command that two tables export must be the same in both.
    pub fn finish(
        self,
        answers: &Answers,
        flags: &Flags,
        macros_by_value: &BTreeMap<u64, Vec<String>>,
    ) -> Result<BTreeMap<u32, Control>> {
        let mut controls: BTreeMap<u32, Control> = BTreeMap::new();
        for (row, kind) in self.0 {
            let (access, flags) = flags.decode(&row.label, row.flags)?;
            let layout = kind.map(|kind| answers.layout(kind));
            let control = Control {
                name: name(&row, macros_by_value),
                size: layout.map_or(0, |layout| layout.size),
                access,
                flags,
                rights: row.rights,
                layout: layout.map_or(String::new(), |layout| layout.fingerprint()),
                converted_to: None,
                pointers: Vec::new(),
                files: Vec::new(),
                wild: String::new(),
            };
            if let Some(other) = controls.insert(row.command, control.clone()) {
                if (other.size, other.access) != (control.size, control.access) {
                    bail!(
                        "{}: command {:#x} is exported twice, {} bytes for {} and {} bytes for {}",
                        row.label,
                        row.command,
                        other.size,
                        other.access.name(),
                        control.size,
                        control.access.name(),
                    );
                }
            }
        }
        Ok(controls)
    }
}
