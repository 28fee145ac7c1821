//! Memory of this program that RM is given: it stays where it is for as long as RM has it, whatever
//! the program does, and RM refuses what is none.

use std::thread;
use std::time::{Duration, Instant};

use rmclient::abi::control;
use rmclient::sys::Mapping;
use rmclient::{io, wrong, Card, Outcome, Place, Result, Session};

use crate::hostile::Tell;

const PAGE: u64 = 4096;
const INVALID_ADDRESS: Outcome = Outcome::Status(0x1e);
const INVALID_LIMIT: Outcome = Outcome::Status(0x2e);
const NOT_SUPPORTED: Outcome = Outcome::Status(0x56);

/// `HOPPER_USERMODE_A`, whose page has the doorbell.
const USERMODE: u32 = 0xc661;
/// `HOPPER_CHANNEL_GPFIFO_A` and where its parameters and its USERD have what is needed here.
const CHANNEL: u32 = 0xc86f;
const USERD_MEMORY: usize = 0x20;
const GP_GET: usize = 0x88;
const GP_PUT: usize = 0x8c;

/// Registers `mib` MiB in many ways; `simulated`: the card is one that writes to a channel's USERD
/// without being told more than that there is work.
pub fn run(card: &Card, mib: u64, simulated: bool, tell: Tell<'_>) -> Result<()> {
    let session = Session::open(card)?;
    tell("register-whole", whole(&session, mib << 20));
    tell("register-unaligned", refused(&session, 8, PAGE, NOT_SUPPORTED));
    tell("register-endless", refused(&session, 0, 0, INVALID_LIMIT));
    tell("register-nothing", nothing(&session));
    tell("register-read-only", read_only(&session));
    tell("register-many", many(&session));
    tell("register-unmapped", unmapped(&session));
    tell("register-forked", forked(&session));
    tell("register-churn", churn(&session));
    if simulated {
        tell("register-userd", userd(&session, mib << 20));
    }
    Ok(())
}

/// Keeps `mib` MiB registered for a while.
pub fn keep(card: &Card, mib: u64, time: Duration) -> Result<String> {
    let session = Session::open(card)?;
    let memory = anonymous(mib << 20)?;
    memory.fill(7, memory.bytes());
    let object = register(&session, &memory)?;
    println!("keeping {mib} MiB registered");
    thread::sleep(time);
    free(&session, object)?;
    same(&memory, 7, "while registered")?;
    Ok(format!("{mib} MiB for {} s", time.as_secs()))
}

fn anonymous(bytes: u64) -> Result<Mapping> {
    let length = usize::try_from(bytes).expect("64-bit");
    Mapping::anonymous(length).map_err(io(format!("mapping {bytes} bytes")))
}

fn register(session: &Session, memory: &Mapping) -> Result<u32> {
    let (outcome, object) = session.register(memory.address() as u64, memory.bytes() as u64);
    outcome.ok(format!("registering {} bytes", memory.bytes())).map(|()| object)
}

fn free(session: &Session, object: u32) -> Result<()> {
    session.client.free(session.device, object).ok("freeing registered memory")
}

fn same(memory: &Mapping, seed: u64, when: &str) -> Result<()> {
    match memory.wrong(seed, memory.bytes()) {
        0 => Ok(()),
        words => wrong(format!("{words} words have changed {when}")),
    }
}

fn whole(session: &Session, bytes: u64) -> Result<String> {
    let memory = anonymous(bytes)?;
    memory.fill(1, memory.bytes());
    let began = Instant::now();
    let object = register(session, &memory)?;
    let registered = began.elapsed();
    let duplicate = session.client.duplicate(session.device, &session.client, object)?;
    same(&memory, 1, "while registered")?;
    free(session, object)?;
    let began = Instant::now();
    free(session, duplicate)?;
    let freed = began.elapsed();
    same(&memory, 1, "afterwards")?;
    Ok(format!("{} MiB in {registered:.1?}, its last object freed in {freed:.1?}", bytes >> 20))
}

/// Registers `bytes` at an offset in a page of its own.
fn refused(session: &Session, offset: u64, bytes: u64, expected: Outcome) -> Result<String> {
    let memory = anonymous(2 * PAGE)?;
    let (outcome, _) = session.register(memory.address() as u64 + offset, bytes);
    outcome.expect(expected, format!("registering {bytes} bytes at {offset} of a page"))?;
    Ok(format!("refused as {outcome}"))
}

/// An address that was a mapping's.
fn nothing(session: &Session) -> Result<String> {
    let memory = anonymous(PAGE)?;
    let address = memory.address() as u64;
    drop(memory);
    let (outcome, _) = session.register(address, PAGE);
    outcome.expect(INVALID_ADDRESS, "registering what is not mapped")?;
    Ok(format!("refused as {outcome}"))
}

/// Where the program may not write, the card may not either.
fn read_only(session: &Session) -> Result<String> {
    let memory = anonymous(PAGE)?;
    let protection = nix::sys::mman::ProtFlags::PROT_READ;
    memory.protect(0..memory.bytes(), protection).map_err(io("mprotect"))?;
    let (outcome, _) = session.register(memory.address() as u64, PAGE);
    outcome.expect(INVALID_ADDRESS, "registering what may not be written")?;
    Ok(format!("refused as {outcome}"))
}

fn many(session: &Session) -> Result<String> {
    const COUNT: usize = 256;
    let memory = anonymous(COUNT as u64 * 16 * PAGE)?;
    let place = |index: usize| memory.address() as u64 + index as u64 * 16 * PAGE;
    let register = |index: usize| {
        let (outcome, object) = session.register(place(index), 16 * PAGE);
        outcome.ok(format!("registration {index}")).map(|()| object)
    };
    memory.fill(8, memory.bytes());
    let began = Instant::now();
    let objects = (0..COUNT).map(register).collect::<Result<Vec<u32>>>()?;
    let each = began.elapsed() / COUNT as u32;
    objects.iter().rev().try_for_each(|&object| free(session, object))?;
    Ok(format!("{COUNT} of 64 KiB at a time, each in {each:.1?}"))
}

/// The memory is RM's as long as its object, whatever the program does with the addresses.
fn unmapped(session: &Session) -> Result<String> {
    let memory = anonymous(64 * PAGE)?;
    memory.fill(2, memory.bytes());
    let object = register(session, &memory)?;
    drop(memory);
    let other = anonymous(64 * PAGE)?;
    other.fill(3, other.bytes());
    free(session, object)?;
    same(&other, 3, "that are another mapping's")?;
    Ok("unmapped while RM had it".into())
}

/// A child's copy is its own.
fn forked(session: &Session) -> Result<String> {
    let memory = anonymous(16 * PAGE)?;
    memory.fill(4, memory.bytes());
    let object = register(session, &memory)?;
    let wrote = |memory: &Mapping| {
        memory.fill(5, memory.bytes());
        memory.wrong(5, memory.bytes()) == 0
    };
    let child = rmclient::sys::in_child(|| wrote(&memory)).map_err(io("fork"))?;
    child.wait().map_err(io("a child"))?;
    same(&memory, 4, "by a child")?;
    free(session, object)?;
    Ok("a child writes to its own copy".into())
}

fn churn(session: &Session) -> Result<String> {
    const ROUNDS: u64 = 500;
    for round in 0..ROUNDS {
        let memory = anonymous((round % 32 + 1) * PAGE)?;
        memory.fill(round, memory.bytes());
        let object = register(session, &memory)?;
        same(&memory, round, "while registered")?;
        free(session, object)?;
    }
    Ok(format!("{ROUNDS} times"))
}

/// A channel whose USERD is in the last page: the card moves GP_GET there.
fn userd(session: &Session, bytes: u64) -> Result<String> {
    let memory = anonymous(bytes)?;
    memory.fill(6, memory.bytes());
    let object = register(session, &memory)?;
    let last = memory.bytes() - PAGE as usize;
    let mut params = [0; 368];
    params[USERD_MEMORY..][..4].copy_from_slice(&object.to_le_bytes());
    params[0x40..0x48].copy_from_slice(&(last as u64).to_le_bytes());
    let channel = session.client.alloc(session.device, CHANNEL, Some(&mut params))?;
    let mut token = [0; 4];
    session.client.control(channel, control::WORK_TOKEN, &mut token).ok("the channel's token")?;
    let page = session.client.alloc(session.subdevice, USERMODE, Some(&mut [0; 2]))?;
    let doorbell = session.map(Place::Video, page, 65536)?;

    let word = |offset: usize| (last + offset) / 8;
    // GP_PUT is the upper half of the word that GP_GET is the lower half of.
    assert_eq!((word(GP_GET), GP_PUT), (word(GP_PUT), GP_GET + 4));
    memory.write(word(GP_GET), 9 << 32);
    doorbell.mapping.write(0x90 / 8, u32::from_le_bytes(token).into());
    let started = Instant::now();
    while memory.read(word(GP_GET)) != (9 << 32 | 9) {
        if started.elapsed().as_secs() > 10 {
            return wrong(format!("GP_GET and GP_PUT are {:#x}", memory.read(word(GP_GET))));
        }
        thread::yield_now();
    }
    Ok("the card wrote to this program's memory".into())
}
