//! The compiled form: what guest module and worker both walk.

use nvguest_abi::compiled::{Compiled, Verdict};
use nvguest_abi::explain::{capabilities, explain, is_opaque};
use nvguest_abi::policy::Policy;
use nvguest_abi::rules::{
    ioctl_flags, rule_flags, Ioctl, Rule, NO_OFFSET, OP_BUFFER, OP_FD, OP_PAGES,
};
use nvguest_abi::store::Store;
use nvguest_abi::{Capability, FileKind};
use proptest::prelude::*;

const RM_CONTROL: u32 = 0xc020_462a;
const RM_ALLOC: u32 = 0xc030_462b;
const RM_ALLOC_OLD: u32 = 0xc020_462b;

fn compiled(capabilities: u32) -> Compiled {
    let store = Store::embedded().unwrap();
    store.load(&"580.142".parse().unwrap()).unwrap().compile(capabilities)
}

fn ioctl(compiled: &Compiled, kind: FileKind, cmd: u32, size: u32) -> &Ioctl {
    compiled.rules.ioctl(kind, cmd, size).unwrap()
}

fn argument(size: usize, words: &[(usize, u32)]) -> Vec<u8> {
    let mut bytes = vec![0; size];
    for (at, word) in words {
        bytes[*at..at + 4].copy_from_slice(&word.to_le_bytes());
    }
    bytes
}

fn rules(compiled: &Compiled, cmd: u32, argument: &[u8]) -> Vec<Rule> {
    let size = u32::try_from(argument.len()).unwrap();
    compiled.rules.of(ioctl(compiled, FileKind::Ctl, cmd, size), argument).to_vec()
}

#[test]
fn a_control_without_pointers_gathers_as_much_as_its_own_size_says() {
    let compiled = compiled(0);
    let call = argument(32, &[(8, 0x2080_0102), (24, 564)]);
    let [params] = rules(&compiled, RM_CONTROL, &call)[..] else { panic!("one rule") };
    assert_eq!((params.op, params.offset.get(), params.nsubs.get()), (OP_BUFFER, 16, 0));
    assert!(params.has(rule_flags::IN) && params.has(rule_flags::OUT));
    assert!(params.has(rule_flags::NULL_OK));
    assert_eq!(params.length(&call), Some(564));
    assert_eq!(params.length(&argument(32, &[(24, (1 << 20) + 1)])), None, "over 1 MiB");
}

#[test]
fn a_control_with_a_list_reaches_it_from_its_parameters() {
    let compiled = compiled(0);
    let call = argument(32, &[(8, 0x2080_1802), (24, 16)]);
    let [params] = rules(&compiled, RM_CONTROL, &call)[..] else { panic!("one rule") };
    let [list] = compiled.rules.subs(&params)[..] else { panic!("one list") };
    assert_eq!((list.offset.get(), list.nsubs.get()), (8, 0));
    assert_eq!(list.length(&argument(16, &[(0, 5)])), Some(40));
}

#[test]
fn a_control_with_a_descriptor_names_the_kind_of_file() {
    let compiled = compiled(0);
    let call = argument(32, &[(8, 0x3d05), (24, 24)]);
    let [params] = rules(&compiled, RM_CONTROL, &call)[..] else { panic!("one rule") };
    let [fd] = compiled.rules.subs(&params)[..] else { panic!("one descriptor") };
    assert_eq!((fd.op, fd.offset.get(), fd.fd_width), (OP_FD, 16, 4));
    assert_eq!(fd.fd_kinds.get(), FileKind::Ctl.bit());
    assert!(fd.has(rule_flags::NEGATIVE_NONE));
}

#[test]
fn an_allocation_gathers_what_rm_copies_whatever_the_caller_says() {
    let compiled = compiled(0);
    let call = argument(48, &[(12, 0x90f1), (32, 4096)]);
    let [params, rights] = rules(&compiled, RM_ALLOC, &call)[..] else { panic!("two rules") };
    assert_eq!((params.offset.get(), params.length(&call)), (16, Some(56)));
    assert_eq!((rights.offset.get(), rights.length(&call)), (24, Some(4)));
    let old = argument(32, &[(12, 0x90f1)]);
    let [params] = rules(&compiled, RM_ALLOC_OLD, &old)[..] else { panic!("one rule") };
    assert_eq!(params.length(&old), Some(56));
}

#[test]
fn a_class_without_parameters_or_unknown_reaches_nothing_but_the_rights() {
    let compiled = compiled(0);
    for class in [0x73, 0xffff] {
        let call = argument(48, &[(12, class)]);
        let [rights] = rules(&compiled, RM_ALLOC, &call)[..] else { panic!("rights alone") };
        assert_eq!(rights.offset.get(), 24);
        assert!(rules(&compiled, RM_ALLOC_OLD, &argument(32, &[(12, class)])).is_empty());
    }
}

#[test]
fn an_event_names_its_file_in_eight_bytes() {
    let compiled = compiled(0);
    for class in [0x05, 0x79] {
        let call = argument(48, &[(12, class)]);
        let params = rules(&compiled, RM_ALLOC, &call)[0];
        let [fd] = compiled.rules.subs(&params)[..] else { panic!("one descriptor") };
        assert_eq!((fd.op, fd.offset.get(), fd.fd_width), (OP_FD, 16, 8));
        assert_eq!(fd.fd_kinds.get(), FileKind::Ctl.bit() | FileKind::Gpu.bit());
    }
}

#[test]
fn a_heap_call_that_hands_over_an_address_can_be_satisfied_by_no_segment() {
    let compiled = compiled(0);
    let cmd = 0xc0b8_464a;
    assert!(rules(&compiled, cmd, &argument(184, &[(8, 2)])).is_empty());
    let call = argument(184, &[(8, 27)]);
    let [never] = rules(&compiled, cmd, &call)[..] else { panic!("one rule") };
    assert_eq!(never.length(&call), None);
}

#[test]
fn memory_is_registered_by_class_and_by_function_of_a_guest_that_may() {
    let may = compiled(Capability::Compute as u32);
    let heap = argument(184, &[(8, 27), (0x48, 0xffff)]);
    let [pages] = rules(&may, 0xc0b8_464a, &heap)[..] else { panic!("one rule") };
    assert_eq!(
        (pages.op, pages.offset.get(), pages.registers(&heap)),
        (OP_PAGES, 0x40, Some(65536))
    );
    let memory = argument(56, &[(0xc, 0x71), (0x20, u32::MAX), (0x24, u32::MAX)]);
    let [pages, file] = rules(&may, 0xc038_4627, &memory)[..] else { panic!("two rules") };
    assert_eq!((pages.op, pages.offset.get(), pages.registers(&memory)), (OP_PAGES, 0x18, Some(0)));
    assert_eq!((file.op, file.offset.get()), (OP_FD, 0x30));
    let other = argument(56, &[(0xc, 0x3e)]);
    let [file] = rules(&may, 0xc038_4627, &other)[..] else { panic!("one rule") };
    assert_eq!(file.op, OP_FD);
}

#[test]
fn arrays_take_any_number_and_the_indirect_call_says_that_it_is_one() {
    let compiled = compiled(0);
    let cards = ioctl(&compiled, FileKind::Ctl, 0xc900_46c8, 2304);
    assert_eq!((cards.nr.get(), cards.size.get()), (200, 0));
    assert!(compiled.escape(FileKind::Ctl, 200, 2304).is_some());
    assert!(compiled.escape(FileKind::Ctl, 200, 2305).is_none());
    let indirect = ioctl(&compiled, FileKind::Ctl, 0xc010_46d3, 16);
    assert_ne!(indirect.flags & ioctl_flags::INDIRECT, 0);
}

#[test]
fn uvm_commands_go_by_their_whole_number_and_need_compute() {
    let without = compiled(Capability::Graphics as u32);
    let with = compiled(Capability::Compute as u32);
    let register = ioctl(&with, FileKind::Uvm, 37, 40);
    assert_eq!(register.flags & ioctl_flags::BY_NR, 0);
    let [fd] = with.rules.of(register, &[0; 40])[..] else { panic!("one descriptor") };
    assert_eq!((fd.offset.get(), fd.fd_kinds.get()), (24, FileKind::Ctl.bit()));
    let verdict = |c: &Compiled| c.escape(FileKind::Uvm, 37, 40).unwrap().verdict;
    assert_eq!(verdict(&without), Verdict::Capability as u8);
    assert_eq!(verdict(&with), Verdict::Allow as u8);
}

#[test]
fn verdicts_say_which_of_the_reasons_it_is() {
    let compiled = compiled(Capability::Utility as u32 | Capability::Graphics as u32);
    let control = |command| Verdict::from_number(compiled.control(command).unwrap().verdict);
    assert_eq!(control(0x2080_110b), Verdict::Allow);
    assert_eq!(control(0x9096_0104), Verdict::Overlay);
    assert_eq!(control(0x2080_2402), Verdict::Privileged);
    assert_eq!(control(0x2080_2204), Verdict::KernelOnly);
    assert_eq!(control(0x83de_031a), Verdict::Unsized);
    assert_eq!(control(0x83de_0309), Verdict::Capability);
    assert!(compiled.control(0x2080_abcd).is_none());
    let class = |class| Verdict::from_number(compiled.class(class).unwrap().verdict);
    assert_eq!(class(0x3f), Verdict::Allow);
    assert_eq!(class(0x71), Verdict::Capability);
    for refused in [0x78, 0x7e, 0x81, 0x82, 0x83, 0x92, 0x9010, 0xf1, 0xf9, 0xfd] {
        assert_ne!(class(refused), Verdict::Allow, "{refused:#x}");
    }
    let status = compiled.escape(FileKind::Ctl, 0x2a, 32).unwrap().status.get();
    assert_eq!(status, 28);
    assert_eq!(compiled.escape(FileKind::Ctl, 201, 4).unwrap().status.get(), NO_OFFSET);
}

#[test]
fn the_tables_are_sorted_and_every_index_lies_in_its_table() {
    let compiled = compiled(u32::MAX);
    let rules = &compiled.rules;
    let key = |e: &Ioctl| (e.kind, e.nr.get(), e.size.get());
    assert!(rules.ioctls.is_sorted_by(|a, b| key(a) < key(b)));
    assert!(compiled.controls.is_sorted_by(|a, b| a.command.get() < b.command.get()));
    assert!(compiled.classes.is_sorted_by(|a, b| a.class.get() < b.class.get()));
    let within = |first: u32, count: u32, length: usize| (first + count) as usize <= length;
    for ioctl in &rules.ioctls {
        assert!(within(ioctl.first_case.get(), ioctl.ncases.get(), rules.cases.len()));
        assert!(within(ioctl.first_rule.get(), ioctl.nrules.get(), rules.rules.len()));
        let first = ioctl.first_case.get() as usize;
        let cases = &rules.cases[first..first + ioctl.ncases.get() as usize];
        assert!(cases.is_sorted_by(|a, b| a.key.get() < b.key.get()));
    }
    for case in &rules.cases {
        assert!(within(case.first_rule.get(), case.nrules.get(), rules.rules.len()));
    }
    for rule in &rules.rules {
        assert!(within(rule.first_sub.get(), rule.nsubs.get(), rules.rules.len()));
        assert!(rules.subs(rule).iter().all(|sub| sub.nsubs.get() == 0), "nested no deeper");
    }
}

#[test]
fn an_explanation_says_what_who_and_why() {
    let profile = Store::embedded().unwrap().load(&"580.142".parse().unwrap()).unwrap();
    let about = |what| explain(&profile, Policy::built_in(), what, 3);
    let [control] = &about("0x20801802")[..] else { panic!("one") };
    assert_eq!((control.name.as_str(), control.size), ("NV2080_CTRL_CMD_BUS_GET_INFO", Some(16)));
    assert_eq!(control.verdict, "allowed");
    let [debugger] = &about("gt200_debugger")[..] else { panic!("one") };
    assert_eq!((debugger.verdict, &debugger.opened_by[..]), ("capability", &["compute"][..]));
    let [opaque] = &about("0x2080abcd")[..] else { panic!("one") };
    assert_eq!((opaque.verdict, opaque.size), ("unknown", None));
    assert!(about("NO_SUCH_THING").is_empty());
    assert_eq!(capabilities("utility, graphics"), Ok(3));
    assert!(capabilities("utility,cuda").unwrap_err().contains("cuda"));
    assert!(is_opaque(0x2080_8159) && is_opaque(0x2081_0107) && !is_opaque(0x2080_0102));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn no_argument_makes_a_rule_read_outside_it(
        bytes in proptest::collection::vec(any::<u8>(), 0..256),
        cmd in any::<u32>(),
        kind in 0u8..5,
    ) {
        let compiled = compiled(u32::MAX);
        let kind = FileKind::from_number(kind).unwrap();
        let size = u32::try_from(bytes.len()).unwrap();
        for entry in compiled.rules.ioctls.iter().filter(|entry| entry.kind == kind as u8) {
            for rule in compiled.rules.of(entry, &bytes) {
                let _ = (rule.length(&bytes), rule.value(&bytes));
            }
        }
        let _ = compiled.rules.ioctl(kind, cmd, size);
    }
}
