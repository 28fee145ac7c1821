//! What the processes may not do, tried in the processes themselves: a debugger's way in
//! (ptrace) makes a system call in a broker or a worker as if it had been taken over.

use std::process::Command;

use nix::libc::{self, c_long};
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::sys::wait::{waitpid, WaitPidFlag, WaitStatus};
use nix::unistd::Pid;
use nvguest_frontend::backend::{is_alive, wait_until, Backend};
use nvguest_frontend::gather::ByHandle;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Guest, Options};
use rmclient::abi::escape;
use rmclient::Place;

use crate::common::{pair, pair_in, start, Pair, LONG};

const BINARY: &str = env!("CARGO_BIN_EXE_vhost-user-nvguest");

/// A process in which system calls are made, stopped in one of its own.
struct Captive(Pid);

impl Captive {
    fn take(pid: i32) -> Self {
        let pid = Pid::from_raw(pid);
        ptrace::seize(pid, ptrace::Options::empty()).expect("a process of our own to trace");
        ptrace::interrupt(pid).unwrap();
        waitpid(pid, Some(WaitPidFlag::__WALL)).unwrap();
        Self(pid)
    }

    /// Makes a call; `text` is where the argument of all ones leads.
    fn call(&self, number: c_long, arguments: [u64; 4], text: Option<&str>) -> Answer {
        let before = ptrace::getregs(self.0).unwrap();
        let mut arguments = arguments;
        // Below the red zone of the stack, where nobody looks.
        let room = (before.rsp - 1024) & !7;
        if let Some(text) = text {
            let bytes = [text.as_bytes(), &[0; 8]].concat();
            for (index, word) in bytes.chunks_exact(8).enumerate() {
                let word = i64::from_le_bytes(word.try_into().unwrap());
                ptrace::write(self.0, (room + 8 * index as u64) as *mut _, word).unwrap();
            }
            *arguments.iter_mut().find(|argument| **argument == u64::MAX).unwrap() = room;
        }
        self.prepare(number, arguments);
        let answer = loop {
            match self.step(None) {
                Signal::SIGSYS => break Answer::Refused,
                // A trap of the step before: nothing was run yet.
                _ if ptrace::getregs(self.0).unwrap().rip != before.rip => {}
                _ => break Answer::Made(self.result()),
            }
        };
        ptrace::setregs(self.0, before).unwrap();
        answer
    }

    /// Makes a refused call and lets the process handle the refusal; what the call answered.
    fn call_through(&self, number: c_long) -> i64 {
        let before = ptrace::getregs(self.0).unwrap();
        self.prepare(number, [0; 4]);
        assert_eq!(self.step(None), Signal::SIGSYS);
        let mut signal = Some(Signal::SIGSYS);
        // Through the handler and back to where the call was.
        while signal.is_some() || ptrace::getregs(self.0).unwrap().rip != before.rip {
            self.step(signal.take());
        }
        let result = self.result();
        ptrace::setregs(self.0, before).unwrap();
        result
    }

    /// Lets the process go, into a call.
    fn let_go_into(self, number: c_long) {
        self.prepare(number, [0; 4]);
    }

    fn prepare(&self, number: c_long, arguments: [u64; 4]) {
        let mut registers = ptrace::getregs(self.0).unwrap();
        [registers.rdi, registers.rsi, registers.rdx, registers.r10] = arguments;
        registers.rax = number as u64;
        // Nothing of the call that was interrupted is to be made again.
        registers.orig_rax = u64::MAX;
        registers.rip = self.instruction(registers.rip);
        ptrace::setregs(self.0, registers).unwrap();
    }

    fn step(&self, signal: Option<Signal>) -> Signal {
        ptrace::step(self.0, signal).unwrap();
        match waitpid(self.0, Some(WaitPidFlag::__WALL)).unwrap() {
            WaitStatus::Stopped(_, signal) | WaitStatus::PtraceEvent(_, signal, _) => signal,
            other => panic!("the process {other:?}"),
        }
    }

    fn result(&self) -> i64 {
        // CAST: a call answers in a signed register.
        ptrace::getregs(self.0).unwrap().rax as i64
    }

    /// Place a `syscall` instruction is: just before the place where a waiting process is.
    fn instruction(&self, rip: u64) -> u64 {
        let word = ptrace::read(self.0, (rip - 2) as *mut _).unwrap();
        assert_eq!(word & 0xffff, 0x050f, "the process waits in no system call");
        rip - 2
    }

    fn open(&self, path: &str) -> Answer {
        let here = i64::from(libc::AT_FDCWD) as u64;
        self.call(libc::SYS_openat, [here, u64::MAX, libc::O_RDONLY as u64, 0], Some(path))
    }
}

impl Drop for Captive {
    fn drop(&mut self) {
        let _ = ptrace::detach(self.0, None);
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Answer {
    /// The kernel made it, and this came of it.
    Made(i64),
    /// Seccomp did not let it be made.
    Refused,
}

const DENIED: Answer = Answer::Made(-(libc::EACCES as i64));

fn busy() -> (Pair, Client, i32) {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let worker = pair.backend.worker_of(100).unwrap();
    (pair, client, worker)
}

fn has_landlock(pair: &Pair) -> bool {
    pair.backend.status().unwrap()["sandbox"].as_str().unwrap().contains("Landlock ABI")
}

/// The tests that look into another process need root: no other user may trace it.
fn may_trace() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("left out: only root can look into processes that are undumpable");
    }
    root
}

#[test]
fn the_broker_can_open_no_file_and_no_device_node() {
    if !may_trace() {
        return;
    }
    let (pair, ..) = busy();
    let broker = Captive::take(pair.backend.pid());
    for path in ["/etc/passwd", "/dev/null", "/dev/nvidiactl", "/proc/self/exe", "/"] {
        assert_eq!(broker.open(path), DENIED, "{path}");
    }
}

#[test]
fn a_worker_can_open_no_file_that_is_not_a_node_of_the_card() {
    if !may_trace() {
        return;
    }
    let (pair, _client, worker) = busy();
    if !has_landlock(&pair) {
        return;
    }
    let worker = Captive::take(worker);
    for path in ["/etc/passwd", "/dev/null", "/dev/zero", "/proc/self/maps", BINARY, "/"] {
        assert_eq!(worker.open(path), DENIED, "{path}");
    }
}

#[test]
fn neither_makes_sockets_processes_or_code() {
    if !may_trace() {
        return;
    }
    let (pair, _client, worker) = busy();
    let anywhere = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let code = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    for pid in [pair.backend.pid(), worker] {
        let captive = Captive::take(pid);
        for (number, arguments) in [
            (libc::SYS_socket, [libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0, 0]),
            (libc::SYS_socket, [libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0, 0]),
            (libc::SYS_connect, [0; 4]),
            (libc::SYS_execve, [0; 4]),
            (libc::SYS_vfork, [0; 4]),
            (libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0]),
            (libc::SYS_kill, [1, 0, 0, 0]),
            (libc::SYS_ptrace, [0; 4]),
            (libc::SYS_unlink, [0; 4]),
            (libc::SYS_mmap, [0, 4096, code, anywhere]),
            (libc::SYS_ioctl, [0, libc::TIOCSTI, 0, 0]),
            (libc::SYS_ioctl, [0, 0x4629, 0, 0]),
            (libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0]),
        ] {
            assert_eq!(captive.call(number, arguments, None), Answer::Refused, "call {number}");
        }
        let clone3 = captive.call(libc::SYS_clone3, [0; 4], None);
        assert_eq!(clone3, Answer::Made(-i64::from(libc::ENOSYS)));
        let allowed = captive.call(libc::SYS_getpid, [0; 4], None);
        assert_eq!(allowed, Answer::Made(pid.into()));
    }
}

#[test]
fn the_starter_can_open_no_file_and_run_no_program_but_ours() {
    if !may_trace() {
        return;
    }
    let (pair, _client, worker) = busy();
    if !has_landlock(&pair) {
        return;
    }
    let starter = Captive::take(parent(worker));
    for path in ["/etc/passwd", "/dev/zero", "/dev/nvidiactl", "/proc/self/maps", "/"] {
        let answer = starter.open(path);
        let absent = Answer::Made(-i64::from(libc::ENOENT));
        assert!(answer == DENIED || answer == absent, "{path}: {answer:?}");
    }
    for path in ["/bin/sh", "/usr/bin/env"] {
        assert_eq!(starter.call(libc::SYS_execve, [u64::MAX, 0, 0, 0], Some(path)), DENIED);
    }
}

#[test]
fn the_starter_makes_no_sockets_no_code_and_no_processes_but_workers() {
    if !may_trace() {
        return;
    }
    let (pair, _client, worker) = busy();
    let pid = parent(worker);
    let starter = Captive::take(pid);
    let anywhere = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let code = (libc::PROT_READ | libc::PROT_EXEC) as u64;
    for (number, arguments) in [
        (libc::SYS_socket, [libc::AF_UNIX as u64, libc::SOCK_STREAM as u64, 0, 0]),
        (libc::SYS_socketpair, [libc::AF_INET as u64, libc::SOCK_STREAM as u64, 0, 0]),
        (libc::SYS_connect, [0; 4]),
        (libc::SYS_execveat, [0; 4]),
        (libc::SYS_vfork, [0; 4]),
        (libc::SYS_clone, [libc::SIGCHLD as u64, 0, 0, 0]),
        (libc::SYS_clone, [(libc::CLONE_NEWUSER | libc::SIGCHLD) as u64, 0, 0, 0]),
        (libc::SYS_unshare, [libc::CLONE_NEWUSER as u64, 0, 0, 0]),
        (libc::SYS_kill, [pair.backend.pid() as u64, 0, 0, 0]),
        (libc::SYS_ptrace, [0; 4]),
        (libc::SYS_mkdir, [0; 4]),
        (libc::SYS_mmap, [0, 4096, code, anywhere]),
        (libc::SYS_mprotect, [0, 4096, code, 0]),
        (libc::SYS_ioctl, [0, libc::TIOCSTI, 0, 0]),
        (libc::SYS_ioctl, [0, 0x4629, 0, 0]),
        (libc::SYS_prctl, [libc::PR_SET_DUMPABLE as u64, 1, 0, 0]),
        (libc::SYS_prlimit64, [0, libc::RLIMIT_NOFILE.into(), 8, 0]),
    ] {
        assert_eq!(starter.call(number, arguments, None), Answer::Refused, "call {number}");
    }
    let clone3 = starter.call(libc::SYS_clone3, [0; 4], None);
    assert_eq!(clone3, Answer::Made(-i64::from(libc::ENOSYS)));
    assert_eq!(starter.call_through(libc::SYS_socket), -i64::from(libc::EPERM));
    drop(starter);
    Client::new(&pair.guest.process(200)).unwrap().attached_ids().unwrap();
    assert!(is_alive(pid), "the starter goes on");
}

#[test]
fn a_worker_that_makes_a_call_of_its_own_ends_and_the_log_names_the_call() {
    if !may_trace() {
        return;
    }
    let (pair, _client, worker) = busy();
    let other = Client::new(&pair.guest.process(200)).unwrap();
    Captive::take(worker).let_go_into(libc::SYS_socket);
    assert!(wait_until(LONG, || !is_alive(worker)), "it lives on");
    assert!(wait_until(LONG, || pair.backend.log().contains("exit status: 159")));
    let said = format!("the sandbox refused system call {}, which ends", libc::SYS_socket);
    assert!(pair.backend.log().contains(&said), "{}", pair.backend.log());
    other.attached_ids().unwrap();
}

#[test]
fn a_refused_call_fails_in_the_broker_and_the_broker_goes_on() {
    if !may_trace() {
        return;
    }
    let (pair, client, _) = busy();
    let broker = Captive::take(pair.backend.pid());
    assert_eq!(broker.call_through(libc::SYS_socket), -i64::from(libc::EPERM));
    drop(broker);
    let said = format!("the sandbox refused system call {}\n", libc::SYS_socket);
    assert!(pair.backend.log().contains(&said), "{}", pair.backend.log());
    client.attached_ids().unwrap();
    Client::new(&pair.guest.process(200)).unwrap().attached_ids().unwrap();
}

#[test]
fn processes_that_are_started_with_every_capability_keep_none() {
    let (pair, _client, worker) = busy();
    let starter = parent(worker);
    for pid in [pair.backend.pid(), starter, worker] {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find(|line| line.starts_with(name)).unwrap();
            line.split_ascii_whitespace().nth(1).unwrap().to_owned()
        };
        for set in ["CapInh", "CapPrm", "CapEff", "CapAmb"] {
            assert_eq!(field(set), "0000000000000000", "{set} of {pid}");
        }
        assert_eq!(field("NoNewPrivs"), "1", "of {pid}");
        assert_eq!(field("Seccomp:"), "2", "of {pid}");
    }
    let sandbox = pair.backend.status().unwrap()["sandbox"].as_str().unwrap().to_owned();
    assert!(sandbox.starts_with("best-effort: "), "{sandbox}");
    assert!(sandbox.ends_with("without capabilities"), "{sandbox}");
}

/// The one file that a worker reads: what a native program would read for this call.
#[test]
fn the_host_s_memory_block_size_can_be_told() {
    let (pair, client, worker) = busy();
    let mut size = [1_u64];
    // SAFETY: there is no pointer in it.
    unsafe { client.ctl.rm(escape::SYS_PARAMS, &mut size, &ByHandle).unwrap() };
    client.attached_ids().unwrap();
    assert!(is_alive(worker), "{}", pair.backend.log());
}

#[test]
fn root_is_refused_without_allow_root() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("socket");
    let outcome =
        Command::new(BINARY).args(["--host=sim", "--socket-path"]).arg(&socket).output().unwrap();
    assert_eq!(outcome.status.code(), Some(1));
    let said = String::from_utf8_lossy(&outcome.stderr).into_owned();
    assert!(said.contains("started as root") && said.contains("--allow-root"), "{said}");
    assert!(!socket.exists());
}

#[test]
fn an_ordinary_user_is_served_alike() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let backend = Backend::of_user(BINARY, 65_534).expect("a backend of user 65534");
    let guest = Guest::connect(&backend.socket(), Options::default()).unwrap();
    guest.probe().unwrap();
    let client = Client::new(&guest.process(100)).unwrap();
    client.attached_ids().unwrap();
    let memory = client.memory(Place::Video, 65536).unwrap();
    client.map(Place::Video, memory, 65536).unwrap();
    let sandbox = backend.status().unwrap()["sandbox"].as_str().unwrap().to_owned();
    assert!(sandbox.contains("user 65534 without"), "{sandbox}");
    assert!(!backend.log().contains("refused system call"), "{}", backend.log());
}

#[test]
fn without_a_sandbox_the_backend_serves_and_says_so() {
    let pair = pair_in(&["--sandbox=off"], &[], Options::default());
    Client::new(&pair.guest.process(100)).unwrap().attached_ids().unwrap();
    let sandbox = pair.backend.status().unwrap()["sandbox"].as_str().unwrap().to_owned();
    assert!(sandbox.starts_with("off: no Landlock, no seccomp"), "{sandbox}");
    assert!(pair.backend.log().contains("--sandbox off"), "{}", pair.backend.log());
}

#[test]
fn an_ended_backend_leaves_no_socket_and_no_pid_file() {
    let mut backend = start();
    let pid = backend.socket().with_file_name("socket.pid");
    assert_eq!(std::fs::read_to_string(&pid).unwrap().trim(), backend.pid().to_string());
    backend.signal(Signal::SIGTERM).unwrap();
    backend.ended(LONG).unwrap();
    assert!(!backend.socket().exists() && !pid.exists());
}

fn parent(pid: i32) -> i32 {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    stat.rsplit(')').next().unwrap().split_ascii_whitespace().nth(1).unwrap().parse().unwrap()
}
