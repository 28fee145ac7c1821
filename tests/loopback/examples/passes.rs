//! What programs do with descriptors of the driver beside calling it: fork, exec, messages,
//! duplicates, epoll and select. Says `ok` a line for each; run as a guest's program.

use std::fs::{File, OpenOptions};
use std::io::{IoSlice, IoSliceMut, Result};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;

use nix::libc;
use nix::sys::epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout};
use nix::sys::select::{select, FdSet};
use nix::sys::socket::{
    recvmsg, sendmsg, socketpair, AddressFamily, ControlMessage, ControlMessageOwned, MsgFlags,
    SockFlag, SockType, UnixAddr,
};
use nix::sys::time::{TimeVal, TimeValLike};
use nix::sys::wait::{waitpid, WaitStatus};
use nix::unistd::{fork, ForkResult};

fn open() -> Result<File> {
    OpenOptions::new().read(true).write(true).open("/dev/nvidiactl")
}

/// Asks the driver's release, which any control file answers.
fn release(fd: RawFd) -> Result<String> {
    let mut argument = [0_u8; 72];
    argument[0] = b'2';
    let request = 3 << 30 | 72 << 16 | u64::from(b'F') << 8 | 210;
    // SAFETY: an argument of the size that the number says, without a pointer in it.
    if unsafe { libc::ioctl(fd, request, argument.as_mut_ptr()) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    let text = &argument[8..];
    let length = text.iter().position(|&byte| byte == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..length]).into_owned())
}

/// Runs `body` in a child that a fork made; whether it said yes.
fn in_child(body: impl FnOnce() -> bool) -> bool {
    // SAFETY: this program has one thread.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let said = body();
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(i32::from(!said)) }
        }
        Ok(ForkResult::Parent { child }) => {
            matches!(waitpid(child, None), Ok(WaitStatus::Exited(_, 0)))
        }
        Err(_) => false,
    }
}

fn forks(file: &File) -> bool {
    let inherited = in_child(|| release(file.as_raw_fd()).is_ok());
    let own = in_child(|| open().and_then(|file| release(file.as_raw_fd())).is_ok());
    let grandchild = in_child(|| in_child(|| release(file.as_raw_fd()).is_ok()));
    inherited && own && grandchild && release(file.as_raw_fd()).is_ok()
}

fn outlives(file: File) -> bool {
    // SAFETY: a descriptor of ours.
    let kept = unsafe { libc::dup(file.as_raw_fd()) };
    drop(file);
    // SAFETY: just made.
    let kept = unsafe { OwnedFd::from_raw_fd(kept) };
    release(kept.as_raw_fd()).is_ok()
}

fn execs(file: &File) -> bool {
    // SAFETY: a descriptor of ours.
    unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFD, 0) };
    let own = std::env::current_exe().expect("our own binary");
    let fd = file.as_raw_fd().to_string();
    let spawned = Command::new(&own).arg("--use").arg(&fd).status();
    let executed = in_child(|| {
        let _ = Command::new(&own).arg("--use").arg(&fd).exec();
        false
    });
    spawned.is_ok_and(|status| status.success()) && executed
}

fn passes(file: &File) -> bool {
    let (family, kind) = (AddressFamily::Unix, SockType::Stream);
    let (here, there) = socketpair(family, kind, None, SockFlag::empty()).expect("a pair");
    // SAFETY: this program has one thread.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            let fds = [file.as_raw_fd()];
            let message = [ControlMessage::ScmRights(&fds)];
            let bytes = [IoSlice::new(b"x")];
            let fd = there.as_raw_fd();
            let sent = sendmsg::<UnixAddr>(fd, &bytes, &message, MsgFlags::empty(), None);
            // SAFETY: ends the child alone.
            unsafe { libc::_exit(i32::from(sent.is_err())) }
        }
        Ok(ForkResult::Parent { child }) => {
            let mut byte = [0];
            let mut bytes = [IoSliceMut::new(&mut byte)];
            let mut space = nix::cmsg_space!([RawFd; 1]);
            let fd = here.as_raw_fd();
            let got = recvmsg::<UnixAddr>(fd, &mut bytes, Some(&mut space), MsgFlags::empty());
            let fds: Vec<RawFd> = got
                .expect("a message")
                .cmsgs()
                .expect("its control data")
                .filter_map(|message| match message {
                    ControlMessageOwned::ScmRights(fds) => Some(fds),
                    _ => None,
                })
                .flatten()
                .collect();
            let _ = waitpid(child, None);
            fds.len() == 1 && release(fds[0]).is_ok()
        }
        Err(_) => false,
    }
}

fn waits(file: &File) -> bool {
    let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC).expect("an epoll");
    epoll.add(file, EpollEvent::new(EpollFlags::EPOLLIN, 7)).expect("a watch");
    let mut events = [EpollEvent::empty(); 4];
    let none = epoll.wait(&mut events, EpollTimeout::from(20_u8)) == Ok(0);
    let mut set = FdSet::new();
    set.insert(std::os::fd::AsFd::as_fd(file));
    let mut time = TimeVal::milliseconds(20);
    none && select(None, &mut set, None, None, &mut time) == Ok(0)
}

fn is_a_device(file: &File) -> bool {
    use std::os::unix::fs::{FileTypeExt, MetadataExt};
    file.metadata().is_ok_and(|data| data.file_type().is_char_device() && data.rdev() != 0)
        && std::fs::metadata("/dev/nvidiactl").is_ok_and(|data| data.file_type().is_char_device())
}

/// A daemon's first act: everything is closed, whoever opened it.
fn closes_all() -> bool {
    in_child(|| {
        // SAFETY: numbers; this child uses nothing of what it closes.
        unsafe {
            for fd in 3..1024 {
                libc::close(fd);
            }
        }
        open().and_then(|file| release(file.as_raw_fd())).is_ok()
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    if let [_, option, fd] = &arguments[..] {
        let fd = fd.parse().expect("a descriptor");
        let ok = option == "--use" && release(fd).is_ok();
        std::process::exit(i32::from(!ok));
    }
    let file = open().expect("the control node");
    let outcomes = [
        ("fork", forks(&file)),
        ("exec", execs(&file)),
        ("message", passes(&file)),
        ("wait", waits(&file)),
        ("device", is_a_device(&file)),
        ("close-all", closes_all()),
        ("duplicate", outlives(file)),
    ];
    for (name, ok) in outcomes {
        println!("{} {name}", if ok { "ok" } else { "FAIL" });
    }
    std::process::exit(i32::from(outcomes.iter().any(|(_, ok)| !ok)));
}
