//! The window.

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use nvguest_frontend::vmm::Late;
use nvguest_frontend::wire::{self, Kind};
use nvguest_frontend::{Mapping, Options};
use rmclient::Place;
use zerocopy::IntoBytes;

use crate::common::*;

const SIZE: u64 = 65536;

#[test]
fn a_mapping_is_the_memory_itself() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    for place in [Place::Video, Place::System] {
        let memory = client.memory(place, SIZE).unwrap();
        let (one, two) =
            (client.map(place, memory, SIZE).unwrap(), client.map(place, memory, SIZE).unwrap());
        // System memory is in the window already: once, whoever maps it.
        let same = one.mapping.offset == two.mapping.offset;
        assert_eq!(same, place == Place::System);
        for offset in [0, 4096, SIZE as usize - 8] {
            one.mapping.write(offset, offset as u64 + 1);
            assert_eq!(two.mapping.read(offset), offset as u64 + 1);
        }
        let cache = match place {
            Place::Video => wire::Cache::WriteCombine,
            Place::System => wire::Cache::WriteBack,
        };
        assert_eq!(one.mapping.cache, cache as u8);
        one.close().unwrap();
        assert_eq!(two.mapping.read(4096), 4097);
        two.close().unwrap();
    }
    assert_eq!(pair.backend.status().unwrap()["window_bytes"], 0);
}

#[test]
fn what_is_not_armed_or_longer_than_armed_is_not_mapped() {
    let pair = pair();
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    assert_eq!(refused(client.ctl.map(4096, true)), EINVAL);
    // Of a card's memory all, of the machine's any part from its start: as the driver has it.
    let card = process.open("nvidia0").unwrap();
    let video = client.memory(Place::Video, SIZE).unwrap();
    assert_eq!(client.arm(&card, video, SIZE).unwrap().0, 0);
    for length in [4096, SIZE + 1, 1 << 40] {
        assert_eq!(refused(card.map(length, true)), ENXIO, "{length:#x}");
    }
    let memory = client.memory(Place::System, SIZE).unwrap();
    let file = process.open("nvidiactl").unwrap();
    assert_eq!(client.arm(&file, memory, SIZE).unwrap().0, 0);
    for length in [SIZE + 1, SIZE + 4096, 1 << 40] {
        assert_eq!(refused(file.map(length, true)), nix::libc::ERANGE, "{length:#x}");
    }
    for length in [0, u64::MAX] {
        assert_eq!(refused(file.map(length, true)), EINVAL, "{length:#x}");
    }
    for offset in [1, 4096, u64::MAX] {
        let body = wire::MapReq {
            offset: offset.into(),
            length: 4096.into(),
            prot: 3.into(),
            reserved: 0.into(),
        };
        let request = ask(Kind::Map, file.handle, body.as_bytes());
        assert_eq!(errno_on(&pair.guest, file.slot, &request), EINVAL, "{offset:#x}");
    }
    assert_eq!(file.map(SIZE - 1, true).unwrap().length, SIZE);
}

#[test]
fn a_file_is_armed_once_and_a_second_map_finds_the_first() {
    let pair = pair_in(&["--arena=0"], &[], Options::default());
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    let memory = client.memory(Place::System, SIZE).unwrap();
    let file = process.open("nvidiactl").unwrap();
    assert_eq!(client.arm(&file, memory, SIZE).unwrap().0, 0);
    assert_ne!(client.arm(&file, memory, SIZE).unwrap().0, 0, "STATE_IN_USE");
    let (one, two) = (file.map(SIZE, true).unwrap(), file.map(SIZE, true).unwrap());
    assert_eq!((one.placement, one.offset), (two.placement, two.offset));
    file.unmap(&one).unwrap();
    two.write(0, 9);
    assert_eq!(two.read(0), 9, "it stays until the last is gone");
    assert_eq!(pair.backend.status().unwrap()["placements"], 1);
    file.unmap(&two).unwrap();
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
    assert_eq!(refused(file.unmap(&two)), EINVAL);
}

#[test]
fn a_placement_is_unmapped_through_its_own_file_alone() {
    let pair = pair();
    let (one, other) = (pair.guest.process(1), pair.guest.process(2));
    let (mine, theirs) = (Client::new(&one).unwrap(), Client::new(&other).unwrap());
    let memory = mine.memory(Place::System, SIZE).unwrap();
    let mapped = mine.map(Place::System, memory, SIZE).unwrap();
    assert_eq!(refused(mine.ctl.unmap(&mapped.mapping)), EINVAL);
    assert_eq!(refused(theirs.ctl.unmap(&mapped.mapping)), EINVAL);
    for placement in [0, mapped.mapping.placement + 1, u32::MAX] {
        let wrong = Mapping { placement, ..mapped.mapping };
        assert_eq!(refused(mapped.file.unmap(&wrong)), EINVAL);
    }
    mapped.mapping.write(0, 3);
    assert_eq!(mapped.mapping.read(0), 3);
    mapped.close().unwrap();
}

/// The ways in which a program frees memory.
const FREES: [fn(&Client, u32); 3] = [
    |client, memory| client.free(client.device, memory).unwrap(),
    |client, _| client.free(client.root, client.device).unwrap(),
    |client, _| client.ctl.close().unwrap(),
];

#[test]
fn a_cards_memory_leaves_the_window_before_it_is_freed() {
    let pair = pair();
    let process = pair.guest.process(100);
    let other = Client::new(&process).unwrap();
    for free in FREES {
        let client = Client::new(&process).unwrap();
        let memory = client.memory(Place::Video, SIZE).unwrap();
        let mapped = client.map(Place::Video, memory, SIZE).unwrap();
        mapped.mapping.write(0, 0x5ec2e7);
        free(&client, memory);
        assert_eq!(pair.backend.status().unwrap()["placements"], 0);
        assert_eq!(mapped.mapping.read(0), 0, "nothing is there any more");
        let taken = pair.backend.status().unwrap()["window_bytes"].as_u64();
        assert_eq!(taken, Some(SIZE), "its range waits for the guest");
        mapped.file.unmap(&mapped.mapping).unwrap();
        assert_eq!(pair.backend.status().unwrap()["window_bytes"], 0);
        mapped.file.close().unwrap();
    }
    other.attached_ids().unwrap();
}

#[test]
fn system_memory_that_is_mapped_outlives_its_handle_as_it_does_natively() {
    for arena in ["--arena=0", "--arena=1M"] {
        outlives_its_handle(&pair_in(&[arena], &[], Options::default()));
    }
}

fn outlives_its_handle(pair: &Pair) {
    let process = pair.guest.process(100);
    for free in FREES {
        let client = Client::new(&process).unwrap();
        let memory = client.memory(Place::System, SIZE).unwrap();
        let mapped = client.map(Place::System, memory, SIZE).unwrap();
        mapped.mapping.write(0, 0x5ec2e7);
        free(&client, memory);
        assert_eq!(mapped.mapping.read(0), 0x5ec2e7);
        mapped.close().unwrap();
        assert!(wait_until(LONG, || mapped.mapping.read(0) == 0));
        let status = pair.backend.status().unwrap();
        assert_eq!((&status["placements"], &status["window_bytes"]), (&0.into(), &0.into()));
    }
}

#[test]
fn an_unmap_of_rms_takes_the_placement_along() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::Video, SIZE).unwrap();
    let mapped = client.map(Place::Video, memory, SIZE).unwrap();
    mapped.mapping.write(0, 1);
    client.forget(memory, mapped.linear).unwrap();
    assert_eq!(mapped.mapping.read(0), 0);
    assert_eq!(refused(mapped.file.map(SIZE, true)), EINVAL, "nor is it mapped again");
    mapped.close().unwrap();
}

#[test]
fn a_guest_has_so_many_placements_and_then_rm_says_so() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::System, 4096).unwrap();
    let max = pair.guest.probe().unwrap().hello.max_placements.get();
    let all: Vec<_> = (0..max).map(|_| client.map(Place::System, memory, 4096).unwrap()).collect();
    let file = client.ctl.process.open("nvidiactl").unwrap();
    assert_eq!(client.arm(&file, memory, 4096).unwrap().0, 0x1a, "INSUFFICIENT_RESOURCES");
    all[0].close().unwrap();
    assert_eq!(client.arm(&file, memory, 4096).unwrap().0, 0);
    file.map(4096, true).unwrap();
}

#[test]
fn a_window_that_is_full_maps_no_more() {
    let pair = pair_in(&["--window-size=1M", "--arena=0"], &[], Options::default());
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::System, 512 << 10).unwrap();
    let (one, two) = (
        client.map(Place::System, memory, 512 << 10).unwrap(),
        client.map(Place::System, memory, 512 << 10).unwrap(),
    );
    let third = client.map(Place::System, memory, 512 << 10);
    assert_eq!(third.err().map(|error| error.errno()), Some(nix::libc::ENOMEM));
    two.close().unwrap();
    client.map(Place::System, memory, 512 << 10).unwrap().close().unwrap();
    one.close().unwrap();
}

/// Maps and unmaps as fast as it goes, touching each mapping the moment it is told; how
/// often that was not the memory, and how often memory was still there after an unmap.
fn race(late: Late, rounds: usize) -> (usize, usize) {
    let options = Options { late, ..Options::default() };
    let pair = pair_in(&["--arena=0"], &[], options);
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    let memory = client.memory(Place::System, 4096).unwrap();
    let known = client.map(Place::System, memory, 4096).unwrap();
    client.map(Place::System, memory, 4096).unwrap();
    known.mapping.write(8, 0x0a11_600d);
    let (mut wrong, mut stale) = (0, 0);
    for round in 0..rounds as u64 {
        let file = process.open("nvidiactl").unwrap();
        assert_eq!(client.arm(&file, memory, 4096).unwrap().0, 0);
        let mapping = file.map(4096, true).unwrap();
        wrong += usize::from(mapping.read(8) != 0x0a11_600d);
        mapping.write(0, round);
        wrong += usize::from(known.mapping.read(0) != round);
        file.unmap(&mapping).unwrap();
        stale += usize::from(mapping.read(8) != 0);
        file.close().unwrap();
    }
    let asked = pair.guest.vmm.asked();
    assert_eq!(asked, (rounds as u64 + 2, rounds as u64));
    (wrong, stale)
}

#[test]
fn a_vmm_that_acknowledges_before_it_acts_shows_no_wrong_read_in_two_thousand_maps() {
    assert_eq!(race(Late::UntilNextRequest, 2000), (0, 0));
}

#[test]
fn the_same_race_is_lost_where_the_barrier_settles_nothing() {
    let (wrong, stale) = race(Late::UntilNextMap, 20);
    assert!(wrong > 0 && stale > 0, "the control must fail: {wrong} wrong, {stale} stale");
}

/// A guest that keeps an address it once had, and a newcomer who gets the memory.
#[test]
fn the_old_address_of_a_dead_workers_memory_reaches_no_newcomer() {
    let environment = [("NVGUEST_SIM_KEEP_MEMORY", "1")];
    let pair = pair_in(&[], &environment, Options::default());
    for round in 0..20_u64 {
        let victim = Client::new(&pair.guest.process(1)).unwrap();
        let memory = victim.memory(Place::Video, SIZE).unwrap();
        let old = victim.map(Place::Video, memory, SIZE).unwrap();
        old.mapping.write(0, 0x01d + round);
        let worker = pair.backend.worker_of(1).unwrap();
        kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
        let lost = wire::file_handle(wire::file_worker(old.file.handle), 0);
        // The newcomer allocates until it has just that memory: it is not cleared here.
        let newcomer = Client::new(&pair.guest.process(2)).unwrap();
        let mut new = None;
        let found = wait_until(LONG, || {
            let memory = newcomer.memory(Place::Video, SIZE).unwrap();
            let mapped = newcomer.map(Place::Video, memory, SIZE).unwrap();
            let same = mapped.mapping.read(0) == 0x01d + round;
            if same {
                new = Some(mapped);
            } else {
                mapped.close().unwrap();
                newcomer.free(newcomer.device, memory).unwrap();
            }
            same
        });
        assert!(found, "the memory is never given out again");
        let new = new.unwrap();
        assert_eq!(old.mapping.read(0), 0, "the old address shows the newcomer's memory");
        old.mapping.write(0, 0xbad);
        assert_eq!(new.mapping.read(0), 0x01d + round, "and alters it");
        // Nor is its place in the window given away before the guest has let go of it.
        assert_ne!(new.mapping.offset, old.mapping.offset);
        pair.guest.mailbox.wait(lost, LONG).expect("the guest is told");
        let late = nvguest_frontend::File { slot: wire::NO_SLOT, ..old.file.clone() };
        late.unmap(&old.mapping).unwrap();
        assert_eq!(refused(late.unmap(&old.mapping)), ENODEV);
        newcomer.ctl.close().unwrap();
        new.close().unwrap();
    }
    assert_eq!(pair.backend.status().unwrap()["window_bytes"], 0);
}

#[test]
fn echoes_of_placements_disturb_nobody() {
    let pair = pair();
    let one = Client::new(&pair.guest.process(1)).unwrap();
    let other = Client::new(&pair.guest.process(2)).unwrap();
    let memory = one.memory(Place::Video, SIZE).unwrap();
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| (0..2000).for_each(|_| assert!(other.attached_ids().is_ok())));
        while !calls.is_finished() {
            let mapped: Vec<_> =
                (0..10).map(|_| one.map(Place::Video, memory, SIZE).unwrap()).collect();
            mapped.iter().for_each(|mapped| mapped.close().unwrap());
        }
        calls.join().unwrap();
    });
    assert_eq!(pair.backend.workers().unwrap().len(), 2);
}
