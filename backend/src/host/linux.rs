//! The host's own nodes under `/dev`.

use std::fs::OpenOptions;
use std::io;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::os::unix::fs::OpenOptionsExt;

use nix::libc;
use nix::sys::mman::{mmap, munmap, MapFlags, ProtFlags};

use super::{Host, HostFile, HostMapping, Node};
use crate::errno::Errno;
use crate::marshal::scratch::Frame;

const PAGE: u64 = 4096;

/// The NVIDIA driver of this host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinuxHost;

impl Host for LinuxHost {
    fn open(&self, node: &Node, flags: u32) -> Result<HostFile, Errno> {
        // CAST: O_ACCMODE keeps two bits.
        let access = flags as i32 & libc::O_ACCMODE;
        let file = OpenOptions::new()
            .read(access != libc::O_WRONLY)
            .write(access != libc::O_RDONLY)
            .custom_flags(libc::O_CLOEXEC | libc::O_NOCTTY)
            .open(&node.path)?;
        Ok(HostFile { fd: file.into(), ready: None, kind: node.kind })
    }

    fn ioctl(&self, file: &HostFile, cmd: u32, frame: &mut Frame<'_>) -> Result<i32, Errno> {
        let request = libc::c_ulong::from(cmd);
        // SAFETY: the argument is the frame's first block. What the driver reaches from it are
        // the frame's other blocks, each as long as the profile says that the driver copies and
        // followed by a page that faults; marshalling put the pointers there and left none of
        // the guest's. The frame is borrowed for the whole call.
        let result = unsafe { libc::ioctl(file.number(), request as _, frame.argument()) };
        if result < 0 {
            return Err(Errno::last());
        }
        Ok(result)
    }

    fn mapping(
        &self,
        file: &HostFile,
        offset: u64,
        length: u64,
        writable: bool,
    ) -> Result<HostMapping, Errno> {
        // The driver maps from offset 0 alone (nvidia_mmap_helper); UVM's offsets are addresses
        // of the caller, which no other process has.
        if offset != 0 {
            return Err(Errno::EINVAL);
        }
        let length = length.checked_next_multiple_of(PAGE).ok_or(Errno::EINVAL)?;
        probe(file, length, writable)?;
        Ok(HostMapping { fd: file.fd.try_clone()?, offset, length })
    }
}

/// Maps and unmaps what a VMM is about to map, so that it is told the driver's own errno here
/// and not a broken placement there.
fn probe(file: &HostFile, length: u64, writable: bool) -> Result<(), Errno> {
    let bytes = usize::try_from(length).map_err(|_| Errno::EINVAL)?;
    let bytes = NonZeroUsize::new(bytes).ok_or(Errno::EINVAL)?;
    let mut protection = ProtFlags::PROT_READ;
    protection.set(ProtFlags::PROT_WRITE, writable);
    // SAFETY: no address is asked for, so no mapping of ours is replaced, and nothing is read or
    // written through this one.
    let start = unsafe { mmap(None, bytes, protection, MapFlags::MAP_SHARED, file.fd.as_fd(), 0) }?;
    // SAFETY: these are the pages mapped above, and nothing borrows them.
    unsafe { munmap(start, bytes.get()) }.map_err(|errno| io::Error::from(errno).into())
}

#[cfg(test)]
mod tests {
    use nvguest_abi::FileKind;

    use super::*;
    use crate::marshal::scratch::Scratch;

    /// Any device that the machine has: what is tested is ours, not the driver's.
    fn node(path: &str) -> Node {
        Node { path: path.into(), kind: FileKind::Ctl, minor: 0, gpu_id: 0 }
    }

    #[test]
    fn a_guests_nonblocking_open_is_blocking_on_the_host() {
        let flags = (libc::O_RDWR | libc::O_NONBLOCK) as u32;
        let file = LinuxHost.open(&node("/dev/zero"), flags).unwrap();
        let set = nix::fcntl::fcntl(&file.fd, nix::fcntl::F_GETFL).unwrap();
        assert_eq!(set & libc::O_NONBLOCK, 0);
        assert_eq!(set & libc::O_ACCMODE, libc::O_RDWR);
    }

    #[test]
    fn a_node_that_is_not_there_answers_with_its_own_errno() {
        let missing = LinuxHost.open(&node("/dev/nvguest-no-such-node"), libc::O_RDWR as u32);
        assert_eq!(missing.unwrap_err(), Errno(libc::ENOENT));
    }

    #[test]
    fn a_call_that_the_device_does_not_know_answers_with_its_errno() {
        let file = LinuxHost.open(&node("/dev/zero"), libc::O_RDWR as u32).unwrap();
        let mut scratch = Scratch::new().unwrap();
        let mut frame = scratch.frame();
        frame.block(16).unwrap();
        assert_eq!(LinuxHost.ioctl(&file, 0xc010_4629, &mut frame), Err(Errno::ENOTTY));
    }

    #[test]
    fn a_mapping_is_whole_pages_of_a_duplicate() {
        let file = LinuxHost.open(&node("/dev/zero"), libc::O_RDWR as u32).unwrap();
        let mapping = LinuxHost.mapping(&file, 0, 5000, true).unwrap();
        assert_eq!((mapping.offset, mapping.length), (0, 8192));
        assert_eq!(LinuxHost.mapping(&file, 4096, 4096, true).unwrap_err(), Errno::EINVAL);
        assert_eq!(LinuxHost.mapping(&file, 0, 0, true).unwrap_err(), Errno::EINVAL);
        let read_only = LinuxHost.open(&node("/dev/zero"), libc::O_RDONLY as u32).unwrap();
        assert_eq!(LinuxHost.mapping(&read_only, 0, 4096, true).unwrap_err(), Errno(libc::EACCES));
    }
}
