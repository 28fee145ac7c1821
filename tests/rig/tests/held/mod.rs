//! What guests hold of the host, and how long it takes to go back.

use std::fs;
use std::time::{Duration, Instant};

use nvguest_rig::{Guest, Process};

/// What is killed gives back within this, and nothing hangs for longer (issue 7, Crashes).
pub const PATIENCE: Duration = Duration::from_secs(5);
/// An emulated guest on a busy machine may take so much longer.
const SLACK: Duration = Duration::from_secs(10);

/// Waits until `reached` says so, and returns how long it took; the text is for the failure's
/// report.
pub fn await_until(what: &str, mut reached: impl FnMut() -> bool) -> Duration {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < PATIENCE + SLACK, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
    begin.elapsed()
}

/// Processes that a process has started and that live.
pub fn children(pid: u32) -> Vec<u32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut children: Vec<u32> = tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().map(str::parse).collect::<Vec<_>>())
        .flatten()
        .collect();
    children.sort_unstable();
    children
}

/// Workers of a broker: children of its starter.
pub fn workers(broker: u32) -> Vec<u32> {
    children(broker).into_iter().flat_map(children).collect()
}

/// A broker, its starter and its workers.
pub fn family(broker: u32) -> Vec<u32> {
    [vec![broker], children(broker), workers(broker)].concat()
}

/// Whether a process is there and does more than wait to be reaped.
pub fn lives(pid: &u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(") ").is_some_and(|(_, state)| !state.starts_with('Z'))
}

fn maps(pid: u32) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    text.lines().filter(|line| line.contains("memfd")).count()
}

/// What a guest holds of the host.
#[derive(Debug, PartialEq, Eq)]
pub struct Held {
    workers: usize,
    /// The broker's.
    descriptors: usize,
    /// QEMU's maps of files like ours.
    maps: usize,
    placements: Option<u64>,
    vram: Option<u64>,
    /// Of RM's clients and objects, by the broker's account.
    shares: Vec<(String, Option<u64>)>,
}

impl Held {
    fn is_within(&self, before: &Held) -> bool {
        self.workers <= before.workers
            && self.descriptors <= before.descriptors
            && self.maps <= before.maps
            && self.placements <= before.placements
            && self.vram <= before.vram
            && self.shares.iter().zip(&before.shares).all(|(now, before)| now.1 <= before.1)
    }
}

/// What the guest holds now.
pub fn held(guest: &Guest) -> Held {
    let backend = guest.backend_pid().unwrap();
    let status = guest.status().unwrap();
    let shares = status["shares"].as_object().into_iter().flatten();
    Held {
        workers: workers(backend).len(),
        descriptors: fs::read_dir(format!("/proc/{backend}/fd")).unwrap().count(),
        maps: maps(guest.qemu_pid()),
        placements: status["placements"].as_u64(),
        vram: status["vram"]["used"].as_u64(),
        shares: shares.map(|(key, share)| (key.clone(), share["held"].as_u64())).collect(),
    }
}

/// What the guest holds when nothing runs in it.
pub fn held_at_rest(guest: &Guest) -> Held {
    let backend = guest.backend_pid().unwrap();
    await_until("workers of processes that are gone end", || workers(backend).is_empty());
    // The broker hears of an end a moment after the kernel.
    let clients = || guest.status().unwrap()["shares"]["clients"]["held"].as_u64();
    await_until("what they held goes back", || clients() == Some(0));
    held(guest)
}

/// Bytes of video memory that the guest has.
pub fn vram(guest: &Guest) -> u64 {
    guest.status().unwrap()["vram"]["used"].as_u64().unwrap()
}

/// Waits until the guest holds no more than `before`, and returns how long it took.
pub fn goes_back(guest: &Guest, before: &Held) -> Duration {
    let begin = Instant::now();
    loop {
        let now = held(guest);
        if now.is_within(before) {
            return begin.elapsed();
        }
        assert!(begin.elapsed() < PATIENCE + SLACK, "{now:?} is held where it was {before:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Starts a program, and waits until it says this.
pub fn start<'a>(guest: &'a Guest, argv: &[&str], says: &str) -> Process<'a> {
    let mut process = guest.command(argv.iter().copied()).spawn().unwrap();
    process.wait_for(says).unwrap();
    process
}

/// A program that checks its memory when asked.
pub fn hold(guest: &Guest) -> Process<'_> {
    let mut process =
        guest.command(["rmprobe", "--hold", "600", "--size", "8"]).input_later().spawn().unwrap();
    process.wait_for("holding").unwrap();
    process
}

/// The program's memory still is what it wrote.
pub fn undisturbed(holder: &mut Process<'_>) {
    holder.input(b"look\n").unwrap();
    holder.wait_for(", 0 words wrong").unwrap();
}

/// The card works in the guest, and its kernel has nothing to complain of.
pub fn works(guest: &Guest) {
    for argv in [&["rmprobe", "--only", "ids"][..], &["rmprobe", "--cycles", "3"]] {
        let output = guest.run(argv.iter().copied()).unwrap();
        assert!(output.success(), "{output}\n{}", guest.logs());
    }
    quiet(guest);
}

/// The guest's kernel has nothing to complain of.
pub fn quiet(guest: &Guest) {
    let dmesg = guest.dmesg().unwrap();
    for complaint in ["BUG", "Oops", "WARNING", "Call Trace", "blocked for more than"] {
        assert!(!dmesg.contains(complaint), "{dmesg}");
    }
}

/// What `rmprobe --watch` says when its files are lost: woken, errors at once, no stale memory.
pub fn loses_its_files(watcher: Process<'_>, memory: &str) -> String {
    let output = watcher.wait().unwrap();
    let text = output.stdout_text();
    assert!(output.success() && text.contains("a call: No such device"), "{output}");
    assert!(text.contains(memory), "{output}");
    text
}

/// A row of the table in BENCHMARKS.md.
pub fn row(case: &str, seconds: &[(&str, Duration)]) {
    let seconds: Vec<String> =
        seconds.iter().map(|(what, it)| format!("{what} {:.2} s", it.as_secs_f64())).collect();
    println!("| {case} | {} |", seconds.join("; "));
}
