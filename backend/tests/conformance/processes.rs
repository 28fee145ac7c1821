//! Workers and slots, their life and their death.

use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_abi::FileKind;
use nvguest_frontend::backend::{is_alive, wait_until};
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, Kind, NO_SLOT};
use nvguest_frontend::{Options, Process};
use rmclient::abi::{class, control};
use rmclient::Place;

use crate::common::*;

fn end(pid: i32) {
    kill(Pid::from_raw(pid), Signal::SIGKILL).expect("a worker to end");
}

/// What user mode does, end to end, of one process.
fn works(process: &std::sync::Arc<Process>) {
    let client = Client::new(process).unwrap();
    client.attached_ids().unwrap();
    let memory = client.memory(Place::Video, 65536).unwrap();
    let mapped = client.map(Place::Video, memory, 65536).unwrap();
    mapped.mapping.write(0, process.caller.tgid.get().into());
    let again = client.map(Place::Video, memory, 65536).unwrap();
    assert_eq!(again.mapping.read(0), u64::from(process.caller.tgid.get()));
    let (file, event) = client.event().unwrap();
    file.arm().unwrap();
    client.fire(event).unwrap();
    let record = process.guest.mailbox.wait(file.handle, LONG).expect("an event");
    assert_eq!(record.kind.get(), wire::EVENT_READY);
    for mapped in [mapped, again] {
        mapped.close().unwrap();
    }
    file.close().unwrap();
    client.ctl.close().unwrap();
}

#[test]
fn the_first_open_starts_a_worker_and_names_its_slot() {
    let pair = pair();
    assert!(pair.backend.workers().unwrap().is_empty());
    let process = pair.guest.process(100);
    let file = process.open("nvidiactl").unwrap();
    assert!(file.slot < 16);
    let workers = pair.backend.workers().unwrap();
    assert_eq!(workers.len(), 1);
    assert_eq!((workers[0].0, workers[0].2), (wire::file_worker(file.handle), 100));
    let second = process.open("nvidia0").unwrap();
    assert_eq!(wire::file_worker(second.handle), workers[0].0);
    assert_eq!(pair.backend.workers().unwrap().len(), 1);
    works(&process);
}

#[test]
fn every_process_has_a_worker_and_a_slot_of_its_own() {
    let pair = pair();
    let files: Vec<_> =
        (0..16).map(|tgid| pair.guest.process(tgid).open("nvidiactl").unwrap()).collect();
    let mut slots: Vec<u32> = files.iter().map(|file| file.slot).collect();
    let mut workers: Vec<u16> = files.iter().map(|f| wire::file_worker(f.handle)).collect();
    slots.sort_unstable();
    workers.sort_unstable();
    workers.dedup();
    assert_eq!(slots, (0..16).collect::<Vec<_>>());
    assert_eq!(workers.len(), 16);
}

#[test]
fn processes_beyond_the_slots_are_served_through_the_brokers_queues() {
    let pair = pair_with(Options { slots: 2, ..Options::default() });
    let processes: Vec<_> = (0..6).map(|tgid| pair.guest.process(tgid)).collect();
    let files: Vec<_> = processes.iter().map(|p| p.open("nvidiactl").unwrap()).collect();
    let without = files.iter().filter(|file| file.slot == NO_SLOT).count();
    assert_eq!(without, 4);
    processes.iter().for_each(works);
}

#[test]
fn a_vmm_with_two_queues_only_works() {
    let pair = pair_with(Options { slots: 0, ..Options::default() });
    let processes: Vec<_> = (0..3).map(|tgid| pair.guest.process(tgid)).collect();
    for process in &processes {
        works(process);
        assert_eq!(process.slot(), NO_SLOT);
    }
}

#[test]
fn everything_works_with_and_without_each_ring_feature() {
    for (event_idx, indirect) in [(false, false), (false, true), (true, false), (true, true)] {
        for (slots, poll) in [(16, 0), (0, 0), (16, 30)] {
            let poll = Duration::from_micros(poll);
            let options = Options { event_idx, indirect, slots, poll, ..Options::default() };
            let pair = pair_with(options);
            works(&pair.guest.process(100));
            assert_eq!(pair.guest.strays(), 0);
        }
    }
}

#[test]
fn small_queues_and_few_event_buffers_are_enough() {
    let pair = pair_with(Options { queue_size: 8, event_buffers: 1, ..Options::default() });
    works(&pair.guest.process(100));
}

#[test]
fn an_open_of_another_process_on_a_slots_queue_is_refused() {
    let pair = pair();
    let (one, other) = (pair.guest.process(1), pair.guest.process(2));
    let mine = one.open("nvidiactl").unwrap();
    let node = pair.guest.node("nvidiactl").unwrap().0;
    assert_eq!(refused(other.open_in(mine.slot, node, FileKind::Ctl)), ENODEV);
    let free = if mine.slot == 15 { 14 } else { 15 };
    assert_eq!(refused(other.open_in(free, node, FileKind::Ctl)), ENODEV, "a slot of nobody's");
    works(&other);
    works(&one);
}

#[test]
fn a_worker_whose_process_has_no_files_ends_and_the_process_can_come_back() {
    let pair = pair();
    let process = pair.guest.process(100);
    works(&process);
    let worker = pair.backend.worker_of(100).unwrap();
    process.open("nvidiactl").unwrap().close().unwrap();
    assert_eq!(pair.backend.worker_of(100), Some(worker), "it lingers for the next open");
    assert!(wait_until(LONG, || !is_alive(worker)), "it does not end");
    assert!(wait_until(LONG, || pair.backend.workers().unwrap().is_empty()));
    let node = pair.guest.node("nvidiactl").unwrap().0;
    let slot = process.slot();
    assert_eq!(refused(process.open_in(slot, node, FileKind::Ctl)), ENODEV, "its slot is free");
    works(&process);
    assert_ne!(pair.backend.worker_of(100), Some(worker));
}

#[test]
fn the_files_of_a_dead_worker_fail_at_once_and_others_go_on() {
    let pair = pair();
    let (victim, witness) = (pair.guest.process(1), pair.guest.process(2));
    let dying = Client::new(&victim).unwrap();
    let living = Client::new(&witness).unwrap();
    let memory = dying.memory(Place::Video, 65536).unwrap();
    let mapped = dying.map(Place::Video, memory, 65536).unwrap();
    let other_memory = living.memory(Place::Video, 65536).unwrap();
    let other = living.map(Place::Video, other_memory, 65536).unwrap();
    other.mapping.write(8, 42);
    assert_eq!(pair.backend.status().unwrap()["placements"], 2);
    end(pair.backend.worker_of(1).unwrap());
    let start = Instant::now();
    assert_eq!(refused(dying.attached_ids()), ENODEV);
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    let lost = wire::file_handle(wire::file_worker(dying.ctl.handle), 0);
    let record = pair.guest.mailbox.wait(lost, LONG).expect("the guest is told");
    assert_eq!(record.kind.get(), wire::EVENT_LOST);
    for slot in [NO_SLOT, dying.ctl.slot] {
        for kind in [Kind::Close, Kind::Arm] {
            let request = ask(kind, dying.ctl.handle, &[]);
            assert_eq!(errno_on(&pair.guest, slot, &request), ENODEV, "{kind:?} on {slot}");
        }
    }
    assert!(wait_until(LONG, || pair.backend.status().unwrap()["placements"] == 1));
    assert_eq!(mapped.mapping.read(0), 0, "nothing is there any more");
    assert_eq!(other.mapping.read(8), 42);
    living.attached_ids().unwrap();
    works(&witness);
    works(&victim);
    assert_eq!(pair.guest.strays(), 0);
}

#[test]
fn requests_in_flight_of_a_worker_that_dies_are_answered() {
    for slots in [16, 0] {
        let pair = pair_with(Options { slots, ..Options::default() });
        let client = Client::new(&pair.guest.process(100)).unwrap();
        let group = client.make(client.device, class::CHANNEL_GROUP, &mut [0; 20]).unwrap();
        let worker = pair.backend.worker_of(100).unwrap();
        std::thread::scope(|scope| {
            let calls: Vec<_> = (0..8)
                .map(|_| {
                    scope.spawn(|| {
                        let mut params = [1, 1, 0, 0, 0x80, 0x96, 0x98, 0];
                        client.control(group, control::PREEMPT, &mut params)
                    })
                })
                .collect();
            let counted =
                || pair.backend.status().unwrap()["requests"]["ioctl"].as_u64() >= Some(5);
            assert!(wait_until(LONG, counted), "they are under way");
            let start = Instant::now();
            end(worker);
            for call in calls {
                assert_eq!(refused(call.join().unwrap()), ENODEV);
            }
            assert!(start.elapsed() < Duration::from_secs(5), "{:?}", start.elapsed());
        });
        assert_eq!(pair.guest.strays(), 0);
        works(&pair.guest.process(100));
    }
}

#[test]
fn a_worker_that_dies_in_its_call_ends_that_call_alone() {
    let environment = [("NVGUEST_SIM_CRASH", "1")];
    let pair = pair_in(&[], &environment, Options::default());
    let (victim, witness) = (pair.guest.process(1), pair.guest.process(2));
    let client = Client::new(&victim).unwrap();
    let other = Client::new(&witness).unwrap();
    let group = client.make(client.device, class::CHANNEL_GROUP, &mut [0; 20]).unwrap();
    let mut params = [1, 1, 0, 0, 0xad, 0xde, 0xad, 0xde];
    assert_eq!(refused(client.control(group, control::PREEMPT, &mut params)), ENODEV);
    other.attached_ids().unwrap();
    works(&victim);
}

#[test]
fn workers_that_die_under_load_leave_every_request_answered() {
    let pair = pair();
    for round in 0..6 {
        let process = pair.guest.process(100);
        let clients: Vec<Client> = (0..8).map(|_| Client::new(&process).unwrap()).collect();
        let worker = pair.backend.worker_of(100).unwrap();
        std::thread::scope(|scope| {
            for client in &clients {
                scope.spawn(|| while client.attached_ids().is_ok() {});
            }
            for _ in 0..200 * (round + 1) {
                std::thread::yield_now();
            }
            end(worker);
        });
        assert_eq!(pair.guest.strays(), 0, "round {round}");
    }
    works(&pair.guest.process(100));
}

#[test]
fn a_fresh_hello_closes_everything() {
    let pair = pair();
    let clients: Vec<Client> =
        (0..4).map(|tgid| Client::new(&pair.guest.process(tgid)).unwrap()).collect();
    for client in &clients {
        let memory = client.memory(Place::System, 4096).unwrap();
        client.map(Place::System, memory, 4096).unwrap();
    }
    let pids: Vec<i32> = pair.backend.workers().unwrap().iter().map(|worker| worker.1).collect();
    assert_eq!(pair.backend.status().unwrap()["placements"], 4);
    pair.guest.hello(0).unwrap();
    assert_eq!(pair.backend.workers().unwrap().len(), 4, "one that is not fresh closes nothing");
    pair.guest.hello(wire::HELLO_FRESH).unwrap();
    let status = pair.backend.status().unwrap();
    assert_eq!((&status["placements"], &status["window_bytes"]), (&0.into(), &0.into()));
    assert!(pair.backend.workers().unwrap().is_empty());
    assert!(pids.iter().all(|&pid| !is_alive(pid)));
    assert_eq!(pair.guest.window.as_ref().unwrap().placements(), 1, "the arena, placed anew");
    for client in &clients {
        assert_eq!(refused(client.ctl.close()), ENODEV);
    }
    works(&pair.guest.process(0));
}

#[test]
fn sixty_four_processes_work_at_once() {
    let pair = pair();
    std::thread::scope(|scope| {
        for tgid in 0..64 {
            let process = pair.guest.process(tgid);
            scope.spawn(move || works(&process));
        }
    });
    assert_eq!(pair.guest.strays(), 0);
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
}

#[test]
fn more_processes_than_the_limit_are_refused_and_come_in_later() {
    let pair = pair();
    let files: Vec<_> =
        (0..256).map(|tgid| pair.guest.process(tgid).open("nvidiactl").unwrap()).collect();
    assert_eq!(refused(pair.guest.process(1000).open("nvidiactl")), EMFILE);
    end(pair.backend.worker_of(7).unwrap());
    assert!(wait_until(LONG, || pair.backend.worker_of(7).is_none()));
    pair.guest.process(1000).open("nvidiactl").unwrap();
    files[8].arm().unwrap();
}

/// Entries of a process's table of descriptors (`/proc/PID/status`).
fn room(pid: i32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("FDSize:")).unwrap();
    line.trim().parse().unwrap()
}

/// A table that grows when there are several threads costs 20 ms of the guest's map.
#[test]
fn brokers_and_workers_have_room_for_their_descriptors_from_the_start() {
    let pair = pair();
    let process = pair.guest.process(100);
    let _file = process.open("nvidiactl").unwrap();
    let worker = pair.backend.worker_of(100).unwrap();
    assert!(room(pair.backend.pid()) >= 4096, "{}", room(pair.backend.pid()));
    assert!(room(worker) >= 1024, "{}", room(worker));
}
