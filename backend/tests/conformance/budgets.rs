//! What a guest has of the card: its memory, and its time.

use std::time::Duration;

use nix::sys::signal::{kill, Signal};
use nix::unistd::Pid;
use nvguest_frontend::backend::wait_until;
use nvguest_frontend::rm::Client;
use nvguest_frontend::Options;
use rmclient::abi::{class, control};
use rmclient::Place;
use zerocopy::IntoBytes;

use crate::common::{pair_in, Pair, LONG};

const MIB: u64 = 1 << 20;
const BUDGET: u64 = 256 * MIB;
const NO_MEMORY: &str = "RM's status is 0x51";

/// `NV2080_CTRL_FB_INFO_INDEX_*`.
const RAM_SIZE: u32 = 7;
const TOTAL_RAM_SIZE: u32 = 8;
const HEAP_SIZE: u32 = 9;
const BUS_WIDTH: u32 = 0xb;
const HEAP_FREE: u32 = 0x16;
const USABLE_RAM_SIZE: u32 = 0x20;

/// A guest with the budget, on a card that has four times as much.
fn pair(args: &[&str]) -> Pair {
    on_large_card(&[&["--vram=256M"], args].concat())
}

fn on_large_card(args: &[&str]) -> Pair {
    pair_in(args, &[("NVGUEST_SIM_MEMORY", "1G")], Options::default())
}

fn client(pair: &Pair, tgid: u32) -> Client {
    Client::new(&pair.guest.process(tgid)).unwrap()
}

fn used(pair: &Pair) -> u64 {
    pair.backend.status().unwrap()["vram"]["used"].as_u64().unwrap()
}

fn comes_to(pair: &Pair, bytes: u64) {
    let _ = wait_until(LONG, || used(pair) == bytes);
    assert_eq!(used(pair), bytes);
}

/// Allocates until RM has no more; bytes.
fn fill(pair: &Pair, client: &Client, size: u64) -> u64 {
    let mut sum = 0;
    for count in 0.. {
        match client.memory(Place::Video, size) {
            Ok(_) => sum += size,
            Err(error) => {
                assert!(error.to_string().ends_with(NO_MEMORY), "{error}");
                return sum;
            }
        }
        // To ask takes longer than to allocate.
        let asked = size < MIB && count % 64 != 0;
        assert!(asked || used(pair) <= BUDGET, "never more than the budget");
    }
    unreachable!("it ends when there is no more")
}

#[test]
fn a_guest_allocates_up_to_its_budget_and_not_beyond() {
    for size in [3 * MIB, 16 * MIB, 250 * MIB] {
        let pair = pair(&[]);
        let client = client(&pair, 100);
        let mut sum = fill(&pair, &client, size);
        assert_eq!(used(&pair), sum);
        sum += fill(&pair, &client, 2 * MIB);
        assert!(sum > BUDGET - BUDGET / 100 - 2 * MIB, "{size}: {sum}");
        sum += fill(&pair, &client, 64 << 10);
        assert!((BUDGET - BUDGET / 100..=BUDGET).contains(&sum), "{size}: {sum}");
    }
}

#[test]
fn large_allocations_leave_a_reserve_to_small_ones() {
    let pair = pair(&[]);
    let client = client(&pair, 100);
    let large = fill(&pair, &client, 2 * MIB);
    assert_eq!(large, BUDGET - BUDGET / 128);
    assert_eq!(fill(&pair, &client, MIB), BUDGET / 128);
}

#[test]
fn more_than_there_could_ever_be_is_refused_and_counts_for_nothing() {
    let pair = pair(&[]);
    let client = client(&pair, 100);
    for size in [BUDGET, BUDGET + 1, 1 << 62, u64::MAX] {
        let refused = client.memory(Place::Video, size).unwrap_err().to_string();
        assert!(refused.ends_with(NO_MEMORY), "{size:#x}: {refused}");
        let refused = client.heap_with(0, size).err().unwrap().to_string();
        assert!(refused.ends_with(NO_MEMORY), "{size:#x}: {refused}");
    }
    assert_eq!(used(&pair), 0);
    let objects = pair.backend.status().unwrap()["shares"]["objects"]["held"].clone();
    client.memory(Place::System, 2 * BUDGET).unwrap();
    assert_eq!(used(&pair), 0, "system memory is none of the card's");
    assert!(objects.as_u64().unwrap() < 1000);
    let refusals = pair.backend.status().unwrap()["refusals"].to_string();
    assert!(refusals.contains("\"limit\",\"what\":\"class 0x40\""), "{refusals}");
}

#[test]
fn a_fork_gets_no_fresh_budget() {
    let pair = pair(&[]);
    let clients: Vec<_> = (100..108).map(|tgid| client(&pair, tgid)).collect();
    let sum: u64 = clients.iter().map(|client| fill(&pair, client, 8 * MIB).min(64 * MIB)).sum();
    assert!(sum <= BUDGET);
    assert!(used(&pair) >= BUDGET - 8 * MIB - BUDGET / 128);
    assert_eq!(fill(&pair, &clients[7], 8 * MIB), 0);
}

#[test]
fn what_is_counted_is_what_the_card_has_given() {
    let pair = pair(&[]);
    let (one, other) = (client(&pair, 100), client(&pair, 200));
    let card = || {
        let [size, free] = one.fb_info([HEAP_SIZE, HEAP_FREE]).unwrap();
        u64::from(size - free) << 10
    };
    assert_eq!((card(), used(&pair)), (0, 0));
    // Sizes that RM rounds up.
    let memory = one.memory(Place::Video, 100).unwrap();
    other.memory(Place::Video, 5 * MIB + 1).unwrap();
    let heap = other.heap_with(0, 3 * MIB + 7).unwrap();
    assert_eq!(card(), used(&pair));
    one.free(one.device, memory).unwrap();
    other.free(other.device, heap.memory).unwrap();
    comes_to(&pair, card());
    assert_eq!(used(&pair), 5 * MIB + (64 << 10));
}

#[test]
fn memory_goes_back_with_its_parents() {
    let pair = pair(&[]);
    let client = client(&pair, 100);
    for top in [client.device, client.root] {
        let _ = client.memory(Place::Video, 8 * MIB);
        client.heap_with(0, 8 * MIB).ok();
        client.free(client.root, top).unwrap();
        comes_to(&pair, 0);
    }
}

#[test]
fn a_duplicate_counts_nothing_and_keeps_its_memory() {
    let pair = pair(&[]);
    let process = pair.guest.process(100);
    let (one, other) = (Client::new(&process).unwrap(), Client::new(&process).unwrap());
    let memory = one.memory(Place::Video, 8 * MIB).unwrap();
    let (status, again) = other.duplicate(&one, memory).unwrap();
    assert_eq!((status, used(&pair)), (0, 8 * MIB));
    let (status, third) = one.duplicate(&other, again).unwrap();
    assert_eq!((status, used(&pair)), (0, 8 * MIB));
    one.free(one.device, memory).unwrap();
    other.free(other.device, again).unwrap();
    assert_eq!(used(&pair), 8 * MIB);
    one.free(one.device, third).unwrap();
    comes_to(&pair, 0);
}

#[test]
fn no_process_keeps_memory_that_another_is_charged_for() {
    let pair = pair(&[]);
    let (one, other) = (client(&pair, 100), client(&pair, 200));
    let memory = one.memory(Place::Video, 8 * MIB).unwrap();
    let (status, _) = other.duplicate(&one, memory).unwrap();
    // NV_ERR_INSUFFICIENT_PERMISSIONS
    assert_eq!(status, 0x1b);
}

#[test]
fn memory_goes_back_when_its_file_is_closed() {
    let pair = pair(&[]);
    let process = pair.guest.process(100);
    let (one, other) = (Client::new(&process).unwrap(), Client::new(&process).unwrap());
    one.memory(Place::Video, 8 * MIB).unwrap();
    other.memory(Place::Video, 16 * MIB).unwrap();
    one.ctl.close().unwrap();
    comes_to(&pair, 16 * MIB);
    other.ctl.close().unwrap();
    comes_to(&pair, 0);
}

#[test]
fn memory_of_a_killed_worker_is_the_guest_s_again() {
    let pair = pair(&[]);
    let (one, other) = (client(&pair, 100), client(&pair, 200));
    fill(&pair, &one, 8 * MIB);
    assert_eq!(fill(&pair, &other, 8 * MIB), 0);
    kill(Pid::from_raw(pair.backend.worker_of(100).unwrap()), Signal::SIGKILL).unwrap();
    comes_to(&pair, 0);
    assert!(fill(&pair, &other, 8 * MIB) > 0);
}

#[test]
fn without_a_budget_memory_is_counted_and_not_refused() {
    let pair = on_large_card(&[]);
    let client = client(&pair, 100);
    client.memory(Place::Video, 2 * BUDGET).unwrap();
    let vram = pair.backend.status().unwrap()["vram"].clone();
    assert_eq!(vram["used"], 2 * BUDGET);
    assert!(vram["budget"].is_null());
}

#[test]
fn a_budget_is_no_card_unless_it_is_to_be_one() {
    let pair = pair(&[]);
    let client = client(&pair, 100);
    let [size, free] = client.fb_info([RAM_SIZE, HEAP_FREE]).unwrap();
    assert!(u64::from(size) << 10 > BUDGET && u64::from(free) << 10 > BUDGET);
}

#[test]
fn every_way_to_ask_shows_the_budget_as_the_card() {
    let pair = pair(&["--vram-mode=profile"]);
    let (one, other) = (client(&pair, 100), client(&pair, 200));
    let kib = |bytes: u64| u32::try_from(bytes >> 10).unwrap();
    let heap = BUDGET - BUDGET / 128;
    other.memory(Place::Video, 64 * MIB).unwrap();
    let sizes = [RAM_SIZE, TOTAL_RAM_SIZE, USABLE_RAM_SIZE, HEAP_SIZE, HEAP_FREE, BUS_WIDTH];
    let shown = [kib(BUDGET), kib(BUDGET), kib(BUDGET), kib(heap), kib(heap - 64 * MIB), 64];
    assert_eq!(one.fb_info(sizes).unwrap(), shown);
    for (index, value) in sizes.into_iter().zip(shown) {
        assert_eq!(one.fb_info_one(index).unwrap(), value, "{index:#x}");
    }
    let answer = one.heap_with(0, MIB).unwrap();
    assert_eq!((answer.total, answer.free), (heap, heap - 65 * MIB));
    // What is shown as free can be had.
    assert_eq!(fill(&pair, &one, 2 * MIB), (heap - 65 * MIB) / (2 * MIB) * (2 * MIB));
}

/// What the simulated card was told of slices, oldest first.
fn told(pair: &Pair) -> Vec<u64> {
    let log = pair.backend.log();
    let slices = log.lines().filter_map(|line| {
        let (_, rest) = line.split_once("simulated card: group ")?;
        rest.split(" has ").nth(1)?.split(' ').next()?.parse().ok()
    });
    slices.collect()
}

fn weighted(weight: &str) -> Pair {
    let args = [weight, "--log-level=debug", "--limits=lines=100000"];
    pair_in(&args, &[], Options::default())
}

fn group(client: &Client) -> u32 {
    client.make(client.device, class::CHANNEL_GROUP, &mut [0; 20]).unwrap()
}

fn set(client: &Client, group: u32, mut us: u64) -> u32 {
    client.control(group, control::SET_TIMESLICE, us.as_mut_bytes()).unwrap()
}

fn get(client: &Client, group: u32) -> u64 {
    let mut us = 0_u64;
    let status = client.control(group, control::GET_TIMESLICE, us.as_mut_bytes()).unwrap();
    assert_eq!(status, 0);
    us
}

#[test]
fn a_guest_of_the_default_weight_has_its_programs_slices() {
    let pair = weighted("--weight=10");
    let client = client(&pair, 100);
    let group = group(&client);
    assert_eq!((get(&client, group), told(&pair)), (1024, vec![]));
    assert_eq!(set(&client, group, 2048), 0);
    assert_eq!((get(&client, group), told(&pair)), (2048, vec![2048]));
}

#[test]
fn a_channel_group_begins_with_its_guest_s_slice_and_shows_its_own() {
    let pair = weighted("--weight=40");
    let client = client(&pair, 100);
    let group = group(&client);
    assert_eq!((get(&client, group), told(&pair)), (1024, vec![4096]));
    assert_eq!(set(&client, group, 2048), 0);
    assert_eq!((get(&client, group), told(&pair)), (2048, vec![4096, 8192]));
}

#[test]
fn no_program_takes_its_guest_more_time_than_its_weight() {
    for (weight, most) in [("--weight=10", 2048), ("--weight=20", 4096)] {
        let pair = weighted(weight);
        let client = client(&pair, 100);
        let group = group(&client);
        for us in [2048, 1_000_000, u64::MAX] {
            assert_eq!(set(&client, group, us), 0);
            assert_eq!(get(&client, group), us);
        }
        let told = told(&pair);
        assert!(told.ends_with(&[most; 3]), "{told:?}");
    }
}

#[test]
fn no_program_has_the_card_change_hands_all_the_time() {
    let pair = weighted("--weight=10");
    let client = client(&pair, 100);
    let group = group(&client);
    assert_eq!(set(&client, group, 1), 0);
    assert_eq!((get(&client, group), told(&pair)), (1, vec![100]));
}

#[test]
fn a_slice_that_rm_refuses_is_refused() {
    let pair = weighted("--weight=40");
    let client = client(&pair, 100);
    let group = group(&client);
    assert_ne!(set(&client, group, 0), 0);
    assert_eq!((get(&client, group), told(&pair)), (1024, vec![4096]));
    assert_ne!(set(&client, client.device, 5), 0);
}

#[test]
fn a_card_that_refuses_slices_is_told_of() {
    let environment = [("NVGUEST_SIM_KEEP_SLICES", "1")];
    let pair = pair_in(&["--weight=40"], &environment, Options::default());
    let client = client(&pair, 100);
    let refused = || pair.backend.status().unwrap()["slice_refused"].clone();
    assert!(refused().is_null());
    let group = group(&client);
    assert!(wait_until(LONG, || refused() == "0x56"));
    assert_eq!(get(&client, group), 1024);
    assert_eq!(set(&client, group, 2048), 0x56);
    let said = || pair.backend.log().matches("refuses time slices").count();
    assert!(wait_until(Duration::from_secs(1), || said() == 1), "{}", pair.backend.log());
}
