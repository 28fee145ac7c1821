//! A command of the host's: started, fed, watched, ended.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, ExitStatus, Stdio};
use std::sync::mpsc::{channel, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::pty::openpty;
use nix::sys::signal::{killpg, Signal};
use nix::unistd::Pid;
use nvguest_rig::proto::{Command, FromGuest};

use crate::serve::Host;

/// How long output may trail its command: a grandchild can hold the pipe.
const TRAIL: Duration = Duration::from_secs(1);

/// What the host can do to a command.
enum Order {
    Go,
    Input(Vec<u8>),
    Signal(i32),
    Ended(ExitStatus, Instant),
}

/// A command that has been asked for.
pub struct Running {
    orders: Sender<Order>,
}

impl Running {
    /// Starts the command, or prepares it when it is to be held.
    pub fn new(id: u32, command: Command, host: Host) -> Running {
        let (orders, inbox) = channel();
        let handle = orders.clone();
        thread::spawn(move || {
            if let Err(error) = live(id, &command, &host, &inbox, handle) {
                let error = format!("{error:#}");
                host.send(&FromGuest::Failed { id, error }, &[]);
            }
        });
        Running { orders }
    }

    /// Starts a held command.
    pub fn go(&self) {
        self.order(Order::Go);
    }

    /// Gives the command input; none closes it.
    pub fn input(&self, data: Vec<u8>) {
        self.order(Order::Input(data));
    }

    /// Signals the command's process group.
    pub fn signal(&self, signal: i32) {
        self.order(Order::Signal(signal));
    }

    /// An order to a command that has ended has nobody to carry it out.
    fn order(&self, order: Order) {
        let _ended = self.orders.send(order);
    }
}

fn live(
    id: u32,
    command: &Command,
    host: &Host,
    inbox: &Receiver<Order>,
    orders: Sender<Order>,
) -> Result<()> {
    if command.hold {
        host.send(&FromGuest::Held { id }, &[]);
        while !matches!(inbox.recv().context("wait for the host's go")?, Order::Go) {}
    }
    let begin = Instant::now();
    let mut spawned = spawn(command)?;
    let pid = spawned.child.id();
    host.send(&FromGuest::Started { id, pid }, &[]);

    let (done, finished) = channel();
    let outputs = spawned.outputs.len();
    for (from, is_stderr) in spawned.outputs.drain(..) {
        let (host, done) = (host.clone(), done.clone());
        thread::spawn(move || {
            stream(id, from, is_stderr, &host);
            let _waiter_gone = done.send(());
        });
    }
    thread::spawn(move || {
        if let Ok(status) = spawned.child.wait() {
            let _listener_gone = orders.send(Order::Ended(status, Instant::now()));
        }
    });

    let deadline = begin + Duration::from_millis(command.timeout_ms);
    let (status, end, timed_out) = tend(pid, spawned.input, inbox, deadline)?;
    for _ in 0..outputs {
        let _still_held = finished.recv_timeout(TRAIL);
    }
    let exit = FromGuest::Exit {
        id,
        code: status.code(),
        signal: status.signal(),
        micros: u64::try_from((end - begin).as_micros()).unwrap_or(u64::MAX),
        timed_out,
    };
    host.send(&exit, &[]);
    Ok(())
}

/// Carries out the host's orders until the command has ended.
fn tend(
    pid: u32,
    mut input: Option<Sender<Vec<u8>>>,
    inbox: &Receiver<Order>,
    deadline: Instant,
) -> Result<(ExitStatus, Instant, bool)> {
    let group = Pid::from_raw(i32::try_from(pid).context("the command's pid")?);
    let mut timed_out = false;
    loop {
        let left = if timed_out { TRAIL } else { deadline - Instant::now().min(deadline) };
        match inbox.recv_timeout(left) {
            Ok(Order::Ended(status, end)) => return Ok((status, end, timed_out)),
            Ok(Order::Input(data)) if data.is_empty() => input = None,
            Ok(Order::Input(data)) => {
                if input.as_ref().is_some_and(|to| to.send(data).is_err()) {
                    input = None;
                }
            }
            Ok(Order::Signal(signal)) => {
                if let Ok(signal) = Signal::try_from(signal) {
                    let _already_gone = killpg(group, signal);
                }
            }
            Ok(Order::Go) => {}
            Err(RecvTimeoutError::Timeout) => {
                timed_out = true;
                let _already_gone = killpg(group, Signal::SIGKILL);
            }
            Err(RecvTimeoutError::Disconnected) => anyhow::bail!("the agent lost its command"),
        }
    }
}

/// A started command and the ends of its pipes.
struct Spawned {
    child: Child,
    input: Option<Sender<Vec<u8>>>,
    outputs: Vec<(Box<dyn Read + Send>, bool)>,
}

fn spawn(command: &Command) -> Result<Spawned> {
    let mut argv: Vec<&str> = command.argv.iter().map(String::as_str).collect();
    if command.terminal {
        argv.splice(0..0, ["setsid", "-c"]);
    }
    let (program, arguments) = argv.split_first().context("the host named no command")?;
    let mut starting = std::process::Command::new(program);
    starting.args(arguments).env_clear().envs(&command.env);
    starting.current_dir(command.cwd.as_deref().unwrap_or("/root"));
    if command.terminal {
        return spawn_on_terminal(starting).with_context(|| format!("start {:?}", command.argv));
    }
    starting.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
    starting.stdin(if command.stdin { Stdio::piped() } else { Stdio::null() });
    let mut child = starting.spawn().with_context(|| format!("start {:?}", command.argv))?;
    let mut outputs: Vec<(Box<dyn Read + Send>, bool)> = Vec::new();
    if let Some(from) = child.stdout.take() {
        outputs.push((Box::new(from), false));
    }
    if let Some(from) = child.stderr.take() {
        outputs.push((Box::new(from), true));
    }
    let input = child.stdin.take().map(feed);
    Ok(Spawned { child, input, outputs })
}

fn spawn_on_terminal(mut starting: std::process::Command) -> Result<Spawned> {
    let pty = openpty(None, None).context("open a terminal")?;
    let duplicate = |fd: &OwnedFd| fd.try_clone().context("duplicate a terminal");
    starting.stdin(duplicate(&pty.slave)?).stdout(duplicate(&pty.slave)?).stderr(pty.slave);
    let child = starting.spawn()?;
    let master = std::fs::File::from(pty.master);
    let from = Box::new(master.try_clone().context("duplicate a terminal")?);
    Ok(Spawned { child, input: Some(feed(master)), outputs: vec![(from, false)] })
}

/// Writes input from a thread of its own: a command that does not read must
/// not keep its signals and its deadline waiting.
fn feed(mut to: impl Write + Send + 'static) -> Sender<Vec<u8>> {
    let (sender, inbox) = channel::<Vec<u8>>();
    thread::spawn(move || {
        while let Ok(data) = inbox.recv() {
            if to.write_all(&data).is_err() {
                break;
            }
        }
    });
    sender
}

/// Sends output on as it comes. A terminal whose last user has left reports an
/// error instead of an end.
fn stream(id: u32, mut from: Box<dyn Read + Send>, is_stderr: bool, host: &Host) {
    let mut buffer = vec![0; 64 << 10];
    while let Ok(len @ 1..) = from.read(&mut buffer) {
        let message = if is_stderr { FromGuest::Stderr { id } } else { FromGuest::Stdout { id } };
        host.send(&message, &buffer[..len]);
    }
}
