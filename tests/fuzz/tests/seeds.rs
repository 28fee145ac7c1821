//! Makes seeds: `NVGUEST_RECORD=FOLDER cargo test -p nvguest-fuzz --test seeds -- --ignored`
//! after tests that recorded into that folder. They go to `target/fuzz/seeds`;
//! `cargo xtask fuzz --keep` puts what is worth it into the corpora.

use std::path::{Path, PathBuf};

use nvguest_abi::rules::NO_OFFSET;
use nvguest_abi::FileKind::{self, Ctl, Uvm};
use nvguest_fuzz::input::{Input, Script};
use nvguest_fuzz::profiles::measured;
use vhost_user_nvguest::marshal::tests::furnish::{furnish, planted};
use vhost_user_nvguest::marshal::tests::guest::{Block, Guest, GUEST};
use vhost_user_nvguest::wire::{IoctlReq, Kind, ReqHeader};
use vhost_user_nvguest::worker::start::{HostKind, Process, Start};
use zerocopy::FromBytes;

/// The profiles that calls are made of: the newest, one of 580, an old one.
const PROFILES: [u8; 3] = [0, 9, 48];
const RM_CONTROL: u32 = 0xc020_462a;
const RM_ALLOC: u32 = 0xc030_462b;

fn folder(target: &str) -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz/seeds").join(target);
    std::fs::create_dir_all(&folder).expect("a folder");
    folder
}

fn keep(target: &str, name: &str, bytes: &[u8]) {
    std::fs::write(folder(target).join(name), bytes).expect("a file");
}

#[test]
#[ignore = "writes seeds, and tests nothing"]
fn the_seeds_are_made() {
    recorded();
    for number in PROFILES {
        controls(number);
        allocations(number);
        commands(number);
    }
    start();
    chains();
    keep("policy", "numbers", &(0..=255).collect::<Vec<u8>>());
}

/// What tests recorded: sessions for `message`, and their ioctls for `marshal`.
fn recorded() {
    let Some(folder) = std::env::var_os("NVGUEST_RECORD") else { return };
    for entry in Path::new(&folder).read_dir().expect("a folder").flatten() {
        let bytes = std::fs::read(entry.path()).expect("a file");
        let name = entry.file_name();
        let name = name.to_string_lossy();
        keep("message", &name, &bytes);
        let mut input = Input::new(&bytes);
        let mut count = 0;
        while !input.is_empty() {
            let (_, length) = (input.u16(), input.u16());
            let Ok((header, body)) = ReqHeader::read_from_prefix(input.bytes(length.into())) else {
                continue;
            };
            if header.kind.get() == Kind::Ioctl as u32 && IoctlReq::read_from_prefix(body).is_ok() {
                count += 1;
                keep("marshal", &format!("{name}-{count}"), &call(9, Ctl, body));
            }
        }
    }
}

/// An input of `marshal`.
fn call(profile: u8, kind: FileKind, body: &[u8]) -> Vec<u8> {
    Script::default().u8(profile).u8(kind as u8).u8(0).bytes(body).done()
}

/// An honest call with everything that it reaches.
fn honest(profile: u8, kind: FileKind, cmd: u32, mut argument: Vec<u8>) -> Vec<u8> {
    let rules = &measured(profile).rules;
    let mut guest =
        Guest { files: [(11, 1), (12, 2), (13, 3), (14, 4)].into(), ..Guest::default() };
    // CAST: arguments are short.
    let entry = rules.ioctl(kind, cmd, argument.len() as u32).expect("it has a layout");
    let list = rules.of(entry, &argument).to_vec();
    furnish(&mut guest, rules, &list, &mut argument);
    call(profile, kind, &guest.gather(rules, kind, cmd, &argument).body())
}

/// Controls that reach something from their parameters, and a few that do not.
fn controls(profile: u8) {
    let compiled = measured(profile);
    let allowed = compiled.controls.iter().filter(|entry| entry.verdict == 0);
    for (index, entry) in allowed.filter(|entry| entry.size.get() < 4096).enumerate() {
        let (command, size) = (entry.command.get(), entry.size.get());
        let argument = Block::new(32).u32(8, command).u64(16, GUEST).u32(24, size).0;
        let rules = compiled.rules.ioctl(Ctl, RM_CONTROL, 32).expect("it has a layout");
        let reaches = compiled.rules.of(rules, &argument).iter().any(|rule| rule.nsubs.get() > 0);
        if reaches || index % 64 == 0 {
            let name = format!("control-{profile}-{command:x}");
            keep("marshal", &name, &honest(profile, Ctl, RM_CONTROL, argument));
        }
    }
}

fn allocations(profile: u8) {
    let allowed = measured(profile).classes.iter().filter(|entry| entry.verdict == 0);
    for class in allowed.map(|entry| entry.class.get()).filter(|&class| class != 0x71) {
        let argument = Block::new(48).u32(12, class).u64(16, GUEST).0;
        let name = format!("class-{profile}-{class:x}");
        keep("marshal", &name, &honest(profile, Ctl, RM_ALLOC, argument));
    }
}

/// Escapes without cases, and commands of nvidia-uvm.
fn commands(profile: u8) {
    let compiled = measured(profile);
    for entry in compiled.escapes.iter().filter(|entry| entry.verdict == 0) {
        let (nr, size) = (entry.nr.get(), entry.size.get());
        let kind = if entry.kind == Uvm as u8 { Uvm } else { Ctl };
        let flat = compiled.rules.ioctl(kind, nr, size).filter(|e| e.select.get() == NO_OFFSET);
        if flat.is_some_and(|entry| entry.flags & 2 == 0) && entry.kind != FileKind::Gpu as u8 {
            let name = format!("escape-{profile}-{}-{nr:x}-{size}", entry.kind);
            // CAST: arguments are short.
            keep("marshal", &name, &honest(profile, kind, nr, planted(size as usize)));
        }
    }
}

/// A start message with a profile small enough to be changed, and its blob alone.
fn start() {
    let mut compiled = measured(0).clone();
    compiled.controls.truncate(8);
    compiled.classes.truncate(8);
    compiled.escapes.truncate(8);
    compiled.rules.ioctls.truncate(4);
    compiled.rules.cases.truncate(4);
    compiled.rules.rules.truncate(12);
    let blob = compiled.to_bytes();
    keep("schema", "small", &[&[0; 64][..], &blob].concat());
    let start = Start {
        worker: 7,
        host: HostKind::Sim,
        process: Process { tgid: 1234, start_ns: 5 },
        poll_us: 30,
        max_placements: 256,
        max_own_placements: 256,
        lines: 10,
        disables: 200,
        own_disables: 50,
        own_user: false,
        vram_mode: vhost_user_nvguest::budgets::VramMode::Limit,
        weight: 10,
        arena_size: 4 << 30,
        compiled: compiled.into(),
        nodes: vhost_user_nvguest::broker::nodes::Nodes::new(
            &vhost_user_nvguest::host::facts::Facts::of_sim(1),
        )
        .devices
        .into(),
    };
    keep("start", "small", &start.encode(&blob));
}

/// A queue with one request, taken and answered.
fn chains() {
    let mut memory = vec![0; 0x900];
    let mut put = |at: usize, bytes: &[u8]| memory[at..at + bytes.len()].copy_from_slice(bytes);
    let descriptor = |address: u64, length: u32, flags: u16, next: u16| {
        Script::default().u64(address).u32(length).u16(flags).u16(next).done()
    };
    put(0, &descriptor(0x600, 40, 1, 1));
    put(16, &descriptor(0x700, 64, 2, 0));
    put(32, &descriptor(0x300, 32, 4, 0));
    put(0x300, &descriptor(0x600, 40, 1, 1));
    put(0x310, &descriptor(0x700, 64, 2, 0));
    put(0x402, &2u16.to_le_bytes());
    put(0x406, &2u16.to_le_bytes());
    let queue = Script::default().u8(16).u8(4).u16(0);
    let steps =
        queue.clone().u8(5).u8(0).u16(0).u8(0).u16(0).u8(2).u16(8).u8(6).u16(0).u8(7).u16(1);
    keep("chain", "two", &steps.bytes(&memory).done());
    keep("page", "two", &queue.u16(200).bytes(&[0; 200]).bytes(&memory).done());
}
