//! Several cards in one host: a guest of some of them finds these, and the others nowhere.

use std::os::fd::AsRawFd;

use nix::sys::memfd::{memfd_create, MFdFlags};
use nvguest_frontend::backend::wait_until;
use nvguest_frontend::gather::ByHandle;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{wire, Options};
use rmclient::abi::{control, escape};
use rmclient::Place;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::{errno, pair_in, refused, start_with, Pair, EINVAL, ENXIO, LONG};

const MIB: u64 = 1 << 20;
const CARDS: [(&str, &str); 1] = [("NVGUEST_SIM_CARDS", "2")];
/// RM's numbers of the two cards, and the second's name and UUID.
const FIRST: u32 = 0x6;
const SECOND: u32 = 0x4100;
const SECOND_PCI: &str = "0000:41:00.0";
const SECOND_UUID: &str = "GPU-6e766775-6573-7401-7369-6d2d63617264";
const FIRST_UUID: &str = "GPU-6e766775-6573-7400-7369-6d2d63617264";

const PROBED_IDS: u32 = 0x214;
const UUID_INFO: u32 = 0x274;
const UUID_FROM_ID: u32 = 0x275;
const INVALID_ARGUMENT: u32 = 0x1f;
const OBJECT_NOT_FOUND: u32 = 0x57;
/// `NV2080_CTRL_FB_INFO_INDEX_*`.
const TOTAL_RAM_SIZE: u32 = 8;
const HEAP_FREE: u32 = 0x16;

/// A guest of these cards, in a host with two.
fn guest_of(gpu: &str) -> Pair {
    pair_in(&[&format!("--gpu={gpu}")], &CARDS, Options::default())
}

fn names(pair: &Pair, kind: u16) -> Vec<String> {
    let nodes = &pair.guest.probe().unwrap().nodes;
    let of_kind = nodes.iter().filter(|node| node.header.kind.get() == kind);
    of_kind.map(|node| node.name.clone()).collect()
}

/// CARD_INFO: number and minor of each card.
fn card_info(client: &Client) -> Vec<(u32, u32)> {
    let mut infos = [[0_u32; 18]; 32];
    // SAFETY: there is no pointer in it.
    unsafe { client.ctl.rm(escape::CARD_INFO, &mut infos, &ByHandle).unwrap() };
    let valid = infos.iter().filter(|info| info[0] != 0);
    valid.map(|info| (info[4], info[14])).collect()
}

/// ATTACH_GPUS_TO_FD on a file of its own; the errno, 0 for none.
fn attach(client: &Client, mut ids: [u32; 2]) -> i32 {
    let file = client.ctl.process.open("nvidiactl").unwrap();
    // SAFETY: there is no pointer in it.
    match unsafe { file.rm(escape::ATTACH_GPUS_TO_FD, &mut ids, &ByHandle) } {
        Ok(_) => 0,
        failed => refused(failed),
    }
}

/// A control of the client whose parameters begin with a card's number; RM's status.
fn about(client: &Client, command: u32, size: usize, id: u32) -> u32 {
    let mut params = vec![0; size];
    params[..4].copy_from_slice(&id.to_le_bytes());
    client.control(client.root, command, &mut params).unwrap()
}

/// GPU_GET_UUID_INFO by text; RM's status, the card and its instance.
fn by_uuid(client: &Client, uuid: &str) -> (u32, u32, u32) {
    let mut params = [0; 272];
    params[..uuid.len()].copy_from_slice(uuid.as_bytes());
    let status = client.control(client.root, UUID_INFO, &mut params).unwrap();
    let word = |at: usize| u32::read_from_bytes(&params[at..at + 4]).unwrap();
    (status, word(260), word(264))
}

/// What GPU_GET_ATTACHED_IDS and GPU_GET_PROBED_IDS list.
fn listed(client: &Client) -> [Vec<u32>; 2] {
    [(control::ATTACHED_IDS, 32), (PROBED_IDS, 96)].map(|(command, words)| {
        let mut ids = vec![0_u32; words];
        assert_eq!(client.control(client.root, command, ids.as_mut_bytes()).unwrap(), 0);
        ids.into_iter().take(32).take_while(|&id| id != u32::MAX).collect()
    })
}

/// GPU_GET_ACTIVE_DEVICE_IDS, asked with stale words of the caller's own: what it answers.
fn active(client: &Client) -> Vec<u32> {
    let mut words = vec![SECOND; 769];
    assert_eq!(client.control(client.root, 0x288, words.as_mut_bytes()).unwrap(), 0);
    words.truncate(7);
    words
}

fn used(pair: &Pair) -> u64 {
    pair.backend.status().unwrap()["vram"]["used"].as_u64().unwrap()
}

#[test]
fn a_card_chosen_by_whatever_name_is_the_only_one_that_its_guest_has() {
    for gpu in ["1", SECOND_UUID, SECOND_PCI, "41:00.0", "00000000:41:00.0"] {
        let pair = guest_of(gpu);
        assert_eq!(names(&pair, wire::NODE_CDEV), ["nvidiactl", "nvidia1"], "{gpu}");
        assert_eq!(names(&pair, wire::NODE_PCI), [SECOND_PCI], "{gpu}");
        let files = names(&pair, wire::NODE_PROC);
        let of_cards: Vec<_> = files.iter().filter(|name| name.contains("/gpus/")).collect();
        assert_eq!(of_cards, [&format!("driver/nvidia/gpus/{SECOND_PCI}/information")], "{gpu}");
    }
    for args in [&["--gpu=all"][..], &["--gpu=1,0"], &[]] {
        let pair = pair_in(args, &CARDS, Options::default());
        assert_eq!(names(&pair, wire::NODE_CDEV), ["nvidiactl", "nvidia0", "nvidia1"]);
    }
}

#[test]
fn a_choice_of_no_card_of_the_host_is_an_error_that_lists_them() {
    let binary = env!("CARGO_BIN_EXE_vhost-user-nvguest");
    let mut check = std::process::Command::new(binary);
    check.args(["--host=sim", "--check", "--allow-root", "--gpu=2"]).envs(CARDS);
    let output = check.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no card is 2; the host has 0: GPU-6e766775"), "{said}");
    assert!(said.contains(&format!("1: {SECOND_UUID} at {SECOND_PCI}")), "{said}");
}

#[test]
fn a_guest_of_the_second_card_is_told_of_that_alone() {
    let pair = guest_of("1");
    let client = Client::on(&pair.guest.process(100), 1).unwrap();
    assert_eq!(card_info(&client), [(SECOND, 1)]);
    assert_eq!(listed(&client), [[SECOND], [SECOND]]);
    assert_eq!(active(&client), [1, SECOND, u32::MAX, u32::MAX, 0, 0, 0]);
    assert_eq!(by_uuid(&client, SECOND_UUID), (0, SECOND, 1));
    for (command, size) in [(0x202, 40), (0x205, 32), (0x21b, 12), (UUID_FROM_ID, 268)] {
        assert_eq!(about(&client, command, size, SECOND), 0, "{command:#x}");
    }
    assert_eq!(attach(&client, [SECOND, 0]), 0);
}

#[test]
fn a_node_of_a_card_that_is_not_the_guests_cannot_be_opened() {
    let pair = guest_of("1");
    assert!(pair.guest.node("nvidia0").is_err());
    let nodes = pair.guest.probe().unwrap().nodes.len();
    for node in 0..u32::try_from(nodes).unwrap() + 8 {
        let devices = ["nvidiactl", "nvidia1"].map(|name| pair.guest.node(name).unwrap().0);
        let open = wire::OpenReq { node: node.into(), flags: 2.into() };
        let request = crate::common::ask(wire::Kind::Open, 0, open.as_bytes());
        let expected = if devices.contains(&node) { 0 } else { ENXIO };
        assert_eq!(errno(&pair.guest, &request), expected, "node {node}");
    }
}

#[test]
fn a_device_on_a_card_that_is_not_the_guests_is_refused_by_rm() {
    let pair = guest_of("1");
    let client = Client::bare(&pair.guest.process(100), 1).unwrap();
    let device = |card| client.device_of(card).err().map(|error| error.to_string());
    let _node = client.node().unwrap();
    assert_eq!(device(1), None);
    assert!(device(0).unwrap().ends_with("RM's status is 0x1b"));
}

#[test]
fn a_card_that_is_not_the_guests_can_be_named_in_no_call() {
    let pair = guest_of("1");
    let client = Client::on(&pair.guest.process(100), 1).unwrap();
    for (command, size) in
        [(0x202, 40), (0x203, 8), (0x205, 32), (0x21b, 12), (0x215, 132), (0x289, 4), (0xb02, 12)]
    {
        assert_eq!(about(&client, command, size, FIRST), INVALID_ARGUMENT, "{command:#x}");
    }
    assert_eq!(about(&client, UUID_FROM_ID, 268, FIRST), OBJECT_NOT_FOUND);
    assert_eq!(by_uuid(&client, FIRST_UUID), (OBJECT_NOT_FOUND, 0, 0));
    let mut peers = [0_u32; 338];
    (peers[0], peers[1], peers[2], peers[10]) = (1, 1, SECOND, FIRST);
    let status = client.control(client.root, 0x13a, peers.as_mut_bytes()).unwrap();
    assert_eq!(status, INVALID_ARGUMENT);
    let refusals = || pair.backend.status().unwrap()["refusals"].to_string();
    assert!(wait_until(LONG, || refusals().contains("control 0x13a")), "{}", refusals());
}

#[test]
fn a_card_that_is_not_the_guests_cannot_be_kept_up() {
    let pair = guest_of("1");
    let client = Client::on(&pair.guest.process(100), 1).unwrap();
    for ids in [[FIRST, 0], [0, FIRST], [SECOND, FIRST], [7, 0]] {
        assert_eq!(attach(&client, ids), EINVAL, "{ids:#x?}");
    }
    assert_eq!(attach(&client, [SECOND, SECOND]), 0);
    let both = guest_of("all");
    let client = Client::new(&both.guest.process(100)).unwrap();
    assert_eq!(attach(&client, [FIRST, SECOND]), 0);
}

#[test]
fn a_process_of_a_guest_with_two_cards_has_both() {
    let pair = guest_of("all");
    let process = pair.guest.process(100);
    let clients = [0, 1].map(|card| Client::on(&process, card).unwrap());
    assert_eq!(card_info(&clients[0]), [(FIRST, 0), (SECOND, 1)]);
    assert_eq!(listed(&clients[1]), [[FIRST, SECOND], [FIRST, SECOND]]);
    let none = u32::MAX;
    assert_eq!(active(&clients[1]), [2, FIRST, none, none, SECOND, none, none]);
    let memory = clients.each_ref().map(|client| client.memory(Place::Video, MIB).unwrap());
    let maps = [0, 1].map(|card| clients[card].map(Place::Video, memory[card], MIB).unwrap());
    for (map, value) in maps.iter().zip([0xca0, 0xca1]) {
        map.mapping.write(0, value);
    }
    assert_eq!(maps.each_ref().map(|map| map.mapping.read(0)), [0xca0, 0xca1]);
}

#[test]
fn a_card_that_is_full_leaves_the_guests_other_card_free() {
    let pair = guest_of("all");
    let clients = [(100, 0), (200, 1)]
        .map(|(tgid, card)| Client::on(&pair.guest.process(tgid), card).unwrap());
    let all = clients[0].fb_info([TOTAL_RAM_SIZE]).unwrap()[0];
    clients[0].memory(Place::Video, u64::from(all) << 10).unwrap();
    assert!(clients[0].memory(Place::Video, 1).is_err());
    assert_eq!(clients[0].fb_info([HEAP_FREE]).unwrap(), [0]);
    assert_eq!(clients[1].fb_info([HEAP_FREE]).unwrap(), [all]);
    clients[1].memory(Place::Video, u64::from(all) << 10).unwrap();
    assert_eq!(used(&pair), 2 * (u64::from(all) << 10));
    clients[0].ctl.close().unwrap();
    assert!(wait_until(LONG, || used(&pair) == u64::from(all) << 10));
    assert_eq!(clients[1].fb_info([HEAP_FREE]).unwrap(), [0]);
}

#[test]
fn a_guests_budget_is_for_all_of_its_cards_together() {
    for (mode, shown) in [("limit", [128, 128]), ("profile", [64, 64])] {
        let args = ["--gpu=0,1", "--vram=64M", &format!("--vram-mode={mode}")];
        let environment = [CARDS[0], ("NVGUEST_SIM_MEMORY", "128M")];
        let pair = pair_in(&args, &environment, Options::default());
        let process = pair.guest.process(100);
        let clients = [0, 1].map(|card| Client::on(&process, card).unwrap());
        let mib = |index| {
            clients.each_ref().map(|client| u64::from(client.fb_info([index]).unwrap()[0]) >> 10)
        };
        assert_eq!(mib(TOTAL_RAM_SIZE), shown, "{mode}");
        clients[0].memory(Place::Video, 40 * MIB).unwrap();
        assert!(clients[1].memory(Place::Video, 40 * MIB).is_err(), "{mode}");
        clients[1].memory(Place::Video, 20 * MIB).unwrap();
        assert_eq!(used(&pair), 60 * MIB, "{mode}");
        if mode == "profile" {
            assert!(mib(HEAP_FREE).into_iter().all(|free| free < 4), "{:?}", mib(HEAP_FREE));
        }
    }
}

#[test]
fn a_number_of_cards_that_no_host_has_is_one() {
    for (asked, cards) in [("8", 8), ("9", 1), ("0", 1), ("x", 1)] {
        let backend = start_with(&[], &[("NVGUEST_SIM_CARDS", asked)]);
        let guest = nvguest_frontend::Guest::connect(&backend.socket(), Options::default());
        let pair = Pair { guest: guest.unwrap(), backend };
        assert_eq!(names(&pair, wire::NODE_PCI).len(), cards, "{asked}");
    }
}

#[test]
fn guests_that_share_a_host_share_its_cards_memory_and_none_of_the_other_cards() {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = memfd_create("nvguest-cards", flags).unwrap();
    let host = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
    let environment = [CARDS[0], ("NVGUEST_SIM_HOST", &host)];
    let pairs = ["0", "1", "0,1"]
        .map(|gpu| pair_in(&[&format!("--gpu={gpu}")], &environment, Options::default()));
    let client = |pair: &Pair, card| Client::on(&pair.guest.process(100), card).unwrap();
    let [first, second] = [(0, 0), (1, 1)].map(|(pair, card)| client(&pairs[pair], card));
    let both = [0, 1].map(|card| client(&pairs[2], card));
    let free = |client: &Client| client.fb_info([HEAP_FREE]).unwrap()[0] >> 10;
    first.memory(Place::Video, 40 * MIB).unwrap();
    second.memory(Place::Video, 20 * MIB).unwrap();
    assert_eq!([&both[0], &both[1], &first, &second].map(free), [24, 44, 24, 44]);
    assert!(both[0].memory(Place::Video, 30 * MIB).is_err());
    both[1].memory(Place::Video, 30 * MIB).unwrap();
    assert_eq!((used(&pairs[0]), used(&pairs[2])), (40 * MIB, 30 * MIB));
    let [gone, _second, _both] = pairs;
    drop((first, gone));
    assert!(wait_until(LONG, || free(&both[0]) == 64));
    assert_eq!([free(&both[1]), free(&second)], [14, 14]);

    let other = [("NVGUEST_SIM_CARDS", "3"), ("NVGUEST_SIM_HOST", &host)];
    let mut check = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-user-nvguest"));
    let said = check.args(["--host=sim", "--check", "--allow-root"]).envs(other).output().unwrap();
    let said = String::from_utf8_lossy(&said.stderr).into_owned();
    assert!(said.contains("that host has 2 cards, not 3"), "{said}");
}
