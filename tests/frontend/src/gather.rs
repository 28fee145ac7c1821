//! Follows the schema through a caller's memory, as the guest module does: from an
//! ioctl to the message that carries it, and from the reply back to the caller.

use nix::libc;
use nvguest_abi::rules::{ioctl_flags, rule_flags, Ioctl, Rule, Rules, OP_BUFFER};
use nvguest_abi::FileKind;
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{self, padded, FdRecord, IoctlReq, IoctlResp};

const MAX_SEGMENTS: usize = wire::MAX_SEGMENTS as usize;
const MAX_FDS: usize = 16;
/// Bytes that need no allocation.
const SMALL: usize = 1024;

/// An errno.
pub type Errno = i32;

/// What a descriptor number of the caller means.
pub trait Names {
    /// The guest's file behind `fd`, which must be of a kind with its bit in `kinds`.
    fn file(&self, fd: i32, kinds: u32) -> Result<u32, Errno>;
}

/// Descriptor numbers that are the files' handles themselves.
#[derive(Clone, Copy, Debug)]
pub struct ByHandle;

impl Names for ByHandle {
    fn file(&self, fd: i32, _kinds: u32) -> Result<u32, Errno> {
        u32::try_from(fd).map_err(|_| libc::EBADF)
    }
}

/// Bytes that live on the stack while they are few.
pub struct Bytes {
    small: [u8; SMALL],
    large: Vec<u8>,
    length: usize,
}

impl Default for Bytes {
    fn default() -> Self {
        Self { small: [0; SMALL], large: Vec::new(), length: 0 }
    }
}

impl Bytes {
    /// All of them.
    pub fn as_slice(&self) -> &[u8] {
        if self.large.is_empty() {
            &self.small[..self.length]
        } else {
            &self.large
        }
    }

    /// `length` zeroes behind the rest; the bytes to fill in.
    pub fn grow(&mut self, length: usize) -> &mut [u8] {
        let start = self.length;
        self.length += length;
        if self.large.is_empty() && self.length <= SMALL {
            return &mut self.small[start..self.length];
        }
        if self.large.is_empty() {
            self.large.extend_from_slice(&self.small[..start]);
        }
        self.large.resize(self.length, 0);
        &mut self.large[start..]
    }

    /// `bytes` behind the rest.
    pub fn push(&mut self, bytes: &[u8]) {
        self.grow(bytes.len()).copy_from_slice(bytes);
    }

    /// The first `length` bytes, to be filled in.
    pub fn front(&mut self, length: usize) -> &mut [u8] {
        if self.large.is_empty() {
            &mut self.small[..length]
        } else {
            &mut self.large[..length]
        }
    }

    fn range(&self, at: usize, length: usize) -> &[u8] {
        self.as_slice().get(at..at + length).unwrap_or(&[])
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Segment {
    user: u64,
    length: u32,
    flags: u8,
}

/// A call whose buffers have been gathered.
pub struct Call {
    cmd: u32,
    argument: *mut u8,
    argument_len: usize,
    segments: [Segment; MAX_SEGMENTS],
    nsegs: usize,
    fds: [FdRecord; MAX_FDS],
    nfds: usize,
    data: Bytes,
}

impl Call {
    /// Copies what the ioctl `cmd` reaches from `argument`.
    ///
    /// # Safety
    ///
    /// As for the ioctl itself: `argument` and the pointers in it that the rules follow
    /// must be null or lead to as much memory as the driver would read and write, until
    /// [`Call::finish`].
    pub unsafe fn gather(
        rules: &Rules,
        kind: FileKind,
        cmd: u32,
        argument: *mut u8,
        names: &dyn Names,
    ) -> Result<Self, Errno> {
        let size = cmd >> 16 & 0x3fff;
        let mut call = Self {
            cmd,
            argument,
            argument_len: size as usize,
            segments: Default::default(),
            nsegs: 0,
            fds: Default::default(),
            nfds: 0,
            data: Bytes::default(),
        };
        let mut entry = find(rules, kind, cmd, size);
        if let Some(outer) = entry.filter(|entry| entry.flags & ioctl_flags::INDIRECT != 0) {
            if outer.size.get() == 16 && !argument.is_null() {
                // SAFETY: the caller vouches for the 16 bytes of the outer argument.
                let outer = unsafe { argument.cast::<[u8; 16]>().read_unaligned() };
                let word = |at: usize| {
                    u32::from_le_bytes([outer[at], outer[at + 1], outer[at + 2], outer[at + 3]])
                };
                let inner = u64::from(word(12)) << 32 | u64::from(word(8));
                call.cmd = word(0);
                call.argument_len = word(4) as usize;
                call.argument = std::ptr::with_exposed_provenance_mut(inner as usize);
                entry = find(rules, kind, call.cmd, word(4));
            }
        } else if let Some(entry) = entry.filter(|entry| entry.size.get() != 0) {
            call.argument_len = entry.size.get() as usize;
        }
        let length = call.argument_len;
        if length > 0 && call.argument.is_null() {
            return Err(libc::EFAULT);
        }
        // SAFETY: the caller vouches for the argument.
        unsafe { call.copy(call.argument, length) };
        if let Some(entry) = entry {
            // SAFETY: the caller vouches for what the rules reach.
            unsafe { call.follow(rules, entry, names)? };
        }
        Ok(call)
    }

    /// Copies `length` bytes from the caller's memory, padded to 8.
    ///
    /// # Safety
    ///
    /// `from` must be valid for `length` bytes.
    unsafe fn copy(&mut self, from: *const u8, length: usize) {
        let to = self.data.grow(padded(length));
        // SAFETY: `to` is at least as long, and ours; the caller vouches for `from`.
        unsafe { std::ptr::copy_nonoverlapping(from, to.as_mut_ptr(), length) }
    }

    /// # Safety
    ///
    /// As for [`Call::gather`].
    unsafe fn follow(
        &mut self,
        rules: &Rules,
        entry: &Ioctl,
        names: &dyn Names,
    ) -> Result<(), Errno> {
        let length = self.argument_len;
        let argument = self.data.range(0, length);
        for rule in rules.of(entry, argument) {
            // SAFETY: passed on.
            let Some(at) = (unsafe { self.rule(0, (0, length), rule, names)? }) else { continue };
            // CAST: seven segments at most.
            let number = self.nsegs as u16;
            let block = (at, self.segments[self.nsegs - 1].length as usize);
            if rule.has(rule_flags::IN) {
                for sub in rules.subs(rule) {
                    // SAFETY: passed on.
                    unsafe { self.rule(number, block, sub, names)? };
                }
            }
        }
        Ok(())
    }

    /// Follows one rule of a block, which begins at `block.0` of what was copied; where
    /// the segment that it made begins there.
    ///
    /// # Safety
    ///
    /// As for [`Call::gather`].
    unsafe fn rule(
        &mut self,
        segment: u16,
        block: (usize, usize),
        rule: &Rule,
        names: &dyn Names,
    ) -> Result<Option<usize>, Errno> {
        let bytes = self.data.range(block.0, block.1);
        let Some(value) = rule.value(bytes) else { return Ok(None) };
        if rule.op != OP_BUFFER {
            let file = file_of(rule, value, names)?;
            let slot = self.fds.get_mut(self.nfds).ok_or(libc::EINVAL)?;
            *slot = FdRecord { segment: segment.into(), offset: rule.offset, file: file.into() };
            self.nfds += 1;
            return Ok(None);
        }
        if value == 0 {
            return if rule.has(rule_flags::NULL_OK) { Ok(None) } else { Err(libc::EFAULT) };
        }
        let length = rule.length(bytes).ok_or(libc::EINVAL)?;
        let slot = self.segments.get_mut(self.nsegs).ok_or(libc::EINVAL)?;
        *slot = Segment { user: value, length, flags: rule.flags };
        self.nsegs += 1;
        let at = self.data.length;
        if rule.has(rule_flags::IN) {
            // CAST: addresses have 64 bits.
            let from = std::ptr::with_exposed_provenance(value as usize);
            // SAFETY: the caller vouches for what the rule reaches.
            unsafe { self.copy(from, length as usize) };
        }
        Ok(Some(at))
    }

    /// Appends the body of the request.
    pub fn write(&self, out: &mut Bytes) {
        let head = IoctlReq {
            cmd: self.cmd.into(),
            // CAST: 14 bits, or as long as the rules allow.
            arg_len: (self.argument_len as u32).into(),
            nsegs: (self.nsegs as u16).into(),
            nfds: (self.nfds as u16).into(),
            reserved: 0.into(),
        };
        out.push(head.as_bytes());
        for segment in &self.segments[..self.nsegs] {
            out.push(&segment.length.to_le_bytes());
        }
        out.grow(padded(4 * self.nsegs) - 4 * self.nsegs);
        out.push(self.fds[..self.nfds].as_bytes());
        out.push(self.data.as_slice());
    }

    /// Bytes that the body of the reply has at most.
    pub fn reply_len(&self) -> usize {
        let written = self.segments[..self.nsegs]
            .iter()
            .filter(|segment| segment.flags & rule_flags::OUT != 0)
            .map(|segment| padded(segment.length as usize));
        size_of::<IoctlResp>() + padded(self.argument_len) + written.sum::<usize>()
    }

    /// Gives the caller what the body of a reply says; what the ioctl returned.
    /// `failed` is a reply with an errno, which may still have the argument.
    pub fn finish(&self, body: &[u8], failed: bool) -> Result<i32, Errno> {
        let malformed = libc::EPROTO;
        if failed && body.is_empty() {
            return Ok(0);
        }
        let (head, rest) = IoctlResp::read_from_prefix(body).map_err(|_| malformed)?;
        let mut rest = rest;
        let mut give = |user: *mut u8, length: usize| {
            let (bytes, more) = rest.split_at_checked(padded(length)).ok_or(malformed)?;
            // SAFETY: whoever gathered this call vouched for this memory until now.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), user, length) };
            rest = more;
            Ok::<(), Errno>(())
        };
        if head.arg_len.get() as usize != self.argument_len {
            return Err(malformed);
        }
        give(self.argument, self.argument_len)?;
        if !failed {
            for segment in &self.segments[..self.nsegs] {
                if segment.flags & rule_flags::OUT != 0 {
                    // CAST: addresses have 64 bits.
                    let user = std::ptr::with_exposed_provenance_mut(segment.user as usize);
                    give(user, segment.length as usize)?;
                }
            }
        }
        Ok(i32::from_le_bytes(head.ret.to_bytes()))
    }
}

fn find(rules: &Rules, kind: FileKind, cmd: u32, size: u32) -> Option<&Ioctl> {
    rules.ioctl(kind, cmd, size).or_else(|| {
        // A number that says no size: the first that has it.
        let whole = |entry: &&Ioctl| {
            (entry.kind, entry.nr.get()) == (kind as u8, cmd)
                && entry.flags & ioctl_flags::BY_NR == 0
        };
        rules.ioctls.iter().find(whole)
    })
}

fn file_of(rule: &Rule, value: u64, names: &dyn Names) -> Result<u32, Errno> {
    // CAST: the caller's int, sign and all.
    let fd = if rule.fd_width == 4 { i64::from(value as u32 as i32) } else { value as i64 };
    let none =
        fd < 0 && rule.has(rule_flags::NEGATIVE_NONE) || fd == 0 && rule.has(rule_flags::ZERO_NONE);
    if none {
        return Ok(0);
    }
    let found = i32::try_from(fd)
        .ok()
        .filter(|&fd| fd >= 0)
        .map_or(Err(libc::EBADF), |fd| names.file(fd, rule.fd_kinds.get()));
    match found {
        Err(libc::EBADF) if rule.has(rule_flags::FOREIGN_OK) => Ok(0),
        found => found,
    }
}
