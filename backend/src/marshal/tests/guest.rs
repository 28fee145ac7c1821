//! A guest that gathers and scatters by the schema, as the module does.

use std::collections::BTreeMap;

use nvguest_abi::rules::{rule_flags, Rule, Rules, OP_FD, OP_PAGES, PAGE};
use nvguest_abi::FileKind;
use zerocopy::IntoBytes;

use crate::wire::{padded, FdRecord, IoctlReq, Pages, Run};

/// Where a guest program's memory is: nothing of ours is ever near.
pub const GUEST: u64 = 0x7777_4141_0000_0000;

/// The number of every registration.
pub const REGISTRATION: u32 = 7;

/// A guest program: its memory and its descriptors.
#[derive(Default)]
pub struct Guest {
    pub memory: BTreeMap<u64, Vec<u8>>,
    /// Descriptor of the program → file on the wire.
    pub files: BTreeMap<i32, u32>,
}

/// A request before it is put into bytes, so that a test can lie in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Gathered {
    pub cmd: u32,
    pub argument: Vec<u8>,
    pub lengths: Vec<u32>,
    pub fds: Vec<(u16, u16, u32)>,
    /// Bytes of the segments that are read.
    pub data: Vec<Vec<u8>>,
    /// Address and length of the segments that come back; of pages, whose head does, no address.
    pub out: Vec<(u64, usize)>,
}

impl Guest {
    /// Puts bytes in memory and returns where.
    pub fn put(&mut self, bytes: &[u8]) -> u64 {
        let address = GUEST + ((self.memory.len() as u64) << 24);
        self.memory.insert(address, bytes.to_vec());
        address
    }

    pub fn gather(&self, rules: &Rules, kind: FileKind, cmd: u32, argument: &[u8]) -> Gathered {
        let ioctl = rules.ioctl(kind, cmd, argument.len() as u32).expect("the schema has it");
        let mut call = Gathered { cmd, argument: argument.to_vec(), ..Gathered::default() };
        for rule in rules.of(ioctl, argument) {
            let Some((number, block)) = self.follow(&mut call, 0, argument, rule) else { continue };
            for sub in rules.subs(rule) {
                self.follow(&mut call, number, &block, sub);
            }
        }
        call
    }

    fn follow(
        &self,
        call: &mut Gathered,
        number: u16,
        block: &[u8],
        rule: &Rule,
    ) -> Option<(u16, Vec<u8>)> {
        let value = rule.value(block)?;
        if rule.op == OP_FD {
            // As the kernel does: a descriptor is an int.
            let file = self.files.get(&(value as i32)).copied().unwrap_or(0);
            call.fds.push((number, rule.offset.get(), file));
            return None;
        }
        if rule.op == OP_PAGES {
            call.pages(value, rule.registers(block).expect("the limit is in the block"));
            return None;
        }
        if value == 0 {
            return None;
        }
        let length = rule.length(block).expect("the count is within bounds");
        call.lengths.push(length);
        if rule.has(rule_flags::OUT) {
            call.out.push((value, length as usize));
        }
        let mut bytes = Vec::new();
        if rule.has(rule_flags::IN) {
            bytes = self.memory[&value][..length as usize].to_vec();
            call.data.push(bytes.clone());
        }
        Some((call.lengths.len() as u16, bytes))
    }

    /// Writes a reply's segments to memory, and returns its argument.
    pub fn scatter(&mut self, call: &Gathered, reply: &[u8]) -> Vec<u8> {
        let argument = reply[8..8 + call.argument.len()].to_vec();
        let mut at = 8 + padded(argument.len());
        for &(address, length) in &call.out {
            if address == 0 {
                at += length;
                continue;
            }
            let block = self.memory.get_mut(&address).expect("it was gathered from");
            block[..length].copy_from_slice(&reply[at..at + length]);
            at += padded(length);
        }
        assert_eq!(at, reply.len(), "the reply is exactly as long as the guest expects");
        argument
    }
}

impl Gathered {
    /// Pages that the call registers, all in one run.
    pub fn pages(&mut self, user: u64, bytes: u64) {
        let head = Pages { registration: REGISTRATION.into(), ..Pages::default() };
        let run = Run { address: user.into(), length: (bytes.div_ceil(PAGE) * PAGE).into() };
        let list = [head.as_bytes(), run.as_bytes()].concat();
        self.lengths.push(list.len() as u32);
        self.data.push(list);
        self.out.push((0, size_of::<Pages>()));
    }

    /// The body of the request.
    pub fn body(&self) -> Vec<u8> {
        let head = IoctlReq {
            cmd: self.cmd.into(),
            arg_len: (self.argument.len() as u32).into(),
            nsegs: (self.lengths.len() as u16).into(),
            nfds: (self.fds.len() as u16).into(),
            reserved: 0.into(),
        };
        let mut body = head.as_bytes().to_vec();
        let mut add = |bytes: &[u8]| {
            body.extend_from_slice(bytes);
            body.resize(padded(body.len()), 0);
        };
        let lengths: Vec<u8> = self.lengths.iter().flat_map(|n| n.to_le_bytes()).collect();
        add(&lengths);
        for &(segment, offset, file) in &self.fds {
            let record =
                FdRecord { segment: segment.into(), offset: offset.into(), file: file.into() };
            add(record.as_bytes());
        }
        add(&self.argument);
        for bytes in &self.data {
            add(bytes);
        }
        body
    }
}

/// An argument built field by field.
#[derive(Clone)]
pub struct Block(pub Vec<u8>);

impl Block {
    pub fn new(size: usize) -> Self {
        Self(vec![0; size])
    }

    pub fn u32(mut self, offset: usize, value: u32) -> Self {
        self.0[offset..offset + 4].copy_from_slice(&value.to_le_bytes());
        self
    }

    pub fn u64(mut self, offset: usize, value: u64) -> Self {
        self.0[offset..offset + 8].copy_from_slice(&value.to_le_bytes());
        self
    }
}

pub fn u32_at(block: &[u8], offset: usize) -> u32 {
    u32::from_le_bytes(block[offset..offset + 4].try_into().unwrap())
}

pub fn u64_at(block: &[u8], offset: usize) -> u64 {
    u64::from_le_bytes(block[offset..offset + 8].try_into().unwrap())
}
