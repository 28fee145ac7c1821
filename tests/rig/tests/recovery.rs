//! A backend that dies, and what stock QEMU can do about it: `docs/admin.md`, "When a backend
//! dies".

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nvguest_rig::{Assets, Guest, Host, Rig};
use serde_json::Value;

const PATIENCE: Duration = Duration::from_secs(10);

fn kill_backend(rig: &mut Rig) {
    let backend = rig.guest_mut(0).backend_mut().unwrap();
    backend.signal(Signal::SIGKILL).unwrap();
    backend.wait().unwrap();
}

/// `nvguest recover`, with the command of a backend where QEMU's chardev found the last one.
fn recover(rig: &Rig) -> (Option<i32>, Value) {
    let assets = Assets::find().unwrap();
    let guest = rig.guest(0);
    let folder = rig.folder().join("nvguest").join(guest.name());
    fs::create_dir_all(&folder).unwrap();
    let mut command = Command::new(assets.binary("nvguest"));
    command.env("XDG_RUNTIME_DIR", rig.folder());
    command.args(["recover", "--json", guest.name(), "--qmp"]).arg(guest.qmp_socket()).arg("--");
    command.arg(assets.backend()).args(["--host=sim", "--log-level=error", "--socket-path"]);
    command.arg(guest.qmp_socket().with_file_name("backend"));
    command.arg("--admin-socket").arg(folder.join("admin.sock"));
    command.args(nix::unistd::geteuid().is_root().then_some("--allow-root"));
    let output = command.output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let said = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {output:?}"));
    (output.status.code(), said)
}

fn has_card(guest: &Guest) -> bool {
    guest.run(["test", "-e", "/dev/nvidia0"]).unwrap().success()
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_guest_behind_a_root_port_gets_a_new_backend_and_works_again() {
    // The module lets go without having waited for a sign of life: it would for too long.
    let builder = Rig::builder().host(Host::Sim).hotpluggable().module_params("patience_s=60");
    let mut rig = builder.boot().unwrap();
    // A program that has the card open, with its memory mapped, costs nobody the recovery.
    let script = "rmprobe --hold 60 >/tmp/held 2>&1 & while ! grep -q holding /tmp/held; do \
                  sleep 0.1; done";
    assert!(rig.guest(0).shell(script).unwrap().success());
    kill_backend(&mut rig);

    let (code, said) = recover(&rig);
    assert_eq!((code, &said["outcome"]), (Some(0), &"recovered".into()), "{said:#}");
    let end = Instant::now() + PATIENCE;
    while !has_card(rig.guest(0)) {
        assert!(Instant::now() < end, "no card comes\n{}", rig.logs());
    }
    let output = rig.guest(0).run(["rmprobe"]).unwrap();
    assert!(output.success(), "{output}\n{}", rig.logs());
    let dmesg = rig.guest(0).dmesg().unwrap();
    assert!(!dmesg.contains("BUG") && !dmesg.contains("Oops"), "{dmesg}");
    let (code, said) = recover(&rig);
    assert_eq!((code, &said["outcome"]), (Some(0), &"needless".into()), "{said:#}");
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_guest_on_the_root_bus_is_told_to_be_restarted_and_loses_nothing_more() {
    let mut rig = Rig::builder().host(Host::Sim).boot().unwrap();
    kill_backend(&mut rig);
    let (code, said) = recover(&rig);
    assert_eq!((code, &said["outcome"]), (Some(1), &"restart".into()), "{said:#}");
    assert!(said.to_string().contains("Bus 'pcie.0' does not support hotplugging"), "{said:#}");
    assert!(rig.guest(0).run(["true"]).unwrap().success(), "{}", rig.logs());
    assert!(rig.guest_mut(0).qemu_mut().ended().unwrap().is_none());
}
