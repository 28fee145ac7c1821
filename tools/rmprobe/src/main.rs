//! `rmprobe`: asks NVIDIA's kernel driver, without NVIDIA's libraries, for what a program needs
//! of it, and checks every answer.
//!
//! - [`checks`]: what is checked, a file per subject
//! - [`hostile`]: what no guest may do
//! - [`intrude`]: what no process may do to another's client
//! - [`modes`]: longer runs that tests drive
//!
//! The same binary runs on a host and in a guest and gives the same verdict lines; only the detail
//! after the colon may differ. It uses what any user may use and changes no setting of the card.
#![forbid(unsafe_code)]

mod checks;
mod hostile;
mod intrude;
mod modes;
mod registered;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde_json::json;

use rmclient::{Card, Failure, Result};

/// Checks what NVIDIA's kernel driver answers, without NVIDIA's libraries.
///
/// Without an option that says otherwise, every check runs. `skip` (in JSON an `ok` of null) is a
/// check that others' work on the card hides. Exit status: 0 if nothing failed, 1 if a check failed
/// or there is no driver.
#[derive(Debug, Parser)]
#[command(version)]
struct Options {
    /// One JSON object a line instead of text
    #[arg(long)]
    json: bool,
    /// Names the checks and what each shows
    #[arg(long)]
    list: bool,
    /// Only this check (may be given again)
    #[arg(long, value_name = "NAME")]
    only: Vec<String>,
    /// Probes /dev/nvidiaN instead of the first card
    #[arg(long, value_name = "N")]
    card: Option<u32>,
    /// Opens, maps, unmaps and closes N times
    #[arg(long, value_name = "N")]
    cycles: Option<u64>,
    /// Touches each of N mappings the moment it is told of it
    #[arg(long, value_name = "N")]
    map_race: Option<u64>,
    /// Maps video memory and unmaps it at once, N times
    #[arg(long, value_name = "N")]
    map_drop: Option<u64>,
    /// Keeps video memory mapped, and looks at it at each line of standard input
    #[arg(long, value_name = "SECONDS")]
    hold: Option<u64>,
    /// Keeps video memory mapped, and reads and writes it even when its worker is gone
    #[arg(long, value_name = "SECONDS")]
    stale: Option<u64>,
    /// --stale allocates after a line of standard input, as soon as there is memory
    #[arg(long, requires = "stale")]
    wait: bool,
    /// Keeps video memory mapped and sleeps in a poll, until its files are lost
    #[arg(long, value_name = "SECONDS")]
    watch: Option<u64>,
    /// How much --hold, --stale and --watch keep, and --map-drop maps
    #[arg(long, value_name = "MIB", default_value_t = 2)]
    size: u64,
    /// Allocates video memory, so much at a time, until there is no more
    #[arg(long, group = "kept", value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    fill: Option<u64>,
    /// --fill goes on by smaller steps, until less than half of --size is left, and keeps it all;
    /// --register keeps the memory registered
    #[arg(long, value_name = "SECONDS", requires = "kept")]
    keep: Option<u64>,
    /// Fires what no guest may do, and expects each refusal
    #[arg(long)]
    hostile: bool,
    /// The same on a host: only what changes nothing is fired, and the answers are shown
    #[arg(long, conflicts_with = "hostile")]
    hostile_native: bool,
    /// Tries what no process may do to another's client and memory, as --hold tells of them
    #[arg(long, value_name = "CLIENT:MEMORY", value_parser = intrude::target)]
    intrude: Option<intrude::Target>,
    /// Registers memory of its own, up to so much, which a guest may with the capability `compute`
    #[arg(long, group = "kept", value_name = "MIB", value_parser = clap::value_parser!(u64).range(1..=1 << 20))]
    register: Option<u64>,
    /// --register has the card write there, which a simulated one does without being set up
    #[arg(long, requires = "register")]
    simulated: bool,
    /// Stays in one call for so long (a real card takes a second at most)
    #[arg(long, value_name = "MS")]
    block: Option<u64>,
}

fn main() -> ExitCode {
    let options = Options::parse();
    if options.list {
        for check in checks::ALL.iter().copied().flatten() {
            println!("{:<20} {}", check.name, check.about);
        }
        return ExitCode::SUCCESS;
    }
    if let Some(name) = options.only.iter().find(|name| !known(name)) {
        eprintln!("rmprobe: no check is called {name}; --list names them");
        return ExitCode::from(2);
    }
    let mut report = Report { json: options.json, failed: 0 };
    match rmclient::find_card(options.card) {
        Ok(card) => run(&options, &card, &mut report),
        Err(failure) => report.tell("driver", Duration::ZERO, Err(failure)),
    }
    if report.failed == 0 {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

fn known(name: &str) -> bool {
    checks::ALL.iter().copied().flatten().any(|check| check.name == name)
}

type Mode<'a> = Box<dyn FnOnce() -> Result<String> + 'a>;

/// The modes that were asked for, or else the checks.
fn run(options: &Options, card: &Card, report: &mut Report) {
    if options.hostile || options.hostile_native {
        report.each("hostile", |tell| hostile::run(card, options.hostile_native, tell));
        return;
    }
    if let Some(target) = options.intrude {
        report.each("intrude", |tell| intrude::run(card, target, tell));
        return;
    }
    if let (Some(mib), Some(time)) = (options.register, options.keep) {
        let time = Duration::from_secs(time);
        report.time("register", || registered::keep(card, mib, time));
        return;
    }
    if let Some(mib) = options.register {
        report.each("register", |tell| registered::run(card, mib, options.simulated, tell));
        return;
    }
    let seconds = |count| Duration::from_secs(count);
    let mut modes: Vec<(&str, Mode<'_>)> = Vec::new();
    if let Some(count) = options.cycles {
        modes.push(("cycles", Box::new(move || modes::cycles(card, count))));
    }
    if let Some(count) = options.map_race {
        modes.push(("map-race", Box::new(move || modes::map_race(card, count))));
    }
    if let Some(count) = options.map_drop {
        modes.push(("map-drop", Box::new(move || modes::map_drop(card, count, options.size))));
    }
    if let Some(ms) = options.block {
        modes.push(("block", Box::new(move || modes::block(card, Duration::from_millis(ms)))));
    }
    if let Some(count) = options.hold {
        modes.push(("hold", Box::new(move || modes::hold(card, seconds(count), options.size))));
    }
    if let Some(count) = options.stale {
        let (time, mib, wait) = (seconds(count), options.size, options.wait);
        modes.push(("stale", Box::new(move || modes::stale(card, time, mib, wait))));
    }
    if let Some(count) = options.watch {
        modes.push(("watch", Box::new(move || modes::watch(card, seconds(count), options.size))));
    }
    if let Some(mib) = options.fill {
        let keep = options.keep.map(|count| (seconds(count), options.size / 2));
        modes.push(("fill", Box::new(move || modes::fill(card, mib, keep))));
    }
    let some_mode = !modes.is_empty();
    for (name, mode) in modes {
        report.time(name, mode);
    }
    if some_mode && options.only.is_empty() {
        return;
    }
    for check in checks::ALL.iter().copied().flatten() {
        if options.only.is_empty() || options.only.iter().any(|name| name == check.name) {
            report.time(check.name, || (check.run)(card));
        }
    }
}

/// Prints verdicts and counts failures.
struct Report {
    json: bool,
    failed: u32,
}

impl Report {
    fn time(&mut self, name: &str, run: impl FnOnce() -> Result<String>) {
        let started = Instant::now();
        let result = run();
        self.tell(name, started.elapsed(), result);
    }

    /// A run that tells of many things; of itself only if it could not begin.
    fn each(&mut self, name: &str, run: impl FnOnce(hostile::Tell<'_>) -> Result<()>) {
        if let Err(failure) = run(&mut |name, result| self.tell(name, Duration::ZERO, result)) {
            self.tell(name, Duration::ZERO, Err(failure));
        }
    }

    fn tell(&mut self, name: &str, time: Duration, result: Result<String>) {
        let (verdict, ok, detail) = match result {
            Ok(detail) => ("ok", Some(true), detail),
            Err(failure @ Failure::Disturbed(_)) => ("skip", None, failure.to_string()),
            Err(failure) => ("FAIL", Some(false), failure.to_string()),
        };
        self.failed += u32::from(ok == Some(false));
        if self.json {
            println!(
                "{}",
                json!({"check": name, "ok": ok, "detail": detail, "ms": time.as_secs_f64() * 1e3})
            );
        } else {
            println!("{verdict} {name}: {detail}");
        }
    }
}
