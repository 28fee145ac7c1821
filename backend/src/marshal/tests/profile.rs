//! A small profile, built by hand from NVIDIA's layouts.

use nvguest_abi::compiled::{ClassEntry, Compiled, ControlEntry, EscapeEntry, Verdict, ANY_SIZE};
use nvguest_abi::rules::{
    ioctl_flags, rule_flags, Case, Ioctl, Rule, Rules, NO_OFFSET, OP_BUFFER, OP_FD, OP_PAGES,
};
use nvguest_abi::FileKind::{self, Cap, Ctl, Gpu, Modeset, Uvm};

pub const IN: u8 = rule_flags::IN | rule_flags::NULL_OK;
pub const OUT: u8 = rule_flags::OUT | rule_flags::NULL_OK;
pub const INOUT: u8 = IN | OUT;
pub const UNUSED: u8 = rule_flags::NULL_OK;
const MAX: u32 = 1 << 20;

/// A rule and those of the block it gathers.
#[derive(Clone, Debug)]
pub struct Spec {
    pub rule: Rule,
    pub subs: Vec<Spec>,
}

pub fn buffer(offset: u16, flags: u8, length: u32) -> Spec {
    let rule = Rule {
        op: OP_BUFFER,
        flags,
        offset: offset.into(),
        count_off: NO_OFFSET.into(),
        count_width: 0,
        fd_width: 0,
        elem: 0.into(),
        add: length.into(),
        max: MAX.into(),
        first_sub: 0.into(),
        nsubs: 0.into(),
        fd_kinds: 0.into(),
    };
    Spec { rule, subs: Vec::new() }
}

pub fn list(offset: u16, flags: u8, count_off: u16, elem: u32) -> Spec {
    let mut spec = buffer(offset, flags, 0);
    spec.rule.count_off = count_off.into();
    spec.rule.count_width = 4;
    spec.rule.elem = elem.into();
    spec
}

pub fn fd(offset: u16, width: u8, kinds: &[FileKind], flags: u8) -> Spec {
    let mut spec = buffer(offset, flags, 0);
    spec.rule.op = OP_FD;
    spec.rule.fd_width = width;
    spec.rule.fd_kinds = kinds.iter().fold(0, |bits, kind| bits | kind.bit()).into();
    spec
}

/// Memory that the caller registers, whose bytes less one are at `limit`.
pub fn pages(offset: u16, limit: u16) -> Spec {
    let mut spec = buffer(offset, 0, 1);
    spec.rule.op = OP_PAGES;
    spec.rule.count_off = limit.into();
    spec.rule.count_width = 8;
    spec
}

impl Spec {
    pub fn with(mut self, subs: impl Into<Vec<Spec>>) -> Self {
        self.subs = subs.into();
        self
    }
}

/// Puts tables together.
#[derive(Default)]
pub struct Builder {
    pub compiled: Compiled,
}

impl Builder {
    fn rules(&mut self, specs: &[Spec]) -> (u32, u32) {
        let rules: Vec<Rule> = specs
            .iter()
            .map(|spec| {
                let (first, count) = match spec.subs.is_empty() {
                    true => (0, 0),
                    false => self.rules(&spec.subs),
                };
                Rule { first_sub: first.into(), nsubs: count.into(), ..spec.rule }
            })
            .collect();
        let table = &mut self.compiled.rules.rules;
        let first = table.len() as u32;
        table.extend(rules);
        (first, specs.len() as u32)
    }

    /// An ioctl that is one layout.
    pub fn flat(&mut self, kind: FileKind, nr: u32, size: u32, specs: &[Spec]) -> &mut Self {
        self.ioctl(kind, nr, size, (NO_OFFSET, NO_OFFSET), specs, &[])
    }

    /// An ioctl, its (selector, status) offsets, its own rules and its cases.
    pub fn ioctl(
        &mut self,
        kind: FileKind,
        nr: u32,
        size: u32,
        (select, status): (u16, u16),
        specs: &[Spec],
        cases: &[(u32, Vec<Spec>)],
    ) -> &mut Self {
        let (first_rule, nrules) = self.rules(specs);
        let mut cases: Vec<Case> = cases
            .iter()
            .map(|(key, specs)| {
                let (first, count) = self.rules(specs);
                Case { key: (*key).into(), first_rule: first.into(), nrules: count.into() }
            })
            .collect();
        cases.sort_by_key(|case| case.key.get());
        let rules = &mut self.compiled.rules;
        let flags = if matches!(kind, Ctl | Gpu) { ioctl_flags::BY_NR } else { 0 };
        rules.ioctls.push(Ioctl {
            kind: kind as u8,
            flags,
            select: select.into(),
            nr: nr.into(),
            size: size.into(),
            first_case: (rules.cases.len() as u32).into(),
            ncases: (cases.len() as u32).into(),
            first_rule: first_rule.into(),
            nrules: nrules.into(),
        });
        rules.cases.extend(cases);
        self.escape(kind, nr, size, status, Verdict::Allow)
    }

    pub fn escape(
        &mut self,
        kind: FileKind,
        nr: u32,
        size: u32,
        status: u16,
        verdict: Verdict,
    ) -> &mut Self {
        self.compiled.escapes.push(EscapeEntry {
            kind: kind as u8,
            verdict: verdict as u8,
            status: status.into(),
            nr: nr.into(),
            size: size.into(),
            array: 0,
            reserved: [0; 3],
        });
        self
    }

    pub fn control(&mut self, command: u32, size: u32, verdict: Verdict) -> &mut Self {
        self.compiled.controls.push(ControlEntry {
            command: command.into(),
            size: size.into(),
            verdict: verdict as u8,
            reserved: [0; 3],
        });
        self
    }

    pub fn class(&mut self, class: u32, size: u32, verdict: Verdict) -> &mut Self {
        self.compiled.classes.push(ClassEntry {
            class: class.into(),
            size: size.into(),
            verdict: verdict as u8,
            params: 1,
            reserved: [0; 2],
        });
        self
    }

    pub fn build(&mut self) -> Compiled {
        let mut compiled = std::mem::take(&mut self.compiled);
        let Rules { ioctls, .. } = &mut compiled.rules;
        ioctls.sort_by_key(|e| (e.kind, e.nr.get(), e.size.get()));
        compiled.escapes.sort_by_key(|e| (e.kind, e.nr.get(), e.size.get()));
        compiled.controls.sort_by_key(|e| e.command.get());
        compiled.classes.sort_by_key(|e| e.class.get());
        compiled
    }
}

pub const FLAT: u32 = 0x2080_0110;
pub const EMPTY: u32 = 0x2080_0199;
pub const GET_ENGINES: u32 = 0x2080_0123;
pub const GET_CHANNELLIST: u32 = 0x0080_170d;
pub const GR_GET_CAPS: u32 = 0x0080_1102;
pub const GET_ID_INFO: u32 = 0x202;
pub const EXPORT_TO_FD: u32 = 0x3d05;
pub const OPAQUE: u32 = 0x2080_8159;
pub const ADMIN: u32 = 0x2080_0a01;

/// The parts of the ABI that the tests speak of.
pub fn profile() -> Compiled {
    let mut builder = Builder::default();
    controls(&mut builder);
    allocations(&mut builder);
    others(&mut builder);
    builder.build()
}

fn controls(builder: &mut Builder) {
    let params = || list(0x10, INOUT, 0x18, 1);
    let cases = [
        (GET_ENGINES, vec![params().with([list(8, INOUT, 0, 4)])]),
        (GET_CHANNELLIST, vec![params().with([list(8, IN, 0, 4), list(16, INOUT, 0, 4)])]),
        (GR_GET_CAPS, vec![params().with([list(8, OUT, 0, 1)])]),
        (GET_ID_INFO, vec![params().with([buffer(0x10, UNUSED, 0)])]),
        (EXPORT_TO_FD, vec![params().with([fd(0x10, 4, &[Ctl], 0)])]),
    ];
    builder
        .ioctl(Ctl, 0x2a, 32, (8, 0x1c), &[params()], &cases)
        .control(FLAT, 128, Verdict::Allow)
        .control(EMPTY, 0, Verdict::Allow)
        .control(GET_ENGINES, 16, Verdict::Allow)
        .control(GET_CHANNELLIST, 24, Verdict::Allow)
        .control(GR_GET_CAPS, 16, Verdict::Allow)
        .control(GET_ID_INFO, 40, Verdict::Allow)
        .control(EXPORT_TO_FD, 24, Verdict::Allow)
        .control(OPAQUE, ANY_SIZE, Verdict::Allow)
        .control(ADMIN, 8, Verdict::Privileged);
}

fn allocations(builder: &mut Builder) {
    let rights = || buffer(0x18, INOUT, 4);
    let event = || buffer(0x10, INOUT, 24).with([fd(0x10, 8, &[Ctl, Gpu], 0)]);
    let session = || {
        let cap = fd(0, 8, &[Cap], rule_flags::NEGATIVE_NONE | rule_flags::FOREIGN_OK);
        buffer(0x10, INOUT, 8).with([cap])
    };
    let cases = [
        (0x05, vec![event(), rights()]),
        (0x79, vec![event(), rights()]),
        (0x80, vec![buffer(0x10, INOUT, 56), rights()]),
        (0x73, vec![rights()]),
        (0xc637, vec![session(), rights()]),
    ];
    let old: Vec<_> = cases.iter().map(|(class, list)| (*class, list[..1].to_vec())).collect();
    builder
        .ioctl(Ctl, 0x2b, 48, (0xc, 0x28), &[list(0x10, INOUT, 0x20, 1), rights()], &cases)
        .ioctl(Ctl, 0x2b, 32, (0xc, 0x1c), &[list(0x10, INOUT, 0x18, 1)], &old[..3])
        .ioctl(
            Gpu,
            0x27,
            56,
            (0xc, 0x28),
            &[fd(0x30, 4, &[Ctl], NEGATIVE)],
            &[(0x71, vec![pages(0x18, 0x20), fd(0x30, 4, &[Ctl], NEGATIVE)])],
        )
        .ioctl(Ctl, 0x4a, 184, (8, 0x14), &[], &[(27, vec![pages(0x40, 0x48)])])
        .class(0x05, 24, Verdict::Allow)
        .class(0x3e, 128, Verdict::Allow)
        .class(0x71, 40, Verdict::Allow)
        .class(0x73, 0, Verdict::Allow)
        .class(0x78, 24, Verdict::KernelOnly)
        .class(0x79, 24, Verdict::Allow)
        .class(0x80, 56, Verdict::Allow)
        .class(0xa084, 64, Verdict::Overlay)
        .class(0xc637, 16, Verdict::Allow);
}

const NEGATIVE: u8 = rule_flags::NEGATIVE_NONE;

fn others(builder: &mut Builder) {
    let channels = [list(0x10, IN, 0xc, 4), list(0x18, IN, 0xc, 4), list(0x20, IN, 0xc, 4)];
    builder
        .ioctl(Ctl, 0x29, 16, (NO_OFFSET, 0xc), &[], &[])
        .ioctl(Ctl, 0x41, 56, (NO_OFFSET, 0x30), &channels, &[])
        .ioctl(Ctl, 0x4e, 56, (NO_OFFSET, 0x28), &[fd(0x30, 4, &[Ctl, Gpu], 0)], &[])
        .flat(Ctl, 201, 4, &[fd(0, 4, &[Ctl], 0)])
        .flat(Gpu, 201, 4, &[fd(0, 4, &[Ctl], 0)])
        .flat(Ctl, 214, 8, &[])
        .escape(Ctl, 0x5f, 16, 0xc, Verdict::Privileged)
        .escape(Ctl, 0x66, 16, NO_OFFSET, Verdict::Allow)
        .ioctl(Uvm, 25, 32, (NO_OFFSET, 28), &[fd(16, 4, &[Ctl], NEGATIVE)], &[])
        .flat(Uvm, 75, 8, &[fd(0, 4, &[Uvm], 0)])
        .flat(Uvm, 0x3000_0002, 0, &[])
        .flat(Modeset, 0xc010_6d00, 16, &[list(8, INOUT, 4, 1)]);
    let last = builder.compiled.rules.ioctls.len();
    builder.flat(Ctl, 211, 16, &[]);
    builder.compiled.rules.ioctls[last].flags |= ioctl_flags::INDIRECT;
}
