//! Several cards in one host, and guests of some of them.

#[allow(dead_code)]
mod held;

use held::{await_until, lives, undisturbed, vram, works};
use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_rig::{Guest, Host, Process, Rig};

const PCI: [&str; 2] = ["0000:00:06.0", "0000:41:00.0"];

/// A program that keeps memory of a card, and checks it when asked.
fn hold<'a>(guest: &'a Guest, card: &str) -> Process<'a> {
    let argv = ["rmprobe", "--card", card, "--hold", "600", "--size", "8"];
    let mut process = guest.command(argv).input_later().spawn().unwrap();
    process.wait_for("holding").unwrap();
    process
}

/// So many MiB of a card are there to be had.
fn fills(guest: &Guest, card: &str, mib: u64) {
    let output = guest.run(["rmprobe", "--card", card, "--fill", "8"]).unwrap();
    assert!(output.stdout_text().contains(&format!("fill: {mib} MiB")), "{output}");
}

/// Nodes and PCI devices are those of these cards.
fn has(guest: &Guest, cards: &[usize]) {
    let nodes: Vec<_> = cards.iter().map(|card| format!("nvidia{card}")).collect();
    let ready = guest.ready().nodes.iter().filter(|node| node.as_str() != "nvidiactl");
    assert!(ready.eq(&nodes), "{:?}", guest.ready().nodes);
    for (card, pci) in PCI.iter().enumerate() {
        let look = format!(
            "cat /sys/bus/pci/devices/{pci}/vendor && grep -q 'Minor:.* {card}$' \
             /proc/driver/nvidia/gpus/{pci}/information"
        );
        let output = guest.shell(&look).unwrap();
        let found = output.success() && output.stdout_text() == "0x10de\n";
        assert_eq!(found, cards.contains(&card), "{output}");
    }
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn guests_of_a_card_each_and_one_of_both_leave_each_other_alone() {
    let rig = Rig::builder().host(Host::Sim).sim_cards(2).gpus(["0", "1", "all"]);
    let rig = rig.memory_mib(512).boot().unwrap();
    for (index, cards) in [&[0][..], &[1], &[0, 1]].into_iter().enumerate() {
        has(rig.guest(index), cards);
    }
    let both = rig.guest(2);
    let probes = [
        rig.guest(0).command(["rmprobe"]),
        rig.guest(1).command(["rmprobe"]),
        both.command(["rmprobe", "--card", "0"]),
        both.command(["rmprobe", "--card", "1"]),
    ];
    for output in Rig::together(probes).unwrap() {
        assert!(output.success(), "{output}\n{}", rig.logs());
    }
    let none = rig.guest(1).run(["rmprobe", "--card", "0"]).unwrap();
    assert!(!none.success() && none.stdout_text().contains("has 1 cards"), "{none}");

    // The guest of both fills the first card: for the first guest too, but not for the second.
    let mut filler =
        both.command(["rmprobe", "--card", "0", "--fill", "8", "--keep", "600"]).spawn().unwrap();
    filler.wait_for("keeping").unwrap();
    fills(rig.guest(0), "0", 0);
    fills(rig.guest(1), "1", 64);
    fills(both, "1", 64);
    filler.signal(Signal::SIGKILL).unwrap();
    await_until("what it kept goes back", || vram(both) == 0);
    fills(rig.guest(0), "0", 64);

    let _killed = hold(rig.guest(0), "0");
    let others = &rig.guests()[1..];
    let mut holders: Vec<_> = others.iter().map(|guest| hold(guest, "1")).collect();
    let (qemu, backend) = (rig.guest(0).qemu_pid(), rig.guest(0).backend_pid().unwrap());
    kill(Pid::from_raw(i32::try_from(qemu).unwrap()), Signal::SIGKILL).unwrap();
    await_until("its backend ends with it", || !lives(&backend));
    fills(both, "0", 64);
    holders.iter_mut().for_each(undisturbed);
    for holder in &holders {
        holder.signal(Signal::SIGKILL).unwrap();
    }
    for guest in others {
        await_until("what programs held goes back", || vram(guest) == 0);
        works(guest);
    }
}
