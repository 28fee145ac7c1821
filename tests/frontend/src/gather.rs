//! Follows the schema through a caller's memory, as the guest module does: from an
//! ioctl to the message that carries it, and from the reply back to the caller.

use nix::libc;
use nvguest_abi::rules::{
    ioctl_flags, read_uint, rule_flags, Ioctl, Rule, Rules, NO_OFFSET, OP_FD, OP_PAGES, PAGE,
};
use nvguest_abi::FileKind;
use zerocopy::{FromBytes, IntoBytes};

use crate::wire::{self, padded, FdRecord, IoctlReq, IoctlResp};

const MAX_SEGMENTS: usize = wire::MAX_SEGMENTS as usize;
const MAX_FDS: usize = 16;
/// An argument as large as the driver itself takes.
const MAX_ARGUMENT: u32 = 16384;
/// `_IOWR('F', 0, 0)`.
const RM_IOCTL: u32 = 0xc000_4600;
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

/// A caller's memory, which its pointers lead to.
pub trait Caller {
    /// Copies out of it; EFAULT where there is none. No bytes are everywhere.
    fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Errno>;
    /// Copies into it.
    fn write(&self, to: u64, from: &[u8]) -> Result<(), Errno>;
    /// Gives pages from an address on a registration, and says where they lie, or why they
    /// cannot be pinned. No pages: a number alone. EINVAL where there is no such thing.
    fn pin(&self, _user: u64, _pages: u32) -> Result<Pinned, Errno> {
        Err(libc::EINVAL)
    }
    /// Whether the host has a registration now.
    fn held(&self, _registration: u32, _held: bool) {}
}

/// Memory of a caller that stays where it is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pinned {
    /// Its number.
    pub registration: u32,
    /// Guest-physical pages, or an errno.
    pub runs: Result<Vec<wire::Run>, Errno>,
}

/// This process, as a caller that passes good pointers: nobody asks the kernel.
#[derive(Clone, Copy, Debug)]
pub struct Ourselves(());

impl Ourselves {
    /// # Safety
    ///
    /// Addresses that are read and written must be null or lead to as much memory as is
    /// asked for, as long as the value is used.
    pub unsafe fn vouched_for() -> Self {
        Self(())
    }
}

impl Caller for Ourselves {
    fn read(&self, from: u64, to: &mut [u8]) -> Result<(), Errno> {
        if from == 0 && !to.is_empty() {
            return Err(libc::EFAULT);
        }
        // CAST: addresses have 64 bits.
        let from: *const u8 = std::ptr::with_exposed_provenance(from as usize);
        // SAFETY: whoever made the value vouches for the address; `to` is ours.
        unsafe { std::ptr::copy(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    fn write(&self, to: u64, from: &[u8]) -> Result<(), Errno> {
        // CAST: addresses have 64 bits.
        let to: *mut u8 = std::ptr::with_exposed_provenance_mut(to as usize);
        // SAFETY: as above.
        unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
        Ok(())
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
    /// Its registration, if it is memory that the call registers.
    pages: Option<u32>,
}

impl Segment {
    /// Bytes of it in the reply.
    fn returned(&self) -> usize {
        match self.pages {
            Some(_) => size_of::<wire::Pages>(),
            None if self.flags & rule_flags::OUT != 0 => self.length as usize,
            None => 0,
        }
    }
}

/// A call whose buffers have been gathered.
pub struct Call<C> {
    caller: C,
    cmd: u32,
    argument: u64,
    argument_len: usize,
    segments: [Segment; MAX_SEGMENTS],
    nsegs: usize,
    fds: [FdRecord; MAX_FDS],
    nfds: usize,
    data: Bytes,
}

impl<C: Caller> Call<C> {
    /// Copies what the ioctl `cmd` reaches from `argument` in the caller's memory.
    pub fn gather(
        caller: C,
        rules: &Rules,
        (kind, cmd): (FileKind, u32),
        argument: u64,
        names: &dyn Names,
    ) -> Result<Self, Errno> {
        let size = cmd >> 16 & 0x3fff;
        let mut call = Self {
            caller,
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
        if entry.is_some_and(|entry| entry.flags & ioctl_flags::INDIRECT != 0) {
            entry = call.named(rules, kind)?;
        }
        if let Some(entry) = entry.filter(|entry| entry.size.get() != 0) {
            call.argument_len = entry.size.get() as usize;
        }
        match (call.copy(call.argument, call.argument_len), entry) {
            // What we took for a size need not be one.
            (Err(libc::EFAULT), None) => (call.argument_len, call.data) = (0, Bytes::default()),
            (copied, _) => copied?,
        }
        if let Some(entry) = entry {
            call.follow(rules, entry, names)?;
        }
        if call.reply_len() > wire::MAX_RESPONSE as usize {
            return Err(libc::ENOMEM);
        }
        Ok(call)
    }

    /// `{u32 nr, u32 size, u64 pointer}` names the call that is really meant.
    fn named<'r>(&mut self, rules: &'r Rules, kind: FileKind) -> Result<Option<&'r Ioctl>, Errno> {
        let mut outer = [0; 16];
        self.caller.read(self.argument, &mut outer)?;
        let word = |at: u16| read_uint(&outer, at, 4).and_then(|word| u32::try_from(word).ok());
        let (nr, size) = (word(0).unwrap_or(0), word(4).unwrap_or(0));
        if nr > 0xff || size > MAX_ARGUMENT {
            return Err(libc::EINVAL);
        }
        self.cmd = RM_IOCTL | (size & 0x3fff) << 16 | nr;
        self.argument = read_uint(&outer, 8, 8).unwrap_or(0);
        self.argument_len = size as usize;
        match find(rules, kind, self.cmd, size) {
            Some(entry) if entry.flags & ioctl_flags::INDIRECT != 0 => Err(libc::EINVAL),
            entry => Ok(entry),
        }
    }

    /// Copies `length` bytes from the caller's memory, padded to 8.
    fn copy(&mut self, from: u64, length: usize) -> Result<(), Errno> {
        if self.data.length + padded(length) > wire::MAX_REQUEST as usize {
            return Err(libc::ENOMEM);
        }
        let to = self.data.grow(padded(length));
        self.caller.read(from, &mut to[..length])
    }

    fn follow(&mut self, rules: &Rules, entry: &Ioctl, names: &dyn Names) -> Result<(), Errno> {
        let length = self.argument_len;
        let argument = self.data.range(0, length);
        for rule in rules.of(entry, argument) {
            let Some(at) = self.rule(0, (0, length), rule, names)? else { continue };
            // CAST: seven segments at most.
            let number = self.nsegs as u16;
            let block = (at, self.segments[self.nsegs - 1].length as usize);
            if rule.has(rule_flags::IN) {
                for sub in rules.subs(rule) {
                    self.rule(number, block, sub, names)?;
                }
            }
        }
        Ok(())
    }

    /// Follows one rule of a block, which begins at `block.0` of what was copied; where
    /// the segment that it made begins there.
    fn rule(
        &mut self,
        segment: u16,
        block: (usize, usize),
        rule: &Rule,
        names: &dyn Names,
    ) -> Result<Option<usize>, Errno> {
        let bytes = self.data.range(block.0, block.1);
        let Some(value) = rule.value(bytes) else { return Ok(None) };
        if rule.op == OP_PAGES {
            return self.pages(block, rule).map(|()| None);
        }
        if rule.op == OP_FD {
            let file = file_of(rule, value, names)?;
            let slot = self.fds.get_mut(self.nfds).ok_or(libc::EINVAL)?;
            *slot = FdRecord { segment: segment.into(), offset: rule.offset, file: file.into() };
            self.nfds += 1;
            return Ok(None);
        }
        if value == 0 {
            return if rule.has(rule_flags::NULL_OK) { Ok(None) } else { Err(libc::EFAULT) };
        }
        // A count outside of a block that is too short is the driver's to refuse.
        let count_off = rule.count_off.get();
        if count_off != NO_OFFSET && read_uint(bytes, count_off, rule.count_width).is_none() {
            return Ok(None);
        }
        let length = rule.length(bytes).ok_or(libc::EINVAL)?;
        let slot = self.segments.get_mut(self.nsegs).ok_or(libc::EINVAL)?;
        *slot = Segment { user: value, length, flags: rule.flags, pages: None };
        self.nsegs += 1;
        let at = self.data.length;
        if rule.has(rule_flags::IN) {
            self.copy(value, length as usize)?;
        }
        Ok(Some(at))
    }

    /// Memory that the call registers, in a block as for [`Call::rule`]. What is wrong with it
    /// is the backend's to say.
    fn pages(&mut self, block: (usize, usize), rule: &Rule) -> Result<(), Errno> {
        let bytes = self.data.range(block.0, block.1);
        let (Some(user), Some(length)) = (rule.value(bytes), rule.registers(bytes)) else {
            return Ok(());
        };
        let wanted = length.div_ceil(PAGE);
        let fits = user % PAGE == 0 && (1..=rule.max.get().into()).contains(&wanted);
        // CAST: no more than `max`.
        let pages = if fits { wanted as u32 } else { 0 };
        if self.nsegs == self.segments.len() {
            return Err(libc::EINVAL);
        }
        let Pinned { registration, runs } = self.caller.pin(user, pages)?;
        let room = wire::MAX_REQUEST as usize - self.data.length;
        let (error, runs) = match runs {
            Ok(runs) if size_of_val(&runs[..]) + size_of::<wire::Pages>() > room => {
                (libc::ENOMEM, Vec::new())
            }
            Ok(runs) if pages > 0 => (0, runs),
            Ok(_) => (libc::EINVAL, Vec::new()),
            Err(errno) => (errno, Vec::new()),
        };
        let head = wire::Pages {
            registration: registration.into(),
            // CAST: an errno is positive.
            error: (error as u32).into(),
            ..wire::Pages::default()
        };
        self.data.push(head.as_bytes());
        self.data.push(runs.as_bytes());
        // CAST: a request is bounded.
        let length = (size_of_val(&head) + size_of_val(&runs[..])) as u32;
        self.segments[self.nsegs] = Segment { user, length, flags: 0, pages: Some(registration) };
        self.nsegs += 1;
        Ok(())
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
        let written = self.segments[..self.nsegs].iter().map(|segment| padded(segment.returned()));
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
        let mut take = |length: usize| {
            let (bytes, more) = rest.split_at_checked(padded(length)).ok_or(malformed)?;
            rest = more;
            Ok::<&[u8], Errno>(&bytes[..length])
        };
        if head.arg_len.get() as usize != self.argument_len {
            return Err(malformed);
        }
        self.caller.write(self.argument, take(self.argument_len)?)?;
        for segment in self.segments[..self.nsegs].iter().filter(|_| !failed) {
            let bytes = take(segment.returned())?;
            match segment.pages {
                Some(registration) => {
                    let head = wire::Pages::read_from_bytes(bytes).map_err(|_| malformed)?;
                    self.caller.held(registration, head.held.get() == 1);
                }
                None => self.caller.write(segment.user, bytes)?,
            }
        }
        Ok(i32::from_le_bytes(head.ret.to_bytes()))
    }
}

/// The entry of a call: by the number's low 8 bits and its size, or by the whole number,
/// which then need not tell the size.
fn find(rules: &Rules, kind: FileKind, cmd: u32, size: u32) -> Option<&Ioctl> {
    let by_nr = |entry: &&Ioctl| entry.flags & ioctl_flags::BY_NR != 0;
    let whole = |entry: &&Ioctl| (entry.kind, entry.nr.get()) == (kind as u8, cmd) && !by_nr(entry);
    rules.ioctl(kind, cmd, size).filter(by_nr).or_else(|| rules.ioctls.iter().find(whole))
}

fn file_of(rule: &Rule, value: u64, names: &dyn Names) -> Result<u32, Errno> {
    // CAST: the caller's int, sign and all. Drivers read a wide one as an int, or as 64 bits.
    let low = i64::from(value as u32 as i32);
    let fd = if rule.fd_width == 4 || low < 0 { low } else { value as i64 };
    let none = fd < 0 && rule.has(rule_flags::NEGATIVE_NONE)
        || value == 0 && rule.has(rule_flags::ZERO_NONE);
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

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use nvguest_abi::rules::OP_BUFFER;

    use super::*;

    const CMD: u32 = RM_IOCTL | 8 << 16 | 7;

    /// [`CMD`] of nvidiactl: a pointer to 12 bytes that are read and written.
    fn rules() -> Rules {
        let rule = Rule {
            op: OP_BUFFER,
            flags: rule_flags::IN | rule_flags::OUT,
            count_off: NO_OFFSET.into(),
            add: 12.into(),
            max: 4096.into(),
            ..Rule::new_zeroed()
        };
        let ioctl = Ioctl {
            kind: FileKind::Ctl as u8,
            flags: ioctl_flags::BY_NR,
            select: NO_OFFSET.into(),
            nr: 7.into(),
            size: 8.into(),
            nrules: 1.into(),
            ..Ioctl::new_zeroed()
        };
        Rules { ioctls: vec![ioctl], cases: Vec::new(), rules: vec![rule] }
    }

    #[test]
    fn a_buffer_is_read_where_its_pointer_leads_and_the_reply_is_written_there() {
        let mut buffer = [7_u8; 12];
        let mut argument = (buffer.as_mut_ptr().expose_provenance() as u64).to_le_bytes();
        let pointer = argument;
        let at = argument.as_mut_ptr().expose_provenance() as u64;
        // SAFETY: both addresses are of arrays that outlive the call.
        let caller = unsafe { Ourselves::vouched_for() };
        let call = Call::gather(caller, &rules(), (FileKind::Ctl, CMD), at, &ByHandle).unwrap();
        let mut request = Bytes::default();
        call.write(&mut request);
        assert!(request.as_slice().ends_with(&[7, 7, 7, 7, 0, 0, 0, 0]));

        let head = IoctlResp { ret: 5.into(), arg_len: 8.into() };
        let reply = [head.as_bytes(), &pointer, &[9; 16]].concat();
        assert_eq!(reply.len(), call.reply_len());
        assert_eq!(call.finish(&reply, false), Ok(5));
        assert_eq!((buffer, argument), ([9; 12], pointer));
    }

    #[test]
    fn nothing_is_read_at_null() {
        // SAFETY: the only address is null.
        let caller = unsafe { Ourselves::vouched_for() };
        let call = Call::gather(caller, &rules(), (FileKind::Ctl, CMD), 0, &ByHandle);
        assert_eq!(call.err(), Some(libc::EFAULT));
    }
}
