//! Event records to the guest: idempotent and coalesced, so that as many can be
//! outstanding as there are files, and no more.

use std::collections::BTreeMap;
use std::sync::Arc;

use zerocopy::IntoBytes;

use super::counts::Word;
use super::page::SlotPage;
use super::ring::Ring;
use crate::wire;

/// What waits for a buffer of the guest's, and the queue that has the buffers.
#[derive(Default)]
pub struct EventQueue {
    ring: Option<(Ring, Option<Arc<SlotPage>>)>,
    waiting: BTreeMap<(u32, u32), (u32, u32)>,
    sent: u64,
}

impl EventQueue {
    /// Begins to use `ring`; what waits is sent at once if there are buffers.
    pub fn start(&mut self, ring: Ring, page: Option<Arc<SlotPage>>) {
        self.ring = Some((ring, page));
        self.flush();
    }

    /// Stops using the queue and says how far it was served.
    pub fn stop(&mut self) -> Option<u16> {
        self.ring.take().map(|(ring, _)| ring.next_available())
    }

    /// Whether there is a queue to send on.
    pub fn is_started(&self) -> bool {
        self.ring.is_some()
    }

    /// Forgets what waits: the guest's driver has begun anew.
    pub fn forget(&mut self) {
        self.waiting.clear();
    }

    /// Forgets what waits of a worker's files.
    pub fn forget_worker(&mut self, worker: u16) {
        self.waiting.retain(|&(_, file), _| wire::file_worker(file) != worker);
    }

    /// Sends `kind` of `file`, now or when the guest posts a buffer: all bits that came, and
    /// how many `more` records were promised last.
    pub fn send(&mut self, kind: u32, file: u32, mask: u32, more: u32) {
        if self.waiting.is_empty() && self.give(kind, file, mask, more) {
            return;
        }
        let waiting = self.waiting.entry((kind, file)).or_default();
        *waiting = (waiting.0 | mask, more);
        self.flush();
    }

    /// Sends a record if the guest has posted a buffer; whether it has.
    fn give(&mut self, kind: u32, file: u32, mask: u32, more: u32) -> bool {
        let Some((ring, page)) = &mut self.ring else { return false };
        let Some(buffer) = ring.take() else { return false };
        if let Some(page) = page {
            page.events_taken(ring.next_available());
            page.count(Word::Event);
        }
        let event = wire::Event {
            kind: kind.into(),
            file: file.into(),
            mask: mask.into(),
            more: more.into(),
        };
        ring.give(buffer, event.as_bytes());
        self.sent += 1;
        true
    }

    /// Sends what waits, as far as there are buffers. Call it on a kick of the queue,
    /// which means just that: there are buffers.
    pub fn flush(&mut self) {
        loop {
            while let Some((&(kind, file), &(mask, more))) = self.waiting.first_key_value() {
                if !self.give(kind, file, mask, more) {
                    break;
                }
                self.waiting.pop_first();
            }
            let Some((ring, _)) = &mut self.ring else { return };
            if self.waiting.is_empty() || !ring.want_kick() {
                return;
            }
        }
    }

    /// Records sent so far.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// The queue under it, to give it new guest memory.
    pub fn ring_mut(&mut self) -> Option<&mut Ring> {
        self.ring.as_mut().map(|(ring, _)| ring)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_is_gone_leaves_no_records_of_its_files() {
        let mut events = EventQueue::default();
        for worker in [1, 2] {
            for number in 0..u16::MAX {
                events.send(wire::EVENT_READY, wire::file_handle(worker, number), 1, 0);
            }
        }
        events.forget_worker(1);
        assert!(events.waiting.keys().all(|&(_, file)| wire::file_worker(file) == 2));
        assert_eq!(events.waiting.len(), usize::from(u16::MAX));
    }
}
