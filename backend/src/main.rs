//! `vhost-user-nvguest`: the backend of one guest.
//!
//! The map of the house. A call goes through the rooms in this order, and none
//! reads another's state:
//!
//! - `args`: the command line
//! - `sandbox`: what these processes may not do
//! - `starter`: the process that starts workers
//! - `broker`: vhost-user, the window, the life of workers; `broker::device` first
//! - `transport`: virtqueues, and the link between broker and worker
//! - `worker`: one guest process: its files, and the requests on them
//! - `policy`: may it?
//! - `marshal`: every pointer aimed at our own memory, every descriptor at our own file
//! - `host`: the driver's own nodes, or a simulated card
//! - `limits`, `budgets`: what a guest may have of us, and of the card
//! - `wire`: the messages

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use anyhow::{Context, Result};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser};
use nix::fcntl::Flock;
use nix::sys::signal::{SigSet, Signal};
use sd_notify::NotifyState;

use vhost_user_nvguest::args::{Args, HostChoice};
use vhost_user_nvguest::broker::{admin, metrics, nodes::Nodes, Broker, Settings};
use vhost_user_nvguest::host::facts::Facts;
use vhost_user_nvguest::host::sim::SimCards;
use vhost_user_nvguest::limits::Resource;
use vhost_user_nvguest::profile::{self, NoProfile};
use vhost_user_nvguest::sandbox::{self, privileges, Plan};
use vhost_user_nvguest::starter::{self, Starter};
use vhost_user_nvguest::transport::listen;
use vhost_user_nvguest::worker::start::HostKind;
use vhost_user_nvguest::{descriptors, log, worker};

/// `EX_CONFIG` of sysexits: no profile fits the host's driver release.
const NO_PROFILE: u8 = 78;

/// Descriptors that a broker and a worker have room for from the start.
const BROKER_FILES: u64 = 4096;
const WORKER_FILES: u64 = 1024;

fn main() -> ExitCode {
    let args = Args::parse();
    start_logging(&args);
    let outcome = match args {
        Args { worker: true, .. } => serve_process(&args),
        Args { starter: true, .. } => serve_broker(args),
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
    privileges::check(args.allow_root)?;
    let settings = settings(args)?;
    if args.check {
        return check(args, &settings);
    }
    sandbox::State::possible(args.sandbox).check()?;
    privileges::raise_files()?;
    descriptors::make_room(BROKER_FILES).context("Growing the table of descriptors failed")?;
    let sockets = Sockets::open(args)?;
    privileges::leave_network();
    privileges::give_up()?;
    let mut plan = plan(&settings, sockets.files.clone());
    plan.publish.clone_from(&args.metrics_file);
    let starter = Starter::launch(args.sandbox, &plan)?;
    // Whoever waits for us may start the VMM: it can connect. From here on no socket is made.
    sd_notify::notify(&[NotifyState::Ready]).context("Telling systemd failed")?;
    let state = sandbox::broker(args.sandbox)?;
    let broker = Broker::new(settings, starter, state)?;
    log::limit(&broker.rates, args.limits.guest(Resource::Lines));
    end_on_signal(signals, &broker)?;
    if let Some(listener) = sockets.admin {
        admin::start(&broker, listener)?;
    }
    if let Some(listener) = sockets.metrics {
        metrics::serve(&broker, listener)?;
    }
    if args.metrics_file.is_some() {
        metrics::keep_file(&broker)?;
    }
    let (connection, _) = sockets.guest.accept().context("Waiting for the VMM failed")?;
    let outcome = broker.serve(connection);
    tracing::info!(status = %admin::summary(&broker), "the guest is gone");
    remove(&broker);
    outcome
}

/// Starts workers, for a broker on standard input.
fn serve_broker(args: Args) -> Result<()> {
    let link = std::io::stdin().as_fd().try_clone_to_owned()?;
    let plan = Plan { nodes: args.node, leftovers: args.leftover, publish: args.publish };
    starter::run(link, args.sandbox, &plan)
}

/// One guest process, for a broker on standard input.
fn serve_process(args: &Args) -> Result<()> {
    descriptors::make_room(WORKER_FILES).context("Growing the table of descriptors failed")?;
    SigSet::all().thread_unblock().context("Taking signals failed")?;
    privileges::give_up()?;
    let link = std::io::stdin().as_fd().try_clone_to_owned()?;
    worker::run(UnixStream::from(link), args.sandbox).context("A worker failed")
}

fn print_capabilities() -> Result<()> {
    println!("{}", serde_json::json!({"type": "nvguest", "features": []}));
    Ok(())
}

fn start_logging(args: &Args) {
    // Starter and workers are started with the broker's own choice, by its environment.
    let started = args.worker || args.starter;
    let chosen = std::env::var("NVGUEST_LOG").ok().filter(|_| started);
    let level = chosen.as_deref().unwrap_or(&args.log_level);
    if !started {
        std::env::set_var("NVGUEST_LOG", level);
    }
    log::start(level, args.log_format);
}

fn settings(args: &Args) -> Result<Settings> {
    let capabilities = args.capabilities();
    let real = match args.host {
        HostChoice::Nvidia => true,
        HostChoice::Sim => false,
        HostChoice::Auto => Path::new("/dev/nvidiactl").exists(),
    };
    let cards = SimCards::count_from_environment();
    let facts = if real {
        Facts::of_host(Path::new("/")).context("The host's driver cannot be used")?
    } else {
        Facts::of_sim(cards)
    };
    let facts = facts.select(&args.gpu)?.allowed(capabilities);
    let folder = args.profiles.as_deref();
    let compiled = profile::resolve(&facts.release, capabilities, folder, args.allow_unmeasured)?;
    tracing::info!(release = compiled.release, profile = compiled.profile, "resolved");
    let card = (!real).then(|| SimCards::from_environment(cards)).transpose();
    Ok(Settings {
        compiled: Arc::new(compiled),
        nodes: Nodes::new(&facts),
        host: if real { HostKind::Nvidia } else { HostKind::Sim },
        card: card.context("Having the simulated cards failed")?,
        window_size: args.window_size,
        arena_size: args.arena_size(),
        poll_us: args.poll_us,
        limits: args.limits,
        budgets: args.budgets(),
        own_user: args.own_user,
        name: args.name.clone(),
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
    println!("sandbox   {}", sandbox::State::possible(args.sandbox));
    println!("files     {} a process at most", privileges::files()?);
    Ok(())
}

/// What the starter may open and remove for this backend.
fn plan(settings: &Settings, leftovers: Vec<PathBuf>) -> Plan {
    let nodes = settings.nodes.devices.iter().flatten();
    let nodes = match settings.host {
        HostKind::Nvidia => nodes.map(|node| PathBuf::from(&node.path)).collect(),
        HostKind::Sim => Vec::new(),
    };
    Plan { nodes, leftovers, publish: None }
}

/// Where this backend listens, and the files of it.
struct Sockets {
    guest: UnixListener,
    admin: Option<UnixListener>,
    metrics: Option<UnixListener>,
    files: Vec<PathBuf>,
    _pid: Option<Flock<File>>,
}

impl Sockets {
    fn open(args: &Args) -> Result<Self> {
        let group = args.socket_group.as_deref().map(listen::group).transpose()?;
        let named = args.name.as_deref().map(|name| listen::folder(name, group)).transpose()?;
        let default = |path: &Option<PathBuf>, file: &str| {
            path.clone().or_else(|| named.as_ref().map(|folder| folder.join(file)))
        };
        let own = args.socket_path.clone().or_else(|| match args.fd {
            Some(_) => None,
            None => default(&None, "vhost.sock"),
        });
        let mut files = Vec::new();
        let (guest, pid) = match (&own, args.fd) {
            (Some(path), _) => {
                let pid_path = listen::pid_path(path);
                let pid = listen::pid_file(&pid_path)?;
                // The socket first: with its number gone another backend may begin.
                files.extend([path.clone(), pid_path]);
                (listen::bind(path, group)?, Some(pid))
            }
            (None, Some(fd)) => (listen::inherited(fd)?, None),
            (None, None) => {
                let missing = "where to listen is missing: give --name, --socket-path or --fd";
                Args::command().error(ErrorKind::MissingRequiredArgument, missing).exit()
            }
        };
        let admin = default(&args.admin_socket, "admin.sock");
        // Not the group's: who can ask can also change what the guest may have.
        let listener = admin.as_deref().map(|path| listen::bind(path, None)).transpose()?;
        let metrics = args.metrics_socket.as_deref();
        let scraped = metrics.map(|path| listen::bind(path, group)).transpose()?;
        files.extend(admin);
        files.extend(
            [metrics, args.metrics_file.as_deref()].into_iter().flatten().map(PathBuf::from),
        );
        Ok(Self { guest, admin: listener, metrics: scraped, files, _pid: pid })
    }
}

/// Leaves no file. The starter does it: the broker may open nothing and remove nothing.
fn remove(broker: &Broker) {
    if let Err(error) = broker.starter.remove() {
        tracing::warn!(%error, "the sockets could not be removed");
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
fn end_on_signal(signals: SigSet, broker: &Arc<Broker>) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("signals".into())
        .stack_size(64 << 10)
        .spawn(move || {
            if signals.wait().is_ok() {
                remove(&broker);
                std::process::exit(0);
            }
        })
        .context("Starting the signal thread failed")?;
    Ok(())
}
