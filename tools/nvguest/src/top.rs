//! `nvguest top`: what guests do, second by second.

use std::time::{Duration, Instant};

use anyhow::Result;
use serde::Serialize;

use crate::guests::{self, Guest};
use crate::out;
use crate::status::{quantile, Status};

/// What guests do, live.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Only these guests.
    guests: Vec<String>,
    /// Seconds between two looks.
    #[arg(long, short = 'n', default_value_t = 1.0, value_name = "SECONDS", value_parser = seconds)]
    interval: f64,
    /// One look and an end.
    #[arg(long)]
    once: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(seconds) if (0.01..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("give seconds from 0.01 to 3600".to_owned()),
    }
}

/// A guest at a moment.
struct Sample {
    guest: Guest,
    at: Instant,
    status: Status,
    cpu: Duration,
}

/// What a guest did between two moments. Rates are a second.
#[derive(Debug, Serialize)]
struct Row {
    guest: String,
    processes: usize,
    /// Of one processor, broker and workers together.
    cpu_percent: f64,
    vram_used_bytes: Option<u64>,
    vram_budget_bytes: Option<u64>,
    requests: std::collections::BTreeMap<String, f64>,
    events: f64,
    /// Bounds that half and 99 of 100 calls did not exceed.
    p50_us: Option<u64>,
    p99_us: Option<u64>,
    in_flight: u64,
    placements: u64,
    window_bytes: u64,
    /// Refused since the guest began, and a second now.
    refused: u64,
    refusals: f64,
}

/// Looks until it is interrupted.
pub fn run(args: &Args, json: bool) -> Result<()> {
    // What is wrong with a name is said at once.
    args.guests.iter().try_for_each(|name| guests::named(name).map(drop))?;
    let mut before = look(&args.guests);
    loop {
        std::thread::sleep(Duration::from_secs_f64(args.interval));
        let after = look(&args.guests);
        let rows: Vec<Row> = after
            .iter()
            .filter_map(|now| {
                let then = before.iter().find(|then| {
                    (&then.guest.socket, then.status.pid) == (&now.guest.socket, now.status.pid)
                })?;
                Some(between(then, now))
            })
            .collect();
        match (json, args.once) {
            (true, true) => out::json(&rows)?,
            (true, false) => out::say(&(serde_json::to_string(&rows)? + "\n"))?,
            (false, true) => out::say(&screen(&rows))?,
            // To the top left, and away with what was there.
            (false, false) => out::say(&format!("\x1b[H\x1b[J{}", screen(&rows)))?,
        }
        if args.once {
            return Ok(());
        }
        before = after;
    }
}

fn look(names: &[String]) -> Vec<Sample> {
    let guests = match names {
        [] => guests::all(),
        names => names.iter().filter_map(|name| guests::named(name).ok()).collect(),
    };
    guests.into_iter().filter_map(sample).collect()
}

/// A guest that does not answer is not shown.
fn sample(guest: Guest) -> Option<Sample> {
    let status = Status::read(&guest.status().ok()?).ok()?;
    let pids = status.workers.iter().map(|worker| worker.pid).chain([status.pid]);
    let cpu = pids.filter_map(cpu).sum();
    Some(Sample { guest, at: Instant::now(), status, cpu })
}

/// Processor time of a process so far.
fn cpu(pid: u32) -> Option<Duration> {
    /// `USER_HZ`, what /proc counts in, on every machine that Linux has a card for.
    const TICKS: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name may hold anything; what follows it is numbers, from field 3 on.
    let (_, rest) = stat.rsplit_once(')')?;
    let field = |number: usize| rest.split_ascii_whitespace().nth(number - 3)?.parse::<u64>().ok();
    Some(Duration::from_millis((field(14)? + field(15)?) * 1000 / TICKS))
}

fn between(then: &Sample, now: &Sample) -> Row {
    let seconds = now.at.duration_since(then.at).as_secs_f64();
    // CAST: counts of a second are far below 2^53.
    let rate = |before: u64, after: u64| after.saturating_sub(before) as f64 / seconds;
    let (old, new) = (&then.status, &now.status);
    let calls: Vec<u64> = new
        .calls()
        .iter()
        .zip(old.calls())
        .map(|(after, before)| after.saturating_sub(before))
        .collect();
    let requests = new
        .requests
        .iter()
        .map(|(kind, &count)| {
            (kind.clone(), rate(old.requests.get(kind).copied().unwrap_or(0), count))
        })
        .collect();
    Row {
        guest: now.guest.name.clone(),
        processes: new.workers.len(),
        cpu_percent: 100.0 * now.cpu.saturating_sub(then.cpu).as_secs_f64() / seconds,
        vram_used_bytes: new.vram.as_ref().and_then(|vram| vram.used),
        vram_budget_bytes: new.vram.as_ref().and_then(|vram| vram.budget),
        requests,
        events: rate(old.events, new.events),
        p50_us: quantile(&calls, 500),
        p99_us: quantile(&calls, 990),
        in_flight: new.in_flight,
        placements: new.placements,
        window_bytes: new.window_bytes,
        refused: new.refused,
        refusals: rate(old.refused, new.refused),
    }
}

fn screen(rows: &[Row]) -> String {
    if rows.is_empty() {
        return "no guest answers; see nvguest list\n".to_owned();
    }
    let head = [
        "GUEST", "PROC", "CPU%", "VRAM", "IOCTL/s", "MAP/s", "ARM/s", "OTHER/s", "EVENT/s",
        "P50us", "P99us", "QUEUE", "PLACED", "WINDOW", "REFUSED",
    ];
    let rows: Vec<[String; 15]> = rows.iter().map(cells).collect();
    out::table(head, &rows)
}

fn cells(row: &Row) -> [String; 15] {
    let kind = |name: &str| row.requests.get(name).copied().unwrap_or(0.0);
    let [ioctl, map, arm] = ["ioctl", "map", "arm"].map(kind);
    let other = row.requests.values().sum::<f64>() - ioctl - map - arm;
    let rate = |rate: f64| format!("{rate:.0}");
    let bound = |us: Option<u64>| us.map_or("-".to_owned(), |us| format!("<={us}"));
    let memory = |bytes: Option<u64>| bytes.map_or("-".to_owned(), out::bytes);
    let vram = match (row.vram_used_bytes, row.vram_budget_bytes) {
        (None, None) => "-".to_owned(),
        (used, budget) => format!("{}/{}", memory(used), memory(budget)),
    };
    [
        row.guest.clone(),
        row.processes.to_string(),
        rate(row.cpu_percent),
        vram,
        rate(ioctl),
        rate(map),
        rate(arm),
        rate(other),
        rate(row.events),
        bound(row.p50_us),
        bound(row.p99_us),
        row.in_flight.to_string(),
        row.placements.to_string(),
        out::bytes(row.window_bytes),
        row.refused.to_string(),
    ]
}
