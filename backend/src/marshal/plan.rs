//! The walk: what a call reaches by the profile's rules, found from the bytes that
//! arrived, and compared with what the guest says it gathered.

use nvguest_abi::rules::{
    read_uint, rule_flags, Ioctl, Rule, Rules, NO_OFFSET, OP_BUFFER, OP_FD, OP_PAGES,
};
use nvguest_abi::FileKind;

use super::bounded::Bounded;
use super::pages::Offer;
use super::request::{split_padded, Call, MAX_FDS};
use super::rm;
use crate::wire;

/// Buffers that one call reaches at most, beside its argument.
pub const MAX_SEGMENTS: usize = wire::MAX_SEGMENTS as usize;
/// Pointers at most that a call has and that are not followed.
const MAX_UNUSED: usize = 8;

/// A buffer that a call reaches. The argument is segment 0, these are 1 and on.
#[derive(Clone, Copy, Debug, Default)]
pub struct Segment<'a> {
    /// The segment that has the pointer.
    pub parent: u16,
    /// Where in it.
    pub offset: u16,
    /// Bytes, as RM computes them.
    pub length: u32,
    /// [`rule_flags`].
    pub flags: u8,
    /// The caller's bytes, if RM reads them.
    pub bytes: &'a [u8],
}

impl Segment<'_> {
    pub fn is_written(&self) -> bool {
        self.flags & rule_flags::OUT != 0
    }

    /// RM neither reads nor writes what the pointer leads to: it gets none.
    pub fn is_unused(&self) -> bool {
        self.flags & (rule_flags::IN | rule_flags::OUT) == 0
    }
}

/// A descriptor that a call names.
#[derive(Clone, Copy, Debug, Default)]
pub struct Descriptor {
    /// The segment that has it.
    pub segment: u16,
    /// Where in it.
    pub offset: u16,
    /// Its bytes: 4 or 8.
    pub width: u8,
    /// The kinds of file that it may name.
    pub kinds: u32,
    /// The guest's file, or 0 if it names none.
    pub file: u32,
    /// What the driver gets where it names none.
    pub none: u64,
}

/// All that one call reaches.
#[derive(Debug)]
pub struct Plan<'a> {
    pub argument: &'a [u8],
    pub segments: Bounded<Segment<'a>, MAX_SEGMENTS>,
    pub descriptors: Bounded<Descriptor, MAX_FDS>,
    /// Memory that the call registers, and the segment that lists it.
    pub pages: Option<(u16, Offer)>,
    /// Pointers and addresses that lead to no segment: segment and offset.
    pub unused: Bounded<(u16, u16), MAX_UNUSED>,
}

impl<'a> Plan<'a> {
    /// Walks the rules of `ioctl` over what arrived. `None` if they do not agree.
    pub fn walk(
        rules: &Rules,
        ioctl: &Ioctl,
        kind: FileKind,
        nr: u32,
        call: &Call<'a>,
    ) -> Option<Self> {
        let plan = Self {
            argument: call.argument,
            segments: Bounded::default(),
            descriptors: Bounded::default(),
            pages: None,
            unused: Bounded::default(),
        };
        let mut walk = Walk { call, data: call.data, plan };
        for rule in rules.of(ioctl, call.argument) {
            let number = walk.rule(0, call.argument, rule)?;
            for sub in subs(rules, rule, number) {
                walk.rule(number, walk.plan.bytes(number), sub)?;
            }
        }
        walk.finish(own(rules, ioctl), rm::addresses(kind, nr, call.argument))
    }

    /// The buffer that the argument's pointer at `offset` leads to.
    pub fn at(&self, offset: u16) -> Option<&Segment<'a>> {
        self.segments.iter().find(|segment| segment.parent == 0 && segment.offset == offset)
    }

    /// Whether the argument's field at `offset` is already accounted for.
    fn is_known(&self, offset: u16) -> bool {
        let named = |fd: &Descriptor| fd.segment == 0 && fd.offset == offset;
        self.at(offset).is_some()
            || self.unused.contains(&(0, offset))
            || self.descriptors.iter().any(named)
    }

    fn bytes(&self, number: u16) -> &'a [u8] {
        match usize::from(number).checked_sub(1) {
            None => self.argument,
            Some(index) => self.segments.get(index).map_or(&[], |segment| segment.bytes),
        }
    }
}

/// The rules that hold where no case does: they say where the argument has pointers.
fn own<'r>(rules: &'r Rules, ioctl: &Ioctl) -> &'r [Rule] {
    let first = ioctl.first_rule.get() as usize;
    let end = first.saturating_add(ioctl.nrules.get() as usize);
    rules.rules.get(first..end).unwrap_or(&[])
}

/// Rules for the block that `rule` gathered: none if there is none, or none was read.
fn subs<'r>(rules: &'r Rules, rule: &Rule, number: u16) -> &'r [Rule] {
    if number == 0 || !rule.has(rule_flags::IN) {
        return &[];
    }
    rules.subs(rule)
}

struct Walk<'c, 'a> {
    call: &'c Call<'a>,
    /// What is left of the buffers' bytes.
    data: &'a [u8],
    plan: Plan<'a>,
}

impl<'a> Walk<'_, 'a> {
    /// Follows one rule of a block. The number of the segment it gathers, or 0.
    fn rule(&mut self, segment: u16, block: &[u8], rule: &Rule) -> Option<u16> {
        match rule.op {
            OP_BUFFER => self.buffer(segment, block, rule),
            OP_FD => self.descriptor(segment, block, rule).map(|()| 0),
            OP_PAGES => self.pages(segment, block, rule),
            _ => None,
        }
    }

    /// A pointer outside the block reaches nothing: the block is too short, which
    /// is RM's to refuse. One without a count reaches nothing either.
    fn buffer(&mut self, parent: u16, block: &[u8], rule: &Rule) -> Option<u16> {
        let offset = rule.offset.get();
        match rule.value(block) {
            None => return Some(0),
            Some(0) => return rule.has(rule_flags::NULL_OK).then_some(0),
            Some(_) => {}
        }
        let count_off = rule.count_off.get();
        if count_off != NO_OFFSET && read_uint(block, count_off, rule.count_width).is_none() {
            return self.plan.unused.push((parent, offset)).map(|()| 0);
        }
        let length = rule.length(block)?;
        let sent = self.call.lengths.get(self.plan.segments.len())?;
        if sent.get() != length {
            return None;
        }
        let mut bytes: &[u8] = &[];
        if rule.has(rule_flags::IN) {
            (bytes, self.data) = split_padded(self.data, usize::try_from(length).ok()?).ok()?;
        }
        self.plan.segments.push(Segment { parent, offset, length, flags: rule.flags, bytes })?;
        u16::try_from(self.plan.segments.len()).ok()
    }

    /// Memory that the caller registers. Of its segment the head alone comes back.
    fn pages(&mut self, parent: u16, block: &[u8], rule: &Rule) -> Option<u16> {
        let (address, bytes) = (rule.value(block)?, rule.registers(block)?);
        let length = self.call.lengths.get(self.plan.segments.len())?.get();
        let (list, rest) = split_padded(self.data, usize::try_from(length).ok()?).ok()?;
        let (head, offer) = Offer::parse(list, address, bytes, rule.max.get())?;
        self.data = rest;
        let (offset, flags) = (rule.offset.get(), rule_flags::OUT);
        // CAST: a struct of the wire.
        let length = head.len() as u32;
        self.plan.segments.push(Segment { parent, offset, length, flags, bytes: head })?;
        let number = u16::try_from(self.plan.segments.len()).ok()?;
        self.plan.pages.replace((number, offer)).is_none().then_some(0)
    }

    fn descriptor(&mut self, segment: u16, block: &[u8], rule: &Rule) -> Option<()> {
        let (offset, width) = (rule.offset.get(), rule.fd_width);
        let Some(value) = rule.value(block) else { return Some(()) };
        let record = self
            .call
            .records
            .iter()
            .find(|record| record.segment.get() == segment && record.offset.get() == offset)?;
        let file = record.file.get();
        let none = match (file, none(rule, value)) {
            (0, Some(none)) => none,
            (0, None) if rule.has(rule_flags::FOREIGN_OK) => no_file(rule),
            (0, None) | (_, Some(_)) => return None,
            (_, None) => 0,
        };
        let kinds = rule.fd_kinds.get();
        self.plan.descriptors.push(Descriptor { segment, offset, width, kinds, file, none })
    }

    /// Everything that was sent must have been reached; what is a pointer all the
    /// same is noted.
    fn finish(mut self, own: &[Rule], fixed: &[u16]) -> Option<Plan<'a>> {
        let all = self.plan.segments.len() == self.call.lengths.len()
            && self.plan.descriptors.len() == self.call.records.len()
            && self.data.is_empty();
        let argument = self.plan.argument;
        let own = own.iter().filter(|rule| rule.op == OP_BUFFER && rule.value(argument).is_some());
        let own = own.map(|rule| rule.offset.get());
        for offset in own.chain(fixed.iter().copied()) {
            if !self.plan.is_known(offset) {
                self.plan.unused.push((0, offset))?;
            }
        }
        all.then_some(self.plan)
    }
}

/// What the driver gets for a value that means "no file", or `None` if it means one.
///
/// Drivers read an 8-byte descriptor as an int, or as 64 bits: negative in either
/// reading is negative, and is handed on negative in both.
fn none(rule: &Rule, value: u64) -> Option<u64> {
    // CAST: the driver's own truncation.
    let low = value as u32 as i32;
    let negative = low < 0 || (value as i64) < 0;
    if negative && rule.has(rule_flags::NEGATIVE_NONE) {
        return Some(if low < 0 { value } else { u64::MAX });
    }
    (value == 0 && rule.has(rule_flags::ZERO_NONE)).then_some(0)
}

/// What the driver gets for a file that the guest opened elsewhere.
fn no_file(rule: &Rule) -> u64 {
    if rule.has(rule_flags::ZERO_NONE) && !rule.has(rule_flags::NEGATIVE_NONE) {
        0
    } else {
        u64::MAX
    }
}
