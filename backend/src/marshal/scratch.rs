//! The memory that host calls are built in: the only bytes of ours that the driver is given.
//!
//! A [`Scratch`] is mapped once per thread. It has [`BLOCKS`] slots, each followed
//! by a page that nothing may touch, and a block lies against that page: a copy
//! longer than the profile says is a fault that the driver reports, never bytes of
//! another block. A [`Frame`] is the blocks of one call.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;

use nix::sys::mman::{madvise, mmap_anonymous, mprotect, munmap};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags};

use super::pages::SideBySide;
use crate::errno::Errno;
use crate::transport::shared::Piece;

/// Blocks of one frame at most: an argument and the buffers it reaches.
pub const BLOCKS: usize = 8;
/// Bytes of one block at most: RM's own bound on parameters is 1 MiB, and a page to spare.
pub const MAX_BLOCK: usize = (1 << 20) + PAGE;

const PAGE: usize = 4096;
const STRIDE: usize = MAX_BLOCK + PAGE;
const SPAN: NonZeroUsize = match NonZeroUsize::new(BLOCKS * STRIDE) {
    Some(span) => span,
    None => unreachable!(),
};
/// What a slot keeps resident between calls.
const KEPT: usize = 64 << 10;

/// Slots for the blocks of one call at a time.
#[derive(Debug)]
pub struct Scratch {
    /// INVARIANT: the start of `SPAN` bytes mapped for this value alone. In each
    /// stride the first `MAX_BLOCK` bytes are readable and writable and the last
    /// page is neither.
    base: NonNull<u8>,
}

// SAFETY: the mapping belongs to this value alone, and no thread to the mapping.
unsafe impl Send for Scratch {}

impl Scratch {
    /// Maps the slots. Costs address space; memory only as blocks use it.
    pub fn new() -> Result<Self, Errno> {
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        let mut flags = MapFlags::MAP_PRIVATE;
        // Miri's memory is not reserved, and it knows no other kind.
        flags.set(MapFlags::MAP_NORESERVE, !cfg!(miri));
        // SAFETY: a new private mapping, at an address that the kernel picks,
        // replaces no other.
        let base = unsafe { mmap_anonymous(None, SPAN, prot, flags) }?.cast::<u8>();
        let scratch = Self { base };
        for slot in 0..BLOCKS {
            scratch.guard(slot)?;
        }
        Ok(scratch)
    }

    /// The blocks of one call, none yet.
    pub fn frame(&mut self) -> Frame<'_> {
        Frame { scratch: self, lengths: [0; BLOCKS], count: 0, registered: None }
    }

    /// Where the slot's bytes end and its guard page begins.
    fn end(&self, slot: usize) -> NonNull<u8> {
        debug_assert!(slot < BLOCKS);
        // SAFETY: a slot below `BLOCKS` ends within the `SPAN` bytes of one mapping.
        unsafe { self.base.add(slot * STRIDE + MAX_BLOCK) }
    }

    fn guard(&self, slot: usize) -> Result<(), Errno> {
        if cfg!(miri) {
            return Ok(());
        }
        // SAFETY: the page is ours, and no block of any frame reaches into it.
        Ok(unsafe { mprotect(self.end(slot).cast(), PAGE, ProtFlags::PROT_NONE) }?)
    }

    /// Gives back what a block of `length` bytes made resident beyond `KEPT`.
    fn give_back(&mut self, slot: usize, length: usize) {
        let used = length.next_multiple_of(PAGE).min(MAX_BLOCK);
        if used <= KEPT || cfg!(miri) {
            return;
        }
        // SAFETY: `used` bytes before the slot's end lie in the slot. No slice of
        // them lives: `self` is borrowed mutably. Their content is of no use to anyone.
        let advised = unsafe {
            let start = self.end(slot).sub(used);
            madvise(start.cast(), used - KEPT, MmapAdvise::MADV_DONTNEED)
        };
        debug_assert_eq!(advised, Ok(()));
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's, and frames of it are gone by now.
        let unmapped = unsafe { munmap(self.base.cast(), SPAN.get()) };
        debug_assert_eq!(unmapped, Ok(()));
    }
}

/// Memory of this process that a call registers: the only that RM is given the address of to keep.
#[derive(Clone, Debug)]
pub enum Registered {
    /// Of the arena.
    Arena(Piece),
    /// Of the guest.
    Guest(Arc<SideBySide>),
}

impl From<Piece> for Registered {
    fn from(piece: Piece) -> Self {
        Self::Arena(piece)
    }
}

impl From<Arc<SideBySide>> for Registered {
    fn from(pages: Arc<SideBySide>) -> Self {
        Self::Guest(pages)
    }
}

impl Registered {
    /// Where it is in this process, as the driver sees it.
    pub fn address(&self) -> u64 {
        match self {
            Self::Arena(piece) => piece.address(),
            Self::Guest(pages) => pages.address(),
        }
    }

    /// Bytes, whole pages.
    pub fn length(&self) -> u64 {
        match self {
            Self::Arena(piece) => piece.length,
            Self::Guest(pages) => pages.length(),
        }
    }
}

/// Names a block of the frame that made it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockId(u8);

/// The blocks of one call. Block 0 is what the ioctl's argument points at.
#[derive(Debug)]
pub struct Frame<'s> {
    scratch: &'s mut Scratch,
    /// INVARIANT: each at most `MAX_BLOCK`.
    lengths: [usize; BLOCKS],
    /// INVARIANT: at most `BLOCKS`.
    count: usize,
    /// Memory that the call registers.
    registered: Option<Registered>,
}

impl Frame<'_> {
    /// A new block of `length` zeroes; ENOMEM if it is too long or one too many.
    pub fn block(&mut self, length: usize) -> Result<BlockId, Errno> {
        self.block_of(&[], length)
    }

    /// A new block that begins with `bytes` and is zero up to `length`, or as long
    /// as `bytes` if that is longer.
    pub fn block_of(&mut self, bytes: &[u8], length: usize) -> Result<BlockId, Errno> {
        let length = length.max(bytes.len());
        if length > MAX_BLOCK || self.count >= BLOCKS {
            return Err(Errno::ENOMEM);
        }
        let slot = self.count;
        self.lengths[slot] = length;
        self.count += 1;
        // SAFETY: the rounded length is at most `MAX_BLOCK`, a multiple of 8, so the
        // range lies in the slot; `self` is borrowed mutably, so no other slice of
        // it lives; any byte is a valid u8.
        let whole = unsafe {
            let start = self.start(slot).as_ptr();
            std::slice::from_raw_parts_mut(start, length.next_multiple_of(8))
        };
        let (head, tail) = whole.split_at_mut(bytes.len());
        head.copy_from_slice(bytes);
        tail.fill(0);
        // CAST: below `BLOCKS`.
        Ok(BlockId(slot as u8))
    }

    /// How many blocks there are.
    pub fn blocks(&self) -> usize {
        self.count
    }

    /// The block's bytes; none if it is not of this frame.
    pub fn bytes(&self, id: BlockId) -> &[u8] {
        let Some(slot) = self.slot(id) else { return &[] };
        // SAFETY: `length` bytes from the block's start lie in its slot and were
        // written by `block_of`; whoever would write them needs `self` mutably.
        unsafe { std::slice::from_raw_parts(self.start(slot).as_ptr(), self.lengths[slot]) }
    }

    /// The block's bytes; none if it is not of this frame.
    pub fn bytes_mut(&mut self, id: BlockId) -> &mut [u8] {
        let Some(slot) = self.slot(id) else { return &mut [] };
        // SAFETY: as in `bytes`, and `self` is borrowed mutably for as long as the
        // slice lives.
        unsafe { std::slice::from_raw_parts_mut(self.start(slot).as_ptr(), self.lengths[slot]) }
    }

    /// Writes the address of block `to` at `offset` in block `from`; EFAULT if its
    /// 8 bytes are not within the block, or `to` is not of this frame.
    pub fn point(&mut self, from: BlockId, offset: usize, to: BlockId) -> Result<(), Errno> {
        let address = self.address(to).ok_or(Errno::EFAULT)?;
        self.write_address(from, offset, address)
    }

    /// Writes the address of memory that the call registers with RM at `offset` in block
    /// `from`; EFAULT if its 8 bytes are not within the block.
    pub fn register(
        &mut self,
        from: BlockId,
        offset: usize,
        memory: Registered,
    ) -> Result<(), Errno> {
        self.write_address(from, offset, memory.address())?;
        self.registered = Some(memory);
        Ok(())
    }

    fn write_address(&mut self, from: BlockId, offset: usize, address: u64) -> Result<(), Errno> {
        let end = offset.checked_add(8).ok_or(Errno::EFAULT)?;
        let field = self.bytes_mut(from).get_mut(offset..end).ok_or(Errno::EFAULT)?;
        field.copy_from_slice(&address.to_le_bytes());
        Ok(())
    }

    /// The memory at `address` if it is just that which the call registers: how a simulated
    /// driver pins it.
    pub fn registered(&self, address: u64, length: u64) -> Option<&Registered> {
        let whole = length.checked_next_multiple_of(PAGE as u64)?;
        let here = |memory: &&Registered| (memory.address(), memory.length()) == (address, whole);
        self.registered.as_ref().filter(here)
    }

    /// Where the block is, as the driver sees it.
    pub fn address(&self, id: BlockId) -> Option<u64> {
        let start = self.start(self.slot(id)?);
        // The driver will write through this number, so the provenance is exposed.
        Some(start.as_ptr().expose_provenance() as u64)
    }

    /// What to give the ioctl: block 0, or null if there is none.
    pub fn argument(&mut self) -> *mut c_void {
        if self.count == 0 {
            return std::ptr::null_mut();
        }
        self.start(0).as_ptr().cast()
    }

    /// The `length` bytes at `address` if they lie within one block of this frame:
    /// how a simulated driver follows a pointer that it found.
    pub fn follow(&mut self, address: u64, length: usize) -> Option<&mut [u8]> {
        let length64 = u64::try_from(length).ok()?;
        let stop = address.checked_add(length64)?;
        // CAST: `count` is at most `BLOCKS`.
        let id = (0..self.count as u8).map(BlockId).find(|&id| {
            let size = self.bytes(id).len() as u64;
            self.address(id).is_some_and(|start| address >= start && stop <= start + size)
        })?;
        let start = usize::try_from(address - self.address(id)?).ok()?;
        self.bytes_mut(id).get_mut(start..start.checked_add(length)?)
    }

    fn slot(&self, id: BlockId) -> Option<usize> {
        Some(usize::from(id.0)).filter(|&slot| slot < self.count)
    }

    /// Where the slot's block begins: its end rounded up to 8 is the slot's.
    fn start(&self, slot: usize) -> NonNull<u8> {
        let rounded = self.lengths[slot].next_multiple_of(8);
        // SAFETY: `rounded` is at most `MAX_BLOCK`, so this is within the slot.
        unsafe { self.scratch.end(slot).sub(rounded) }
    }
}

impl Drop for Frame<'_> {
    fn drop(&mut self) {
        for slot in 0..self.count {
            self.scratch.give_back(slot, self.lengths[slot]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scratch() -> Scratch {
        Scratch::new().expect("8 MiB of address space")
    }

    #[test]
    fn a_block_is_zero_whatever_the_last_call_left() {
        let mut scratch = scratch();
        for length in [1, 7, 8, 4096, 100_000, MAX_BLOCK] {
            let mut frame = scratch.frame();
            let id = frame.block(length).unwrap();
            assert!(frame.bytes(id) == vec![0; length], "{length}");
            frame.bytes_mut(id).fill(0xff);
        }
    }

    #[test]
    fn a_block_begins_with_its_bytes_and_is_zero_to_its_end() {
        let mut scratch = scratch();
        scratch.frame().block_of(&[0xff; 64], 0).unwrap();
        let mut frame = scratch.frame();
        let id = frame.block_of(&[1, 2, 3], 6).unwrap();
        assert_eq!(frame.bytes(id), [1, 2, 3, 0, 0, 0]);
    }

    #[test]
    fn a_block_too_long_and_a_block_too_many_are_refused() {
        let mut scratch = scratch();
        let mut frame = scratch.frame();
        assert_eq!(frame.block(MAX_BLOCK + 1), Err(Errno::ENOMEM));
        for _ in 0..BLOCKS {
            frame.block(MAX_BLOCK).unwrap();
        }
        assert_eq!(frame.block(0), Err(Errno::ENOMEM));
        assert_eq!(frame.blocks(), BLOCKS);
    }

    #[test]
    fn a_frame_follows_only_what_lies_in_one_of_its_blocks() {
        let mut scratch = scratch();
        let mut frame = scratch.frame();
        let argument = frame.block(32).unwrap();
        let params = frame.block_of(&[7; 12], 0).unwrap();
        frame.point(argument, 16, params).unwrap();
        let address = u64::from_le_bytes(frame.bytes(argument)[16..24].try_into().unwrap());
        assert_eq!(frame.follow(address, 12), Some(&mut [7; 12][..]));
        assert_eq!(frame.follow(address + 4, 8), Some(&mut [7; 8][..]));
        assert_eq!(frame.follow(address, 13), None);
        assert_eq!(frame.follow(address - 1, 2), None);
        assert_eq!(frame.follow(u64::MAX, 2), None);
        assert_eq!(frame.follow(0x7fff_dead_beef, 1), None);
        assert_eq!(frame.follow(0, 0), None);
        drop(frame);
        assert_eq!(scratch.frame().follow(address, 12), None);
    }

    #[test]
    fn a_pointer_that_does_not_fit_is_not_written() {
        let mut scratch = scratch();
        let mut frame = scratch.frame();
        let block = frame.block(16).unwrap();
        assert_eq!(frame.point(block, 9, block), Err(Errno::EFAULT));
        assert_eq!(frame.point(block, usize::MAX, block), Err(Errno::EFAULT));
        assert_eq!(frame.point(block, 0, BlockId(1)), Err(Errno::EFAULT));
        assert_eq!(frame.point(BlockId(9), 0, block), Err(Errno::EFAULT));
        assert_eq!(frame.bytes(block), [0; 16]);
        assert!(frame.bytes(BlockId(1)).is_empty());
    }

    /// What the driver's `copy_to_user` meets: the kernel writes for us, as RM does.
    #[test]
    #[cfg(not(miri))]
    fn a_copy_past_the_end_of_a_block_faults() {
        use std::os::fd::AsRawFd;
        let zero = std::fs::File::open("/dev/zero").unwrap();
        let fd = zero.as_raw_fd();
        let mut scratch = scratch();
        let mut frame = scratch.frame();
        for length in [0, 8, 32, 4096, MAX_BLOCK] {
            let id = frame.block(length).unwrap();
            let address = frame.address(id).unwrap() as usize;
            let end = std::ptr::with_exposed_provenance_mut::<c_void>(address + length);
            // SAFETY: the kernel checks the address it writes to; the page that it
            // finds there is a guard page, which no reference covers.
            let read = unsafe { nix::libc::read(fd, end, 1) };
            assert_eq!((read, Errno::last()), (-1, Errno::EFAULT), "{length}");
        }
    }

    #[test]
    #[cfg(not(miri))]
    fn memory_of_a_large_block_is_given_back() {
        let resident = |scratch: &Scratch| {
            let mut pages = [0_u8; STRIDE / PAGE];
            // SAFETY: one byte for each page of the first slot's stride.
            let done = unsafe {
                let base = scratch.base.as_ptr().cast();
                nix::libc::mincore(base, STRIDE, pages.as_mut_ptr())
            };
            assert_eq!(done, 0);
            pages.iter().filter(|&&page| page & 1 != 0).count() * PAGE
        };
        let mut scratch = scratch();
        let mut frame = scratch.frame();
        let id = frame.block(1 << 20).unwrap();
        frame.bytes_mut(id).fill(1);
        drop(frame);
        assert!(resident(&scratch) <= KEPT);
    }
}
