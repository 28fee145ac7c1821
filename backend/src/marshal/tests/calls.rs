//! What reaches the host, and what comes back.

use std::sync::atomic::Ordering;
use std::sync::Arc;

use nvguest_abi::compiled::Verdict;
use nvguest_abi::FileKind::{Ctl, Gpu, Uvm};

use super::card::{host_number, Card, Rig, WRITTEN};
use super::guest::{u32_at, u64_at, Block, GUEST, REGISTRATION};
use super::profile::{
    profile, EMPTY, EXPORT_TO_FD, FLAT, GET_CHANNELLIST, GET_ENGINES, GET_ID_INFO, GR_GET_CAPS,
    OPAQUE,
};
use crate::errno::Errno;
use crate::marshal::pages::{Piece, SideBySide};
use crate::marshal::{Call, Refused};
use crate::policy::What;

pub const RM_CONTROL: u32 = 0xc020_462a;
pub const RM_ALLOC: u32 = 0xc030_462b;

pub fn control(command: u32, params: u64, size: usize) -> Vec<u8> {
    let argument = Block::new(32).u32(0, 0xc1d0_0001).u32(4, 0x5c00_0001).u32(8, command);
    argument.u64(0x10, params).u32(0x18, size as u32).0
}

pub fn allocation(class: u32, params: u64, rights: u64) -> Vec<u8> {
    let argument = Block::new(48).u32(0, 0xc1d0_0001).u32(8, 0xcafe_0001).u32(0xc, class);
    argument.u64(0x10, params).u64(0x18, rights).0
}

#[test]
fn a_flat_control_reaches_the_host_with_its_parameters_and_comes_back() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let bytes: Vec<u8> = (0..128).collect();
    let params = rig.guest.put(&bytes);
    let sent = control(FLAT, params, 128);
    let (argument, seen) = rig.call(Ctl, RM_CONTROL, &sent);
    assert_eq!(argument, sent, "pointer and size are the caller's own");
    assert_eq!(seen[1], bytes);
    assert_ne!(u64_at(&seen[0], 0x10), params);
    assert_eq!(rig.guest.memory[&params], [WRITTEN; 128]);
}

#[test]
fn the_driver_never_sees_an_ioctl_number_that_the_kernel_would_serve_itself() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for caller in [RM_CONTROL, 0x2a, 0x542a, 0x4020_942a, 0xffff_ff2a] {
        let call = rig.gather(Ctl, caller, &control(EMPTY, 0, 0));
        let card = Card::new(&compiled, Ctl);
        rig.prepare(Ctl, &call, |mut call| call.execute(&card, &card.file())).unwrap().unwrap();
        assert_eq!(card.cmd.load(Ordering::Relaxed), RM_CONTROL, "{caller:#x}");
    }
}

/// nvproxy 0e7a047ef, f5ce408bc: controls with lists were passed on as if flat.
#[test]
fn a_list_inside_parameters_is_followed_and_its_pointer_comes_back() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let engines = rig.guest.put(&[7; 40]);
    let params = rig.guest.put(&Block::new(16).u32(0, 10).u64(8, engines).0);
    let sent = control(GET_ENGINES, params, 16);
    let (argument, seen) = rig.call(Ctl, RM_CONTROL, &sent);
    assert_eq!(argument, sent);
    assert_eq!(seen[2], [7; 40]);
    assert_ne!(u64_at(&seen[1], 8), engines);
    assert_eq!(rig.guest.memory[&engines], [WRITTEN; 40]);
    assert_eq!(u64_at(&rig.guest.memory[&params], 8), engines);
    assert_eq!(u32_at(&rig.guest.memory[&params], 0), 0xa5a5_a5a5, "the count is RM's output");
}

#[test]
fn a_null_list_asks_for_the_count_alone() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(16).u32(0, 10).0);
    let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(GET_ENGINES, params, 16));
    assert_eq!(seen.len(), 2);
    assert_eq!(u64_at(&seen[1], 8), 0);
}

#[test]
fn two_lists_of_one_count_keep_their_order_and_direction() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let handles = rig.guest.put(&[1; 12]);
    let channels = rig.guest.put(&[2; 12]);
    let params = Block::new(24).u32(0, 3).u64(8, handles).u64(16, channels).0;
    let params = rig.guest.put(&params);
    let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(GET_CHANNELLIST, params, 24));
    assert_eq!(seen[2..], [[1; 12], [2; 12]]);
    assert_eq!(rig.guest.memory[&handles], [1; 12]);
    assert_eq!(rig.guest.memory[&channels], [WRITTEN; 12]);
}

#[test]
fn a_buffer_that_rm_only_writes_starts_as_zeroes() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let table = rig.guest.put(&[9; 23]);
    let params = rig.guest.put(&Block::new(16).u32(0, 23).u64(8, table).0);
    let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(GR_GET_CAPS, params, 16));
    assert_eq!(seen[2], [0; 23]);
    assert_eq!(rig.guest.memory[&table], [WRITTEN; 23]);
}

#[test]
fn a_pointer_that_rm_does_not_follow_is_null_for_the_host() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(40).u64(0x10, GUEST + 0x1234).0);
    let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(GET_ID_INFO, params, 40));
    assert_eq!(u64_at(&seen[1], 0x10), 0);
    assert_eq!(u64_at(&rig.guest.memory[&params], 0x10), GUEST + 0x1234);
}

#[test]
fn an_opaque_control_is_passed_on_flat() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for size in [1, 332, 992, 65536] {
        let params = rig.guest.put(&vec![3; size]);
        let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(OPAQUE, params, size));
        assert_eq!(seen[1], vec![3; size]);
        assert_eq!(rig.guest.memory[&params], vec![WRITTEN; size]);
    }
}

#[test]
fn a_file_inside_parameters_is_the_host_s_for_the_host_and_the_caller_s_for_the_caller() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(24).u32(0x10, 11).0);
    let (_, seen) = rig.call(Ctl, RM_CONTROL, &control(EXPORT_TO_FD, params, 24));
    assert_eq!(u32_at(&seen[1], 0x10) as i32, host_number(1));
    assert_eq!(u32_at(&rig.guest.memory[&params], 0x10), 11);
}

/// nvproxy 69b0b745e: the key of an event went through as the guest's number.
#[test]
fn an_event_key_is_the_host_s_number_of_the_guest_s_file() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for class in [0x05, 0x79] {
        let params = rig.guest.put(&Block::new(24).u32(8, 0x79).u64(0x10, 12).0);
        let (_, seen) = rig.call(Ctl, RM_ALLOC, &allocation(class, params, 0));
        assert_eq!(u64_at(&seen[1], 0x10), host_number(2) as u64);
        assert_eq!(u64_at(&rig.guest.memory[&params], 0x10), 12);
    }
}

/// nvproxy c8e0b42ff: RM goes by its own size, and user mode passes 0.
#[test]
fn an_allocation_whose_caller_says_size_zero_is_made() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&[1; 56]);
    let sent = allocation(0x80, params, 0);
    assert_eq!(u32_at(&sent, 0x20), 0);
    let (argument, seen) = rig.call(Ctl, RM_ALLOC, &sent);
    assert_eq!(seen[1], [1; 56]);
    assert_eq!(argument, sent);
    let (_, seen) = rig.call(Ctl, 0xc020_462b, &sent[..32]);
    assert_eq!(seen[1], [WRITTEN; 56]);
}

#[test]
fn parameters_of_a_class_have_room_for_all_that_rm_copies() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(8).u64(0, u64::MAX).0);
    let call = rig.gather(Ctl, RM_ALLOC, &allocation(0xc637, params, 0));
    let block = rig.prepare(Ctl, &call, |call| call.params().unwrap().to_vec()).unwrap();
    assert_eq!(block.len(), 16, "the profile says that RM copies 16 bytes of this class");
    assert_eq!(block[8..], [0; 8]);
    let (_, seen) = rig.call(Ctl, RM_ALLOC, &allocation(0xc637, params, 0));
    assert_eq!(seen[1].len(), 8);
}

#[test]
fn rights_requested_are_gathered_beside_the_parameters() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let rights = rig.guest.put(&[0xf0, 0, 0, 0]);
    let sent = allocation(0x80, 0, rights);
    let (argument, seen) = rig.call(Ctl, RM_ALLOC, &sent);
    assert_eq!(seen[1], [0xf0, 0, 0, 0]);
    assert_eq!(argument, sent);
}

#[test]
fn a_class_without_parameters_gets_none_whatever_the_pointer() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let sent = allocation(0x73, GUEST, 0);
    let (argument, seen) = rig.call(Ctl, RM_ALLOC, &sent);
    assert_eq!(u64_at(&seen[0], 0x10), 0);
    assert_eq!(argument, sent);
}

#[test]
fn a_value_that_means_no_file_stays_one() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for none in [-1_i32, -2, i32::MIN] {
        let sent = Block::new(32).u32(16, none as u32).0;
        let (argument, seen) = rig.call(Uvm, 25, &sent);
        assert_eq!(u32_at(&seen[0], 16), none as u32);
        assert_eq!(argument, sent);
    }
    assert_eq!(rig.session.asked.get(), 0);
}

#[test]
fn a_file_opened_elsewhere_is_no_file_where_the_profile_says_so() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for foreign in [0, 99, 100_001] {
        let params = rig.guest.put(&Block::new(8).u64(0, foreign).0);
        let (_, seen) = rig.call(Ctl, RM_ALLOC, &allocation(0xc637, params, 0));
        assert_eq!(u64_at(&seen[1], 0), u64::MAX, "{foreign}");
        assert_eq!(u64_at(&rig.guest.memory[&params], 0), foreign);
    }
}

#[test]
fn a_descriptor_that_is_negative_in_one_reading_is_negative_in_both() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for (caller, host) in [
        (u64::MAX, u64::MAX),
        (0xffff_ffff, 0xffff_ffff),
        (0x8000_0000_0000_0005, u64::MAX),
        (0x0000_0001_ffff_fffe, 0x0000_0001_ffff_fffe),
    ] {
        let params = rig.guest.put(&Block::new(8).u64(0, caller).0);
        let (_, seen) = rig.call(Ctl, RM_ALLOC, &allocation(0xc637, params, 0));
        assert_eq!(u64_at(&seen[1], 0), host, "{caller:#x}");
    }
}

#[test]
fn the_session_can_tell_which_file_a_call_names() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = rig.gather(Ctl, 0xc038_464e, &Block::new(56).u32(0x30, 12).0);
    let named = rig.prepare(Ctl, &call, |call| (call.file_at(0, 0x30), call.file_at(0, 0)));
    assert_eq!(named, Ok((Some(2), None)));
}

#[test]
fn the_session_can_change_a_call_before_and_a_reply_after() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = rig.gather(Ctl, 0xc008_46d6, &Block::new(8).u64(0, 1 << 27).0);
    let card = Card::new(&compiled, Ctl);
    let reply = rig.prepare(Ctl, &call, |mut call| {
        call.argument_mut().copy_from_slice(&(1_u64 << 31).to_le_bytes());
        let result = call.execute(&card, &card.file());
        call.argument_mut().copy_from_slice(&(1_u64 << 27).to_le_bytes());
        let mut reply = Vec::new();
        call.finish(result, &mut reply);
        reply
    });
    assert_eq!(u64_at(&card.seen.lock().unwrap()[0], 0), 1 << 31);
    assert_eq!(u64_at(&reply.unwrap(), 8), 1 << 27);
}

#[test]
fn a_call_goes_by_its_command_class_or_function() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let cases = [
        (RM_CONTROL, control(EMPTY, 0, 0), What::Control(EMPTY)),
        (RM_ALLOC, allocation(0x80, 0, 0), What::Class(0x80)),
        (0xc0b8_464a, Block::new(184).u32(8, 2).0, What::VidHeap(2)),
        (0xc010_4629, vec![0; 16], What::Escape(Ctl, 0x29)),
    ];
    for (cmd, argument, what) in cases {
        let call = rig.gather(Ctl, cmd, &argument);
        assert_eq!(rig.prepare(Ctl, &call, |call| call.what()), Ok(what));
    }
}

#[test]
fn an_errno_of_the_driver_has_the_argument_alone_and_efault_nothing() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&[1; 128]);
    let sent = control(FLAT, params, 128);
    let call = rig.gather(Ctl, RM_CONTROL, &sent);
    let replies = rig.prepare(Ctl, &call, |prepared| {
        [Errno::EINVAL, Errno::EFAULT].map(|errno| {
            let mut reply = Vec::new();
            prepared.finish(Err(errno), &mut reply);
            reply
        })
    });
    let [einval, efault] = replies.unwrap();
    assert_eq!(einval[8..], sent);
    assert!(efault.is_empty());
}

#[test]
fn what_the_ioctl_returned_comes_back_as_it_is() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let call = rig.gather(Ctl, 0xc010_4629, &[0; 16]);
    for ret in [0, 1, i32::MAX, -5] {
        let mut reply = Vec::new();
        rig.prepare(Ctl, &call, |call| call.finish(Ok(ret), &mut reply)).unwrap();
        assert_eq!(u32_at(&reply, 0) as i32, ret);
        assert_eq!(u32_at(&reply, 4), 16);
    }
}

#[test]
fn an_ioctl_without_an_argument_is_made_with_none() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let (argument, _) = rig.call(Uvm, 0x3000_0002, &[]);
    assert!(argument.is_empty());
}

#[test]
#[cfg_attr(miri, ignore = "it maps files")]
fn memory_that_the_caller_registers_is_the_session_s_to_give() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let heap = Block::new(184).u32(8, 27).u64(0x40, GUEST).u64(0x48, 8191).0;
    let older =
        Block::new(56).u32(0xc, 0x71).u64(0x18, GUEST).u64(0x20, 8191).u32(0x30, u32::MAX).0;
    let file = tempfile::tempfile().unwrap();
    file.set_len(8192).unwrap();
    let pieces = [Piece { file, offset: 0, length: 8192 }];
    let memory = Arc::new(SideBySide::map(8192, pieces).unwrap());
    for (kind, cmd, sent, at) in [(Ctl, 0xc0b8_464a, heap, 0x40), (Gpu, 0xc038_4627, older, 0x18)] {
        let call = rig.gather(kind, cmd, &sent);
        let card = Card::new(&compiled, kind);
        let reply = rig.prepare(kind, &call, |mut call| {
            assert_eq!(call.registered(), Some(at as u16));
            assert_eq!(u64_at(call.argument(), at), 0);
            assert_eq!(call.execute(&card, &card.file()), Err(Errno::EINVAL));
            assert_eq!(
                call.offer().map(|offer| (offer.registration, offer.address)),
                Some((7, GUEST))
            );
            call.register(&memory).unwrap();
            let result = call.execute(&card, &card.file());
            call.hold();
            let mut reply = Vec::new();
            call.finish(result, &mut reply);
            assert_eq!(reply.len(), call.reply_len());
            reply
        });
        assert_eq!(u64_at(&card.seen.lock().unwrap()[0], at), memory.address());
        let reply = reply.unwrap();
        assert_eq!(reply[8..][..sent.len()], sent);
        let head = &reply[8 + sent.len()..];
        assert_eq!([0, 4, 8, 12].map(|at| u32_at(head, at)), [REGISTRATION, 0, 1, 0]);
    }
}

#[test]
fn memory_of_a_refused_call_is_not_held() {
    let compiled = profile();
    let rig = Rig::new(&compiled);
    let sent = Block::new(184).u32(8, 27).u64(0x40, GUEST).u64(0x48, 4095).0;
    let call = rig.gather(Ctl, 0xc0b8_464a, &sent);
    let body = call.body();
    let parsed = Call::parse(&body).unwrap();
    let refused = Refused::new(&compiled, Ctl, &parsed, Verdict::Limit);
    let mut reply = Vec::new();
    refused.finish(&compiled, Ctl, &parsed, &mut reply).unwrap();
    let head = &reply[8 + sent.len()..];
    assert_eq!([0, 4, 8, 12].map(|at| u32_at(head, at)), [REGISTRATION, 0, 0, 0]);
}

#[test]
fn an_address_that_rm_returns_is_not_read_from_the_caller() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let sent = Block::new(184).u32(8, 2).u64(0x78, GUEST).0;
    let call = rig.gather(Ctl, 0xc0b8_464a, &sent);
    for returned in [0_u64, 0x1234_5000] {
        let mut reply = Vec::new();
        rig.prepare(Ctl, &call, |mut call| {
            assert_eq!(u64_at(call.argument(), 0x78), 0);
            call.argument_mut()[0x78..0x80].copy_from_slice(&returned.to_le_bytes());
            call.finish(Ok(0), &mut reply);
        })
        .unwrap();
        let expected = if returned == 0 { GUEST } else { returned };
        assert_eq!(u64_at(&reply, 8 + 0x78), expected);
    }
}
