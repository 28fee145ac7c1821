//! What a guest may have, and what it is told when it has it.

use std::time::Duration;

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Error, Options};
use rmclient::abi::{class, control};
use rmclient::Place;

use crate::calls::{preempt, slow};
use crate::common::{pair_in, refused, Pair, EMFILE, LONG};

/// `NV_ERR_INSUFFICIENT_RESOURCES`, `NV_ERR_NO_MEMORY`.
const NO_RESOURCES: u32 = 0x1a;
const NO_MEMORY: u32 = 0x51;
/// `NV2080_CTRL_CMD_FIFO_DISABLE_CHANNELS`, and the bytes of its parameters.
const DISABLE_CHANNELS: (u32, usize) = (0x2080_110b, 536);

fn limited(limits: &str) -> Pair {
    pair_in(&["--limits", limits], &[], Options::default())
}

/// RM's status in an error.
fn said<T>(outcome: Result<T, Error>, status: u32) {
    let error = outcome.err().expect("that should have been refused").to_string();
    assert!(error.ends_with(&format!("RM's status is {status:#x}")), "{error}");
}

fn refusals(pair: &Pair) -> String {
    pair.backend.status().unwrap()["refusals"].to_string()
}

#[test]
fn a_process_has_so_many_files_and_all_of_a_guest_no_more_than_the_guest() {
    let pair = limited("files=6,process-files=4");
    let (one, other) = (pair.guest.process(100), pair.guest.process(200));
    let files: Vec<_> = (0..4).map(|_| one.open("nvidiactl").unwrap()).collect();
    assert_eq!(refused(one.open("nvidiactl")), EMFILE);
    let _two: Vec<_> = (0..2).map(|_| other.open("nvidiactl").unwrap()).collect();
    assert_eq!(refused(other.open("nvidiactl")), EMFILE);
    files[0].close().unwrap();
    one.open("nvidiactl").unwrap();
}

#[test]
fn a_fork_gets_no_fresh_share_of_files() {
    let pair = limited("files=8");
    let mut opened = Vec::new();
    for tgid in 100..120 {
        opened.extend(pair.guest.process(tgid).open("nvidiactl").ok());
    }
    assert_eq!(opened.len(), 8);
}

#[test]
fn what_a_dead_process_held_is_the_guest_s_again() {
    let pair = limited("files=4");
    let one = pair.guest.process(100);
    let _files: Vec<_> = (0..4).map(|_| one.open("nvidiactl").unwrap()).collect();
    let other = pair.guest.process(200);
    assert_eq!(refused(other.open("nvidiactl")), EMFILE);
    let worker = nix::unistd::Pid::from_raw(pair.backend.worker_of(100).unwrap());
    nix::sys::signal::kill(worker, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(wait_until(LONG, || other.open("nvidiactl").is_ok()));
}

#[test]
fn a_process_has_so_many_clients() {
    let pair = limited("clients=3,process-clients=2");
    let (one, other) = (pair.guest.process(100), pair.guest.process(200));
    let clients = [Client::new(&one).unwrap(), Client::new(&one).unwrap()];
    said(Client::new(&one), NO_RESOURCES);
    let _third = Client::new(&other).unwrap();
    said(Client::new(&other), NO_RESOURCES);
    clients[0].ctl.close().unwrap();
    Client::new(&one).unwrap();
    assert!(refusals(&pair).contains("\"limit\",\"what\":\"class 0x41\""), "{}", refusals(&pair));
}

#[test]
fn a_process_has_so_many_objects() {
    // A device and a subdevice each.
    let pair = limited("objects=7,process-objects=4");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let first = client.memory(Place::Video, 65536).unwrap();
    client.memory(Place::System, 65536).unwrap();
    said(client.memory(Place::Video, 65536), NO_RESOURCES);
    client.free(client.device, first).unwrap();
    client.memory(Place::Video, 65536).unwrap();
    let other = Client::new(&pair.guest.process(200)).unwrap();
    other.memory(Place::Video, 65536).unwrap();
    said(other.memory(Place::Video, 65536), NO_RESOURCES);
    // What fails takes nothing.
    client.free(client.device, first + 2).ok();
    for _ in 0..10 {
        client.make(client.device, class::SUBDEVICE, &mut [0; 4]).unwrap_err();
    }
    assert_eq!(pair.backend.status().unwrap()["shares"]["objects"]["held"], 7);
}

#[test]
fn a_process_has_so_many_placements_and_bytes_of_the_window() {
    let pair = limited("process-placements=2,process-window=256K");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::Video, 65536).unwrap();
    let first = client.map(Place::Video, memory, 65536).unwrap();
    let _second = client.map(Place::Video, memory, 65536).unwrap();
    said(client.map(Place::Video, memory, 65536), NO_RESOURCES);
    first.close().unwrap();
    let large = client.memory(Place::Video, 256 << 10).unwrap();
    assert_eq!(refused(client.map(Place::Video, large, 256 << 10)), nix::libc::ENOMEM);
    client.map(Place::Video, memory, 65536).unwrap();
    let other = Client::new(&pair.guest.process(200)).unwrap();
    let memory = other.memory(Place::Video, 65536).unwrap();
    other.map(Place::Video, memory, 65536).unwrap();
}

#[test]
fn a_process_has_so_many_bytes_in_flight() {
    let pair = limited("process-bytes=2K");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let status = client.control(client.root, control::ATTACHED_IDS, &mut [0; 4096]).unwrap();
    assert_eq!(status, NO_MEMORY);
    assert!(refusals(&pair).contains("control 0x201"), "{}", refusals(&pair));
    client.attached_ids().unwrap();
}

#[test]
fn a_process_has_so_many_requests_in_flight() {
    let pair = limited("process-requests=1");
    let process = pair.guest.process(100);
    let (client, other) = (Client::new(&process).unwrap(), Client::new(&process).unwrap());
    let group = slow(&client);
    // A control that was slow once does not hold others up.
    client.control(group, control::PREEMPT, &mut preempt(Duration::from_millis(5))).unwrap();
    std::thread::scope(|scope| {
        let ask = |client: &Client| {
            client.control(client.root, control::ATTACHED_IDS, &mut [0; 128]).unwrap()
        };
        let mut wait = preempt(Duration::from_millis(500));
        let blocked = scope.spawn(move || {
            // It may itself come while the other's is in flight.
            while client.control(group, control::PREEMPT, &mut wait).unwrap() == NO_MEMORY {}
        });
        assert!(wait_until(LONG, || ask(&other) == NO_MEMORY), "both were let in");
        blocked.join().unwrap();
    });
    other.attached_ids().unwrap();
}

#[test]
fn the_broker_s_queue_holds_so_many_bytes_of_a_guest() {
    let pair = limited("bytes=2K");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let on_broker = client.on_slot(nvguest_frontend::wire::NO_SLOT);
    let outcome = on_broker.control(client.root, control::ATTACHED_IDS, &mut [0; 4096]);
    assert_eq!(refused(outcome), nix::libc::ENOMEM);
    on_broker.attached_ids().unwrap();
}

#[test]
fn a_guest_causes_so_many_lines_of_log() {
    let pair = limited("lines=1");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    for number in 0..100 {
        client.control(client.root, 0x7f_0000 + number, &mut [0; 4]).unwrap();
    }
    client.attached_ids().unwrap();
    let lines =
        || pair.backend.log().lines().filter(|line| line.contains("refused control")).count();
    let left_out = || pair.backend.status().unwrap()["lines_left_out"].as_u64().unwrap();
    assert!(wait_until(LONG, || lines() as u64 + left_out() >= 100));
    assert!(lines() < 20, "{} lines", lines());
}

#[test]
fn channels_are_disabled_so_often() {
    let pair = limited("process-disables=1");
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let (command, size) = DISABLE_CHANNELS;
    let disable = || client.control(client.subdevice, command, &mut vec![0; size]).unwrap();
    assert_ne!(disable(), NO_RESOURCES);
    assert_eq!(disable(), NO_RESOURCES);
    client.attached_ids().unwrap();
}

#[test]
fn a_limit_that_is_none_is_answered_with_those_that_are() {
    let outcome = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-user-nvguest"))
        .args(["--check", "--host=sim", "--limits", "fils=1"])
        .output()
        .unwrap();
    assert_eq!(outcome.status.code(), Some(2));
    let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(said.contains("files, requests, bytes"), "{said}");
}
