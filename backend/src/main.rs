//! `vhost-user-nvguest`: the backend of one guest.
//!
//! The map of the house. A call goes through the rooms in this order, and none
//! reads another's state:
//!
//! - `args`: the command line
//! - `sandbox`: what this process may not do
//! - `broker`: vhost-user, the window, the life of workers; `broker::device` first
//! - `transport`: virtqueues, and the link between broker and worker
//! - `worker`: one guest process: its files, and the requests on them
//! - `policy`: may it?
//! - `marshal`: every pointer aimed at our own memory, every descriptor at our own file
//! - `host`: the driver's own nodes, or a simulated card
//! - `wire`: the messages

use std::io::IsTerminal;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use nix::sys::signal::{SigSet, Signal};

use vhost_user_nvguest::args::{Args, HostChoice, LogFormat};
use vhost_user_nvguest::broker::{admin, nodes::Nodes, Broker, Limits, Settings};
use vhost_user_nvguest::host::facts::Facts;
use vhost_user_nvguest::host::sim::SimCard;
use vhost_user_nvguest::profile::{self, NoProfile};
use vhost_user_nvguest::transport::listen;
use vhost_user_nvguest::worker::start::HostKind;
use vhost_user_nvguest::{descriptors, sandbox, worker};

/// `EX_CONFIG` of sysexits: no profile fits the host's driver release.
const NO_PROFILE: u8 = 78;

/// Descriptors that a broker and a worker have room for from the start.
const BROKER_FILES: u64 = 4096;
const WORKER_FILES: u64 = 1024;

fn main() -> ExitCode {
    let args = Args::parse();
    start_logging(&args);
    let outcome = match args {
        Args { worker: true, .. } => serve_process(),
        Args { print_capabilities: true, .. } => print_capabilities(),
        args => serve_guest(&args),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("vhost-user-nvguest: {error:#}");
            let no_profile = error.downcast_ref::<NoProfile>().is_some();
            ExitCode::from(if no_profile { NO_PROFILE } else { 1 })
        }
    }
}

/// The steps of a broker's start, in their order.
fn serve_guest(args: &Args) -> Result<()> {
    let signals = hold_signals()?;
    descriptors::make_room(BROKER_FILES).context("Growing the table of descriptors failed")?;
    let settings = settings(args)?;
    if args.check {
        return check(args, &settings);
    }
    let (listener, socket) = listen(args)?;
    let admin = args.admin_socket.as_deref().map(listen::bind).transpose()?;
    let files = [socket, args.admin_socket.clone()];
    sandbox::broker()?;
    end_on_signal(signals, files.clone())?;
    let broker = Broker::new(settings)?;
    if let Some(listener) = admin {
        admin::start(&broker, listener)?;
    }
    let (connection, _) = listener.accept().context("Waiting for the VMM failed")?;
    let outcome = broker.serve(connection);
    tracing::info!(status = %admin::status(&broker), "the guest is gone");
    remove(&files);
    outcome
}

/// One guest process, for a broker on standard input.
fn serve_process() -> Result<()> {
    descriptors::make_room(WORKER_FILES).context("Growing the table of descriptors failed")?;
    SigSet::all().thread_unblock().context("Taking signals failed")?;
    let link = std::os::fd::AsFd::as_fd(&std::io::stdin()).try_clone_to_owned()?;
    sandbox::worker()?;
    worker::run(UnixStream::from(link)).context("A worker failed")
}

fn print_capabilities() -> Result<()> {
    println!("{}", serde_json::json!({"type": "nvguest", "features": []}));
    Ok(())
}

fn start_logging(args: &Args) {
    // Workers are started with the broker's own choice, by its environment.
    let chosen = std::env::var("NVGUEST_LOG").ok().filter(|_| args.worker);
    let level = chosen.as_deref().unwrap_or(&args.log_level);
    if !args.worker {
        std::env::set_var("NVGUEST_LOG", level);
    }
    let builder = tracing_subscriber::fmt()
        .with_env_filter(tracing_subscriber::EnvFilter::new(level))
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr);
    match args.log_format {
        LogFormat::Text => builder.init(),
        LogFormat::Json => builder.json().init(),
    }
}

fn settings(args: &Args) -> Result<Settings> {
    let capabilities = args.capabilities();
    let real = match args.host {
        HostChoice::Nvidia => true,
        HostChoice::Sim => false,
        HostChoice::Auto => Path::new("/dev/nvidiactl").exists(),
    };
    let facts = if real {
        Facts::of_host(Path::new("/"))
            .context("The host's driver cannot be used")?
            .select(args.gpu.as_deref())?
    } else {
        Facts::of_sim()
    };
    let facts = facts.allowed(capabilities);
    let folder = args.profiles.as_deref();
    let compiled = profile::resolve(&facts.release, capabilities, folder, args.allow_unmeasured)?;
    tracing::info!(release = compiled.release, profile = compiled.profile, "resolved");
    Ok(Settings {
        compiled: Arc::new(compiled),
        nodes: Nodes::new(&facts),
        host: if real { HostKind::Nvidia } else { HostKind::Sim },
        card: if real { None } else { Some(SimCard::create(SimCard::DEFAULT_SIZE)?) },
        window_size: args.window_size,
        arena_size: args.arena_size(),
        poll_us: args.poll_us,
        limits: Limits::default(),
    })
}

/// Says what was found.
fn check(args: &Args, settings: &Settings) -> Result<()> {
    let host = match settings.host {
        HostKind::Nvidia => "the host's own",
        HostKind::Sim => "a simulated card",
    };
    println!("driver    {} ({host})", settings.compiled.release);
    println!("profile   {}", settings.compiled.profile);
    for device in settings.nodes.devices.iter().flatten() {
        println!("node      {}", device.path);
    }
    println!("window    {} GiB", args.window_size >> 30);
    println!("arena     {} MiB", args.arena_size() >> 20);
    println!("sandbox   {}", sandbox::describe());
    Ok(())
}

fn listen(args: &Args) -> Result<(UnixListener, Option<PathBuf>)> {
    match (&args.socket_path, args.fd) {
        (Some(path), _) => Ok((listen::bind(path)?, Some(path.clone()))),
        (None, Some(fd)) => Ok((listen::inherited(fd)?, None)),
        (None, None) => {
            let missing = "where to listen is missing: give --socket-path or --fd";
            Args::command().error(ErrorKind::MissingRequiredArgument, missing).exit()
        }
    }
}

fn remove(files: &[Option<PathBuf>]) {
    for file in files.iter().flatten() {
        std::fs::remove_file(file).ok();
    }
}

/// Keeps SIGTERM and SIGINT for the thread that waits for them.
fn hold_signals() -> Result<SigSet> {
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGTERM);
    signals.add(Signal::SIGINT);
    signals.thread_block().context("Holding signals failed")?;
    Ok(signals)
}

/// Ends the process on a signal, leaving no file. Its workers end with their links.
fn end_on_signal(signals: SigSet, files: [Option<PathBuf>; 2]) -> Result<()> {
    std::thread::Builder::new()
        .name("signals".into())
        .stack_size(64 << 10)
        .spawn(move || {
            if signals.wait().is_ok() {
                remove(&files);
                std::process::exit(0);
            }
        })
        .context("Starting the signal thread failed")?;
    Ok(())
}
