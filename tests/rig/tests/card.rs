//! Guests with our device, on the simulated card.

use nvguest_rig::{Host, Rig};

fn boot(kernel: &str, guests: usize) -> Rig {
    Rig::builder().kernel(kernel).guests(guests).host(Host::Sim).boot().unwrap()
}

/// The nodes are there, and every check of `rmprobe` passes.
fn the_card_works_on(kernel: &str) {
    let rig = boot(kernel, 1);
    let nodes = &rig.guest(0).ready().nodes;
    for wanted in ["nvidiactl", "nvidia0"] {
        assert!(nodes.iter().any(|node| node == wanted), "nodes: {nodes:?}\n{}", rig.logs());
    }
    let output = rig.guest(0).run(["rmprobe"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.guest(0).dmesg().unwrap());
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn rmprobe_passes_on_linux_6_1() {
    the_card_works_on("6.1");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn rmprobe_passes_on_linux_6_12() {
    the_card_works_on("6.12");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn rmprobe_passes_on_linux_7() {
    the_card_works_on("7");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn everything_that_a_guest_must_not_do_is_refused() {
    let rig = boot("6.12", 1);
    let output = rig.guest(0).run(["rmprobe", "--hostile"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    let attempts = output.stdout_text().lines().filter(|line| line.starts_with("ok ")).count();
    assert!(attempts > 50, "{output}");
    // The sandbox was on meanwhile, and in nobody's way.
    assert!(!rig.logs().contains("refused system call"), "{}", rig.logs());
    assert!(rig.guest(0).run(["rmprobe"]).unwrap().success());
}

/// NVML looks for it there; the guest has that bus too, and keeps it.
#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn the_card_is_at_the_host_s_own_pci_address() {
    let rig = boot("6.12", 1);
    let shell = |line: &str| {
        let output = rig.guest(0).shell(line).unwrap();
        assert!(output.success(), "{output}\n{}", rig.logs());
        output.stdout_text()
    };
    let devices = || shell("cd /sys/bus/pci/devices && echo *");
    let card = "0000:00:06.0";
    assert_eq!(shell(&format!("cat /sys/bus/pci/devices/{card}/vendor")), "0x10de\n");
    let with_card = devices();
    shell("echo 1 > /sys/bus/pci/rescan");
    assert_eq!(devices(), with_card);
    shell(&format!("test ! -e /sys/bus/pci/devices/{card}/driver"));

    shell("rmmod virtio_nvguest");
    assert_eq!(devices(), with_card.replace(&format!("{card} "), ""));
    shell("insmod /usr/lib/nvguest/virtio_nvguest.ko");
    assert_eq!(devices(), with_card);
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn two_guests_use_a_card_at_the_same_time() {
    let rig = boot("6.12", 2);
    let commands = rig.guests().iter().map(|guest| guest.command(["rmprobe"]));
    for output in Rig::together(commands).unwrap() {
        assert!(output.success(), "{output}\n{}", rig.logs());
    }
}
