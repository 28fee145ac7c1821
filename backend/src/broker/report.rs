//! The state of the guest at one moment: what admins are answered, and what the metrics say.
//! Both are made from this, so they cannot differ.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;

use serde::Serialize;

use super::Broker;
use crate::limits::TABLE;
use crate::transport::counts::{Class, Word, BUCKETS};
use crate::wire::Kind;

/// The state of one guest. Its fields are the keys of the admin socket's `status`.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// What admins call the guest.
    pub name: Option<String>,
    /// The broker's process id.
    pub pid: u32,
    /// This program's version.
    pub version: &'static str,
    /// The driver's release.
    pub release: String,
    /// The profile that serves it.
    pub profile: String,
    /// What confines the broker, in words.
    pub sandbox: String,
    /// The ABI of Landlock that rules; 0 for none.
    pub landlock_abi: u32,
    /// Whether system calls are filtered.
    pub seccomp: bool,
    /// One for each process of the guest that has a file open.
    pub workers: Vec<Worker>,
    /// Live placements in the window.
    pub placements: u32,
    /// Most of them at once.
    pub placements_peak: u32,
    /// Bytes of the window that they take.
    pub window_bytes: u64,
    /// The arena, if there is one.
    pub arena: Option<Arena>,
    /// What the guest's processes hold, by limit.
    pub shares: BTreeMap<&'static str, Share>,
    /// Video memory.
    pub vram: Vram,
    /// The guest's share of the card's time.
    pub weight: u32,
    /// RM's status where the card refused a time slice.
    pub slice_refused: Option<String>,
    /// Lines of the broker's log that were too many.
    pub lines_left_out: u64,
    /// Requests served, by type.
    pub requests: BTreeMap<&'static str, u64>,
    /// Requests answered with an errno, by type.
    pub errors: BTreeMap<&'static str, u64>,
    /// Calls that the driver answered with a status other than OK.
    pub driver_errors: u64,
    /// Requests in the slots' queues that were taken and not answered.
    pub in_flight: usize,
    /// Event records sent.
    pub events: u64,
    /// Times that a worker slept and was woken.
    pub wakes: u64,
    /// How long calls took, by class.
    pub latency: BTreeMap<&'static str, Latency>,
    /// What was refused, by reason and name.
    pub refusals: Vec<Refusal>,
    /// All refusals, those without a name of their own included.
    pub refused: u64,
}

/// A worker.
#[derive(Clone, Debug, Serialize)]
pub struct Worker {
    /// The upper half of its files' handles.
    pub worker: u16,
    /// Its process id on the host.
    pub pid: i32,
    /// The process that it serves, in the guest.
    pub guest_tgid: u32,
}

/// The arena.
#[derive(Clone, Debug, Serialize)]
pub struct Arena {
    /// Its size.
    pub bytes: u64,
    /// Whether the guest has it.
    pub placed: bool,
    /// Ranges that are taken.
    pub ranges: usize,
    /// Bytes of those.
    pub taken_bytes: u64,
}

/// Video memory that the guest's objects keep. What RM takes for itself is not in it.
#[derive(Clone, Debug, Serialize)]
pub struct Vram {
    /// Bytes.
    pub used: u64,
    /// What the guest may have; none for all that there is.
    pub budget: Option<u64>,
    /// Of that, for small allocations alone.
    pub reserve: u64,
}

/// What is held of a limit.
#[derive(Clone, Debug, Serialize)]
pub struct Share {
    /// By all processes.
    pub held: u64,
    /// What the guest may hold.
    pub most: u64,
}

/// How long the calls of a class took.
#[derive(Clone, Debug, Serialize)]
pub struct Latency {
    /// Calls.
    pub calls: u64,
    /// Nanoseconds that they took together.
    pub sum_ns: u64,
    /// Calls of up to 1 µs, 2 µs, 4 µs and so on, and in the last all that took longer.
    pub buckets: [u64; BUCKETS],
}

/// A refusal.
#[derive(Clone, Debug, Serialize)]
pub struct Refusal {
    /// Why.
    pub reason: &'static str,
    /// What.
    pub what: String,
    /// How often; workers say so ever more rarely.
    pub at_least: u64,
}

impl Report {
    /// The state of the guest now.
    pub fn of(broker: &Broker) -> Self {
        let (placements, window_bytes) = broker.window.usage();
        let counts = broker.workers.counts();
        let by_kind = |count: &dyn Fn(Kind) -> u64| {
            Kind::ALL.into_iter().map(|kind| (kind.name(), count(kind))).collect()
        };
        Self {
            name: broker.name.clone(),
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION"),
            release: broker.compiled.release.clone(),
            profile: broker.compiled.profile.clone(),
            sandbox: broker.sandbox.to_string(),
            landlock_abi: broker.sandbox.landlock,
            seccomp: broker.sandbox.seccomp,
            workers: workers(broker),
            placements,
            placements_peak: broker.window.peak(),
            window_bytes,
            arena: arena(broker),
            shares: shares(broker),
            vram: vram(broker),
            weight: broker.weight(),
            slice_refused: broker.slice_refused().map(|status| format!("{status:#x}")),
            lines_left_out: crate::log::left_out(),
            requests: by_kind(&|kind| match is_worker_s(kind) {
                true => counts.get(Word::Request(kind)),
                false => broker.control.counted(kind),
            }),
            errors: by_kind(&|kind| {
                counts.get(Word::Error(kind)).saturating_add(broker.control.errors(kind))
            }),
            driver_errors: counts.get(Word::Status),
            in_flight: broker.workers.in_flight(),
            events: counts.get(Word::Event).saturating_add(broker.control.events_counted()),
            wakes: counts.get(Word::Wake),
            latency: Class::ALL
                .into_iter()
                .map(|class| {
                    let buckets = counts.latency(class);
                    let calls = buckets.iter().fold(0u64, |sum, &n| sum.saturating_add(n));
                    let sum_ns = counts.get(Word::Time(class));
                    (class.name(), Latency { calls, sum_ns, buckets })
                })
                .collect(),
            refusals: refusals(broker),
            refused: broker.workers.refused_total(),
        }
    }
}

/// Queue 0 only passes these on; a worker counts them.
fn is_worker_s(kind: Kind) -> bool {
    matches!(kind, Kind::Open | Kind::Close | Kind::Ioctl | Kind::Map | Kind::Unmap | Kind::Arm)
}

fn workers(broker: &Broker) -> Vec<Worker> {
    let list = broker.workers.list().into_iter();
    list.map(|(worker, pid, process)| Worker { worker, pid, guest_tgid: process.tgid }).collect()
}

fn arena(broker: &Broker) -> Option<Arena> {
    let arena = broker.window.arena()?;
    let (ranges, taken_bytes) = arena.usage();
    Some(Arena { bytes: arena.size(), placed: arena.is_placed(), ranges, taken_bytes })
}

fn vram(broker: &Broker) -> Vram {
    let usage = broker.video.usage();
    Vram { used: usage.used, budget: usage.limit(), reserve: usage.reserve }
}

/// What is held of each limit. Some are not held by workers but counted elsewhere.
fn shares(broker: &Broker) -> BTreeMap<&'static str, Share> {
    let held = broker.shares.usage().map(|(key, held, most)| (key, Share { held, most }));
    let mut shares: BTreeMap<_, _> = held.collect();
    let (placements, bytes) = broker.window.usage();
    let arena = broker.window.arena().map_or(0, |arena| arena.usage().1);
    let elsewhere = [("placements", u64::from(placements)), ("window", bytes), ("arena", arena)];
    for (key, held) in elsewhere {
        if let Some(share) = shares.get_mut(key) {
            share.held = held;
        }
    }
    debug_assert_eq!(shares.len(), TABLE.len());
    shares
}

fn refusals(broker: &Broker) -> Vec<Refusal> {
    let all = broker.workers.refusals().into_iter();
    all.map(|(verdict, what, at_least)| Refusal {
        reason: verdict.name(),
        what: what.to_string(),
        at_least,
    })
    .collect()
}
