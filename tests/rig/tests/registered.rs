//! Guests whose programs register memory of their own.

#[allow(dead_code)]
mod held;

use held::{await_until, start, workers};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_rig::{Guest, Host, Process, Rig};

const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_nvguest";

/// With memory above and below the hole for devices: two regions of the VMM's.
fn boot(kernel: &str) -> Rig {
    let rig = Rig::builder().kernel(kernel).host(Host::Sim).memory_mib(3072);
    rig.backend_args(["--caps=utility,graphics,video,compute"]).boot().unwrap()
}

fn shell(guest: &Guest, line: &str) -> String {
    let output = guest.shell(line).unwrap();
    assert!(output.success(), "{output}\n{}", guest.logs());
    output.stdout_text()
}

/// Pages that are pinned for somebody.
fn pinned(guest: &Guest) -> i64 {
    let counters = shell(guest, "cat /proc/vmstat");
    let count = |name: &str| -> i64 {
        let line = counters.lines().find_map(|line| line.strip_prefix(name));
        line.unwrap_or_else(|| panic!("no {name}")).trim().parse().unwrap()
    };
    count("nr_foll_pin_acquired") - count("nr_foll_pin_released")
}

fn goes_back(guest: &Guest, what: &str) {
    await_until(&format!("all that {what} had registered is unpinned"), || pinned(guest) == 0);
}

fn programs_register_memory_on(kernel: &str) {
    let rig = boot(kernel);
    let guest = rig.guest(0);
    let output = guest.run(["rmprobe", "--register", "256", "--simulated"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    goes_back(guest, "a program that ended");
    let output = guest.run(["rmprobe"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn programs_register_memory_on_linux_6_1() {
    programs_register_memory_on("6.1");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn programs_register_memory_on_linux_7() {
    programs_register_memory_on("7");
}

/// A program with 64 MiB registered.
fn holder(guest: &Guest) -> Process<'_> {
    let holder = start(guest, &["rmprobe", "--register", "64", "--keep", "60"], "keeping");
    assert!(pinned(guest) >= 16384, "{} pages", pinned(guest));
    holder
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn registered_memory_is_unpinned_when_its_program_its_worker_or_the_driver_ends() {
    let rig = boot("6.12");
    let guest = rig.guest(0);

    let program = holder(guest);
    program.signal(Signal::SIGKILL).unwrap();
    program.wait().unwrap();
    goes_back(guest, "a program that was killed");

    let program = holder(guest);
    for pid in workers(guest.backend_pid().unwrap()) {
        kill(Pid::from_raw(i32::try_from(pid).unwrap()), Signal::SIGKILL).unwrap();
    }
    goes_back(guest, "a program whose worker died");
    program.signal(Signal::SIGKILL).unwrap();
    program.wait().unwrap();

    let _program = holder(guest);
    shell(guest, &format!("cd {DRIVER} && echo virtio* > /tmp/device && cat /tmp/device > unbind"));
    goes_back(guest, "a program whose driver left");
    shell(guest, &format!("cat /tmp/device > {DRIVER}/bind"));
    let output = guest.run(["rmprobe", "--register", "64"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    goes_back(guest, "a program that ended");
}
