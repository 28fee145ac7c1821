//! A driver that fails on any pointer that is not of the frame and any descriptor
//! that is not of the session, and changes every byte that RM may write.

use std::cell::Cell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Mutex;

use nvguest_abi::compiled::Compiled;
use nvguest_abi::rules::{rule_flags, Rule, OP_FD, OP_PAGES};
use nvguest_abi::FileKind;

use super::guest::{Gathered, Guest};
use crate::errno::Errno;
use crate::host::{Host, HostFile, HostMapping, Node};
use crate::marshal::{prepare, Call, Files, Frame, Prepared, Refused, Scratch};

/// What the card writes wherever it writes.
pub const WRITTEN: u8 = 0xa5;
/// Host numbers of the session's files begin here: none looks like a guest's.
const HOST_FILES: i32 = 100_000;
/// More than a session has.
const FEW: i32 = 16;

/// The files of a session: wire number → kind.
pub struct Session {
    pub files: Vec<(u32, FileKind)>,
    pub asked: Cell<u32>,
}

impl Session {
    pub fn new(files: &[(u32, FileKind)]) -> Self {
        Self { files: files.to_vec(), asked: Cell::new(0) }
    }
}

pub fn host_number(file: u32) -> i32 {
    HOST_FILES + file as i32
}

impl Files for Session {
    fn host_number(&self, file: u32, kinds: u32) -> Result<i32, Errno> {
        self.asked.set(self.asked.get() + 1);
        let known = self.files.iter().find(|(number, _)| *number == file);
        match known {
            Some((_, kind)) if kind.bit() & kinds != 0 => Ok(host_number(file)),
            Some(_) => Err(Errno::EINVAL),
            None => Err(Errno::EBADF),
        }
    }
}

/// The driver. It walks the profile over the host argument as RM's own code would.
pub struct Card<'c> {
    pub compiled: &'c Compiled,
    pub kind: FileKind,
    /// What the call looked like from the host: argument, then each block.
    pub seen: Mutex<Vec<Vec<u8>>>,
    pub cmd: AtomicU32,
    /// The card writes to what RM may write.
    pub writes: bool,
}

impl<'c> Card<'c> {
    pub fn new(compiled: &'c Compiled, kind: FileKind) -> Self {
        let (seen, cmd) = (Mutex::default(), AtomicU32::new(0));
        Self { compiled, kind, seen, cmd, writes: true }
    }

    pub fn file(&self) -> HostFile {
        let fd: OwnedFd = std::fs::File::open("/dev/null").unwrap().into();
        HostFile { fd, ready: None, kind: self.kind }
    }

    fn see(&self, bytes: &[u8]) {
        self.seen.lock().unwrap().push(bytes.to_vec());
    }

    /// Checks the fields of a block, and follows its pointers.
    fn block(&self, frame: &mut Frame<'_>, address: u64, length: usize, rules: &[Rule]) {
        let block = frame.follow(address, length).expect("the pointer is of the frame").to_vec();
        self.see(&block);
        for rule in rules {
            let value = rule.value(&block).expect("the field is in the block");
            if rule.op == OP_FD {
                self.descriptor(rule, value);
            } else if rule.op == OP_PAGES {
                let length = rule.registers(&block).expect("the limit is in the block");
                assert!(frame.registered(value, length).is_some(), "{value:#x} is not ours");
            } else if value != 0 {
                let length = rule.length(&block).expect("the length is in bounds") as usize;
                self.block(frame, value, length, self.compiled.rules.subs(rule));
                if self.writes && rule.has(rule_flags::OUT) {
                    frame.follow(value, length).unwrap().fill(WRITTEN);
                }
            }
        }
    }

    fn descriptor(&self, rule: &Rule, value: u64) {
        let number = value as u32 as i32;
        let none = (number < 0 && rule.has(rule_flags::NEGATIVE_NONE))
            || (number == -1 && rule.has(rule_flags::FOREIGN_OK))
            || (number == 0 && rule.has(rule_flags::ZERO_NONE));
        let ours = (HOST_FILES..HOST_FILES + FEW).contains(&number);
        assert!(none || ours, "descriptor {number} is not of the session");
    }
}

impl Host for Card<'_> {
    fn open(&self, _: &Node, _: u32) -> Result<HostFile, Errno> {
        Err(Errno::ENXIO)
    }

    fn ioctl(&self, file: &HostFile, cmd: u32, frame: &mut Frame<'_>) -> Result<i32, Errno> {
        self.cmd.store(cmd, Ordering::Relaxed);
        let address = frame.argument().expose_provenance() as u64;
        let mut size = cmd >> 16 & 0x3fff;
        if file.kind == FileKind::Uvm {
            let escape = self
                .compiled
                .escapes
                .iter()
                .find(|e| e.kind == FileKind::Uvm as u8 && e.nr.get() == cmd);
            size = escape.expect("the number is the profile's").size.get();
        }
        let rules = &self.compiled.rules;
        let ioctl = *rules.ioctl(file.kind, cmd, size).expect("the number is the profile's");
        let argument = frame.follow(address, size as usize).expect("the argument").to_vec();
        self.block(frame, address, size as usize, rules.of(&ioctl, &argument));
        Ok(0)
    }

    fn mapping(&self, _: &HostFile, _: u64, _: u64, _: bool) -> Result<HostMapping, Errno> {
        Err(Errno::EINVAL)
    }
}

/// One guest program's calls, from its memory to the card and back.
pub struct Rig<'c> {
    pub compiled: &'c Compiled,
    pub guest: Guest,
    pub session: Session,
    pub scratch: Scratch,
}

impl<'c> Rig<'c> {
    pub fn new(compiled: &'c Compiled) -> Self {
        use FileKind::{Cap, Ctl, Gpu, Uvm};
        let session = Session::new(&[(1, Ctl), (2, Gpu), (3, Uvm), (4, Cap)]);
        let files = [(11, 1), (12, 2), (13, 3), (14, 4)].into();
        let guest = Guest { files, ..Guest::default() };
        Self { compiled, guest, session, scratch: Scratch::new().unwrap() }
    }

    pub fn gather(&self, kind: FileKind, cmd: u32, argument: &[u8]) -> Gathered {
        self.guest.gather(&self.compiled.rules, kind, cmd, argument)
    }

    /// Prepares what was gathered, or what a test made of it.
    pub fn prepare<T>(
        &mut self,
        kind: FileKind,
        call: &Gathered,
        then: impl FnOnce(Prepared<'_>) -> T,
    ) -> Result<T, Refused> {
        let body = call.body();
        let call = Call::parse(&body).expect("the request is whole");
        prepare(self.compiled, kind, &call, &self.session, &mut self.scratch).map(then)
    }

    /// Makes the call: the argument as the guest program has it afterwards, and
    /// what the card saw.
    pub fn call(&mut self, kind: FileKind, cmd: u32, argument: &[u8]) -> (Vec<u8>, Vec<Vec<u8>>) {
        let call = self.gather(kind, cmd, argument);
        let card = Card::new(self.compiled, kind);
        let done = self.prepare(kind, &call, |mut prepared| {
            let result = prepared.execute(&card, &card.file());
            let mut reply = Vec::new();
            prepared.finish(result, &mut reply);
            assert_eq!(reply.len(), prepared.reply_len());
            reply
        });
        let argument = self.guest.scatter(&call, &done.expect("the call is allowed"));
        (argument, card.seen.into_inner().unwrap())
    }

    /// What the guest program finds after a call that is refused: its argument, or an errno.
    pub fn refused(
        &mut self,
        kind: FileKind,
        call: &Gathered,
    ) -> (Refused, Result<Vec<u8>, Errno>) {
        let refused = self.prepare(kind, call, |_| ()).expect_err("the call is refused");
        let body = call.body();
        let mut reply = Vec::new();
        let parsed = Call::parse(&body).unwrap();
        let answer = refused.finish(self.compiled, kind, &parsed, &mut reply);
        (refused, answer.map(|()| self.guest.scatter(call, &reply)))
    }
}
