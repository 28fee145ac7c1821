//! May a guest? RM's own marks first, then a small overlay with reasons.

use std::sync::OnceLock;

use serde::Deserialize;

use crate::compiled::Verdict;
use crate::profile::{Access, Class, Control};
use crate::Capability;

static OVERLAY: &str = include_str!("../policy/overlay.toml");

/// A verdict, and why.
pub type Ruling = (Verdict, String);

/// The overlay, read.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    #[serde(default)]
    refuse: Vec<Refusal>,
    #[serde(default)]
    need: Vec<Need>,
    #[serde(default)]
    opaque: Vec<Opaque>,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Refusal {
    why: String,
    #[serde(default)]
    controls: Vec<Pattern>,
    #[serde(default)]
    classes: Vec<Pattern>,
    #[serde(default)]
    escapes: Vec<Pattern>,
    #[serde(default)]
    uvm: Vec<Pattern>,
    #[serde(default)]
    functions: Vec<Function>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Function {
    escape: String,
    number: u32,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Need {
    why: String,
    any: Vec<CapabilityName>,
    #[serde(default)]
    controls: Vec<Pattern>,
    #[serde(default)]
    classes: Vec<Pattern>,
    #[serde(default)]
    uvm: Vec<Pattern>,
    #[serde(default)]
    functions: Vec<Function>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Opaque {
    seen: String,
    any: Vec<CapabilityName>,
    commands: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum CapabilityName {
    Utility,
    Graphics,
    Video,
    Compute,
    Display,
}

impl CapabilityName {
    fn bit(self) -> u32 {
        (match self {
            Self::Utility => Capability::Utility,
            Self::Graphics => Capability::Graphics,
            Self::Video => Capability::Video,
            Self::Compute => Capability::Compute,
            Self::Display => Capability::Display,
        }) as u32
    }

    fn word(self) -> &'static str {
        match self {
            Self::Utility => "utility",
            Self::Graphics => "graphics",
            Self::Video => "video",
            Self::Compute => "compute",
            Self::Display => "display",
        }
    }
}

/// An overlay that is not one.
#[derive(Debug, thiserror::Error)]
#[error("the policy overlay is not understood: {0}")]
pub struct OverlayError(#[from] toml::de::Error);

type Names<T> = fn(&T) -> &[Pattern];

impl Policy {
    /// The overlay that this program was built with.
    pub fn built_in() -> &'static Self {
        static POLICY: OnceLock<Policy> = OnceLock::new();
        POLICY.get_or_init(|| {
            Self::parse(OVERLAY).expect("INVARIANT: a test reads the built-in overlay")
        })
    }

    /// Reads an overlay.
    pub fn parse(text: &str) -> Result<Self, OverlayError> {
        Ok(toml::from_str(text)?)
    }

    /// Whether a guest with these capabilities may issue a control.
    pub fn control(&self, command: u32, control: &Control, capabilities: u32) -> Ruling {
        if let Some(ruling) = by_access(control.access) {
            return ruling;
        }
        if !control.wild.is_empty() {
            let why = format!("no source says what RM does with {}", control.wild);
            return (Verdict::Unsized, why);
        }
        if control.flags.split(' ').any(|flag| flag == "RM_TEST_ONLY_CODE") {
            return (Verdict::Overlay, "RM has it for its own tests".to_owned());
        }
        if self.opaque_commands().any(|known| known == command) {
            return self.opaque(command, capabilities);
        }
        self.ruling(&control.name, capabilities, (|r| &r.controls, |n| &n.controls))
    }

    /// Whether a guest may send an opaque message to the card's firmware.
    pub fn opaque(&self, command: u32, capabilities: u32) -> Ruling {
        match self.opaque.iter().find(|opaque| opaque.commands.contains(&command)) {
            Some(opaque) => need(&opaque.any, capabilities, &format!("seen from {}", opaque.seen)),
            None => (
                Verdict::Unknown,
                "an opaque message to the card's firmware that was never seen".to_owned(),
            ),
        }
    }

    /// Opaque messages that were seen.
    pub fn opaque_commands(&self) -> impl Iterator<Item = u32> + '_ {
        self.opaque.iter().flat_map(|opaque| opaque.commands.iter().copied())
    }

    /// Whether a guest may allocate a class.
    pub fn class(&self, class: &Class, capabilities: u32) -> Ruling {
        if let Some(ruling) = by_access(class.access) {
            return ruling;
        }
        self.ruling(&class.name, capabilities, (|r| &r.classes, |n| &n.classes))
    }

    /// Whether a guest may issue an escape.
    pub fn escape(&self, name: &str) -> Ruling {
        self.ruling(name, u32::MAX, (|r| &r.escapes, |_| &[]))
    }

    /// Functions of an escape that a guest with these capabilities is refused, whatever else
    /// the escape allows.
    pub fn refused_functions(&self, escape: &str, capabilities: u32) -> Vec<u32> {
        let refused = self.refuse.iter().flat_map(|refusal| &refusal.functions);
        let closed = self
            .need
            .iter()
            .filter(|entry| need(&entry.any, capabilities, &entry.why).0 != Verdict::Allow);
        let functions = refused.chain(closed.flat_map(|entry| &entry.functions));
        let mut numbers: Vec<u32> =
            functions.filter(|f| f.escape == escape).map(|f| f.number).collect();
        numbers.sort_unstable();
        numbers
    }

    /// Whether a guest may issue a command of `nvidia-uvm`.
    pub fn uvm(&self, name: &str, capabilities: u32) -> Ruling {
        self.ruling(name, capabilities, (|r| &r.uvm, |n| &n.uvm))
    }

    /// Whether a guest may speak to `nvidia-modeset`: not before its commands' own pointers
    /// are rules.
    pub fn modeset(&self, capabilities: u32) -> Ruling {
        need(&[CapabilityName::Display], capabilities, "screens")
    }

    fn ruling(
        &self,
        name: &str,
        capabilities: u32,
        (refused, needed): (Names<Refusal>, Names<Need>),
    ) -> Ruling {
        let matches = |patterns: &[Pattern]| patterns.iter().any(|pattern| pattern.matches(name));
        if let Some(refusal) = self.refuse.iter().find(|refusal| matches(refused(refusal))) {
            return (Verdict::Overlay, refusal.why.clone());
        }
        match self.need.iter().find(|entry| matches(needed(entry))) {
            Some(entry) => need(&entry.any, capabilities, &entry.why),
            None => (
                Verdict::Allow,
                "RM exports it to any caller, and it reaches the caller's own objects".to_owned(),
            ),
        }
    }

    /// Every pattern, with what it is matched against; for the test that each names something.
    pub fn patterns(&self) -> Vec<(&'static str, &Pattern)> {
        let refuse = self.refuse.iter().flat_map(|r| {
            [
                ("controls", &r.controls),
                ("classes", &r.classes),
                ("escapes", &r.escapes),
                ("uvm", &r.uvm),
            ]
        });
        let need = self
            .need
            .iter()
            .flat_map(|n| [("controls", &n.controls), ("classes", &n.classes), ("uvm", &n.uvm)]);
        let lists = refuse.chain(need);
        lists.flat_map(|(kind, list)| list.iter().map(move |p| (kind, p))).collect()
    }
}

fn by_access(access: Access) -> Option<Ruling> {
    let (verdict, why) = match access {
        Access::User => return None,
        Access::Admin => (Verdict::Privileged, "RM keeps it for administrators of the host"),
        Access::Kernel => (Verdict::KernelOnly, "RM keeps it for the host's kernel"),
        Access::Internal => (Verdict::KernelOnly, "RM keeps it for itself"),
    };
    Some((verdict, why.to_owned()))
}

fn need(any: &[CapabilityName], capabilities: u32, why: &str) -> Ruling {
    let has = any.iter().any(|name| capabilities & name.bit() != 0);
    let words: Vec<&str> = any.iter().map(|name| name.word()).collect();
    let verdict = if has { Verdict::Allow } else { Verdict::Capability };
    (verdict, format!("{why}: capability {}", words.join(" or ")))
}

/// A name in which `*` stands for any letters, taken apart once.
#[derive(Clone, Debug, Deserialize)]
#[serde(from = "String")]
pub struct Pattern {
    text: String,
    first: String,
    middle: Vec<String>,
    /// What follows the last star; `None` without a star.
    last: Option<String>,
}

impl From<String> for Pattern {
    fn from(text: String) -> Self {
        let mut parts = text.split('*').map(str::to_owned);
        let first = parts.next().unwrap_or_default();
        let mut middle: Vec<String> = parts.collect();
        let last = middle.pop();
        Self { text, first, middle, last }
    }
}

impl Pattern {
    /// As it was written.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// Whether `name` is what the pattern says.
    pub fn matches(&self, name: &str) -> bool {
        let Some(mut rest) = name.strip_prefix(self.first.as_str()) else { return false };
        let Some(last) = &self.last else { return rest.is_empty() };
        for part in &self.middle {
            let Some(at) = rest.find(part.as_str()) else { return false };
            rest = &rest[at + part.len()..];
        }
        rest.ends_with(last.as_str())
    }
}
