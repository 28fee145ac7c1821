//! The admin socket and the metrics, through real sockets.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use nvguest_frontend::Options;
use rmclient::Place;
use serde_json::Value;

use crate::common::{pair, pair_in, refused, start, Pair, EMFILE, LONG};

/// `RM_CONTROL` of a command that no profile has.
const UNKNOWN: u32 = 0x7f_0001;
/// Place the process that another user is finds the socket; see `ask_as_somebody_else`.
const SOCKET: &str = "NVGUEST_TEST_ADMIN_SOCKET";

/// A guest that did something of everything.
fn busy(pair: &Pair) -> Client {
    let client = Client::new(&pair.guest.process(100)).unwrap();
    let memory = client.memory(Place::Video, 65536).unwrap();
    client.map(Place::Video, memory, 65536).unwrap();
    client.control(client.root, UNKNOWN, &mut [0; 4]).unwrap();
    client.attached_ids().unwrap();
    client
}

fn error(reply: &Value) -> &str {
    assert_eq!(reply["schema"], 1);
    reply["error"].as_str().expect("an error")
}

#[test]
fn a_question_that_is_none_is_answered_with_what_is_wrong() {
    let backend = start();
    let ask = |line: &str| backend.ask(line).unwrap();
    assert!(error(&ask("hello")).contains("not a line of JSON"));
    assert!(error(&ask("")).contains("not a line of JSON"));
    assert!(error(&ask(r#"{"schema":9,"request":"status"}"#)).contains("speaks 1"));
    assert!(error(&ask(r#"{"schema":1,"request":"reboot"}"#)).contains("`status`"));
    let long = format!("\"{}\"", "x".repeat(80 << 10));
    assert!(backend.ask(&long).is_err() || !error(&ask("x")).is_empty());
    assert_eq!(ask(r#"{"schema":1,"request":"status"}"#)["answer"]["placements"], 0);
}

#[test]
fn a_limit_that_an_admin_sets_holds_at_once() {
    let pair = pair();
    let process = pair.guest.process(100);
    process.open("nvidiactl").unwrap();
    let set = |pairs: &str| {
        let line = format!(r#"{{"schema":1,"request":"limits","set":{{{pairs}}}}}"#);
        pair.backend.ask(&line).unwrap()
    };
    let reply = set(r#""process-files":"40","files":"2""#);
    assert_eq!(reply["answer"]["limits"]["files"]["guest"], 2);
    assert_eq!(reply["answer"]["limits"]["files"]["holds"], "at once");
    let other = pair.guest.process(200);
    assert_eq!(pair.backend.status().unwrap()["shares"]["files"]["most"], 2);
    other.open("nvidiactl").ok();
    assert_eq!(refused(other.open("nvidiactl")), EMFILE);
    // What is wrong changes nothing.
    assert!(error(&set(r#""files":"9","fils":"1""#)).contains("\"fils\""));
    assert!(error(&set(r#""files":"many""#)).contains("\"many\""));
    assert!(error(&set(r#""files":"9","vram":"much""#)).contains("vram=much is no size"));
    assert!(error(&set(r#""files":"9","weight":"101""#)).contains("from 1 to 100"));
    assert_eq!(pair.backend.status().unwrap()["shares"]["files"]["most"], 2);
    set(r#""files":"100""#);
    other.open("nvidiactl").unwrap();
}

#[test]
fn a_budget_and_a_weight_that_an_admin_sets_hold_at_once() {
    let pair = pair();
    let client = Client::new(&pair.guest.process(100)).unwrap();
    client.memory(Place::Video, 4 << 20).unwrap();
    let set = r#"{"schema":1,"request":"limits","set":{"vram":"6M","weight":"20"}}"#;
    assert!(pair.backend.ask(set).unwrap()["error"].is_null());
    let status = pair.backend.status().unwrap();
    assert_eq!(status["vram"]["budget"], 6 << 20);
    assert_eq!(status["weight"], 20);
    assert!(client.memory(Place::Video, 4 << 20).is_err());
    let set = r#"{"schema":1,"request":"limits","set":{"vram":"none"}}"#;
    pair.backend.ask(set).unwrap();
    client.memory(Place::Video, 4 << 20).unwrap();
}

#[test]
fn requests_errors_and_latencies_are_counted() {
    let pair = pair();
    let client = busy(&pair);
    assert!(client.ctl.close().is_ok());
    let status = pair.backend.status().unwrap();
    let calls = |class: &str| status["latency"][class]["calls"].as_u64().unwrap();
    for class in ["control", "alloc", "map", "open", "close"] {
        assert!(calls(class) > 0, "{class}: {status}");
        assert!(status["latency"][class]["sum_ns"].as_u64() > Some(0), "{class}: {status}");
    }
    let all: u64 = status["latency"].as_object().unwrap().keys().map(|class| calls(class)).sum();
    let types = ["open", "close", "ioctl", "map", "unmap", "arm"];
    let served = types.map(|kind| status["requests"][kind].as_u64().unwrap());
    assert_eq!(all, served.iter().sum::<u64>(), "{status}");
    assert_eq!(status["refused"], 1);
    assert_eq!(status["in_flight"], 0);
}

#[test]
fn what_a_dead_worker_counted_stays_in_the_guest_s_totals() {
    let pair = pair();
    let _client = busy(&pair);
    let before = pair.backend.status().unwrap();
    let worker = nix::unistd::Pid::from_raw(pair.backend.worker_of(100).unwrap());
    nix::sys::signal::kill(worker, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert!(wait_until(LONG, || pair.backend.workers().unwrap().is_empty()));
    let after = pair.backend.status().unwrap();
    for counts in ["requests", "latency", "refusals"] {
        assert_eq!(before[counts], after[counts]);
    }
}

/// What Prometheus reads: the text's samples, by name and labels.
fn samples(text: &str) -> BTreeMap<&str, f64> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .map(|line| line.rsplit_once(' ').expect("a sample and its value"))
        .map(|(sample, value)| (sample, value.parse().expect("a number")))
        .collect()
}

fn scrape(socket: &Path) -> String {
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    let (head, body) = reply.split_once("\r\n\r\n").expect("a head and a body");
    assert!(head.starts_with("HTTP/1.0 200 OK\r\n"), "{head}");
    assert!(head.contains(&format!("Content-Length: {}\r\n", body.len())), "{head}");
    body.to_owned()
}

#[test]
fn metrics_say_the_same_numbers_as_the_admin_socket() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("metrics");
    let args = ["--metrics-socket", socket.to_str().unwrap(), "--vram=64M", "--weight=20"];
    let pair = pair_in(&args, &[], Options::default());
    let _client = busy(&pair);
    let status = pair.backend.status().unwrap();
    let text = scrape(&socket);
    let samples = samples(&text);
    let mut compared = 0;
    let mut same = |name: String, value: &Value| {
        let value = value.as_f64().unwrap_or_else(|| panic!("{name} is no number: {value}"));
        assert_eq!(samples.get(name.as_str()), Some(&value), "{name} in\n{text}");
        compared += 1;
    };
    let g = "guest=\"\"";
    for kind in status["requests"].as_object().unwrap().keys() {
        let labels = format!("{{{g},type=\"{kind}\"}}");
        same(format!("nvguest_requests_total{labels}"), &status["requests"][kind]);
        same(format!("nvguest_errors_total{labels}"), &status["errors"][kind]);
    }
    for (class, latency) in status["latency"].as_object().unwrap() {
        let name = "nvguest_call_duration_seconds";
        same(format!("{name}_count{{{g},class=\"{class}\"}}"), &latency["calls"]);
        let seconds = latency["sum_ns"].as_f64().unwrap() / 1e9;
        same(format!("{name}_sum{{{g},class=\"{class}\"}}"), &seconds.into());
        let mut below = 0;
        for (at, calls) in latency["buckets"].as_array().unwrap().iter().enumerate() {
            below += calls.as_u64().unwrap();
            // Prometheus' buckets hold all that is below their bound.
            let le = match at {
                21 => "+Inf".to_owned(),
                at => format!("{:?}", f64::from(1u32 << at) / 1e6),
            };
            let found = samples.iter().find(|(sample, _)| {
                let class = sample.contains(&format!("class=\"{class}\""));
                class && sample.starts_with(name) && bound_of(sample) == le.parse().ok()
            });
            assert_eq!(found.map(|(_, &n)| n), Some(below as f64), "{class} {le} in\n{text}");
        }
    }
    for (key, share) in status["shares"].as_object().unwrap() {
        let labels = format!("{{{g},resource=\"{key}\"}}");
        same(format!("nvguest_limit_used{labels}"), &share["held"]);
        same(format!("nvguest_limit{labels}"), &share["most"]);
    }
    let plain = [
        ("events_total", &status["events"]),
        ("wakes_total", &status["wakes"]),
        ("driver_errors_total", &status["driver_errors"]),
        ("queue_depth", &status["in_flight"]),
        ("placements", &status["placements"]),
        ("placements_peak", &status["placements_peak"]),
        ("window_bytes", &status["window_bytes"]),
        ("arena_size_bytes", &status["arena"]["bytes"]),
        ("arena_taken_bytes", &status["arena"]["taken_bytes"]),
        ("vram_used_bytes", &status["vram"]["used"]),
        ("vram_budget_bytes", &status["vram"]["budget"]),
        ("vram_reserve_bytes", &status["vram"]["reserve"]),
        ("weight", &status["weight"]),
        ("log_lines_left_out_total", &status["lines_left_out"]),
    ];
    for (name, value) in plain {
        same(format!("nvguest_{name}{{{g}}}"), value);
    }
    same(format!("nvguest_refused_total{{{g},reason=\"unknown\"}}"), &status["refused"]);
    assert!(text.contains(&format!("driver={}", status["release"])), "{text}");
    assert!(text.ends_with("# EOF\n"), "{text}");
    assert!(compared > 60, "{compared} compared");
    // The admin socket hands out the same text.
    let reply = pair.backend.ask(r#"{"schema":1,"request":"metrics"}"#).unwrap();
    assert_eq!(reply["answer"].as_str(), Some(text.as_str()));
}

#[test]
fn metrics_of_limits_that_no_gauge_can_hold_do_not_end_the_backend() {
    let pair = pair_in(&[], &[], Options::default());
    let most = u64::MAX - 1;
    let set = format!(r#""set":{{"files":"{most}","vram":"{most}"}}"#);
    let reply = pair.backend.ask(&format!(r#"{{"schema":1,"request":"limits",{set}}}"#)).unwrap();
    assert_eq!(reply["answer"]["limits"]["files"]["guest"], most, "{reply}");
    let reply = pair.backend.ask(r#"{"schema":1,"request":"metrics"}"#).unwrap();
    let text = reply["answer"].as_str().unwrap_or_else(|| panic!("{reply}"));
    let samples = samples(text);
    for name in ["limit{guest=\"\",resource=\"files\"}", "vram_budget_bytes{guest=\"\"}"] {
        assert_eq!(
            samples.get(format!("nvguest_{name}").as_str()),
            Some(&(i64::MAX as f64)),
            "{name} in\n{text}"
        );
    }
    assert!(pair.backend.status().is_ok());
}

fn bound_of(sample: &str) -> Option<f64> {
    let (_, rest) = sample.split_once("le=\"")?;
    rest.split_once('"')?.0.parse().ok()
}

#[test]
fn a_metrics_file_is_whole_readable_for_all_and_gone_at_the_end() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("nv.prom");
    let args = ["--metrics-file", file.to_str().unwrap()];
    let mut pair = pair_in(&args, &[], Options::default());
    assert!(wait_until(LONG, || file.exists()));
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(text.starts_with("# HELP nvguest_") && text.ends_with("# EOF\n"), "{text}");
    assert_eq!(file.metadata().unwrap().permissions().mode() & 0o777, 0o644);
    pair.backend.signal(nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(pair.backend.ended(LONG).is_some());
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn a_name_is_a_folder_of_the_runtime_directory_with_both_sockets() {
    let runtime = tempfile::tempdir().unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_vhost-user-nvguest"));
    command.args(["--host=sim", "--name=web", "--allow-root"]);
    let mut child = command.env("XDG_RUNTIME_DIR", runtime.path()).spawn().unwrap();
    let own = runtime.path().join("nvguest/web");
    let there = |name: &str| own.join(name).exists();
    assert!(wait_until(LONG, || there("vhost.sock") && there("admin.sock")));
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&own), 0o700);
    assert_eq!(mode(&own.join("admin.sock")), 0o700);
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn nobody_but_root_and_the_owner_is_answered() {
    let backend = start();
    let mode = |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(&backend.admin()) & 0o077, 0, "nobody else can connect");
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // Whoever opens the socket to all is still not asked by all.
    let open = |path: &Path, mode| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode)).unwrap();
    };
    open(&backend.admin(), 0o777);
    open(backend.admin().parent().unwrap(), 0o755);
    let ask = |user: u32| {
        let mut command = Command::new("/proc/self/exe");
        command.args(["--exact", "admin::ask_as_somebody_else", "--ignored", "--nocapture"]);
        let output = command.env(SOCKET, backend.admin()).uid(user).output().unwrap();
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let said = ask(65534);
    assert!(said.contains("user 65534 is neither root nor user 0"), "{said}");
    assert!(ask(0).contains("\"answer\""));
}

#[test]
#[ignore = "another test runs it as another user"]
fn ask_as_somebody_else() {
    let Some(socket) = std::env::var_os(SOCKET) else { return };
    let mut stream = UnixStream::connect(socket).unwrap();
    stream.write_all(b"{\"schema\":1,\"request\":\"status\"}\n").unwrap();
    let mut reply = String::new();
    stream.read_to_string(&mut reply).unwrap();
    println!("{reply}");
}
