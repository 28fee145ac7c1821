//! What a guest may have at most, as a whole and for each of its processes.
//!
//! The guest's share bounds everything, however many processes it makes: a fork gets
//! nothing that the guest has not got already.
#![forbid(unsafe_code)]

use std::str::FromStr;
use std::sync::{Arc, Mutex};

use crate::sync::lock;

/// What is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resource {
    /// Open files, each of them watched for readiness.
    Files,
    /// Requests that were taken and not answered.
    Requests,
    /// Bytes of those.
    Bytes,
    /// RM clients.
    Clients,
    /// RM objects.
    Objects,
    /// Live mappings in the window.
    Placements,
    /// Bytes of the window that are taken.
    Window,
    /// Bytes of the arena; beyond them memory costs placements.
    Arena,
    /// Bytes of its own memory that RM has, pinned.
    Registered,
    /// Lines of log a second.
    Lines,
    /// `FIFO_DISABLE_CHANNELS` a second: each stops the card's scheduler for a moment.
    Disables,
}

/// A line of the table: its word for `--limits`, what the guest has, what a process has.
pub struct Row {
    /// What it is of.
    pub resource: Resource,
    /// The word; `process-` before it means a process's.
    pub key: &'static str,
    /// Of the guest.
    pub guest: u64,
    /// Of each of its processes.
    pub process: u64,
}

const fn row(resource: Resource, key: &'static str, guest: u64, process: u64) -> Row {
    Row { resource, key, guest, process }
}

/// How many resources there are.
pub const COUNT: usize = 11;

/// What holds where the admin says nothing. In the order of [`Resource`].
pub const TABLE: [Row; COUNT] = [
    row(Resource::Files, "files", 16_384, 4096),
    row(Resource::Requests, "requests", 4096, 1024),
    row(Resource::Bytes, "bytes", 64 << 20, 16 << 20),
    row(Resource::Clients, "clients", 4096, 512),
    row(Resource::Objects, "objects", 262_144, 65_536),
    row(Resource::Placements, "placements", 256, 256),
    row(Resource::Window, "window", 1 << 40, 1 << 40),
    row(Resource::Arena, "arena", 1 << 40, 2 << 30),
    row(Resource::Registered, "registered", 16 << 30, 16 << 30),
    row(Resource::Lines, "lines", 10, 10),
    row(Resource::Disables, "disables", 200, 50),
];

/// The limits of one guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Worker slots: queue pairs beyond the broker's own.
    pub slots: usize,
    /// Guest processes with open files.
    pub processes: usize,
    guest: [u64; COUNT],
    process: [u64; COUNT],
}

impl Default for Limits {
    fn default() -> Self {
        let guest = TABLE.each_ref().map(|row| row.guest);
        let process = TABLE.each_ref().map(|row| row.process);
        Self { slots: 16, processes: 256, guest, process }
    }
}

impl Limits {
    /// What all processes of the guest have together.
    pub fn guest(&self, resource: Resource) -> u64 {
        self.guest[resource as usize]
    }

    /// What one process has; never more than the guest.
    pub fn process(&self, resource: Resource) -> u64 {
        self.process[resource as usize].min(self.guest(resource))
    }

    fn set_text(&mut self, key: &str, value: &str) -> Result<(), String> {
        let amount = amount(value)
            .ok_or_else(|| format!("{value:?} is no amount for {key}; give a number like 8G"))?;
        self.set(key, amount).ok_or_else(|| format!("{key:?} is no limit; {}", keys()))
    }

    fn set(&mut self, key: &str, value: u64) -> Option<()> {
        if key == "processes" {
            self.processes = usize::try_from(value).ok()?;
            return Some(());
        }
        let (table, word) = match key.strip_prefix("process-") {
            Some(word) => (&mut self.process, word),
            None => (&mut self.guest, key),
        };
        let row = TABLE.iter().find(|row| row.key == word)?;
        table[row.resource as usize] = value;
        Some(())
    }
}

/// The limits of one guest as they are now: an admin changes them while it runs.
#[derive(Debug, Default)]
pub struct Live(Mutex<Limits>);

impl Live {
    /// What holds until somebody changes it.
    pub fn new(limits: Limits) -> Arc<Self> {
        Arc::new(Self(Mutex::new(limits)))
    }

    /// All of them.
    pub fn now(&self) -> Limits {
        *lock(&self.0)
    }

    /// What all processes of the guest have together.
    pub fn guest(&self, resource: Resource) -> u64 {
        lock(&self.0).guest(resource)
    }

    /// What one process has.
    pub fn process(&self, resource: Resource) -> u64 {
        lock(&self.0).process(resource)
    }

    /// Changes all that is named, or nothing. What is held beyond a new limit stays held.
    pub fn set<'a>(
        &self,
        pairs: impl IntoIterator<Item = (&'a str, &'a str)>,
    ) -> Result<(), String> {
        let mut limits = lock(&self.0);
        let mut wanted = *limits;
        pairs.into_iter().try_for_each(|(key, value)| wanted.set_text(key, value))?;
        *limits = wanted;
        Ok(())
    }
}

/// Since when a changed limit holds.
pub fn effect(resource: Resource) -> &'static str {
    match resource {
        Resource::Files | Resource::Requests | Resource::Bytes => "at once",
        Resource::Clients | Resource::Objects | Resource::Window => "at once",
        Resource::Registered => "at once",
        // A worker is told its share when it starts; the window itself is asked each time.
        Resource::Placements => "at once if lower, else for processes that start later",
        Resource::Lines | Resource::Disables => "for processes that start later",
        Resource::Arena => "when the backend is started again",
    }
}

/// `KEY=VALUE,…`: what is not named keeps its default.
impl FromStr for Limits {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut limits = Self::default();
        for pair in text.split(',').map(str::trim).filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').ok_or_else(|| format!("{pair:?} has no ="))?;
            limits.set_text(key, value)?;
        }
        Ok(limits)
    }
}

/// Every word, for messages and help.
pub fn keys() -> String {
    let words: Vec<&str> = TABLE.iter().map(|row| row.key).collect();
    format!("there are processes, {} and each of these with process- before it", words.join(", "))
}

/// A number with an optional binary suffix.
pub fn amount(text: &str) -> Option<u64> {
    let (digits, shift) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 10),
        Some((at, 'm' | 'M')) => (&text[..at], 20),
        Some((at, 'g' | 'G')) => (&text[..at], 30),
        _ => (text, 0),
    };
    digits.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_the_order_of_its_resources() {
        for (index, row) in TABLE.iter().enumerate() {
            assert_eq!(row.resource as usize, index, "{}", row.key);
        }
    }

    #[test]
    fn what_is_not_named_keeps_its_default() {
        let limits: Limits = "files=10,process-bytes=2M".parse().unwrap();
        assert_eq!(limits.guest(Resource::Files), 10);
        assert_eq!(limits.process(Resource::Bytes), 2 << 20);
        assert_eq!(limits.guest(Resource::Objects), TABLE[Resource::Objects as usize].guest);
        assert_eq!("".parse(), Ok(Limits::default()));
    }

    #[test]
    fn limits_change_all_together_or_not_at_all() {
        let live = Live::new("files=10".parse().unwrap());
        live.set([("files", "20"), ("process-bytes", "1M")]).unwrap();
        assert_eq!(live.guest(Resource::Files), 20);
        let error = live.set([("files", "30"), ("fils", "1")]).unwrap_err();
        assert!(error.contains("fils"), "{error}");
        assert_eq!(live.guest(Resource::Files), 20);
    }

    #[test]
    fn a_process_has_no_more_than_its_guest() {
        let limits: Limits = "files=10".parse().unwrap();
        assert_eq!(limits.process(Resource::Files), 10);
    }

    #[test]
    fn an_unknown_word_is_answered_with_all_words() {
        let error = "fils=1".parse::<Limits>().unwrap_err();
        assert!(error.contains("\"fils\"") && error.contains("files, requests"), "{error}");
        for text in ["files", "files=", "files=x", "files=-1", "files=99999999999G"] {
            assert!(text.parse::<Limits>().is_err(), "{text}");
        }
    }
}
