//! What an IOCTL carries, and the files that it names.

use std::time::{Duration, Instant};

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::gather::ByHandle;
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, Kind, NO_SLOT};
use rmclient::abi::{class, control, escape};
use rmclient::Place;
use zerocopy::{FromBytes, IntoBytes};

use crate::common::*;

/// `_IOWR('F', nr, size)`.
fn cmd(nr: u32, size: usize) -> u32 {
    0xc000_4600 | u32::try_from(size).unwrap() << 16 | nr
}

/// The parts of an IOCTL, to be got wrong one by one.
#[derive(Clone)]
struct Parts {
    cmd: u32,
    arg_len: u32,
    lengths: Vec<u32>,
    fds: Vec<wire::FdRecord>,
    argument: Vec<u8>,
    data: Vec<u8>,
}

impl Parts {
    /// GPU_GET_ATTACHED_IDS: an argument of 32 bytes that reaches 128.
    fn control(client: &Client) -> Self {
        let argument = rmclient::abi::Control {
            client: client.root,
            object: client.root,
            command: control::ATTACHED_IDS,
            params: 0x7f00_0000_1000,
            params_size: 128,
            ..Default::default()
        };
        Self {
            cmd: cmd(escape::RM_CONTROL, 32),
            arg_len: 32,
            lengths: vec![128],
            fds: vec![],
            argument: argument.as_bytes().to_vec(),
            data: vec![0; 128],
        }
    }

    /// RM_MAP_MEMORY: an argument of 56 bytes that names a file.
    fn map(client: &Client, memory: u32, file: u32) -> Self {
        let argument = rmclient::abi::Map {
            client: client.root,
            device: client.subdevice,
            memory,
            length: 4096,
            fd: 5,
            ..Default::default()
        };
        let record = wire::FdRecord { segment: 0.into(), offset: 48.into(), file: file.into() };
        Self {
            cmd: cmd(escape::RM_MAP_MEMORY, 56),
            arg_len: 56,
            lengths: vec![],
            fds: vec![record],
            argument: argument.as_bytes().to_vec(),
            data: vec![],
        }
    }

    fn body(&self) -> Vec<u8> {
        let head = wire::IoctlReq {
            cmd: self.cmd.into(),
            arg_len: self.arg_len.into(),
            nsegs: u16::try_from(self.lengths.len()).unwrap().into(),
            nfds: u16::try_from(self.fds.len()).unwrap().into(),
            reserved: 0.into(),
        };
        let mut body = head.as_bytes().to_vec();
        for part in [self.lengths.as_bytes(), self.fds.as_bytes(), &self.argument, &self.data] {
            body.extend_from_slice(part);
            body.resize(wire::padded(body.len()), 0);
        }
        body
    }

    /// The errno, or RM's status at `at` of the argument that came back.
    fn send(&self, client: &Client, at: usize) -> Result<u32, i32> {
        let file = &client.ctl;
        let request = ask(Kind::Ioctl, file.handle, &self.body());
        let reply = file.process.guest.request(file.slot, &request, 4096).unwrap();
        let body = nvguest_frontend::guest::body_of(&reply).map_err(|error| error.errno())?;
        let (_, argument) = wire::IoctlResp::read_from_prefix(body).unwrap();
        Ok(u32::from_le_bytes(argument[at..at + 4].try_into().unwrap()))
    }
}

const CONTROL_STATUS: usize = 28;
const MAP_STATUS: usize = 40;

#[test]
fn a_call_gives_back_what_the_driver_wrote_and_the_callers_own_pointers() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let parts = Parts::control(&client);
    let request = ask(Kind::Ioctl, client.ctl.handle, &parts.body());
    let reply = pair.guest.request(client.ctl.slot, &request, 4096).unwrap();
    let body = nvguest_frontend::guest::body_of(&reply).unwrap();
    let (head, rest) = wire::IoctlResp::read_from_prefix(body).unwrap();
    assert_eq!((head.ret.get(), head.arg_len.get()), (0, 32));
    let (argument, params) = rest.split_at(32);
    assert_eq!(argument[..28], parts.argument[..28], "nothing but the status is RM's");
    assert_eq!(argument[28..], [0; 4]);
    assert_eq!(params.len(), 128);
    assert_eq!(params[..4], client.attached_ids().unwrap().to_le_bytes());
}

#[test]
fn a_segment_list_that_the_profile_does_not_make_is_refused() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let right = Parts::control(&client);
    assert_eq!(right.send(&client, CONTROL_STATUS), Ok(0));
    type Wrong = (&'static str, fn(&mut Parts));
    let wrongs: [Wrong; 13] = [
        ("no segment", |p| p.lengths.clear()),
        ("two segments", |p| p.lengths.push(128)),
        ("a shorter segment", |p| p.lengths[0] = 127),
        ("a longer segment", |p| p.lengths[0] = 129),
        ("a segment of 4 GiB", |p| p.lengths[0] = u32::MAX),
        ("seven segments", |p| p.lengths = vec![128; 7]),
        ("eight segments", |p| p.lengths = vec![128; 8]),
        ("fewer bytes than it says", |p| p.data.truncate(120)),
        ("more bytes than it says", |p| p.data.resize(136, 0)),
        ("a shorter argument", |p| p.arg_len = 24),
        ("a longer argument", |p| p.arg_len = 40),
        ("a file that it does not name", |p| p.fds = vec![wire::FdRecord::default()]),
        ("seventeen files", |p| p.fds = vec![wire::FdRecord::default(); 17]),
    ];
    for (what, wrong) in wrongs {
        let mut parts = right.clone();
        wrong(&mut parts);
        assert_ne!(parts.send(&client, CONTROL_STATUS), Ok(0), "{what}");
    }
    assert_eq!(right.send(&client, CONTROL_STATUS), Ok(0), "the right one still works");
}

#[test]
fn a_size_that_is_not_the_commands_is_refused_as_the_driver_would() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    for size in [0, 4, 124, 132, 4096] {
        let mut params = vec![0; size];
        let status = client.control(client.root, control::ATTACHED_IDS, &mut params).unwrap();
        assert_ne!(status, 0, "{size}");
    }
    // Of a size that no call of this number has.
    let mut parts = Parts::control(&client);
    for size in [0, 16, 31, 33, 64] {
        parts.cmd = cmd(escape::RM_CONTROL, size);
        parts.arg_len = u32::try_from(size).unwrap();
        parts.argument.resize(size, 0);
        assert_eq!(parts.send(&client, CONTROL_STATUS), Err(EINVAL), "{size}");
    }
}

#[test]
fn a_number_that_no_call_has_is_answered_as_the_driver_would() {
    let pair = pair();
    let process = pair.guest.process(100);
    let (ctl, card) = (process.open("nvidiactl").unwrap(), process.open("nvidia0").unwrap());
    for file in [&ctl, &card] {
        for nr in [0x7f, 0x00, 0xff] {
            let mut argument = [0_u8; 32];
            // SAFETY: nothing in it is followed.
            let outcome = unsafe { file.rm(nr, &mut argument, &ByHandle) };
            assert_eq!(refused(outcome), EINVAL, "{nr:#x}");
        }
    }
}

#[test]
fn a_control_or_class_that_the_guest_may_not_use_has_rms_own_status() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    // Set the clocks; a command that no release has.
    for command in [0x2080_1006, 0x2080_0fff] {
        assert_ne!(client.control(client.subdevice, command, &mut [0; 8]).unwrap(), 0);
    }
    let error = client.make(client.root, 0xdead, &mut [0; 8]).unwrap_err();
    assert!(error.to_string().contains("RM's status"), "{error}");
    let refusals = || pair.backend.status().unwrap()["refusals"].as_array().map_or(0, Vec::len);
    assert!(wait_until(LONG, || refusals() >= 3), "each is counted by name");
}

#[test]
fn a_file_record_in_the_wrong_place_or_of_the_wrong_file_is_refused() {
    let pair = pair();
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    let memory = client.memory(Place::System, 4096).unwrap();
    let right = process.open("nvidiactl").unwrap();
    let closed = process.open("nvidiactl").unwrap();
    closed.close().unwrap();
    let with = |change: &dyn Fn(&mut Vec<wire::FdRecord>)| {
        let mut parts = Parts::map(&client, memory, right.handle);
        change(&mut parts.fds);
        parts.send(&client, MAP_STATUS)
    };
    assert_eq!(with(&|fds| fds[0].file = closed.handle.into()), Err(EBADF));
    assert_eq!(with(&|fds| fds[0].file = (right.handle | 0x8000).into()), Err(EBADF));
    for (what, outcome) in [
        ("no record", with(&|fds| fds.clear())),
        ("two records", with(&|fds| fds.push(fds[0]))),
        ("another offset", with(&|fds| fds[0].offset = 44.into())),
        ("another segment", with(&|fds| fds[0].segment = 1.into())),
        ("no file", with(&|fds| fds[0].file = 0.into())),
        ("a bit that no handle has", with(&|fds| fds[0].file = (right.handle | 1 << 31).into())),
    ] {
        assert_ne!(outcome, Ok(0), "{what}");
    }
    assert_eq!(with(&|_| {}), Ok(0), "none of them armed the file");
}

#[test]
fn a_file_of_another_worker_in_a_parameter_is_fetched_from_it() {
    let pair = pair();
    let (one, other) = (pair.guest.process(1), pair.guest.process(2));
    let theirs = other.open("nvidiactl").unwrap();
    let card = other.open("nvidia0").unwrap();
    let mine = one.open("nvidia0").unwrap();
    let register = |handle: u32| {
        let mut argument = handle as i32;
        // SAFETY: there is no pointer in it.
        unsafe { mine.rm(escape::REGISTER_FD, &mut argument, &ByHandle) }
    };
    // The simulated card takes no files of other workers, and says so: it was asked.
    let _ = refused(register(theirs.handle));
    assert!(pair.backend.log().contains("is not this worker's own"), "{}", pair.backend.log());
    assert_eq!(refused(register(card.handle)), EINVAL, "of the wrong kind");
    theirs.close().unwrap();
    assert_eq!(refused(register(theirs.handle)), EBADF, "closed");
    let worker = pair.backend.worker_of(2).unwrap();
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(worker), nix::sys::signal::SIGKILL).unwrap();
    assert!(wait_until(LONG, || pair.backend.worker_of(2).is_none()));
    let gone = refused(register(theirs.handle));
    assert!([EBADF, ENODEV].contains(&gone), "of a dead worker: {gone}");
    assert!(mine.arm().is_ok());
}

/// A channel group whose PREEMPT takes as long as one likes.
pub fn slow(client: &Client) -> u32 {
    client.make(client.device, class::CHANNEL_GROUP, &mut [0; 20]).expect("a channel group")
}

pub fn preempt(time: Duration) -> [u8; 8] {
    let us = u32::try_from(time.as_micros()).unwrap();
    let mut params = [1, 1, 0, 0, 0, 0, 0, 0];
    params[4..].copy_from_slice(&us.to_le_bytes());
    params
}

#[test]
fn calls_of_one_file_keep_their_order() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let group = slow(&client);
    for slot in [NO_SLOT, client.ctl.slot] {
        let queue = pair.guest.queue(slot);
        let argument = rmclient::abi::Control {
            client: client.root,
            object: group,
            command: control::PREEMPT,
            params: 0x1000,
            params_size: 8,
            ..Default::default()
        };
        let parts = Parts {
            lengths: vec![8],
            argument: argument.as_bytes().to_vec(),
            data: preempt(Duration::from_millis(30)).to_vec(),
            ..Parts::control(&client)
        };
        let first = ask(Kind::Ioctl, client.ctl.handle, &parts.body());
        let first = queue.submit(&first, 4096).unwrap();
        let quick = ask(Kind::Ioctl, client.ctl.handle, &Parts::control(&client).body());
        let later: Vec<_> = (0..8).map(|_| queue.submit(&quick, 4096).unwrap()).collect();
        for token in later {
            queue.wait(token, &mut [0; 4096]).unwrap();
            assert!(queue.is_done(&first), "none overtakes the first");
        }
        queue.wait(first, &mut [0; 4096]).unwrap();
    }
}

#[test]
fn a_slow_call_of_one_process_holds_no_other() {
    let pair = pair();
    let slow_client = Client::new(&pair.guest.process(100)).unwrap();
    let other = Client::new(&pair.guest.process(101)).unwrap();
    let group = slow(&slow_client);
    std::thread::scope(|scope| {
        let long = scope.spawn(|| {
            let mut params = preempt(Duration::from_millis(300));
            slow_client.control(group, control::PREEMPT, &mut params)
        });
        let start = Instant::now();
        while !long.is_finished() {
            let before = Instant::now();
            other.attached_ids().unwrap();
            assert!(before.elapsed() < Duration::from_millis(250));
        }
        assert!(start.elapsed() < LONG);
        long.join().unwrap().unwrap();
    });
}

#[test]
fn a_slow_call_of_one_file_holds_no_other_file() {
    let pair = pair();
    let process = pair.guest.process(100);
    let client = Client::new(&process).unwrap();
    let file = process.open("nvidia0").unwrap();
    let group = slow(&client);
    // A control is taken for a quick one until it was slow.
    client.control(group, control::PREEMPT, &mut preempt(Duration::from_millis(5))).unwrap();
    for _ in 0..3 {
        std::thread::scope(|scope| {
            let long = scope.spawn(|| {
                let mut params = preempt(Duration::from_millis(800));
                client.control(group, control::PREEMPT, &mut params)
            });
            // Until it is under way, and while it is.
            while !long.is_finished() {
                let before = Instant::now();
                file.arm().unwrap();
                assert!(before.elapsed() < Duration::from_millis(400), "{:?}", before.elapsed());
                std::thread::yield_now();
            }
            long.join().unwrap().unwrap();
        });
    }
}

#[test]
fn many_threads_share_one_queue() {
    let pair = pair();
    let process = pair.guest.process(100);
    let clients: Vec<Client> = (0..32).map(|_| Client::new(&process).unwrap()).collect();
    std::thread::scope(|scope| {
        for client in &clients {
            scope.spawn(move || {
                for _ in 0..100 {
                    let memory = client.memory(Place::System, 65536).unwrap();
                    client.attached_ids().unwrap();
                    client.free(client.device, memory).unwrap();
                }
            });
        }
    });
    assert_eq!(pair.guest.strays(), 0);
}
