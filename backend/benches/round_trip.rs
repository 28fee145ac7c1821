//! What a request costs from the guest's side: real socket, real rings, a worker on the
//! simulated card, and no VM. Floors are measured in the same run.
//!
//! `cargo bench -p vhost-user-nvguest --bench round_trip` prints a table, then lets
//! criterion look at the same calls; each line is also appended as JSON to
//! `target/nvguest/round_trip.jsonl`.

use std::io::Write;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::Criterion;
use nix::sys::eventfd::{EfdFlags, EventFd};
use nvguest_frontend::backend::{held, wait_until, Backend};
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Guest, Options};
use rmclient::Place;

/// Another process that answers each ring of one eventfd with one of another.
struct Echo {
    child: Child,
    ping: EventFd,
    pong: EventFd,
}

impl Echo {
    fn start() -> Self {
        let eventfd = || EventFd::from_flags(EfdFlags::empty()).expect("an eventfd");
        let (ping, pong) = (eventfd(), eventfd());
        let fds = [ping.as_raw_fd(), pong.as_raw_fd()].map(|fd| fd.to_string());
        let exe = std::env::current_exe().expect("our own binary");
        let child = Command::new(exe).arg("--echo").args(fds).spawn().expect("another process");
        Self { child, ping, pong }
    }

    fn ring(&self) {
        self.ping.write(1).expect("a ring");
        self.pong.read().expect("an answer");
    }

    fn serve(fds: &[String]) {
        let eventfd = |at: usize| {
            let fd = fds[at].parse().expect("a descriptor");
            // SAFETY: our parent left it open for us, and nobody else here uses it.
            unsafe { OwnedFd::from_raw_fd(fd) }
        };
        let (ping, pong) = (eventfd(0), eventfd(1));
        let mut count = [0; 8];
        while nix::unistd::read(&ping, &mut count).is_ok() {
            if nix::unistd::write(&pong, &1_u64.to_ne_bytes()).is_err() {
                return;
            }
        }
    }
}

impl Drop for Echo {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// What was measured of one thing.
struct Line {
    what: &'static str,
    p50: Duration,
    p99: Duration,
}

fn measure(what: &'static str, count: usize, mut call: impl FnMut()) -> Line {
    for _ in 0..count / 10 {
        call();
    }
    let mut times: Vec<Duration> = (0..count)
        .map(|_| {
            let start = Instant::now();
            call();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    Line { what, p50: times[count / 2], p99: times[count * 99 / 100] }
}

fn backend(poll_us: &str) -> Backend {
    // Elsewhere than where it was built, NVGUEST_BACKEND says where the backend is.
    let built = env!("CARGO_BIN_EXE_vhost-user-nvguest");
    let binary = std::env::var_os("NVGUEST_BACKEND").unwrap_or_else(|| built.into());
    Backend::with(binary, &["--poll-us", poll_us], &[]).expect("a backend")
}

fn guest(backend: &Backend, poll: Duration) -> Arc<Guest> {
    let options = Options { poll, ..Options::default() };
    let guest = Guest::connect(&backend.socket(), options).expect("a device");
    guest.probe().expect("probing");
    guest
}

fn output() -> std::fs::File {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../target")),
        PathBuf::from,
    );
    let folder = target.join("nvguest");
    std::fs::create_dir_all(&folder).expect("a folder for results");
    let path = folder.join("round_trip.jsonl");
    let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
    file.expect("a file for results")
}

/// Prints a line, how it compares with the floor, and keeps it.
fn report(out: &mut std::fs::File, floor: Option<&Line>, line: &Line) {
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    let times = floor.map(|floor| us(line.p50) / us(floor.p50));
    let ratio = times.map_or(String::new(), |times| format!("{times:5.2} x floor"));
    println!("{:44} p50 {:9.2} us  p99 {:9.2} us  {ratio}", line.what, us(line.p50), us(line.p99));
    let json = serde_json::json!({
        "what": line.what, "p50_us": us(line.p50), "p99_us": us(line.p99), "times_floor": times,
    });
    writeln!(out, "{json}").expect("a line of results");
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if arguments.get(1).is_some_and(|argument| argument == "--echo") {
        return Echo::serve(&arguments[2..]);
    }
    let mut out = output();
    let echo = Echo::start();
    let floor = measure("floor: eventfd ping-pong of two processes", 20_000, || echo.ring());
    report(&mut out, None, &floor);

    let (sleeping, polling) = (backend("0"), backend("50"));
    let sleepy = Client::new(&guest(&sleeping, Duration::ZERO).process(1)).expect("a client");
    let busy_guest = guest(&polling, Duration::from_millis(1));
    let busy = Client::new(&busy_guest.process(1)).expect("a client");
    let ids = |client: &Client| assert!(client.attached_ids().is_ok());
    let slept = measure("flat control, both sides sleeping", 20_000, || ids(&sleepy));
    report(&mut out, Some(&floor), &slept);
    let polled = measure("flat control, both sides busy-polling", 50_000, || ids(&busy));
    report(&mut out, Some(&floor), &polled);

    let file = measure("open and close", 5_000, || {
        busy.ctl.process.open("nvidiactl").expect("a file").close().expect("closing it");
    });
    report(&mut out, Some(&floor), &file);
    let memory = busy.memory(Place::System, 65536).expect("memory");
    let mapped = measure("open, arm, map, unmap, close of 64 KiB", 1_000, || {
        busy.map(Place::System, memory, 65536).expect("a map").close().expect("unmapping");
    });
    report(&mut out, Some(&floor), &mapped);
    let (ready, event) = busy.event().expect("an event");
    let woken = measure("arm, event, wake", 5_000, || {
        ready.arm().expect("arming");
        busy.fire(event).expect("an event");
        let record = busy_guest.mailbox.wait(ready.handle, Duration::from_secs(10));
        assert!(record.is_some(), "no event came");
    });
    report(&mut out, Some(&floor), &woken);

    let mut tgid = 1000;
    let started = measure("worker start: first open of a process", 100, || {
        tgid += 1;
        busy_guest.process(tgid).open("nvidiactl").expect("a file");
    });
    report(&mut out, None, &started);
    sizes(&mut out);

    let mut criterion = Criterion::default().configure_from_args();
    criterion.bench_function("eventfd ping-pong", |b| b.iter(|| echo.ring()));
    criterion.bench_function("flat control, sleeping", |b| b.iter(|| ids(&sleepy)));
    criterion.bench_function("flat control, busy-polling", |b| b.iter(|| ids(&busy)));
    criterion.final_summary();
}

/// Resident memory of an idle broker, and of a worker that has answered.
fn sizes(out: &mut std::fs::File) {
    let backend = backend("20");
    let idle = backend.held().expect("the broker's size").rss_kib;
    let guest = guest(&backend, Duration::ZERO);
    let client = Client::new(&guest.process(1)).expect("a client");
    client.attached_ids().expect("an answer");
    assert!(wait_until(Duration::from_secs(10), || backend.worker_of(1).is_some()));
    let worker = held(backend.worker_of(1).expect("a worker")).expect("its size").rss_kib;
    let serving = backend.held().expect("the broker's size").rss_kib;
    for (what, kib) in
        [("broker, waiting for a VMM", idle), ("broker, with a guest", serving), ("worker", worker)]
    {
        println!("{what:44} rss {kib:9} KiB");
        let json = serde_json::json!({"what": what, "rss_kib": kib});
        writeln!(out, "{json}").expect("a line of results");
    }
}
