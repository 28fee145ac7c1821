//! `nvguest-loopback`: a guest without a VM. It starts a backend, becomes its VMM, and runs a
//! program whose calls on `/dev/nvidia*` go to that backend as a guest's would.
//!
//! - [`launcher`]: the VMM, and what a guest has only one of
//! - [`broker`]: the backend's process
//! - [`names`], [`compare`]: what a program asked, with names; natively and here
//! - [`bench`]: what our own path costs
//! - [`board`], [`talk`]: what is shared with the programs

mod bench;
#[allow(dead_code, reason = "each half uses its part")]
mod board;
mod broker;
mod compare;
mod launcher;
mod names;
#[allow(dead_code, reason = "each half uses its part")]
mod talk;

use std::ffi::OsString;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use clap::Parser;
use nvguest_abi::names::Names;

use crate::broker::Broker;
use crate::launcher::{Launcher, Vm};

/// How long the backend may take to close what a program left.
const CLOSING: Duration = Duration::from_secs(10);

/// Run a program as a guest without a VM: its calls on /dev/nvidia* go to the real backend over
/// the real protocol.
///
/// There is no VM exit and no interrupt in what it measures, and it is no security boundary.
/// Exit status: the program's, or 125 if it could not be run.
#[derive(Clone, Debug, Parser)]
#[command(version)]
struct Options {
    /// Be the guest of the backend that listens here, and start none
    #[arg(long, value_name = "SOCKET")]
    broker: Option<PathBuf>,
    /// Which driver answers the backend that is started
    #[arg(long, default_value = "auto", value_name = "HOST")]
    host: String,
    /// The backend; else NVGUEST_BACKEND, else what lies beside this program
    #[arg(long, value_name = "FILE")]
    backend: Option<PathBuf>,
    /// An argument for the backend (may be given again)
    #[arg(long, value_name = "ARG", allow_hyphen_values = true)]
    backend_arg: Vec<String>,
    /// Write each call and its answer here, with names
    #[arg(long, value_name = "FILE")]
    trace: Option<PathBuf>,
    /// With --trace: run the program natively, with the host's own driver
    #[arg(long, requires = "trace")]
    native: bool,
    /// Run the program natively too, and say where calls or answers differ
    #[arg(long)]
    compare: bool,
    /// With --compare: as a guest each time, which shows what differs from run to run
    #[arg(long)]
    twice: bool,
    /// How long a caller looks at its queue before it sleeps, in microseconds
    #[arg(long, value_name = "US", default_value_t = 500)]
    poll_us: u32,
    /// Copy from the program's pointers without asking the kernel about them first: faster, as
    /// in a kernel, but a bad pointer is a crash instead of EFAULT
    #[arg(long)]
    trusting: bool,
    /// Place memory before saying so, and do not send it back as RAM: stock QEMU does neither
    #[arg(long)]
    prompt: bool,
    /// Look at the event queues instead of sleeping for them, as a processor takes an
    /// interrupt without waking a thread: takes a core
    #[arg(long)]
    attentive: bool,
    /// Measure what our own path costs, with floors, instead of running a program
    #[arg(long)]
    bench: bool,
    /// With --bench: also write each figure here, a JSON object a line
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// With --bench: how often each call is made, in percent of the usual
    #[arg(long, value_name = "PERCENT", default_value_t = 100)]
    effort: u32,
    /// The program and its arguments
    #[arg(last = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let options = Options::parse();
    let outcome = match options.bench {
        true => bench::run(&options).map(|()| ExitCode::SUCCESS),
        false if options.program.is_empty() => {
            eprintln!("nvguest-loopback: no program is given; put it behind --");
            return ExitCode::from(2);
        }
        false if options.compare => compare::run(&options),
        false => Session::start(&options).and_then(|session| session.run_traced(&options)),
    };
    outcome.unwrap_or_else(|error| {
        eprintln!("nvguest-loopback: {error}");
        ExitCode::from(125)
    })
}

/// A backend, its guest, and the socket for programs.
struct Session {
    launcher: Arc<Launcher>,
    broker: Option<Broker>,
    folder: tempfile::TempDir,
    preload: PathBuf,
}

/// How a program is run.
#[derive(Default)]
struct Manner<'a> {
    trace: Option<&'a Path>,
    native: bool,
    trusting: bool,
    poll_us: u32,
}

impl Session {
    fn start(options: &Options) -> Result<Self> {
        // A table of descriptors that grows later makes every thread wait for an RCU grace
        // period; a VMM with more files than these has that too, a program's guest has not.
        if let Ok(high) = nix::fcntl::fcntl(std::io::stdin(), nix::fcntl::F_DUPFD_CLOEXEC(4095)) {
            nix::unistd::close(high)?;
        }
        let folder = tempfile::Builder::new().prefix("nvguest-loopback").tempdir()?;
        let preload = beside("libnvguest_loopback.so")?;
        let (broker, socket) = match &options.broker {
            Some(socket) => (None, socket.clone()),
            None => {
                let broker = Broker::start(options, folder.path())?;
                (Some(broker), folder.path().join("backend"))
            }
        };
        let vm = Vm { prompt: options.prompt, attentive: options.attentive };
        let launcher = Launcher::start(&socket, vm)?;
        launcher.serve(UnixListener::bind(folder.path().join("programs"))?)?;
        Ok(Self { launcher, broker, folder, preload })
    }

    /// A program of this guest, not yet started.
    fn command(&self, program: &[OsString], manner: &Manner<'_>) -> Command {
        let mut command = Command::new(&program[0]);
        command.args(&program[1..]);
        let mut preload = self.preload.clone().into_os_string();
        if let Some(more) = std::env::var_os("LD_PRELOAD") {
            preload.push(":");
            preload.push(more);
        }
        let socket = self.folder.path().join("programs");
        command.env("LD_PRELOAD", preload);
        command.env(talk::SOCKET, format!("{}:{}", std::process::id(), socket.display()));
        command.env(talk::POLL, manner.poll_us.to_string());
        for (name, set) in [(talk::NATIVE, manner.native), (talk::TRUSTING, manner.trusting)] {
            command.env(name, if set { "1" } else { "0" });
        }
        match manner.trace {
            Some(path) => command.env(talk::TRACE, path),
            None => command.env_remove(talk::TRACE),
        };
        command
    }

    fn run_traced(self, options: &Options) -> Result<ExitCode> {
        let raw = self.folder.path().join("trace");
        let trace = options.trace.as_ref().map(|_| raw.as_path());
        let manner = Manner {
            trace,
            native: options.native,
            trusting: options.trusting,
            poll_us: options.poll_us,
        };
        let status = self.command(&options.program, &manner).status().map_err(|error| {
            format!("{} was not run: {error}", options.program[0].to_string_lossy())
        })?;
        if let Some(path) = &options.trace {
            let text = std::fs::read_to_string(&raw).unwrap_or_default();
            std::fs::write(path, names::named(&text, &Names::of(&self.release())))?;
        }
        self.end();
        Ok(code_of(status))
    }

    /// The driver's release.
    fn release(&self) -> String {
        let Ok(schema) = self.launcher.guest().probe() else { return String::new() };
        let name = schema.hello.driver;
        let length = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        String::from_utf8_lossy(&name[..length]).into_owned()
    }

    /// Waits for what programs left to be closed, and ends the guest.
    fn end(self) {
        if !self.launcher.await_closed(CLOSING) {
            eprintln!("nvguest-loopback: files are still open {} s later", CLOSING.as_secs());
        }
        self.launcher.guest().hang_up();
        if let Some(broker) = self.broker {
            broker.end();
        }
    }
}

fn code_of(status: ExitStatus) -> ExitCode {
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    ExitCode::from(u8::try_from(code).unwrap_or(125))
}

/// A file that was built with this program.
fn beside(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let folder = own.parent().unwrap_or(Path::new("."));
    let places = [folder.join(name), folder.join("..").join(name)];
    let found = places.iter().find(|place| place.exists());
    let found = found.ok_or_else(|| format!("{name} is not in {}", folder.display()))?;
    Ok(found.canonicalize()?)
}
