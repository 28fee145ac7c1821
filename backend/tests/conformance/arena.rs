//! The arena.

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::{Client, Mapped};
use nvguest_frontend::wire;
use nvguest_frontend::{File, Options};
use rmclient::Place;

use crate::common::*;

const SIZE: u64 = 65536;

/// Live placements of processes, ranges of the arena that are taken, and their bytes.
fn taken(pair: &Pair) -> (u64, u64, u64) {
    let status = pair.backend.status().unwrap();
    let number = |value: &serde_json::Value| value.as_u64().unwrap();
    let arena = &status["arena"];
    (number(&status["placements"]), number(&arena["ranges"]), number(&arena["taken_bytes"]))
}

/// Nothing of the arena is taken, sooner or later: a worker tells without waiting.
fn is_empty(pair: &Pair) -> bool {
    wait_until(LONG, || taken(pair) == (0, 0, 0))
}

fn is_zero(mapped: &Mapped) -> bool {
    (0..mapped.mapping.length as usize).step_by(4096).all(|at| mapped.mapping.read(at) == 0)
}

/// Ends the worker of a guest process, as its guest hears.
fn lose(pair: &Pair, client: &Client) {
    let process = &client.ctl.process;
    let worker = pair.backend.worker_of(process.caller.tgid.get()).unwrap();
    kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let lost = wire::file_handle(wire::file_worker(client.ctl.handle), 0);
    pair.guest.mailbox.wait(lost, LONG).expect("the guest is told");
}

#[test]
fn many_system_allocations_cost_one_placement() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let all: Vec<(Mapped, u64)> = (0..40_u64)
        .map(|seed| {
            // NVOS32_ATTR_COHERENCY: cached and write-combined.
            let coherency = 1 + seed as u32 % 2;
            let heap = client.heap(coherency << 29, SIZE - 100 * seed).unwrap();
            assert_eq!((heap.size, heap.limit, heap.offset), (SIZE, SIZE - 1, 0));
            (client.map(Place::System, heap.memory, SIZE).unwrap(), seed)
        })
        .collect();
    assert_eq!(taken(&pair), (0, 40, 40 * SIZE));
    assert_eq!(pair.guest.vmm.asked(), (1, 0), "the arena's own");
    for (mapped, seed) in &all {
        assert!(is_zero(mapped));
        mapped.mapping.write(4096, *seed + 1);
    }
    for (mapped, seed) in &all {
        assert_eq!(mapped.mapping.read(4096), seed + 1, "it is another's");
        assert_eq!(mapped.mapping.cache, wire::Cache::WriteBack as u8);
        mapped.close().unwrap();
    }
    client.ctl.close().unwrap();
    assert!(is_empty(&pair));
}

#[test]
fn what_is_not_established_is_memory_of_rms_own() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    // One page, for semaphore surfaces; NVOS32_ATTR_PHYSICALITY_CONTIGUOUS. Write-combined memory
    // is write-back to RM; the program is answered what it asked for.
    for (attr, size) in [(1 << 29, 4096), (2 << 29, 4096), (1 << 29 | 2 << 27, SIZE)] {
        let heap = client.heap(attr, size).unwrap();
        assert_eq!(heap.attr >> 29, attr >> 29);
        let mapped = client.map(Place::System, heap.memory, size).unwrap();
        assert_eq!(taken(&pair), (1, 0, 0), "{attr:#x} {size}");
        mapped.close().unwrap();
    }
}

#[test]
fn a_process_past_its_share_gets_memory_of_rms_own() {
    let pair = pair_in(&["--arena=1M"], &[], Options::default());
    let client = Client::new(&pair.guest.process(1)).unwrap();
    let map = |client: &Client| {
        let memory = client.memory(Place::System, 512 << 10).unwrap();
        client.map(Place::System, memory, 512 << 10).unwrap()
    };
    map(&client);
    assert_eq!(taken(&pair), (0, 1, 512 << 10));
    let placed = map(&client);
    assert_eq!(taken(&pair), (1, 1, 512 << 10), "a placement of its own");
    placed.mapping.write(0, 7);
    assert_eq!(placed.mapping.read(0), 7);
    map(&Client::new(&pair.guest.process(2)).unwrap());
    assert_eq!(taken(&pair), (1, 2, 1 << 20), "another process has its own share");
}

#[test]
fn without_an_arena_each_map_has_a_placement() {
    let pair = pair_in(&["--arena=0"], &[], Options::default());
    let client = Client::new(&pair.guest.process(1)).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    client.map(Place::System, memory, SIZE).unwrap();
    let status = pair.backend.status().unwrap();
    assert_eq!((&status["placements"], &status["arena"]), (&1.into(), &serde_json::Value::Null));
}

#[test]
fn memory_reads_zero_whoever_had_it_before() {
    let pair = pair();
    let mut before = None;
    for tgid in 1..4 {
        let client = Client::new(&pair.guest.process(tgid)).unwrap();
        let memory = client.memory(Place::System, SIZE).unwrap();
        let mapped = client.map(Place::System, memory, SIZE).unwrap();
        assert!(is_zero(&mapped));
        (0..SIZE as usize).step_by(8).for_each(|at| mapped.mapping.write(at, u64::MAX));
        assert_eq!(*before.get_or_insert(mapped.mapping.offset), mapped.mapping.offset);
        client.free(client.device, memory).unwrap();
        mapped.close().unwrap();
        assert!(is_empty(&pair));
    }
}

#[test]
fn a_range_is_not_given_out_while_the_guest_maps_it() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(1)).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    let (one, two) = (
        client.map(Place::System, memory, SIZE).unwrap(),
        client.map(Place::System, memory, SIZE).unwrap(),
    );
    one.mapping.write(0, 0x5ec2e7);
    client.free(client.device, memory).unwrap();
    one.close().unwrap();
    let other = Client::new(&pair.guest.process(2)).unwrap();
    let map = |size| {
        let memory = other.memory(Place::System, size).unwrap();
        other.map(Place::System, memory, size).unwrap()
    };
    assert_ne!(map(SIZE).mapping.offset, two.mapping.offset);
    assert_eq!(two.mapping.read(0), 0x5ec2e7, "its contents stay until then");
    two.close().unwrap();
    assert!(wait_until(LONG, || taken(&pair).1 == 1));
    let next = map(SIZE);
    assert_eq!(next.mapping.offset, one.mapping.offset);
    assert!(is_zero(&next));
}

#[test]
fn a_dead_workers_memory_comes_back_when_the_guest_has_let_go_of_it() {
    let pair = pair();
    for round in 0..5 {
        let victim = Client::new(&pair.guest.process(1)).unwrap();
        let map = |client: &Client| {
            let memory = client.memory(Place::System, SIZE).unwrap();
            client.map(Place::System, memory, SIZE).unwrap()
        };
        victim.memory(Place::System, SIZE).unwrap();
        let old = map(&victim);
        old.mapping.write(0, 0x01d + round);
        lose(&pair, &victim);
        assert_eq!(taken(&pair), (0, 1, SIZE), "what it did not map is free at once");
        let newcomer = Client::new(&pair.guest.process(2)).unwrap();
        let (other, another) = (map(&newcomer), map(&newcomer));
        other.mapping.write(0, 1);
        another.mapping.write(0, 1);
        assert_eq!(old.mapping.read(0), 0, "the old address shows nobody's memory");
        old.mapping.write(0, 0xbad);
        assert_eq!((other.mapping.read(0), another.mapping.read(0)), (1, 1));
        let late = File { slot: wire::NO_SLOT, ..old.file.clone() };
        late.unmap(&old.mapping).unwrap();
        assert_eq!(refused(late.unmap(&old.mapping)), ENODEV);
        let heir = map(&newcomer);
        assert_eq!(heir.mapping.offset, old.mapping.offset);
        assert!(is_zero(&heir), "not even what was written there since");
        newcomer.ctl.close().unwrap();
        [other, another, heir].iter().for_each(|mapped| mapped.close().unwrap());
        assert!(is_empty(&pair), "round {round}");
    }
}

#[test]
fn a_duplicate_keeps_the_memory_and_is_mapped_like_it() {
    let pair = pair();
    let process = pair.guest.process(1);
    let (one, two) = (Client::new(&process).unwrap(), Client::new(&process).unwrap());
    let memory = one.memory(Place::System, SIZE).unwrap();
    let (status, same) = two.duplicate(&one, memory).unwrap();
    assert_eq!(status, 0);
    let first = one.map(Place::System, memory, SIZE).unwrap();
    let second = two.map(Place::System, same, SIZE).unwrap();
    first.mapping.write(8, 0xd0b1e);
    assert_eq!(second.mapping.read(8), 0xd0b1e);
    one.free(one.device, memory).unwrap();
    first.close().unwrap();
    second.close().unwrap();
    assert_eq!(taken(&pair), (0, 1, SIZE));
    let again = two.map(Place::System, same, SIZE).unwrap();
    assert_eq!(again.mapping.read(8), 0xd0b1e);
    again.close().unwrap();
    two.ctl.close().unwrap();
    assert!(is_empty(&pair));
}

#[test]
fn maps_of_it_are_answered_as_rm_answers() {
    const INVALID_LIMIT: u32 = 0x2e;
    const STATE_IN_USE: u32 = 0x63;
    let pair = pair();
    let process = pair.guest.process(1);
    let client = Client::new(&process).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    let file = process.open("nvidiactl").unwrap();
    assert_eq!(client.arm(&file, memory, SIZE + 1).unwrap().0, INVALID_LIMIT);
    assert_eq!(client.arm(&file, memory, 0).unwrap().0, INVALID_LIMIT);
    assert_ne!(client.arm(&process.open("nvidia0").unwrap(), memory, SIZE).unwrap().0, 0);
    let (status, linear) = client.arm(&file, memory, SIZE).unwrap();
    assert_eq!(status, 0);
    assert_eq!(client.arm(&file, memory, SIZE).unwrap().0, STATE_IN_USE);
    client.forget(memory, linear).unwrap();
    assert!(client.forget(memory, linear).is_err(), "twice");
    assert_eq!(refused(file.map(SIZE, true)), EINVAL, "nor is it mapped again");
    let mut stranger = Client::new(&process).unwrap();
    (stranger.root, stranger.subdevice) = (client.root, client.subdevice);
    assert_ne!(stranger.arm(&file, memory, SIZE).unwrap().0, 0, "another file's client");
}

#[test]
fn a_guest_that_begins_anew_has_an_empty_arena() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(1)).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    let old = client.map(Place::System, memory, SIZE).unwrap();
    old.mapping.write(0, 0x01d);
    pair.guest.hello(wire::HELLO_FRESH).unwrap();
    assert_eq!(taken(&pair), (0, 0, 0));
    assert_eq!(old.mapping.read(0), 0);
    let client = Client::new(&pair.guest.process(2)).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    let new = client.map(Place::System, memory, SIZE).unwrap();
    assert_eq!((new.mapping.offset, is_zero(&new)), (old.mapping.offset, true));
}
