//! The rig itself, in a guest without our device.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::Signal;
use nvguest_rig::Rig;

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn a_guest_does_as_it_is_told_and_leaves_nothing_behind() {
    let rig = Rig::builder().boot().unwrap();
    a_command_answers_with_its_output_and_its_end(&rig);
    input_reaches_a_command(&rig);
    a_command_past_its_time_is_ended(&rig);
    a_command_is_ended_by_a_signal(&rig);
    files_go_both_ways(&rig);
    commands_start_together(&rig);
    loaders_are_there_and_say_that_no_device_is(&rig);

    let folder = rig.folder().to_owned();
    let qemu = format!("/proc/{}", rig.guest(0).qemu_pid());
    assert!(folder.exists() && Path::new(&qemu).exists());
    drop(rig);
    assert!(!folder.exists() && !Path::new(&qemu).exists());
}

fn a_command_answers_with_its_output_and_its_end(rig: &Rig) {
    let output = rig.guest(0).shell("echo out; echo err >&2; exit 3").unwrap();
    assert_eq!(output.stdout_text(), "out\n");
    assert_eq!(output.stderr_text(), "err\n");
    assert_eq!(output.code, Some(3));
    let error = rig.guest(0).run(["no-such-program"]).unwrap_err();
    assert!(format!("{error:#}").contains("no-such-program"), "{error:#}");
}

fn input_reaches_a_command(rig: &Rig) {
    let input = vec![b'x'; 3 << 20];
    let output = rig.guest(0).command(["wc", "-c"]).stdin(input).run().unwrap();
    assert_eq!(output.stdout_text().trim(), (3 << 20).to_string());
}

fn a_command_past_its_time_is_ended(rig: &Rig) {
    let limit = Duration::from_millis(500);
    let output = rig.guest(0).command(["sleep", "600"]).timeout(limit).run().unwrap();
    assert!(output.timed_out, "{output}");
    assert_eq!(output.signal, Some(Signal::SIGKILL as i32));
}

fn a_command_is_ended_by_a_signal(rig: &Rig) {
    let process = rig.guest(0).command(["sleep", "600"]).spawn().unwrap();
    rig.guest(0).kill(process.pid(), Signal::SIGTERM).unwrap();
    assert_eq!(process.wait().unwrap().signal, Some(Signal::SIGTERM as i32));
}

fn files_go_both_ways(rig: &Rig) {
    let data: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    rig.guest(0).write("/tmp/data", 0o640, &data).unwrap();
    assert_eq!(rig.guest(0).read("/tmp/data").unwrap(), data);
    let mode = rig.guest(0).run(["stat", "-c", "%a", "/tmp/data"]).unwrap();
    assert_eq!(mode.stdout_text().trim(), "640");
}

fn commands_start_together(rig: &Rig) {
    let uptime = || rig.guest(0).command(["cut", "-d ", "-f1", "/proc/uptime"]);
    let outputs = Rig::together([uptime(), uptime()]).unwrap();
    let at = |index: usize| outputs[index].stdout_text().trim().parse::<f64>().unwrap();
    assert!((at(0) - at(1)).abs() < 2.0, "{outputs:?}");
}

/// Programs that load libraries at run time start, and find loaders that find nothing.
fn loaders_are_there_and_say_that_no_device_is(rig: &Rig) {
    for (mode, api) in [("--list", "Vulkan loader found no device"), ("--gl", "no device has")] {
        let output = rig.guest(0).run(["nesprobe", mode]).unwrap();
        assert_eq!(output.code, Some(3), "{output}");
        assert!(output.stderr_text().contains(api), "{output}");
    }
}
