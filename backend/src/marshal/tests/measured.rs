//! The same promises over every control, class and command of every measured release.

use std::sync::OnceLock;

use nvguest_abi::compiled::{Compiled, Verdict, ANY_SIZE};
use nvguest_abi::rules::Ioctl;
use nvguest_abi::store::Store;
use nvguest_abi::FileKind::{self, Ctl, Uvm};

use super::calls::{allocation, control, RM_ALLOC, RM_CONTROL};
use super::card::Rig;
use super::furnish::{furnish, planted};
use super::guest::{u32_at, Block, GUEST};

const EVERY_CAPABILITY: u32 = 0x1f;

/// Every profile that was measured, each compiled once.
pub fn measured() -> &'static [Compiled] {
    static ALL: OnceLock<Vec<Compiled>> = OnceLock::new();
    ALL.get_or_init(|| {
        let store = Store::embedded().expect("the profiles are in order");
        let load =
            |release| store.load(release).expect("it is a profile").compile(EVERY_CAPABILITY);
        store.profiles().map(load).collect()
    })
}

fn entry<'c>(compiled: &'c Compiled, kind: FileKind, cmd: u32, argument: &[u8]) -> &'c Ioctl {
    compiled.rules.ioctl(kind, cmd, argument.len() as u32).expect("it has a layout")
}

/// The argument with all that it reaches, in the memory of a new guest program.
fn furnished(rig: &mut Rig<'_>, kind: FileKind, cmd: u32, mut sent: Vec<u8>) -> Vec<u8> {
    let rules = &rig.compiled.rules;
    rig.guest.memory.clear();
    let list = rules.of(entry(rig.compiled, kind, cmd, &sent), &sent);
    furnish(&mut rig.guest, rules, list, &mut sent);
    sent
}

fn call(rig: &mut Rig<'_>, kind: FileKind, cmd: u32, sent: Vec<u8>) {
    let sent = furnished(rig, kind, cmd, sent);
    let (argument, seen) = rig.call(kind, cmd, &sent);
    assert_eq!(argument, sent, "the argument comes back as it was");
    assert!(!seen.is_empty());
}

#[test]
fn every_allowed_control_is_made_of_our_own_memory_and_files() {
    for compiled in measured() {
        let mut rig = Rig::new(compiled);
        let controls = compiled.controls.iter().filter(|entry| entry.verdict == 0);
        for entry in controls {
            let size = match entry.size.get() {
                ANY_SIZE => 992,
                size => size,
            };
            call(&mut rig, Ctl, RM_CONTROL, control(entry.command.get(), GUEST, size as usize));
        }
    }
}

#[test]
fn every_refused_control_has_rm_s_status() {
    for compiled in measured() {
        let mut rig = Rig::new(compiled);
        let controls = compiled.controls.iter().filter(|entry| entry.verdict != 0);
        for entry in controls.filter(|entry| entry.size.get() <= 1 << 18) {
            let sent = control(entry.command.get(), GUEST, entry.size.get() as usize);
            let sent = furnished(&mut rig, Ctl, RM_CONTROL, sent);
            let request = rig.gather(Ctl, RM_CONTROL, &sent);
            let (refused, answer) = rig.refused(Ctl, &request);
            assert_eq!(refused.verdict, Verdict::from_number(entry.verdict));
            let answer = answer.expect("the ioctl itself succeeds");
            assert!(matches!(u32_at(&answer, 0x1c), 0x56 | 0x1b));
        }
    }
}

#[test]
fn every_allowed_class_is_made_of_our_own_memory_and_files() {
    for compiled in measured() {
        let mut rig = Rig::new(compiled);
        let classes = compiled.classes.iter().filter(|entry| entry.verdict == 0);
        // 0x05 is an alias, and 0x71 is made another way.
        for class in classes.map(|entry| entry.class.get()).filter(|&c| c != 0x05 && c != 0x71) {
            for size in [32, 48] {
                let sent = allocation(class, GUEST, 0)[..size].to_vec();
                call(&mut rig, Ctl, RM_ALLOC, sent);
            }
        }
    }
}

#[test]
fn every_allowed_command_of_uvm_is_made_of_our_own_files() {
    for compiled in measured() {
        let mut rig = Rig::new(compiled);
        for escape in compiled.escapes.iter().filter(|e| e.kind == Uvm as u8 && e.verdict == 0) {
            call(&mut rig, Uvm, escape.nr.get(), planted(escape.size.get() as usize));
        }
    }
}

#[test]
fn every_allowed_escape_is_made_of_our_own_memory_and_files() {
    for compiled in measured() {
        let mut rig = Rig::new(compiled);
        for escape in compiled.escapes.iter().filter(|e| e.kind == Ctl as u8 && e.verdict == 0) {
            let nr = escape.nr.get();
            let size = escape.size.get() as usize;
            let sent = match nr {
                // These have cases, or name another call; tests of their own.
                0x2a | 0x2b | 211 => continue,
                0x4a => Block(planted(size)).u32(8, 2).0,
                0x27 | 0x28 => Block(planted(size)).u32(0xc, 0x3e).0,
                0x54 => Block(planted(size)).u32(0xc, 0x02).0,
                _ => planted(size),
            };
            call(&mut rig, Ctl, nr, sent);
        }
    }
}
