//! What no guest may do, tried.
//!
//! Each line of the tables is one call and the refusal that it must meet. A guest fires all
//! of them. On a host the driver is asked only what changes nothing, and its answer is
//! shown, not judged: there RM's own rules hold, and a caller may have more rights.

use std::io::Read;

use nix::libc;

use rmclient::abi::escape;
use rmclient::{call, Card, Outcome, Result, Session};

/// `NV_ERR_NOT_SUPPORTED`: a control that reaches other guests.
const UNSUPPORTED: Outcome = Outcome::Status(0x56);
/// `NV_ERR_INSUFFICIENT_PERMISSIONS`: what RM keeps for administrators or itself.
const FORBIDDEN: Outcome = Outcome::Status(0x1b);
/// `NV_ERR_INVALID_CLASS`: a class that no guest has.
const NO_CLASS: Outcome = Outcome::Status(0x22);
/// A descriptor in the parameters, 0 here, is no file of the driver's: that is found out first.
const NO_FILE: Outcome = Outcome::Errno(libc::EBADF);
const NO_CALL: Outcome = Outcome::Errno(libc::EINVAL);

/// Who is asked for a control, or what an object is made under.
#[derive(Clone, Copy, Debug)]
enum On {
    Client,
    Device,
    Subdevice,
}

/// Whether a host is asked too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Host {
    /// It changes nothing there.
    Harmless,
    /// It might.
    Never,
}

use Host::{Harmless, Never};
use On::{Client, Device, Subdevice};

/// A control: its name, who is asked, its number and size (580.142), and the refusal.
type Control = (&'static str, On, u32, usize, Outcome, Host);

const CONTROLS: &[Control] = &[
    ("PERF_SET_POWERSTATE", Subdevice, 0x2080_205b, 4, UNSUPPORTED, Never),
    ("PERF_SET_AUX_POWER_STATE", Subdevice, 0x2080_2092, 4, UNSUPPORTED, Never),
    ("GPU_SET_POWER", Subdevice, 0x2080_0112, 12, UNSUPPORTED, Never),
    ("SET_ZBC_CLEAR_TABLE", Subdevice, 0x9096_0104, 60, UNSUPPORTED, Never),
    ("RC_DISABLE_WATCHDOG", Subdevice, 0x2080_220a, 0, UNSUPPORTED, Never),
    ("RC_ENABLE_WATCHDOG", Subdevice, 0x2080_220b, 0, UNSUPPORTED, Never),
    ("GPU_SET_PARTITIONS", Subdevice, 0x2080_0174, 392, UNSUPPORTED, Never),
    ("EXEC_PARTITIONS_CREATE", Subdevice, 0xc637_0101, 460, UNSUPPORTED, Never),
    ("GPU_MARK_DEVICE_FOR_RESET", Subdevice, 0x2080_01a9, 0, UNSUPPORTED, Never),
    ("GPU_SET_COMPUTE_MODE_RULES", Subdevice, 0x2080_0130, 8, FORBIDDEN, Never),
    ("GPU_SET_ECC_CONFIGURATION", Subdevice, 0x2080_0134, 4, FORBIDDEN, Never),
    ("GPU_RESET_ECC_ERROR_STATUS", Subdevice, 0x2080_0136, 8, FORBIDDEN, Never),
    ("GPU_MODIFY_SW_STATE_PERSISTENCE", Device, 0x80_0287, 4, FORBIDDEN, Never),
    ("GR_SET_TPC_PARTITION_MODE", Device, 0x80_1108, 32, UNSUPPORTED, Never),
    ("GPU_EXEC_REG_OPS", Subdevice, 0x2080_0122, 48, UNSUPPORTED, Never),
    ("GR_CTXSW_SMPC_MODE", Subdevice, 0x2080_120e, 24, UNSUPPORTED, Never),
    ("FIFO_RUNLIST_SET_SCHED_POLICY", Subdevice, 0x2080_1115, 8, UNSUPPORTED, Never),
    ("SYSTEM_EXECUTE_ACPI_METHOD", Client, 0x130, 40, UNSUPPORTED, Never),
    ("GET_SYSTEM_EVENT_DATA", Client, 0x502, 12, UNSUPPORTED, Harmless),
    ("SET_SUB_PROCESS_ID", Client, 0x901, 104, UNSUPPORTED, Never),
    ("CLIENT_SUBSCRIBE_TO_IMEX_CHANNEL", Client, 0xd08, 16, NO_FILE, Never),
    ("GPU_DISABLE_NVLINK_INIT", Client, 0x281, 32, UNSUPPORTED, Never),
    ("BUS_CLEAR_PEX_COUNTERS", Subdevice, 0x2080_1814, 4, UNSUPPORTED, Never),
    ("BUS_FREEZE_PEX_COUNTERS", Subdevice, 0x2080_1815, 8, UNSUPPORTED, Never),
    ("I2C_READ_REG", Subdevice, 0x2080_0603, 276, UNSUPPORTED, Never),
    ("NVD_GET_DUMP_SIZE", Client, 0x601, 8, UNSUPPORTED, Harmless),
    ("GPU_GET_NVENC_SW_SESSION_INFO", Subdevice, 0x2080_016e, 16, UNSUPPORTED, Harmless),
    ("INTERNAL_GPU_GET_CHIP_INFO", Subdevice, 0x2080_0a36, 88, FORBIDDEN, Harmless),
    ("INTERNAL_GPU_GET_SMC_MODE", Subdevice, 0x2080_0a4c, 4, FORBIDDEN, Harmless),
    ("VGPU_SET_VGPU_VERSION", Client, 0x138, 8, UNSUPPORTED, Never),
    ("GPU_SET_FABRIC_BASE_ADDR", Subdevice, 0x2080_016f, 8, UNSUPPORTED, Never),
];

/// A class, under what, and the refusal. None is made on a host.
const CLASSES: &[(&str, On, u32, Outcome)] = &[
    ("NV0060_SYNC_GPU_BOOST", Client, 0x60, NO_CLASS),
    ("NV0020_GPU_MANAGEMENT", Client, 0x20, NO_CLASS),
    ("GF100_PROFILER", Subdevice, 0x90cc, NO_CLASS),
    ("MAXWELL_PROFILER_DEVICE", Subdevice, 0xb2cc, NO_CLASS),
    ("NV_EVENT_BUFFER", Client, 0x90cd, NO_CLASS),
    ("NV01_EVENT_KERNEL_CALLBACK", Subdevice, 0x78, NO_FILE),
    ("NV01_EVENT_KERNEL_CALLBACK_EX", Subdevice, 0x7e, NO_FILE),
    ("NV01_MEMORY_SYSTEM_OS_DESCRIPTOR", Device, 0x71, NO_CLASS),
    ("NV01_MEMORY_HW_RESOURCES", Device, 0xb1, NO_CLASS),
    ("FABRIC_MANAGER_SESSION", Client, 0x0f, NO_FILE),
    ("NV_IMEX_SESSION", Client, 0xf1, NO_FILE),
    ("NV40_I2C", Subdevice, 0x402c, NO_CLASS),
    ("MMU_FAULT_BUFFER", Subdevice, 0xc369, FORBIDDEN),
];

/// A call of its own number, and the bytes of its argument. None is made on a host.
const ESCAPES: &[(&str, u32, usize)] = &[
    ("NV_ESC_RM_I2C_ACCESS", escape::RM_I2C_ACCESS, 32),
    ("NV_ESC_RM_ACCESS_REGISTRY", escape::RM_ACCESS_REGISTRY, 72),
    ("NV_ESC_RM_NVLOG_CTRL", escape::RM_NVLOG_CTRL, 4024),
    ("NV_ESC_SET_NUMA_STATUS", escape::SET_NUMA_STATUS, 4),
];

/// `NV_ESC_RM_SHARE` of our own device: its type (`RS_SHARE_TYPE_*`), and with whom. On a host
/// that lets others have what nobody uses and what is gone a moment later.
const SHARES: &[(&str, u16, u32)] = &[
    ("share with everybody", 1, 0),
    ("share with the same user", 2, 0),
    ("share with another process's client", 3, 0xc1d0_fff0),
    ("share with a fabric manager", 7, 0),
];

/// Tells of one attempt: its name, and how it went.
pub type Tell<'a> = &'a mut dyn FnMut(&str, Result<String>);

/// Tries everything. `host`: this is no guest.
pub fn run(card: &Card, host: bool, tell: Tell<'_>) -> Result<()> {
    let session = Session::open(card)?;
    let on = |on| match on {
        Client => session.client.handle,
        Device => session.device,
        Subdevice => session.subdevice,
    };
    for &(name, who, command, size, expected, native) in CONTROLS {
        let fire = || session.client.control(on(who), command, &mut vec![0; size]);
        tell(name, judge(host, native, expected, name, fire));
    }
    for &(name, parent, class, expected) in CLASSES {
        let names = (on(parent), session.client.fresh());
        let client = &session.client;
        let fire = || client.alloc_on(&client.ctl, names, class, Some(&mut [0; 128]));
        tell(name, judge(host, Never, expected, name, fire));
    }
    for &(name, nr, size) in ESCAPES {
        let fire = || raw(&session, nr, size);
        tell(name, judge(host, Never, NO_CALL, name, fire));
    }
    for &(name, kind, target) in SHARES {
        let fire = || share(&session, kind, target);
        tell(name, judge(host, Harmless, FORBIDDEN, name, fire));
    }
    tell("nodes that are not the guest's", nodes(host));
    Ok(())
}

fn judge(
    host: bool,
    native: Host,
    expected: Outcome,
    name: &str,
    fire: impl FnOnce() -> Outcome,
) -> Result<String> {
    match (host, native) {
        (true, Never) => Ok("not fired on a host".into()),
        (true, Harmless) => Ok(format!("a host answers {}", fire())),
        (false, _) => {
            fire().expect(expected, name)?;
            Ok(format!("refused as {expected}"))
        }
    }
}

fn raw(session: &Session, nr: u32, size: usize) -> Outcome {
    let mut argument = vec![0; size];
    match rmclient::sys::call(&session.client.ctl, nr, &mut argument, None) {
        Ok(()) => Outcome::OK,
        Err(error) => Outcome::Errno(error.raw_os_error().unwrap_or(libc::EIO)),
    }
}

fn share(session: &Session, kind: u16, target: u32) -> Outcome {
    let mut argument = rmclient::abi::Share {
        client: session.client.handle,
        object: session.device,
        target,
        // The right to duplicate it.
        access: 1,
        kind,
        ..Default::default()
    };
    call(&session.client.ctl, escape::RM_SHARE, &mut argument, None, |a| a.status)
}

/// In a guest there is no node beyond what the backend's capabilities allow, and reading one
/// that is there gives nothing.
fn nodes(host: bool) -> Result<String> {
    let folder = std::fs::read_dir("/dev").map_err(rmclient::io("/dev"))?;
    let names = folder.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned());
    let mut found: Vec<String> = names.filter(|name| name.starts_with("nvidia")).collect();
    found.sort();
    if host {
        return Ok(format!("a host has {}", found.join(" ")));
    }
    let mut ctl = rmclient::open(rmclient::CONTROL_NODE)?;
    match ctl.read(&mut [0; 64]) {
        Ok(0) | Err(_) => Ok(format!("a guest has {}", found.join(" "))),
        Ok(count) => {
            rmclient::wrong(format!("{count} bytes could be read of {}", rmclient::CONTROL_NODE))
        }
    }
}
