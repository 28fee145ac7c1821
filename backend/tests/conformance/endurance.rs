//! Many of anything leave nothing behind.

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::{held, wait_until, Held};
use nvguest_frontend::ring::{Descriptor, NEXT, WRITE};
use nvguest_frontend::rm::{Client, Where};
use nvguest_frontend::wire::{self, Kind, NO_SLOT};
use nvguest_frontend::{File, Guest};
use zerocopy::IntoBytes;

use crate::common::*;

/// What threads keep of their largest requests, of up to a MiB each: not a leak. Of a
/// million requests, four bytes each would show.
const SLACK_KIB: u64 = 4096;

fn scaled(name: &str, count: usize) -> usize {
    std::env::var(name).ok().and_then(|value| value.parse().ok()).unwrap_or(count)
}

/// A process holds what it held before. What is on its way out has time to go.
fn is_flat(who: &str, pid: i32, before: Held) {
    let fds = || held(pid).unwrap().fds;
    let flat = wait_until(LONG, || fds() <= before.fds);
    assert!(flat, "the {who} had {} descriptors, and now {}", before.fds, fds());
    let (old, new) = (before.own_kib, held(pid).unwrap().own_kib);
    assert!(new <= old + SLACK_KIB, "the {who} had {old} KiB, and now {new} KiB");
}

/// A small generator of numbers, so that a failure repeats.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.next() as u8).collect()
    }
}

/// One request that must fail, or at least do no harm.
fn bad(guest: &Guest, file: &File, random: &mut Random) {
    let slot = if random.below(4) == 0 { NO_SLOT } else { file.slot };
    let kind = Kind::ALL[1 + random.below(9)];
    let other = file.handle ^ (1 << random.below(31));
    let handle = if random.below(2) == 0 { file.handle } else { other };
    let request = match random.below(8) {
        0 => random.bytes(96),
        1 => ask_number(random.next() as u32 | 16, handle, &random.bytes(16)),
        2 => {
            let length = random.below(64);
            let mut request = ask(kind, handle, &random.bytes(length));
            request[8] ^= 1;
            request
        }
        3 => {
            let length = random.below(32);
            ask(kind, other, &random.bytes(length))
        }
        4 | 5 => {
            // A control, with something wrong in it.
            let head = wire::IoctlReq {
                cmd: (0xc020_462a ^ (1 << random.below(32))).into(),
                arg_len: (random.below(64) as u32).into(),
                nsegs: (random.below(10) as u16).into(),
                nfds: (random.below(3) as u16).into(),
                reserved: 0.into(),
            };
            let length = random.below(256);
            ask(Kind::Ioctl, handle, &[head.as_bytes(), &random.bytes(length)].concat())
        }
        6 => {
            let body = wire::MapReq {
                offset: random.next().into(),
                length: random.next().into(),
                prot: (random.next() as u32).into(),
                reserved: 0.into(),
            };
            ask(Kind::Map, handle, body.as_bytes())
        }
        _ => {
            let address = if random.below(2) == 0 { random.next() } else { 0x4000_0000 };
            let chain = [
                Descriptor { address, length: random.next() as u32, flags: NEXT, next: 1 },
                Descriptor {
                    address,
                    length: 64,
                    flags: random.next() as u16 & (WRITE | NEXT),
                    next: 1,
                },
            ];
            // A chain may not write over the rings, which lie there.
            let chain = chain.map(|part| Descriptor { flags: part.flags & !WRITE, ..part });
            let token = guest.queue(slot).submit_chain(&chain).unwrap();
            guest.queue(slot).wait(token, &mut []).unwrap();
            return;
        }
    };
    // Never a close of our own file, nor one that ends it.
    if request.get(..8) == ask(Kind::Close, file.handle, &[]).get(..8) {
        return;
    }
    let room = [0, 4, 8, 64, 4096][random.below(5)];
    guest.request(slot, &request, room).unwrap();
}

#[test]
fn bad_requests_without_number_leave_nothing() {
    let count = scaled("NVGUEST_BAD_REQUESTS", 100_000);
    let pair = pair();
    let file = pair.guest.process(100).open("nvidiactl").unwrap();
    let worker = pair.backend.worker_of(100).unwrap();
    let run = |count: usize, seed: u64| {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (guest, file) = (&pair.guest, &file);
                let mut random = Random(seed + thread);
                scope.spawn(move || (0..count / 4).for_each(|_| bad(guest, file, &mut random)));
            }
        });
    };
    run(20_000, 0x5eed);
    let before = (pair.backend.held().unwrap(), held(worker).unwrap());
    run(count, 0xfeed);
    is_flat("broker", pair.backend.pid(), before.0);
    is_flat("worker", worker, before.1);
    assert_eq!(pair.backend.worker_of(100), Some(worker), "the same worker");
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
    file.arm().expect("and the file is still there");
    assert_eq!(pair.guest.strays(), 0);
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
            let place = if round % 2 == 0 { Where::Video } else { Where::System };
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
            let memory = client.memory(Where::Video, 65536).unwrap();
            let mapped = client.map(Where::Video, memory, 65536).unwrap();
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
