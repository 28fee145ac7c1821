//! Arguments with all that the profile's rules reach from them.

use nvguest_abi::rules::{rule_flags, Rule, Rules, NO_OFFSET, OP_FD, OP_PAGES};
use nvguest_abi::FileKind::{Cap, Ctl, Gpu, Uvm};

use super::guest::{Guest, GUEST};

/// A block that looks like guest pointers all over.
pub fn planted(size: usize) -> Vec<u8> {
    GUEST.to_le_bytes().into_iter().cycle().take(size).collect()
}

fn write(block: &mut [u8], offset: u16, width: u8, value: u64) {
    let start = usize::from(offset);
    let width = usize::from(width);
    block[start..start + width].copy_from_slice(&value.to_le_bytes()[..width]);
}

/// Gives a block what its rules reach: counts that RM takes, buffers, open files.
pub fn furnish(guest: &mut Guest, rules: &Rules, list: &[Rule], block: &mut [u8]) {
    for rule in list.iter().filter(|rule| rule.count_off.get() != NO_OFFSET) {
        let count = [2, 1, 0].into_iter().find(|&count| {
            if rule.length(block).is_none() {
                write(block, rule.count_off.get(), rule.count_width, count);
            }
            rule.length(block).is_some()
        });
        assert!(count.is_some(), "no count satisfies {rule:?}");
    }
    for rule in list {
        let (value, width) = if rule.op == OP_FD {
            let kinds = rule.fd_kinds.get();
            let files = [(Ctl, 11), (Gpu, 12), (Uvm, 13), (Cap, 14)];
            let file = files.iter().find(|(kind, _)| kind.bit() & kinds != 0);
            (file.expect("it may name some file").1, rule.fd_width)
        } else if rule.op == OP_PAGES {
            (GUEST & !0xfff, 8)
        } else {
            let mut inner = planted(rule.length(block).expect("furnished above") as usize);
            if rule.has(rule_flags::IN) {
                furnish(guest, rules, rules.subs(rule), &mut inner);
            }
            (guest.put(&inner), 8)
        };
        write(block, rule.offset.get(), width, value);
    }
}
