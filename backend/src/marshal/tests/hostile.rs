//! What a guest can lie about, and what it cannot break.

use nvguest_abi::compiled::{Compiled, Verdict};
use nvguest_abi::rules::{Rule, NO_OFFSET};
use nvguest_abi::FileKind::{self, Ctl, Uvm};
use proptest::collection::vec;
use proptest::prelude::*;

use super::calls::{control, RM_CONTROL};
use super::card::{Card, Rig, Session};
use super::guest::{Block, Gathered, GUEST};
use super::profile::{
    buffer, fd, list, profile, Builder, Spec, EXPORT_TO_FD, FLAT, GET_CHANNELLIST, GET_ENGINES, IN,
    INOUT, OUT,
};
use crate::marshal::plan::MAX_SEGMENTS;
use crate::marshal::request::MAX_FDS;
use crate::marshal::{prepare, Call, Scratch};

fn is_shape(rig: &mut Rig<'_>, call: &Gathered) -> bool {
    rig.prepare(Ctl, call, |_| ()).is_err_and(|refused| refused.verdict == Verdict::Shape)
}

/// A honest call with parameters, a list that is read and one that is written too.
fn honest(rig: &mut Rig<'_>) -> Gathered {
    let (first, second) = (rig.guest.put(&[1; 20]), rig.guest.put(&[2; 20]));
    let params = Block::new(24).u32(0, 5).u64(8, first).u64(16, second).0;
    let params = rig.guest.put(&params);
    let call = rig.gather(Ctl, RM_CONTROL, &control(GET_CHANNELLIST, params, 24));
    assert!(rig.prepare(Ctl, &call, |_| ()).is_ok());
    call
}

#[test]
fn a_segment_too_many_too_few_or_of_another_length_is_refused() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = honest(&mut rig);
    for segment in 0..call.lengths.len() {
        for length in [0, 1, call.lengths[segment] ^ 1, call.lengths[segment] + 8, u32::MAX] {
            let mut lie = call.clone();
            lie.lengths[segment] = length;
            assert!(is_shape(&mut rig, &lie), "segment {segment} of {length}");
        }
        let mut lie = call.clone();
        lie.lengths.remove(segment);
        assert!(is_shape(&mut rig, &lie));
        let mut lie = call.clone();
        lie.lengths.insert(segment, 8);
        assert!(is_shape(&mut rig, &lie));
    }
}

#[test]
fn bytes_too_many_or_too_few_are_refused() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = honest(&mut rig);
    let mut lie = call.clone();
    lie.data.push(vec![0; 8]);
    assert!(is_shape(&mut rig, &lie));
    let mut lie = call.clone();
    lie.data.pop();
    assert!(is_shape(&mut rig, &lie));
}

#[test]
fn a_pointer_made_null_or_not_null_behind_the_gathering_is_refused() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = honest(&mut rig);
    for (segment, offset) in [(0, 8), (0, 16)] {
        let mut lie = call.clone();
        lie.data[segment][offset..offset + 8].fill(0);
        assert!(is_shape(&mut rig, &lie));
    }
    let params = rig.guest.put(&Block::new(16).u32(0, 5).0);
    let mut lie = rig.gather(Ctl, RM_CONTROL, &control(GET_ENGINES, params, 16));
    lie.data[0][8..16].copy_from_slice(&GUEST.to_le_bytes());
    assert!(is_shape(&mut rig, &lie));
}

/// nvproxy b8ac9e343, c0d2dea90: a count that overflows, a size that is not checked.
#[test]
fn a_count_that_overflows_or_exceeds_rm_s_bound_is_refused() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let engines = rig.guest.put(&[0; 40]);
    let params = rig.guest.put(&Block::new(16).u32(0, 10).u64(8, engines).0);
    let call = rig.gather(Ctl, RM_CONTROL, &control(GET_ENGINES, params, 16));
    for count in [0x4000_0000_u32, 0x4000_000a, (1 << 18) + 1, u32::MAX] {
        let mut lie = call.clone();
        lie.data[0][..4].copy_from_slice(&count.to_le_bytes());
        for length in [40, count.wrapping_mul(4)] {
            lie.lengths[1] = length;
            assert!(is_shape(&mut rig, &lie), "{count:#x} {length:#x}");
        }
    }
}

/// virtio-nvgpu Z1: the size that the host copies by must be what was sent.
#[test]
fn a_control_s_size_is_the_size_of_what_was_sent() {
    let mut builder = Builder::default();
    let fixed = [buffer(0x10, INOUT, 64)];
    builder.ioctl(Ctl, 0x2a, 32, (8, 0x1c), &fixed, &[]).control(FLAT, 128, Verdict::Allow);
    let compiled = builder.build();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&[0; 64]);
    let call = rig.gather(Ctl, RM_CONTROL, &control(FLAT, params, 128));
    assert!(is_shape(&mut rig, &call));
}

#[test]
fn descriptor_records_must_be_those_that_the_rules_reach() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(24).u32(0x10, 11).0);
    let call = rig.gather(Ctl, RM_CONTROL, &control(EXPORT_TO_FD, params, 24));
    assert_eq!(call.fds, [(1, 0x10, 1)]);
    for fds in [
        vec![],
        vec![(1, 0x10, 1), (0, 0, 1)],
        vec![(0, 0x10, 1)],
        vec![(1, 0x14, 1)],
        vec![(1, 0x10, 0)],
        vec![(1, 0x10, 1), (1, 0x10, 1)],
    ] {
        let lie = Gathered { fds, ..call.clone() };
        assert!(is_shape(&mut rig, &lie), "{:?}", lie.fds);
    }
}

#[test]
fn a_value_that_means_no_file_can_not_name_one() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let mut lie = rig.gather(Uvm, 25, &Block::new(32).u32(16, u32::MAX).0);
    assert_eq!(lie.fds, [(0, 16, 0)]);
    lie.fds[0].2 = 1;
    let refused = rig.prepare(Uvm, &lie, |_| ()).unwrap_err();
    assert_eq!(refused.verdict, Verdict::Shape);
}

#[test]
fn a_pointer_whose_count_lies_outside_its_block_is_null_for_the_host() {
    let compiled = Builder::default().flat(Ctl, 1, 16, &[list(0, INOUT, 16, 4)]).build();
    let mut rig = Rig::new(&compiled);
    let argument = Block::new(16).u64(0, GUEST).0;
    let call = Gathered { cmd: 1, argument, ..Gathered::default() };
    let host = rig.prepare(Ctl, &call, |call| call.argument().to_vec());
    assert_eq!(host, Ok(vec![0; 16]));
}

#[test]
fn rules_whose_fields_overlap_build_no_call() {
    let sent = [0x77; 32];
    for specs in [
        [buffer(0, INOUT, 8), buffer(4, INOUT, 8)],
        [buffer(0, INOUT, 8), buffer(0, INOUT, 8)],
        [buffer(0, INOUT, 8), fd(4, 4, &[Ctl], 0)],
    ] {
        let compiled = Builder::default().flat(Ctl, 1, 32, &specs).build();
        let mut rig = Rig::new(&compiled);
        let call = Gathered {
            cmd: 1,
            argument: sent.to_vec(),
            lengths: vec![8; specs.iter().filter(|spec| spec.rule.fd_width == 0).count()],
            fds: specs.iter().filter(|spec| spec.rule.fd_width != 0).map(|_| (0, 4, 1)).collect(),
            ..Gathered::default()
        };
        let data = call.lengths.iter().map(|_| vec![0; 8]).collect();
        assert!(is_shape(&mut rig, &Gathered { data, ..call }));
    }
}

/// What an 8-byte field of a made-up argument is.
#[derive(Clone, Debug)]
enum Field {
    Plain(u64),
    Null,
    Buffer { flags: u8, bytes: Vec<u8>, inner: Option<Vec<Field>> },
    File { width: u8, number: i32 },
}

fn flags() -> impl Strategy<Value = u8> {
    prop::sample::select(vec![IN, OUT, INOUT])
}

fn leaf() -> BoxedStrategy<Field> {
    prop_oneof![
        any::<u64>().prop_map(Field::Plain),
        Just(Field::Null),
        (flags(), vec(any::<u8>(), 0..80)).prop_map(|(flags, bytes)| Field::Buffer {
            flags,
            bytes,
            inner: None
        }),
        (prop::sample::select(vec![4, 8]), prop::sample::select(vec![11, 12, 13]))
            .prop_map(|(width, number)| Field::File { width, number }),
    ]
    .boxed()
}

fn argument() -> impl Strategy<Value = Vec<Field>> {
    let outer = vec(leaf(), 1..4).prop_map(|fields| Field::Buffer {
        flags: INOUT,
        bytes: Vec::new(),
        inner: Some(fields),
    });
    (vec(leaf(), 0..3), prop::option::of(outer), vec(leaf(), 0..2))
        .prop_map(|(first, outer, last)| first.into_iter().chain(outer).chain(last).collect())
}

/// Lays fields out: the block's bytes in the guest, and the rules for it.
fn lay_out(rig: &mut super::guest::Guest, fields: &[Field]) -> (Vec<u8>, Vec<Spec>) {
    let (mut block, mut specs) = (Vec::new(), Vec::new());
    for field in fields {
        let offset = block.len() as u16;
        let value = match field {
            Field::Plain(value) => *value,
            Field::Null => {
                specs.push(buffer(offset, INOUT, 16));
                0
            }
            Field::Buffer { flags, bytes, inner } => {
                let (bytes, subs) = match inner {
                    Some(inner) => lay_out(rig, inner),
                    None => (bytes.clone(), Vec::new()),
                };
                specs.push(buffer(offset, *flags, bytes.len() as u32).with(subs));
                rig.put(&bytes)
            }
            Field::File { width, number } => {
                specs.push(fd(offset, *width, &[FileKind::Ctl, FileKind::Gpu, Uvm], 0));
                *number as u64
            }
        };
        block.extend_from_slice(&value.to_le_bytes());
    }
    (block, specs)
}

fn any_spec() -> BoxedStrategy<Spec> {
    let rule = (any::<[u8; 2]>(), 0..64_u16, prop_oneof![Just(NO_OFFSET), 0..64_u16], 0..10_u8);
    (rule, any::<[u32; 3]>(), 0..40_u32, prop::sample::select(vec![0, 4, 8, 9]))
        .prop_map(|((bits, offset, count_off, width), numbers, add, fd_width)| {
            let mut spec = list(offset, bits[0], count_off, numbers[0] % 9);
            spec.rule = Rule {
                op: bits[1] % 4,
                count_width: width,
                add: add.into(),
                max: (numbers[1] % 4096).into(),
                fd_width,
                fd_kinds: numbers[2].into(),
                ..spec.rule
            };
            spec
        })
        .boxed()
}

/// Any tables at all, for one number on nvidiactl.
fn any_profile() -> impl Strategy<Value = (u32, Compiled)> {
    let specs = || vec((any_spec(), vec(any_spec(), 0..3)), 0..4);
    let nr = prop::sample::select(vec![0x27, 0x28, 0x2a, 0x2b, 0x4a, 0x54, 0x99]);
    let selects = prop_oneof![Just(NO_OFFSET), 0..64_u16];
    (nr, 0..64_u32, selects.clone(), selects, specs(), specs()).prop_map(
        |(nr, size, select, status, own, case)| {
            let nest = |list: Vec<(Spec, Vec<Spec>)>| -> Vec<Spec> {
                list.into_iter().map(|(spec, subs)| spec.with(subs)).collect()
            };
            let mut builder = Builder::default();
            builder.ioctl(Ctl, nr, size, (select, status), &nest(own), &[(0, nest(case))]);
            for zero in 0..3 {
                builder.control(zero, zero, Verdict::Allow).class(zero, 40, Verdict::Allow);
            }
            (nr, builder.build())
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 512 }))]

    #[test]
    fn whatever_an_honest_call_reaches_the_host_sees_only_ours_and_the_guest_its_own(
        fields in argument(),
    ) {
        let mut guest = super::guest::Guest::default();
        let (sent, specs) = lay_out(&mut guest, &fields);
        let size = sent.len() as u32;
        let compiled = Builder::default().flat(Ctl, 7, size, &specs).build();
        let mut rig = Rig::new(&compiled);
        rig.guest.memory = guest.memory;
        let gathered = rig.gather(Ctl, 7, &sent);
        prop_assume!(gathered.lengths.len() <= MAX_SEGMENTS && gathered.fds.len() <= MAX_FDS);
        let (argument, _) = rig.call(Ctl, 7, &sent);
        prop_assert_eq!(argument, sent);
    }

    #[test]
    fn no_change_to_the_shape_of_an_honest_call_is_accepted(
        fields in argument(), segment in any::<prop::sample::Index>(), by in 1..u32::MAX,
    ) {
        let mut guest = super::guest::Guest::default();
        let (sent, specs) = lay_out(&mut guest, &fields);
        let compiled = Builder::default().flat(Ctl, 7, sent.len() as u32, &specs).build();
        let mut rig = Rig::new(&compiled);
        rig.guest.memory = guest.memory;
        let mut lie = rig.gather(Ctl, 7, &sent);
        if lie.lengths.is_empty() {
            return Ok(());
        }
        prop_assume!(lie.lengths.len() <= MAX_SEGMENTS && lie.fds.len() <= MAX_FDS);
        let segment = segment.index(lie.lengths.len());
        lie.lengths[segment] = lie.lengths[segment].wrapping_add(by);
        prop_assert!(is_shape(&mut rig, &lie));
    }

    #[test]
    fn no_tables_and_no_bytes_make_it_panic(
        (nr, compiled) in any_profile(),
        argument in vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..64),
        lengths in vec(0..40_u32, 0..7),
        fds in vec((0..3_u16, 0..64_u16, 0..6_u32), 0..3),
        data in vec(vec(prop_oneof![3 => Just(0_u8), 1 => any::<u8>()], 0..40), 0..4),
        fits in any::<bool>(),
    ) {
        let mut argument = argument;
        if fits {
            argument.resize(compiled.escapes[0].size.get() as usize, 0);
        }
        let out = Vec::new();
        let body = Gathered { cmd: nr, argument, lengths, fds, data, out }.body();
        let call = Call::parse(&body).unwrap();
        let session = Session::new(&[(1, Ctl), (2, FileKind::Gpu), (3, Uvm)]);
        let mut scratch = Scratch::new().unwrap();
        let mut reply = Vec::new();
        let prepared = prepare(&compiled, Ctl, &call, &session, &mut scratch);
        match prepared {
            Ok(prepared) => prepared.finish(Ok(0), &mut reply),
            Err(refused) => drop(refused.finish(&compiled, Ctl, &call, &mut reply)),
        }
    }

    #[test]
    fn no_bytes_on_a_real_layout_reach_the_host_as_a_pointer_or_a_file(
        command in prop::sample::select(vec![FLAT, GET_ENGINES, GET_CHANNELLIST, EXPORT_TO_FD]),
        params in vec(any::<u64>(), 3),
        lengths in vec(0..40_u32, 0..3),
        data in vec(any::<u8>(), 0..40),
        file in 0..4_u32,
    ) {
        let compiled = profile();
        let mut rig = Rig::new(&compiled);
        let size = compiled.control(command).unwrap().size.get();
        let mut bytes: Vec<u8> = params.iter().flat_map(|word| word.to_le_bytes()).collect();
        bytes.resize(size as usize, 0);
        let mut lie = Gathered {
            cmd: RM_CONTROL,
            argument: control(command, GUEST, size as usize),
            lengths: std::iter::once(size).chain(lengths).collect(),
            data: vec![bytes, data],
            ..Gathered::default()
        };
        if command == EXPORT_TO_FD {
            lie.fds.push((1, 0x10, file));
        }
        let card = Card::new(&compiled, Ctl);
        let done = rig.prepare(Ctl, &lie, |mut call| call.execute(&card, &card.file()));
        if let Ok(result) = done {
            prop_assert_eq!(result, Ok(0));
        }
    }
}
