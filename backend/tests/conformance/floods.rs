//! A million of what is malformed: broker and worker live, and hold what they held before.

use nvguest_frontend::backend::held;
use nvguest_frontend::queue::{Queue, Token};
use nvguest_frontend::ring::{Descriptor, INDIRECT, NEXT};
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, padded, Kind, NO_SLOT};
use nvguest_frontend::File;
use rmclient::abi::{class, control, escape};
use zerocopy::IntoBytes;

use crate::common::*;
use crate::endurance::{is_flat, scaled};

/// Threads that send, and requests that each has under way.
const THREADS: usize = 2;
const DEPTH: usize = 16;

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

    fn of<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.below(values.len())]
    }
}

/// What a thread sends next, on which queue.
type Send = fn(&Queue, &File, &mut Random) -> Option<Token>;

/// Sends `count` of something, a quarter of them on the broker's queue; then everything is
/// as it was.
fn flood(count: usize, send: Send) {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let file = &client.ctl;
    let worker = pair.backend.worker_of(100).unwrap();
    let run = |count: usize, seed: u64| {
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let guest = &pair.guest;
                let mut random = Random(seed + thread as u64);
                scope.spawn(move || {
                    for _ in 0..count / THREADS / DEPTH {
                        let slot = if random.below(4) == 0 { NO_SLOT } else { file.slot };
                        let queue = guest.queue(slot);
                        let sent: Vec<Token> =
                            (0..DEPTH).filter_map(|_| send(queue, file, &mut random)).collect();
                        for token in sent {
                            queue.wait(token, &mut []).expect("an answer");
                        }
                    }
                });
            }
        });
    };
    run(count / 10, 0x5eed);
    let before = (pair.backend.held().unwrap(), held(worker).unwrap());
    run(count, 0xfeed);
    is_flat("broker", pair.backend.pid(), before.0);
    is_flat("worker", worker, before.1);
    assert_eq!(pair.backend.worker_of(100), Some(worker), "the same worker");
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
    file.arm().expect("and the file is still there");
    assert_eq!(pair.guest.strays(), 0);
}

/// Parts that lie anywhere, of any length, and lead anywhere. None is to be written: a guest
/// that lets its device write over its rings has no queue to go on with.
fn chain(queue: &Queue, _: &File, random: &mut Random) -> Option<Token> {
    let parts: Vec<Descriptor> = (0..1 + random.below(3))
        .map(|_| {
            let (any, near) = (random.next(), 0x4000_0000 + random.next() % 0x10_0000);
            let lengths = [0, 16, 64, random.next() as u32 % 4096, random.next() as u32];
            let anywhere = random.next() as u16;
            Descriptor {
                address: random.of(&[any, near, near]),
                length: random.of(&lengths),
                flags: random.of(&[0, NEXT, NEXT, NEXT | INDIRECT, INDIRECT]),
                next: random.of(&[0, 1, 2, 3, anywhere]),
            }
        })
        .collect();
    Some(queue.submit_chain(&parts).expect("room in the queue"))
}

/// A request with something wrong in it.
fn message(queue: &Queue, file: &File, random: &mut Random) -> Option<Token> {
    let kind = Kind::ALL[1 + random.below(9)];
    let other = file.handle ^ (1 << random.below(31));
    let handle = random.of(&[file.handle, other]);
    let length = random.below(64);
    let body = random.bytes(length);
    let request = match random.below(6) {
        0 => random.bytes(96),
        1 => ask_number(random.next() as u32 | 16, handle, &body),
        2 => {
            let mut request = ask(kind, handle, &body);
            request[8] ^= 1;
            request
        }
        3 => ask(kind, other, &body),
        4 => {
            let map = wire::MapReq {
                offset: random.next().into(),
                length: random.next().into(),
                prot: (random.next() as u32).into(),
                reserved: 0.into(),
            };
            ask(Kind::Map, handle, map.as_bytes())
        }
        _ => ask(Kind::Ioctl, handle, &body),
    };
    // Never a close of our own file.
    let closes = request.get(..8) == ask(Kind::Close, file.handle, &[]).get(..8);
    let room = random.of(&[0, 4, 8, 64, 4096]);
    (!closes).then(|| queue.submit(&request, room).expect("room in the queue"))
}

/// An ioctl of RM's that is whole as a message: controls and allocations with parameters of
/// any bytes, and other escapes with any argument.
fn rm_call(queue: &Queue, file: &File, random: &mut Random) -> Option<Token> {
    let any = (random.next() as u32 & 0xff, random.below(200));
    let (nr, size) = random.of(&[
        (escape::RM_CONTROL, 32),
        (escape::RM_ALLOC, 48),
        (escape::RM_CONTROL, 32),
        (escape::RM_ALLOC, 48),
        (escape::RM_DUP_OBJECT, 28),
        (escape::RM_UNMAP_MEMORY, 32),
        any,
    ]);
    let mut argument = random.bytes(size);
    let mut put =
        |at: usize, value: u32| argument[at..at + 4].copy_from_slice(&value.to_le_bytes());
    let (made_up, short) = (random.next() as u32, random.below(300));
    let params = match nr {
        escape::RM_CONTROL if size == 32 => {
            let known = [control::ATTACHED_IDS, control::SET_TRIGGER_FIFO, control::PREEMPT];
            put(8, random.of(&[known[0], known[1], known[2], made_up]));
            let length = random.of(&[0, 4, 8, 128, short]);
            put(24, length as u32);
            Some(length)
        }
        escape::RM_ALLOC if size == 48 => {
            let known = [class::DEVICE, class::SUBDEVICE, class::OS_EVENT, class::CHANNEL_GROUP];
            put(12, random.of(&[known[0], known[1], known[2], known[3], made_up]));
            Some(random.of(&[56, 4, 24, 40, short]))
        }
        _ => None,
    };
    // A random number of segments, and mostly the one that was meant.
    let lengths: Vec<u32> =
        params.into_iter().filter(|_| random.below(8) > 0).map(|n| n as u32).collect();
    let head = wire::IoctlReq {
        cmd: (0xc000_4600 | (size as u32) << 16 | nr).into(),
        arg_len: (size as u32).into(),
        nsegs: (lengths.len() as u16).into(),
        nfds: 0.into(),
        reserved: 0.into(),
    };
    let mut body = head.as_bytes().to_vec();
    let mut add = |bytes: &[u8]| {
        body.extend_from_slice(bytes);
        body.resize(padded(body.len()), 0);
    };
    add(lengths.as_bytes());
    add(&argument);
    lengths.iter().for_each(|&length| add(&random.bytes(length as usize)));
    Some(queue.submit(&ask(Kind::Ioctl, file.handle, &body), 4096).expect("room in the queue"))
}

#[test]
fn a_million_malformed_chains_leave_nothing() {
    flood(scaled("NVGUEST_CHAINS", 1_000_000), chain);
}

#[test]
fn a_million_random_messages_leave_nothing() {
    flood(scaled("NVGUEST_MESSAGES", 1_000_000), message);
}

#[test]
fn a_hundred_thousand_random_calls_of_rm_leave_nothing() {
    flood(scaled("NVGUEST_CALLS", 100_000), rm_call);
}
