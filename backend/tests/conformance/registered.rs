//! Memory of the guest's programs that they register with RM.

use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::wait_until;
use nvguest_frontend::pins::PROGRAM;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{wire, Options, Process};
use rmclient::Place;

use crate::common::*;

const PAGE: usize = 4096;
/// RM's statuses (`nvstatuscodes.h`).
const INVALID_ADDRESS: u32 = 0x1e;
const INVALID_ARGUMENT: u32 = 0x1f;
const INVALID_LIMIT: u32 = 0x2e;
const NO_MEMORY: u32 = 0x51;
const NOT_SUPPORTED: u32 = 0x56;

fn with(args: &[&str], options: Options) -> Pair {
    let args = [&["--caps=utility,graphics,compute"], args].concat();
    pair_in(&args, &[], options)
}

fn client(pair: &Pair) -> Client {
    Client::new(&pair.guest.process(100)).unwrap()
}

/// Pages of the guest's memory that nobody else has, last first: no two meet.
fn pages(pair: &Pair, count: usize) -> Vec<usize> {
    let first = pair.guest.memory.take(2 * count * PAGE).unwrap();
    (0..count).rev().map(|page| first + 2 * page * PAGE).collect()
}

/// Registers so many pages; the object.
fn register(pair: &Pair, client: &Client, count: usize) -> u32 {
    let user = pair.guest.pins.map(pages(pair, count));
    let (status, memory) = client.register(user, (count * PAGE) as u64).unwrap();
    assert_eq!(status, 0);
    memory
}

/// How an event names a registration of this client's worker.
fn name(client: &Client, registration: u32) -> u32 {
    wire::file_handle(wire::file_worker(client.ctl.handle), registration as u16)
}

/// Whether the guest is told that a registration is over.
fn is_released(pair: &Pair, name: u32, patience: Duration) -> bool {
    let event = pair.guest.mailbox.wait(name, patience);
    event.is_some_and(|event| event.kind.get() == wire::EVENT_RELEASED)
}

/// Bytes that the guest's processes have registered, as the admin sees them.
fn registered_bytes(pair: &Pair) -> u64 {
    let status = pair.backend.status().unwrap();
    status["shares"]["registered"]["held"].as_u64().unwrap_or_else(|| panic!("{status:#}"))
}

/// A channel whose USERD is at `offset` of `memory`; its token.
fn channel(client: &Client, memory: u32, offset: u64) -> u32 {
    const CHANNEL: u32 = 0xc86f;
    /// `NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN`
    const TOKEN: u32 = 0xc36f_0108;
    let mut params = [0_u8; 368];
    params[0x20..0x24].copy_from_slice(&memory.to_le_bytes());
    params[0x40..0x48].copy_from_slice(&offset.to_le_bytes());
    let channel = client.make(client.device, CHANNEL, &mut params).unwrap();
    let mut token = [0; 4];
    assert_eq!(client.control(channel, TOKEN, &mut token).unwrap(), 0);
    u32::from_le_bytes(token)
}

#[test]
fn the_card_reads_and_writes_the_programs_own_pages_in_its_own_order() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let pages = pages(&pair, 5);
    let user = pair.guest.pins.map(pages.iter().copied());
    let (status, memory) = client.register(user, 5 * PAGE as u64 - 100).unwrap();
    assert_eq!((status, pair.guest.pins.held()), (0, vec![1]));

    let token = channel(&client, memory, 3 * PAGE as u64 + 512);
    let page = client.make(client.subdevice, 0xc661, &mut [0; 2]).unwrap();
    let doorbell = client.map(Place::Video, page, 65536).unwrap();
    // GP_GET is at 0x88 of a channel's USERD, GP_PUT at 0x8c, the doorbell at 0x90 of its page.
    let userd = pages[3] + 512;
    pair.guest.memory.write(userd + 0x8c, &7_u32.to_le_bytes());
    doorbell.mapping.write(0x90, token.into());
    let get = || {
        let mut word = [0; 4];
        pair.guest.memory.read(userd + 0x88, &mut word);
        u32::from_le_bytes(word)
    };
    assert!(wait_until(LONG, || get() == 7), "GP_GET is {}", get());
}

#[test]
fn a_registration_is_over_when_the_last_object_of_it_is_freed_and_the_guest_is_told_once() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let memory = register(&pair, &client, 3);
    let (status, duplicate) = client.duplicate(&client, memory).unwrap();
    assert_eq!(status, 0);
    let name = name(&client, 1);
    client.free(client.device, memory).unwrap();
    assert!(!is_released(&pair, name, SHORT), "its duplicate is left");
    client.free(client.device, duplicate).unwrap();
    assert!(is_released(&pair, name, LONG));
    assert!(!is_released(&pair, name, SHORT), "a second time");
    pair.guest.pins.number_next(1);
    register(&pair, &client, 1);
}

#[test]
fn closing_the_file_of_a_client_ends_its_registrations() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    register(&pair, &client, 1);
    register(&pair, &client, 2);
    client.ctl.close().unwrap();
    assert!(is_released(&pair, name(&client, 1), LONG));
    assert!(is_released(&pair, name(&client, 2), LONG));
}

#[test]
fn a_process_without_a_slot_hears_through_the_broker() {
    let pair = with(&[], Options { slots: 0, ..Options::default() });
    let client = client(&pair);
    let memory = register(&pair, &client, 2);
    client.free(client.device, memory).unwrap();
    assert!(is_released(&pair, name(&client, 1), LONG));
}

#[test]
fn memory_that_a_channel_is_made_over_is_kept_as_long_as_the_client() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let memory = register(&pair, &client, 1);
    channel(&client, memory, 0);
    client.free(client.device, memory).unwrap();
    assert!(!is_released(&pair, name(&client, 1), SHORT), "RM may still write to it");
    client.free(client.root, client.root).unwrap();
    assert!(is_released(&pair, name(&client, 1), LONG));
}

#[test]
fn what_a_driver_would_not_register_has_the_drivers_own_answer() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let user = pair.guest.pins.map(pages(&pair, 2));
    let size = 2 * PAGE as u64;
    for (user, bytes, status) in [
        (user + 16, size, NOT_SUPPORTED),
        (user, 0, INVALID_LIMIT),
        (user + 64 * size, size, INVALID_ADDRESS),
        (0, size, INVALID_ADDRESS),
        (user, (4 << 30) + 1, NO_MEMORY),
        (user, u64::MAX, NO_MEMORY),
    ] {
        assert_eq!(client.register(user, bytes).unwrap().0, status, "{user:#x} {bytes:#x}");
    }
    assert!(pair.guest.pins.held().is_empty());
    assert!(
        !is_released(&pair, name(&client, 1), SHORT),
        "the guest never thought that it was held"
    );
    assert_eq!(client.register(user, size).unwrap().0, 0);
}

#[test]
fn pages_that_are_not_the_guests_memory_are_refused() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let end = pair.guest.memory.size();
    for place in [end, end + PAGE, 1 << 40, usize::MAX - (1 << 31)] {
        let user = pair.guest.pins.map([place]);
        assert_eq!(client.register(user, PAGE as u64).unwrap().0, INVALID_ARGUMENT, "{place:#x}");
    }
    let user = pair.guest.pins.map([1]);
    assert_eq!(client.register(user, PAGE as u64).unwrap().0, INVALID_ARGUMENT, "half a page");
}

#[test]
fn a_number_that_is_in_use_is_refused_and_what_has_it_lives_on() {
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let memory = register(&pair, &client, 1);
    pair.guest.pins.number_next(1);
    let user = pair.guest.pins.map(pages(&pair, 1));
    assert_eq!(client.register(user, PAGE as u64).unwrap().0, INVALID_ARGUMENT);
    assert!(!is_released(&pair, name(&client, 1), SHORT));
    client.free(client.device, memory).unwrap();
    assert!(is_released(&pair, name(&client, 1), LONG));
}

#[test]
fn registered_memory_is_bounded_for_a_guest_and_for_each_process() {
    let pair = with(&["--limits=registered=48K,process-registered=32K"], Options::default());
    let (one, two) = (client(&pair), Client::new(&pair.guest.process(200)).unwrap());
    let memory = register(&pair, &one, 8);
    let fails = |client: &Client, count: usize| {
        let user = pair.guest.pins.map(pages(&pair, count));
        client.register(user, (count * PAGE) as u64).unwrap().0 == NO_MEMORY
    };
    assert!(fails(&one, 1));
    register(&pair, &two, 4);
    assert!(fails(&two, 1));
    assert_eq!(registered_bytes(&pair), 12 * PAGE as u64);
    one.free(one.device, memory).unwrap();
    assert!(wait_until(LONG, || !fails(&two, 1)));
}

#[test]
fn without_the_capability_there_is_no_such_call() {
    let pair = pair();
    let client = client(&pair);
    assert_eq!(refused(client.register(PROGRAM, PAGE as u64)), EINVAL);
}

#[test]
fn registered_memory_goes_to_no_file_and_so_to_no_other_process() {
    /// `NV0000_CTRL_CMD_OS_UNIX_EXPORT_OBJECT_TO_FD`: type 1 is an object of RM.
    const EXPORT: u32 = 0x3d05;
    let pair = with(&[], Options::default());
    let client = client(&pair);
    let memory = register(&pair, &client, 1);
    let file = client.ctl.process.open("nvidiactl").unwrap();
    let mut params = [1, client.device, client.device, memory, file.handle, 0];
    let bytes = zerocopy::IntoBytes::as_mut_bytes(&mut params);
    assert_eq!(client.control(client.root, EXPORT, bytes).unwrap(), NOT_SUPPORTED);
}

#[test]
fn of_a_worker_that_dies_all_registrations_are_over() {
    let pair = with(&[], Options::default());
    let lost = client(&pair);
    register(&pair, &lost, 1);
    let worker = pair.backend.worker_of(100).unwrap();
    kill(Pid::from_raw(worker), Signal::SIGKILL).unwrap();
    let all = wire::file_handle(wire::file_worker(lost.ctl.handle), 0);
    let event = pair.guest.mailbox.wait(all, LONG).expect("the guest is told");
    assert_eq!(event.kind.get(), wire::EVENT_LOST);
    pair.guest.pins.number_next(1);
    register(&pair, &Client::new(&pair.guest.process(200)).unwrap(), 1);
}

#[test]
fn registrations_that_come_and_go_in_four_threads_leave_nothing() {
    let pair = with(&[], Options::default());
    let process: Arc<Process> = pair.guest.process(100);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let client = Client::new(&process).unwrap();
                let user = pair.guest.pins.map(pages(&pair, 16));
                for round in 1..200 {
                    let (status, memory) = client.register(user, (round % 16 + 1) * 4096).unwrap();
                    assert_eq!(status, 0);
                    client.free(client.device, memory).unwrap();
                }
                client.ctl.close().unwrap();
            });
        }
    });
    assert!(wait_until(LONG, || registered_bytes(&pair) == 0));
}
