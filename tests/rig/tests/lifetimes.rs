//! What goes back when something ends or is killed, in guests on the simulated card.

use std::fs;
use std::time::{Duration, Instant};

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_rig::{Guest, Host, Rig};

/// Nothing may hang for longer (issue 2, bar 4).
const PATIENCE: Duration = Duration::from_secs(10);

fn boot() -> Rig {
    Rig::builder().host(Host::Sim).boot().unwrap()
}

/// Waits until `reached` says so; the text is for the failure's report.
fn await_until(what: &str, mut reached: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !reached() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Processes that a process has started and that live.
fn children(pid: u32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let mut children: Vec<i32> = tasks
        .filter_map(|task| fs::read_to_string(task.path().join("children")).ok())
        .flat_map(|text| text.split_whitespace().map(str::parse).collect::<Vec<_>>())
        .flatten()
        .collect();
    children.sort_unstable();
    children
}

/// Workers of a broker: children of its starter.
fn workers(broker: u32) -> Vec<i32> {
    children(broker).into_iter().flat_map(|starter| children(starter.unsigned_abs())).collect()
}

fn descriptors(pid: u32) -> usize {
    fs::read_dir(format!("/proc/{pid}/fd")).unwrap().count()
}

fn maps(pid: u32) -> usize {
    let text = fs::read_to_string(format!("/proc/{pid}/maps")).unwrap();
    text.lines().filter(|line| line.contains("memfd")).count()
}

/// What may not grow: the broker's descriptors, and QEMU's maps of files like ours.
fn held(guest: &Guest) -> (usize, usize) {
    let backend = guest.backend_pid().unwrap();
    await_until("workers of processes that are gone end", || workers(backend).is_empty());
    (descriptors(backend), maps(guest.qemu_pid()))
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_thousand_cycles_leave_the_backend_and_the_vmm_as_they_were() {
    let rig = boot();
    let guest = rig.guest(0);
    assert!(guest.run(["rmprobe", "--cycles", "5"]).unwrap().success());
    let before = held(guest);
    for mode in ["--cycles", "--map-race"] {
        let output = guest.run(["rmprobe", mode, "1000"]).unwrap();
        assert!(output.success(), "{output}\n{}", rig.logs());
    }
    assert_eq!(held(guest), before);
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn every_mapping_is_there_the_moment_it_is_told() {
    let rig = boot();
    let output = rig.guest(0).run(["rmprobe", "--map-race", "2000"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    assert!(output.stdout_text().contains(" 0 wrong reads"), "{output}");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_killed_worker_costs_its_process_and_nothing_else() {
    let rig = boot();
    let guest = rig.guest(0);
    let hold = |seconds| guest.command(["rmprobe", "--hold", seconds]).spawn().unwrap();
    let mut one = hold("6");
    one.wait_for("holding").unwrap();
    let victim = workers(guest.backend_pid().unwrap())[0];
    let mut other = hold("15");
    other.wait_for("holding").unwrap();

    kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
    let begin = Instant::now();
    // At its end it looks at memory that is gone: the kernel ends it, or it says what is wrong.
    let end = one.wait().unwrap();
    assert!(!end.success() && begin.elapsed() < PATIENCE, "{end}\n{}", rig.logs());

    // It looks at the end, too, and finds what it wrote.
    let end = other.wait().unwrap();
    assert!(end.success(), "{end}\n{}", rig.logs());
    let again = guest.run(["rmprobe"]).unwrap();
    assert!(again.success(), "{again}\n{}", rig.logs());
    let dmesg = guest.dmesg().unwrap();
    assert!(!dmesg.contains("BUG") && !dmesg.contains("Oops"), "{dmesg}");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_caller_killed_in_its_call_goes_at_once_and_its_call_is_cleaned_up() {
    let rig = boot();
    let guest = rig.guest(0);
    let mut caller = guest.command(["rmprobe", "--block", "3000"]).spawn().unwrap();
    caller.wait_for("blocking").unwrap();
    caller.signal(Signal::SIGKILL).unwrap();
    let begin = Instant::now();
    let end = caller.wait().unwrap();
    assert_eq!(end.signal, Some(Signal::SIGKILL as i32), "{end}");
    assert!(begin.elapsed() < PATIENCE);
    let output = guest.run(["rmprobe"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    held(guest);
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_killed_vmm_takes_its_backend_and_workers_along() {
    let mut rig = boot();
    let mut holder = rig.guest(0).command(["rmprobe", "--hold", "120"]).spawn().unwrap();
    holder.wait_for("holding").unwrap();
    drop(holder);
    let guest = rig.guest_mut(0);
    let workers = workers(guest.backend_pid().unwrap());
    assert!(!workers.is_empty());
    guest.kill_qemu().unwrap();
    let backend = guest.backend_mut().unwrap();
    await_until("the backend ends", || backend.ended().unwrap().is_some());
    assert!(backend.wait().unwrap().success(), "{}", backend.log_tail(20));
    await_until("its workers end", || {
        workers.iter().all(|pid| fs::metadata(format!("/proc/{pid}")).is_err())
    });
}
