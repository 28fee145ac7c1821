//! What one call costs in marshal and policy, with a driver that does nothing.
//!
//! `cargo bench -p vhost-user-nvguest --bench marshal`

#![allow(missing_docs, reason = "criterion's macros make an undocumented function")]
use criterion::{criterion_group, criterion_main, Criterion};
use nvguest_abi::compiled::{Compiled, ControlEntry, EscapeEntry, Verdict};
use nvguest_abi::rules::{ioctl_flags, rule_flags, Case, Ioctl, Rule, OP_BUFFER};
use nvguest_abi::FileKind;
use vhost_user_nvguest::errno::Errno;
use vhost_user_nvguest::host::{Host, HostFile, HostMapping, Node};
use vhost_user_nvguest::marshal::{prepare, Call, Files, Frame, Scratch};
use vhost_user_nvguest::wire::IoctlReq;
use zerocopy::IntoBytes;

/// As many controls and cases as a release has.
const CONTROLS: u32 = 1348;
const CASES: u32 = 55;
const RM_CONTROL: u32 = 0xc020_462a;

/// A driver that returns at once.
struct Nothing;

impl Host for Nothing {
    fn open(&self, _: &Node, _: u32) -> Result<HostFile, Errno> {
        Err(Errno::ENXIO)
    }

    fn ioctl(&self, _: &HostFile, _: u32, frame: &mut Frame<'_>) -> Result<i32, Errno> {
        std::hint::black_box(frame.argument());
        Ok(0)
    }

    fn mapping(&self, _: &HostFile, _: u64, _: u64, _: bool) -> Result<HostMapping, Errno> {
        Err(Errno::EINVAL)
    }
}

struct NoFiles;

impl Files for NoFiles {
    fn host_number(&self, _: u32, _: u32) -> Result<i32, Errno> {
        Err(Errno::EBADF)
    }
}

fn list(offset: u16, count_off: u16, elem: u32) -> Rule {
    Rule {
        op: OP_BUFFER,
        flags: rule_flags::IN | rule_flags::OUT | rule_flags::NULL_OK,
        offset: offset.into(),
        count_off: count_off.into(),
        count_width: 4,
        fd_width: 0,
        elem: elem.into(),
        add: 0.into(),
        max: (1 << 20).into(),
        first_sub: 0.into(),
        nsubs: 0.into(),
        fd_kinds: 0.into(),
    }
}

/// `RM_CONTROL` alone; every third control's parameters hold a list of words.
fn profile() -> Compiled {
    let mut compiled = Compiled::default();
    let plain = list(0x10, 0x18, 1);
    let with_list = Rule { first_sub: 2.into(), nsubs: 1.into(), ..plain };
    compiled.rules.rules = vec![plain, with_list, list(8, 0, 4)];
    compiled.rules.ioctls = vec![Ioctl {
        kind: FileKind::Ctl as u8,
        flags: ioctl_flags::BY_NR,
        select: 8.into(),
        nr: 0x2a.into(),
        size: 32.into(),
        first_case: 0.into(),
        ncases: CASES.into(),
        first_rule: 0.into(),
        nrules: 1.into(),
    }];
    compiled.rules.cases = (0..CASES)
        .map(|i| Case { key: (i * 3).into(), first_rule: 1.into(), nrules: 1.into() })
        .collect();
    compiled.controls = (0..CONTROLS)
        .map(|command| ControlEntry {
            command: command.into(),
            size: if command % 3 == 0 && command < 3 * CASES { 16 } else { 128 }.into(),
            verdict: Verdict::Allow as u8,
            reserved: [0; 3],
        })
        .collect();
    compiled.escapes = vec![EscapeEntry {
        kind: FileKind::Ctl as u8,
        verdict: Verdict::Allow as u8,
        status: 0x1c.into(),
        nr: 0x2a.into(),
        size: 32.into(),
        array: 0,
        reserved: [0; 3],
    }];
    compiled
}

/// The body of a request for a control, with a list of `words` in its parameters.
fn request(command: u32, params: usize, words: u32) -> Vec<u8> {
    let lengths = [params as u32, words * 4];
    let used = if words == 0 { 1 } else { 2 };
    let head = IoctlReq {
        cmd: RM_CONTROL.into(),
        arg_len: 32.into(),
        nsegs: used.into(),
        nfds: 0.into(),
        reserved: 0.into(),
    };
    let mut body = head.as_bytes().to_vec();
    body.extend_from_slice(&lengths[0].to_le_bytes());
    body.extend_from_slice(&if words == 0 { 0 } else { lengths[1] }.to_le_bytes());
    let mut argument = [0; 32];
    argument[8..12].copy_from_slice(&command.to_le_bytes());
    argument[16..24].copy_from_slice(&0x7fff_1234_5678_u64.to_le_bytes());
    argument[24..28].copy_from_slice(&lengths[0].to_le_bytes());
    body.extend_from_slice(&argument);
    let mut block = vec![0; params];
    if words != 0 {
        block[..4].copy_from_slice(&words.to_le_bytes());
        block[8..16].copy_from_slice(&0x7fff_8765_4321_u64.to_le_bytes());
    }
    body.extend_from_slice(&block);
    body.resize(body.len() + (words as usize * 4).next_multiple_of(8), 0);
    body
}

fn calls(c: &mut Criterion) {
    let compiled = profile();
    let host = Nothing;
    let fd = std::fs::File::open("/dev/null").expect("every machine has it").into();
    let file = HostFile { fd, ready: None, kind: FileKind::Ctl };
    let mut scratch = Scratch::new().expect("8 MiB of address space");
    let mut reply = Vec::with_capacity(1 << 20);
    let cases = [
        ("control of 128 bytes", request(1001, 128, 0)),
        ("control with a list of 32 words", request(27, 16, 32)),
        ("control with a list of 64 KiB", request(27, 16, 16 << 10)),
        ("control with a list of 256 KiB", request(27, 16, 64 << 10)),
    ];
    for (name, body) in cases {
        c.bench_function(name, |bencher| {
            bencher.iter(|| {
                let call = Call::parse(&body).expect("it is whole");
                let prepared = prepare(&compiled, FileKind::Ctl, &call, &NoFiles, &mut scratch);
                let mut prepared = prepared.expect("it is allowed");
                let result = prepared.execute(&host, &file);
                reply.clear();
                prepared.finish(result, &mut reply);
            });
        });
    }
}

criterion_group!(benches, calls);
criterion_main!(benches);
