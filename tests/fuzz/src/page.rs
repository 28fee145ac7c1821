//! What a dead worker left: no page and no queue make the broker panic or loop.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::Arc;

use vhost_user_nvguest::transport::page::SlotPage;
use vhost_user_nvguest::transport::ring::{Ring, RingConfig, SHORT};

use crate::chain::{config, memory};
use crate::input::Input;

/// Bytes of the page that a script can say: its head, and the first entries.
const SAID: usize = 1024;

/// Runs a script: a queue, what the page says, the memory from 0 on.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let config = config(&mut input);
    let count = usize::from(input.u16()) % SAID;
    let page = Arc::new(SlotPage::create().expect("a page"));
    // A worker writes what it wants through its own descriptor.
    let file = File::from(page.share().expect("a descriptor"));
    file.write_all_at(input.bytes(count), 0).expect("the page takes it");
    let memory = memory(input.rest());
    let queue = |config| Ring::new(config, Arc::clone(&memory), None, Some(Arc::clone(&page)));
    let Ok(mut ring) = queue(config) else { return };
    let waited = ring.bury();
    assert!(waited.len() <= 5 * usize::from(config.size), "it is listened to for ever");
    assert!(waited.iter().all(|request| request.len() <= SHORT));
    let _ = (page.next_available(), page.next_used(), page.events_next_available());
    let _ = (page.counts(), page.placements());
    // Whoever serves the queue next begins where this ended.
    if let Ok(mut next) = queue(RingConfig { next_available: ring.next_available(), ..config }) {
        let _ = next.bury();
    }
}
