//! `nvguest list`, `show`, `refusals` and `metrics`.

use std::fmt::Write as _;

use anyhow::Result;
use serde_json::{json, Value};

use crate::guests::{self, Guest, Silence};
use crate::out::{self, bytes};
use crate::status::{quantile, Status};

/// The guests of this host.
pub fn list(json: bool) -> Result<()> {
    let guests: Vec<(Guest, Result<Value>)> =
        guests::all().into_iter().map(|guest| (guest.clone(), guest.status())).collect();
    if json {
        let rows: Vec<Value> = guests.iter().map(|(guest, status)| entry(guest, status)).collect();
        return out::json(&rows);
    }
    if guests.is_empty() {
        let folders: Vec<_> = guests::folders().iter().map(|f| f.display().to_string()).collect();
        return out::say(&format!(
            "no guest in {}; start a backend with --name\n",
            folders.join(" or ")
        ));
    }
    let rows: Vec<[String; 8]> = guests.iter().map(|(guest, status)| row(guest, status)).collect();
    let head = ["GUEST", "STATE", "PID", "DRIVER", "SANDBOX", "PROCESSES", "PLACEMENTS", "REFUSED"];
    out::say(&out::table(head, &rows))
}

fn entry(guest: &Guest, status: &Result<Value>) -> Value {
    let mut entry = json!({
        "guest": guest.name,
        "socket": guest.socket,
        "state": state(status),
    });
    if let Ok(status) = status {
        entry["status"] = status.clone();
    }
    entry
}

fn row(guest: &Guest, answer: &Result<Value>) -> [String; 8] {
    let status = answer.as_ref().ok().and_then(|answer| Status::read(answer).ok());
    let cell = |show: &dyn Fn(&Status) -> String| status.as_ref().map_or("-".into(), show);
    [
        guest.name.clone(),
        state(answer),
        cell(&|it| it.pid.to_string()),
        cell(&|it| it.release.clone()),
        cell(&|it| it.sandbox_in_short()),
        cell(&|it| it.workers.len().to_string()),
        cell(&|it| it.placements.to_string()),
        cell(&|it| it.refused.to_string()),
    ]
}

/// A backend's state in words.
fn state(answer: &Result<Value>) -> String {
    match answer {
        Ok(_) => "serving".to_owned(),
        Err(error) => match Guest::silence(error) {
            Some(Silence::Gone) => "gone (killed; its folder is left over)".to_owned(),
            Some(Silence::Foreign) => "another user's (ask as root)".to_owned(),
            None => format!("silent: {error:#}"),
        },
    }
}

/// The state of a guest.
pub fn show(name: &str, json: bool) -> Result<()> {
    let guest = guests::named(name)?;
    let answer = guest.status()?;
    if json {
        return out::json(&answer);
    }
    out::say(&spell(&guest, &Status::read(&answer)?)?)
}

fn spell(guest: &Guest, it: &Status) -> Result<String> {
    let mut text = String::new();
    let mut line = |key: &str, value: String| writeln!(text, "{key:<12} {value}");
    line("guest", guest.name.clone())?;
    line("backend", format!("{}, pid {}", it.version, it.pid))?;
    line("driver", format!("{} (profile {})", it.release, it.profile))?;
    line("sandbox", it.sandbox.clone())?;
    let processes = it.workers.iter().map(|w| format!("{} (pid {} here)", w.guest_tgid, w.pid));
    line("processes", or_none(processes.collect()))?;
    let window = bytes(it.window_bytes);
    let (now, peak) = (it.placements, it.placements_peak);
    line("window", format!("{now} placements, {window}; {peak} at most so far"))?;
    if let Some(arena) = &it.arena {
        let (taken, all) = (bytes(arena.taken_bytes), bytes(arena.bytes));
        line("arena", format!("{taken} of {all} in {} ranges", arena.ranges))?;
    }
    let by_type = |counts: &std::collections::BTreeMap<String, u64>| {
        let some = counts.iter().filter(|(_, &count)| count > 0);
        or_none(some.map(|(kind, count)| format!("{kind} {count}")).collect())
    };
    line("requests", format!("{}; in flight {}", by_type(&it.requests), it.in_flight))?;
    line("errors", format!("{}; by the driver {}", by_type(&it.errors), it.driver_errors))?;
    line("events", format!("{}, wakes {}", it.events, it.wakes))?;
    line("refused", format!("{} (nvguest refusals {})", it.refused, guest.name))?;
    text.push('\n');
    text.push_str(&latencies(it));
    text.push('\n');
    let rows: Vec<[String; 3]> = it
        .shares
        .iter()
        .map(|(key, share)| [key.clone(), share.held.to_string(), share.most.to_string()])
        .collect();
    text.push_str(&out::table(["LIMIT", "HELD", "MOST"], &rows));
    Ok(text)
}

fn latencies(it: &Status) -> String {
    let bound = |buckets: &[u64], part| match quantile(buckets, part) {
        Some(us) => format!("<={us}"),
        None => "-".to_owned(),
    };
    let rows: Vec<[String; 5]> = it
        .latency
        .iter()
        .filter(|(_, latency)| latency.calls > 0)
        .map(|(class, latency)| {
            let mean = latency.sum_ns / 1000 / latency.calls;
            let quantiles = [500, 990].map(|part| bound(&latency.buckets, part));
            let [p50, p99] = quantiles;
            [class.clone(), latency.calls.to_string(), mean.to_string(), p50, p99]
        })
        .collect();
    out::table(["CALLS", "NUMBER", "MEAN us", "P50 us", "P99 us"], &rows)
}

fn or_none(words: Vec<String>) -> String {
    if words.is_empty() {
        return "none".to_owned();
    }
    words.join(", ")
}

/// What a guest was refused.
pub fn refusals(name: &str, json: bool) -> Result<()> {
    let answer = guests::named(name)?.status()?;
    if json {
        return out::json(&json!({"refused": answer["refused"], "refusals": answer["refusals"]}));
    }
    let mut status = Status::read(&answer)?;
    if status.refusals.is_empty() {
        return out::say("nothing was refused\n");
    }
    status.refusals.sort_by_key(|refusal| std::cmp::Reverse(refusal.at_least));
    let rows: Vec<[String; 3]> = status
        .refusals
        .into_iter()
        .map(|refusal| [refusal.at_least.to_string(), refusal.reason, refusal.what])
        .collect();
    let hint = "\n`nvguest policy explain NUMBER` says what a control or class is, and why.\n";
    out::say(&(out::table(["AT LEAST", "REASON", "WHAT"], &rows) + hint))
}

/// The metrics of a guest.
pub fn metrics(name: &str, json: bool) -> Result<()> {
    let guest = guests::named(name)?;
    if json {
        return out::json(&guest.status()?);
    }
    let answer = guest.ask(json!({"request": "metrics"}))?;
    out::say(answer.as_str().unwrap_or_default())
}
