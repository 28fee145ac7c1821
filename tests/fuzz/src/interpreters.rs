//! The schema as the guest module follows it, in C, and as the tests' frontend does, in Rust:
//! the same rules and the same memory make the same message, or both refuse.
//!
//! The module's interpreter runs in a process of its own, with sanitizers, and is asked
//! through pipes; if it dies, that is a finding.

use std::io::{Read, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Mutex, PoisonError};

use nix::libc;
use nvguest_abi::rules::{Case, Ioctl, Rule, Rules, NO_OFFSET, OP_BUFFER, OP_FD, OP_PAGES, PAGE};
use nvguest_abi::FileKind;
use nvguest_frontend::gather::{Bytes, Call, Caller, Names, Pinned};
use nvguest_frontend::wire::Run;
use vhost_user_nvguest::wire::ReqHeader;

use crate::input::Input;
use crate::profiles::measured;

/// Where the caller's memory begins (`guest-module/tests/memory.h`), and its bytes at most.
const BASE: u64 = 0x10000;
const MEMORY: usize = 8192;
/// The module's answer to a schema that is unsound.
const UNSOUND: u32 = 255;
/// Entries of a made-up schema.
const IOCTLS: usize = 4;
const CASES: usize = 4;
const RULES: usize = 12;

/// One call: its schema, a measured one or made up; its number; pointers; memory.
pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let how = input.u8();
    let kind = FileKind::ALL[input.below(FileKind::ALL.len())];
    let rules = match how & 3 {
        0 => measured(input.u8()).rules.clone(),
        _ => made_up(&mut input, how & 4 == 0),
    };
    let cmd = cmd(&mut input, &rules, kind);
    let memory = memory(&mut input);
    compare(&rules.to_schema(), &rules, (kind, cmd), &memory);
}

fn compare(schema: &[u8], rules: &Rules, call: (FileKind, u32), memory: &[u8]) {
    let theirs = ask(schema, call, memory);
    if theirs == Err(UNSOUND) {
        return;
    }
    let ours = Call::gather(Memory(memory), rules, call, BASE, &FewFiles).map(|call| {
        let mut body = Bytes::default();
        call.write(&mut body);
        body.as_slice().to_vec()
    });
    match (theirs, ours) {
        (Ok(message), Ok(body)) => {
            assert_eq!(message[size_of::<ReqHeader>()..], body, "the same message");
        }
        (Err(_), Err(_)) => {}
        (theirs, ours) => panic!("one refuses: {theirs:?} in C, {ours:?} in Rust"),
    }
}

/// A schema out of bytes; a tidy one is mostly sound.
fn made_up(input: &mut Input<'_>, tidy: bool) -> Rules {
    let counts = [IOCTLS, CASES, RULES].map(|most| 1 + input.below(most));
    let mut rules = Rules {
        ioctls: (0..counts[0]).map(|_| ioctl(input, counts)).collect(),
        cases: (0..counts[1]).map(|_| case(input, counts)).collect(),
        rules: (0..counts[2]).map(|_| rule(input, counts[2], tidy)).collect(),
    };
    if tidy {
        rules.ioctls.sort_by_key(|entry| (entry.kind, entry.nr.get(), entry.size.get()));
        rules.ioctls.dedup_by_key(|entry| (entry.kind, entry.nr.get(), entry.size.get()));
        rules.cases.sort_by_key(|case| case.key.get());
        rules.cases.dedup_by_key(|case| case.key.get());
    }
    rules
}

/// A range of a table of `count`, as first and number.
fn range(input: &mut Input<'_>, count: usize) -> (u32, u32) {
    let first = input.below(count + 1);
    // CAST: tables are small.
    (first as u32, input.below(count + 1 - first) as u32)
}

fn ioctl(input: &mut Input<'_>, [_, cases, rules]: [usize; 3]) -> Ioctl {
    let bits = input.u8();
    let indirect = bits & 0xf0 == 0xf0;
    let ((first_case, ncases), (first_rule, nrules)) = (range(input, cases), range(input, rules));
    let size = u32::from(input.u8() & 0x7f);
    Ioctl {
        kind: bits & 3,
        flags: bits >> 2 & 1 | u8::from(indirect) << 1,
        select: if bits & 8 == 0 { NO_OFFSET } else { u16::from(input.u8() & 0x7f) }.into(),
        nr: u32::from(input.u8()).into(),
        size: if indirect { 16 } else { size }.into(),
        first_case: first_case.into(),
        ncases: ncases.into(),
        first_rule: first_rule.into(),
        nrules: nrules.into(),
    }
}

fn case(input: &mut Input<'_>, [_, _, rules]: [usize; 3]) -> Case {
    let (first_rule, nrules) = range(input, rules);
    Case { key: u32::from(input.u8()).into(), first_rule: first_rule.into(), nrules: nrules.into() }
}

/// The second half of the table has no rules below it, so that a tidy one nests no deeper
/// than it may.
fn rule(input: &mut Input<'_>, count: usize, tidy: bool) -> Rule {
    let (bits, is_fd) = (input.u8(), input.flag());
    let is_pages = !is_fd && bits & 8 != 0;
    let (first_sub, nsubs) = match input.u8() {
        leaf if leaf & 0xc0 != 0 || (is_fd || is_pages) && tidy => (0, 0),
        _ => range(input, count),
    };
    let width = |bits: u8| if tidy { 1 << (bits & 3) } else { bits & 15 };
    let mask = if !tidy {
        0xff
    } else if is_fd {
        0x38
    } else if is_pages {
        0
    } else {
        0x07
    };
    let op = match (is_fd, is_pages) {
        (true, _) => OP_FD,
        (_, true) => OP_PAGES,
        _ => OP_BUFFER,
    };
    Rule {
        op,
        flags: bits & mask,
        offset: u16::from(input.u8() & 0x7f).into(),
        count_off: if bits & 0x80 == 0 { NO_OFFSET } else { u16::from(input.u8() & 0x7f) }.into(),
        count_width: if is_pages && tidy { 8 } else { width(input.u8()) },
        fd_width: if bits & 0x40 == 0 { 4 } else { 8 },
        elem: u32::from(input.u8() & 0x1f).into(),
        add: u32::from(input.u8()).into(),
        max: if bits & 1 == 0 { input.u32() } else { 4096 }.into(),
        first_sub: first_sub.into(),
        nsubs: nsubs.into(),
        fd_kinds: input.u32().into(),
    }
}

/// A number that the rules have, with a size, or any.
fn cmd(input: &mut Input<'_>, rules: &Rules, kind: FileKind) -> u32 {
    let (how, index, any) = (input.u8(), usize::from(input.u16()), input.u32());
    let of_kind = || rules.ioctls.iter().filter(|entry| entry.kind == kind as u8);
    let entry = of_kind().nth(index % of_kind().count().max(1));
    match entry {
        Some(entry) if how & 1 == 0 => {
            0xc000_4600 | (entry.size.get() & 0x3fff) << 16 | entry.nr.get() & 0xff
        }
        Some(entry) if how & 2 == 0 => entry.nr.get(),
        _ => any,
    }
}

/// The caller's memory: pointers at some places, over whatever is left of the bytes.
fn memory(input: &mut Input<'_>) -> Vec<u8> {
    let count = input.below(16);
    let pointers: Vec<(u8, u16)> = (0..count).map(|_| (input.u8(), input.u16())).collect();
    let mut memory = input.bytes(MEMORY).to_vec();
    for (at, to) in pointers {
        let at = usize::from(at & 0x7f);
        if let Some(place) = memory.get_mut(at..at + 8) {
            place.copy_from_slice(&(BASE + u64::from(to % 1024)).to_le_bytes());
        }
    }
    memory
}

/// A caller's memory that begins at [`BASE`].
struct Memory<'a>(&'a [u8]);

impl Caller for Memory<'_> {
    fn read(&self, from: u64, to: &mut [u8]) -> Result<(), i32> {
        if to.is_empty() {
            return Ok(());
        }
        let start = from.checked_sub(BASE).and_then(|at| usize::try_from(at).ok());
        let part = start.and_then(|at| self.0.get(at..at.checked_add(to.len())?));
        to.copy_from_slice(part.ok_or(libc::EFAULT)?);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), i32> {
        Err(libc::EFAULT)
    }

    /// As `caller_pin` in `memory.h`.
    fn pin(&self, user: u64, pages: u32) -> Result<Pinned, i32> {
        let end = user.checked_add(u64::from(pages) * PAGE);
        let inside = user >= BASE && end.is_some_and(|end| end <= BASE + self.0.len() as u64);
        let runs = match pages {
            17.. => Err(libc::EFAULT),
            1.. if !inside => Err(libc::EFAULT),
            _ => Ok((0..u64::from(pages)).step_by(2).map(|at| pair(user, at, pages)).collect()),
        };
        Ok(Pinned { registration: 7, runs })
    }
}

fn pair(user: u64, at: u64, pages: u32) -> Run {
    let length = (u64::from(pages) - at).min(2) * PAGE;
    Run { address: (2 * (user + at * PAGE)).into(), length: length.into() }
}

/// Descriptors 10 to 14 are files 0x1000a to 0x1000e, as in `memory.h`.
struct FewFiles;

impl Names for FewFiles {
    fn file(&self, fd: i32, _: u32) -> Result<u32, i32> {
        match fd {
            // CAST: small and positive.
            10..=14 => Ok(0x10000 + fd as u32),
            _ => Err(libc::EBADF),
        }
    }
}

/// The guest module's interpreter, and the schema that it has.
struct Module {
    _child: Child,
    to: ChildStdin,
    from: ChildStdout,
    schema: Vec<u8>,
}

static MODULE: Mutex<Option<Module>> = Mutex::new(None);

impl Module {
    fn start() -> Self {
        let elsewhere = std::env::var_os("NVGUEST_GATHER");
        let mut child = Command::new(elsewhere.unwrap_or_else(|| env!("NVGUEST_GATHER").into()))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("it was built");
        let (to, from) = (child.stdin.take(), child.stdout.take());
        let schema = Vec::new();
        Self { to: to.expect("piped"), from: from.expect("piped"), _child: child, schema }
    }

    fn ask(
        &mut self,
        schema: &[u8],
        (kind, cmd): (FileKind, u32),
        memory: &[u8],
    ) -> std::io::Result<Result<Vec<u8>, u32>> {
        let new = if self.schema == schema { &[] } else { schema };
        // CAST: both are small.
        let head = [new.len() as u32, kind as u32, cmd, memory.len() as u32];
        let mut asked: Vec<u8> = head.iter().flat_map(|word| word.to_le_bytes()).collect();
        asked.extend_from_slice(new);
        asked.extend_from_slice(memory);
        self.to.write_all(&asked)?;
        self.schema = schema.to_vec();
        let mut head = [0; 8];
        self.from.read_exact(&mut head)?;
        let (status, length) = head.split_at(4);
        let word = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        let mut message = vec![0; word(length) as usize];
        self.from.read_exact(&mut message)?;
        Ok(match word(status) {
            0 => Ok(message),
            errno => Err(errno),
        })
    }
}

/// What the module makes of a call: a message or an errno.
fn ask(schema: &[u8], call: (FileKind, u32), memory: &[u8]) -> Result<Vec<u8>, u32> {
    let mut module = MODULE.lock().unwrap_or_else(PoisonError::into_inner);
    let answer = module.get_or_insert_with(Module::start).ask(schema, call, memory);
    answer.expect("a sanitizer ended the guest module's interpreter: its report is above")
}
