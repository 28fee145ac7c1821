//! The device goes, and comes back, while programs use it.

#[allow(dead_code)]
mod held;

use std::time::{Duration, Instant};

use held::{
    await_until, goes_back, held, lives, loses_its_files, quiet, row, start, undisturbed, works,
};
use nvguest_rig::{Guest, Host, Process, Rig};
use serde_json::json;

const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_nvguest";
const MODULE: &str = nvguest_rig::proto::MODULE;

fn shell(guest: &Guest, line: &str) -> String {
    let output = guest.shell(line).unwrap();
    assert!(output.success(), "{output}\n{}", guest.logs());
    output.stdout_text()
}

/// Sleeps in a poll, with a mapping.
fn watch(guest: &Guest) -> Process<'_> {
    start(guest, &["rmprobe", "--watch", "60"], "watching")
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn programs_get_clear_errors_when_the_device_goes_and_it_works_when_it_is_back() {
    let rig =
        Rig::builder().hotpluggable().bootloaded().memory_mib(512).host(Host::Sim).boot().unwrap();
    a_module_in_use_stays(rig.guest(0));
    a_driver_that_is_unbound_gives_all_back(rig.guest(0));
    a_guest_idles_and_goes_on(rig.guest(0));
    a_guest_sleeps_and_wakes(rig.guest(0));
    a_reset_machine_begins_anew(&rig);
    a_kernel_starts_another(&rig);
    a_device_is_removed_and_found_again(rig.guest(0));
    a_device_is_unplugged(&rig);
}

fn a_module_in_use_stays(guest: &Guest) {
    let mut holder = held::hold(guest);
    let refused = guest.shell("rmmod virtio_nvguest").unwrap();
    assert!(!refused.success(), "{refused}");
    undisturbed(&mut holder);
    holder.signal(nix::sys::signal::Signal::SIGKILL).unwrap();
    holder.wait().unwrap();
    shell(guest, &format!("rmmod virtio_nvguest && insmod {MODULE}"));
    works(guest);
}

fn a_driver_that_is_unbound_gives_all_back(guest: &Guest) {
    held::held_at_rest(guest);
    let before = held(guest);
    let watcher = watch(guest);
    let begin = Instant::now();
    shell(guest, &format!("cd {DRIVER} && echo virtio* > /tmp/device && cat /tmp/device > unbind"));
    goes_back(guest, &before);
    row("the driver is unbound", &[("all of it back", begin.elapsed())]);
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: /dev/nvidiactl: No such"), "{said}");
    quiet(guest);
    shell(guest, &format!("cat /tmp/device > {DRIVER}/bind"));
    works(guest);
}

/// By the kernel's own test of it: QEMU wakes only machines that it has seen fall asleep.
fn a_guest_idles_and_goes_on(guest: &Guest) {
    let watcher = watch(guest);
    let begin = Instant::now();
    shell(
        guest,
        "echo 1 > /sys/module/suspend/parameters/pm_test_delay
         echo platform > /sys/power/pm_test && echo freeze > /sys/power/state
         echo none > /sys/power/pm_test",
    );
    row("a guest sleeps (s2idle) and goes on", &[("awake", begin.elapsed())]);
    works_with_new_files(guest, watcher);
}

fn a_guest_sleeps_and_wakes(guest: &Guest) {
    held::held_at_rest(guest);
    let before = held(guest);
    let watcher = watch(guest);
    let awake = guest.sleep("mem", || {
        goes_back(guest, &before);
    });
    row("a guest sleeps (S3) and wakes", &[("awake after its wake-up", awake.unwrap())]);
    works_with_new_files(guest, watcher);
}

fn works_with_new_files(guest: &Guest, watcher: Process<'_>) {
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: ok"), "{said}");
    works(guest);
}

/// Programs run, with files and mappings, until the old kernel is no more.
fn a_kernel_starts_another(rig: &Rig) {
    let guest = rig.guest(0);
    held::held_at_rest(guest);
    let before = held(guest);
    drop((watch(guest), held::hold(guest)));
    assert!(held(guest) != before);
    let begin = Instant::now();
    guest.kexec().unwrap();
    goes_back(guest, &before);
    row(
        "a kernel starts another (kexec, emulated)",
        &[("up, and all of it back", begin.elapsed())],
    );
    works(guest);
}

fn a_reset_machine_begins_anew(rig: &Rig) {
    held::held_at_rest(rig.guest(0));
    let before = held(rig.guest(0));
    drop(watch(rig.guest(0)));
    let begin = Instant::now();
    rig.guest(0).reboot_by(|qmp| qmp.execute("system_reset", json!({})).map(drop)).unwrap();
    goes_back(rig.guest(0), &before);
    row("the machine is reset (emulated boot)", &[("up, and all of it back", begin.elapsed())]);
    works(rig.guest(0));
}

/// By hand, which locks rescans out as a hotplug does.
fn a_device_is_removed_and_found_again(guest: &Guest) {
    let watcher = watch(guest);
    shell(guest, "echo 1 > /sys/bus/pci/devices/0000:01:00.0/remove");
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: /dev/nvidiactl: No such"), "{said}");
    shell(guest, "echo 1 > /sys/bus/pci/rescan");
    works(guest);
}

/// The frontend's connection is the chardev's, which stays until it is removed.
fn a_device_is_unplugged(rig: &Rig) {
    let guest = rig.guest(0);
    let watcher = watch(guest);
    let family = held::family(guest.backend_pid().unwrap());
    let mut qmp = guest.qmp().unwrap();
    let begin = Instant::now();
    qmp.execute("device_del", json!({"id": "nvdev"})).unwrap();
    qmp.event("DEVICE_DELETED").unwrap();
    let gone = begin.elapsed();
    await_until("its memory goes back", || held::vram(guest) == 0);
    let back = begin.elapsed();
    let said = loses_its_files(watcher, "SIGBUS");
    assert!(said.contains("a new file: /dev/nvidiactl: No such"), "{said}");
    shell(guest, "test ! -e /dev/nvidiactl && rmmod virtio_nvguest");
    quiet(guest);
    qmp.execute("chardev-remove", json!({"id": "nv"})).unwrap();
    await_until("its backend ends", || !family.iter().any(lives));
    row("the device is unplugged", &[("gone", gone), ("all of it back", back)]);
    assert!(begin.elapsed() < Duration::from_secs(30));
}
