//! What a broker tells a worker first: any bytes are refused, or read back as what was read.

use vhost_user_nvguest::transport::link::{Kind, Message};
use vhost_user_nvguest::worker::start::{Region, Start};

/// Reads a start message, and a table of regions.
pub fn run(data: &[u8]) {
    let message = |payload: Vec<u8>| Message {
        kind: Kind::Start,
        tag: 0,
        words: [0; 4],
        payload,
        fds: Vec::new(),
    };
    let _ = Region::parse(data);
    let Some(start) = Start::decode(&message(data.to_vec())) else { return };
    let again = start.encode(&start.compiled.to_bytes());
    let again = Start::decode(&message(again)).expect("it was read before");
    assert_eq!((again.worker, again.process), (start.worker, start.process));
    assert_eq!((&again.nodes, &again.compiled), (&start.nodes, &start.compiled));
}
