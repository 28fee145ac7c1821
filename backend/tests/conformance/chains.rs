//! Descriptor chains, whole and broken.

use std::sync::Arc;

use nvguest_frontend::memory::GPA;
use nvguest_frontend::ring::{Descriptor, INDIRECT, NEXT, WRITE};
use nvguest_frontend::wire::{Kind, NO_SLOT};
use nvguest_frontend::{Guest, Options};

use crate::common::*;

fn part(address: u64, length: u32, flags: u16, next: u16) -> Descriptor {
    Descriptor { address, length, flags, next }
}

/// Room in guest memory for a request and its reply.
fn room(guest: &Guest) -> u64 {
    GPA + guest.memory.take(8192).expect("guest memory") as u64
}

fn put(guest: &Guest, address: u64, bytes: &[u8]) {
    guest.memory.write((address - GPA) as usize, bytes);
}

fn status_at(guest: &Guest, address: u64) -> u32 {
    let mut bytes = [0; 4];
    guest.memory.read((address - GPA) as usize, &mut bytes);
    u32::from_le_bytes(bytes)
}

/// With and without indirect tables, on the broker's queue and on a worker's.
fn on_every_queue(test: impl Fn(&Arc<Guest>, u32)) {
    for indirect in [true, false] {
        let pair = pair_with(Options { indirect, ..Options::default() });
        let file = pair.guest.process(100).open("nvidiactl").unwrap();
        for slot in [NO_SLOT, file.slot] {
            test(&pair.guest, slot);
            assert_eq!(pair.guest.strays(), 0, "nothing is returned twice");
            let close = ask(Kind::Close, file.handle ^ 0x8000, &[]);
            assert_eq!(errno_on(&pair.guest, slot, &close), EBADF, "the queue goes on");
        }
        file.close().unwrap();
    }
}

#[test]
fn a_chain_that_ends_nowhere_is_returned_unread() {
    on_every_queue(|guest, slot| {
        let at = room(guest);
        let chains: [&[Descriptor]; 9] = [
            // Back to itself; back to the first of two; past the table.
            &[part(at, 16, NEXT, 0)],
            &[part(at, 16, NEXT, 1), part(at, 16, NEXT, 0)],
            &[part(at, 16, NEXT, 0x7fff)],
            // Nothing to read; nothing to write; neither.
            &[part(at, 64, WRITE, 0)],
            &[part(at, 16, 0, 0)],
            &[part(at, 0, 0, 0)],
            // Outside of guest memory, at its very end, and around the end of the numbers.
            &[part(1, 64, NEXT, 1), part(at, 64, WRITE, 0)],
            &[part(u64::MAX - 8, 64, NEXT, 1), part(at, 64, WRITE, 0)],
            &[part(at, u32::MAX, NEXT, 1), part(at, 64, WRITE, 0)],
        ];
        for (number, chain) in chains.into_iter().enumerate() {
            let token = guest.queue(slot).submit_chain(chain).unwrap();
            let written = guest.queue(slot).wait(token, &mut []).unwrap();
            assert!(written <= 64, "chain {number}");
        }
    });
}

#[test]
fn a_reply_that_would_go_outside_of_guest_memory_goes_nowhere() {
    on_every_queue(|guest, slot| {
        let at = room(guest);
        let request = ask(Kind::Arm, 0x7fff_7fff, &[]);
        put(guest, at, &request);
        let end = GPA + guest.memory.size() as u64;
        for bad in [1, end, end - 4, u64::MAX - 4, 1 << 40] {
            let chain = [part(at, request.len() as u32, NEXT, 1), part(bad, 64, WRITE, 0)];
            let token = guest.queue(slot).submit_chain(&chain).unwrap();
            assert_eq!(guest.queue(slot).wait(token, &mut []).unwrap(), 0, "{bad:#x}");
        }
    });
}

#[test]
fn a_part_to_read_behind_a_part_to_write_is_refused() {
    on_every_queue(|guest, slot| {
        let at = room(guest);
        let request = ask(Kind::Arm, 0x7fff_7fff, &[]);
        put(guest, at, &request);
        let (head, tail) = (part(at, 16, NEXT, 1), part(at + 16, 16, 0, 0));
        let chain = [head, part(at + 4096, 64, WRITE | NEXT, 2), tail];
        let token = guest.queue(slot).submit_chain(&chain).unwrap();
        assert_eq!(guest.queue(slot).wait(token, &mut []).unwrap(), 8);
        assert_eq!(status_at(guest, at + 4096), EPROTO as u32);
    });
}

#[test]
fn a_request_and_its_reply_may_be_in_pieces() {
    on_every_queue(|guest, slot| {
        let at = room(guest);
        let request = ask(Kind::Arm, 0x7fff_7fff, &[]);
        put(guest, at, &request);
        let chain = [
            part(at, 5, NEXT, 1),
            part(at + 5, request.len() as u32 - 5, NEXT, 2),
            part(at + 4096, 3, WRITE | NEXT, 3),
            part(at + 4099, 61, WRITE, 0),
        ];
        let token = guest.queue(slot).submit_chain(&chain).unwrap();
        assert_eq!(guest.queue(slot).wait(token, &mut []).unwrap(), 8);
        let status = status_at(guest, at + 4096);
        assert!([EBADF as u32, ENODEV as u32].contains(&status), "{status}");
    });
}

#[test]
fn an_indirect_table_that_is_none_is_returned_unread() {
    on_every_queue(|guest, slot| {
        let at = room(guest);
        // A table within a table, which leads to itself.
        put(guest, at, &part(at, 16, INDIRECT, 0).to_bytes());
        let tables = [
            part(at, 16, INDIRECT, 0),
            part(at, 0, INDIRECT, 0),
            part(at, 7, INDIRECT, 0),
            part(at, 17, INDIRECT, 0),
            part(at, 16 * 0x1_0000, INDIRECT, 0),
            part(1, 16, INDIRECT, 0),
            part(u64::MAX - 15, 32, INDIRECT, 0),
            part(at, 16, INDIRECT | NEXT, 1),
        ];
        for (number, table) in tables.into_iter().enumerate() {
            let token = guest.queue(slot).submit_chain(&[table]).unwrap();
            let written = guest.queue(slot).wait(token, &mut []).unwrap();
            assert_eq!(written, 0, "table {number}");
        }
    });
}

#[test]
fn a_head_outside_of_the_table_is_skipped() {
    on_every_queue(|guest, slot| {
        for head in [256, 0x7fff, u16::MAX] {
            guest.queue(slot).publish_head(head);
        }
    });
}

/// What a process used of the processors, in clock ticks.
fn ticks(pid: i32) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    fields[11].parse::<u64>().unwrap() + fields[12].parse::<u64>().unwrap()
}

#[test]
fn a_queue_whose_position_leaps_is_served_no_more_and_costs_nothing() {
    let pair = pair();
    let process = pair.guest.process(100);
    let file = process.open("nvidiactl").unwrap();
    let other = pair.guest.process(101).open("nvidiactl").unwrap();
    let worker = pair.backend.worker_of(100).unwrap();
    pair.guest.queue(file.slot).leap(300);
    pair.guest.event_queue(NO_SLOT).leap(300);
    // Others are served as before, and nobody spins on what cannot be served.
    let before = ticks(worker) + ticks(pair.backend.pid());
    let start = std::time::Instant::now();
    while start.elapsed() < 5 * SHORT {
        other.arm().unwrap();
        std::thread::sleep(SHORT / 4);
    }
    let used = ticks(worker) + ticks(pair.backend.pid()) - before;
    assert!(used < 20, "{used} ticks of 50 in half a second");
    pair.guest.queue(NO_SLOT).leap(300);
    let before = ticks(pair.backend.pid());
    std::thread::sleep(5 * SHORT);
    let used = ticks(pair.backend.pid()) - before;
    assert!(used < 20, "{used} ticks of 50 in half a second");
    other.close().expect("a worker's own queue does not depend on the broker's");
    // A record that can never be delivered.
    let before = ticks(pair.backend.pid());
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), nix::sys::signal::SIGKILL).unwrap();
    std::thread::sleep(5 * SHORT);
    let used = ticks(pair.backend.pid()) - before;
    assert!(used < 20, "{used} ticks of 50 in half a second");
}
