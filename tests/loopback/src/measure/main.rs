//! `loopback-measure`: what calls of the driver cost a program, in microseconds. It makes them
//! through rmprobe's client, so it runs natively, as a guest without a VM, and in a guest.
//! `nvguest-loopback --bench` runs it in each way; alone it prints a JSON object a line.

mod event;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use nix::libc;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use serde_json::json;
use zerocopy::IntoBytes;

use event::Event;
use rmclient::{Place, Result, Session};

/// `NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS`: 128 bytes, and nothing to wait for.
const ATTACHED_IDS: u32 = 0x201;

/// Between calls of the card's firmware, in microseconds.
const PAUSES: [u64; 6] = [0, 2, 5, 10, 20, 50];

/// Times of one kind of call.
struct Times(Vec<Duration>);

impl Times {
    fn of(count: u64, mut once: impl FnMut() -> Result<Duration>) -> Result<Self> {
        for _ in 0..count.min(50) / 5 {
            once()?;
        }
        (0..count).map(|_| once()).collect::<Result<_>>().map(Self)
    }

    fn tell(mut self, what: &str) {
        self.0.sort_unstable();
        let us = |time: Duration| time.as_nanos() as f64 / 1e3;
        let at = |part: f64| us(self.0[((self.0.len() - 1) as f64 * part) as usize]);
        let (p50, p99, count) = (at(0.5), at(0.99), self.0.len());
        println!("{}", json!({"what": what, "p50_us": p50, "p99_us": p99, "count": count}));
    }
}

fn report(what: &str, times: Result<Times>) {
    match times {
        Ok(times) => times.tell(what),
        Err(failure) => println!("{}", json!({"what": what, "error": failure.to_string()})),
    }
}

fn timed<T>(body: impl FnOnce() -> Result<T>) -> Result<Duration> {
    let start = Instant::now();
    body()?;
    Ok(start.elapsed())
}

/// The least that an ioctl costs: one that a pipe answers.
fn direct_ioctl(count: u64) -> Result<Times> {
    let (pipe, _other) = nix::unistd::pipe().map_err(|e| rmclient::io("a pipe")(e.into()))?;
    Times::of(count, || {
        timed(|| {
            let mut bytes: libc::c_int = 0;
            // SAFETY: FIONREAD writes an int.
            unsafe { libc::ioctl(pipe.as_raw_fd(), libc::FIONREAD, &raw mut bytes) };
            Ok(())
        })
    })
}

/// The least that a map costs: one of a memory file, its first page touched.
fn direct_map(count: u64, length: usize) -> Result<Times> {
    let fd = nix::sys::memfd::memfd_create("floor", nix::sys::memfd::MFdFlags::MFD_CLOEXEC);
    let file = File::from(fd.map_err(|e| rmclient::io("a memory file")(e.into()))?);
    file.set_len(length as u64).map_err(rmclient::io("a memory file"))?;
    Times::of(count, || {
        timed(|| {
            let mapping =
                rmclient::sys::Mapping::new(&file, length).map_err(rmclient::io("mapping"))?;
            mapping.write(0, 1);
            Ok(())
        })
    })
}

fn flat_control(session: &Session, count: u64) -> Result<Times> {
    Times::of(count, || {
        timed(|| {
            let mut params = [0_u32; 32];
            let client = &session.client;
            client.control(client.handle, ATTACHED_IDS, params.as_mut_bytes()).ok("ATTACHED_IDS")
        })
    })
}

/// A control that the card's firmware answers, after a pause in which the caller works: firmware
/// that was asked a moment ago answers sooner.
fn firmware(session: &Session, count: u64, pause: Duration) -> Result<Times> {
    /// `GF100_ZBC_CLEAR`
    const CLASS: u32 = 0x9096;
    /// `NV9096_CTRL_CMD_GET_ZBC_CLEAR_TABLE_ENTRY`
    const GET_ENTRY: u32 = 0x9096_0107;
    /// Its `index` and `tableType`: the first of the table of colours.
    const FIRST: [(usize, u8); 2] = [(44, 1), (52, 1)];
    let client = &session.client;
    let table = client.alloc(session.subdevice, CLASS, None)?;
    let times = Times::of(count, || {
        let start = Instant::now();
        while start.elapsed() < pause {
            std::hint::spin_loop();
        }
        timed(|| {
            let mut params = [0_u8; 56];
            FIRST.iter().for_each(|&(field, value)| params[field] = value);
            client.control(table, GET_ENTRY, &mut params).ok("GET_ZBC_CLEAR_TABLE_ENTRY")
        })
    });
    client.free(session.subdevice, table).ok("freeing it")?;
    times
}

fn open_close(count: u64) -> Result<Times> {
    Times::of(count, || timed(|| rmclient::open(rmclient::CONTROL_NODE)))
}

/// RM_MAP_MEMORY, mmap, a write, munmap, RM_UNMAP_MEMORY; the file is opened and closed outside
/// of the time.
fn map_unmap(session: &Session, place: Place, length: u64, count: u64) -> Result<Times> {
    let memory = session.memory(place, length)?;
    let times = Times::of(count, || {
        let file = session.map_file(place)?;
        timed(|| {
            let client = &session.client;
            let range = (0, length);
            let (outcome, armed) = client.arm(session.subdevice, memory, range, file.as_raw_fd());
            outcome.ok("RM_MAP_MEMORY")?;
            let mapping = rmclient::sys::Mapping::new(&file, length as usize)
                .map_err(rmclient::io("mapping"))?;
            mapping.write(0, 1);
            drop(mapping);
            client.unmap(session.subdevice, memory, armed.linear).ok("RM_UNMAP_MEMORY")
        })
    });
    session.client.free(session.device, memory).ok("freeing memory")?;
    times
}

fn wait(fd: BorrowedFd<'_>, timeout: PollTimeout) -> bool {
    let mut fds = [PollFd::new(fd, PollFlags::POLLIN | PollFlags::POLLPRI)];
    matches!(poll(&mut fds, timeout), Ok(1))
}

/// From just before the call that fires an OS event to the wake of a thread that sleeps in poll.
fn event_to_wake(session: &Session, count: u64) -> Result<Times> {
    let event = Event::new(session)?;
    let (woken, wakes) = mpsc::channel();
    let (more, rounds) = mpsc::channel::<()>();
    std::thread::scope(|scope| {
        let file = &event.file;
        scope.spawn(move || {
            while rounds.recv().is_ok() {
                let seen = wait(file.as_fd(), PollTimeout::from(5000_u16));
                if woken.send((seen, Instant::now())).is_err() {
                    return;
                }
            }
        });
        let times = Times::of(count, || {
            let _ = more.send(());
            // Until the other sleeps.
            std::thread::sleep(Duration::from_micros(300));
            let start = Instant::now();
            event.fire(session)?;
            match wakes.recv() {
                Ok((true, end)) => Ok(end.saturating_duration_since(start)),
                _ => rmclient::wrong("nobody was woken"),
            }
        });
        drop(more);
        times
    })
}

/// Both ways between two processes by eventfds: what a kick and a call cost at least. The
/// other side works for so long before it answers, and both rest before each round: who sleeps
/// longer is woken later.
fn ping_pong(count: u64, work: Duration, rest: Duration) -> Result<Times> {
    use nix::sys::eventfd::EventFd;
    let answer = |pong: &EventFd| {
        let start = Instant::now();
        while start.elapsed() < work {
            std::hint::spin_loop();
        }
        pong.write(1).is_ok()
    };
    let eventfd = || EventFd::new().map_err(|e| rmclient::io("an eventfd")(e.into()));
    let (ping, pong) = (eventfd()?, eventfd()?);
    // SAFETY: this program has one thread yet.
    let child = match unsafe { nix::unistd::fork() } {
        Ok(nix::unistd::ForkResult::Child) => {
            while ping.read().is_ok_and(|count| count < 1000) && answer(&pong) {}
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(0) }
        }
        Ok(nix::unistd::ForkResult::Parent { child }) => child,
        Err(errno) => return Err(rmclient::io("fork")(errno.into())),
    };
    let times = Times::of(count, || {
        if !rest.is_zero() {
            std::thread::sleep(rest);
        }
        timed(|| {
            let rung = ping.write(1).and_then(|_| pong.read());
            rung.map(drop).map_err(|e| rmclient::io("a ring")(e.into()))
        })
    });
    let _ = ping.write(1000);
    let _ = nix::sys::wait::waitpid(child, None);
    times
}

fn floors(scale: impl Fn(u64) -> u64) {
    const NONE: Duration = Duration::ZERO;
    report("eventfd ping-pong", ping_pong(scale(20_000), NONE, NONE));
    report("ping-pong, 4 us of work", ping_pong(scale(20_000), Duration::from_micros(4), NONE));
    report("ping-pong, 300 us rest", ping_pong(scale(2000), NONE, Duration::from_micros(300)));
    report("direct ioctl", direct_ioctl(scale(20_000)));
    report("direct mmap 64 KiB", direct_map(scale(2000), 64 << 10));
    report("direct mmap 64 MiB", direct_map(scale(500), 64 << 20));
}

fn calls(session: &Session, scale: impl Fn(u64) -> u64) {
    report("flat control", flat_control(session, scale(20_000)));
    for us in PAUSES {
        let times = firmware(session, scale(500), Duration::from_micros(us));
        report(&format!("firmware, {us} us pause"), times);
    }
    report("open + close", open_close(scale(2000)));
    report("map + unmap 64 KiB", map_unmap(session, Place::Video, 64 << 10, scale(500)));
    let large = map_unmap(session, Place::Video, 64 << 20, scale(200));
    match large {
        Ok(times) => times.tell("map + unmap 64 MiB"),
        // The simulated card has no more in all.
        Err(_) => {
            report("map + unmap 16 MiB", map_unmap(session, Place::Video, 16 << 20, scale(200)))
        }
    }
    report("event to wake", event_to_wake(session, scale(1000)));
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let what = arguments.next().unwrap_or_else(|| "calls".into());
    let percent: u64 = arguments.next().and_then(|text| text.parse().ok()).unwrap_or(100);
    let scale = |count: u64| (count * percent / 100).max(10);
    match what.as_str() {
        "floors" => floors(scale),
        _ => match rmclient::find_card(None) {
            Ok(card) => match (what.as_str(), Session::open(&card)) {
                ("control", Ok(session)) => {
                    report("flat control", flat_control(&session, scale(20_000)))
                }
                ("event", Ok(session)) => {
                    report("event to wake", event_to_wake(&session, scale(1000)))
                }
                (_, Ok(session)) => calls(&session, scale),
                (_, Err(failure)) => report("session", Err(failure)),
            },
            Err(failure) => report("driver", Err(failure)),
        },
    }
}
