//! A process names the clients of another where RM does not ask whose they are.

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::gather::ByHandle;
use nvguest_frontend::rm::Client;
use rmclient::abi::{class, escape, Event, Share};
use zerocopy::IntoBytes;

use crate::common::{pair, Pair, LONG};

const INVALID_CLIENT: u32 = 0x23;
const DISABLE_CHANNELS: u32 = 0x2080_110b;
const PREEMPTION_BIND: u32 = 0x2080_1211;

/// A process's client, and a client of another process of the same guest.
fn two(pair: &Pair) -> (Client, Client) {
    let client = |tgid| Client::new(&pair.guest.process(tgid)).unwrap();
    (client(1), client(2))
}

/// A device that shares the address space of `of` (`hClientShare`), or follows its (`hTargetClient`).
fn device(client: &Client, at: usize, of: u32) -> Result<u32, String> {
    let mut params = [0; 56];
    params[at..at + 4].copy_from_slice(&of.to_le_bytes());
    client.make(client.root, class::DEVICE, &mut params).map_err(|error| error.to_string())
}

/// An event of the subdevice of `of` (`hParentClient`).
fn event(client: &Client, of: &Client) -> Result<u32, String> {
    let mut params = Event {
        parent_client: of.root,
        source: of.subdevice,
        class: class::OS_EVENT,
        data: client.ctl.handle.into(),
        ..Event::default()
    };
    let params = params.as_mut_bytes();
    client.make(client.subdevice, class::OS_EVENT, params).map_err(|error| error.to_string())
}

/// RM_SHARE of an object with a client; RM's status, `None` where the card has no such call.
fn share(client: &Client, (of, object): (u32, u32), with: u32) -> Option<u32> {
    /// `RS_SHARE_TYPE_CLIENT`, and the right to duplicate.
    const CLIENT: u16 = 3;
    let (kind, access) = (CLIENT, 1);
    let mut argument = Share { client: of, object, target: with, access, kind, ..Share::default() };
    // SAFETY: there is no pointer in it.
    unsafe { client.ctl.rm(escape::RM_SHARE, &mut argument, &ByHandle) }.ok()?;
    Some(argument.status)
}

/// A control whose words, from `at` on, are these; RM's status.
fn named(client: &Client, command: u32, size: usize, at: usize, words: &[u32]) -> u32 {
    let mut params = vec![0; size];
    params[at..at + 4 * words.len()].copy_from_slice(words.as_bytes());
    client.control(client.subdevice, command, &mut params).unwrap()
}

fn is_refused(outcome: Result<u32, String>) -> bool {
    outcome.is_err_and(|error| error.ends_with("RM's status is 0x23"))
}

#[test]
fn nobody_shares_another_process_s_memory_with_himself() {
    let pair = pair();
    let (own, other) = two(&pair);
    assert_eq!(share(&own, (other.root, other.device), own.root), Some(INVALID_CLIENT));
    assert_ne!(share(&own, (own.root, own.device), own.root), Some(INVALID_CLIENT));
    // It was not the card that refused.
    let refusals = || pair.backend.status().unwrap()["refusals"].to_string();
    let named = || refusals().contains("\"what\":\"nvidiactl ioctl 0x35\"");
    assert!(wait_until(LONG, named), "{}", refusals());
}

#[test]
fn no_device_is_made_in_another_process_s_address_space() {
    let pair = pair();
    let (own, other) = two(&pair);
    let _node = own.node().unwrap();
    for at in [4, 8] {
        assert!(is_refused(device(&own, at, other.root)), "{at}");
        assert!(device(&own, at, own.root).is_ok(), "{at}");
    }
}

#[test]
fn no_event_is_of_another_process_s_object() {
    let pair = pair();
    let (own, other) = two(&pair);
    assert!(is_refused(event(&own, &other)));
    assert!(!is_refused(event(&own, &own)));
}

#[test]
fn no_channel_of_another_process_is_stopped_or_changed() {
    let pair = pair();
    let (own, other) = two(&pair);
    let status = |count, clients: &[u32]| {
        let words = [&[count, 0, 0, 0, 0][..], clients].concat();
        named(&own, DISABLE_CHANNELS, 536, 4, &words)
    };
    assert_eq!(status(1, &[other.root]), INVALID_CLIENT);
    assert_eq!(status(2, &[own.root, other.root]), INVALID_CLIENT);
    assert_eq!(status(u32::MAX, &[own.root, other.root]), INVALID_CLIENT);
    assert_ne!(status(2, &[own.root, own.root]), INVALID_CLIENT);
    // What is behind those that count is nobody's to read.
    assert_ne!(status(1, &[own.root, other.root]), INVALID_CLIENT);
    assert_eq!(named(&own, PREEMPTION_BIND, 112, 4, &[other.root]), INVALID_CLIENT);
    assert_ne!(named(&own, PREEMPTION_BIND, 112, 4, &[own.root]), INVALID_CLIENT);
}

#[test]
fn a_client_that_was_freed_is_nobody_s_to_name() {
    let pair = pair();
    let process = pair.guest.process(1);
    let (own, second) = (Client::new(&process).unwrap(), Client::new(&process).unwrap());
    let _node = own.node().unwrap();
    assert!(device(&own, 4, second.root).is_ok());
    second.free(0, second.root).unwrap();
    assert!(is_refused(device(&own, 4, second.root)));
}
