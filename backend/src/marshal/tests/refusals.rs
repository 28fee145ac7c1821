//! What is refused, by which name, and what the guest program sees of it.

use nvguest_abi::compiled::Verdict;
use nvguest_abi::FileKind::{self, Cap, Ctl, Gpu, Modeset, Uvm};

use super::calls::{allocation, control, RM_ALLOC, RM_CONTROL};
use super::card::Rig;
use super::guest::{u32_at, Block, Gathered, GUEST};
use super::profile::{profile, ADMIN, EMPTY, EXPORT_TO_FD, FLAT, GET_ENGINES, OPAQUE};
use crate::errno::Errno;
use crate::policy::{What, MAX_OPAQUE};

/// A call without buffers, as a guest would send it that has no rule for it.
fn bare(cmd: u32, argument: &[u8]) -> Gathered {
    Gathered { cmd, argument: argument.to_vec(), ..Gathered::default() }
}

fn refused(kind: FileKind, call: &Gathered) -> (Verdict, What, Result<Vec<u8>, Errno>) {
    let compiled = profile();
    let (refused, answer) = Rig::new(&compiled).refused(kind, call);
    (refused.verdict, refused.what, answer)
}

#[test]
fn a_control_is_refused_by_status_with_everything_else_as_it_was() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for (command, size, verdict, status) in [
        (0x2080_9999, 24, Verdict::Unknown, 0x56),
        (ADMIN, 8, Verdict::Privileged, 0x1b),
        (FLAT, 127, Verdict::Size, 0x1f),
        (OPAQUE, MAX_OPAQUE as usize + 1, Verdict::Size, 0x1f),
        (EMPTY, 4, Verdict::Size, 0x1f),
    ] {
        let params = rig.guest.put(&vec![7; size]);
        let sent = control(command, params, size);
        let call = rig.gather(Ctl, RM_CONTROL, &sent);
        let (refused, answer) = rig.refused(Ctl, &call);
        assert_eq!((refused.verdict, refused.what), (verdict, What::Control(command)));
        assert_eq!(answer, Ok(Block(sent).u32(0x1c, status).0));
        assert_eq!(rig.guest.memory[&params], vec![7; size]);
    }
}

#[test]
fn a_class_is_refused_by_status() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for (class, verdict, status) in [
        (0x1234, Verdict::Unknown, 0x22),
        (0xa084, Verdict::Overlay, 0x22),
        (0x78, Verdict::KernelOnly, 0x1b),
        (0x71, Verdict::Overlay, 0x22),
    ] {
        let sent = allocation(class, 0, 0);
        let call = rig.gather(Ctl, RM_ALLOC, &sent);
        let (refused, answer) = rig.refused(Ctl, &call);
        assert_eq!((refused.verdict, refused.what), (verdict, What::Class(class)));
        assert_eq!(answer, Ok(Block(sent).u32(0x28, status).0));
    }
}

#[test]
fn the_class_that_an_alias_really_means_is_what_counts() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(24).u32(8, 0x78).u64(0x10, 12).0);
    let call = rig.gather(Ctl, RM_ALLOC, &allocation(0x05, params, 0));
    let (refused, answer) = rig.refused(Ctl, &call);
    assert_eq!((refused.verdict, refused.what), (Verdict::KernelOnly, What::Class(0x78)));
    assert_eq!(u32_at(&answer.unwrap(), 0x28), 0x1b);
    assert_eq!(rig.session.asked.get(), 0, "no file is looked up for a call that is refused");
}

#[test]
fn every_allocation_is_judged_by_its_class() {
    let memory = Block::new(56).u32(0xc, 0x40).u32(0x30, u32::MAX).0;
    let mut call = bare(0xc038_4627, &memory);
    call.fds.push((0, 0x30, 0));
    let (verdict, what, answer) = refused(Gpu, &call);
    assert_eq!((verdict, what), (Verdict::Unknown, What::Class(0x40)));
    assert_eq!(u32_at(&answer.unwrap(), 0x28), 0x22);
}

#[test]
fn a_heap_function_with_pointers_that_no_profile_describes_is_refused() {
    for function in [0, 6, 19, 20, 99] {
        let sent = Block::new(184).u32(8, function).u64(0x60, GUEST).0;
        let (verdict, what, answer) = refused(Ctl, &bare(0xc0b8_464a, &sent));
        assert_eq!((verdict, what), (Verdict::Unknown, What::VidHeap(function)));
        assert_eq!(u32_at(&answer.unwrap(), 0x14), 0x56);
    }
}

#[test]
fn a_control_with_flags_is_refused() {
    for flags in [1, 2, 4, 1 << 31] {
        let sent = Block(control(EMPTY, 0, 0)).u32(0xc, flags).0;
        let (verdict, what, answer) = refused(Ctl, &bare(RM_CONTROL, &sent));
        assert_eq!((verdict, what), (Verdict::Unsized, What::Control(EMPTY)));
        assert_eq!(u32_at(&answer.unwrap(), 0x1c), 0x56);
    }
}

/// nvproxy #14711: which errno an unknown ioctl has depends on the node.
#[test]
fn an_unknown_ioctl_has_the_errno_of_the_node() {
    for (kind, cmd, errno) in [
        (Ctl, 0xc010_4699, Errno::EINVAL),
        (Gpu, RM_CONTROL, Errno::EINVAL),
        (Uvm, 62, Errno::EINVAL),
        (Modeset, 99, Errno::ENOTTY),
        (Cap, 0, Errno::ENOTTY),
    ] {
        let (verdict, what, answer) = refused(kind, &bare(cmd, &[0; 32]));
        assert_eq!((verdict, answer), (Verdict::Unknown, Err(errno)), "{what}");
    }
}

#[test]
fn an_escape_of_another_size_is_refused_by_errno() {
    for (kind, cmd, size) in
        [(Ctl, RM_CONTROL, 24), (Ctl, RM_CONTROL, 40), (Ctl, RM_ALLOC, 40), (Uvm, 25, 28)]
    {
        let (verdict, what, answer) = refused(kind, &bare(cmd, &vec![0; size]));
        assert_eq!((verdict, answer), (Verdict::Size, Err(Errno::EINVAL)), "{what} {size}");
    }
}

#[test]
fn a_forbidden_escape_is_answered_like_an_administrator_s() {
    let (verdict, what, answer) = refused(Ctl, &bare(0xc010_465f, &[0; 16]));
    assert_eq!((verdict, what), (Verdict::Privileged, What::Escape(Ctl, 0x5f)));
    assert_eq!(u32_at(&answer.unwrap(), 0xc), 0x1b);
}

#[test]
fn an_indirect_call_that_the_guest_did_not_unwrap_is_refused() {
    let (verdict, _, answer) = refused(Ctl, &bare(0xc010_46d3, &[0; 16]));
    assert_eq!((verdict, answer), (Verdict::Unsized, Err(Errno::EINVAL)));
}

#[test]
fn a_modeset_call_is_refused_as_long_as_no_rule_says_what_it_reaches() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&[5; 16]);
    let sent = Block::new(16).u32(4, 16).u64(8, params).0;
    let call = rig.gather(Modeset, 0xc010_6d00, &sent);
    let (refused, answer) = rig.refused(Modeset, &call);
    assert_eq!((refused.verdict, answer), (Verdict::Unsized, Err(Errno::EINVAL)));
}

/// The guest gathers nothing for a field outside the block: RM has the last word.
#[test]
fn a_control_too_short_for_its_own_pointers_is_refused_by_its_size() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    for size in [1, 4, 8, 12, 15] {
        let params = rig.guest.put(&vec![0x77; size]);
        let sent = control(GET_ENGINES, params, size);
        let call = rig.gather(Ctl, RM_CONTROL, &sent);
        assert_eq!(call.lengths.len(), 1);
        let (refused, answer) = rig.refused(Ctl, &call);
        assert_eq!(refused.verdict, Verdict::Size);
        assert_eq!(u32_at(&answer.unwrap(), 0x1c), 0x1f);
    }
}

#[test]
fn an_escape_without_a_layout_is_refused() {
    let (verdict, _, answer) = refused(Ctl, &bare(0xc010_4666, &[0; 16]));
    assert_eq!((verdict, answer), (Verdict::Unsized, Err(Errno::EINVAL)));
}

#[test]
fn a_file_that_is_not_the_guest_s_or_not_of_the_kind_is_refused() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let params = rig.guest.put(&Block::new(24).u32(0x10, 11).0);
    let call = rig.gather(Ctl, RM_CONTROL, &control(EXPORT_TO_FD, params, 24));
    for (file, errno) in [(5, Errno::EBADF), (2, Errno::EINVAL), (u32::MAX, Errno::EBADF)] {
        let mut call = call.clone();
        call.fds[0].2 = file;
        let (refused, answer) = rig.refused(Ctl, &call);
        assert_eq!((refused.verdict, answer), (Verdict::File, Err(errno)), "{file}");
    }
}

#[test]
fn a_buffer_too_large_for_us_is_refused_as_rm_refuses_for_want_of_memory() {
    let compiled = profile();
    let mut rig = Rig::new(&compiled);
    let list = rig.guest.put(&vec![0; 1 << 20]);
    let params = rig.guest.put(&Block::new(16).u32(0, 1 << 18).u64(8, list).0);
    let call = rig.gather(Ctl, RM_CONTROL, &control(GET_ENGINES, params, 16));
    let (refused, answer) = rig.refused(Ctl, &call);
    assert_eq!((refused.verdict, refused.what), (Verdict::Limit, What::Control(GET_ENGINES)));
    assert_eq!(answer, Err(Errno::ENOMEM), "its reply would be too large for a status");
}
