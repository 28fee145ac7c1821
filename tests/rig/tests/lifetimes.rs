//! What goes back when something ends or is killed, in guests on the simulated card.

mod held;

use std::time::{Duration, Instant};

use held::{
    await_until, family, goes_back, held, held_at_rest, hold, lives, loses_its_files, quiet, row,
    start, undisturbed, vram, workers, works, Held, PATIENCE,
};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_rig::{Guest, Host, Rig};

fn boot() -> Rig {
    Rig::builder().host(Host::Sim).boot().unwrap()
}

fn end(pid: u32) {
    kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_thousand_cycles_leave_the_backend_and_the_vmm_as_they_were() {
    let rig = boot();
    let guest = rig.guest(0);
    assert!(guest.run(["rmprobe", "--cycles", "5"]).unwrap().success());
    let before = held_at_rest(guest);
    for mode in ["--cycles", "--map-race"] {
        let output = guest.run(["rmprobe", mode, "1000"]).unwrap();
        assert!(output.success(), "{output}\n{}", rig.logs());
    }
    assert_eq!(held_at_rest(guest), before);
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
fn a_process_can_do_nothing_to_the_client_of_another() {
    let rig = boot();
    let script = "rmprobe --hold 4 > /tmp/held < /dev/null & holder=$!; \
        until grep -q holding /tmp/held; do sleep 0.1; done; \
        rmprobe --intrude $(sed -n 's/.*memory, \\(0x[0-9a-f]*:0x[0-9a-f]*\\),.*/\\1/p' /tmp/held) && \
        wait $holder; code=$?; cat /tmp/held; exit $code";
    let output = rig.guest(0).run(["sh", "-c", script]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    let said = output.stdout_text();
    assert_eq!(said.matches("theirs: ").count(), 9, "{said}");
    assert!(said.contains("ok hold: held 2 MiB"), "{said}");
}

/// One boot for the whole matrix: what is killed is in the first guest, and its backend's end in
/// the second; the third notices nothing. `cargo xtask test --guests whatever_is_killed` prints
/// the table of BENCHMARKS.md.
#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn whatever_is_killed_gives_back_and_the_others_notice_nothing() {
    let rig = Rig::builder().guests(3).memory_mib(512).host(Host::Sim).boot().unwrap();
    // Longer than the module waits for a sign of life: no slow call is taken for the end.
    let slow = start(rig.guest(1), &["rmprobe", "--block", "9000"], "blocking");
    let before = held(rig.guest(0));
    let mut seconds = Vec::new();
    for case in [a_process_in_its_call as Case, a_worker] {
        seconds.push(beside_another(&rig, &before, case));
    }
    seconds.push(a_panic(&rig, &before));
    seconds.push(a_vmm(&rig));
    let slow = slow.wait().unwrap();
    assert!(slow.success(), "{slow}");
    seconds.push(a_broker(&rig));
    for (case, seconds) in &seconds {
        row(case, seconds);
    }
}

type Row = (&'static str, Vec<(&'static str, Duration)>);
/// Kills something; says what, when, and what was seen how long after that.
type Case = fn(&Guest) -> Killed;
type Killed = (&'static str, Instant, Vec<(&'static str, Duration)>);

/// The case, while a program of the same guest and one of another hold memory and look at it.
fn beside_another(rig: &Rig, before: &Held, case: Case) -> Row {
    let (guest, elsewhere) = (rig.guest(0), rig.guest(2));
    let (mut beside, mut other) = (hold(guest), hold(elsewhere));
    let (name, begin, mut seconds) = case(guest);
    await_until("its worker and memory are gone", || {
        workers(guest.backend_pid().unwrap()).len() == 1 && vram(guest) == 8 << 20
    });
    seconds.push(("and the last worker gone", begin.elapsed()));
    undisturbed(&mut beside);
    undisturbed(&mut other);
    works(guest);
    for holder in [beside, other] {
        holder.signal(Signal::SIGKILL).unwrap();
    }
    goes_back(guest, before);
    (name, seconds)
}

/// What it holds goes back when its call ends, as a native process's would.
fn a_process_in_its_call(guest: &Guest) -> Killed {
    let caller = start(guest, &["rmprobe", "--block", "3000"], "blocking");
    let begin = Instant::now();
    caller.signal(Signal::SIGKILL).unwrap();
    let output = caller.wait().unwrap();
    assert_eq!(output.signal, Some(Signal::SIGKILL as i32), "{output}");
    ("a guest process in a call of 3 s", begin, vec![("it ends", begin.elapsed())])
}

fn a_worker(guest: &Guest) -> Killed {
    let broker = guest.backend_pid().unwrap();
    let others = workers(broker);
    let mut watcher = start(guest, &["rmprobe", "--watch", "60", "--size", "16"], "watching");
    let victim = workers(broker).into_iter().find(|pid| !others.contains(pid)).unwrap();
    let begin = Instant::now();
    end(victim);
    await_until("its memory goes back", || vram(guest) == 8 << 20);
    let back = begin.elapsed();
    watcher.wait_for("woken").unwrap();
    let woken = begin.elapsed();
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: ok"), "{said}");
    (
        "a worker, its process holding 16 MiB",
        begin,
        vec![("its memory back", back), ("its files fail", woken)],
    )
}

fn a_panic(rig: &Rig, before: &Held) -> Row {
    let mut other = hold(rig.guest(2));
    drop(hold(rig.guest(0)));
    assert_eq!(vram(rig.guest(0)), 8 << 20);
    let mut begin = Instant::now();
    let guest = rig.guest(0);
    let panic = |_: &mut _| {
        begin = Instant::now();
        guest.command(["sh", "-c", "echo c > /proc/sysrq-trigger"]).spawn().map(drop)
    };
    guest.reboot_by(panic).unwrap();
    let booted = begin.elapsed();
    let begin = Instant::now();
    goes_back(rig.guest(0), before);
    undisturbed(&mut other);
    works(rig.guest(0));
    let seconds = vec![("the next kernel is up", booted), ("then all of it back", begin.elapsed())];
    ("a guest's kernel (panic and reboot, emulated)", seconds)
}

fn a_vmm(rig: &Rig) -> Row {
    drop(hold(rig.guest(0)));
    let folder = rig.folder().join("guest0");
    let guest = rig.guest(0);
    let family = family(guest.backend_pid().unwrap());
    assert!(family.len() > 2);
    let begin = Instant::now();
    end(guest.qemu_pid());
    await_until("its backend and workers end", || !family.iter().any(lives));
    let gone = begin.elapsed();
    assert!(!folder.join("backend").exists() && !folder.join("admin").exists());
    ("QEMU", vec![("backend, workers and sockets gone", gone)])
}

/// Its guest cannot be served again, but nothing in it hangs.
fn a_broker(rig: &Rig) -> Row {
    let mut other = hold(rig.guest(2));
    let folder = rig.folder().join("guest1");
    let guest = rig.guest(1);
    let mut watcher = start(guest, &["rmprobe", "--watch", "60"], "watching");
    let blocked = start(guest, &["rmprobe", "--block", "60000"], "blocking");
    let family = family(guest.backend_pid().unwrap());
    let begin = Instant::now();
    end(family[0]);
    let gone = await_until("its workers end", || !family.iter().any(lives));
    await_until("its sockets go", || {
        !folder.join("backend").exists() && !folder.join("admin").exists()
    });
    watcher.wait_for("woken").unwrap();
    let woken = begin.elapsed();
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: /dev/nvidiactl: No such device"), "{said}");
    let blocked = blocked.wait().unwrap();
    let failed = begin.elapsed();
    assert!(blocked.stdout_text().contains("No such device"), "{blocked}");
    assert!(woken < PATIENCE * 3, "{woken:?}");
    let again = guest.run(["rmprobe", "--only", "ids"]).unwrap();
    assert!(again.stdout_text().contains("No such device"), "{again}");
    let dmesg = guest.dmesg().unwrap();
    assert_eq!(dmesg.matches("the host's backend is gone").count(), 1, "{dmesg}");
    quiet(guest);
    undisturbed(&mut other);
    let seconds = vec![
        ("workers and sockets gone", gone),
        ("sleepers woken, mappings zapped", woken),
        ("calls fail", failed),
    ];
    ("the broker (its guest's files fail from then on)", seconds)
}
