//! Release numbers, and reading the host's.

use std::cmp::Ordering;
use std::fmt;
use std::str::FromStr;

/// A driver release: `580.142`, `535.129.03`. Ordered by its numbers.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Release {
    text: String,
    numbers: [u32; 3],
}

/// A text that is no release.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a driver release; one looks like 580.142 or 535.129.03")]
pub struct NotARelease(String);

impl Release {
    /// The branch: the first number.
    pub fn branch(&self) -> u32 {
        self.numbers[0]
    }

    /// As NVIDIA writes it.
    pub fn as_str(&self) -> &str {
        &self.text
    }
}

impl FromStr for Release {
    type Err = NotARelease;

    fn from_str(text: &str) -> Result<Self, NotARelease> {
        let wrong = || NotARelease(text.chars().take(40).collect());
        let parts: Vec<u32> = text
            .split('.')
            .map(|part| {
                let digits =
                    (1..=5).contains(&part.len()) && part.bytes().all(|b| b.is_ascii_digit());
                if digits {
                    part.parse().map_err(|_| wrong())
                } else {
                    Err(wrong())
                }
            })
            .collect::<Result<_, _>>()?;
        let numbers = match parts[..] {
            [branch, major] if branch >= 100 => [branch, major, 0],
            [branch, major, minor] if branch >= 100 => [branch, major, minor],
            _ => return Err(wrong()),
        };
        Ok(Self { text: text.to_owned(), numbers })
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl Ord for Release {
    fn cmp(&self, other: &Self) -> Ordering {
        self.numbers.cmp(&other.numbers).then_with(|| self.text.cmp(&other.text))
    }
}

impl PartialOrd for Release {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// `/proc/driver/nvidia/version` did not say what it always says.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "/proc/driver/nvidia/version does not name a driver release (it begins {0:?}); \
     check that nvidia.ko of 535.129.03 or newer is loaded"
)]
pub struct Garbled(String);

/// The release in the text of `/proc/driver/nvidia/version`.
///
/// Its first line is `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.129.03  Thu …`,
/// or `… Open Kernel Module for x86_64  580.142  Release Build  (…)`.
pub fn from_proc_version(text: &str) -> Result<Release, Garbled> {
    let garbled = || Garbled(text.chars().take(80).collect());
    let line = text.lines().next().ok_or_else(garbled)?;
    let rest = line.strip_prefix("NVRM version:").ok_or_else(garbled)?;
    rest.split_whitespace().find_map(|word| word.parse().ok()).ok_or_else(garbled)
}
