//! One control or class, explained: what it is, who may, and why.

use serde::Serialize;

use crate::policy::{Policy, Ruling};
use crate::profile::Profile;
use crate::Capability;

/// What there is to say of a control, class, escape or UVM command.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Explanation {
    /// `control`, `class`, `escape` or `uvm`.
    pub kind: &'static str,
    /// Its number.
    pub number: u32,
    /// NVIDIA's name, if any source has one.
    pub name: String,
    /// Bytes of its parameters; none where no table says.
    pub size: Option<u32>,
    /// Who may by RM's own mark.
    pub access: &'static str,
    /// The verdict for this guest, in one word.
    pub verdict: &'static str,
    /// Each capability that opens it by itself.
    pub opened_by: Vec<&'static str>,
    /// Why.
    pub why: String,
}

const CAPABILITIES: [(Capability, &str); 5] = [
    (Capability::Utility, "utility"),
    (Capability::Graphics, "graphics"),
    (Capability::Video, "video"),
    (Capability::Compute, "compute"),
    (Capability::Display, "display"),
];

/// Bits of capabilities written as words, comma-separated; the word that is none as an error.
pub fn capabilities(words: &str) -> Result<u32, String> {
    let mut bits = 0;
    for word in words.split(',').map(str::trim).filter(|word| !word.is_empty()) {
        let found = CAPABILITIES.iter().find(|(_, name)| *name == word);
        let Some((capability, _)) = found else {
            return Err(format!(
                "{word:?} is no capability; there are utility, graphics, video, compute and display"
            ));
        };
        bits |= *capability as u32;
    }
    Ok(bits)
}

/// All that is called `what`: a number (`0x20800102`), a name, or part of one.
pub fn explain(profile: &Profile, policy: &Policy, what: &str, guest: u32) -> Vec<Explanation> {
    let number = number(what);
    let wanted = what.to_uppercase();
    let meant = |nr: u32, name: &str| match number {
        Some(number) => nr == number,
        None => name.to_uppercase().contains(&wanted),
    };
    let about = |kind, number, name: &str, size, access, ruling: &dyn Fn(u32) -> Ruling| {
        let (verdict, why) = ruling(guest);
        let opens = |(capability, _): &&(Capability, &str)| ruling(*capability as u32).0 as u8 == 0;
        let opened_by = CAPABILITIES.iter().filter(opens).map(|(_, name)| *name).collect();
        let name = name.to_owned();
        Explanation { kind, number, name, size, access, verdict: verdict.name(), opened_by, why }
    };
    let mut found = Vec::new();
    for (&nr, c) in profile.controls.iter().filter(|(&nr, c)| meant(nr, &c.name)) {
        let ruling = |bits| policy.control(nr, c, bits);
        found.push(about("control", nr, &c.name, Some(c.size), c.access.name(), &ruling));
    }
    for (&nr, c) in profile.classes.iter().filter(|(&nr, c)| meant(nr, &c.name)) {
        let ruling = |bits| policy.class(c, bits);
        found.push(about("class", nr, &c.name, Some(c.size), c.access.name(), &ruling));
    }
    for (key, e) in profile.escapes.iter().filter(|(key, e)| meant(e.nr, key)) {
        let name = key.split('/').next().unwrap_or(key);
        found.push(about("escape", e.nr, key, Some(e.size), "user", &|_| policy.escape(name)));
    }
    for (&nr, c) in profile.uvm.iter().filter(|(&nr, c)| meant(nr, &c.name)) {
        let ruling = |bits| policy.uvm(&c.name, bits);
        found.push(about("uvm", nr, &c.name, Some(c.size), "user", &ruling));
    }
    let opaque = number.filter(|nr| is_opaque(*nr) && !profile.controls.contains_key(nr));
    if let Some(nr) = opaque {
        let ruling = |bits| policy.opaque(nr, bits);
        found.push(about("control", nr, "", None, "user", &ruling));
    }
    found
}

/// Whether a control is a message that RM hands to the card's firmware unread: bit 15 on the
/// subdevice's class, or anything on the two classes made for it.
pub fn is_opaque(command: u32) -> bool {
    match command >> 16 {
        0x2080 => command & 0x8000 != 0,
        0x2081 | 0x2082 => true,
        _ => false,
    }
}

fn number(text: &str) -> Option<u32> {
    u32::from_str_radix(text.strip_prefix("0x").or_else(|| text.strip_prefix("0X"))?, 16).ok()
}
