//! The command line.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};
use nvguest_abi::release::Release;

/// Measures the kernel interface of NVIDIA's driver releases from their own open sources.
///
/// Without a command it measures: every tag of a git repository, or one unpacked release.
/// Needs git, tar and a C compiler (gcc, or what CC names).
#[derive(Parser, Debug)]
#[command(name = "abi-extract", version, args_conflicts_with_subcommands = true)]
pub struct Cli {
    /// What to do other than to measure.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// What to measure.
    #[command(flatten)]
    pub measure: Measure,
}

/// Measuring.
#[derive(Args, Debug)]
pub struct Measure {
    /// Git repository (its git directory) whose tags are releases.
    #[arg(long, value_name = "REPO", conflicts_with = "from")]
    pub git: Option<PathBuf>,
    /// Which tags: releases and comparisons, comma-separated, all of which must hold.
    #[arg(long, default_value = ">=535.129.03", value_name = "WHICH")]
    pub tags: Selection,
    /// Unpacked sources of one release.
    #[arg(long, value_name = "TREE")]
    pub from: Option<PathBuf>,
    /// Folder of profiles.
    #[arg(long, default_value = "abi-profiles/releases", value_name = "FOLDER")]
    pub out: PathBuf,
    /// Write nothing: compare what is measured with the folder, byte for byte.
    #[arg(long)]
    pub check: bool,
    /// Releases measured at the same time.
    #[arg(long, default_value_t = 2, value_name = "N")]
    pub jobs: usize,
}

/// What to do other than to measure.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Lists what changed from one release to another.
    Diff {
        /// The one.
        old: Release,
        /// The other.
        new: Release,
        /// Folder of profiles; the built-in ones without it.
        #[arg(long)]
        profiles: Option<PathBuf>,
    },
    /// Shows a release's profile, or one control, class or escape of it.
    Show {
        /// The release.
        release: Release,
        /// A number (0x20800102) or a name, or part of one.
        what: Option<String>,
        /// Folder of profiles; the built-in ones without it.
        #[arg(long)]
        profiles: Option<PathBuf>,
    },
    /// Writes the history of the interface as a document.
    History {
        /// Folder of profiles; the built-in ones without it.
        #[arg(long)]
        profiles: Option<PathBuf>,
    },
}

/// Which releases: `>=535.129.03,<590.44.01`, or names of releases.
#[derive(Clone, Debug)]
pub struct Selection {
    bounds: Vec<(Bound, Release)>,
    named: Vec<Release>,
}

#[derive(Clone, Copy, Debug)]
enum Bound {
    AtLeast,
    MoreThan,
    AtMost,
    LessThan,
}

impl std::str::FromStr for Selection {
    type Err = nvguest_abi::release::NotARelease;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let mut selection = Self { bounds: Vec::new(), named: Vec::new() };
        for part in text.split(',').map(str::trim) {
            let bound = [
                (">=", Bound::AtLeast),
                ("<=", Bound::AtMost),
                (">", Bound::MoreThan),
                ("<", Bound::LessThan),
            ]
            .into_iter()
            .find_map(|(sign, bound)| Some((bound, part.strip_prefix(sign)?.trim())));
            match bound {
                Some((bound, release)) => selection.bounds.push((bound, release.parse()?)),
                None => selection.named.push(part.parse()?),
            }
        }
        Ok(selection)
    }
}

impl Selection {
    /// Whether a release is meant.
    pub fn has(&self, release: &Release) -> bool {
        let within = self.bounds.iter().all(|(bound, than)| match bound {
            Bound::AtLeast => release >= than,
            Bound::MoreThan => release > than,
            Bound::AtMost => release <= than,
            Bound::LessThan => release < than,
        });
        within && (self.named.is_empty() || self.named.contains(release))
    }
}
