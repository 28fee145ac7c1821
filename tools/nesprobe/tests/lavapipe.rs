//! Runs the real program on whatever Vulkan and EGL this machine has; a software one will do.
//!
//! A machine without any leaves these tests out and says so. `cargo xtask test` installs one, and
//! sets `NESPROBE_MUST_RUN` so that none is left out there.

use std::io::{BufRead, BufReader, Write};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn nesprobe(words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_nesprobe"));
    command.args(words).stdin(Stdio::null());
    command
}

fn output(words: &[&str]) -> Output {
    nesprobe(words).output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// What the program prints, or nothing where there is nothing to run it on.
fn run(words: &[&str]) -> Option<String> {
    let output = output(words);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    if output.status.code() == Some(3) {
        assert!(std::env::var_os("NESPROBE_MUST_RUN").is_none(), "{words:?} must run: {err}");
        // Not with eprintln!, which the test harness would keep to itself.
        let _ = writeln!(std::io::stderr(), "left out: {err}");
        return None;
    }
    assert!(output.status.success(), "{words:?}: {}\n{out}{err}", output.status);
    Some(out)
}

fn json(words: &[&str]) -> Option<Value> {
    let out = run(words)?;
    Some(serde_json::from_str(out.lines().last().unwrap()).unwrap())
}

const SMALL: [&str; 8] = ["--width", "64", "--height", "64", "--cost", "10", "--warmup", "0.1"];

fn small<'a>(words: &[&'a str]) -> Vec<&'a str> {
    SMALL.iter().copied().chain(words.iter().copied()).collect()
}

#[test]
fn every_check_passes_and_says_the_same_each_time() {
    let Some(first) = run(&["--verify"]) else { return };
    assert!(first.lines().filter(|line| line.starts_with("ok ")).count() > 12, "{first}");
    assert_eq!(Some(first), run(&["--verify"]));
}

#[test]
fn checks_are_told_as_json_too() {
    let Some(all) = json(&["--verify", "--json"]) else { return };
    assert_eq!(all["failed"], 0);
    assert!(all["checks"].as_array().unwrap().iter().any(|it| it["check"] == "pixels"));
}

#[test]
fn opengl_draws_what_vulkan_draws() {
    let (Some(vulkan), Some(gl)) = (run(&["--verify"]), run(&["--gl"])) else { return };
    let pixels = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.contains(name)).unwrap();
        line.split_once(": ").unwrap().1.to_owned()
    };
    assert_eq!(pixels(&vulkan, " pixels:"), pixels(&gl, " gl-pixels:"));
    assert_eq!(pixels(&vulkan, " depth:"), pixels(&gl, " gl-depth:"));
}

#[test]
fn each_measured_frame_is_a_line_of_the_file() {
    let file = std::env::temp_dir().join(format!("nesprobe-{}.csv", std::process::id()));
    let words = small(&["--seconds", "1", "--json", "--csv", file.to_str().unwrap()]);
    let Some(all) = json(&words) else { return };
    let lines = std::fs::read_to_string(&file).unwrap().lines().count() as u64;
    std::fs::remove_file(&file).unwrap();
    assert_eq!(all["frames"], lines - 1);
    assert!(all["frames"].as_u64() > Some(10) && all["warmup_frames"].as_u64() > Some(1));
    assert!(all["frame_ms"]["p50"].as_f64() <= all["frame_ms"]["p99.9"].as_f64());
    assert!(all["late_frames"].is_null());
}

#[test]
fn a_paced_run_draws_as_often_as_it_is_told_and_counts_late_frames() {
    let words = small(&["--seconds", "1", "--fps", "20", "--frames-in-flight", "2", "--json"]);
    let Some(all) = json(&words) else { return };
    let frames = all["frames"].as_u64().unwrap();
    assert!((10..=20).contains(&frames), "{all}");
    assert!(all["late_frames"].as_u64().unwrap() <= frames);
}

#[test]
fn a_barrier_holds_the_run_until_a_line_comes() {
    if run(&["--list"]).is_none() {
        return;
    }
    let mut command = nesprobe(&small(&["--seconds", "0.2", "--barrier", "--json"]));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    let last: Value = serde_json::from_str(&lines.last().unwrap().unwrap()).unwrap();
    assert!(last["frames"].as_u64() > Some(0));
    assert!(child.wait().unwrap().success());
}

#[test]
fn ctrl_c_ends_the_run_with_its_summary() {
    if run(&["--list"]).is_none() {
        return;
    }
    let mut command = nesprobe(&small(&["--seconds", "600", "--barrier", "--json"]));
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    assert_eq!(lines.next().unwrap().unwrap(), "ready");
    child.stdin.take().unwrap().write_all(b"go\n").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    let pid = nix::unistd::Pid::from_raw(child.id().try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGINT).unwrap();
    let last: Value = serde_json::from_str(&lines.last().unwrap().unwrap()).unwrap();
    assert_eq!(last["interrupted"], true);
    assert!(child.wait().unwrap().success());
}

#[test]
fn submissions_and_devices_are_counted() {
    let Some(latency) = json(&["--latency", "50", "--json"]) else { return };
    assert_eq!(latency["submits"], 50);
    assert!(latency["submit_us"]["p50"].as_f64() > Some(0.0) && latency["device_ms"].is_f64());
    let Some(cycles) = json(&["--cycles", "3", "--json"]) else { return };
    assert_eq!(cycles["end"]["fds"], cycles["after_first"]["fds"]);
}

#[test]
fn a_cost_is_found_for_a_time() {
    // A machine that does other things may not hold still for 1 %: that is answered, too.
    let output = output(&small(&["--calibrate", "20", "--seconds", "0.2", "--json"]));
    if output.status.success() {
        let all: Value =
            serde_json::from_str(text(&output.stdout).lines().last().unwrap()).unwrap();
        let ms = all["calibrated_ms"].as_f64().unwrap();
        assert!((19.0..=21.0).contains(&ms), "{all}");
    } else if output.status.code() == Some(1) {
        assert!(text(&output.stderr).contains("within 1 %"), "{}", text(&output.stderr));
    }
}

#[test]
fn a_device_that_is_not_there_is_exit_status_3() {
    let output = output(&["--latency", "1", "--device", "no such device"]);
    assert_eq!(output.status.code(), Some(3));
    assert_eq!(text(&output.stderr).lines().count(), 1, "{}", text(&output.stderr));
}

#[test]
fn a_command_line_that_makes_no_sense_is_exit_status_2() {
    assert_eq!(output(&["--verify", "--gl"]).status.code(), Some(2));
}
