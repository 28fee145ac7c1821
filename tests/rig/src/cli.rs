//! The `guest` command, shared by xtask and the bundle.

use std::io::{self, IsTerminal, Read, Write};
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::{bail, Context, Result};
use clap::{Args, ValueEnum};
use nix::sys::termios::{cfmakeraw, tcgetattr, tcsetattr, SetArg, Termios};

use crate::assets::{Assets, DEFAULT_KERNEL, KERNELS};
use crate::guest::Guest;
use crate::nvidia;
use crate::proto::{FromGuest, ToGuest};
use crate::rig::{Builder, Host, Rig};

/// Boot guests and run a command in each.
#[derive(Debug, Clone, Args)]
pub struct GuestArgs {
    /// The line of shell to run in every guest, started in all at once
    #[arg(long, value_name = "CMD", required_unless_present = "shell")]
    pub run: Option<String>,

    /// Open a shell in the guest instead; ends with `exit`
    #[arg(long, conflicts_with_all = ["run", "json"])]
    pub shell: bool,

    /// What the guests' card is
    #[arg(long, value_enum, default_value = "auto")]
    pub host: HostArg,

    /// How many guests
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u8).range(1..=32))]
    pub guests: u8,

    /// Their kernel's series
    #[arg(long, default_value = DEFAULT_KERNEL, value_parser = KERNELS)]
    pub kernel: String,

    /// Virtual processors of a guest
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub cpus: u32,

    /// Memory of a guest, in MiB
    #[arg(long, value_name = "MIB", default_value_t = 2048)]
    pub memory: u32,

    /// End the command after this many seconds
    #[arg(long, value_name = "S", default_value_t = 300)]
    pub timeout: u64,

    /// Show a folder of this machine in the guests, read-only
    #[arg(long, value_name = "FOLDER:PATH")]
    pub share: Vec<String>,

    /// Set a variable for the command
    #[arg(long, value_name = "NAME=VALUE")]
    pub env: Vec<String>,

    /// Words for the command line of their kernel
    #[arg(long, value_name = "WORDS", default_value = "", allow_hyphen_values = true)]
    pub append: String,

    /// Parameters for virtio_nvguest.ko
    #[arg(long, value_name = "PARAMS", default_value = "", allow_hyphen_values = true)]
    pub module_params: String,

    /// A word for the backend's command line; may be repeated
    #[arg(long, value_name = "WORD", allow_hyphen_values = true)]
    pub backend_arg: Vec<String>,

    /// Put the card behind a root port, where its backend can be replaced
    #[arg(long)]
    pub hotpluggable: bool,

    /// Keep logs (console, QEMU, backend, dmesg) in this folder
    #[arg(long, value_name = "FOLDER")]
    pub logs: Option<PathBuf>,

    /// Print one JSON object with every guest's output
    #[arg(long)]
    pub json: bool,
}

/// `--host`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HostArg {
    /// The host's card where there is one, else the simulated card
    Auto,
    /// The simulated card
    Sim,
    /// The host's NVIDIA card
    Nvidia,
    /// No card at all: neither device nor backend
    None,
}

impl HostArg {
    fn host(self) -> Option<Host> {
        match self {
            HostArg::Auto => Some(Host::Auto.resolve()),
            HostArg::Sim => Some(Host::Sim),
            HostArg::Nvidia => Some(Host::Nvidia),
            HostArg::None => None,
        }
    }
}

impl GuestArgs {
    /// The arguments of a plain `--run CMD`.
    pub fn running(line: &str) -> GuestArgs {
        GuestArgs {
            run: Some(line.to_owned()),
            shell: false,
            host: HostArg::Auto,
            guests: 1,
            kernel: DEFAULT_KERNEL.to_owned(),
            cpus: 2,
            memory: 2048,
            timeout: 300,
            share: Vec::new(),
            env: Vec::new(),
            append: String::new(),
            module_params: String::new(),
            backend_arg: Vec::new(),
            hotpluggable: false,
            logs: None,
            json: false,
        }
    }

    fn builder(&self, assets: &Assets) -> Result<Builder> {
        let mut builder = Rig::builder()
            .assets(assets.clone())
            .kernel(&self.kernel)
            .guests(usize::from(self.guests))
            .cpus(self.cpus)
            .memory_mib(self.memory)
            .append(&self.append)
            .module_params(&self.module_params)
            .backend_args(self.backend_arg.iter().cloned());
        if self.hotpluggable {
            builder = builder.hotpluggable();
        }
        if let Some(host) = self.host.host() {
            if host == Host::Nvidia && !nvidia::has_card() {
                bail!("this machine has no /dev/nvidiactl; load NVIDIA's driver or use --host sim");
            }
            builder = builder.host(host);
        }
        for share in &self.share {
            let Some((folder, at)) = share.split_once(':') else {
                bail!(
                    "--share {share} has no colon; write FOLDER:PATH, like /opt/torch:/opt/torch"
                );
            };
            builder = builder.share(folder, at);
        }
        for variable in &self.env {
            let Some((name, value)) = variable.split_once('=') else {
                bail!("--env {variable} has no equals sign; write NAME=VALUE");
            };
            builder = builder.env(name, value);
        }
        Ok(builder)
    }

    /// What the guests' card is, in words.
    pub fn card(&self) -> &'static str {
        match self.host.host() {
            Some(Host::Nvidia) => "this host's NVIDIA card",
            Some(_) => "the simulated card",
            None => "no card",
        }
    }
}

/// Boots, runs, prints, and gives the exit code of the command.
pub fn guest(assets: &Assets, args: &GuestArgs) -> Result<ExitCode> {
    let say = |text: &str| {
        if !args.json {
            eprintln!("» {text}");
        }
    };
    say(&format!(
        "boot {} guest{} on Linux {} with {}",
        args.guests,
        if args.guests == 1 { "" } else { "s" },
        args.kernel,
        args.card()
    ));
    let begin = Instant::now();
    let rig = args.builder(assets)?.boot()?;
    say(&format!(
        "up after {:.1} s, on {}; in the guest Linux {}, nodes: {}",
        begin.elapsed().as_secs_f64(),
        rig.accel(),
        rig.guest(0).ready().kernel,
        rig.guest(0).ready().nodes.join(" ")
    ));
    let code = match &args.run {
        Some(line) if args.json => run_for_json(&rig, line, args)?,
        Some(line) => run_aloud(&rig, line, args)?,
        None => shell(rig.guest(0))?,
    };
    if let Some(folder) = &args.logs {
        keep_logs(&rig, folder)?;
    }
    Ok(ExitCode::from(code))
}

fn commands<'a>(rig: &'a Rig, line: &str, args: &GuestArgs) -> Vec<crate::guest::Command<'a>> {
    let limit = Duration::from_secs(args.timeout);
    rig.guests().iter().map(|it| it.command(["sh", "-c", line]).timeout(limit)).collect()
}

/// Output as it comes; with several guests each line says whose it is.
fn run_aloud(rig: &Rig, line: &str, args: &GuestArgs) -> Result<u8> {
    let several = rig.guests().len() > 1;
    let held = commands(rig, line, args).into_iter().map(|command| command.hold().spawn());
    let mut held = held.collect::<Result<Vec<_>>>()?;
    for process in &mut held {
        process.go()?;
    }
    let ends = std::thread::scope(|scope| {
        let waiting: Vec<_> = held
            .into_iter()
            .zip(rig.guests())
            .map(|(process, guest)| {
                let prefix = if several { format!("{}| ", guest.name()) } else { String::new() };
                scope.spawn(move || {
                    let mut end = (1, String::new());
                    process.wait_with(|message, data| show(message, data, &prefix, &mut end))?;
                    Ok::<_, anyhow::Error>((guest.name(), end))
                })
            })
            .collect();
        waiting
            .into_iter()
            .map(|it| it.join().map_err(|_| anyhow::anyhow!("a printing thread panicked"))?)
            .collect::<Result<Vec<_>>>()
    })?;
    for (name, (_, verdict)) in &ends {
        eprintln!("» {name}: {verdict}");
    }
    Ok(ends.iter().map(|(_, (code, _))| *code).max().unwrap_or(1))
}

fn show(message: &FromGuest, data: &[u8], prefix: &str, end: &mut (u8, String)) {
    // A reader that has gone away is no reason to stop the guest half-way.
    let _reader_gone = match message {
        FromGuest::Stdout { .. } => print_bytes(&mut io::stdout().lock(), data, prefix),
        FromGuest::Stderr { .. } => print_bytes(&mut io::stderr().lock(), data, prefix),
        FromGuest::Exit { code, signal, micros, timed_out, .. } => {
            *end = (exit_code(*code, *signal), verdict(*code, *signal, *micros, *timed_out));
            Ok(())
        }
        _ => Ok(()),
    };
}

fn print_bytes(to: &mut impl Write, data: &[u8], prefix: &str) -> io::Result<()> {
    if prefix.is_empty() {
        to.write_all(data)?;
        return to.flush();
    }
    for line in String::from_utf8_lossy(data).lines() {
        writeln!(to, "{prefix}{line}")?;
    }
    to.flush()
}

fn exit_code(code: Option<i32>, signal: Option<i32>) -> u8 {
    let code = code.or(signal.map(|signal| 128 + signal)).unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

fn verdict(code: Option<i32>, signal: Option<i32>, micros: u64, timed_out: bool) -> String {
    let output = crate::guest::Output {
        code,
        signal,
        duration: Duration::from_micros(micros),
        timed_out,
        ..Default::default()
    };
    format!("{} after {:.3} s in the guest", output.verdict(), output.duration.as_secs_f64())
}

fn run_for_json(rig: &Rig, line: &str, args: &GuestArgs) -> Result<u8> {
    let outputs = Rig::together(commands(rig, line, args))?;
    let guests: Vec<_> = rig
        .guests()
        .iter()
        .zip(&outputs)
        .map(|(guest, output)| {
            serde_json::json!({
                "name": guest.name(),
                "kernel": guest.ready().kernel,
                "boot_s": guest.ready().uptime,
                "nodes": guest.ready().nodes,
                "code": output.code,
                "signal": output.signal,
                "timed_out": output.timed_out,
                "seconds": output.duration.as_secs_f64(),
                "stdout": output.stdout_text(),
                "stderr": output.stderr_text(),
            })
        })
        .collect();
    let report = serde_json::json!({
        "command": line,
        "card": args.card(),
        "accel": rig.accel().to_string(),
        "guests": guests,
    });
    println!("{report:#}");
    Ok(outputs.iter().map(|it| exit_code(it.code, it.signal)).max().unwrap_or(1))
}

/// A terminal whose settings come back when this is dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Raw> {
        let before = tcgetattr(io::stdin()).context("read the terminal's settings")?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(io::stdin(), SetArg::TCSANOW, &raw).context("set the terminal raw")?;
        Ok(Raw(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _no_terminal = tcsetattr(io::stdin().as_fd(), SetArg::TCSANOW, &self.0);
    }
}

/// A shell in the guest on this terminal.
fn shell(guest: &Guest) -> Result<u8> {
    let has_terminal = io::stdin().is_terminal();
    let day = Duration::from_secs(24 * 60 * 60);
    let process = guest.command(["sh", "-l"]).terminal().timeout(day).spawn()?;
    let raw = if has_terminal { Some(Raw::enter()?) } else { None };
    let mut end = (1, String::new());
    let id = process.id();
    let channel = &guest.channel;
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut buffer = [0; 4096];
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                if !readable_soon() {
                    continue;
                }
                let Ok(len) = io::stdin().read(&mut buffer) else { break };
                // The end of input is the terminal's own sign for it.
                let data = if len == 0 { &b"\x04"[..] } else { &buffer[..len] };
                if channel.send(&ToGuest::Stdin { id }, data).is_err() || len == 0 {
                    break;
                }
            }
        });
        let outcome = process.wait_with(|message, data| show(message, data, "", &mut end));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        outcome
    })?;
    drop(raw);
    Ok(end.0)
}

/// Waits a moment for input, so that the end of the shell is noticed too.
fn readable_soon() -> bool {
    use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
    let stdin = io::stdin();
    let mut waiting = [PollFd::new(stdin.as_fd(), PollFlags::POLLIN)];
    poll(&mut waiting, PollTimeout::from(100u8)).is_ok_and(|ready| ready > 0)
}

fn keep_logs(rig: &Rig, folder: &std::path::Path) -> Result<()> {
    for guest in rig.guests() {
        let to = folder.join(guest.name());
        std::fs::create_dir_all(&to).with_context(|| format!("create {}", to.display()))?;
        for log in ["console", "qemu.log", "backend.log"] {
            let from = rig.folder().join(guest.name()).join(log);
            if from.exists() {
                std::fs::copy(&from, to.join(log))
                    .with_context(|| format!("copy {}", from.display()))?;
            }
        }
        std::fs::write(to.join("dmesg"), guest.dmesg()?).context("keep the guest's dmesg")?;
    }
    Ok(())
}
