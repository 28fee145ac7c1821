//! Virtqueues in a guest's memory: no rings and no chains make their server panic, loop or
//! write where the guest did not say.

use std::sync::Arc;

use vhost_user_nvguest::transport::ring::{Memory, Message, Parked, Ring, RingConfig};
use vm_memory::{Bytes, GuestAddress};

use crate::input::Input;

/// Two regions of guest memory with a hole between them.
pub const REGIONS: [(u64, usize); 2] = [(0, 4 << 10), (8 << 10, 4 << 10)];
/// Where the rings are unless the input says otherwise.
pub const DESCRIPTORS: u64 = 0;
/// See [`DESCRIPTORS`].
pub const AVAILABLE: u64 = 0x400;
/// See [`DESCRIPTORS`].
pub const USED: u64 = 0x800;
/// Steps of one script at most, and requests held at once.
const MAX_STEPS: usize = 256;

/// Runs a script: a queue, the memory it lies in, and what is done with it. In this order:
/// the queue, steps (each a byte and its numbers) up to a step of 0, the memory from 0 on.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let config = config(&mut input);
    let count = input.below(32);
    let steps: Vec<(u8, u16)> = (0..count).map(|_| (input.u8(), input.u16())).collect();
    let memory = memory(input.rest());
    let Ok(ring) = Ring::new(config, Arc::clone(&memory), None, None) else { return };
    let mut server = Server {
        ring,
        config,
        before: snapshot(&memory),
        memory,
        held: Vec::new(),
        written: used(config),
    };
    for (step, number) in steps.into_iter().take(MAX_STEPS) {
        server.step(step, number);
    }
    server.check();
}

/// A queue: mostly where queues are.
pub fn config(input: &mut Input<'_>) -> RingConfig {
    let odd = input.u8();
    let mut at = |bit: u8, usual: u64| if odd & bit != 0 { u64::from(input.u16()) } else { usual };
    let (descriptors, available, used) = (at(1, DESCRIPTORS), at(2, AVAILABLE), at(4, USED));
    RingConfig {
        descriptors,
        available,
        used,
        size: if odd & 8 != 0 { input.u16() } else { 1 << input.below(7) },
        next_available: input.u16(),
        event_idx: u16::from(odd & 16 != 0),
        reserved: 0,
    }
}

/// Guest memory that begins with `bytes`.
pub fn memory(bytes: &[u8]) -> Arc<Memory> {
    let ranges = REGIONS.map(|(at, size)| (GuestAddress(at), size));
    let memory = Memory::from_ranges(&ranges).expect("memory");
    let part = &bytes[..bytes.len().min(REGIONS[0].1)];
    memory.write_slice(part, GuestAddress(0)).expect("it fits");
    Arc::new(memory)
}

fn snapshot(memory: &Memory) -> Vec<Vec<u8>> {
    REGIONS
        .iter()
        .map(|&(at, size)| {
            let mut bytes = vec![0; size];
            memory.read_slice(&mut bytes, GuestAddress(at)).expect("it is there");
            bytes
        })
        .collect()
}

/// What a server may write of a queue: the used ring, its event index included.
fn used(config: RingConfig) -> Vec<(u64, u64)> {
    vec![(config.used, 6 + 8 * u64::from(config.size))]
}

struct Server {
    ring: Ring,
    config: RingConfig,
    memory: Arc<Memory>,
    before: Vec<Vec<u8>>,
    held: Vec<Message>,
    /// Ranges that may have been written.
    written: Vec<(u64, u64)>,
}

impl Server {
    fn step(&mut self, step: u8, number: u16) {
        match step % 8 {
            0 | 1 => self.take(),
            2 | 3 => self.give(number),
            4 => drop(self.ring.want_kick()),
            5 => self.ring.spare_kick(),
            6 => self.restart(),
            _ => self.publish(number),
        }
    }

    fn take(&mut self) {
        if self.held.len() < MAX_STEPS {
            self.held.extend(self.ring.take());
        }
    }

    fn give(&mut self, number: u16) {
        if self.held.is_empty() {
            return;
        }
        let message = self.held.swap_remove(usize::from(number >> 8) % self.held.len());
        let mut left = u64::from(number & 0xff);
        for &(at, length) in &message.reply {
            let count = left.min(length.into());
            self.written.push((at, count));
            left -= count;
        }
        self.ring.give(message, &vec![0xa5; usize::from(number & 0xff)]);
    }

    /// Stops the queue and goes on where it was, as a frontend does around a pause.
    fn restart(&mut self) {
        let mut parked = Parked::default();
        parked.stopped(&self.ring);
        if let Some(message) = self.held.pop() {
            self.written.extend(message.reply.iter().map(|&(at, _)| (at, 8)));
            parked.keep(message, &[0x5a; 8]);
        }
        let config = RingConfig { next_available: self.ring.next_available(), ..self.config };
        if let Ok(mut ring) = Ring::new(config, Arc::clone(&self.memory), None, None) {
            if !parked.started(&mut ring) {
                self.held.clear();
            }
            self.ring = ring;
        }
    }

    /// The guest makes more available.
    fn publish(&mut self, number: u16) {
        let at = GuestAddress(self.config.available.wrapping_add(2));
        let index: u16 = self.memory.read_obj(at).unwrap_or(0);
        let _ = self.memory.write_obj(index.wrapping_add(number % 4), at);
        self.written.push((at.0, 2));
    }

    fn check(&self) {
        let may = |at: u64| {
            self.written
                .iter()
                .any(|&(start, length)| at.checked_sub(start).is_some_and(|d| d < length))
        };
        for ((before, after), (base, _)) in
            self.before.iter().zip(snapshot(&self.memory)).zip(REGIONS)
        {
            if *before == after {
                continue;
            }
            for (index, (old, new)) in before.iter().zip(&after).enumerate() {
                let at = base + index as u64;
                assert!(old == new || may(at), "{at:#x} was written, and nobody said so");
            }
        }
    }
}
