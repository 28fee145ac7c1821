//! `nvguest doctor`: whether this host can share its card, and what to do if not.
//!
//! Each check looks at one thing and says what it found; nothing is changed.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

use anyhow::Result;
use nix::sys::resource::{getrlimit, Resource};
use nix::unistd::{access, AccessFlags};
use nvguest_abi::release::from_proc_version;
use nvguest_abi::store::Store;
use serde::Serialize;

use crate::guests;
use crate::out;
use crate::policy::PROC_VERSION;
use crate::status;

/// The first QEMU whose generic vhost-user device maps memory into guests.
const QEMU: (u32, u32) = (11, 1);
const DEVICE: &str = "vhost-user-test-device-pci";
const MEMORY: &str = "memory-backend-memfd";
/// Descriptors below which guests meet our limit before their own.
const FILES: u64 = 4096;
/// Physical address bits that the default window of 64 GiB takes.
const WINDOW_BITS: u32 = 39;

/// Whether this host can share its card, and what to do if not.
#[derive(clap::Args, Debug)]
pub struct Args {
    /// The QEMU that guests run under.
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "PROGRAM")]
    qemu: String,
    /// The backend.
    #[arg(long, default_value = "vhost-user-nvguest", value_name = "PROGRAM")]
    backend: String,
}

/// How a check went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Ok,
    /// It goes on, with less.
    Warn,
    /// Guests cannot use the card.
    Fail,
}

/// One line.
#[derive(Debug, Serialize)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    found: String,
    /// What to do; empty where nothing is to be done.
    todo: String,
}

use Verdict::{Fail, Ok as Fine, Warn};

fn check(what: &'static str, verdict: Verdict, found: impl Into<String>, todo: &str) -> Check {
    let todo = if verdict == Fine { String::new() } else { todo.to_owned() };
    Check { what, verdict, found: found.into(), todo }
}

/// Checks all, and fails if one does.
pub fn run(args: &Args, json: bool) -> Result<ExitCode> {
    let mut checks = qemu(&args.qemu);
    checks.extend(backend(&args.backend));
    checks.extend([driver(), nodes(), kvm(), address_bits(), files(), runtime()]);
    if json {
        out::json(&checks)?;
    } else {
        out::say(&checks.iter().map(spell).collect::<String>())?;
    }
    let failed = checks.iter().any(|check| check.verdict == Fail);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn spell(check: &Check) -> String {
    let Check { what, verdict, found, todo } = check;
    let verdict = match verdict {
        Fine => "ok",
        Warn => "warn",
        Fail => "FAIL",
    };
    let todo = if todo.is_empty() { String::new() } else { format!("\n{:19}→ {todo}", "") };
    format!("{verdict:4}  {what:12} {found}{todo}\n")
}

/// What a program says; why not if it says nothing.
fn said(program: &str, args: &[&str]) -> Result<String, String> {
    let output = Command::new(program).args(args).output();
    let output = output.map_err(|error| format!("{program} cannot be run: {error}"))?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(text);
    }
    Err(String::from_utf8_lossy(&output.stderr).trim().to_owned())
}

fn qemu(program: &str) -> Vec<Check> {
    let install = "install QEMU 11.1 or newer (Debian 13: from backports), or give --qemu";
    let version = match said(program, &["--version"]) {
        Ok(text) => text,
        Err(error) => return vec![check("qemu", Fail, error, install)],
    };
    let first = version.lines().next().unwrap_or_default().to_owned();
    let verdict = if qemu_version(&first) >= Some(QEMU) { Fine } else { Fail };
    let has = |what, list: &[&str], name: &str, todo| {
        let text = said(program, list).unwrap_or_default();
        let found = text.contains(name);
        let word = if found { "is built in" } else { "is not built in" };
        check(what, if found { Fine } else { Fail }, format!("{name} {word}"), todo)
    };
    let device = "use a QEMU with CONFIG_VHOST_USER_TEST, as Debian builds it";
    let memory = "use a QEMU for Linux: guest memory must be a file that the backend can map";
    vec![
        check("qemu", verdict, first, install),
        has("qemu device", &["-device", "help"], DEVICE, device),
        has("qemu memory", &["-object", "help"], MEMORY, memory),
    ]
}

/// "QEMU emulator version 11.1.3 (…)"
fn qemu_version(line: &str) -> Option<(u32, u32)> {
    let (_, rest) = line.split_once("version ")?;
    let mut parts = rest.split(['.', ' ']);
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

/// The backend itself knows best what confines it here.
fn backend(program: &str) -> Vec<Check> {
    let flags = ["--check", "--host=sim", "--allow-root", "--log-level=error"];
    let text = match said(program, &flags) {
        Ok(text) => text,
        Err(error) => {
            let todo = "install vhost-user-nvguest beside this program, or give --backend";
            return vec![check("backend", Fail, error, todo)];
        }
    };
    let field = |key: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(key)).unwrap_or_default();
        line.trim().to_owned()
    };
    let sandbox = field("sandbox");
    let gaps = status::has_gaps(&sandbox);
    let todo = "add landlock to the kernel's lsm= list and enable CONFIG_SECCOMP_FILTER; without \
                them the backend goes on, less confined";
    vec![
        check("backend", Fine, format!("{program} runs"), ""),
        check("sandbox", if gaps { Warn } else { Fine }, sandbox, todo),
    ]
}

fn driver() -> Check {
    let Ok(text) = std::fs::read_to_string(PROC_VERSION) else {
        let todo = "install NVIDIA's driver and load nvidia.ko (modprobe nvidia)";
        return check("driver", Fail, format!("{PROC_VERSION} is not there"), todo);
    };
    let found = from_proc_version(&text).map_err(anyhow::Error::from).and_then(|release| {
        let resolved = Store::embedded()?.resolve(&release, false)?;
        let text = match resolved.notice() {
            Some(notice) => format!("{release}: {notice}"),
            None => format!("{release} has a profile"),
        };
        Ok(text)
    });
    match found {
        Ok(found) => check("driver", Fine, found, ""),
        Err(error) => {
            let todo = "install a release that is measured, or measure this one with abi-extract";
            check("driver", Fail, format!("{error:#}"), todo)
        }
    }
}

/// The nodes, as this user may use them.
fn nodes() -> Check {
    let cards = std::fs::read_dir("/dev").into_iter().flatten().flatten();
    let is_card = |name: &str| {
        let digits = name.strip_prefix("nvidia").unwrap_or_default();
        !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
    };
    let mut nodes: Vec<PathBuf> = cards
        .filter(|entry| entry.file_name().to_str().is_some_and(is_card))
        .map(|entry| entry.path())
        .collect();
    nodes.sort();
    let count = nodes.len();
    nodes.push("/dev/nvidiactl".into());
    let usable = |path: &PathBuf| may(path, AccessFlags::R_OK | AccessFlags::W_OK);
    let closed: Vec<_> = nodes.iter().filter(|path| !usable(path)).map(|p| shown(p)).collect();
    let todo = "run nvidia-modprobe -c 0, and let the backend's user read and write the nodes \
                (NVreg_DeviceFileGID, or the group that owns them)";
    match (count, closed.is_empty()) {
        (0, _) => check("nodes", Fail, "there is no /dev/nvidia0", todo),
        (_, false) => {
            check("nodes", Fail, format!("this user may not use {}", closed.join(", ")), todo)
        }
        _ => check("nodes", Fine, format!("{count} of cards, and /dev/nvidiactl"), ""),
    }
}

fn may(path: &Path, how: AccessFlags) -> bool {
    access(path, how).is_ok()
}

fn shown(path: &Path) -> String {
    path.display().to_string()
}

fn kvm() -> Check {
    let todo =
        "enable virtualisation in the firmware, modprobe kvm_intel or kvm_amd, and join the \
                group kvm; without it guests are emulated, 10 to 30 times slower";
    let path = Path::new("/dev/kvm");
    match (path.exists(), may(path, AccessFlags::R_OK | AccessFlags::W_OK)) {
        (false, _) => check("kvm", Warn, "there is no /dev/kvm", todo),
        (_, false) => check("kvm", Warn, "this user may not use /dev/kvm", todo),
        _ => check("kvm", Fine, "/dev/kvm opens (whether a guest boots, only a guest shows)", ""),
    }
}

/// The window is an address range of the guest, whose processor is this one's.
fn address_bits() -> Check {
    let info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let todo = "start backends with --window-size 8G, which 36 bits are enough for";
    match physical_bits(&info) {
        Some(bits) if bits >= WINDOW_BITS => {
            check("address bits", Fine, format!("{bits}: room for a window of 64 GiB"), "")
        }
        Some(bits) => check("address bits", Warn, format!("{bits}: too few for 64 GiB"), todo),
        None => check("address bits", Warn, "/proc/cpuinfo does not say how many", todo),
    }
}

/// The line "address sizes : 46 bits physical, 48 bits virtual".
fn physical_bits(cpuinfo: &str) -> Option<u32> {
    let line = cpuinfo.lines().find(|line| line.starts_with("address sizes"))?;
    line.split_once(':')?.1.trim().split(' ').next()?.parse().ok()
}

fn files() -> Check {
    let todo = "raise it (ulimit -Hn 65536; systemd: LimitNOFILE=65536): a guest with many files \
                is refused more";
    match getrlimit(Resource::RLIMIT_NOFILE) {
        Ok((_, hard)) if hard >= FILES => check("descriptors", Fine, format!("{hard}"), ""),
        Ok((_, hard)) => check("descriptors", Warn, format!("{hard} at most"), todo),
        Err(error) => check("descriptors", Warn, format!("cannot be read: {error}"), todo),
    }
}

fn runtime() -> Check {
    let folder = guests::folders().swap_remove(0);
    let there = if folder.exists() { folder.as_path() } else { folder.parent().unwrap_or(&folder) };
    let todo = "start backends under systemd (RuntimeDirectory=), or set XDG_RUNTIME_DIR, or make \
                the folder for their user";
    let how = AccessFlags::W_OK | AccessFlags::X_OK;
    match may(there, how) {
        true => check("sockets", Fine, format!("{} can be made", folder.display()), ""),
        false => {
            check("sockets", Warn, format!("this user may not make {}", folder.display()), todo)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_of_qemu_is_compared_as_numbers() {
        let of = |text: &str| qemu_version(text);
        assert_eq!(of("QEMU emulator version 11.1.3 (Debian 1:11.1.3)"), Some((11, 1)));
        assert!(of("QEMU emulator version 9.2.0") < Some(QEMU));
        assert!(of("QEMU emulator version 11.0.90") < Some(QEMU));
        assert!(of("QEMU emulator version 12.0.0") > Some(QEMU));
        assert!(of("something else") < Some(QEMU));
    }

    #[test]
    fn address_bits_are_the_processor_s() {
        let info = "processor\t: 0\naddress sizes\t: 46 bits physical, 48 bits virtual\n";
        assert_eq!(physical_bits(info), Some(46));
        assert_eq!(physical_bits(""), None);
    }

    #[test]
    fn what_is_fine_needs_nothing_done() {
        assert!(check("x", Fine, "y", "z").todo.is_empty());
        assert!(spell(&check("x", Fail, "y", "z")).contains("→ z"));
    }
}
