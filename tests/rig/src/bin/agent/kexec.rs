//! Has the kernel start another in its own place.

use std::ffi::CString;
use std::fs::{self, File};
use std::os::fd::AsRawFd;

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::libc::{syscall, SYS_kexec_file_load};
use nix::sys::reboot::{reboot, RebootMode};

/// Starts the kernel with this initial RAM disk and the running kernel's command line. Processes
/// are not ended first: what they hold, they hold until the last moment.
pub fn kexec(kernel: &str, image: &str) -> Result<()> {
    let open = |path: &str| File::open(path).with_context(|| format!("open {path}"));
    let (kernel, image) = (open(kernel)?, open(image)?);
    let line = fs::read_to_string("/proc/cmdline").context("read the command line")?;
    let line = CString::new(line.trim_end()).context("read the command line")?;
    load(&kernel, &image, &line).context("load the kernel")?;
    reboot(RebootMode::RB_KEXEC).context("start the kernel").map(drop)
}

fn load(kernel: &File, image: &File, line: &CString) -> nix::Result<()> {
    let len = line.as_bytes_with_nul().len();
    // SAFETY: no wrapper of it is in our crates. The descriptors are open and `len` bytes are
    // readable at `line` while the call lasts, which keeps none of them.
    let done = unsafe {
        syscall(SYS_kexec_file_load, kernel.as_raw_fd(), image.as_raw_fd(), len, line.as_ptr(), 0)
    };
    Errno::result(done).map(drop)
}
