//! The cards' memory: one sealed memory file that every worker shares.
//!
//! Its first part holds the allocator's book; behind it each card has its video memory, one after
//! the other. The book is read and written with system calls under a lock of the file itself, and
//! there are two tables of which the header names the valid one: a worker that dies leaves neither
//! a held lock nor half a table.
//!
//! Memory belongs to the open file of the client that allocated it, as in the driver. Each file
//! is an open file description of its own and holds a lock (`F_OFD_SETLK`) on the byte that is
//! its number. The kernel drops the lock with the last duplicate of the descriptor, in whatever
//! process that is; an entry whose owner's byte is not locked is nobody's, and is given away.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{fallocate, fcntl, FallocateFlags, FcntlArg, SealFlag};
use nix::libc;
use nix::sys::memfd::{memfd_create, MFdFlags};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use super::identity::{Identity, MAX_CARDS};

/// Bytes at the start of the file that hold the book.
pub const BOOK: u64 = 256 << 10;
/// What video memory is allocated in.
pub const GRANULE: u64 = 64 << 10;
/// Says that the file is a host's cards, and of which layout.
const MAGIC: u64 = u64::from_le_bytes(*b"NVGSIM02");
/// Where the two tables begin.
const TABLES: [u64; 2] = [4096, 4096 + TABLE];
/// Bytes of one.
const TABLE: u64 = 124 << 10;
/// Locked by whoever reads or writes the book.
const BOOK_LOCK: i64 = 1 << 40;
/// Plus a file's number: locked as long as the file is open anywhere.
const FILE_LOCKS: i64 = 1 << 41;

/// Start of the book.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Header {
    magic: u64,
    /// How many cards there are.
    cards: u64,
    /// Bytes of video memory that each has.
    size: u64,
    /// Files opened so far.
    files: u64,
    /// Clients made so far.
    clients: u64,
    /// Which table is valid: 0 or 1.
    table: u64,
    /// Its entries.
    count: u64,
}

impl Header {
    fn table(&self, other: bool) -> u64 {
        TABLES[usize::from((self.table == 1) != other)]
    }
}

/// A range of video memory in use. Sorted by offset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable)]
#[repr(C)]
struct Entry {
    owner: u64,
    offset: u64,
    length: u64,
}

/// A range of video memory, as an offset in the cards' file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// Where it begins in the file.
    pub offset: u64,
    /// Whole granules.
    pub length: u64,
}

/// How much video memory a card has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    /// All of it.
    pub total: u64,
    /// What is in use.
    pub used: u64,
}

/// What is asked of a card.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Which card.
    pub card: u32,
    /// Bytes.
    pub size: u64,
    /// What the offset is to be a multiple of.
    pub align: u64,
    /// Whether it is to read zero.
    pub clear: bool,
}

/// The cards' memory, made once by whoever starts the workers.
#[derive(Debug)]
pub struct SimCards;

impl SimCards {
    /// Bytes of video memory of a card where nobody says otherwise.
    pub const DEFAULT_SIZE: u64 = super::identity::VIDEO_MEMORY;

    /// The size that the environment asks for (`NVGUEST_SIM_MEMORY=1G`, of each card), or the
    /// default.
    pub fn size_from_environment() -> u64 {
        let asked = std::env::var("NVGUEST_SIM_MEMORY").ok();
        asked.and_then(|text| crate::limits::amount(&text)).unwrap_or(Self::DEFAULT_SIZE)
    }

    /// How many cards the environment asks for (`NVGUEST_SIM_CARDS=2`), up to [`MAX_CARDS`], or
    /// one.
    pub fn count_from_environment() -> u32 {
        let asked = std::env::var("NVGUEST_SIM_CARDS").ok();
        let count = asked.and_then(|text| text.parse().ok());
        count.filter(|count| (1..=MAX_CARDS).contains(count)).unwrap_or(1)
    }

    /// The host's cards as the environment wants them: in the memory file that
    /// `NVGUEST_SIM_HOST=/proc/PID/fd/N` names, which the first backend makes a host's and others
    /// share, or else in one of this backend's own.
    pub fn from_environment(count: u32) -> io::Result<OwnedFd> {
        let size = Self::size_from_environment();
        let Some(path) = std::env::var_os("NVGUEST_SIM_HOST") else {
            return Self::create(count, size);
        };
        let file = File::options().read(true).write(true).open(path)?;
        fcntl(&file, FcntlArg::F_OFD_SETLKW(&range_lock(libc::F_WRLCK, BOOK_LOCK, 0)?))?;
        if file.metadata()?.len() == 0 {
            Self::format(&file, count, size)?;
        }
        let header: Header = read(&file, 0)?;
        if header.magic != MAGIC || header.cards != u64::from(count) {
            let text = format!("that host has {} cards, not {count}", header.cards);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        }
        // The file stays open, and workers lock their own descriptions of it.
        fcntl(&file, FcntlArg::F_OFD_SETLK(&range_lock(libc::F_UNLCK, BOOK_LOCK, 0)?))?;
        Ok(file.into())
    }

    /// Makes `count` cards with `size` bytes of video memory each; pages cost memory once they are
    /// touched. Duplicates of the descriptor go to the workers. The file can neither shrink nor
    /// grow.
    pub fn create(count: u32, size: u64) -> io::Result<OwnedFd> {
        let flags = MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING;
        let file = File::from(memfd_create("nvguest-cards", flags)?);
        Self::format(&file, count, size)?;
        Ok(file.into())
    }

    fn format(file: &File, count: u32, size: u64) -> io::Result<()> {
        let cards = u64::from(count);
        let size = size.checked_next_multiple_of(GRANULE).ok_or(io::ErrorKind::InvalidInput)?;
        let all = size.checked_mul(cards).and_then(|all| all.checked_add(BOOK));
        file.set_len(all.ok_or(io::ErrorKind::InvalidInput)?)?;
        let header = Header { magic: MAGIC, cards, size, files: 0, clients: 0, table: 0, count: 0 };
        file.write_all_at(header.as_bytes(), 0)?;
        let seals = SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL;
        fcntl(file, FcntlArg::F_ADD_SEALS(seals))?;
        Ok(())
    }
}

/// One worker's hold on the cards.
#[derive(Debug)]
pub struct Cards {
    /// A description of this worker's own: locks belong to it. The mutex keeps threads apart,
    /// which share the description.
    book: Mutex<File>,
    count: u32,
    size: u64,
}

impl Cards {
    /// Takes hold of the cards behind `fd`.
    pub fn attach(fd: OwnedFd) -> io::Result<Self> {
        let file = reopen(fd.as_fd())?;
        let header: Header = read(&file, 0)?;
        let count = u32::try_from(header.cards).ok().filter(|&count| count <= MAX_CARDS);
        let Some(count) = count.filter(|_| header.magic == MAGIC) else {
            let text = format!("the cards' file begins with {:#x}, not {MAGIC:#x}", header.magic);
            return Err(io::Error::new(io::ErrorKind::InvalidData, text));
        };
        Ok(Self { book: Mutex::new(file), count, size: header.size })
    }

    /// Who they are.
    pub fn all(&self) -> impl Iterator<Item = Identity> {
        (0..self.count).map(Identity::of)
    }

    /// Where a card's memory begins in the file.
    pub fn base(&self, card: u32) -> u64 {
        BOOK + u64::from(card) * self.size
    }

    /// Opens a file of the driver: its number, and a descriptor whose last duplicate ends it.
    pub fn open_file(&self) -> io::Result<(u64, OwnedFd)> {
        let book = self.lock()?;
        let mut header = book.header()?;
        header.files += 1;
        let file = reopen(book.file.as_fd())?;
        let lock = range_lock(libc::F_WRLCK, FILE_LOCKS, header.files)?;
        fcntl(&file, FcntlArg::F_OFD_SETLK(&lock))?;
        book.set_header(&header)?;
        Ok((header.files, file.into()))
    }

    /// A number that no other client of the cards has had.
    pub fn client_number(&self) -> io::Result<u64> {
        let book = self.lock()?;
        let mut header = book.header()?;
        header.clients += 1;
        book.set_header(&header)?;
        Ok(header.clients)
    }

    /// Allocates for `owner` the lowest range of a card that fits, memory of dead files included,
    /// and clears it if asked to; `None` if nothing fits.
    pub fn allocate(&self, owner: u64, wanted: &Wanted) -> io::Result<Option<Range>> {
        let book = self.lock()?;
        let mut entries = book.live_entries()?;
        let Some(length) = wanted.size.max(1).checked_next_multiple_of(GRANULE) else {
            return Ok(None);
        };
        let align = wanted.align.max(GRANULE).next_power_of_two();
        let (base, end) = (self.base(wanted.card), self.base(wanted.card) + self.size);
        let mut offset = base;
        let mut at = entries.partition_point(|entry| entry.offset < base);
        for entry in &entries[at..] {
            if entry.offset >= end || entry.offset >= offset && entry.offset - offset >= length {
                break;
            }
            let used = entry.offset + entry.length - base;
            offset = offset.max(base + used.next_multiple_of(align));
            at += 1;
        }
        let fits = offset.checked_add(length).is_some_and(|last| last <= end);
        let room = TABLE / size_of::<Entry>() as u64;
        if !fits || entries.len() as u64 >= room {
            book.set_entries(&entries)?;
            return Ok(None);
        }
        entries.insert(at, Entry { owner, offset, length });
        if wanted.clear {
            book.clear(offset, length)?;
        }
        book.set_entries(&entries)?;
        Ok(Some(Range { offset, length }))
    }

    /// Frees a range: the next to ask gets it.
    pub fn free(&self, owner: u64, range: Range) -> io::Result<()> {
        let book = self.lock()?;
        let mut entries = book.entries()?;
        entries.retain(|entry| (entry.owner, entry.offset) != (owner, range.offset));
        book.set_entries(&entries)
    }

    /// Makes a range belong to another file: the object that it is behind was duplicated there.
    pub fn give(&self, owner: u64, range: Range, heir: u64) -> io::Result<()> {
        let book = self.lock()?;
        let mut entries = book.entries()?;
        for entry in &mut entries {
            if (entry.owner, entry.offset) == (owner, range.offset) {
                entry.owner = heir;
            }
        }
        book.set_entries(&entries)
    }

    /// How much of a card is in use by files that are open.
    pub fn usage(&self, card: u32) -> io::Result<Usage> {
        let range = self.base(card)..self.base(card) + self.size;
        let entries = self.lock()?.live_entries()?;
        let its = entries.iter().filter(|entry| range.contains(&entry.offset));
        Ok(Usage { total: self.size, used: its.map(|entry| entry.length).sum() })
    }

    /// Reads from a card's memory, as the card does.
    pub fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.guard().read_exact_at(bytes, offset)
    }

    /// Writes to a card's memory, as the card does.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.guard().write_all_at(bytes, offset)
    }

    fn guard(&self) -> MutexGuard<'_, File> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock(&self) -> io::Result<Book<'_>> {
        let file = self.guard();
        fcntl(&*file, FcntlArg::F_OFD_SETLKW(&range_lock(libc::F_WRLCK, BOOK_LOCK, 0)?))?;
        Ok(Book { file })
    }
}

/// The book, locked.
struct Book<'a> {
    file: MutexGuard<'a, File>,
}

impl Book<'_> {
    fn header(&self) -> io::Result<Header> {
        read(&self.file, 0)
    }

    fn set_header(&self, header: &Header) -> io::Result<()> {
        self.file.write_all_at(header.as_bytes(), 0)
    }

    fn entries(&self) -> io::Result<Vec<Entry>> {
        let header = self.header()?;
        let count = header.count.min(TABLE / size_of::<Entry>() as u64);
        // CAST: bounded by the size of a table.
        let mut bytes = vec![0; count as usize * size_of::<Entry>()];
        self.file.read_exact_at(&mut bytes, header.table(false))?;
        let entries = bytes.chunks_exact(size_of::<Entry>());
        Ok(entries.filter_map(|entry| Entry::read_from_bytes(entry).ok()).collect())
    }

    /// The entries whose owner is open somewhere.
    fn live_entries(&self) -> io::Result<Vec<Entry>> {
        let mut entries = self.entries()?;
        let mut known: Option<(u64, bool)> = None;
        let mut failure = None;
        entries.retain(|entry| {
            if known.is_none_or(|(owner, _)| owner != entry.owner) {
                let open = self.is_open(entry.owner).unwrap_or_else(|error| {
                    failure = Some(error);
                    true
                });
                known = Some((entry.owner, open));
            }
            known.is_some_and(|(_, open)| open)
        });
        failure.map_or(Ok(entries), Err)
    }

    fn is_open(&self, owner: u64) -> io::Result<bool> {
        let mut lock = range_lock(libc::F_WRLCK, FILE_LOCKS, owner)?;
        fcntl(&*self.file, FcntlArg::F_OFD_GETLK(&mut lock))?;
        Ok(i32::from(lock.l_type) != libc::F_UNLCK)
    }

    fn set_entries(&self, entries: &[Entry]) -> io::Result<()> {
        let mut header = self.header()?;
        self.file.write_all_at(entries.as_bytes(), header.table(true))?;
        header.table = 1 - header.table.min(1);
        header.count = entries.len() as u64;
        self.set_header(&header)
    }

    fn clear(&self, offset: u64, length: u64) -> io::Result<()> {
        let (offset, length) = (to_offset(offset)?, to_offset(length)?);
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        Ok(fallocate(&*self.file, flags, offset, length)?)
    }
}

impl Drop for Book<'_> {
    fn drop(&mut self) {
        if let Ok(lock) = range_lock(libc::F_UNLCK, BOOK_LOCK, 0) {
            // Unlocking a range of an open file does not fail.
            let _ = fcntl(&*self.file, FcntlArg::F_OFD_SETLK(&lock));
        }
    }
}

/// A new open file description of the same memory file.
fn reopen(fd: BorrowedFd<'_>) -> io::Result<File> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    File::options().read(true).write(true).open(&path).map_err(|error| {
        io::Error::new(
            error.kind(),
            format!("{path} (simulated cards need /proc/self/fd): {error}"),
        )
    })
}

fn read<T: FromBytes + IntoBytes>(file: &File, offset: u64) -> io::Result<T> {
    let mut value = T::new_zeroed();
    file.read_exact_at(value.as_mut_bytes(), offset)?;
    Ok(value)
}

fn to_offset(value: u64) -> io::Result<i64> {
    i64::try_from(value).map_err(io::Error::other)
}

fn range_lock(kind: i32, base: i64, number: u64) -> io::Result<libc::flock> {
    Ok(libc::flock {
        // CAST: the three kinds are 0, 1 and 2.
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: base + to_offset(number)?,
        l_len: 1,
        l_pid: 0,
    })
}
