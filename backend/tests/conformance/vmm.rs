//! What the VMM sets up and takes away.

use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::{is_alive, wait_until, Backend};
use nvguest_frontend::memory::Memory;
use nvguest_frontend::rm::Client;
use nvguest_frontend::wire::{self, Kind, NO_SLOT};
use nvguest_frontend::{Guest, Options};
use rmclient::abi::{class, control};
use rmclient::Place;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserProtocolFeatures};
use vhost::vhost_user::VhostUserFrontend;
use zerocopy::IntoBytes;

use crate::common::*;

#[test]
fn the_configuration_says_who_we_are() {
    let pair = silent_pair(Options::default());
    let config = pair.guest.vmm.config;
    assert_eq!((config.magic.get(), config.version.get()), (wire::MAGIC, wire::VERSION));
    assert_eq!((config.slots.get(), config.window_size.get()), (16, 64 << 30));
    assert!(config.reserved.iter().all(|word| word.get() == 0));
    assert_eq!(pair.guest.vmm.queues, 2 + 2 * 16);
    assert_eq!(pair.guest.window.as_ref().unwrap().size(), 64 << 30);
    // Some VMMs read byte by byte, and end if they get more or less.
    let mut frontend = pair.guest.vmm.frontend();
    let whole = config.as_bytes();
    for (offset, size) in [(0, 1), (3, 5), (60, 4), (63, 1), (0, 64)] {
        let flags = VhostUserConfigFlags::empty();
        let (_, bytes) = frontend.get_config(offset, size, flags, &vec![0; size as usize]).unwrap();
        assert_eq!(bytes, whole[offset as usize..(offset + size) as usize]);
    }
}

#[test]
fn a_frontend_that_lacks_a_feature_is_refused_with_its_name() {
    for (feature, name) in [
        (VhostUserProtocolFeatures::CONFIG, "CONFIG"),
        (VhostUserProtocolFeatures::MQ, "MQ"),
        (VhostUserProtocolFeatures::BACKEND_REQ, "BACKEND_REQ"),
        (VhostUserProtocolFeatures::BACKEND_SEND_FD, "BACKEND_SEND_FD"),
    ] {
        let mut backend = start();
        let options = Options { lacking: feature, ..Options::default() };
        assert!(Guest::connect(&backend.socket(), options).is_err(), "{name}");
        let status = backend.ended(LONG).expect("the backend ends");
        assert_eq!(status.code(), Some(1));
        let log = backend.log();
        assert!(log.contains(&format!("feature {name} ")) && log.contains("QEMU"), "{log}");
    }
}

#[test]
fn a_frontend_that_cannot_map_is_served_without_a_window() {
    for lacking in [
        VhostUserProtocolFeatures::SHMEM,
        VhostUserProtocolFeatures::SHARED_OBJECT,
        VhostUserProtocolFeatures::REPLY_ACK,
    ] {
        let pair = pair_with(Options { lacking, ..Options::default() });
        assert_eq!(pair.guest.vmm.config.window_size.get(), 0, "{lacking:?}");
        let client = Client::new(&pair.guest.process(100)).unwrap();
        client.attached_ids().unwrap();
        let memory = client.memory(Place::System, 4096).unwrap();
        let file = client.ctl.process.open("nvidiactl").unwrap();
        assert_eq!(client.arm(&file, memory, 4096).unwrap().0, 0);
        let start = Instant::now();
        let errno = refused(file.map(4096, true));
        assert!([ENODEV, nix::libc::ENOMEM].contains(&errno), "{errno}");
        assert!(start.elapsed() < LONG / 2);
        assert!(pair.backend.log().contains("SHMEM"), "it says so: {}", pair.backend.log());
        file.close().unwrap();
    }
}

/// All that a backend leaves is nothing.
fn leaves_nothing(backend: &Backend, workers: &[i32]) {
    assert!(!backend.socket().exists(), "the socket is still there");
    assert!(!backend.socket().with_file_name("admin").exists(), "the admin socket too");
    assert!(wait_until(LONG, || !workers.iter().any(|&pid| is_alive(pid))), "workers live on");
}

/// A guest in the midst of its work.
fn busy() -> (Pair, Vec<i32>) {
    let pair = pair();
    for tgid in 0..3 {
        let client = Client::new(&pair.guest.process(tgid)).unwrap();
        let memory = client.memory(Place::Video, 65536).unwrap();
        client.map(Place::Video, memory, 65536).unwrap();
    }
    let workers = pair.backend.workers().unwrap().iter().map(|worker| worker.1).collect();
    (pair, workers)
}

#[test]
fn when_the_frontend_hangs_up_the_backend_ends_well() {
    let (Pair { guest, mut backend }, workers) = busy();
    guest.hang_up();
    let status = backend.ended(LONG).expect("the backend ends");
    assert_eq!(status.code(), Some(0), "{}", backend.log());
    leaves_nothing(&backend, &workers);
}

#[test]
fn a_signal_ends_the_backend_promptly() {
    let (Pair { guest, mut backend }, workers) = busy();
    let before = Instant::now();
    backend.signal(Signal::SIGTERM).unwrap();
    let status = backend.ended(LONG).expect("the backend ends");
    assert_eq!(status.code(), Some(0));
    assert!(before.elapsed() < Duration::from_secs(2), "{:?}", before.elapsed());
    leaves_nothing(&backend, &workers);
    drop(guest);
    let mut waiting = start();
    waiting.signal(Signal::SIGINT).unwrap();
    assert_eq!(waiting.ended(LONG).and_then(|status| status.code()), Some(0));
    leaves_nothing(&waiting, &[]);
}

#[test]
fn workers_do_not_outlive_a_broker_that_is_killed() {
    let (pair, workers) = busy();
    pair.backend.signal(Signal::SIGKILL).unwrap();
    assert!(wait_until(LONG, || !workers.iter().any(|&pid| is_alive(pid))), "workers live on");
}

#[test]
fn a_second_backend_on_the_same_socket_leaves_the_first_alone() {
    let backend = start();
    let second = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-user-nvguest"))
        .args(nix::unistd::geteuid().is_root().then_some("--allow-root"))
        .args(["--host=sim", "--socket-path"])
        .arg(backend.socket())
        .output()
        .unwrap();
    assert_eq!(second.status.code(), Some(1));
    let log = String::from_utf8_lossy(&second.stderr).into_owned();
    assert!(log.contains("is served by another process"), "{log}");
    let guest = Guest::connect(&backend.socket(), Options::default()).unwrap();
    guest.probe().unwrap();
}

/// The processes that a process has started.
fn children(pid: i32) -> Vec<Pid> {
    let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten();
    let of = |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children"));
    let lists: Vec<String> = tasks.filter_map(|task| of(task).ok()).collect();
    let pids = lists.iter().flat_map(|list| list.split_whitespace());
    pids.map(|pid| Pid::from_raw(pid.parse().unwrap())).collect()
}

#[test]
fn a_socket_that_a_killed_backend_left_is_taken_over() {
    let mut first = start();
    // Its starter would remove the socket.
    assert!(wait_until(LONG, || !children(first.pid()).is_empty()));
    children(first.pid()).into_iter().for_each(|pid| kill(pid, Signal::SIGKILL).unwrap());
    first.signal(Signal::SIGKILL).unwrap();
    first.ended(LONG).unwrap();
    assert!(first.socket().exists());
    let mut second = std::process::Command::new(env!("CARGO_BIN_EXE_vhost-user-nvguest"))
        .args(nix::unistd::geteuid().is_root().then_some("--allow-root"))
        .args(["--host=sim", "--socket-path"])
        .arg(first.socket())
        .spawn()
        .unwrap();
    let mut guest = None;
    let connected = wait_until(LONG, || {
        guest = Guest::connect(&first.socket(), Options::default()).ok();
        guest.is_some()
    });
    assert!(connected, "nobody listens");
    guest.unwrap().probe().unwrap();
    second.kill().unwrap();
    second.wait().unwrap();
}

/// Takes a pair of queues back and starts them again, as QEMU does for a pause.
fn pause(guest: &Guest, slot: u32, meanwhile: impl FnOnce()) {
    let index = slot.checked_add(1).map_or(0, |slot| 2 * slot as usize);
    let control = guest.vmm.stop_queue(index).unwrap();
    let events = guest.vmm.stop_queue(index + 1).unwrap();
    meanwhile();
    guest.vmm.start_queue(index, guest.queue(slot).ring(), control).unwrap();
    guest.vmm.start_queue(index + 1, guest.event_queue(slot).ring(), events).unwrap();
}

#[test]
fn queues_that_are_stopped_and_started_go_on_where_they_were() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let (file, event) = client.event().unwrap();
    for _ in 0..20 {
        for slot in [client.ctl.slot, NO_SLOT] {
            pause(&pair.guest, slot, || {});
            client.attached_ids().unwrap();
            pair.guest.clock().unwrap();
            file.arm().unwrap();
            client.fire(event).unwrap();
            pair.guest.mailbox.wait(file.handle, LONG).expect("an event");
        }
    }
    assert_eq!(pair.guest.strays(), 0);
}

#[test]
fn what_is_asked_while_a_queue_is_stopped_is_answered_when_it_starts() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    for slot in [client.ctl.slot, NO_SLOT] {
        let queue = pair.guest.queue(slot);
        let mut token = None;
        pause(&pair.guest, slot, || {
            let request = ask(Kind::Arm, client.ctl.handle, &[]);
            let asked = queue.submit(&request, 8).unwrap();
            std::thread::sleep(SHORT);
            assert!(!queue.is_done(&asked), "nobody serves a stopped queue");
            token = Some(asked);
        });
        queue.wait(token.unwrap(), &mut [0; 8]).unwrap();
    }
}

#[test]
fn what_is_under_way_when_a_queue_is_stopped_is_answered() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let group = client.make(client.device, class::CHANNEL_GROUP, &mut [0; 20]).unwrap();
    let count = || pair.backend.status().unwrap()["requests"]["ioctl"].as_u64();
    for slot in [client.ctl.slot, NO_SLOT] {
        let before = count();
        std::thread::scope(|scope| {
            let call = scope.spawn(|| {
                // 300 ms.
                let mut params = [1, 1, 0, 0, 0xe0, 0x93, 4, 0];
                client.on_slot(slot).control(group, control::PREEMPT, &mut params)
            });
            assert!(wait_until(LONG, || count() > before), "it is under way");
            pause(&pair.guest, slot, || {});
            call.join().unwrap().expect("it is answered");
        });
    }
    assert_eq!(pair.guest.strays(), 0);
}

#[test]
fn a_queue_is_taken_back_while_a_map_is_under_way() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::System, 4096).unwrap();
    let worker = pair.backend.worker_of(100);
    std::thread::scope(|scope| {
        let maps = scope.spawn(|| {
            for _ in 0..200 {
                client.map(Place::System, memory, 4096).unwrap().close().unwrap();
            }
        });
        while !maps.is_finished() {
            let start = Instant::now();
            pause(&pair.guest, client.ctl.slot, || {});
            assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        }
        maps.join().unwrap();
    });
    assert_eq!(pair.backend.worker_of(100), worker, "the worker lives on");
}

#[test]
fn guest_memory_that_grows_interrupts_nothing() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let more = Memory::create(0, 1 << 20).unwrap();
    std::thread::scope(|scope| {
        let calls = scope.spawn(|| {
            for _ in 0..3000 {
                client.attached_ids().unwrap();
                pair.guest.clock().unwrap();
            }
        });
        let mut round = 0;
        while !calls.is_finished() {
            round += 1;
            if round % 2 == 0 {
                pair.guest.vmm.plug(&pair.guest.memory, &more).unwrap();
            } else {
                pair.guest.vmm.unplug(&pair.guest.memory).unwrap();
            }
            std::thread::sleep(SHORT / 20);
        }
        calls.join().unwrap();
    });
    assert_eq!(pair.guest.strays(), 0);
}

#[test]
fn interrupts_go_where_the_vmm_last_said() {
    let options = Options { poll: Duration::ZERO, ..Options::default() };
    let pair = pair_with(options);
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let elsewhere = vmm_sys_util::eventfd::EventFd::new(nix::libc::EFD_NONBLOCK).unwrap();
    for slot in [client.ctl.slot, NO_SLOT] {
        let index = slot.checked_add(1).map_or(0, |slot| 2 * slot as usize);
        let frontend = pair.guest.vmm.frontend();
        let queue = pair.guest.queue(slot);
        use vhost::VhostBackend;
        for _ in 0..50 {
            // As QEMU does when the guest masks the interrupt, and unmasks it.
            frontend.set_vring_call(index, &elsewhere).unwrap();
            let request = ask(Kind::Arm, client.ctl.handle, &[]);
            let token = queue.submit(&request, 8).unwrap();
            frontend.set_vring_call(index, &queue.ring().call).unwrap();
            if elsewhere.read().is_ok() {
                queue.ring().call.write(1).unwrap();
            }
            queue.wait(token, &mut [0; 8]).unwrap();
        }
    }
}
