//! Programs' memory that the host has registered, as the guest module keeps account of it.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::libc;
use nvguest_abi::rules::PAGE;

use crate::gather::{Caller, Errno, Ourselves, Pinned};
use crate::memory::GPA;
use crate::wire::{Run, MAX_REGISTRATIONS};

/// Where programs have the memory that they register.
pub const PROGRAM: u64 = 0x6000_0000_0000;

/// The registrations of a guest, and the memory that they are of.
#[derive(Debug, Default)]
pub struct Pins {
    /// Where in the guest's memory each page of the programs is, from [`PROGRAM`] on.
    table: Mutex<Vec<u64>>,
    last: AtomicU32,
    held: Mutex<BTreeSet<u32>>,
}

impl Pins {
    /// Pages of the guest's memory in the order of a program's; the program's address of them.
    pub fn map(&self, pages: impl IntoIterator<Item = usize>) -> u64 {
        let mut table = lock(&self.table);
        let first = table.len() as u64;
        table.extend(pages.into_iter().map(|at| at as u64));
        PROGRAM + first * PAGE
    }

    /// The number of the last registration.
    pub fn last(&self) -> u32 {
        self.last.load(Ordering::Acquire)
    }

    /// Makes the next registration this one.
    pub fn number_next(&self, number: u32) {
        self.last.store(number.wrapping_sub(1), Ordering::Release);
    }

    /// Registrations that the host has, as its replies said.
    pub fn held(&self) -> Vec<u32> {
        lock(&self.held).iter().copied().collect()
    }

    fn runs(&self, user: u64, pages: u32) -> Option<Vec<Run>> {
        let first = usize::try_from(user.checked_sub(PROGRAM)? / PAGE).ok()?;
        let table = lock(&self.table);
        let pages = table.get(first..first.checked_add(pages as usize)?)?;
        let run = |&at: &u64| Run { address: (GPA + at).into(), length: PAGE.into() };
        Some(pages.iter().map(run).collect())
    }
}

/// A program of the guest: its memory is this process's, but for what it registers.
pub struct Program<'g> {
    /// All other memory.
    pub own: Ourselves,
    /// What is registered.
    pub pins: &'g Pins,
}

impl Caller for Program<'_> {
    fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Errno> {
        self.own.read(from, to)
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<(), Errno> {
        self.own.write(to, from)
    }

    fn pin(&self, user: u64, pages: u32) -> Result<Pinned, Errno> {
        let registration = self.pins.last.fetch_add(1, Ordering::AcqRel) % MAX_REGISTRATIONS + 1;
        Ok(Pinned { registration, runs: self.pins.runs(user, pages).ok_or(libc::EFAULT) })
    }

    fn held(&self, registration: u32, held: bool) {
        if held {
            lock(&self.pins.held).insert(registration);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
