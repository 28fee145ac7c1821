//! Memory files that several processes share.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use nix::fcntl::{fcntl, FcntlArg, SealFlag};
use nix::sys::memfd::{memfd_create, MFdFlags};
use vm_memory::{AtomicInteger, FileOffset, MmapRegion, VolatileMemory};

use crate::errno::Errno;

/// A memory file that can neither shrink nor grow, so that no mapping of it ever faults.
pub fn sealed_file(name: &str, size: u64) -> io::Result<File> {
    let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
    let file = File::from(memfd_create(name, flags)?);
    file.set_len(size)?;
    let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
    fcntl(&file, FcntlArg::F_ADD_SEALS(seals))?;
    Ok(file)
}

/// Atomic words in a memory file that several processes map.
#[derive(Debug)]
pub struct Words {
    region: MmapRegion<()>,
    fd: OwnedFd,
}

impl Words {
    /// New ones, all zero. Sealed: a process that cut them short would end all others.
    pub fn create(name: &str, size: usize) -> Result<Self, Errno> {
        Self::open(sealed_file(name, size as u64)?.into(), size)
    }

    /// Those that another process made.
    pub fn open(fd: OwnedFd, size: usize) -> Result<Self, Errno> {
        let file = File::from(fd.try_clone()?);
        let region = MmapRegion::from_file(FileOffset::new(file, 0), size).map_err(|error| {
            tracing::error!(%error, size, "mapping shared words failed");
            Errno::ENOMEM
        })?;
        Ok(Self { region, fd })
    }

    /// A descriptor of them for another process.
    pub fn share(&self) -> Result<OwnedFd, Errno> {
        Ok(self.fd.as_fd().try_clone_to_owned()?)
    }

    /// The word at an offset that the caller knows to lie in them.
    pub fn at<T: AtomicInteger>(&self, offset: usize) -> &T {
        self.region.get_atomic_ref(offset).expect("INVARIANT: the word lies in the file")
    }
}

/// A file, mapped whole. Costs address space; memory only where somebody touches it.
#[derive(Debug)]
pub struct Shared {
    region: MmapRegion<()>,
    file: Arc<File>,
}

impl Shared {
    /// Maps `size` bytes of the file behind `fd`.
    pub fn map(fd: OwnedFd, size: u64) -> Result<Arc<Self>, Errno> {
        let file = Arc::new(File::from(fd));
        let size = usize::try_from(size).map_err(|_| Errno::ENOMEM)?;
        let mapped = MmapRegion::from_file(FileOffset::from_arc(Arc::clone(&file), 0), size);
        let region = mapped.map_err(|error| {
            tracing::error!(%error, size, "mapping a shared file failed");
            Errno::ENOMEM
        })?;
        Ok(Arc::new(Self { region, file }))
    }

    /// The part of it at `offset`; `None` if it is not all in the file.
    pub fn piece(self: &Arc<Self>, offset: u64, length: u64) -> Option<Piece> {
        let end = offset.checked_add(length)?;
        let whole = length > 0 && end <= self.region.size() as u64;
        whole.then(|| Piece { shared: Arc::clone(self), offset, length })
    }
}

/// A part of a [`Shared`] file, which stays mapped as long as this lives.
#[derive(Clone, Debug)]
pub struct Piece {
    shared: Arc<Shared>,
    /// Where it is in the file.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

impl Piece {
    /// Where it is in this process, as the driver sees it.
    pub fn address(&self) -> u64 {
        // The driver will write through this number, so the provenance is exposed.
        self.shared.region.as_ptr().expose_provenance() as u64 + self.offset
    }

    /// The file.
    pub fn file(&self) -> &Arc<File> {
        &self.shared.file
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use nix::fcntl::{fallocate, FallocateFlags};

    use super::*;

    #[test]
    fn a_sealed_file_neither_shrinks_nor_grows_nor_takes_another_seal() {
        let file = sealed_file("test", 65536).unwrap();
        assert!(file.set_len(4096).is_err());
        assert!(file.set_len(1 << 20).is_err());
        assert!(file.write_all_at(&[1; 2], 65535).is_err());
        let more = FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_WRITE);
        assert!(fcntl(&file, more).is_err());
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        file.write_all_at(&[7; 4096], 4096).unwrap();
        fallocate(&file, punch, 4096, 4096).unwrap();
        let mut bytes = [1; 4096];
        file.read_exact_at(&mut bytes, 4096).unwrap();
        assert_eq!(bytes, [0; 4096]);
    }

    #[test]
    fn a_piece_lies_in_its_file() {
        let file = sealed_file("test", 65536).unwrap();
        let shared = Shared::map(file.into(), 65536).unwrap();
        let (first, second) = (shared.piece(0, 4096).unwrap(), shared.piece(4096, 61440).unwrap());
        assert_eq!(first.address() + 4096, second.address());
        for (offset, length) in [(0, 0), (0, 65537), (65536, 1), (u64::MAX, 2)] {
            assert!(shared.piece(offset, length).is_none(), "{offset:#x} {length:#x}");
        }
    }
}
