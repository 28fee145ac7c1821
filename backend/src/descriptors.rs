//! The table of descriptors, grown before it is needed.
//!
//! A process with several threads that outgrows its table waits for an RCU grace period
//! (`expand_fdtable` in `fs/file.c`): about 20 ms, seen in one of sixteen maps of a Vulkan
//! program. With one thread it costs microseconds, and a table never shrinks.

use nix::fcntl::{fcntl, FcntlArg};
use nix::sys::resource::{getrlimit, Resource};

/// Makes room for `count` descriptors, or as many as the process may have. Call it while
/// there is one thread.
pub fn make_room(count: u64) -> nix::Result<()> {
    let (most, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
    let last = i32::try_from(count.min(most).saturating_sub(1)).unwrap_or(i32::MAX);
    let high = fcntl(std::io::stderr(), FcntlArg::F_DUPFD_CLOEXEC(last))?;
    nix::unistd::close(high)
}
