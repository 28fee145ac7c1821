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
fn two_guests_use_a_card_at_the_same_time() {
    let rig = boot("6.12", 2);
    let commands = rig.guests().iter().map(|guest| guest.command(["rmprobe"]));
    for output in Rig::together(commands).unwrap() {
        assert!(output.success(), "{output}\n{}", rig.logs());
    }
}
