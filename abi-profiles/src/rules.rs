//! Gather rules: what an ioctl's argument reaches, compiled from a profile.
//!
//! One table, two interpreters: the guest module walks it to gather, the worker
//! walks it over the bytes that arrived to find what should have been gathered.
//! The byte form is the *schema* of `guest-module/virtio_nvguest.h`.

use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::FileKind;

/// First word of the schema: "NVGC".
pub const SCHEMA_MAGIC: u32 = 0x4347_564e;
/// Version of the schema's layout, the wire's own.
pub const SCHEMA_VERSION: u32 = 1;
/// "There is no such field."
pub const NO_OFFSET: u16 = 0xffff;

/// Bits of [`Ioctl::flags`].
pub mod ioctl_flags {
    /// Match the number's low 8 bits alone, as `nvidia_ioctl` does.
    pub const BY_NR: u8 = 1 << 0;
    /// The argument names another call: `{u32 nr, u32 size, u64 pointer}`.
    pub const INDIRECT: u8 = 1 << 1;
}

/// Bits of [`Rule::flags`].
pub mod rule_flags {
    /// The caller's bytes are read.
    pub const IN: u8 = 1 << 0;
    /// The block is written back.
    pub const OUT: u8 = 1 << 1;
    /// A null pointer makes no segment instead of failing with EFAULT.
    pub const NULL_OK: u8 = 1 << 2;
    /// Any negative descriptor means "none".
    pub const NEGATIVE_NONE: u8 = 1 << 3;
    /// Descriptor 0 means "none".
    pub const ZERO_NONE: u8 = 1 << 4;
    /// A descriptor that is no file of ours means "none".
    pub const FOREIGN_OK: u8 = 1 << 5;
}

/// [`Rule::op`] of a buffer.
pub const OP_BUFFER: u8 = 1;
/// [`Rule::op`] of a file descriptor.
pub const OP_FD: u8 = 2;
/// [`Rule::op`] of memory that the caller registers: its pages, not its bytes.
pub const OP_PAGES: u8 = 3;
/// Bytes of a page.
pub const PAGE: u64 = 4096;

/// Head of the schema.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct SchemaHeader {
    /// [`SCHEMA_MAGIC`].
    pub magic: U32,
    /// [`SCHEMA_VERSION`].
    pub version: U32,
    /// Entries of [`Rules::ioctls`].
    pub nioctls: U32,
    /// Entries of [`Rules::cases`].
    pub ncases: U32,
    /// Entries of [`Rules::rules`].
    pub nrules: U32,
    /// Zero.
    pub reserved: [U32; 3],
}

/// One ioctl of one kind of file. Sorted by (kind, nr, size).
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Ioctl {
    /// [`FileKind`] as a number.
    pub kind: u8,
    /// [`ioctl_flags`].
    pub flags: u8,
    /// Offset of the `u32` in the argument that picks a case, or [`NO_OFFSET`].
    pub select: U16,
    /// The number: its low 8 bits with [`ioctl_flags::BY_NR`], else all of it.
    pub nr: U32,
    /// Bytes of the argument; 0 where the ioctl number's own size counts.
    pub size: U32,
    /// Where this ioctl's cases begin in [`Rules::cases`].
    pub first_case: U32,
    /// How many there are.
    pub ncases: U32,
    /// Where the rules begin that hold when no case matches.
    pub first_rule: U32,
    /// How many there are.
    pub nrules: U32,
}

/// The rules that hold for one value of the selector; they replace the ioctl's own.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Case {
    /// Value of the selector. Sorted within an ioctl.
    pub key: U32,
    /// Where its rules begin in [`Rules::rules`].
    pub first_rule: U32,
    /// How many there are.
    pub nrules: U32,
}

/// One thing a block reaches: a buffer, a file or the caller's pages.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Rule {
    /// [`OP_BUFFER`], [`OP_FD`] or [`OP_PAGES`].
    pub op: u8,
    /// [`rule_flags`].
    pub flags: u8,
    /// Offset of the pointer (8 bytes) or descriptor within its block.
    pub offset: U16,
    /// Offset of the count within the same block, or [`NO_OFFSET`].
    pub count_off: U16,
    /// Bytes of the count: 1, 2, 4 or 8.
    pub count_width: u8,
    /// Bytes of the descriptor: 4 or 8.
    pub fd_width: u8,
    /// Length = count × `elem` + `add`; without a count, `add` alone.
    pub elem: U32,
    /// See [`Rule::elem`].
    pub add: U32,
    /// The longest length that RM itself would take; of [`OP_PAGES`], in pages.
    pub max: U32,
    /// Where the rules for the gathered block begin.
    pub first_sub: U32,
    /// How many there are; those may have none of their own.
    pub nsubs: U32,
    /// Which kinds of file a descriptor may name, a bit for each [`FileKind`].
    pub fd_kinds: U32,
}

impl Rule {
    /// Whether a bit of [`rule_flags`] is set.
    pub fn has(&self, flag: u8) -> bool {
        self.flags & flag != 0
    }

    /// Bytes of the buffer that this rule reaches from `block`, or `None` where
    /// the count lies outside the block or has more than 32 bits, or the length exceeds
    /// [`Rule::max`].
    pub fn length(&self, block: &[u8]) -> Option<u32> {
        let count_off = self.count_off.get();
        let mut length = u64::from(self.add.get());
        if count_off != NO_OFFSET {
            let count = u32::try_from(read_uint(block, count_off, self.count_width)?).ok()?;
            length += u64::from(count) * u64::from(self.elem.get());
        }
        u32::try_from(length).ok().filter(|&length| length <= self.max.get())
    }

    /// Bytes that a rule of [`OP_PAGES`] registers from its address on; 0 stands for 2^64.
    /// `None` where the count lies outside the block.
    pub fn registers(&self, block: &[u8]) -> Option<u64> {
        let count = read_uint(block, self.count_off.get(), self.count_width)?;
        Some(count.wrapping_add(self.add.get().into()))
    }

    /// The pointer, or the descriptor zero-extended, that this rule reads from `block`.
    pub fn value(&self, block: &[u8]) -> Option<u64> {
        let width = if self.op == OP_FD { self.fd_width } else { 8 };
        read_uint(block, self.offset.get(), width)
    }
}

/// Reads a little-endian unsigned number of 1, 2, 4 or 8 bytes; `None` outside `block`.
pub fn read_uint(block: &[u8], offset: u16, width: u8) -> Option<u64> {
    let start = usize::from(offset);
    let bytes = block.get(start..start.checked_add(usize::from(width))?)?;
    matches!(width, 1 | 2 | 4 | 8)
        .then(|| bytes.iter().rev().fold(0, |value, &byte| value << 8 | u64::from(byte)))
}

/// The compiled form of a profile's layouts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Rules {
    /// Sorted by (kind, nr, size).
    pub ioctls: Vec<Ioctl>,
    /// Cases of all ioctls.
    pub cases: Vec<Case>,
    /// Rules of all ioctls, cases and buffers.
    pub rules: Vec<Rule>,
}

impl Rules {
    /// The entry for a call with number `cmd` and an argument of `size` bytes.
    ///
    /// An entry whose size is 0 takes any size; an exact one goes first.
    pub fn ioctl(&self, kind: FileKind, cmd: u32, size: u32) -> Option<&Ioctl> {
        let found = |nr: u32, size: u32| {
            let wanted = order(kind as u8, nr, size);
            self.ioctls
                .binary_search_by_key(&wanted, |e| order(e.kind, e.nr.get(), e.size.get()))
                .ok()
                .map(|i| &self.ioctls[i])
        };
        let by_nr = |size| found(cmd & 0xff, size).filter(|e| e.flags & ioctl_flags::BY_NR != 0);
        let whole = |size| found(cmd, size).filter(|e| e.flags & ioctl_flags::BY_NR == 0);
        by_nr(size).or_else(|| by_nr(0)).or_else(|| whole(size)).or_else(|| whole(0))
    }

    /// The rules that hold for `argument`.
    pub fn of<'a>(&'a self, ioctl: &Ioctl, argument: &[u8]) -> &'a [Rule] {
        let own = || slice(&self.rules, ioctl.first_rule, ioctl.nrules);
        let Some(key) = read_uint(argument, ioctl.select.get(), 4) else { return own() };
        let cases = slice(&self.cases, ioctl.first_case, ioctl.ncases);
        match cases.binary_search_by_key(&key, |case| u64::from(case.key.get())) {
            Ok(i) => slice(&self.rules, cases[i].first_rule, cases[i].nrules),
            Err(_) => own(),
        }
    }

    /// The rules for the block that a buffer rule gathers.
    pub fn subs(&self, rule: &Rule) -> &[Rule] {
        slice(&self.rules, rule.first_sub, rule.nsubs)
    }

    /// The byte form that the guest downloads.
    pub fn to_schema(&self) -> Vec<u8> {
        let count = |n: usize| U32::new(u32::try_from(n).expect("INVARIANT: tables are small"));
        let header = SchemaHeader {
            magic: SCHEMA_MAGIC.into(),
            version: SCHEMA_VERSION.into(),
            nioctls: count(self.ioctls.len()),
            ncases: count(self.cases.len()),
            nrules: count(self.rules.len()),
            reserved: Default::default(),
        };
        let mut bytes = header.as_bytes().to_vec();
        bytes.extend_from_slice(self.ioctls.as_bytes());
        bytes.extend_from_slice(self.cases.as_bytes());
        bytes.extend_from_slice(self.rules.as_bytes());
        bytes
    }

    /// Reads the byte form back; `None` if it is not one.
    pub fn from_schema(bytes: &[u8]) -> Option<(Self, &[u8])> {
        let (header, rest) = SchemaHeader::read_from_prefix(bytes).ok()?;
        if header.magic.get() != SCHEMA_MAGIC || header.version.get() != SCHEMA_VERSION {
            return None;
        }
        let (ioctls, rest) = table::<Ioctl>(rest, header.nioctls)?;
        let (cases, rest) = table::<Case>(rest, header.ncases)?;
        let (rules, rest) = table::<Rule>(rest, header.nrules)?;
        Some((Self { ioctls, cases, rules }, rest))
    }
}

fn table<'a, T>(bytes: &'a [u8], count: U32) -> Option<(Vec<T>, &'a [u8])>
where
    T: FromBytes + KnownLayout + Immutable + Unaligned + Copy + 'a,
{
    let count = usize::try_from(count.get()).ok()?;
    let (table, rest) = <[T]>::ref_from_prefix_with_elems(bytes, count).ok()?;
    Some((table.to_vec(), rest))
}

/// One number that orders as (kind, nr, size) does: a look-up is on every call's path.
fn order(kind: u8, nr: u32, size: u32) -> u128 {
    u128::from(kind) << 64 | u128::from(nr) << 32 | u128::from(size)
}

fn slice<T>(table: &[T], first: U32, count: U32) -> &[T] {
    let first = first.get() as usize;
    table.get(first..first.saturating_add(count.get() as usize)).unwrap_or(&[])
}
