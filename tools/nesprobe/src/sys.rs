//! What the system says of this process, Ctrl-C, and descriptors passed between processes.

use std::fs;
use std::io::{IoSlice, IoSliceMut};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use nix::cmsg_space;
use nix::sys::resource::{getrusage, UsageWho};
use nix::sys::signal::{sigaction, SaFlags, SigAction, SigHandler, SigSet, Signal};
use nix::sys::socket::{recvmsg, sendmsg, ControlMessage, ControlMessageOwned, MsgFlags};
use nix::time::{clock_gettime, ClockId};
use serde::Serialize;

use crate::error::{Error, Result, Tried};

static STOPPED: AtomicBool = AtomicBool::new(false);

extern "C" fn stop(_: nix::libc::c_int) {
    STOPPED.store(true, Ordering::Relaxed);
}

/// From now on Ctrl-C only asks for an end; a second one ends the process.
pub fn catch_stop() -> Result<()> {
    let flags = SaFlags::SA_RESTART | SaFlags::SA_RESETHAND;
    let action = SigAction::new(SigHandler::Handler(stop), flags, SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM] {
        // SAFETY: the handler does nothing but store to an atomic.
        unsafe { sigaction(signal, &action) }.tried("catch Ctrl-C")?;
    }
    Ok(())
}

/// Whether an end was asked for.
pub fn stopped() -> bool {
    STOPPED.load(Ordering::Relaxed)
}

/// Processor time of the process so far, its own and the kernel's for it.
pub fn cpu_time() -> Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF).tried("getrusage")?;
    let time = |it: nix::sys::time::TimeVal| {
        let micros = it.tv_sec() * 1_000_000 + it.tv_usec();
        Duration::from_micros(u64::try_from(micros).unwrap_or(0))
    };
    Ok(time(usage.user_time()) + time(usage.system_time()))
}

/// Processor time of this thread so far.
pub fn thread_time() -> Result<Duration> {
    let now = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).tried("clock_gettime")?;
    Ok(Duration::from(now))
}

/// What the process holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Holdings {
    /// Open descriptors.
    pub fds: usize,
    /// Mapped ranges.
    pub maps: usize,
    /// Resident memory.
    pub rss_kib: u64,
}

/// What the process holds now.
pub fn holdings() -> Result<Holdings> {
    let fds = fs::read_dir("/proc/self/fd").tried("read /proc/self/fd")?.count();
    let read = |path: &str| fs::read_to_string(path).tried(format!("read {path}"));
    let status = read("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    let rss = line.and_then(|it| it.split_whitespace().next()).and_then(|it| it.parse().ok());
    Ok(Holdings {
        // Not the one that reads the folder.
        fds: fds.saturating_sub(1),
        maps: read("/proc/self/maps")?.lines().count(),
        rss_kib: rss.unwrap_or(0),
    })
}

/// Sends bytes and a descriptor in one message.
pub fn send_fd(socket: &UnixStream, bytes: &[u8], fd: &OwnedFd) -> Result<()> {
    let fds = [fd.as_raw_fd()];
    let rights = [ControlMessage::ScmRights(&fds)];
    let data = [IoSlice::new(bytes)];
    sendmsg::<()>(socket.as_raw_fd(), &data, &rights, MsgFlags::empty(), None)
        .map(drop)
        .tried("send a descriptor")
}

/// Receives what [`send_fd`] sent.
pub fn receive_fd(socket: &impl AsRawFd, bytes: &mut [u8]) -> Result<OwnedFd> {
    let wanted = bytes.len();
    let mut space = cmsg_space!([std::os::fd::RawFd; 1]);
    let mut data = [IoSliceMut::new(bytes)];
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = recvmsg::<()>(socket.as_raw_fd(), &mut data, Some(&mut space), flags)
        .tried("receive a descriptor")?;
    let mut messages = message.cmsgs().tried("receive a descriptor")?;
    let first = messages.find_map(|it| match it {
        ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
        _ => None,
    });
    let Some(fd) = first.filter(|_| message.bytes == wanted) else {
        return Err(Error::Unfit(format!("{} bytes came, without a descriptor", message.bytes)));
    };
    // SAFETY: the kernel made the descriptor for this process, and nobody else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn a_descriptor_arrives_with_its_bytes() {
        let (here, there) = UnixStream::pair().unwrap();
        let file = fs::File::open("/dev/zero").unwrap();
        send_fd(&here, b"four", &file.into()).unwrap();
        let mut bytes = [0; 4];
        let mut file = fs::File::from(receive_fd(&there, &mut bytes).unwrap());
        assert_eq!(&bytes, b"four");
        let mut zero = [1; 1];
        file.read_exact(&mut zero).unwrap();
        assert_eq!(zero, [0]);
    }

    #[test]
    fn a_process_holds_something() {
        let now = holdings().unwrap();
        assert!(now.fds >= 3 && now.maps > 3 && now.rss_kib > 100, "{now:?}");
    }
}
