//! A private apt: the machine's own mirror, our own lists and cache.
//!
//! No mirror is named here. The address and the key are those of the entry in
//! the machine's own apt sources that serves its own release; only the suites
//! are ours.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{bail, Context, Result};

use super::Folder;
use crate::process::capture;

const KEYRING: &str = "/usr/share/keyrings/debian-archive-keyring.gpg";

/// Debian's archive, at the lists' state of one moment.
pub struct Archive {
    cache: PathBuf,
    options: Vec<String>,
}

/// A package at one version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Package {
    /// Its name.
    pub name: String,
    /// Its version.
    pub version: String,
}

impl Package {
    fn pinned(&self) -> String {
        format!("{}={}", self.name, self.version)
    }
}

impl Archive {
    /// Reads the lists of these suites.
    pub fn open(folder: &Folder, suites: &[&str]) -> Result<Archive> {
        let base = folder.path("apt");
        let cache = base.join("archives");
        for path in [base.join("lists/partial"), cache.join("partial")] {
            fs::create_dir_all(&path).with_context(|| format!("create {}", path.display()))?;
        }
        let source = machine_source()?;
        let entries: String = suites.iter().map(|suite| source.entry(suite)).collect();
        write(&base.join("sources.list"), &entries)?;
        write(&base.join("status"), "")?;
        let set = |name: &str, path: &Path| format!("{name}={}", path.display());
        let options = [
            set("Dir::Etc::sourcelist", &base.join("sources.list")),
            "Dir::Etc::sourceparts=/dev/null".to_owned(),
            "Dir::Etc::preferencesparts=/dev/null".to_owned(),
            set("Dir::State::lists", &base.join("lists")),
            set("Dir::State::status", &base.join("status")),
            set("Dir::State::extended_states", &base.join("extended_states")),
            set("Dir::Cache", &base),
            "APT::Architecture=amd64".to_owned(),
            "APT::Architectures=amd64".to_owned(),
            "APT::Sandbox::User=root".to_owned(),
            "APT::Default-Release=".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11-icons::DefaultEnabled=false".to_owned(),
            "Acquire::IndexTargets::deb::DEP-11-icons-small::DefaultEnabled=false".to_owned(),
            "Debug::NoLocking=1".to_owned(),
        ];
        let archive = Archive { cache, options: options.into() };
        archive.tool("apt-get", &["update", "-q"]).context(
            "the lists of Debian 12, 13 and 13's backports could not be read; \
             is the network up, and is debian-archive-keyring current?",
        )?;
        Ok(archive)
    }

    fn tool(&self, program: &str, words: &[&str]) -> Result<String> {
        let mut command = Command::new(program);
        for option in &self.options {
            command.args(["-o", option]);
        }
        command.args(words).current_dir(&self.cache).env("LC_ALL", "C");
        let out = capture(&mut command)?;
        Ok(String::from_utf8_lossy(&out).into_owned())
    }

    /// Every version of a package that the suites have.
    pub fn versions(&self, name: &str) -> Result<Vec<Package>> {
        let text = self.tool("apt-cache", &["madison", name])?;
        let version = |line: &str| line.split('|').nth(1).map(|word| word.trim().to_owned());
        let versions = text.lines().filter_map(version);
        Ok(versions.map(|version| Package { name: name.to_owned(), version }).collect())
    }

    /// The newest version of a package whose version begins so.
    pub fn newest(&self, name: &str, begins: &str) -> Result<Package> {
        let all = self.versions(name)?;
        let found = all.iter().find(|it| it.version.starts_with(begins));
        found.cloned().with_context(|| {
            let have: Vec<&str> = all.iter().map(|it| it.version.as_str()).collect();
            format!("the archive has no {name} {begins}…; it has {have:?}")
        })
    }

    /// The names that a package depends on, versions and alternatives left out.
    pub fn depends(&self, package: &Package) -> Result<Vec<String>> {
        let text = self.tool("apt-cache", &["show", &package.pinned()])?;
        let line = text.lines().find_map(|line| line.strip_prefix("Depends: "));
        let words = line.unwrap_or_default().split(", ");
        Ok(words.filter_map(|it| it.split_whitespace().next()).map(str::to_owned).collect())
    }

    /// The packages with all that they depend on. Packages of the backports
    /// are taken where `release` names them.
    pub fn closure(&self, packages: &[&str], release: &str) -> Result<Vec<Package>> {
        let mut words = vec!["install", "-s", "--no-install-recommends", "-t", release];
        words.extend(packages);
        let text = self.tool("apt-get", &words)?;
        // Inst libc6 (2.41-12 Debian:13.8/stable [amd64])
        let parse = |line: &str| {
            let (name, rest) = line.strip_prefix("Inst ")?.split_once(" (")?;
            let version = rest.split_whitespace().next()?.to_owned();
            Some(Package { name: name.to_owned(), version })
        };
        Ok(text.lines().filter_map(parse).collect())
    }

    /// The candidates of these names, without what they depend on.
    pub fn candidates(&self, names: &[&str], suite: &str) -> Result<Vec<Package>> {
        names
            .iter()
            .map(|name| {
                let text = self.tool("apt-cache", &["madison", name])?;
                let line = text.lines().find(|line| line.contains(&format!(" {suite}/")));
                let version = line.and_then(|line| line.split('|').nth(1));
                let version = version.with_context(|| format!("{suite} has no package {name}"))?;
                Ok(Package { name: (*name).to_owned(), version: version.trim().to_owned() })
            })
            .collect()
    }

    /// Fetches packages; apt checks every one against the signed lists.
    pub fn fetch(&self, packages: &[Package]) -> Result<Vec<PathBuf>> {
        let pinned: Vec<String> = packages.iter().map(Package::pinned).collect();
        let mut words = vec!["download"];
        words.extend(pinned.iter().map(String::as_str));
        self.tool("apt-get", &words)?;
        packages.iter().map(|package| self.file(package)).collect()
    }

    /// The file that apt keeps a package in.
    fn file(&self, package: &Package) -> Result<PathBuf> {
        let version = package.version.replace(':', "%3a");
        let mut names =
            ["amd64", "all"].map(|it| format!("{}_{version}_{it}.deb", package.name)).into_iter();
        let file = names.find_map(|name| Some(self.cache.join(name)).filter(|it| it.exists()));
        file.with_context(|| format!("apt-get fetched no file of {}", package.pinned()))
    }

    /// Removes the fetched packages: their contents are unpacked.
    pub fn discard_packages(&self) -> Result<()> {
        fs::remove_dir_all(&self.cache).with_context(|| format!("remove {}", self.cache.display()))
    }
}

/// Unpacks a package into a folder.
pub fn unpack(package: &Path, into: &Path) -> Result<()> {
    capture(Command::new("dpkg-deb").arg("-x").arg(package).arg(into)).map(drop)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("write {}", path.display()))
}

/// Where the machine gets its own packages from.
#[derive(Debug, PartialEq, Eq)]
struct Source {
    uri: String,
    key: String,
}

impl Source {
    fn entry(&self, suite: &str) -> String {
        format!("deb [arch=amd64 signed-by={}] {} {suite} main\n", self.key, self.uri)
    }
}

fn machine_source() -> Result<Source> {
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let field = |name: &str| {
        let line = release.lines().find_map(|line| line.strip_prefix(name));
        line.map(|value| value.trim_matches('"').to_owned()).unwrap_or_default()
    };
    let (id, codename) = (field("ID="), field("VERSION_CODENAME="));
    if id != "debian" {
        bail!("this machine runs {id:?}; provisioning needs Debian 12 or 13 (a bundle does not)");
    }
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    let more = fs::read_dir("/etc/apt/sources.list.d").into_iter().flatten().flatten();
    files.extend(more.map(|entry| entry.path()));
    files.sort();
    for file in &files {
        let text = fs::read_to_string(file).unwrap_or_default();
        let found = match file.extension().and_then(|it| it.to_str()) {
            Some("sources") => find_in_paragraphs(&text, &codename),
            Some("list") => find_in_lines(&text, &codename),
            _ => None,
        };
        if let Some(source) = found {
            return Ok(source);
        }
    }
    bail!("none of {files:?} has a `deb` entry of main for {codename}; add the machine's mirror")
}

/// deb822: paragraphs of `Field: value`.
fn find_in_paragraphs(text: &str, codename: &str) -> Option<Source> {
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    lines.split(|line| line.trim().is_empty()).find_map(|paragraph| {
        let field = |name: &str| {
            let has = |line: &&str| line.to_ascii_lowercase().starts_with(name);
            let line = paragraph.iter().find(|line| has(line))?;
            Some(line[name.len()..].trim())
        };
        let says = |name: &str, word: &str| {
            field(name).is_some_and(|value| value.split_whitespace().any(|it| it == word))
        };
        if field("enabled:").is_some_and(|value| value.eq_ignore_ascii_case("no")) {
            return None;
        }
        if !(says("types:", "deb") && says("suites:", codename) && says("components:", "main")) {
            return None;
        }
        let uri = field("uris:")?.split_whitespace().next()?.to_owned();
        let key = field("signed-by:").filter(|key| key.starts_with('/')).unwrap_or(KEYRING);
        Some(Source { uri, key: key.to_owned() })
    })
}

/// One line an entry: `deb [options] uri suite components`.
fn find_in_lines(text: &str, codename: &str) -> Option<Source> {
    text.lines().find_map(|line| {
        let rest = line.trim().strip_prefix("deb ")?.trim();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']')?,
            None => ("", rest),
        };
        let mut words = rest.split_whitespace();
        let (uri, suite) = (words.next()?, words.next()?);
        if suite != codename || !words.any(|component| component == "main") {
            return None;
        }
        let key = options.split_whitespace().find_map(|it| it.strip_prefix("signed-by="));
        Some(Source { uri: uri.to_owned(), key: key.unwrap_or(KEYRING).to_owned() })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mirror_is_the_one_that_serves_the_machines_own_release() {
        let text = "# a comment\nTypes: deb\nURIs: http://mirror.example/security\nSuites: trixie-security\n\
                    Components: main\n\nTypes: deb deb-src\nURIs: http://mirror.example/debian\n\
                    Suites: trixie trixie-updates\nComponents: main\nSigned-By: /usr/share/k.gpg\n";
        let source = find_in_paragraphs(text, "trixie").unwrap();
        assert_eq!(source.uri, "http://mirror.example/debian");
        assert_eq!(source.key, "/usr/share/k.gpg");
    }

    #[test]
    fn a_disabled_paragraph_is_no_mirror() {
        let text =
            "Enabled: no\nTypes: deb\nURIs: http://a.example\nSuites: trixie\nComponents: main\n";
        assert_eq!(find_in_paragraphs(text, "trixie"), None);
    }

    #[test]
    fn the_old_form_with_options_is_understood() {
        let text = "deb-src http://x.example bookworm main\n\
                    deb [arch=amd64 signed-by=/k.gpg] http://y.example/debian bookworm main contrib\n";
        let source = find_in_lines(text, "bookworm").unwrap();
        assert_eq!(
            source.entry("trixie"),
            "deb [arch=amd64 signed-by=/k.gpg] http://y.example/debian trixie main\n"
        );
    }
}
