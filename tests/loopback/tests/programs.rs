//! Programs as guests without a VM, on the simulated card.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Once;

fn built(name: &str) -> PathBuf {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "nvguest-loopback", "-p", "rmprobe"]);
        cargo.args(["-p", "vhost-user-nvguest", "--examples", "--bins", "--lib"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo").success(), "building what the tests run");
    });
    folder().join(name)
}

fn folder() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_nvguest-loopback")).parent().expect("a folder")
}

fn loopback(options: &[&str], program: &[&str]) -> Output {
    let mut command = Command::new(built("nvguest-loopback"));
    command.args(["--host=sim", "--backend-arg=--log-level=error"]);
    command.args(options).arg("--").args(program);
    command.output().expect("the loop-back guest")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn must_succeed(output: &Output) -> String {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{}:\n{out}\n{err}", output.status);
    assert!(!out.contains("FAIL"), "{out}");
    assert_eq!(err, "");
    out
}

fn path(name: &str) -> String {
    built(name).to_string_lossy().into_owned()
}

#[test]
fn every_check_of_rmprobe_passes_in_a_guest_without_a_vm() {
    let out = must_succeed(&loopback(&[], &[&path("rmprobe")]));
    assert!(out.lines().filter(|line| line.starts_with("ok ")).count() >= 53, "{out}");
}

#[test]
fn a_check_of_events_that_others_work_hides_is_skipped() {
    let only = ["--only", "event", "--only", "event-two-files", "--only", "event-key"];
    let words = [&[path("examples/busy"), path("rmprobe")][..], &only.map(String::from)].concat();
    let out = must_succeed(&loopback(&[], &words.iter().map(String::as_str).collect::<Vec<_>>()));
    let verdicts: Vec<&str> = out.lines().filter_map(|line| line.split(':').next()).collect();
    assert_eq!(verdicts, ["skip event", "skip event-two-files", "ok event-key"], "{out}");
}

#[test]
fn descriptors_mean_the_same_after_fork_exec_a_message_and_a_duplicate() {
    must_succeed(&loopback(&[], &[&path("examples/passes")]));
}

#[test]
fn an_event_wakes_whoever_waits_in_whatever_way_and_once() {
    must_succeed(&loopback(&[], &[&path("examples/waits")]));
}

/// Runs so many probes at once, each with these checks.
fn at_once(count: usize, checks: &[&str]) {
    let probe = path("rmprobe");
    let only: String = checks.iter().map(|check| format!(" --only {check}")).collect();
    let script = format!(
        "for i in $(seq {count}); do {probe}{only} & all=\"$all $!\"; done; \
         for one in $all; do wait $one || exit 1; done"
    );
    let out = must_succeed(&loopback(&[], &["sh", "-c", &script]));
    let passed = out.lines().filter(|line| line.starts_with("ok ")).count();
    assert_eq!(passed, count * checks.len(), "{out}");
}

#[test]
fn more_processes_than_slots_each_find_their_own_memory() {
    at_once(24, &["video-memory", "map-part", "event-wakes", "close"]);
}

#[test]
fn sixty_four_processes_at_once_are_all_answered() {
    at_once(64, &["ids", "client", "event-wakes", "close"]);
}

#[test]
fn what_a_killed_program_held_is_closed_and_its_slot_serves_the_next() {
    let probe = path("rmprobe");
    let script = format!(
        "for i in 1 2 3 4 5 6; do {probe} --hold 60 --size 8 < /dev/null > /dev/null & sleep 0.4; \
         kill -9 $!; wait $! 2> /dev/null; done; sleep 0.2; {probe}"
    );
    must_succeed(&loopback(&[], &["bash", "-c", &script]));
}

#[test]
fn maps_are_never_seen_before_they_are_there() {
    must_succeed(&loopback(&[], &[&path("rmprobe"), "--map-race", "500", "--cycles", "50"]));
}

#[test]
fn a_trace_names_each_call_and_its_answer() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("trace");
    let trace = format!("--trace={}", file.display());
    must_succeed(&loopback(&[&trace], &[&path("rmprobe"), "--only", "name", "--only", "event"]));
    let text = std::fs::read_to_string(file).expect("the trace");
    for name in [
        "open path=/dev/nvidiactl descriptor=",
        "name=NV_ESC_CARD_INFO",
        "name=NV01_ROOT",
        "name=NV2080_CTRL_CMD_GPU_GET_NAME_STRING",
        "poll node=nvidia0 events=0x3 revents=0x1",
    ] {
        assert!(text.contains(name), "no {name} in\n{text}");
    }
}

#[test]
fn two_runs_of_a_program_make_the_same_calls_and_get_the_same_answers() {
    let options = ["--compare", "--twice"];
    let out = must_succeed(&loopback(&options, &[&path("rmprobe"), "--only", "name"]));
    assert!(out.ends_with("differences: 0\n"), "{out}");
    assert!(!out.contains(": 0 calls"), "{out}");
}
