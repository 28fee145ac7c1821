//! What the module does for guests under KVM, in guests that are told to do it anyway.

#[allow(dead_code)]
mod held;

use held::{await_until, hold, quiet, undisturbed, works};
use nix::sys::signal::Signal;
use nvguest_rig::{Guest, Host, Rig};

const DRIVER: &str = "/sys/bus/virtio/drivers/virtio_nvguest";

/// How many pages of how many were touched, as the module says of each mapping.
fn touched(guest: &Guest) -> Vec<(u64, u64)> {
    let dmesg = guest.dmesg().unwrap();
    let said = dmesg.lines().filter_map(|line| {
        let (_, line) = line.split_once("touched ")?;
        let (done, line) = line.split_once(" of ")?;
        let (pages, _) = line.split_once(" pages")?;
        Some((done.parse().unwrap(), pages.parse().unwrap()))
    });
    said.collect()
}

fn shell(guest: &Guest, line: &str) {
    let output = guest.shell(line).unwrap();
    assert!(output.success(), "{output}\n{}", guest.logs());
}

fn probe(guest: &Guest, words: &[&str]) {
    let output = guest.run(std::iter::once("rmprobe").chain(words.iter().copied())).unwrap();
    assert!(output.success(), "{output}\n{}", guest.logs());
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn memory_of_the_card_is_touched_in_advance_and_never_once_it_is_unmapped() {
    let params = "pretouch=1 dyndbg=+p";
    let rig = Rig::builder().memory_mib(512).module_params(params).host(Host::Sim).boot().unwrap();
    let guest = rig.guest(0);
    registers_and_system_memory_are_left_alone(guest);
    a_mapping_that_stays_is_touched_to_its_end(guest);
    unmapping_ends_it_in_the_middle(guest);
    the_driver_is_unbound_in_the_middle(guest);
    a_window_that_the_mtrrs_make_uncached_is_told_of(guest);
}

fn registers_and_system_memory_are_left_alone(guest: &Guest) {
    for check in ["usermode-page", "system-memory", "heap-system-memory"] {
        probe(guest, &["--only", check]);
    }
    assert_eq!(touched(guest), []);
}

fn a_mapping_that_stays_is_touched_to_its_end(guest: &Guest) {
    let mut holder = hold(guest);
    await_until("8 MiB are touched", || touched(guest) == [(2048, 2048)]);
    undisturbed(&mut holder);
    holder.signal(Signal::SIGKILL).unwrap();
    holder.wait().unwrap();
}

fn unmapping_ends_it_in_the_middle(guest: &Guest) {
    await_until("a mapping goes while it is touched", || {
        probe(guest, &["--map-drop", "50", "--size", "64"]);
        touched(guest).iter().any(|&(done, pages)| 0 < done && done < pages)
    });
    works(guest);
}

fn the_driver_is_unbound_in_the_middle(guest: &Guest) {
    let before = touched(guest).len();
    let dropping = guest.command(["rmprobe", "--map-drop", "1000000", "--size", "64"]);
    let dropping = dropping.spawn().unwrap();
    await_until("it maps and unmaps", || touched(guest).len() > before);
    shell(guest, &format!("cd {DRIVER} && echo virtio* > /tmp/device && cat /tmp/device > unbind"));
    assert!(!dropping.wait().unwrap().success());
    quiet(guest);
    shell(guest, &format!("cat /tmp/device > {DRIVER}/bind"));
    works(guest);
}

/// The firmware's are right: one more range is put over the window.
fn a_window_that_the_mtrrs_make_uncached_is_told_of(guest: &Guest) {
    const COMPLAINT: &str = "of the window uncached, not write-back";
    assert!(!guest.dmesg().unwrap().contains("not write-back"));
    for _ in 0..2 {
        shell(
            guest,
            &format!(
                "cd {DRIVER} && set -- $(sed -n 5p $(cat /tmp/device)/../resource)
                 echo \"base=$1 size=0x10000 type=uncachable\" > /proc/mtrr
                 cat /tmp/device > unbind && cat /tmp/device > bind"
            ),
        );
    }
    let dmesg = guest.dmesg().unwrap();
    assert_eq!(dmesg.matches(COMPLAINT).count(), 1, "{dmesg}");
    works(guest);
}
