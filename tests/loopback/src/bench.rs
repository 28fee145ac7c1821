//! What our own path costs: the same calls natively, and as a guest without a VM in several
//! manners of waiting, with floors from the same run.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::{Manner, Options, Result, Session};

/// A manner of being a guest.
#[derive(Clone, Copy)]
struct Way {
    name: &'static str,
    /// Microseconds that a caller looks, and a worker.
    looks: (u32, u32),
    /// Pointers are copied from as a kernel does.
    trusting: bool,
    /// The VMM is not as slow as stock QEMU.
    prompt: bool,
    /// An event wakes no thread of the launcher.
    attentive: bool,
}

const DEFAULT: Way =
    Way { name: "default", looks: (500, 30), trusting: true, prompt: false, attentive: true };
const WAYS: [Way; 6] = [
    DEFAULT,
    Way { name: "default, event by a thread", attentive: false, ..DEFAULT },
    Way { name: "busy-polling", looks: (1000, 1000), ..DEFAULT },
    Way { name: "sleeping", looks: (0, 0), ..DEFAULT },
    Way { name: "default, checked pointers", trusting: false, ..DEFAULT },
    Way { name: "default, prompt VMM", prompt: true, ..DEFAULT },
];

/// On so few processors a thread that looks takes the time of one that works.
const FEW: usize = 4;

/// One figure.
struct Figure {
    how: String,
    line: Value,
}

/// Measures everything and prints a table.
pub fn run(options: &Options) -> Result<()> {
    let measure = crate::beside("loopback-measure")?.into_os_string();
    let effort = OsString::from(options.effort.to_string());
    let mut figures = Vec::new();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    collect(&mut figures, "floor", Command::new(&measure).arg("floors").arg(&effort))?;
    if options.host != "sim" && Path::new("/dev/nvidiactl").exists() {
        collect(&mut figures, "native", Command::new(&measure).arg("calls").arg(&effort))?;
    }
    for way in WAYS {
        let mut started = options.clone();
        let (caller, worker) = way.looks;
        started.backend_arg.push(format!("--poll-us={worker}"));
        started.prompt |= way.prompt;
        started.attentive |= way.attentive && cores > FEW;
        let session = Session::start(&started)?;
        let manner = Manner { trace: None, native: false, trusting: way.trusting, poll_us: caller };
        let program = [measure.clone(), "calls".into(), effort.clone()];
        collect(&mut figures, way.name, &mut session.command(&program, &manner))?;
        session.end();
    }
    if let Some(path) = &options.json {
        let mut file = std::fs::File::create(path)?;
        for figure in &figures {
            writeln!(file, "{}", figure.line)?;
        }
    }
    print!("{}", table(&figures));
    Ok(())
}

fn collect(figures: &mut Vec<Figure>, how: &str, command: &mut Command) -> Result<()> {
    let output = command.stderr(Stdio::inherit()).output()?;
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let mut line: Value = serde_json::from_str(line)?;
        line["how"] = how.into();
        figures.push(Figure { how: how.to_owned(), line });
    }
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("measuring {how}: {}", output.status).into()),
    }
}

fn table(figures: &[Figure]) -> String {
    let mut text = format!("{:<22} {:<27} {:>9} {:>9} {:>7}\n", "what", "how", "p50", "p99", "n");
    let number = |line: &Value, name: &str| line[name].as_f64().unwrap_or(f64::NAN);
    for Figure { how, line } in figures {
        let what = line["what"].as_str().unwrap_or("?");
        match line["error"].as_str() {
            Some(error) => text.push_str(&format!("{what:<22} {how:<27} {error}\n")),
            None => text.push_str(&format!(
                "{what:<22} {how:<27} {:>6.1} us {:>6.1} us {:>7}\n",
                number(line, "p50_us"),
                number(line, "p99_us"),
                line["count"]
            )),
        }
    }
    text
}
