//! Many of anything leave nothing behind.

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::{held, wait_until, Held};
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, NO_SLOT};
use nvguest_frontend::File;
use rmclient::Place;

use crate::common::*;

/// What threads keep of their largest requests, of up to a MiB each: not a leak. Of a
/// million requests, four bytes each would show.
const SLACK_KIB: u64 = 4096;

/// As many as the environment says, or `count`.
pub fn scaled(name: &str, count: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(count)
}

/// A process holds what it held before. What is on its way out has time to go.
pub fn is_flat(who: &str, pid: i32, before: Held) {
    let fds = || held(pid).unwrap().fds;
    let flat = wait_until(LONG, || fds() <= before.fds);
    assert!(flat, "the {who} had {} descriptors, and now {}", before.fds, fds());
    let (old, new) = (before.own_kib, held(pid).unwrap().own_kib);
    assert!(new <= old + SLACK_KIB, "the {who} had {old} KiB, and now {new} KiB");
}

#[test]
fn a_thousand_cycles_of_open_map_unmap_and_close_leave_nothing() {
    let count = scaled("NVGUEST_CYCLES", 1000);
    let pair = pair();
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    let worker = pair.backend.worker_of(100).unwrap();
    let run = |count: usize| {
        for round in 0..count {
            let place = if round % 2 == 0 { Place::Video } else { Place::System };
            let memory = client.memory(place, 65536).unwrap();
            client.map(place, memory, 65536).unwrap().close().unwrap();
            client.free(client.device, memory).unwrap();
        }
    };
    run(50);
    let before = (pair.backend.held().unwrap(), held(worker).unwrap());
    run(count);
    is_flat("broker", pair.backend.pid(), before.0);
    is_flat("worker", worker, before.1);
    let window = pair.guest.window.as_ref().unwrap();
    assert_eq!(window.placements(), 1, "the arena");
    let status = pair.backend.status().unwrap();
    assert_eq!((&status["placements"], &status["window_bytes"]), (&0.into(), &0.into()));
}

#[test]
fn processes_that_come_and_go_leave_nothing() {
    let count = scaled("NVGUEST_PROCESSES", 100);
    let pair = pair();
    let run = |count: usize| {
        for round in 0..count {
            let process = pair.guest.process(1 + round as u32 % 7);
            let client = Client::new(&process).unwrap();
            let memory = client.memory(Place::Video, 65536).unwrap();
            let mapped = client.map(Place::Video, memory, 65536).unwrap();
            let worker = pair.backend.worker_of(process.caller.tgid.get()).unwrap();
            kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
            assert_eq!(refused(client.attached_ids()), ENODEV);
            let lost = wire::file_handle(wire::file_worker(client.ctl.handle), 0);
            pair.guest.mailbox.wait(lost, LONG).expect("the guest is told");
            let late = File { slot: NO_SLOT, ..mapped.file };
            late.unmap(&mapped.mapping).unwrap();
        }
        assert!(wait_until(LONG, || pair.backend.workers().unwrap().is_empty()));
    };
    run(20);
    let before = pair.backend.held().unwrap();
    run(count);
    is_flat("broker", pair.backend.pid(), before);
    let status = pair.backend.status().unwrap();
    assert_eq!((&status["placements"], &status["window_bytes"]), (&0.into(), &0.into()));
}

#[test]
fn a_broker_and_a_worker_are_small() {
    let pair = pair();
    let idle = pair.backend.held().unwrap().rss_kib;
    let client = Client::new(&pair.guest.process(100)).unwrap();
    client.attached_ids().unwrap();
    let worker = held(pair.backend.worker_of(100).unwrap()).unwrap().rss_kib;
    // What is promised is a release build's, and benches/round_trip.rs prints it.
    assert!(idle <= 24 << 10 && worker <= 24 << 10, "{idle} and {worker} KiB");
}
