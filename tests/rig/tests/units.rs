//! The systemd units that are shipped, under a systemd that runs.

use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use nvguest_rig::{Assets, Guest, Output, Rig};

/// Where the guest has the tree that systemd is the first process of.
const TREE: &str = "/mnt/systemd";

/// A systemd with mounts and process ids of its own takes itself for the machine's.
const START: &str = "
    cd /mnt/systemd && mkdir -p /tmp/systemd
    for folder in run tmp var; do mount -t tmpfs $folder $folder; done
    mount --rbind /dev dev && mount -t proc proc proc && mount -t sysfs sys sys
    mount -t cgroup2 cgroup sys/fs/cgroup
    exec chroot . /usr/lib/systemd/systemd --unit=basic.target --log-target=console";

const PATIENCE: Duration = Duration::from_secs(60);

/// A guest's systemd, and what to ask it with.
struct System<'a> {
    guest: &'a Guest,
    pid: String,
}

impl<'a> System<'a> {
    fn start(guest: &'a Guest) -> Self {
        let command = ["unshare", "-m", "-p", "-f", "sh", "-c", START];
        let _serves = guest.command(command).timeout(Duration::from_secs(600)).spawn().unwrap();
        let find = "until pidof systemd; do sleep 0.1; done";
        let pid = guest.shell(find).unwrap().stdout_text().trim().to_owned();
        let system = Self { guest, pid };
        system.until("it runs", |system| {
            system.run("systemctl is-system-running --wait").stdout_text().trim() == "running"
        });
        system
    }

    fn run(&self, line: &str) -> Output {
        self.enter(&["chroot", TREE].into_iter().chain(line.split(' ')).collect::<Vec<_>>())
    }

    /// A program of the guest's, where systemd is.
    fn enter(&self, words: &[&str]) -> Output {
        let enter = ["nsenter", "-t", &self.pid, "-m", "-p"];
        self.guest.run(enter.into_iter().chain(words.iter().copied())).unwrap()
    }

    fn does(&self, line: &str) -> String {
        let output = self.run(line);
        assert!(output.success(), "{output}\n{}", self.guest.logs());
        output.stdout_text()
    }

    /// Properties of a unit, in systemd's own order.
    fn is(&self, unit: &str, properties: &str) -> bool {
        let names: Vec<&str> =
            properties.split(' ').filter_map(|it| Some(it.split_once('=')?.0)).collect();
        let said = self.does(&format!("systemctl show -p {} {unit}", names.join(",")));
        properties.split(' ').all(|property| said.lines().any(|line| line == property))
    }

    fn until(&self, what: &str, so: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !so(self) {
            assert!(Instant::now() < end, "not within {PATIENCE:?}: {what}\n{}", self.guest.logs());
            std::thread::sleep(Duration::from_millis(100));
        }
    }
}

/// A copy of the tree, with our package's files where it would put them.
fn install(assets: &Assets, tree: &Path) {
    let copied = Command::new("cp").arg("-aT").arg(assets.systemd_root()).arg(tree).status();
    assert!(copied.unwrap().success());
    for name in ["vhost-user-nvguest", "nvguest"] {
        fs::copy(assets.binary(name), tree.join("usr/bin").join(name)).unwrap();
    }
    let units = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd");
    for unit in fs::read_dir(units).unwrap().flatten() {
        let to = tree.join("usr/lib/systemd/system").join(unit.file_name());
        fs::copy(unit.path(), to).unwrap();
    }
    let settings = tree.join("etc/nvguest");
    fs::create_dir_all(settings.join("no-profiles")).unwrap();
    for (guest, arguments) in [("web", ""), ("db", " --profiles /etc/nvguest/no-profiles")] {
        let text = format!("NVGUEST_ARGS=--host sim{arguments}\n");
        fs::write(settings.join(format!("{guest}.env")), text).unwrap();
    }
}

#[test]
#[ignore = "boots guests: run `cargo xtask test`"]
fn the_shipped_units_do_under_systemd_what_they_say() {
    let tree = tempfile::tempdir().unwrap();
    install(&Assets::find().unwrap(), tree.path());
    let rig = Rig::builder().memory_mib(1024).share(tree.path(), TREE).boot().unwrap();
    let system = System::start(rig.guest(0));
    systemd_finds_nothing_wrong_with_them(&system);
    a_backend_is_started_once_its_sockets_are_there(&system);
    a_backend_that_is_killed_is_started_again(&system);
    a_backend_without_a_profile_is_left_alone(&system);
    what_is_stopped_leaves_no_socket(&system);
}

fn systemd_finds_nothing_wrong_with_them(system: &System<'_>) {
    let output = system.run("systemd-analyze verify nvguest@web.service nvguest@web.socket");
    assert!(output.success() && output.stderr.is_empty(), "{output}");
}

/// Confined by the unit, and by itself inside.
fn a_backend_is_started_once_its_sockets_are_there(system: &System<'_>) {
    system.does("systemctl start nvguest@web.socket");
    assert!(system.is("nvguest@web", "ActiveState=inactive"));
    system.does("systemctl start nvguest@web.service");
    let said = system.does("nvguest show web");
    assert!(said.contains("sandbox      on: Landlock"), "{said}");
    assert!(said.contains("without capabilities"), "{said}");
}

fn a_backend_that_is_killed_is_started_again(system: &System<'_>) {
    system.does("systemctl kill --kill-whom=main -s KILL nvguest@web");
    system.until("another is started", |system| {
        system.is("nvguest@web", "NRestarts=1 ActiveState=active")
    });
    system.does("nvguest show web");
}

fn a_backend_without_a_profile_is_left_alone(system: &System<'_>) {
    assert!(!system.run("systemctl start nvguest@db.service").success());
    // One that is to be started again is `activating` until then.
    assert!(system.is("nvguest@db", "ExecMainStatus=78 ActiveState=failed NRestarts=0"));
}

fn what_is_stopped_leaves_no_socket(system: &System<'_>) {
    system.does("systemctl stop nvguest@web.socket nvguest@db.socket nvguest@web.service");
    assert!(system.is("nvguest@web", "Result=success ActiveState=inactive"));
    let left = system.enter(&["find", &format!("{TREE}/run/nvguest")]);
    assert_eq!(left.stdout_text().lines().count(), 1, "{left}");
}
