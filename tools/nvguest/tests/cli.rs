//! `nvguest`, run as an admin runs it, against real backends on the simulated card.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output};
use std::sync::{Arc, Once};
use std::time::Duration;

use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use nvguest_frontend::{Guest, Options};
use rmclient::Place;
use serde_json::Value;

const LONG: Duration = Duration::from_secs(20);
/// `RM_CONTROL` of a command that no profile has.
const UNKNOWN: u32 = 0x7f_0001;

fn nvguest() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_nvguest"))
}

fn backend() -> PathBuf {
    static BUILT: Once = Once::new();
    BUILT.call_once(|| {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "-p", "vhost-user-nvguest", "--bins"]);
        if !cfg!(debug_assertions) {
            cargo.arg("--release");
        }
        assert!(cargo.status().expect("cargo").success(), "building what the tests run");
    });
    nvguest().with_file_name("vhost-user-nvguest")
}

/// A host with a runtime directory of its own.
struct Host(tempfile::TempDir);

/// A backend, killed at the end of a test, and its guest.
struct Served {
    child: Child,
    guest: Arc<Guest>,
}

impl Drop for Served {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Host {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn serve(&self, name: &str) -> Served {
        let mut command = Command::new(backend());
        command.args(["--host=sim", "--allow-root", "--log-level=error", "--name", name]);
        let child = command.env("XDG_RUNTIME_DIR", self.0.path()).spawn().unwrap();
        let folder = self.0.path().join("nvguest").join(name);
        let (socket, admin) = (folder.join("vhost.sock"), folder.join("admin.sock"));
        assert!(wait_until(LONG, || socket.exists() && admin.exists()));
        let guest = Guest::connect(&socket, Options::default()).unwrap();
        guest.probe().unwrap();
        Served { child, guest }
    }

    fn run(&self, args: &[&str]) -> Output {
        let mut command = Command::new(nvguest());
        command.args(args).env("XDG_RUNTIME_DIR", self.0.path()).output().unwrap()
    }

    fn says(&self, args: &[&str]) -> String {
        let output = self.run(args);
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{args:?}: {error}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn json(&self, args: &[&str]) -> Value {
        let text = self.says(&[args, &["--json"]].concat());
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error} in {text}"))
    }

    fn fails(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert_eq!(output.status.code(), Some(1), "{args:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }
}

/// Opens a card, makes memory, maps it, is refused something.
fn use_card(served: &Served) -> Client {
    let client = Client::new(&served.guest.process(100)).unwrap();
    let memory = client.memory(Place::Video, 65536).unwrap();
    client.map(Place::Video, memory, 65536).unwrap();
    client.control(client.root, UNKNOWN, &mut [0; 4]).unwrap();
    client.attached_ids().unwrap();
    client
}

#[test]
fn list_finds_backends_by_their_sockets_and_says_which_are_gone() {
    let host = Host::new();
    assert!(host.says(&["list"]).starts_with("no guest in "));
    let (_db, web) = (host.serve("db"), host.serve("web"));
    let list = host.json(&["list"]);
    let found = |at: usize| (list[at]["guest"].as_str(), list[at]["state"].as_str());
    assert_eq!(found(0), (Some("db"), Some("serving")));
    assert_eq!(found(1), (Some("web"), Some("serving")));
    assert_eq!(list[1]["status"]["pid"], web.child.id());
    assert_eq!(list.as_array().unwrap().len(), 2);
    // Killed with all of its processes, a backend cannot take its sockets along.
    let old = host.0.path().join("nvguest/old");
    std::fs::create_dir(&old).unwrap();
    drop(std::os::unix::net::UnixListener::bind(old.join("admin.sock")).unwrap());
    let text = host.says(&["list"]);
    assert!(text.contains("gone (killed"), "{text}");
    assert!(host.fails(&["show", "old"]).contains("is its backend there"));
}

#[test]
fn an_unknown_guest_is_answered_with_those_that_are_there() {
    let host = Host::new();
    let _db = host.serve("db");
    assert!(host.fails(&["show", "web"]).contains("there is no guest \"web\": there are db"));
    assert!(host.fails(&["top", "web", "--once"]).contains("there are db"));
}

#[test]
fn show_and_refusals_say_what_a_guest_did() {
    let host = Host::new();
    let web = host.serve("web");
    let _client = use_card(&web);
    let status = host.json(&["show", "web"]);
    assert_eq!(status["placements"], 1);
    assert!(status["latency"]["control"]["calls"].as_u64() > Some(0));
    let text = host.says(&["show", "web"]);
    assert!(text.contains("1 placements, 64 KiB") && text.contains("control"), "{text}");
    let refused = host.json(&["refusals", "web"]);
    assert_eq!(refused["refusals"][0]["what"], "control 0x7f0001");
    assert!(host.says(&["refusals", "web"]).contains("control 0x7f0001"));
    let metrics = host.says(&["metrics", "web"]);
    assert!(metrics.contains("nvguest_placements{guest=\"web\"} 1\n"), "{metrics}");
    // By its socket too.
    let socket = host.0.path().join("nvguest/web/admin.sock");
    assert_eq!(host.json(&["show", socket.to_str().unwrap()])["name"], "web");
}

#[test]
fn limits_are_shown_and_set() {
    let host = Host::new();
    let web = host.serve("web");
    assert_eq!(host.json(&["limits", "web"])["limits"]["files"]["guest"], 16_384);
    let answer = host.json(&["limits", "web", "files=1", "process-bytes=1M"]);
    assert_eq!(answer["limits"]["files"]["guest"], 1);
    assert_eq!(answer["limits"]["bytes"]["process"], 1 << 20);
    let process = web.guest.process(100);
    process.open("nvidiactl").unwrap();
    assert!(process.open("nvidiactl").is_err());
    assert!(host.fails(&["limits", "web", "fils=1"]).contains("there are processes, files"));
    let error = host.fails(&["limits", "web", "--weight=101"]);
    assert!(error.contains("from 1 to 100"), "{error}");
    let answer = host.json(&["limits", "web", "--weight=20", "--vram=1G"]);
    assert_eq!((&answer["weight"], &answer["vram"]), (&20.into(), &(1_u64 << 30).into()));
    assert!(host.says(&["limits", "web"]).contains("at once"));
}

#[test]
fn top_looks_twice_and_says_what_was_done_between() {
    let host = Host::new();
    let web = host.serve("web");
    let client = use_card(&web);
    let over = std::sync::atomic::AtomicBool::new(false);
    let rows = std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                client.attached_ids().unwrap();
            }
        });
        let rows = host.json(&["top", "--once", "-n", "0.3"]);
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        rows
    });
    let row = &rows[0];
    assert_eq!((row["guest"].as_str(), row["processes"].as_u64()), (Some("web"), Some(1)));
    assert!(row["requests"]["ioctl"].as_f64() > Some(1.0), "{row}");
    assert_eq!(row["requests"]["hello"], 0.0);
    assert!(row["p50_us"].as_u64() <= row["p99_us"].as_u64(), "{row}");
    assert!(row["p99_us"].as_u64() > Some(0), "{row}");
    let text = host.says(&["top", "--once", "-n", "0.05"]);
    assert!(text.starts_with("GUEST") && text.lines().count() == 2, "{text}");
}

/// A trace that goes on while a client asks; the lines that it says.
fn trace(host: &Host, client: &Client, args: &[&str]) -> String {
    let over = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(std::sync::atomic::Ordering::Relaxed) {
                client.attached_ids().unwrap();
                client.control(client.root, UNKNOWN, &mut [0; 4]).unwrap();
            }
        });
        let said = host.says(&[&["trace", "web", "--seconds=1"], args].concat());
        over.store(true, std::sync::atomic::Ordering::Relaxed);
        said
    })
}

#[test]
fn trace_shows_calls_by_name_until_its_time_is_over() {
    let host = Host::new();
    let web = host.serve("web");
    let client = use_card(&web);
    let text = trace(&host, &client, &[]);
    let named = "100 ioctl  ctl  control NV0000_CTRL_CMD_GPU_GET_ATTACHED_IDS";
    assert!(text.contains(named) && text.contains("control 0x007f0001"), "{text}");
    let text = trace(&host, &client, &["--errors", "--slow=60s", "--json"]);
    assert!(!text.is_empty());
    for line in text.lines() {
        let line: Value = serde_json::from_str(line).unwrap();
        assert_eq!((&line["number"], &line["status"]), (&UNKNOWN.into(), &0x56.into()), "{line}");
        assert_eq!((&line["schema"], &line["name"]), (&1.into(), &Value::Null), "{line}");
    }
    assert_eq!(host.run(&["trace", "web", "--slow=1"]).status.code(), Some(2));
}

#[test]
fn top_show_and_metrics_carry_the_same_numbers() {
    let host = Host::new();
    let web = host.serve("web");
    let _client = use_card(&web);
    // Nothing is asked of the guest's backend from here on but by us.
    let top = &host.json(&["top", "web", "--once", "-n", "0.05"])[0];
    let status = host.json(&["show", "web"]);
    let metrics = host.says(&["metrics", "web"]);
    let mut compared = 0;
    let mut same = |sample: &str, in_top: &Value, in_status: &Value| {
        let line = metrics.lines().find_map(|line| line.strip_prefix(sample)?.strip_prefix(' '));
        let sampled: f64 = line.unwrap_or_else(|| panic!("{sample} in {metrics}")).parse().unwrap();
        assert_eq!((in_top, Some(sampled)), (in_status, in_status.as_f64()), "{sample}");
        compared += 1;
    };
    let guest = r#"{guest="web"}"#;
    for (name, key) in [("placements", "placements"), ("window_bytes", "window_bytes")] {
        same(&format!("nvguest_{name}{guest}"), &top[key], &status[key]);
    }
    same(&format!("nvguest_queue_depth{guest}"), &top["in_flight"], &status["in_flight"]);
    let processes = status["workers"].as_array().unwrap().len().into();
    same(&format!("nvguest_workers{guest}"), &top["processes"], &processes);
    let files = &status["shares"]["files"]["held"];
    same("nvguest_limit_used{guest=\"web\",resource=\"files\"}", files, files);
    for kind in ["open", "ioctl", "map"] {
        let count = &status["requests"][kind];
        assert!(count.as_u64() > Some(0) && top["requests"][kind] == 0.0, "{kind}: {top}");
        same(&format!("nvguest_requests_total{{guest=\"web\",type=\"{kind}\"}}"), count, count);
    }
    let used = &status["vram"]["used"];
    same(&format!("nvguest_vram_used_bytes{guest}"), &top["vram_used_bytes"], used);
    assert_eq!((used, &top["refused"]), (&65536.into(), &status["refused"]));
    assert_eq!(compared, 9);
}

#[test]
fn recover_says_what_state_things_are_in_where_it_cannot_help() {
    let host = Host::new();
    let output = host.run(&["recover", "web"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(text.starts_with("backend   none answers\nQEMU      QEMU's monitor "), "{text}");
    assert!(text.contains("start the VM again") && text.contains("--qmp"), "{text}");
    let web = host.serve("web");
    let output = host.run(&["recover", "web", "--json"]);
    let said: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(said["outcome"], "restart");
    assert_eq!(said["steps"][0]["found"], format!("pid {} answers", web.child.id()));
}

#[test]
fn recover_looks_for_qemu_beside_the_guest_s_own_sockets() {
    let (host, other) = (Host::new(), Host::new());
    let web = host.serve("web");
    let folder = host.0.path().join("nvguest/web");
    let admin = folder.join("admin.sock");
    let output = other.run(&["recover", admin.to_str().unwrap()]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.starts_with(&format!("backend   pid {} answers", web.child.id())), "{text}");
    assert!(text.contains(folder.join("qmp.sock").to_str().unwrap()), "{text}");
}

#[test]
fn a_question_about_the_policy_is_answered_for_what_guests_may_do_by_default() {
    let host = Host::new();
    let words = ["policy", "explain", "NVC4B7_VIDEO_ENCODER", "--release", "580.142"];
    assert!(host.says(&words).contains("allowed"), "{}", host.says(&words));
    let without = [&words[..], &["--capabilities", "utility,graphics"]].concat();
    assert!(!host.says(&without).contains("allowed"), "{}", host.says(&without));
}

#[test]
fn run_prints_the_commands_that_it_would_run() {
    let host = Host::new();
    let sample = concat!(env!("CARGO_MANIFEST_DIR"), "/../../packaging/guest.toml");
    let text = host.says(&["run", sample, "--print", "--memory=8G", "--", "-s"]);
    let socket = host.0.path().join("nvguest/web/vhost.sock").display().to_string();
    assert!(text.starts_with("vhost-user-nvguest --name web --gpu=0"), "{text}");
    assert!(text.contains(&format!("-chardev socket,id=nv,path={socket}")), "{text}");
    // What `nvguest recover` needs.
    let monitor = socket.replace("vhost.sock", "qmp.sock");
    assert!(text.contains(&format!("-qmp unix:{monitor},server=on,wait=off")), "{text}");
    assert!(text.contains("-device pcie-root-port,id=nvguest-port,"), "{text}");
    assert!(text.contains("id=nvguest,bus=nvguest-port,chardev=nv,"), "{text}");
    assert!(text.contains("memory-backend-memfd,id=mem,size=8G,share=on"), "{text}");
    assert!(text.ends_with("-nographic -s\n"), "{text}");
    assert!(host.fails(&["run", "--print"]).contains("has no name"));
}

/// `nvguest run` with a script in place of QEMU.
fn run_script(host: &Host, script: &str) -> std::process::Output {
    let folder = host.0.path();
    let qemu = folder.join("qemu");
    std::fs::write(&qemu, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&qemu, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    let file = folder.join("web.toml");
    let text = format!(
        "name = \"web\"\n[backend]\nprogram = {:?}\nargs = [\"--host=sim\", \"--allow-root\"]\n\
         [qemu]\nprogram = {qemu:?}\n",
        backend()
    );
    std::fs::write(&file, text).unwrap();
    host.run(&["run", file.to_str().unwrap()])
}

#[test]
fn run_starts_qemu_when_the_backend_listens_and_ends_as_it_does() {
    let host = Host::new();
    let socket = host.0.path().join("nvguest/web/vhost.sock");
    // It finds the socket and ends with a code of its own.
    let script = format!("test -S {} && echo \"$@\" && exit 7; exit 1", socket.display());
    let output = run_script(&host, &script);
    assert_eq!(output.status.code(), Some(7), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stdout).contains("virtio-id=38,num_vqs=34"));
    assert!(!socket.exists(), "the backend is gone, and cleanly");
}

#[test]
fn run_ends_a_vm_whose_backend_died_and_whose_maps_it_cannot_take_away() {
    let host = Host::new();
    let output = run_script(&host, "kill -9 $(pgrep -o -P $PPID); exec sleep 60");
    assert!(!output.status.success(), "{output:?}");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("signal: 9") && said.contains("its QEMU is ended"), "{said}");
}

#[test]
fn doctor_says_what_to_do_about_what_is_missing() {
    let host = Host::new();
    let backend = backend().display().to_string();
    let output = host.run(&["doctor", "--json", "--qemu=/none", "--backend", &backend]);
    assert_eq!(output.status.code(), Some(1));
    let checks: Value = serde_json::from_slice(&output.stdout).unwrap();
    let check = |what: &str| {
        let checks = checks.as_array().unwrap();
        checks
            .iter()
            .find(|check| check["what"] == what)
            .unwrap_or_else(|| panic!("{what}"))
            .clone()
    };
    assert_eq!(check("qemu")["verdict"], "fail");
    assert!(check("qemu")["todo"].as_str().unwrap().contains("QEMU 11.1"));
    assert_eq!(check("backend")["verdict"], "ok");
    assert!(!check("sandbox")["found"].as_str().unwrap().is_empty());
    for what in ["driver", "nodes", "kvm", "address bits", "descriptors", "sockets"] {
        let check = check(what);
        assert_eq!(check["verdict"] == "ok", check["todo"] == "", "{check}");
    }
}
