//! Any call of any measured release, with any bytes and any lies about its shape: the driver
//! finds no address and no descriptor but ours.

use std::cell::Cell;

use nvguest_abi::compiled::{Compiled, ANY_SIZE};
use nvguest_abi::rules::{read_uint, rule_flags, Rule, NO_OFFSET, OP_FD, OP_PAGES, PAGE};
use nvguest_abi::FileKind::{self, Ctl, Uvm};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{TestCaseResult, TestRunner};

use super::calls::{allocation, control, RM_ALLOC, RM_CONTROL};
use super::card::{Card, Rig};
use super::guest::{Gathered, GUEST};
use super::measured::measured;

const CASES: u32 = 3000;
/// Bytes of one buffer at most: what is longer shows nothing more, and takes its time.
const LONGEST: u32 = 1 << 16;

/// Which call, by its place in the profile's table.
#[derive(Clone, Debug)]
enum Which {
    Control(Index),
    Class(Index),
    Escape(Index),
}

/// A value that is not what was gathered.
#[derive(Clone, Debug)]
enum Lie {
    Length(Index, u32),
    File(Index, u32),
    Argument(Index, u64),
    Data(Index, Index, u64),
}

#[derive(Clone, Debug)]
struct Any {
    release: Index,
    which: Which,
    /// What the caller's fields hold, over and over.
    noise: Vec<u64>,
    lies: Vec<Lie>,
}

/// Numbers that are taken for something: counts, descriptors, none, pointers.
fn word() -> impl Strategy<Value = u64> {
    prop_oneof![
        2 => 0..4_u64,
        2 => (0..1_u64 << 32).prop_map(|low| GUEST + low),
        1 => Just(u64::MAX),
        1 => Just(u64::from(u32::MAX)),
        2 => any::<u64>(),
    ]
}

fn any_call() -> impl Strategy<Value = Any> {
    let index = any::<Index>;
    let which = prop_oneof![
        index().prop_map(Which::Control),
        index().prop_map(Which::Class),
        index().prop_map(Which::Escape),
    ];
    let lie = prop_oneof![
        (index(), 0..4096_u32).prop_map(|(at, length)| Lie::Length(at, length)),
        (index(), 0..6_u32).prop_map(|(at, file)| Lie::File(at, file)),
        (index(), word()).prop_map(|(at, value)| Lie::Argument(at, value)),
        (index(), index(), word()).prop_map(|(block, at, value)| Lie::Data(block, at, value)),
    ];
    let lies = prop_oneof![2 => Just(Vec::new()), 1 => vec(lie, 1..4)];
    (index(), which, vec(word(), 1..9), lies).prop_map(|(release, which, noise, lies)| Any {
        release,
        which,
        noise,
        lies,
    })
}

/// Where RM itself has a pointer in an argument (`nvos.h`), whatever a profile says.
fn pointers(kind: FileKind, nr: u32, argument: &[u8]) -> &'static [u16] {
    match (nr & 0xff, argument.get(8)) {
        _ if kind == Uvm => &[],
        (0x2a, _) => &[0x10],
        (0x2b, _) if argument.len() >= 48 => &[0x10, 0x18],
        (0x2b, _) => &[0x10],
        (0x27, _) => &[0x18],
        (0x4a, Some(2)) => &[0x78],
        (0x4a, Some(14)) => &[0x80],
        (0x4a, Some(27)) => &[0x40],
        _ => &[],
    }
}

struct Maker<'c> {
    compiled: &'c Compiled,
    noise: std::iter::Cycle<std::slice::Iter<'c, u64>>,
    call: Gathered,
}

impl Maker<'_> {
    fn word(&mut self) -> u64 {
        *self.noise.next().expect("there is some")
    }

    fn block(&mut self, size: usize) -> Vec<u8> {
        let words = size.div_ceil(8);
        let mut bytes: Vec<u8> = (0..words).flat_map(|_| self.word().to_le_bytes()).collect();
        bytes.truncate(size);
        bytes
    }

    /// Gathers by the rules, as far as these bytes let it.
    fn follow(&mut self, number: u16, block: &mut [u8], rules: &[Rule]) {
        for rule in rules {
            self.make_countable(block, rule);
            let Some(value) = rule.value(block) else { continue };
            if rule.op == OP_FD {
                self.call.fds.push((number, rule.offset.get(), file_of(rule, value)));
                continue;
            }
            if rule.op == OP_PAGES {
                let bytes = self.word() % (4 * PAGE);
                self.call.pages(value, bytes);
                continue;
            }
            let length = rule.length(block).filter(|&length| length <= LONGEST);
            let Some(length) = length.filter(|_| value != 0) else { continue };
            self.call.lengths.push(length);
            let own = self.call.lengths.len() as u16;
            if rule.has(rule_flags::IN) {
                let mut inner = self.block(length as usize);
                let place = self.call.data.len();
                self.call.data.push(Vec::new());
                self.follow(own, &mut inner, self.compiled.rules.subs(rule));
                self.call.data[place] = inner;
            }
        }
    }

    /// A count that RM would take, where the noise is none.
    fn make_countable(&mut self, block: &mut [u8], rule: &Rule) {
        if rule.count_off.get() == NO_OFFSET || rule.length(block).is_some() {
            return;
        }
        let (start, width) = (usize::from(rule.count_off.get()), usize::from(rule.count_width));
        if let Some(field) = block.get_mut(start..start + width) {
            field.fill(0);
            field[0] = (self.word() % 3) as u8;
        }
    }
}

/// A file of the guest's that the rule would take, or none where the value means none.
fn file_of(rule: &Rule, value: u64) -> u32 {
    let low = value as u32 as i32;
    let none = (rule.has(rule_flags::NEGATIVE_NONE) && (low < 0 || (value as i64) < 0))
        || (rule.has(rule_flags::ZERO_NONE) && value == 0);
    let kinds = [(Ctl, 1), (FileKind::Gpu, 2), (Uvm, 3), (FileKind::Cap, 4)];
    let fits = kinds.iter().find(|(kind, _)| kind.bit() & rule.fd_kinds.get() != 0);
    fits.filter(|_| !none).map_or(0, |(_, file)| *file)
}

/// The call before its shape is lied about.
fn gather(any: &Any, compiled: &Compiled) -> (FileKind, Gathered) {
    let mut maker = Maker { compiled, noise: any.noise.iter().cycle(), call: Gathered::default() };
    let (kind, cmd, mut argument) = match &any.which {
        Which::Control(at) => {
            let entry = at.get(&compiled.controls);
            let size = match entry.size.get() {
                ANY_SIZE => 992,
                size => size.min(LONGEST),
            };
            let params = maker.word();
            (Ctl, RM_CONTROL, control(entry.command.get(), params, size as usize))
        }
        Which::Class(at) => {
            let (params, rights) = (maker.word(), maker.word());
            let class = at.get(&compiled.classes).class.get();
            (Ctl, RM_ALLOC, allocation(class, params, rights))
        }
        Which::Escape(at) => {
            let entry = at.get(&compiled.escapes);
            let kind = FileKind::ALL.into_iter().find(|kind| *kind as u8 == entry.kind);
            let argument = maker.block(entry.size.get().min(LONGEST) as usize);
            (kind.unwrap_or(Ctl), entry.nr.get(), argument)
        }
    };
    if let Some(ioctl) = compiled.rules.ioctl(kind, cmd, argument.len() as u32) {
        let rules = compiled.rules.of(ioctl, &argument);
        maker.follow(0, &mut argument, rules);
    }
    (kind, Gathered { cmd, argument, ..maker.call })
}

fn overwrite(block: &mut [u8], at: Index, value: u64) {
    let words = block.len() / 4;
    if words > 0 {
        let start = at.index(words) * 4;
        let end = block.len().min(start + 8);
        block[start..end].copy_from_slice(&value.to_le_bytes()[..end - start]);
    }
}

fn tell(lie: &Lie, call: &mut Gathered) {
    match *lie {
        Lie::Length(at, length) if !call.lengths.is_empty() => {
            *at.get_mut(call.lengths.as_mut_slice()) = length
        }
        Lie::File(at, file) if !call.fds.is_empty() => at.get_mut(call.fds.as_mut_slice()).2 = file,
        Lie::Argument(at, value) => overwrite(&mut call.argument, at, value),
        Lie::Data(block, at, value) if !call.data.is_empty() => {
            let data: &mut Vec<u8> = block.get_mut(&mut call.data);
            overwrite(data, at, value);
        }
        _ => {}
    }
}

/// Whether the host was asked. The card panics on a foreign value in a field of the profile's.
fn make(any: &Any) -> Result<bool, TestCaseError> {
    let compiled = any.release.get(measured());
    let (kind, mut call) = gather(any, compiled);
    any.lies.iter().for_each(|lie| tell(lie, &mut call));
    let mut rig = Rig::new(compiled);
    let card = Card::new(compiled, kind);
    let made = rig.prepare(kind, &call, |mut prepared| prepared.execute(&card, &card.file()));
    let seen = card.seen.into_inner().expect("nothing panicked");
    let Some(argument) = seen.first() else { return Ok(false) };
    for &offset in pointers(kind, call.cmd, &call.argument) {
        let sent = read_uint(&call.argument, offset, 8);
        let host = read_uint(argument, offset, 8);
        prop_assert!(host == Some(0) || host != sent, "{offset:#x} is the guest's: {host:x?}");
    }
    Ok(made == Ok(Ok(0)))
}

#[test]
fn whatever_a_guest_sends_on_any_measured_release_reaches_the_host_without_a_pointer_or_a_file_of_its_own(
) {
    let asked = Cell::new(0);
    let test = |any: Any| -> TestCaseResult {
        asked.set(asked.get() + u32::from(make(&any)?));
        Ok(())
    };
    let cases = if cfg!(miri) { 4 } else { CASES };
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    TestRunner::new(config).run(&any_call(), test).unwrap_or_else(|failure| panic!("{failure}"));
    // Calls that are all refused would show nothing.
    assert!(cfg!(miri) || asked.get() > CASES / 4, "{} of {CASES} reached the host", asked.get());
}
