//! Longer runs that a test drives: leaks, the map race, and holding on while something dies.

use std::fmt;
use std::io::BufRead;
use std::os::fd::AsFd;
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

use rmclient::abi::{class, control, status};
use rmclient::sys::Mapping;
use rmclient::{io, wrong, Card, Failure, Outcome, Place, Result, Session};

/// Opens, allocates, maps, writes, unmaps and closes, `count` times.
pub fn cycles(card: &Card, count: u64) -> Result<String> {
    for seed in 0..count {
        let session = Session::open(card)?;
        for place in [Place::Video, Place::System] {
            let memory = session.memory(place, 65536)?;
            let mapped = session.map(place, memory, 65536)?;
            mapped.mapping.fill(seed, 4096);
            if mapped.mapping.wrong(seed, 4096) != 0 {
                return wrong(format!(
                    "cycle {seed} read what it did not write to {place:?} memory"
                ));
            }
            // Every other cycle leaves the cleaning to the close of the file.
            if seed % 2 == 0 {
                session.unmap(memory, mapped)?;
                session.client.free(session.device, memory).ok("freeing memory")?;
            }
        }
    }
    Ok(format!("{count} cycles"))
}

/// Touches each mapping the moment it is told of it, `count` times, and counts wrong reads.
///
/// Each memory gets a value of its own through one mapping; a new mapping must show it at the
/// first read. A mapping that is told before it is placed shows zero or an older memory.
pub fn map_race(card: &Card, count: u64) -> Result<String> {
    const MEMORIES: usize = 8;
    let session = Session::open(card)?;
    let mut kept = Vec::new();
    for seed in 0..MEMORIES {
        let place = if seed % 2 == 0 { Place::Video } else { Place::System };
        let memory = session.memory(place, 65536)?;
        let mapped = session.map(place, memory, 65536)?;
        mapped.mapping.fill(0x1000 + seed as u64, 65536);
        session.unmap(memory, mapped)?;
        kept.push((place, memory));
    }
    let mut wrong_reads = 0;
    for round in 0..count {
        let index = (round % MEMORIES as u64) as usize;
        let (place, memory) = kept[index];
        let mapped = session.map(place, memory, 65536)?;
        let seed = 0x1000 + index as u64;
        if mapped.mapping.wrong(seed, 64) != 0 {
            wrong_reads += 1;
        }
        session.unmap(memory, mapped)?;
    }
    match wrong_reads {
        0 => Ok(format!("{count} maps and unmaps, 0 wrong reads")),
        reads => wrong(format!("{reads} of {count} mappings showed other memory at first")),
    }
}

/// Maps `mib` of video memory and unmaps it at once, `count` times: whatever begins with a
/// mapping must end with it.
pub fn map_drop(card: &Card, count: u64, mib: u64) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::Video, mib << 20)?;
    for _ in 0..count {
        let mapped = session.map(Place::Video, memory, mib << 20)?;
        session.unmap(memory, mapped)?;
    }
    Ok(format!("{count} maps of {mib} MiB"))
}

/// Keeps `mib` of video memory, mapped and filled, and tells at each line of standard input
/// whether it still holds what was written. Ends after `time`.
pub fn hold(card: &Card, time: Duration, mib: u64) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::Video, mib << 20)?;
    let mapped = session.map(Place::Video, memory, mib << 20)?;
    let seed = u64::from(std::process::id());
    mapped.mapping.fill(seed, mapped.mapping.bytes());
    let client = session.client.handle;
    println!("holding {mib} MiB of video memory, {client:#x}:{memory:#x}, seed {seed}");
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(std::io::Result::ok) {
            if sender.send(line).is_err() {
                break;
            }
        }
    });
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()) {
        match lines.recv_timeout(left) {
            Ok(line) => {
                let words = mapped.mapping.wrong(seed, mapped.mapping.bytes());
                println!(
                    "{line}: first word {:#018x}, {words} words wrong",
                    mapped.mapping.read(0)
                );
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => {
                thread::sleep(end.saturating_duration_since(Instant::now()));
            }
            Err(mpsc::RecvTimeoutError::Timeout) => break,
        }
    }
    match mapped.mapping.wrong(seed, mapped.mapping.bytes()) {
        0 => Ok(format!("held {mib} MiB for {} s", time.as_secs())),
        words => wrong(format!("{words} words are not those written")),
    }
}

/// What an address of memory that may be gone showed.
#[derive(Default)]
struct Seen {
    own: u64,
    zero: u64,
    gone: u64,
    other: u64,
}

impl Seen {
    fn lost(&self) -> bool {
        self.zero + self.gone > 0
    }
}

impl fmt::Display for Seen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { own, zero, gone, other } = self;
        write!(f, "{own} own, {zero} zero, {gone} SIGBUS, {other} of somebody else")
    }
}

/// How long an address is tried once its memory is lost.
const AFTER_LOSS: Duration = Duration::from_secs(5);

/// Keeps `mib` of video memory and reads and writes every page of it, over and over for `time`,
/// and a while longer than the memory is there: whatever becomes of this process's worker, the
/// old address must show nothing but what was written there, zero, or SIGBUS. With `waits` the
/// memory is allocated after a line of standard input, as soon as there is some.
pub fn stale(card: &Card, time: Duration, mib: u64, waits: bool) -> Result<String> {
    rmclient::sys::survive().map_err(io("a handler of SIGBUS"))?;
    let session = Session::open(card)?;
    if waits {
        println!("ready");
        std::io::stdin().lock().read_line(&mut String::new()).map_err(io("standard input"))?;
    }
    let started = Instant::now();
    let memory = loop {
        match session.memory(Place::Video, mib << 20) {
            Err(Failure::Call { outcome: Outcome::Status(status::NO_MEMORY), .. })
                if waits && started.elapsed() < time => {}
            outcome => break outcome?,
        }
        thread::sleep(Duration::from_millis(5));
    };
    let mapped = session.map(Place::Video, memory, mib << 20)?;
    let seed = u64::from(std::process::id());
    mapped.mapping.fill(seed, mapped.mapping.bytes());
    let waited = started.elapsed().as_millis();
    println!("holding {mib} MiB of video memory, seed {seed}, had after {waited} ms");
    let mut seen = Seen::default();
    let mut end = Instant::now() + time;
    while Instant::now() < end {
        let was_lost = seen.lost();
        touch(&mapped.mapping, seed, &mut seen);
        if !was_lost && seen.lost() {
            println!("lost: {seen}");
            end = Instant::now() + AFTER_LOSS;
        }
    }
    let fate = if seen.lost() { "lost" } else { "kept" };
    match seen.other {
        0 => Ok(format!("{fate}: {seen}")),
        _ => wrong(format!("{fate}: {seen}")),
    }
}

/// Reads two words of every page, and writes one: what it should have anyway.
fn touch(mapping: &Mapping, seed: u64, seen: &mut Seen) {
    for index in (0..mapping.bytes() / 8).step_by(rmclient::sys::PAGE / 8) {
        for index in [index, index + 1] {
            match mapping.try_read(index) {
                None => seen.gone += 1,
                Some(0) => seen.zero += 1,
                Some(value) if value == rmclient::sys::pattern(seed, index) => seen.own += 1,
                Some(_) => seen.other += 1,
            }
        }
        mapping.try_write(index + 1, rmclient::sys::pattern(seed, index + 1));
    }
}

/// Keeps `mib` of video memory mapped and filled, sleeps in a poll until its files are lost, and
/// tells what a call, a new file and the mapping then say.
pub fn watch(card: &Card, time: Duration, mib: u64) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::Video, mib << 20)?;
    let mapped = session.map(Place::Video, memory, mib << 20)?;
    let (seed, length) = (u64::from(std::process::id()), mapped.mapping.bytes());
    mapped.mapping.fill(seed, length);
    let files = [&session.client.ctl, &session.card_file, &mapped.file];
    let mut watched = files.map(|file| PollFd::new(file.as_fd(), PollFlags::POLLIN));
    println!("watching {mib} MiB of video memory, client {:#x}", session.client.handle);
    let started = Instant::now();
    let patience = PollTimeout::try_from(time).unwrap_or(PollTimeout::MAX);
    poll(&mut watched, patience).map_err(|errno| rmclient::io("poll")(errno.into()))?;
    println!("woken after {:.3} s", started.elapsed().as_secs_f64());
    let lost = PollFlags::POLLERR | PollFlags::POLLHUP;
    // They are lost one after the other.
    thread::sleep(Duration::from_millis(200));
    poll(&mut watched, PollTimeout::ZERO).map_err(|errno| rmclient::io("poll")(errno.into()))?;
    let heard = watched.map(|file| file.revents().unwrap_or(PollFlags::empty()));
    if heard.iter().any(|events| !events.contains(lost)) {
        return wrong(format!("its files are not lost: poll reports {heard:?}"));
    }
    let free = session.client.free(session.device, memory);
    let again = rmclient::open(rmclient::CONTROL_NODE)
        .map_or_else(|failure| failure.to_string(), |_| "ok".into());
    // Whoever touches what is gone may be killed for it.
    let reader = rmclient::sys::in_child(|| mapped.mapping.wrong(seed, length) == 0)
        .and_then(|child| child.wait())
        .map_err(rmclient::io("a child"))?;
    Ok(format!("a call: {free}; a new file: {again}; the mapping: {reader:?}"))
}

/// Allocates video memory, `mib` at a time, until RM has no more, and says what the card said of
/// itself before and then. Ends with an error unless that was the reason. With `keep` it then
/// takes ever smaller pieces, down to a size, and has them for a while.
pub fn fill(card: &Card, mib: u64, keep: Option<(Duration, u64)>) -> Result<String> {
    let session = Session::open(card)?;
    let start = told(&session)?;
    let mut total = fill_by(&session, mib)?;
    let full = told(&session)?;
    if let Some((time, least)) = keep {
        let mut step = mib / 2;
        while step >= least.max(1) {
            total += fill_by(&session, step)?;
            step /= 2;
        }
        println!("keeping {total} MiB; {}", told(&session)?);
        thread::sleep(time);
    }
    Ok(format!("{total} MiB in steps of {mib}; {start}; then {full}"))
}

/// As many pieces as there are; how much that is.
fn fill_by(session: &Session, mib: u64) -> Result<u64> {
    for count in 0_u64.. {
        match session.memory(Place::Video, mib << 20) {
            Ok(_) => {}
            Err(Failure::Call { outcome: Outcome::Status(status::NO_MEMORY), .. }) => {
                return Ok(count * mib);
            }
            Err(failure) => return Err(failure),
        }
    }
    unreachable!("no card has so much")
}

fn told(session: &Session) -> Result<String> {
    // NV2080_CTRL_FB_GET_INFO_V2_INDEX_*
    let indexes = [("ram", 7), ("total", 8), ("usable", 0x20), ("heap", 9), ("free", 0x16)];
    let values = indexes.map(|(name, index)| {
        session.fb_info(index).map(|kib| format!("{name} {} MiB", kib / 1024))
    });
    Ok(values.into_iter().collect::<Result<Vec<_>>>()?.join(", "))
}

/// Stays in one call for `time`: preempting a channel group that was never scheduled waits for its
/// whole time-out. A real card (seen on an H200) takes a second at most; the simulated one any.
pub fn block(card: &Card, time: Duration) -> Result<String> {
    let session = Session::open(card)?;
    // NV_CHANNEL_GROUP_ALLOCATION_PARAMETERS: engineType is NV2080_ENGINE_TYPE_GRAPHICS
    let mut group = [0; 20];
    group[0xc] = 1;
    let group = session.client.alloc(session.device, class::CHANNEL_GROUP, Some(&mut group))?;
    let micros = u32::try_from(time.as_micros()).unwrap_or(u32::MAX);
    // bWait, bManualTimeout, timeoutUs
    let mut params = [1, 1, 0, 0, 0, 0, 0, 0];
    params[4..].copy_from_slice(&micros.to_le_bytes());
    println!("blocking for {} ms, client {:#x}", time.as_millis(), session.client.handle);
    let started = Instant::now();
    let outcome = session.client.control(group, control::PREEMPT, &mut params);
    // NV_ERR_TIMEOUT
    match outcome == Outcome::Status(0x65) && started.elapsed() >= time {
        true => Ok(format!("{} ms in one call", time.as_millis())),
        false => {
            wrong(format!("PREEMPT answered {outcome} after {} ms", started.elapsed().as_millis()))
        }
    }
}
