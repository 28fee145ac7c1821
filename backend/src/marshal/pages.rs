//! Memory of a guest program that a call registers: what the guest says of it, and the same pages
//! side by side in this process, so that RM finds them where it would look for a program's own.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::ptr::NonNull;

use nix::sys::mman::{mmap, mmap_anonymous, munmap, MapFlags, ProtFlags};
use nvguest_abi::rules::PAGE;
use zerocopy::FromBytes;

use crate::errno::Errno;
use crate::wire::{Pages, Run, MAX_REGISTRATIONS};

/// Pieces of one registration at most: what a process may map has a limit
/// (`vm.max_map_count`), and so has the kernel's patience.
pub const MAX_RUNS: usize = 32_768;

/// What the guest offers for a registration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// The guest's number for it.
    pub registration: u32,
    /// The program's own address of the memory.
    pub address: u64,
    /// Bytes that the program registers, from its address on; 0 stands for 2^64.
    pub bytes: u64,
    /// Pages that RM takes at most.
    max: u32,
    /// Why the guest has no pages, as an errno; 0 if it has.
    error: u32,
    /// Guest-physical pages, in order.
    runs: Vec<Run>,
}

/// Why an offer is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// The address is not of a page.
    Unaligned,
    /// There is no such length.
    Endless,
    /// More than one call may register.
    TooLong,
    /// The guest could not pin the program's memory.
    Unpinned(Errno),
    /// The pages are not those that the program registers.
    Mismatch,
}

impl Offer {
    /// Takes a segment apart: its head, and what it offers. `None` if it is not whole.
    pub fn parse(list: &[u8], address: u64, bytes: u64, max: u32) -> Option<(&[u8], Self)> {
        let (head, rest) = list.split_at_checked(size_of::<Pages>())?;
        let said = Pages::read_from_bytes(head).ok()?;
        let runs = <[Run]>::ref_from_bytes(rest).ok()?;
        let registration = said.registration.get();
        let sound = (1..=MAX_REGISTRATIONS).contains(&registration)
            && said.held.get() == 0
            && said.reserved.get() == 0
            && runs.len() <= MAX_RUNS;
        let (error, runs) = (said.error.get(), runs.to_vec());
        sound.then_some((head, Self { registration, address, bytes, max, error, runs }))
    }

    /// The pages, if they are all that the program registers and no more.
    pub fn check(&self) -> Result<&[Run], Unfit> {
        if self.address % PAGE != 0 {
            return Err(Unfit::Unaligned);
        }
        if self.bytes == 0 {
            return Err(Unfit::Endless);
        }
        let wanted = self.bytes.div_ceil(PAGE);
        if wanted > self.max.into() {
            return Err(Unfit::TooLong);
        }
        if self.error != 0 {
            return Err(Unfit::Unpinned(Errno(i32::try_from(self.error).unwrap_or(0))));
        }
        let whole = self.runs.iter().all(|run| {
            let (address, length) = (run.address.get(), run.length.get());
            address % PAGE == 0 && length % PAGE == 0 && length > 0
        });
        let length = |sum: u64, run: &Run| sum.checked_add(run.length.get());
        let length = self.runs.iter().try_fold(0, length);
        (whole && length == Some(self.length())).then_some(&self.runs[..]).ok_or(Unfit::Mismatch)
    }

    /// Bytes of whole pages.
    pub fn length(&self) -> u64 {
        self.bytes.div_ceil(PAGE).saturating_mul(PAGE)
    }
}

/// A part of a file of the guest's memory.
pub struct Piece<F> {
    /// The file.
    pub file: F,
    /// Where in it.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Pages of the guest's memory, mapped side by side.
#[derive(Debug)]
pub struct SideBySide {
    /// INVARIANT: the start of `length` bytes mapped for this value alone.
    base: NonNull<c_void>,
    length: NonZeroUsize,
}

// SAFETY: the mapping belongs to this value alone, and no thread to the mapping.
unsafe impl Send for SideBySide {}
// SAFETY: what is mapped is reached by copies alone, as the guest may write it at any time.
unsafe impl Sync for SideBySide {}

impl SideBySide {
    /// Maps `length` bytes: all of `pieces`, in order.
    ///
    /// EINVAL if that is not their length, ENOMEM if there are too many; EINVAL for a piece of a
    /// huge page, which cannot be mapped by itself.
    pub fn map<F: AsFd>(
        length: u64,
        pieces: impl IntoIterator<Item = Piece<F>>,
    ) -> Result<Self, Errno> {
        let length = usize::try_from(length).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or(Errno::EINVAL)?;
        let reserved = MapFlags::MAP_PRIVATE | MapFlags::MAP_NORESERVE;
        // SAFETY: a new private mapping, at an address that the kernel picks, replaces no other.
        let base = unsafe { mmap_anonymous(None, length, ProtFlags::PROT_NONE, reserved) }?;
        let whole = Self { base, length };
        let mut at = 0;
        for piece in pieces {
            at = whole.put(at, &piece)?;
        }
        (at == length.get()).then_some(whole).ok_or(Errno::EINVAL)
    }

    /// Maps a piece `at` so many bytes from the start; where the next one goes.
    fn put<F: AsFd>(&self, at: usize, piece: &Piece<F>) -> Result<usize, Errno> {
        let length = usize::try_from(piece.length).ok().and_then(NonZeroUsize::new);
        let length = length.ok_or(Errno::EINVAL)?;
        let end = at.checked_add(length.get()).filter(|&end| end <= self.length.get());
        let end = end.ok_or(Errno::EINVAL)?;
        let offset = i64::try_from(piece.offset).map_err(|_| Errno::EINVAL)?;
        // The kernel maps whole huge pages of hugetlbfs, past the end of a piece that is less.
        let block = u64::try_from(nix::sys::stat::fstat(&piece.file)?.st_blksize).unwrap_or(0);
        if block > PAGE && (piece.offset % block != 0 || piece.length % block != 0) {
            return Err(Errno::EINVAL);
        }
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let flags = MapFlags::MAP_SHARED | MapFlags::MAP_FIXED;
        // SAFETY: `at` is less than `length`, so this is within the mapping.
        let place = unsafe { self.base.byte_add(at) }.addr();
        // SAFETY: the range lies in this value's own mapping, as was just checked, and no
        // reference is into it; so it replaces nobody else's.
        unsafe { mmap(Some(place), length, prot, flags, &piece.file, offset) }?;
        Ok(end)
    }

    /// Where it is in this process, as the driver sees it.
    pub fn address(&self) -> u64 {
        // The driver will pin what is at this number, so the provenance is exposed.
        self.base.as_ptr().expose_provenance() as u64
    }

    /// Bytes.
    pub fn length(&self) -> u64 {
        self.length.get() as u64
    }

    fn at(&self, offset: u64) -> Option<*mut u32> {
        let end = offset.checked_add(4).filter(|&end| end <= self.length() && offset % 4 == 0)?;
        let offset = usize::try_from(end - 4).ok()?;
        // SAFETY: four bytes from there on lie in the mapping.
        Some(unsafe { self.base.byte_add(offset) }.as_ptr().cast())
    }

    /// Reads the word at `offset`, as a simulated card does; `None` if it is not all there.
    pub fn read_u32(&self, offset: u64) -> Option<u32> {
        // SAFETY: `at` gives places in the mapping, aligned to four bytes; the guest writes them
        // at any time, so they are read as volatile.
        self.at(offset).map(|place| unsafe { place.read_volatile() })
    }

    /// Writes the word at `offset`, likewise.
    pub fn write_u32(&self, offset: u64, value: u32) -> Option<()> {
        // SAFETY: as in `read_u32`.
        self.at(offset).map(|place| unsafe { place.write_volatile(value) })
    }
}

impl Drop for SideBySide {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's.
        let unmapped = unsafe { munmap(self.base, self.length.get()) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;

    fn list(registration: u32, error: u32, runs: &[(u64, u64)]) -> Vec<u8> {
        let head =
            Pages { registration: registration.into(), error: error.into(), ..Pages::default() };
        let run = |&(address, length): &(u64, u64)| Run {
            address: address.into(),
            length: length.into(),
        };
        let runs: Vec<Run> = runs.iter().map(run).collect();
        [head.as_bytes(), runs.as_bytes()].concat()
    }

    fn checked(address: u64, bytes: u64, error: u32, runs: &[(u64, u64)]) -> Result<usize, Unfit> {
        let list = list(1, error, runs);
        let (_, offer) = Offer::parse(&list, address, bytes, 16).expect("it is whole");
        offer.check().map(<[Run]>::len)
    }

    #[test]
    fn the_pages_are_just_those_that_the_program_registers() {
        assert_eq!(checked(0x7000, 5000, 0, &[(0x1000, 4096), (0x9000, 4096)]), Ok(2));
        assert_eq!(checked(0x7000, 8192, 0, &[(0x1000, 8192)]), Ok(1));
        for (bytes, runs) in [
            (8193, &[(0x1000, 8192)][..]),
            (4096, &[(0x1000, 8192)]),
            (8192, &[(0x1000, 4096)]),
            (8192, &[]),
            (8192, &[(0x1001, 8192)]),
            (8192, &[(0x1000, 8191), (0x9000, 1)]),
            (8192, &[(0x1000, 8192), (0x9000, 0)]),
            (8192, &[(0x1000, 8192), (0x9000, u64::MAX - 4095)]),
        ] {
            assert_eq!(checked(0x7000, bytes, 0, runs), Err(Unfit::Mismatch), "{bytes} {runs:x?}");
        }
    }

    #[test]
    fn what_is_wrong_with_the_programs_memory_is_told_apart() {
        assert_eq!(checked(0x7010, 4096, 22, &[]), Err(Unfit::Unaligned));
        assert_eq!(checked(0x7000, 0, 7, &[]), Err(Unfit::Endless));
        for bytes in [16 * 4096 + 1, u64::MAX] {
            assert_eq!(checked(0x7000, bytes, 22, &[]), Err(Unfit::TooLong));
        }
        assert_eq!(checked(0x7000, 4096, 14, &[]), Err(Unfit::Unpinned(Errno::EFAULT)));
        assert_eq!(checked(0x7000, 4096, 12, &[]), Err(Unfit::Unpinned(Errno::ENOMEM)));
    }

    #[test]
    fn a_list_that_is_not_whole_or_has_what_it_must_not_is_none() {
        let whole = list(MAX_REGISTRATIONS, 0, &[(0, 4096)]);
        let parse = |list: &[u8]| Offer::parse(list, 0, 4096, 1).is_some();
        assert!(parse(&whole));
        for cut in (0..whole.len()).filter(|cut| *cut != size_of::<Pages>()) {
            assert!(!parse(&whole[..cut]), "{cut}");
        }
        for at in [8, 12] {
            let mut list = whole.clone();
            list[at] = 1;
            assert!(!parse(&list), "reserved or held at {at}");
        }
        assert!(!parse(&list(0, 0, &[])) && !parse(&list(MAX_REGISTRATIONS + 1, 0, &[])));
        assert!(!parse(&list(1, 0, &vec![(0, 4096); MAX_RUNS + 1])));
    }

    fn file(pages: &[u8]) -> std::fs::File {
        let bytes: Vec<u8> = pages.iter().flat_map(|&byte| [byte; 4096]).collect();
        let file = tempfile::tempfile().expect("a temporary file");
        std::os::unix::fs::FileExt::write_all_at(&file, &bytes, 0).expect("room for it");
        file
    }

    #[test]
    #[cfg(not(miri))]
    fn pieces_lie_side_by_side_and_are_the_files_own_pages() {
        use std::os::unix::fs::FileExt;
        let file = file(&[1, 2, 3, 4]);
        let piece = |page: u64, pages: u64| Piece {
            file: &file,
            offset: page * 4096,
            length: pages * 4096,
        };
        let seen = SideBySide::map(3 * 4096, [piece(3, 1), piece(0, 2)]).unwrap();
        let words = [0, 4092, 4096, 8192].map(|at| seen.read_u32(at).unwrap());
        assert_eq!(words, [0x0404_0404, 0x0404_0404, 0x0101_0101, 0x0202_0202]);
        seen.write_u32(8192, 7).unwrap();
        let mut word = [0; 4];
        file.read_exact_at(&mut word, 4096).unwrap();
        assert_eq!(u32::from_le_bytes(word), 7);
        for at in [12_288, 12_285, 12_286, 2, u64::MAX] {
            assert_eq!(seen.read_u32(at), None, "{at}");
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn pieces_that_are_too_few_or_too_many_are_refused() {
        let file = file(&[1, 2]);
        let piece = |length| Piece { file: &file, offset: 0, length };
        for (length, pieces) in [
            (8192, vec![piece(4096)]),
            (4096, vec![piece(8192)]),
            (4096, vec![piece(4096), piece(4096)]),
            (4096, vec![piece(0)]),
            (0, vec![]),
        ] {
            assert_eq!(SideBySide::map(length, pieces).map(drop), Err(Errno::EINVAL));
        }
    }

    proptest! {
        #[test]
        fn no_list_makes_the_look_at_it_panic(
            bytes in proptest::collection::vec(any::<u8>(), 0..200),
            (address, length, max) in (any::<u64>(), any::<u64>(), any::<u32>()),
        ) {
            if let Some((_, offer)) = Offer::parse(&bytes, address, length, max) {
                if let Ok(runs) = offer.check() {
                    let sum: u64 = runs.iter().map(|run| run.length.get()).sum();
                    prop_assert_eq!(sum, offer.length());
                }
            }
        }
    }
}
