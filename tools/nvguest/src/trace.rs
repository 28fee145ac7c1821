//! `nvguest trace`: the calls of a running guest, a line for each.
//!
//! The backend sends numbers; the names are this program's, from the profile of the release that
//! answers the guest.

use std::time::{Duration, Instant};

use anyhow::Result;
use nvguest_abi::names::Names;
use serde::Deserialize;
use serde_json::{json, Value};

use crate::guests::{self, Guest};
use crate::out;

/// The calls of a running guest, as they are served.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// Its name, or the path of its admin socket.
    guest: String,
    /// Only calls that took so long, e.g. 1ms; with --errors, those and the failed.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    slow: Option<Duration>,
    /// Only calls that failed, by errno or by RM's status.
    #[arg(long)]
    errors: bool,
    /// End after so many seconds.
    #[arg(long, value_name = "N", value_parser = seconds)]
    seconds: Option<Duration>,
}

fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text} is no time; give one like 500us, 1ms or 2s");
    let digits = text.find(|c: char| !c.is_ascii_digit()).ok_or_else(wrong)?;
    let (number, unit) = text.split_at(digits);
    let number: u64 = number.parse().map_err(|_| wrong())?;
    let nanos = match unit {
        "ns" => 1,
        "us" | "µs" => 1000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => return Err(wrong()),
    };
    number.checked_mul(nanos).map(Duration::from_nanos).ok_or_else(wrong)
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    seconds.ok_or_else(|| format!("{text} is no number of seconds"))
}

/// A call, as the backend tells it; `broker/trace.rs` says what each field means.
#[derive(Debug, Deserialize)]
struct Call {
    at_ns: u64,
    took_ns: u64,
    process: u32,
    kind: Option<String>,
    file: Option<String>,
    what: Option<String>,
    number: Option<u32>,
    errno: u32,
    status: Option<u32>,
}

/// Shows calls until there is nobody to show them, the guest is gone or the time is over.
pub fn run(args: &Args, json: bool) -> Result<()> {
    let guest = guests::named(&args.guest)?;
    let slow_ns = args.slow.map(|slow| u64::try_from(slow.as_nanos()).unwrap_or(u64::MAX));
    let request = json!({"request": "trace", "slow_ns": slow_ns, "errors": args.errors});
    let (head, mut lines) = guest.watch(request)?;
    let names = Names::of(head["release"].as_str().unwrap_or_default());
    // Only now can a line be shown: to find the names takes a moment.
    let deadline = args.seconds.map(|seconds| Instant::now() + seconds);
    let mut lost = 0;
    while let Some(line) = lines.next(deadline)? {
        lost += line["lost"].as_u64().unwrap_or(0);
        let text =
            if json { named(line, &names)?.to_string() + "\n" } else { spell(&line, &names)? };
        if !out::say_while_heard(&text)? {
            return Ok(());
        }
    }
    if lost > 0 {
        eprintln!("nvguest: {lost} calls went by unread; --slow or --errors makes them fewer");
    }
    say_why(&guest, deadline);
    Ok(())
}

/// A stream that ends before its time is worth a word.
fn say_why(guest: &Guest, deadline: Option<Instant>) {
    if deadline.is_none_or(|deadline| Instant::now() < deadline) {
        eprintln!(
            "nvguest: the backend of {} ended the trace; it is gone, or we read too slowly",
            guest.name
        );
    }
}

/// The line with a name for its number.
fn named(mut line: Value, names: &Names) -> Result<Value> {
    if line["lost"].is_null() {
        let call: Call = serde_json::from_value(line.clone())?;
        line["name"] = call.name(names).into();
    }
    Ok(line)
}

fn spell(line: &Value, names: &Names) -> Result<String> {
    if let Some(lost) = line["lost"].as_u64() {
        return Ok(format!("({lost} calls went by unread)\n"));
    }
    Ok(Call::deserialize(line)?.spell(names))
}

impl Call {
    fn name<'a>(&self, names: &'a Names) -> Option<&'a str> {
        names.call(self.what.as_deref()?, self.number?)
    }

    fn spell(&self, names: &Names) -> String {
        let word = |word: &Option<String>| word.clone().unwrap_or_else(|| "?".to_owned());
        let what = match (self.what.as_deref(), self.number, self.name(names)) {
            (Some(what), _, Some(name)) => format!("{what} {name}"),
            (Some(what), Some(number), None) => format!("{what} {number:#010x}"),
            _ => "-".to_owned(),
        };
        let file = self.file.as_deref().unwrap_or("-");
        let mut line = format!(
            "{} {:>7} {:<6} {file:<4} {what:<58} {:>9} us",
            clock(self.at_ns),
            self.process,
            word(&self.kind),
            micros(self.took_ns),
        );
        if self.errno != 0 {
            let name = nix::errno::Errno::from_raw(self.errno.try_into().unwrap_or(0));
            line += &format!(" errno {} ({name:?})", self.errno);
        }
        if let Some(status) = self.status.filter(|&status| status != 0) {
            line += &format!(" status {status:#x}");
        }
        line + "\n"
    }
}

/// The time of day, UTC.
fn clock(at_ns: u64) -> String {
    let seconds = at_ns / 1_000_000_000;
    let [hour, minute, second] = [seconds / 3600 % 24, seconds / 60 % 60, seconds % 60];
    format!("{hour:02}:{minute:02}:{second:02}.{:06}", at_ns / 1000 % 1_000_000)
}

fn micros(nanos: u64) -> String {
    format!("{}.{}", nanos / 1000, nanos / 100 % 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_has_a_unit() {
        assert_eq!(duration("1ms"), Ok(Duration::from_millis(1)));
        assert_eq!(duration("250us"), Ok(Duration::from_micros(250)));
        for wrong in
            ["1", "ms", "1 ms", "1h", "-1ms", "99999999999999999999s", "18446744073709551615s"]
        {
            assert!(duration(wrong).unwrap_err().contains("1ms"), "{wrong}");
        }
        assert!(seconds("-1").is_err() && seconds("soon").is_err());
    }

    #[test]
    fn a_call_is_a_line_with_names_and_what_came_of_it() {
        let line = json!({"schema": 1, "at_ns": 1_796_000_461_500_000_000_u64, "took_ns": 12_345,
            "process": 100, "kind": "ioctl", "file": "ctl", "what": "control", "number": 0x201,
            "errno": 0, "status": 0x56});
        let names = Names::of("580.159.04");
        let text = spell(&line, &names).unwrap();
        assert!(text.starts_with("01:01:01.500000     100 ioctl  ctl  control NV0000_CTRL_CMD_GPU"));
        assert!(text.ends_with(" 12.3 us status 0x56\n"), "{text}");
        assert_eq!(named(line, &names).unwrap()["name"], "NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS");
        assert_eq!(
            spell(&json!({"schema": 1, "lost": 3}), &names).unwrap(),
            "(3 calls went by unread)\n"
        );
    }
}
