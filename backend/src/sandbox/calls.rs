//! The system calls that a broker, its starter and a worker make. Found by tracing the whole
//! of `tests/conformance`; each is there for the reason beside it.
#![forbid(unsafe_code)]

use nix::libc::{self, c_long};
use nvguest_abi::FileKind;

use crate::worker::start::HostKind;

/// What must be so of an argument.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Is {
    /// The argument with this number has this value (all 64 bits).
    Equal(u8, u64),
    /// It has these bits (second number) under this mask (first), of its lower 32.
    Bits(u8, u32, u32),
}

/// A call that may be made if all of it is so. Several rows of one call are alternatives.
pub type Row = (c_long, &'static [Is]);

const ANY: &[Is] = &[];
/// Never memory that can be run.
const NO_EXEC: &[Is] = &[Is::Bits(2, PROT_EXEC, 0)];
const PROT_EXEC: u32 = 4;
/// `CLONE_VM | CLONE_SIGHAND | CLONE_THREAD`: a thread, not a process.
const THREAD: &[Is] = &[Is::Bits(0, 0x0001_0900, 0x0001_0900)];
const READ_LIMIT: &[Is] = &[Is::Equal(2, 0)];

/// Of a Rust program with threads, sockets and an epoll set.
const COMMON: &[Row] = &[
    // Memory.
    (libc::SYS_mmap, NO_EXEC),
    (libc::SYS_mprotect, NO_EXEC),
    (libc::SYS_munmap, ANY),
    (libc::SYS_mremap, ANY),
    (libc::SYS_madvise, ANY),
    (libc::SYS_brk, ANY),
    (libc::SYS_memfd_create, ANY),
    (libc::SYS_ftruncate, ANY),
    // Threads.
    (libc::SYS_clone, THREAD),
    (libc::SYS_futex, ANY),
    (libc::SYS_rseq, ANY),
    (libc::SYS_set_robust_list, ANY),
    (libc::SYS_prctl, &[Is::Equal(0, libc::PR_SET_NAME as u64)]),
    (libc::SYS_sched_getaffinity, ANY),
    (libc::SYS_sched_yield, ANY),
    (libc::SYS_gettid, ANY),
    (libc::SYS_getpid, ANY),
    (libc::SYS_prlimit64, READ_LIMIT),
    (libc::SYS_exit, ANY),
    (libc::SYS_exit_group, ANY),
    // Signals: a panic ends in one to itself.
    (libc::SYS_rt_sigaction, ANY),
    (libc::SYS_rt_sigprocmask, ANY),
    (libc::SYS_rt_sigreturn, ANY),
    (libc::SYS_sigaltstack, ANY),
    (libc::SYS_restart_syscall, ANY),
    // Time and chance.
    (libc::SYS_clock_gettime, ANY),
    (libc::SYS_clock_nanosleep, ANY),
    (libc::SYS_getrandom, ANY),
    // What is open.
    (libc::SYS_read, ANY),
    (libc::SYS_write, ANY),
    (libc::SYS_writev, ANY),
    (libc::SYS_close, ANY),
    (libc::SYS_fstat, ANY),
    (libc::SYS_newfstatat, &[Is::Bits(3, AT_EMPTY_PATH, AT_EMPTY_PATH)]),
    (libc::SYS_statx, &[Is::Bits(2, AT_EMPTY_PATH, AT_EMPTY_PATH)]),
    (libc::SYS_lseek, ANY),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_DUPFD_CLOEXEC as u64)]),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_GETFD as u64)]),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_GETFL as u64)]),
    (libc::SYS_sendmsg, ANY),
    (libc::SYS_sendto, ANY),
    (libc::SYS_recvmsg, ANY),
    (libc::SYS_recvfrom, ANY),
    (libc::SYS_poll, ANY),
    (libc::SYS_epoll_create1, ANY),
    (libc::SYS_epoll_ctl, ANY),
    (libc::SYS_epoll_wait, ANY),
    (libc::SYS_eventfd2, ANY),
];
const AT_EMPTY_PATH: u32 = libc::AT_EMPTY_PATH as u32;

/// Of the broker besides: its VMM and admins come to it, its workers are ended by it.
const BROKER: &[Row] = &[
    (libc::SYS_accept4, ANY),
    (libc::SYS_setsockopt, SOCKET_LEVEL),
    (libc::SYS_getsockopt, SOCKET_LEVEL),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_SETFL as u64)]),
    (libc::SYS_rt_sigtimedwait, ANY),
    // Memory that is shared is sealed; the arena is emptied range by range.
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_ADD_SEALS as u64)]),
    (libc::SYS_fallocate, ANY),
    (libc::SYS_pidfd_send_signal, ANY),
    // The pid file's lock is given back.
    (libc::SYS_flock, &[Is::Equal(1, libc::LOCK_UN as u64)]),
];
const SOCKET_LEVEL: &[Is] = &[Is::Equal(1, libc::SOL_SOCKET as u64)];

/// Of a worker besides: it opens what Landlock leaves it.
const WORKER: &[Row] = &[(libc::SYS_openat, ANY), (libc::SYS_setsockopt, SOCKET_LEVEL)];

/// Of a worker with the simulated card, which is a file with locks.
const SIMULATED: &[Row] = &[
    (libc::SYS_pread64, ANY),
    (libc::SYS_pwrite64, ANY),
    (libc::SYS_fallocate, ANY),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_OFD_GETLK as u64)]),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_OFD_SETLK as u64)]),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_OFD_SETLKW as u64)]),
    (libc::SYS_fcntl, &[Is::Equal(1, libc::F_ADD_SEALS as u64)]),
];

/// Of the starter besides what its workers may: a list is inherited, and only shrinks. So this
/// one also has what the dynamic linker, the C library and our own first steps take until a
/// worker's own list is in place.
const STARTER: &[Row] = &[
    // A worker: its link, its process, the program and its end.
    (libc::SYS_socketpair, &[Is::Equal(0, libc::AF_UNIX as u64)]),
    (libc::SYS_clone, SPAWN),
    (libc::SYS_dup2, ANY),
    (libc::SYS_execve, ANY),
    (libc::SYS_pidfd_open, ANY),
    (libc::SYS_wait4, ANY),
    (libc::SYS_waitid, ANY),
    // Sockets removed, metrics written.
    (libc::SYS_unlink, ANY),
    (libc::SYS_rename, ANY),
    (libc::SYS_fchmod, ANY),
    // A program begins.
    (libc::SYS_mmap, LIBRARY),
    (libc::SYS_pread64, ANY),
    (libc::SYS_access, ANY),
    // In the folders of LD_LIBRARY_PATH.
    (libc::SYS_newfstatat, &[Is::Bits(3, AT_EMPTY_PATH, 0)]),
    (libc::SYS_readlink, ANY),
    (libc::SYS_readlinkat, ANY),
    (libc::SYS_uname, ANY),
    (libc::SYS_arch_prctl, ANY),
    (libc::SYS_set_tid_address, ANY),
    (libc::SYS_ioctl, &[Is::Equal(1, libc::TCGETS)]),
    // It gives up what it may, and confines itself.
    (libc::SYS_umask, ANY),
    (libc::SYS_geteuid, ANY),
    (libc::SYS_capget, ANY),
    (libc::SYS_capset, ANY),
    (libc::SYS_prctl, &[Is::Equal(0, libc::PR_CAP_AMBIENT as u64)]),
    (libc::SYS_prctl, &[Is::Equal(0, libc::PR_SET_NO_NEW_PRIVS as u64)]),
    (libc::SYS_prctl, &[Is::Equal(0, libc::PR_SET_DUMPABLE as u64), Is::Equal(1, 0)]),
    (libc::SYS_prlimit64, &[Is::Equal(1, libc::RLIMIT_CORE as u64)]),
    (libc::SYS_landlock_create_ruleset, ANY),
    (libc::SYS_landlock_add_rule, ANY),
    (libc::SYS_landlock_restrict_self, ANY),
    (libc::SYS_seccomp, ANY),
];
/// Another program, at once: `CLONE_VM | CLONE_VFORK`, and SIGCHLD at its end. No fork, no
/// namespace.
const SPAWN: &[Is] = &[Is::Equal(0, 0x4100 | libc::SIGCHLD as u64)];
/// Code from a file, private and never writable.
const LIBRARY: &[Is] = &[
    Is::Bits(2, PROT_EXEC | PROT_WRITE, PROT_EXEC),
    Is::Bits(3, (libc::MAP_SHARED | libc::MAP_ANONYMOUS) as u32, 0),
];
const PROT_WRITE: u32 = 2;

/// The calls of a file are told by the second byte of their number (`_IOC_TYPE`): `F` of a
/// card and the control node, nothing of nvidia-uvm, `m` of nvidia-modeset.
fn ioctl_of(kind: FileKind) -> Row {
    let is: &[Is] = match kind {
        FileKind::Uvm => &[Is::Bits(1, 0xff00, 0)],
        FileKind::Modeset => &[Is::Bits(1, 0xff00, 0x6d00)],
        _ => &[Is::Bits(1, 0xff00, 0x4600)],
    };
    (libc::SYS_ioctl, is)
}

/// Calls that the C library tries and does without: they fail, and nobody is told.
pub type Absent = &'static [(c_long, i32)];

/// Its flags lie in memory, where a filter cannot look: the C library uses `clone` instead.
const NO_CLONE3: (c_long, i32) = (libc::SYS_clone3, libc::ENOSYS);
/// Of a worker and the starter.
pub const ABSENT: Absent = &[NO_CLONE3];
/// Of the broker: its memory allocator looks for the number of processors in a file.
pub const ABSENT_FROM_BROKER: Absent = &[NO_CLONE3, (libc::SYS_openat, libc::EACCES)];

/// Every call of the broker.
pub fn of_broker() -> Vec<Row> {
    [COMMON, BROKER].concat()
}

/// Every call of the starter of such workers.
pub fn of_starter(host: HostKind) -> Vec<Row> {
    let kinds: &[FileKind] = match host {
        HostKind::Nvidia => &[FileKind::Ctl, FileKind::Uvm, FileKind::Modeset],
        HostKind::Sim => &[],
    };
    let mut rows = of_worker(host, kinds);
    rows.extend_from_slice(STARTER);
    rows
}

/// Every call of a worker whose guest process may open nodes of these kinds.
pub fn of_worker(host: HostKind, kinds: &[FileKind]) -> Vec<Row> {
    let mut rows = [COMMON, WORKER].concat();
    if host == HostKind::Sim {
        rows.extend_from_slice(SIMULATED);
    }
    rows.extend(kinds.iter().map(|&kind| ioctl_of(kind)));
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nobody_makes_sockets_or_processes() {
        let all = [of_broker(), of_worker(HostKind::Sim, &[FileKind::Ctl])].concat();
        for number in [
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_execve,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_userfaultfd,
            libc::SYS_process_vm_writev,
        ] {
            assert!(all.iter().all(|row| row.0 != number), "{number}");
        }
    }

    #[test]
    fn the_starter_makes_no_sockets_and_no_process_but_a_program_at_once() {
        let all = of_starter(HostKind::Nvidia);
        for number in [
            libc::SYS_socket,
            libc::SYS_connect,
            libc::SYS_bind,
            libc::SYS_execveat,
            libc::SYS_fork,
            libc::SYS_vfork,
            libc::SYS_unshare,
            libc::SYS_setns,
            libc::SYS_ptrace,
            libc::SYS_kill,
            libc::SYS_pidfd_send_signal,
            libc::SYS_pidfd_getfd,
            libc::SYS_mount,
            libc::SYS_bpf,
            libc::SYS_io_uring_setup,
            libc::SYS_process_vm_writev,
        ] {
            assert!(all.iter().all(|row| row.0 != number), "{number}");
        }
        let clones = all.iter().filter(|row| row.0 == libc::SYS_clone).map(|row| row.1);
        assert_eq!(clones.collect::<Vec<_>>(), [THREAD, SPAWN]);
    }

    #[test]
    fn the_starter_may_whatever_its_workers_may() {
        let kinds = [FileKind::Ctl, FileKind::Gpu, FileKind::Uvm, FileKind::Modeset];
        for (host, kinds) in [(HostKind::Sim, &[][..]), (HostKind::Nvidia, &kinds)] {
            let starter = of_starter(host);
            for row in of_worker(host, kinds) {
                let same: Vec<_> = starter.iter().filter(|other| other.0 == row.0).collect();
                assert!(same.iter().any(|other| other.1 == row.1), "{row:?}");
                // A row without conditions beside one with them would mean nothing.
                let free = same.iter().filter(|other| other.1.is_empty()).count();
                assert!(free == 0 || free == same.len(), "{row:?}");
            }
        }
    }

    #[test]
    fn the_broker_opens_nothing_and_calls_no_device() {
        for number in [libc::SYS_open, libc::SYS_openat, libc::SYS_openat2, libc::SYS_ioctl] {
            assert!(of_broker().iter().all(|row| row.0 != number), "{number}");
        }
    }

    #[test]
    fn a_worker_calls_only_devices_of_its_kinds() {
        let ioctls = |kinds: &[FileKind]| {
            let rows = of_worker(HostKind::Nvidia, kinds);
            rows.into_iter().filter(|row| row.0 == libc::SYS_ioctl).map(|row| row.1).collect()
        };
        let none: Vec<&[Is]> = ioctls(&[]);
        assert!(none.is_empty());
        let cards: Vec<&[Is]> = ioctls(&[FileKind::Ctl]);
        assert_eq!(cards, [&[Is::Bits(1, 0xff00, 0x4600)]]);
    }
}
