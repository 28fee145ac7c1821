//! A profile compiled for one guest's capabilities: what a worker needs, in one blob.
//!
//! The broker loads and resolves the profile once and hands the blob to every
//! worker, so that starting one parses nothing. Order: the schema
//! ([`Rules::to_schema`]), then the tables below.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::rules::Rules;

/// Why a call is refused, or that it is not. The number is in the blob.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Verdict {
    /// The host is asked.
    Allow = 0,
    /// The profile does not list it.
    Unknown = 1,
    /// RM marks it for administrators.
    Privileged = 2,
    /// RM marks it for the kernel, or for itself.
    KernelOnly = 3,
    /// Its layout is not known, so nothing is known of its pointers.
    Unsized = 4,
    /// It reaches other guests or the host: the policy overlay has the reason.
    Overlay = 5,
    /// It belongs to a capability that this guest does not have.
    Capability = 6,
    /// Its size is not the profile's.
    Size = 7,
    /// What was sent does not have the shape that the profile gives it.
    Shape = 8,
    /// A file it names is not one of the guest's, or of a kind it must not name.
    File = 9,
    /// A limit of the guest or of the process is reached.
    Limit = 10,
}

impl Verdict {
    /// Every verdict, in the order of its number.
    pub const ALL: [Self; 11] = [
        Self::Allow,
        Self::Unknown,
        Self::Privileged,
        Self::KernelOnly,
        Self::Unsized,
        Self::Overlay,
        Self::Capability,
        Self::Size,
        Self::Shape,
        Self::File,
        Self::Limit,
    ];

    /// The verdict with this number; an unknown number refuses.
    pub fn from_number(number: u8) -> Self {
        Self::ALL.get(usize::from(number)).copied().unwrap_or(Self::Unknown)
    }

    /// One word for logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            Self::Allow => "allowed",
            Self::Unknown => "unknown",
            Self::Privileged => "privileged",
            Self::KernelOnly => "kernel-only",
            Self::Unsized => "unsized",
            Self::Overlay => "overlay",
            Self::Capability => "capability",
            Self::Size => "size",
            Self::Shape => "shape",
            Self::File => "file",
            Self::Limit => "limit",
        }
    }
}

/// Size of a control whose parameters no table sizes: opaque messages to the card's firmware.
pub const ANY_SIZE: u32 = u32::MAX;

/// A control (`RM_CONTROL`), sorted by command.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ControlEntry {
    /// The command.
    pub command: U32,
    /// Bytes of its parameters, or [`ANY_SIZE`].
    pub size: U32,
    /// [`Verdict`] as a number.
    pub verdict: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

/// A class (`RM_ALLOC`), sorted by number.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ClassEntry {
    /// The class.
    pub class: U32,
    /// Bytes that RM copies of its parameters, whatever the caller's size says.
    pub size: U32,
    /// [`Verdict`] as a number.
    pub verdict: u8,
    /// 0: RM takes no parameters; 1: it takes them if given; 2: it needs them.
    pub params: u8,
    /// Zero.
    pub reserved: [u8; 2],
}

/// An escape of the front end, or a numbered command of another node, sorted by (kind, nr).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct EscapeEntry {
    /// [`crate::FileKind`] as a number.
    pub kind: u8,
    /// [`Verdict`] as a number.
    pub verdict: u8,
    /// Offset of RM's status in the argument, or [`crate::rules::NO_OFFSET`].
    pub status: U16,
    /// The escape's number.
    pub nr: U32,
    /// Bytes of the argument; of one element where `array` is 1.
    pub size: U32,
    /// 1: the argument is an array of any positive number of elements.
    pub array: u8,
    /// Zero.
    pub reserved: [u8; 3],
}

/// Head of the tables that follow the schema.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Header {
    release: [u8; 32],
    profile: [u8; 32],
    capabilities: U32,
    ncontrols: U32,
    nclasses: U32,
    nescapes: U32,
}

/// What a worker needs to know of the host's driver release.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Compiled {
    /// The host's driver release.
    pub release: String,
    /// The measured release whose profile this is.
    pub profile: String,
    /// The guest's capabilities, bits of [`crate::Capability`].
    pub capabilities: u32,
    /// Layouts.
    pub rules: Rules,
    /// Sorted by command.
    pub controls: Vec<ControlEntry>,
    /// Sorted by class.
    pub classes: Vec<ClassEntry>,
    /// Sorted by (kind, nr, size): one number can have arguments of several sizes.
    pub escapes: Vec<EscapeEntry>,
}

impl Compiled {
    /// The control with this command.
    pub fn control(&self, command: u32) -> Option<&ControlEntry> {
        find(&self.controls, |entry| entry.command.get().cmp(&command))
    }

    /// The class with this number.
    pub fn class(&self, class: u32) -> Option<&ClassEntry> {
        find(&self.classes, |entry| entry.class.get().cmp(&class))
    }

    /// The escape of this kind, number and argument size.
    pub fn escape(&self, kind: crate::FileKind, nr: u32, size: u32) -> Option<&EscapeEntry> {
        let key = (kind as u8, nr);
        let first = self.escapes.partition_point(|e| (e.kind, e.nr.get()) < key);
        self.escapes[first..].iter().take_while(|e| (e.kind, e.nr.get()) == key).find(|entry| {
            match entry.size.get() {
                one if entry.array == 1 => one != 0 && size != 0 && size % one == 0,
                one => one == size,
            }
        })
    }

    /// Whether any escape of this kind has this number, whatever its size.
    pub fn knows_escape(&self, kind: crate::FileKind, nr: u32) -> bool {
        find(&self.escapes, |e| (e.kind, e.nr.get()).cmp(&(kind as u8, nr))).is_some()
    }

    /// The blob.
    pub fn to_bytes(&self) -> Vec<u8> {
        let count = |n: usize| U32::new(u32::try_from(n).expect("INVARIANT: tables are small"));
        let header = Header {
            release: padded(&self.release),
            profile: padded(&self.profile),
            capabilities: self.capabilities.into(),
            ncontrols: count(self.controls.len()),
            nclasses: count(self.classes.len()),
            nescapes: count(self.escapes.len()),
        };
        let mut bytes = self.rules.to_schema();
        bytes.extend_from_slice(header.as_bytes());
        bytes.extend_from_slice(self.controls.as_bytes());
        bytes.extend_from_slice(self.classes.as_bytes());
        bytes.extend_from_slice(self.escapes.as_bytes());
        bytes
    }

    /// Reads the blob back; `None` if it is not one.
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (rules, rest) = Rules::from_schema(bytes)?;
        let (header, rest) = Header::read_from_prefix(rest).ok()?;
        let (controls, rest) =
            <[ControlEntry]>::ref_from_prefix_with_elems(rest, header.ncontrols.get() as usize)
                .ok()?;
        let (classes, rest) =
            <[ClassEntry]>::ref_from_prefix_with_elems(rest, header.nclasses.get() as usize)
                .ok()?;
        let (escapes, _) =
            <[EscapeEntry]>::ref_from_prefix_with_elems(rest, header.nescapes.get() as usize)
                .ok()?;
        Some(Self {
            release: unpadded(&header.release)?,
            profile: unpadded(&header.profile)?,
            capabilities: header.capabilities.get(),
            rules,
            controls: controls.to_vec(),
            classes: classes.to_vec(),
            escapes: escapes.to_vec(),
        })
    }
}

fn find<T>(table: &[T], compare: impl FnMut(&T) -> std::cmp::Ordering) -> Option<&T> {
    table.binary_search_by(compare).ok().map(|i| &table[i])
}

/// `text` in 32 bytes, NUL-padded: the wire's form of a release.
pub fn padded(text: &str) -> [u8; 32] {
    let mut bytes = [0; 32];
    let kept = text.len().min(31);
    bytes[..kept].copy_from_slice(&text.as_bytes()[..kept]);
    bytes
}

/// The reverse of [`padded`]; `None` if it is no such text.
fn unpadded(bytes: &[u8]) -> Option<String> {
    let end = bytes.iter().position(|&byte| byte == 0)?;
    std::str::from_utf8(&bytes[..end]).ok().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_blob_whose_release_is_no_text_of_31_bytes_is_refused() {
        let named = |release: &str| Compiled { release: release.into(), ..Compiled::default() };
        let blob = named("580.159.04").to_bytes();
        assert_eq!(Compiled::from_bytes(&blob), Some(named("580.159.04")));
        let at = blob.windows(3).position(|three| three == b"580").unwrap();
        for bytes in [&[0xff][..], &[b'5'; 32]] {
            let mut lie = blob.clone();
            lie[at..at + bytes.len()].copy_from_slice(bytes);
            assert_eq!(Compiled::from_bytes(&lie), None);
        }
    }
}
