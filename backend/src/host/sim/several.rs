//! Several cards in one host: each is itself, and what is of one is of no other.

use nvguest_abi::FileKind;
use zerocopy::{FromZeros, IntoBytes};

use super::client::{SUBDEVICE, USERMODE, VIDEO_MEMORY};
use super::identity::{Identity, MAX_CARDS};
use super::layout::CardInfo;
use super::tests::{call, open_card, read, readable, worker, write, Program, DEV, SUB};
use super::*;

const SIZE: u64 = 1 << 20;
/// NV01_EVENT_WITHOUT_EVENT_DATA | NV01_EVENT_NONSTALL_INTR, index FIFO_EVENT_MTHD
const DONE: u32 = 0x1800_0000 | events::FIFO;

fn two_cards() -> OwnedFd {
    SimCards::create(2, SIZE).unwrap()
}

fn words<const N: usize>(bytes: &[u8], at: usize) -> [u32; N] {
    std::array::from_fn(|index| {
        u32::from_le_bytes(bytes[at + 4 * index..][..4].try_into().unwrap())
    })
}

/// FB_GET_INFO_V2 of HEAP_FREE, in KiB.
fn free_kib(program: &Program<'_>) -> u32 {
    let mut params = [0; 1028];
    (params[0], params[4]) = (1, 0x16);
    assert_eq!(program.control(SUB, 0x2080_1303, &mut params), status::OK);
    words::<1>(&params, 8)[0]
}

#[test]
fn as_many_cards_as_there_may_be_are_all_different() {
    let cards: Vec<_> = (0..MAX_CARDS).map(Identity::of).collect();
    let differ = |key: fn(&Identity) -> String| {
        let keys: std::collections::HashSet<_> = cards.iter().map(key).collect();
        assert_eq!(keys.len(), cards.len());
    };
    differ(|card| card.pci());
    differ(|card| card.uuid_text());
    differ(|card| card.gpu_id().to_string());
}

#[test]
fn each_card_is_told_of_by_every_call_that_tells_of_cards() {
    let host = worker(&two_cards());
    let program = Program::on(&host, 1);
    let ids = [Identity::of(0), Identity::of(1)].map(Identity::gpu_id);
    let mut infos = [CardInfo::new_zeroed(); 4];
    call(&host, &program.ctl, 200, &mut infos, None).unwrap();
    let told = infos.map(|info| (info.valid, info.gpu_id, info.bus, info.slot, info.minor));
    assert_eq!(told[..2], [(1, ids[0], 0, 6, 0), (1, ids[1], 0x41, 0, 1)]);
    assert_eq!((infos[2].valid, infos[3].valid), (0, 0));
    let mut one = CardInfo::new_zeroed();
    assert_eq!(call(&host, &program.ctl, 200, &mut one, None), Err(Errno::EINVAL));

    let mut attached = [0; 128];
    assert_eq!(program.control(program.client, 0x201, &mut attached), status::OK);
    assert_eq!(words(&attached, 0), [ids[0], ids[1], u32::MAX]);
    let mut probed = [0; 384];
    assert_eq!(program.control(program.client, 0x214, &mut probed), status::OK);
    assert_eq!(words(&probed, 0), [ids[0], ids[1], u32::MAX]);
    let mut mask = [0; 4];
    assert_eq!(program.control(program.client, 0x204, &mut mask), status::OK);
    assert_eq!(mask, [3, 0, 0, 0]);
}

#[test]
fn each_card_answers_for_itself() {
    let host = worker(&two_cards());
    for number in 0..2 {
        let program = Program::on(&host, number);
        let card = Identity::of(number);
        let mut id = [0; 4];
        assert_eq!(program.control(SUB, 0x2080_0142, &mut id), status::OK);
        assert_eq!(words(&id, 0), [card.gpu_id()]);
        let mut gid = [0; 268];
        gid[4] = 2;
        assert_eq!(program.control(SUB, 0x2080_014a, &mut gid), status::OK);
        assert_eq!(gid[12..28], card.uuid());
        let mut info = [0; 32];
        info[..4].copy_from_slice(&card.gpu_id().to_le_bytes());
        assert_eq!(program.control(program.client, 0x205, &mut info), status::OK);
        assert_eq!(words(&info, 8), [number]);

        let mut uuid = [0; 268];
        uuid[..4].copy_from_slice(&card.gpu_id().to_le_bytes());
        assert_eq!(program.control(program.client, 0x275, &mut uuid), status::OK);
        let text = card.uuid_text();
        assert_eq!(&uuid[8..8 + text.len()], text.as_bytes());
        let mut by_uuid = [0; 272];
        by_uuid[..256].copy_from_slice(&uuid[8..264]);
        assert_eq!(program.control(program.client, 0x274, &mut by_uuid), status::OK);
        assert_eq!(words(&by_uuid, 260), [card.gpu_id(), number]);
    }
}

#[test]
fn a_card_or_a_uuid_that_no_card_has_is_refused() {
    let host = worker(&two_cards());
    let program = Program::on(&host, 0);
    let root = program.client;
    let unknown = [&7_u32.to_le_bytes()[..], &[0; 380]].concat();
    for (command, size) in [(0x202, 40), (0x205, 32), (0x21b, 12)] {
        let mut params = unknown[..size].to_vec();
        assert_eq!(program.control(root, command, &mut params), status::INVALID_ARGUMENT);
    }
    for (command, size) in [(0x274, 272), (0x275, 268)] {
        let mut params = unknown[..size].to_vec();
        assert_eq!(program.control(root, command, &mut params), status::OBJECT_NOT_FOUND);
    }
    let mut ids = [Identity::of(1).gpu_id(), 7];
    assert_eq!(call(&host, &program.ctl, 212, &mut ids, None), Err(Errno::EINVAL));
    ids[1] = Identity::of(0).gpu_id();
    assert_eq!(call(&host, &program.ctl, 212, &mut ids, None), Ok(0));
    let third = Node { path: "/dev/nvidia2".into(), kind: FileKind::Gpu, minor: 2, gpu_id: 0 };
    assert_eq!(host.open(&third, 2).unwrap_err(), Errno::ENXIO);
}

#[test]
fn a_device_is_made_only_on_a_card_that_the_process_has_open() {
    let card = two_cards();
    let (host, other) = (worker(&card), worker(&card));
    let program = Program::on(&host, 1);
    let _of_another = open_card(&other, 0);
    assert_eq!(program.device(7, 0), status::INSUFFICIENT_PERMISSIONS);
    assert_eq!(program.control(7, 0x80_0280, &mut [0; 4]), status::OBJECT_NOT_FOUND);
    let open = open_card(&host, 0);
    assert_eq!(program.device(7, 0), status::OK);
    host.close(open);
    assert_eq!(program.device(8, 0), status::INSUFFICIENT_PERMISSIONS);
    assert_eq!(program.device(8, 2), status::INVALID_CLASS);
}

#[test]
fn a_card_that_is_full_leaves_the_others_memory_free() {
    let card = two_cards();
    let (host, other) = (worker(&card), worker(&card));
    let (first, second) = (Program::on(&host, 0), Program::on(&other, 1));
    let whole = first.video(1, SIZE);
    write(&whole, b"full");
    assert_eq!(first.memory(2, VIDEO_MEMORY, 1), status::NO_MEMORY);
    assert_eq!((free_kib(&first), free_kib(&second)), (0, 1024));
    let its = second.video(1, SIZE);
    assert_eq!(its.offset, whole.offset + SIZE);
    write(&its, b"also");
    assert_eq!(second.memory(2, VIDEO_MEMORY, 1), status::NO_MEMORY);
    assert_eq!(&read(&whole), b"full");
    first.free(1);
    assert_eq!((free_kib(&first), free_kib(&second)), (1024, 0));
}

#[test]
fn one_process_has_memory_on_both_cards() {
    let host = worker(&two_cards());
    let program = Program::on(&host, 0);
    let _node = open_card(&host, 1);
    assert_eq!(program.device(7, 1), status::OK);
    assert_eq!(program.memory(1, VIDEO_MEMORY, SIZE), status::OK);
    let mut params = layout::Memory { size: SIZE, ..layout::Memory::new_zeroed() };
    assert_eq!(program.alloc(7, 2, VIDEO_MEMORY, params.as_mut_bytes()), status::OK);
    assert_eq!((params.offset, params.limit), (0, SIZE - 1), "each card counts from 0");
}

#[test]
fn memory_is_mapped_through_its_own_cards_node_alone() {
    let host = worker(&two_cards());
    let program = Program::on(&host, 1);
    assert_eq!(program.memory(1, VIDEO_MEMORY, 65536), status::OK);
    let range = (0, 65536);
    assert_eq!(program.arm(1, range, &open_card(&host, 0)).0, status::INVALID_ARGUMENT);
    assert_eq!(program.arm(1, range, &open_card(&host, 1)).0, status::OK);
}

#[test]
fn a_doorbell_and_finished_work_are_of_one_card() {
    let host = worker(&two_cards());
    let (first, second) = (Program::on(&host, 0), Program::on(&host, 1));
    let (one, other) = (first.receiver(0xe1, DONE), second.receiver(0xe2, DONE));
    assert_eq!(second.control(SUB, 0x2080_0308, &mut [0; 4]), status::OK);
    assert_eq!((readable(&one), readable(&other)), (false, true));
    let page = |program: &Program<'_>| {
        assert_eq!(program.alloc(SUB, 3, USERMODE, &mut [0; 2]), status::OK);
        let owner = host.inner.any_client(program.client).unwrap();
        let page = owner.owned().get(3).and_then(|object| object.memory.clone());
        page.unwrap()
    };
    assert!(!Arc::ptr_eq(&page(&first), &page(&second)));
}

#[test]
fn an_event_of_one_card_leaves_the_others_armed() {
    let host = worker(&two_cards());
    let (first, second) = (Program::on(&host, 0), Program::on(&host, 1));
    let files = [&first, &second].map(|program| {
        let file = program.receiver(0xe1, events::SOFTWARE);
        let mut once = [0_u8; 20];
        once[4] = 1;
        assert_eq!(program.control(SUB, 0x2080_0301, &mut once), status::OK);
        file
    });
    assert_eq!(first.control(SUB, 0x2080_0302, &mut []), status::OK);
    assert_eq!((readable(&files[0]), readable(&files[1])), (true, false));
    assert_eq!(second.control(SUB, 0x2080_0302, &mut []), status::OK);
    assert!(readable(&files[1]));
}

#[test]
fn a_subdevice_is_of_its_devices_card() {
    let host = worker(&two_cards());
    let program = Program::on(&host, 1);
    assert_eq!(program.alloc(DEV, 9, SUBDEVICE, &mut [0; 4]), status::OK);
    let mut id = [0; 4];
    assert_eq!(program.control(9, 0x2080_0142, &mut id), status::OK);
    assert_eq!(words(&id, 0), [Identity::of(1).gpu_id()]);
}
