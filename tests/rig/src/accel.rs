//! KVM where a guest really runs under it, else emulation.
//!
//! `/dev/kvm` alone says little: some hosts offer one that cannot boot a stock
//! kernel. So a guest is booted once, and the answer is kept until the host
//! boots again.

use std::fmt;
use std::fs;
use std::path::Path;
use std::time::Duration;

use anyhow::{bail, Result};

use crate::assets::Assets;
use crate::rig::Rig;

/// How long the probe's guest may take to answer. It boots in about 1 s under
/// a KVM that works.
const PATIENCE: Duration = Duration::from_secs(10);

/// What runs the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accel {
    /// The host's processor.
    Kvm,
    /// QEMU's emulation: processor time is 10 to 30 times native.
    Emulation,
}

impl Accel {
    /// QEMU's `-accel`.
    pub fn option(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Emulation => "tcg,thread=multi",
        }
    }

    /// QEMU's `-cpu`. Without the marks of fast string instructions where a processor is emulated:
    /// a kernel that sees them copies and clears byte by byte there, ten times slower.
    pub fn cpu(self) -> &'static str {
        match self {
            Accel::Kvm => "host",
            Accel::Emulation => "max,-erms,-fsrm,-fsrs,-fzrm",
        }
    }

    fn word(self) -> &'static str {
        match self {
            Accel::Kvm => "kvm",
            Accel::Emulation => "emulation",
        }
    }

    /// Finds out, or remembers. `NVGUEST_ACCEL=kvm|emulation` decides instead.
    pub fn choose(assets: &Assets, kernel: &str) -> Result<Accel> {
        match std::env::var("NVGUEST_ACCEL").as_deref() {
            Ok("kvm") => return Ok(Accel::Kvm),
            Ok("emulation") => return Ok(Accel::Emulation),
            Ok(other) => {
                bail!("NVGUEST_ACCEL is {other:?}; set it to kvm or emulation, or unset it")
            }
            Err(_) => {}
        }
        if !Path::new("/dev/kvm").exists() {
            return Ok(Accel::Emulation);
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let memory = assets.root().join("accel");
        let known = fs::read_to_string(&memory).unwrap_or_default();
        for accel in [Accel::Kvm, Accel::Emulation] {
            if known == format!("{} {}", accel.word(), boot) {
                return Ok(accel);
            }
        }
        eprintln!("  probing whether this host's KVM can run a guest (at most {PATIENCE:?})");
        let probe = Rig::builder()
            .assets(assets.clone())
            .kernel(kernel)
            .accel(Accel::Kvm)
            .memory_mib(512)
            .boot_patience(PATIENCE)
            .boot();
        let accel = if probe.is_ok() { Accel::Kvm } else { Accel::Emulation };
        // A read-only folder costs the next run a probe and nothing else.
        let _not_kept = fs::write(&memory, format!("{} {}", accel.word(), boot));
        Ok(accel)
    }
}

impl fmt::Display for Accel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accel::Kvm => "KVM",
            Accel::Emulation => "emulation (this host's KVM cannot run a guest)",
        })
    }
}
