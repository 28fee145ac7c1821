//! Memory that a guest's program registers: whatever its guest says of it, what is mapped for RM is
//! guest memory alone, page for page what was listed.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::sync::OnceLock;

use nix::sys::memfd::{memfd_create, MFdFlags};
use vhost_user_nvguest::marshal::pages::{Offer, SideBySide};
use vhost_user_nvguest::wire::{Pages, Run};
use vhost_user_nvguest::worker::registered::pieces;
use vhost_user_nvguest::worker::start::Region;
use zerocopy::IntoBytes;

use crate::input::Input;

const PAGE: u64 = 4096;
/// Pages of each file of the guest's memory, and how many files there are.
const FILE: u64 = 32;
const FILES: usize = 3;
const MAX_RUNS: usize = 64;

/// Where the memory lies, a list of pages and what a program says that it registers.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let regions = regions(&mut input);
    if overlap(&regions) {
        return;
    }
    let (address, bytes, max) = (address(&mut input), length(&mut input), input.u32() >> 12);
    let list = list(&mut input);
    let Some((head, offer)) = Offer::parse(&list, address, bytes, max) else { return };
    assert_eq!(head, &list[..size_of::<Pages>()]);
    let Ok(runs) = offer.check() else { return };
    let sum: u64 = runs.iter().map(|run| run.length.get()).sum();
    assert_eq!((sum, sum / PAGE), (offer.length(), bytes.div_ceil(PAGE)));
    let Some(pieces) = pieces(runs, &regions, files()) else {
        assert!(runs.iter().any(|run| expected(run, &regions).is_none()), "all of it is memory");
        return;
    };
    let mapped = SideBySide::map(offer.length(), pieces).expect("few pieces of memory files");
    let expected = runs.iter().flat_map(|run| expected(run, &regions).expect("it is memory"));
    for (index, word) in expected.enumerate() {
        assert_eq!(mapped.read_u32(index as u64 * PAGE), Some(word), "page {index}");
    }
}

/// Memory files, each page of which begins with what it is.
fn files() -> &'static [OwnedFd] {
    static MEMORY: OnceLock<Vec<OwnedFd>> = OnceLock::new();
    MEMORY.get_or_init(|| (0..FILES).map(file).collect())
}

fn file(number: usize) -> OwnedFd {
    let file = File::from(memfd_create("guest", MFdFlags::MFD_CLOEXEC).expect("a memory file"));
    file.set_len(FILE * PAGE).expect("room for it");
    for page in 0..FILE {
        file.write_all_at(&word(number, page).to_le_bytes(), page * PAGE).expect("a page");
    }
    file.into()
}

fn word(file: usize, page: u64) -> u32 {
    // CAST: both are small.
    (file as u32 + 1) << 16 | page as u32
}

/// A region for each file, in no order, with holes or without; some meet.
fn regions(input: &mut Input<'_>) -> Vec<Region> {
    let region = |_| {
        let offset = input.below(FILE as usize) as u64;
        let size = 1 + input.below((FILE - offset) as usize) as u64;
        let start = match input.u8() {
            high if high & 0xe0 == 0xe0 => u64::MAX / PAGE - size,
            low => u64::from(low),
        };
        Region { address: start * PAGE, size: size * PAGE, offset: offset * PAGE }
    };
    (0..FILES).map(region).collect()
}

/// A VMM has one thing at an address.
fn overlap(regions: &[Region]) -> bool {
    let meet = |one: &Region, other: &Region| {
        one.address < other.address + other.size && other.address < one.address + one.size
    };
    let after = |index: usize| regions.iter().skip(index + 1);
    regions.iter().enumerate().any(|(index, one)| after(index).any(|other| meet(one, other)))
}

/// What the pages of a run begin with; `None` if one is not memory.
fn expected(run: &Run, regions: &[Region]) -> Option<Vec<u32>> {
    let pages = 0..run.length.get() / PAGE;
    let page = |index: u64| {
        let at = run.address.get().checked_add(index * PAGE)?;
        let found = regions.iter().enumerate().find_map(|(number, region)| {
            let inside = at.checked_sub(region.address).filter(|&inside| inside < region.size)?;
            Some((number, (region.offset + inside) / PAGE))
        });
        found.map(|(number, page)| word(number, page))
    };
    pages.map(page).collect()
}

fn address(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0..=15 => input.u64(),
        page => u64::from(page) * PAGE,
    }
}

fn length(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0..=15 => input.u64(),
        _ => u64::from(input.u16()),
    }
}

/// A list that is mostly whole.
fn list(input: &mut Input<'_>) -> Vec<u8> {
    let how = input.u8();
    if how & 0xf0 == 0xf0 {
        return input.rest().to_vec();
    }
    let strange = |input: &mut Input<'_>, bit| if how & bit == 0 { 0 } else { input.u32() };
    let head = Pages {
        registration: u32::from(input.u8()).into(),
        error: strange(input, 1).into(),
        held: strange(input, 2).into(),
        reserved: strange(input, 4).into(),
    };
    let runs: Vec<Run> = (0..input.below(MAX_RUNS)).map(|_| run_of(input)).collect();
    [head.as_bytes(), runs.as_bytes()].concat()
}

fn run_of(input: &mut Input<'_>) -> Run {
    let (page, pages) = (input.u8(), input.u8());
    let (address, length) = match pages {
        0xf8..=0xff => (input.u64(), input.u64()),
        _ => (u64::from(page) * PAGE, u64::from(pages & 15) * PAGE),
    };
    Run { address: address.into(), length: length.into() }
}
