//! Where a broker listens: a socket of its own, or one that it was handed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};

use anyhow::{bail, Context, Result};
use nix::fcntl::{fcntl, FcntlArg, FdFlag, Flock, FlockArg};
use nix::sys::stat::{umask, Mode};
use nix::unistd::{chown, Gid, Group};

/// A socket that only its owner can use, and a group if there is one. What a killed process
/// left there is replaced; a socket that is served is refused.
pub fn bind(path: &Path, group: Option<Gid>) -> Result<UnixListener> {
    // Asked in a way that cannot connect: a backend serves one connection, and this is none.
    match UnixDatagram::unbound()?.connect(path) {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
            fs::remove_file(path).ok();
        }
        Err(error) if error.raw_os_error() != Some(nix::libc::EPROTOTYPE) => {}
        _ => bail!("{} is served by another process", path.display()),
    }
    let others = if group.is_some() { 0o007 } else { 0o077 };
    let before = umask(Mode::from_bits_truncate(others));
    let listener = UnixListener::bind(path);
    umask(before);
    let listener = listener.with_context(|| format!("Listening on {} failed", path.display()))?;
    if group.is_some() {
        chown(path, None, group)
            .with_context(|| format!("Giving {} to the group failed", path.display()))?;
    }
    Ok(listener)
}

/// The folder of a guest's sockets, made if it is missing: `nvguest/NAME` under
/// `$XDG_RUNTIME_DIR`, or under `/run` without that. A group may pass through it.
pub fn folder(name: &str, group: Option<Gid>) -> Result<PathBuf> {
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty());
    let all = runtime.map_or_else(|| PathBuf::from("/run"), PathBuf::from).join("nvguest");
    let failed = |path: &Path| {
        let path = path.display().to_string();
        format!(
            "Making {path} failed; give --socket-path and --admin-socket, or make it for this user"
        )
    };
    for (path, mode) in [(all.clone(), 0o755), (all.join(name), 0o700)] {
        match fs::DirBuilder::new().mode(mode).create(&path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(error).with_context(|| failed(&path));
            }
            _ => {}
        }
    }
    let own = all.join(name);
    if group.is_some() {
        chown(&own, None, group).with_context(|| failed(&own))?;
        fs::set_permissions(&own, fs::Permissions::from_mode(0o710))
            .with_context(|| failed(&own))?;
    }
    Ok(own)
}

/// The group with this name.
pub fn group(name: &str) -> Result<Gid> {
    let found = Group::from_name(name).context("Looking for a group failed")?;
    Ok(found.with_context(|| format!("there is no group {name:?}; give --socket-group one"))?.gid)
}

/// The file beside a socket that holds the number of the process that serves it.
pub fn pid_path(socket: &Path) -> PathBuf {
    let mut path = socket.as_os_str().to_owned();
    path.push(".pid");
    path.into()
}

/// Writes our number to a file, locked as long as the result lives: two backends that start
/// at once cannot both have it.
pub fn pid_file(path: &Path) -> Result<Flock<File>> {
    let failed = || format!("Writing {} failed", path.display());
    loop {
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).write(true).mode(0o644);
        let file = options.custom_flags(nix::libc::O_NOFOLLOW).open(path).with_context(failed)?;
        let Ok(mut file) = Flock::lock(file, FlockArg::LockExclusiveNonblock) else {
            bail!("{} is locked: its socket is served by another process", path.display());
        };
        // Its holder may have removed it between our open and our lock.
        let same = fs::symlink_metadata(path)
            .is_ok_and(|there| file.metadata().is_ok_and(|ours| ours.ino() == there.ino()));
        if same {
            file.set_len(0).with_context(failed)?;
            writeln!(file, "{}", std::process::id()).with_context(failed)?;
            return Ok(file);
        }
    }
}

/// A listening socket that whoever started us left open, as systemd does.
pub fn inherited(fd: RawFd) -> Result<UnixListener> {
    // SAFETY: only looked at; a number that is not open is refused right here.
    let seen = unsafe { BorrowedFd::borrow_raw(fd) };
    fcntl(seen, FcntlArg::F_GETFD)
        .with_context(|| format!("--fd {fd} is not an open descriptor"))?;
    // systemd's stay open over exec, and no worker is to have this one.
    fcntl(seen, FcntlArg::F_SETFD(FdFlag::FD_CLOEXEC))
        .with_context(|| format!("Keeping --fd {fd} to ourselves failed"))?;
    // SAFETY: the caller gave us this descriptor, and nothing else here uses it.
    Ok(UnixListener::from(unsafe { OwnedFd::from_raw_fd(fd) }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_file_has_one_holder_at_a_time() {
        let folder = tempfile::tempdir().unwrap();
        let path = pid_path(&folder.path().join("nv.sock"));
        let held = pid_file(&path).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), format!("{}\n", std::process::id()));
        assert!(pid_file(&path).is_err());
        drop(held);
        pid_file(&path).unwrap();
    }
}
