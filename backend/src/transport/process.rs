//! A process of the host by a descriptor: its number can be another's by the time it is used.

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use nix::libc;
use nix::poll::{poll, PollFd, PollFlags, PollTimeout};

/// A process.
#[derive(Debug)]
pub struct Process(OwnedFd);

impl Process {
    /// The child with this number, which nobody has waited for yet.
    pub fn of_child(pid: i32) -> io::Result<Self> {
        // SAFETY: makes a descriptor and touches no memory.
        let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        if fd < 0 {
            return Err(io::Error::last_os_error());
        }
        // CAST: descriptors are small. SAFETY: the kernel has just made it for us.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd as i32) }))
    }

    /// The process behind a descriptor that somebody sent.
    pub fn from_fd(fd: OwnedFd) -> Self {
        Self(fd)
    }

    /// Ends it. One that has ended is left alone.
    pub fn kill(&self) {
        // SAFETY: sends a signal and touches no memory.
        unsafe {
            let no_info = std::ptr::null::<libc::siginfo_t>();
            libc::syscall(
                libc::SYS_pidfd_send_signal,
                self.0.as_raw_fd(),
                libc::SIGKILL,
                no_info,
                0,
            );
        }
    }

    /// Waits for its end: its descriptors are closed by then, all its threads are gone.
    pub fn await_end(&self) -> io::Result<()> {
        let mut fds = [PollFd::new(self.as_fd(), PollFlags::POLLIN)];
        loop {
            match poll(&mut fds, PollTimeout::NONE) {
                Err(nix::Error::EINTR) => {}
                outcome => return Ok(outcome.map(drop)?),
            }
        }
    }
}

impl AsFd for Process {
    /// Readable once the process has ended.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn a_process_is_ended_and_its_end_is_heard() {
        let mut child = Command::new("sleep").arg("600").spawn().unwrap();
        // CAST: a pid is a positive i32.
        let process = Process::of_child(child.id() as i32).unwrap();
        process.kill();
        process.await_end().unwrap();
        assert!(!child.wait().unwrap().success());
        process.kill();
    }
}
