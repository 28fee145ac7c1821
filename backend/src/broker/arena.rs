//! The arena: one memory file, placed in the window once, that system memory comes from.
//!
//! Workers take ranges of it and register them with RM in place of system memory that RM
//! would allocate, so that the guest reaches it without a placement of its own. The table
//! is the broker's. A range is taken until two have let go of it: RM, which its worker
//! tells or the kernel when the worker is gone, and the guest, which no longer maps it.
//!
//! INVARIANT: a range that nobody has reads zero. Its pages go back to the host with its
//! last holder, before it can be taken again.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::io;
use std::sync::{Mutex, MutexGuard};

use nix::fcntl::{fallocate, FallocateFlags};

use super::ranges::{first_fit, PAGE};
use crate::errno::Errno;
use crate::sync::lock;
use crate::transport::link::FIRST_VIEW;
use crate::transport::shared::sealed_file;

/// Ranges begin at multiples of this: RM maps what lies so with large pages of the card.
const GRAIN: u64 = 64 << 10;
/// Views at most: as many as guests could map files.
const MAX_VIEWS: usize = 1 << 17;
/// Holders of one range at most.
const MAX_HOLDERS: usize = 1024;

/// A part of the file that somebody has.
#[derive(Debug)]
struct Range {
    /// Who took it, and is counted for it.
    worker: u16,
    length: u64,
    /// Workers by whom RM may have its pages: each lives and has not given it back. One is
    /// there as often as the range was handed to it.
    holders: Vec<u16>,
    /// How often the guest maps it.
    views: u32,
}

#[derive(Debug, Default)]
struct Table {
    /// The window shows the file.
    placed: bool,
    ranges: BTreeMap<u64, Range>,
    /// Which range a view of a worker's is of.
    views: HashMap<(u16, u32), u64>,
}

/// The arena of one guest.
#[derive(Debug)]
pub struct Arena {
    file: File,
    size: u64,
    per_process: u64,
    table: Mutex<Table>,
}

/// Somebody's message that contradicts the table.
#[derive(Debug, PartialEq, Eq)]
pub struct NotYours;

impl Arena {
    /// A file of `size` bytes, whole pages, of which a process has `per_process` at most.
    pub fn create(size: u64, per_process: u64) -> io::Result<Self> {
        let file = sealed_file("nvguest-arena", size)?;
        Ok(Self { file, size, per_process, table: Mutex::default() })
    }

    /// Bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The file.
    pub fn file(&self) -> &File {
        &self.file
    }

    fn table(&self) -> MutexGuard<'_, Table> {
        lock(&self.table)
    }

    /// Whether the window shows the file, and ranges can be taken.
    pub fn is_placed(&self) -> bool {
        self.table().placed
    }

    /// Notes that the window shows the file.
    pub fn placed(&self) {
        self.table().placed = true;
    }

    /// A range of zeroes for `worker`. ENOMEM where the guest or the process has had its
    /// share.
    pub fn take(&self, worker: u16, length: u64) -> Result<u64, Errno> {
        if length == 0 || length % PAGE != 0 {
            return Err(Errno::EINVAL);
        }
        let mut table = self.table();
        if !table.placed {
            return Err(Errno::ENODEV);
        }
        let own = table.ranges.values().filter(|range| range.worker == worker);
        let had: u64 = own.map(|range| range.length).sum();
        let left = self.per_process.saturating_sub(had);
        let taken = table.ranges.iter().map(|(&at, range)| (at, range.length));
        let at = first_fit(taken, 0..self.size, length, GRAIN).filter(|_| length <= left);
        let at = at.ok_or(Errno::ENOMEM)?;
        table.ranges.insert(at, Range { worker, length, holders: vec![worker], views: 0 });
        Ok(at)
    }

    /// RM has let go of a range.
    pub fn give(&self, worker: u16, at: u64) -> Result<(), NotYours> {
        let mut table = self.table();
        let holders = &mut table.held(worker, at)?.holders;
        let place = holders.iter().position(|&holder| holder == worker).ok_or(NotYours)?;
        holders.swap_remove(place);
        self.settle(table, at);
        Ok(())
    }

    /// A range of `worker` is another's too, which gives it back by itself: RM has it for
    /// both. Its length.
    pub fn share(&self, worker: u16, at: u64, other: u16) -> Result<u64, NotYours> {
        let mut table = self.table();
        let range = table.held(worker, at)?;
        if range.holders.len() >= MAX_HOLDERS {
            return Err(NotYours);
        }
        range.holders.push(other);
        Ok(range.length)
    }

    /// The guest is about to be told of a range by the number `view`.
    pub fn show(&self, worker: u16, at: u64, view: u32) -> Result<(), NotYours> {
        let mut table = self.table();
        if view < FIRST_VIEW || table.views.len() >= MAX_VIEWS {
            return Err(NotYours);
        }
        table.held(worker, at)?;
        if table.views.contains_key(&(worker, view)) {
            return Err(NotYours);
        }
        table.views.insert((worker, view), at);
        table.held(worker, at)?.views += 1;
        Ok(())
    }

    /// The guest has let go of what it was told of by the number `view`.
    pub fn hide(&self, worker: u16, view: u32) -> Result<(), NotYours> {
        let mut table = self.table();
        let at = table.views.remove(&(worker, view)).ok_or(NotYours)?;
        if let Some(range) = table.ranges.get_mut(&at) {
            range.views -= 1;
        }
        self.settle(table, at);
        Ok(())
    }

    /// The kernel has taken back all that a dead `worker` had of RM. What the guest still
    /// maps of its ranges is empty, and stays taken until the guest has let go.
    pub fn buried(&self, worker: u16) {
        let mut gone = Vec::new();
        for (&at, range) in &mut self.table().ranges {
            let before = range.holders.len();
            range.holders.retain(|&holder| holder != worker);
            if before > 0 && range.holders.is_empty() {
                gone.push((at, range.length));
            }
        }
        for (at, length) in gone {
            self.empty(at, length);
            self.settle(self.table(), at);
        }
    }

    /// Nobody has anything any more: the guest begins anew, and so does the window.
    pub fn clear(&self) {
        let mut table = self.table();
        self.empty(0, self.size);
        *table = Table::default();
    }

    /// Ranges that are taken, and their bytes.
    pub fn usage(&self) -> (usize, u64) {
        let table = self.table();
        (table.ranges.len(), table.ranges.values().map(|range| range.length).sum())
    }

    /// A range that nobody has any more is emptied and can be taken again.
    fn settle(&self, table: MutexGuard<'_, Table>, at: u64) {
        let free =
            table.ranges.get(&at).filter(|range| range.holders.is_empty() && range.views == 0);
        let Some(length) = free.map(|range| range.length) else { return };
        // Emptying takes its time, and nobody but us can find the range meanwhile.
        drop(table);
        self.empty(at, length);
        self.table().ranges.remove(&at);
    }

    /// Gives pages back to the host. What RM pinned of them, if it still does, is no longer
    /// the file's.
    fn empty(&self, at: u64, length: u64) {
        let punch = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        // CAST: below the size, which is an offset of a file.
        if let Err(error) = fallocate(&self.file, punch, at as i64, length as i64) {
            tracing::error!(%error, at, length, "memory of the arena could not be emptied");
        }
    }
}

impl Table {
    /// A range that `worker` has and has not given back.
    fn held(&mut self, worker: u16, at: u64) -> Result<&mut Range, NotYours> {
        let range = self.ranges.get_mut(&at);
        range.filter(|range| range.holders.contains(&worker)).ok_or(NotYours)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;

    const SIZE: u64 = 1 << 20;

    fn arena() -> Arena {
        let arena = Arena::create(SIZE, SIZE / 2).unwrap();
        arena.placed();
        arena
    }

    fn write(arena: &Arena, at: u64, length: u64) {
        arena.file.write_all_at(&vec![0xaa; length as usize], at).unwrap();
    }

    fn is_zero(arena: &Arena, at: u64, length: u64) -> bool {
        let mut bytes = vec![1; length as usize];
        arena.file.read_exact_at(&mut bytes, at).unwrap();
        bytes.iter().all(|&byte| byte == 0)
    }

    #[test]
    fn nothing_is_taken_before_the_window_shows_it() {
        let arena = Arena::create(SIZE, SIZE).unwrap();
        assert_eq!(arena.take(1, 8192), Err(Errno::ENODEV));
        arena.placed();
        assert_eq!(arena.take(1, 8192), Ok(0));
        arena.clear();
        assert_eq!(arena.take(1, 8192), Err(Errno::ENODEV));
    }

    #[test]
    fn a_process_has_its_share_and_no_more() {
        let arena = arena();
        assert_eq!(arena.take(1, SIZE / 2), Ok(0));
        assert_eq!(arena.take(1, 4096), Err(Errno::ENOMEM));
        assert_eq!(arena.take(2, SIZE / 2), Ok(SIZE / 2));
        assert_eq!(arena.take(3, 4096), Err(Errno::ENOMEM));
        for length in [0, 1, u64::MAX] {
            assert_eq!(arena.take(1, length), Err(Errno::EINVAL));
        }
    }

    #[test]
    fn a_range_is_taken_until_both_rm_and_the_guest_have_let_go() {
        let arena = arena();
        for rm_first in [true, false] {
            let at = arena.take(1, 8192).unwrap();
            arena.show(1, at, FIRST_VIEW).unwrap();
            write(&arena, at, 8192);
            let steps: [&dyn Fn(); 2] =
                [&|| arena.give(1, at).unwrap(), &|| arena.hide(1, FIRST_VIEW).unwrap()];
            steps[usize::from(!rm_first)]();
            assert_eq!(arena.usage(), (1, 8192));
            assert!(!is_zero(&arena, at, 8192), "its contents stay");
            steps[usize::from(rm_first)]();
            assert_eq!(arena.usage(), (0, 0));
            assert!(is_zero(&arena, at, 8192));
        }
    }

    #[test]
    fn a_dead_workers_range_is_empty_at_once_and_free_when_the_guest_lets_go() {
        let arena = arena();
        let (shown, other) = (arena.take(1, 8192).unwrap(), arena.take(1, 8192).unwrap());
        arena.show(1, shown, FIRST_VIEW).unwrap();
        write(&arena, shown, 8192);
        write(&arena, other, 8192);
        arena.buried(1);
        assert_eq!(arena.usage(), (1, 8192));
        assert!(is_zero(&arena, 0, SIZE));
        write(&arena, shown, 8192);
        assert_eq!(arena.take(2, 8192), Ok(other), "not what the guest may still reach");
        arena.hide(1, FIRST_VIEW).unwrap();
        assert!(is_zero(&arena, shown, 8192), "nor what it wrote there since");
        assert_eq!(arena.take(2, 8192), Ok(shown));
    }

    #[test]
    fn a_shared_range_is_taken_until_every_worker_has_let_go() {
        let arena = arena();
        let at = arena.take(1, 8192).unwrap();
        write(&arena, at, 8192);
        assert_eq!(arena.share(2, at, 3), Err(NotYours), "it is not that one's");
        assert_eq!(arena.share(1, at, 2), Ok(8192));
        assert_eq!(arena.share(1, at, 2), Ok(8192), "once more");
        arena.show(2, at, FIRST_VIEW).unwrap();
        arena.buried(1);
        arena.give(2, at).unwrap();
        arena.hide(2, FIRST_VIEW).unwrap();
        assert!(!is_zero(&arena, at, 8192), "its contents stay");
        arena.give(2, at).unwrap();
        assert_eq!((arena.usage(), is_zero(&arena, at, 8192)), ((0, 0), true));
    }

    #[test]
    fn a_worker_says_nothing_of_anothers_range() {
        let arena = arena();
        let at = arena.take(1, 8192).unwrap();
        arena.show(1, at, FIRST_VIEW).unwrap();
        assert_eq!(arena.give(2, at), Err(NotYours));
        assert_eq!(arena.give(1, at + 4096), Err(NotYours));
        assert_eq!(arena.show(2, at, FIRST_VIEW), Err(NotYours));
        assert_eq!(arena.show(1, at, FIRST_VIEW), Err(NotYours), "twice");
        assert_eq!(arena.show(1, at, 7), Err(NotYours), "the window's number");
        assert_eq!(arena.hide(2, FIRST_VIEW), Err(NotYours));
        assert_eq!(arena.usage(), (1, 8192));
        arena.give(1, at).unwrap();
        assert_eq!(arena.give(1, at), Err(NotYours), "twice");
        assert_eq!(arena.show(1, at, FIRST_VIEW + 1), Err(NotYours), "given back");
    }

    #[derive(Clone, Debug)]
    enum Step {
        Take(u16, u64),
        Give(u16, u64),
        Show(u16, u64, u32),
        Hide(u16, u32),
        Share(u16, u64, u16),
        Bury(u16),
    }

    fn step() -> impl Strategy<Value = Step> {
        let (worker, at, view) = (1..4_u16, 0..SIZE / GRAIN, 0..4_u32);
        prop_oneof![
            (worker.clone(), 1..80_u64).prop_map(|(w, pages)| Step::Take(w, pages * PAGE)),
            (worker.clone(), at.clone()).prop_map(|(w, at)| Step::Give(w, at * GRAIN)),
            (worker.clone(), at, view.clone()).prop_map(|(w, at, v)| Step::Show(
                w,
                at * GRAIN,
                FIRST_VIEW + v
            )),
            (worker.clone(), view).prop_map(|(w, v)| Step::Hide(w, FIRST_VIEW + v)),
            (worker.clone(), 0..SIZE / GRAIN, worker.clone())
                .prop_map(|(w, at, other)| Step::Share(w, at * GRAIN, other)),
            worker.prop_map(Step::Bury),
        ]
    }

    proptest! {
        #[test]
        fn ranges_never_overlap_and_are_zero_when_taken(
            steps in proptest::collection::vec(step(), 0..64),
        ) {
            let arena = arena();
            for step in steps {
                match step {
                    Step::Take(worker, length) => {
                        let Ok(at) = arena.take(worker, length) else { continue };
                        prop_assert!(is_zero(&arena, at, length));
                        write(&arena, at, length);
                    }
                    Step::Give(worker, at) => drop(arena.give(worker, at)),
                    Step::Show(worker, at, view) => drop(arena.show(worker, at, view)),
                    Step::Hide(worker, view) => drop(arena.hide(worker, view)),
                    Step::Share(worker, at, other) => drop(arena.share(worker, at, other)),
                    Step::Bury(worker) => arena.buried(worker),
                }
                let table = arena.table();
                let mut end = 0;
                for (&at, range) in &table.ranges {
                    prop_assert!(at >= end && at % GRAIN == 0);
                    prop_assert!(!range.holders.is_empty() || range.views > 0, "what nobody has is free");
                    end = at + range.length;
                }
                prop_assert!(end <= SIZE);
                let shown: u32 = table.ranges.values().map(|range| range.views).sum();
                prop_assert_eq!(shown as usize, table.views.len());
            }
        }
    }
}
