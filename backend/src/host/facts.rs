//! What a guest is to find: device nodes, procfs files, modules and cards, as the host has them.
//!
//! Read once, by the broker, before it gives up its privileges; nothing here opens a device. On a
//! host without a card, [`Facts::of_sim`] says the same of simulated ones.
#![forbid(unsafe_code)]

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use nvguest_abi::{Capability, FileKind};

use super::sim::identity::{self, Identity};

/// Major number of every node but the dynamic ones (`NV_MAJOR_DEVICE_NUMBER`).
const MAJOR: u32 = 195;
/// Minor number of `/dev/nvidiactl`.
const CONTROL_MINOR: u32 = 255;
/// Minor number of `/dev/nvidia-modeset`.
const MODESET_MINOR: u32 = 254;
/// Bytes of a card's configuration space that a guest gets.
const CONFIG: usize = 256;
/// No file of the driver under `/proc` is nearly as long.
const MAX_FILE: u64 = 64 << 10;
/// Files of the driver's procfs tree that say something and take no orders.
const PROC_FILES: [&str; 3] = ["version", "params", "registry"];
const CARD_FILES: [&str; 4] = ["information", "power", "registry", "numa_status"];
const MODULES: [&str; 4] = ["nvidia", "nvidia_uvm", "nvidia_modeset", "nvidia_drm"];

/// Everything that the guest is to find.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The driver's release.
    pub release: String,
    /// Device nodes, in the order to make them.
    pub chardevs: Vec<Chardev>,
    /// Files: name below `/proc`, mode, content.
    pub proc_files: Vec<(String, u16, Vec<u8>)>,
    /// Modules and their versions, as `/sys/module` shows them.
    pub modules: Vec<(String, String)>,
    /// The cards.
    pub cards: Vec<Card>,
}

/// A device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chardev {
    /// Its name below `/dev`.
    pub name: String,
    /// Where it is on the host.
    pub path: String,
    /// What it is.
    pub kind: FileKind,
    /// Its major number, or 0 for one that the kernel picks.
    pub major: u32,
    /// Its minor number.
    pub minor: u32,
    /// What `/proc/devices` calls the major number.
    pub major_name: String,
    /// Permissions.
    pub mode: u16,
}

/// A card.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// Where it is: `0000:00:06.0`.
    pub pci: String,
    /// Its configuration space, as far as the host lets it be read, with no more capabilities
    /// than were read.
    pub config: Vec<u8>,
    /// Its UUID, if the driver tells it.
    pub uuid: Option<String>,
    /// Minor number of its node.
    pub minor: u32,
}

/// Why the host's driver cannot be served.
#[derive(Debug, thiserror::Error)]
pub enum FactsError {
    /// A file of the driver is not there or cannot be read.
    #[error("{path} cannot be read ({source}); {advice}", path = path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
        /// What to do.
        advice: &'static str,
    },
    /// The driver's version file names no release.
    #[error("the driver's version file names no release: {0:?}")]
    NoRelease(String),
    /// The driver drives no card.
    #[error("the driver has no card; `nvidia-smi` on the host should list one")]
    NoCard,
    /// None of the cards is the one that was asked for.
    #[error("no card is {wanted}; the host has {have}")]
    NoSuchCard {
        /// What was asked for.
        wanted: String,
        /// What there is.
        have: String,
    },
    /// A node that the driver should have.
    #[error("{0} does not exist; run `nvidia-modprobe -c 0 -u` or `nvidia-smi` on the host once")]
    NoNode(String),
}

type Result<T> = std::result::Result<T, FactsError>;

impl Facts {
    /// Those of a host whose root is `root`: `/`, or a tree that looks like one.
    pub fn of_host(root: &Path) -> Result<Self> {
        let driver = root.join("proc/driver/nvidia");
        let version = read(&driver.join("version"), "load the NVIDIA driver, or use --host sim")?;
        let release = release_of(&String::from_utf8_lossy(&version))?;
        let mut facts = Self { release, ..Self::default() };
        for name in PROC_FILES {
            facts.add_proc(root, &format!("driver/nvidia/{name}"));
        }
        for tree in ["patches", "warnings", "capabilities"] {
            facts.add_proc_tree(root, &format!("driver/nvidia/{tree}"));
        }
        for pci in names_in(&driver.join("gpus")) {
            facts.add_card(root, &pci)?;
        }
        if facts.cards.is_empty() {
            return Err(FactsError::NoCard);
        }
        facts.add_nodes(root)?;
        for module in MODULES {
            let version = root.join("sys/module").join(module).join("version");
            if let Ok(text) = fs::read_to_string(version) {
                facts.modules.push((module.into(), text.trim().into()));
            }
        }
        Ok(facts)
    }

    /// Those of a host with so many simulated cards.
    pub fn of_sim(cards: u32) -> Self {
        let release = identity::RELEASE;
        let version = format!(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {release}  \
             Release Build  (nvguest)\nGCC version:  none, the card is simulated\n"
        );
        let params = "ModifyDeviceFiles: 0\nDeviceFileUID: 0\nDeviceFileGID: 0\n\
                      DeviceFileMode: 438\nRmProfilingAdminOnly: 1\n";
        let mut facts = Self {
            release: release.into(),
            chardevs: vec![sim_node("nvidiactl".into(), FileKind::Ctl, CONTROL_MINOR)],
            modules: vec![("nvidia".into(), release.into())],
            ..Self::default()
        };
        facts.add_sim_file("version", &version);
        facts.add_sim_file("params", params);
        for card in (0..cards).map(Identity::of) {
            facts.add_sim_card(card);
        }
        facts
    }

    fn add_sim_card(&mut self, card: Identity) {
        let (pci, uuid, minor) = (card.pci(), card.uuid_text(), card.number);
        let information = format!(
            "Model: \t\t {}\nIRQ:   \t\t 0\nGPU UUID: \t {uuid}\nVideo BIOS: \t 00.00.00.00.00\n\
             Bus Type: \t PCIe\nDMA Size: \t 52 bits\nDMA Mask: \t 0xfffffffffffff\n\
             Bus Location: \t {pci}\nDevice Minor: \t {minor}\nGPU Firmware: \t {}\n\
             GPU Excluded:\t No\n",
            identity::NAME,
            identity::RELEASE,
        );
        self.add_sim_file(&format!("gpus/{pci}/information"), &information);
        self.chardevs.push(sim_node(format!("nvidia{minor}"), FileKind::Gpu, minor));
        let config = identity::config_space();
        self.cards.push(Card { pci, config, uuid: Some(uuid), minor });
    }

    fn add_sim_file(&mut self, name: &str, text: &str) {
        self.proc_files.push((format!("driver/nvidia/{name}"), 0o444, text.into()));
    }

    /// Only the cards that are `wanted`, each by index, UUID or PCI address; every card if nothing
    /// is wanted, or `all`.
    pub fn select(mut self, wanted: &[String]) -> Result<Self> {
        if wanted.is_empty() || wanted == ["all"] {
            return Ok(self);
        }
        let mut chosen = vec![false; self.cards.len()];
        for wanted in wanted {
            let mut cards = self.cards.iter().enumerate();
            match cards.position(|(index, card)| card.is_called(wanted, index)) {
                Some(index) => chosen[index] = true,
                None => return Err(self.no_such_card(wanted)),
            }
        }
        let mut chosen = chosen.into_iter();
        let (own, others): (Vec<_>, Vec<_>) =
            self.cards.drain(..).partition(|_| chosen.next() == Some(true));
        self.cards = own;
        for card in others {
            self.forget(&card);
        }
        Ok(self)
    }

    /// Takes away the node of a card, its files, and the nodes of capabilities that these name.
    fn forget(&mut self, card: &Card) {
        let gpu = format!("driver/nvidia/gpus/{}/", card.pci);
        let capabilities = format!("driver/nvidia/capabilities/gpu{}/", card.minor);
        self.proc_files
            .retain(|(name, ..)| !name.starts_with(&gpu) && !name.starts_with(&capabilities));
        let left = self.capability_minors();
        self.chardevs.retain(|node| match node.kind {
            FileKind::Gpu => node.minor != card.minor,
            FileKind::Cap => left.contains(&node.minor),
            _ => true,
        });
    }

    fn no_such_card(&self, wanted: &str) -> FactsError {
        let have: Vec<_> = self.cards.iter().enumerate().map(describe).collect();
        FactsError::NoSuchCard { wanted: wanted.into(), have: have.join(", ") }
    }

    /// Without what the capabilities (bits of [`Capability`]) do not open: nvidia-uvm comes with
    /// compute, nvidia-modeset and nvidia-drm with display.
    pub fn allowed(mut self, capabilities: u32) -> Self {
        let has = |capability: Capability| capabilities & capability as u32 != 0;
        self.chardevs.retain(|node| match node.kind {
            FileKind::Uvm => has(Capability::Compute),
            FileKind::Modeset => has(Capability::Display),
            FileKind::Ctl | FileKind::Gpu | FileKind::Cap => true,
        });
        self.modules.retain(|(name, _)| match name.as_str() {
            "nvidia_uvm" => has(Capability::Compute),
            "nvidia_modeset" | "nvidia_drm" => has(Capability::Display),
            _ => true,
        });
        self
    }

    fn add_card(&mut self, root: &Path, pci: &str) -> Result<()> {
        let folder = format!("driver/nvidia/gpus/{pci}");
        let path = root.join("proc").join(&folder).join("information");
        let information = read(&path, "reload the NVIDIA driver")?;
        let information = String::from_utf8_lossy(&information);
        let Some(minor) = field(&information, "Device Minor").and_then(|text| text.parse().ok())
        else {
            // A card that is excluded or not initialised has no node.
            tracing::warn!(pci, "this card has no device minor, so no guest can have it");
            return Ok(());
        };
        let config = root.join("sys/bus/pci/devices").join(pci).join("config");
        self.cards.push(Card {
            pci: pci.into(),
            config: config_of(&read(&config, "mount sysfs")?),
            uuid: field(&information, "GPU UUID").filter(|text| text.starts_with("GPU-")),
            minor,
        });
        for name in CARD_FILES {
            self.add_proc(root, &format!("{folder}/{name}"));
        }
        Ok(())
    }

    fn add_nodes(&mut self, root: &Path) -> Result<()> {
        let majors = fs::read_to_string(root.join("proc/devices")).unwrap_or_default();
        self.add_node(root, "nvidiactl", FileKind::Ctl, CONTROL_MINOR, &majors)?;
        let minors: Vec<_> = self.cards.iter().map(|card| card.minor).collect();
        for minor in minors {
            self.add_node(root, &format!("nvidia{minor}"), FileKind::Gpu, minor, &majors)?;
        }
        let mut optional = vec![
            ("nvidia-uvm".into(), FileKind::Uvm, 0),
            ("nvidia-modeset".into(), FileKind::Modeset, MODESET_MINOR),
        ];
        optional.extend(
            self.capability_minors()
                .into_iter()
                .map(|minor| (format!("nvidia-caps/nvidia-cap{minor}"), FileKind::Cap, minor)),
        );
        for (name, kind, minor) in optional {
            if root.join("dev").join(&name).exists() {
                self.add_node(root, &name, kind, minor, &majors)?;
            }
        }
        Ok(())
    }

    fn add_node(
        &mut self,
        root: &Path,
        name: &str,
        kind: FileKind,
        minor: u32,
        majors: &str,
    ) -> Result<()> {
        let path = format!("/dev/{name}");
        let Ok(metadata) = fs::metadata(root.join(&path[1..])) else {
            return Err(FactsError::NoNode(path));
        };
        let dynamic = matches!(kind, FileKind::Uvm | FileKind::Cap);
        self.chardevs.push(Chardev {
            name: name.into(),
            path,
            kind,
            major: if dynamic { 0 } else { MAJOR },
            minor,
            major_name: major_name(kind, majors),
            // CAST: nine bits.
            mode: (metadata.permissions().mode() & 0o777) as u16,
        });
        Ok(())
    }

    /// Minor numbers that the files of the capabilities tree name.
    fn capability_minors(&self) -> Vec<u32> {
        let files = self.proc_files.iter();
        let tree = files.filter(|(name, ..)| name.starts_with("driver/nvidia/capabilities/"));
        let mut minors: Vec<u32> = tree
            .filter_map(|(_, _, text)| {
                field(&String::from_utf8_lossy(text), "DeviceFileMinor")?.parse().ok()
            })
            .collect();
        minors.sort_unstable();
        minors.dedup();
        minors
    }

    /// Adds a file below `/proc`, if there is one, for reading.
    fn add_proc(&mut self, root: &Path, name: &str) {
        let path = root.join("proc").join(name);
        let Ok(mut content) = read(&path, "") else { return };
        if name.ends_with("/params") {
            content = without_node_making(&content);
        }
        let mode = fs::metadata(&path).map_or(0o444, |meta| meta.permissions().mode());
        // CAST: nine bits.
        self.proc_files.push((name.into(), (mode & 0o444) as u16, content));
    }

    fn add_proc_tree(&mut self, root: &Path, name: &str) {
        let path = root.join("proc").join(name);
        for entry in names_in(&path) {
            let below = format!("{name}/{entry}");
            if path.join(&entry).is_dir() {
                self.add_proc_tree(root, &below);
            } else {
                self.add_proc(root, &below);
            }
        }
    }
}

impl Card {
    /// RM's number for it (`gpuGenerate32BitId`): the low half of the domain, bus and slot. 0,
    /// which no card has, if its address is none.
    pub fn gpu_id(&self) -> u32 {
        let mut parts = self.pci.split([':', '.']).map(|part| u32::from_str_radix(part, 16).ok());
        let mut next = || parts.next().flatten();
        let (Some(domain), Some(bus), Some(slot)) = (next(), next(), next()) else { return 0 };
        domain << 16 | (bus & 0xff) << 8 | slot & 0xff
    }

    /// Whether this is a name of the card, which is the host's `index`-th.
    fn is_called(&self, wanted: &str, index: usize) -> bool {
        wanted.parse() == Ok(index)
            || self.uuid.as_ref().is_some_and(|uuid| uuid.eq_ignore_ascii_case(wanted))
            || same_address(wanted, &self.pci)
    }
}

/// A node of a simulated card.
fn sim_node(name: String, kind: FileKind, minor: u32) -> Chardev {
    let major_name = if kind == FileKind::Ctl { "nvidiactl" } else { "nvidia" };
    let path = format!("/dev/{name}");
    let (major, major_name, mode) = (MAJOR, major_name.into(), 0o666);
    Chardev { name, path, kind, major, minor, major_name, mode }
}

/// NVIDIA's user mode makes and changes device nodes where this says 1. In the guest they are
/// ours.
fn without_node_making(params: &[u8]) -> Vec<u8> {
    let text = String::from_utf8_lossy(params);
    let line = |line: &str| match line.strip_prefix("ModifyDeviceFiles:") {
        Some(_) => "ModifyDeviceFiles: 0\n".into(),
        None => format!("{line}\n"),
    };
    text.lines().map(line).collect::<String>().into_bytes()
}

/// Reads a file of at most [`MAX_FILE`] bytes; what is longer is cut.
fn read(path: &Path, advice: &'static str) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    fs::File::open(path)
        .and_then(|file| file.take(MAX_FILE).read_to_end(&mut bytes))
        .map_err(|source| FactsError::Unreadable { path: path.into(), source, advice })?;
    Ok(bytes)
}

/// Names in a folder, sorted; none if there is no such folder.
fn names_in(path: &Path) -> Vec<String> {
    let entries = fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<_> =
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

/// The value of a line `Name: value`.
fn field(text: &str, name: &str) -> Option<String> {
    let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
    Some(value.trim().into())
}

/// The release that the `NVRM version` line names: digits in two or three parts.
fn release_of(version: &str) -> Result<String> {
    let is_release = |word: &&str| {
        let parts: Vec<_> = word.split('.').collect();
        let number = |part: &&str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        matches!(parts.len(), 2 | 3) && parts[0].len() == 3 && parts.iter().all(number)
    };
    let line = version.lines().find(|line| line.starts_with("NVRM version")).unwrap_or_default();
    match line.split_whitespace().find(is_release) {
        Some(release) => Ok(release.into()),
        None => Err(FactsError::NoRelease(version.into())),
    }
}

/// What `/proc/devices` calls the major number of such a node: it depends on the release.
fn major_name(kind: FileKind, majors: &str) -> String {
    let listed =
        |name: &&str| majors.lines().any(|line| line.split_whitespace().nth(1) == Some(*name));
    let (names, default) = match kind {
        FileKind::Ctl => (&["nvidiactl", "nvidia-frontend", "nvidia"][..], "nvidia-frontend"),
        FileKind::Gpu => (&["nvidia", "nvidia-frontend"][..], "nvidia-frontend"),
        FileKind::Modeset => (&["nvidia-modeset", "nvidia-frontend"][..], "nvidia-modeset"),
        FileKind::Uvm => (&["nvidia-uvm"][..], "nvidia-uvm"),
        FileKind::Cap => (&["nvidia-caps"][..], "nvidia-caps"),
    };
    names.iter().copied().find(|name| listed(name)).unwrap_or(default).into()
}

/// 256 bytes of configuration space. An unprivileged reader gets 64: then the list of
/// capabilities, which lies beyond, is taken off.
fn config_of(bytes: &[u8]) -> Vec<u8> {
    const STATUS: usize = 0x06;
    const HAS_LIST: u8 = 1 << 4;
    const LIST: usize = 0x34;
    let mut config = bytes[..bytes.len().min(CONFIG)].to_vec();
    let whole = config.len() == CONFIG;
    config.resize(CONFIG, 0);
    if !whole {
        config[STATUS] &= !HAS_LIST;
        config[LIST] = 0;
    }
    config
}

/// Whether two PCI addresses are the same; the domain may be missing.
fn same_address(wanted: &str, pci: &str) -> bool {
    let wanted = wanted.to_ascii_lowercase();
    let pci = pci.to_ascii_lowercase();
    wanted == pci || pci.strip_prefix("0000:") == Some(&wanted)
        // NVML writes the domain with eight digits.
        || wanted.strip_prefix("0000").is_some_and(|rest| rest == pci)
}

fn describe((index, card): (usize, &Card)) -> String {
    format!("{index}: {} at {}", card.uuid.as_deref().unwrap_or("no UUID"), card.pci)
}

#[cfg(test)]
#[path = "facts_tests.rs"]
mod tests;
