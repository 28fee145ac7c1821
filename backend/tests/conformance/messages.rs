//! Every message and its errors.

use nvguest_frontend::guest::{body_of, message};
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, Kind, NO_SLOT};
use nvguest_frontend::{Guest, Options};
use rmclient::Place;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::*;

/// A body of the right length for each kind of message, and of a reply to it.
fn lengths(kind: Kind) -> (usize, usize) {
    let reply = size_of::<wire::RespHeader>();
    match kind {
        Kind::Hello => (size_of::<wire::HelloReq>(), reply + size_of::<wire::HelloResp>()),
        Kind::Nodes | Kind::Schema => (size_of::<wire::ReadReq>(), reply),
        Kind::Open => (size_of::<wire::OpenReq>(), reply + size_of::<wire::OpenResp>()),
        Kind::Close | Kind::Arm => (0, reply),
        Kind::Ioctl => (size_of::<wire::IoctlReq>(), reply + size_of::<wire::IoctlResp>()),
        Kind::Map => (size_of::<wire::MapReq>(), reply + size_of::<wire::MapResp>()),
        Kind::Unmap => (size_of::<wire::UnmapReq>(), reply),
        Kind::Clock => (0, reply + size_of::<wire::ClockResp>()),
    }
}

fn hello(version: u32, flags: u32) -> Vec<u8> {
    let body = wire::HelloReq { version: version.into(), flags: flags.into() };
    ask(Kind::Hello, 0, body.as_bytes())
}

fn read(kind: Kind, offset: u32, size: u32) -> Vec<u8> {
    let body = wire::ReadReq { offset: offset.into(), size: size.into() };
    ask(kind, 0, body.as_bytes())
}

fn open(node: u32, flags: u32) -> Vec<u8> {
    let body = wire::OpenReq { node: node.into(), flags: flags.into() };
    ask(Kind::Open, 0, body.as_bytes())
}

/// A file of the caller's process, and where its requests go.
fn a_file(guest: &std::sync::Arc<Guest>) -> nvguest_frontend::File {
    guest.process(100).open("nvidiactl").unwrap()
}

#[test]
fn a_message_before_hello_is_refused() {
    let pair = silent_pair(Options::default());
    for kind in Kind::ALL.into_iter().filter(|&kind| kind != Kind::Hello) {
        let body = vec![0; lengths(kind).0];
        assert_eq!(errno(&pair.guest, &ask(kind, 0x1_0001, &body)), EPROTO, "{kind:?}");
    }
    assert!(pair.backend.workers().unwrap().is_empty(), "and starts no worker");
    pair.guest.probe().unwrap();
}

#[test]
fn hello_tells_what_the_host_has() {
    let pair = pair();
    let hello = pair.guest.probe().unwrap().hello;
    assert_eq!(hello.version.get(), u32::from(wire::VERSION));
    assert_eq!(hello.window_size, pair.guest.vmm.config.window_size);
    assert_eq!(hello.caps.get(), 0b111, "utility, graphics and video are the default");
    assert!(hello.driver.starts_with(b"580."));
    assert!(hello.max_request.get() >= 256 << 10 && hello.max_segments.get() >= 2);
    let again = pair.guest.hello(0).unwrap();
    assert!(again.epoch.get() > hello.epoch.get(), "each HELLO begins an epoch");
}

#[test]
fn hello_of_another_version_or_with_unknown_flags_is_refused() {
    let pair = silent_pair(Options::default());
    for version in [0, 2, u32::MAX] {
        assert_eq!(errno(&pair.guest, &hello(version, 0)), EPROTO);
    }
    for flags in [2, 3, 1 << 31] {
        assert_eq!(errno(&pair.guest, &hello(1, flags)), EINVAL, "{flags:#x}");
    }
    assert_eq!(errno(&pair.guest, &read(Kind::Nodes, 0, 8)), EPROTO, "nobody was greeted");
}

#[test]
fn a_type_that_no_message_has_is_refused() {
    let pair = pair();
    let file = a_file(&pair.guest);
    for number in [0, 11, 12, 255, 0x0100_0001, u32::MAX] {
        for slot in [NO_SLOT, file.slot] {
            let request = ask_number(number, file.handle, &[0; 16]);
            assert_eq!(errno_on(&pair.guest, slot, &request), EPROTO, "{number}");
        }
    }
    file.close().unwrap();
}

#[test]
fn a_request_shorter_than_its_header_is_refused() {
    let pair = pair();
    let file = a_file(&pair.guest);
    let whole = ask(Kind::Close, file.handle, &[]);
    for slot in [NO_SLOT, file.slot] {
        for cut in 0..whole.len() {
            assert_eq!(errno_on(&pair.guest, slot, &whole[..cut]), EPROTO, "{cut}");
        }
    }
    file.close().unwrap();
}

#[test]
fn a_length_that_is_not_the_requests_is_refused() {
    let pair = pair();
    let file = a_file(&pair.guest);
    for length in [0, 31, 33, 40, 1 << 20, u32::MAX] {
        let mut request = ask(Kind::Close, file.handle, &[]);
        request[8..12].copy_from_slice(&length.to_le_bytes());
        for slot in [NO_SLOT, file.slot] {
            assert_eq!(errno_on(&pair.guest, slot, &request), EPROTO, "{length}");
        }
    }
    file.close().unwrap();
}

#[test]
fn a_body_that_is_too_short_or_too_long_is_refused() {
    let pair = pair();
    let file = a_file(&pair.guest);
    for kind in Kind::ALL {
        let right = lengths(kind).0;
        let wrong = (0..right).chain([right + 1, right + 4, right + 8, right + 4096]);
        for length in wrong {
            let request = ask(kind, file.handle, &vec![0; length]);
            for slot in [NO_SLOT, file.slot] {
                let errno = errno_on(&pair.guest, slot, &request);
                assert_ne!(errno, 0, "{kind:?} of {length} bytes instead of {right}");
            }
        }
    }
    file.close().expect("none of them closed the file");
}

#[test]
fn reserved_fields_that_are_not_zero_are_refused() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let file = &client.ctl;
    for kind in Kind::ALL {
        let mut request = ask(kind, file.handle, &vec![0; lengths(kind).0]);
        request[12] = 1;
        for slot in [NO_SLOT, file.slot] {
            assert_eq!(errno_on(&pair.guest, slot, &request), EPROTO, "{kind:?}");
        }
    }
    let memory = client.memory(Place::System, 4096).unwrap();
    let mapped = client.map(Place::System, memory, 4096).unwrap();
    let one = 1.into();
    let map = wire::MapReq { length: 4096.into(), prot: one, ..Default::default() };
    for bad in [wire::MapReq { reserved: one, ..map }, wire::MapReq { prot: 4.into(), ..map }] {
        let request = ask(Kind::Map, mapped.file.handle, bad.as_bytes());
        assert_eq!(errno_on(&pair.guest, file.slot, &request), EINVAL, "{bad:?}");
    }
    let unmap = wire::UnmapReq { placement: mapped.mapping.placement.into(), reserved: one };
    let request = ask(Kind::Unmap, mapped.file.handle, unmap.as_bytes());
    assert_eq!(errno_on(&pair.guest, file.slot, &request), EINVAL);
    let call = wire::IoctlReq { reserved: one, ..Default::default() };
    let request = ask(Kind::Ioctl, file.handle, call.as_bytes());
    assert_eq!(errno_on(&pair.guest, file.slot, &request), EPROTO);
    for flags in [4, 0o100, 1 << 31] {
        assert_eq!(errno(&pair.guest, &open(0, flags)), EINVAL, "{flags:#o}");
    }
    mapped.close().unwrap();
}

#[test]
fn a_reply_that_does_not_fit_is_an_error_and_has_no_effect() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let file = &client.ctl;
    let memory = client.memory(Place::System, 4096).unwrap();
    let target = file.process.open("nvidiactl").unwrap();
    assert_eq!(client.arm(&target, memory, 4096).unwrap().0, 0);
    let map = wire::MapReq { length: 4096.into(), prot: 1.into(), ..Default::default() };
    let version = [
        wire::IoctlReq { cmd: 0xc048_46d2.into(), arg_len: 72.into(), ..Default::default() }
            .as_bytes(),
        &[0; 72],
    ]
    .concat();
    let requests = [
        (Kind::Hello, hello(1, 0), 0),
        (Kind::Open, open(0, 2), 0),
        (Kind::Map, ask(Kind::Map, target.handle, map.as_bytes()), 0),
        (Kind::Ioctl, ask(Kind::Ioctl, file.handle, &version), 72),
        (Kind::Clock, ask(Kind::Clock, 0, &[]), 0),
    ];
    let files = pair.backend.status().unwrap()["requests"].clone();
    for (kind, request, more) in requests {
        let global = matches!(kind, Kind::Hello | Kind::Clock);
        for slot in if global { vec![NO_SLOT] } else { vec![NO_SLOT, file.slot] } {
            for room in 0..lengths(kind).1 + more {
                let reply = pair.guest.request(slot, &request, room).unwrap();
                assert!(reply.len() <= room);
                if room >= size_of::<wire::RespHeader>() {
                    let refused = body_of(&reply).map(<[u8]>::to_vec);
                    assert_eq!(refused_errno(refused), EMSGSIZE, "{kind:?} in {room} bytes");
                }
            }
        }
    }
    assert_ne!(files, pair.backend.status().unwrap()["requests"], "they were counted");
    assert_eq!(pair.backend.status().unwrap()["placements"], 0);
    target.map(4096, true).unwrap();
}

fn refused_errno(outcome: nvguest_frontend::Result<Vec<u8>>) -> i32 {
    outcome.err().map_or(0, |error| error.errno())
}

#[test]
fn nodes_and_schema_come_in_chunks_of_any_size() {
    let pair = pair();
    let hello = pair.guest.probe().unwrap().hello;
    let lengths = [(Kind::Nodes, hello.nodes_len.get()), (Kind::Schema, hello.schema_len.get())];
    for (kind, length) in lengths {
        let room = size_of::<wire::RespHeader>() + length as usize;
        let get = |offset, size, room| {
            let reply = pair.guest.request(NO_SLOT, &read(kind, offset, size), room).unwrap();
            body_of(&reply).map(<[u8]>::to_vec)
        };
        let whole = get(0, length, room).unwrap();
        assert_eq!(whole.len(), length as usize);
        assert_eq!(get(0, u32::MAX, room).unwrap(), whole, "a size beyond the end is cut");
        for (offset, size) in [(0, 1), (1, 7), (length - 3, 3), (length - 3, 4096), (length, 8)] {
            let end = (offset as usize + size as usize).min(whole.len());
            assert_eq!(get(offset, size, room).unwrap(), whole[offset as usize..end]);
        }
        for offset in [length + 1, u32::MAX] {
            assert_eq!(refused(get(offset, 8, room)), EINVAL);
        }
        assert_eq!(refused(get(0, 64, 64)), EMSGSIZE);
    }
}

#[test]
fn the_nodes_are_whole_and_of_known_kinds() {
    let pair = pair();
    let nodes = &pair.guest.probe().unwrap().nodes;
    let names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    assert!(names.contains(&"nvidiactl") && names.contains(&"nvidia0"));
    assert!(!names.contains(&"nvidia-uvm"), "compute was not asked for");
    for node in nodes {
        let kind = node.header.kind.get();
        assert!((wire::NODE_CDEV..=wire::NODE_PCI).contains(&kind), "{}", node.name);
        assert_eq!(node.header.reserved, [0; 3], "{}", node.name);
    }
}

#[test]
fn only_a_device_can_be_opened() {
    let pair = pair();
    let nodes = &pair.guest.probe().unwrap().nodes;
    for (index, node) in (0..).zip(nodes) {
        let device = node.header.kind.get() == wire::NODE_CDEV;
        let expected = if device { 0 } else { ENXIO };
        assert_eq!(errno(&pair.guest, &open(index, 2)), expected, "{}", node.name);
    }
    for index in [nodes.len() as u32, 0x1_0000, u32::MAX] {
        assert_eq!(errno(&pair.guest, &open(index, 2)), ENXIO);
    }
}

#[test]
fn a_file_is_closed_once() {
    let pair = pair();
    let process = pair.guest.process(100);
    let (kept, closed) = (process.open("nvidiactl").unwrap(), process.open("nvidia0").unwrap());
    closed.close().unwrap();
    for kind in [Kind::Close, Kind::Ioctl, Kind::Map, Kind::Unmap, Kind::Arm] {
        let request = ask(kind, closed.handle, &vec![0; lengths(kind).0]);
        for slot in [NO_SLOT, kept.slot] {
            assert_eq!(errno_on(&pair.guest, slot, &request), EBADF, "{kind:?}");
        }
    }
    kept.close().unwrap();
}

#[test]
fn a_handle_that_never_was_names_no_file() {
    let pair = pair();
    let file = a_file(&pair.guest);
    let worker = u32::from(wire::file_worker(file.handle));
    for kind in [Kind::Close, Kind::Ioctl, Kind::Map, Kind::Unmap, Kind::Arm] {
        let body = vec![0; lengths(kind).0];
        // Of this worker, of another one, of none, and with the bit that no handle has.
        for handle in [worker << 16, worker << 16 | 0xfffe, 0x7fff_0001, 0, file.handle | 1 << 31] {
            let request = ask(kind, handle, &body);
            let on_slot = errno_on(&pair.guest, file.slot, &request);
            assert_eq!(on_slot, EBADF, "{kind:?} {handle:#x}");
            let on_broker = errno(&pair.guest, &request);
            assert!([EBADF, ENODEV].contains(&on_broker), "{kind:?} {handle:#x}: {on_broker}");
        }
    }
    file.close().unwrap();
}

#[test]
fn a_file_of_another_process_is_not_reached_through_a_slot() {
    let pair = pair();
    let (one, other) = (pair.guest.process(1), pair.guest.process(2));
    let (mine, theirs) = (one.open("nvidiactl").unwrap(), other.open("nvidiactl").unwrap());
    assert_ne!(mine.slot, theirs.slot);
    for kind in [Kind::Close, Kind::Ioctl, Kind::Map, Kind::Unmap, Kind::Arm] {
        let request = ask(kind, theirs.handle, &vec![0; lengths(kind).0]);
        assert_eq!(errno_on(&pair.guest, mine.slot, &request), EBADF, "{kind:?}");
    }
    // A descriptor that was passed on: its calls go to whoever opened it.
    assert_eq!(errno(&pair.guest, &ask(Kind::Arm, theirs.handle, &[])), 0);
    theirs.close().unwrap();
    mine.close().unwrap();
}

#[test]
fn messages_of_the_guest_as_a_whole_are_not_served_by_a_worker() {
    let pair = pair();
    let file = a_file(&pair.guest);
    for kind in [Kind::Hello, Kind::Nodes, Kind::Schema, Kind::Clock] {
        let request = ask(kind, 0, &vec![0; lengths(kind).0]);
        assert_ne!(errno_on(&pair.guest, file.slot, &request), 0, "{kind:?}");
    }
    file.close().unwrap();
}

#[test]
fn the_clock_is_the_hosts() {
    let pair = pair();
    let now = || nix::time::clock_gettime(nix::time::ClockId::CLOCK_MONOTONIC).unwrap();
    let ns = |time: nix::sys::time::TimeSpec| {
        time.tv_sec() as u64 * 1_000_000_000 + time.tv_nsec() as u64
    };
    let before = ns(now());
    let first = pair.guest.clock().unwrap();
    let second = pair.guest.clock().unwrap();
    let after = ns(now());
    let times = [first.monotonic_ns.get(), second.monotonic_ns.get()];
    assert!(before <= times[0] && times[0] <= times[1] && times[1] <= after);
    assert!(second.raw_ns.get() >= first.raw_ns.get());
    assert!(first.realtime_ns.get() > 1_600_000_000_000_000_000);
}

#[test]
fn the_longest_request_is_read_and_a_longer_one_refused() {
    let pair = pair();
    let file = a_file(&pair.guest);
    let max = pair.guest.probe().unwrap().hello.max_request.get() as usize;
    let body = max - size_of::<wire::ReqHeader>();
    for slot in [NO_SLOT, file.slot] {
        let longest = ask(Kind::Ioctl, file.handle, &vec![0; body]);
        let outcome = errno_on(&pair.guest, slot, &longest);
        assert!(outcome != 0 && outcome != EPROTO, "it is understood: {outcome}");
        let longer = ask(Kind::Ioctl, file.handle, &vec![0; body + 1]);
        assert_eq!(errno_on(&pair.guest, slot, &longer), EPROTO);
    }
    file.close().unwrap();
}

#[test]
fn a_process_has_so_many_files_and_no_more() {
    let pair = pair();
    let max = pair.guest.probe().unwrap().hello.max_files.get();
    let process = pair.guest.process(100);
    let files: Vec<_> = (0..max)
        .map(|count| process.open("nvidiactl").unwrap_or_else(|e| panic!("file {count}: {e}")))
        .collect();
    assert_eq!(refused(process.open("nvidiactl")), EMFILE);
    files[0].close().unwrap();
    let last = process.open("nvidiactl").unwrap();
    assert!(!files[1..].iter().any(|file| file.handle == last.handle));
    let other = pair.guest.process(101).open("nvidiactl").unwrap();
    other.close().unwrap();
}

#[test]
fn callers_that_differ_in_start_time_are_different_processes() {
    let pair = pair();
    let guest = &pair.guest;
    let first = nvguest_frontend::Process::new(std::sync::Arc::clone(guest), 5, 1);
    let second = nvguest_frontend::Process::new(std::sync::Arc::clone(guest), 5, 2);
    let (one, two) = (first.open("nvidiactl").unwrap(), second.open("nvidiactl").unwrap());
    assert_ne!(wire::file_worker(one.handle), wire::file_worker(two.handle));
    assert_eq!(pair.backend.workers().unwrap().len(), 2);
}

#[test]
fn a_header_and_nothing_else_closes_arms_and_asks_the_time() {
    let pair = pair();
    let file = a_file(&pair.guest);
    for kind in [Kind::Arm, Kind::Clock] {
        assert_eq!(errno(&pair.guest, &message(wire_header(kind, file.handle), &[])), 0);
    }
    let closing = pair.guest.request(file.slot, &ask(Kind::Close, file.handle, &[]), 64).unwrap();
    let (header, body) = wire::RespHeader::read_from_prefix(&closing).unwrap();
    assert_eq!((header.status.get(), header.len.get(), body.len()), (0, 8, 0));
}

fn wire_header(kind: Kind, file: u32) -> wire::ReqHeader {
    let file = if kind == Kind::Clock { 0 } else { file };
    nvguest_frontend::guest::header(kind, file, caller())
}
