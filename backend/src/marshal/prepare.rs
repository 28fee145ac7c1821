//! Gather: a request becomes a host argument in scratch memory.

use std::sync::Arc;

use nvguest_abi::compiled::{Compiled, Verdict};
use nvguest_abi::rules::{ioctl_flags, Ioctl, NO_OFFSET};
use nvguest_abi::FileKind;
use zerocopy::FromBytes;

use super::bounded::Bounded;
use super::pages::{Offer, SideBySide};
use super::plan::{Descriptor, Plan, Segment, MAX_SEGMENTS};
use super::request::{Call, MAX_FDS};
use super::scratch::{BlockId, Frame, Scratch};
use super::{reply, rm};
use crate::errno::Errno;
use crate::host::{Host, HostFile};
use crate::policy::{self, Answer, What};
use crate::wire;

/// Fields of one call that hold something else for the host than for the caller.
const MAX_PATCHES: usize = MAX_SEGMENTS + MAX_FDS + 8;
/// Bytes that an ioctl number can say.
const MAX_IOCTL_SIZE: usize = (1 << 14) - 1;
/// `_IOWR('F', 0, 0)`.
const RM_IOCTL: u32 = 0xc000_4600;

/// The files of a guest process, as the session knows them.
pub trait Files {
    /// The host's number for the guest's file, which must be of a kind with its bit in `kinds`.
    fn host_number(&self, file: u32, kinds: u32) -> Result<i32, Errno>;
}

/// A call that the host is not asked, and why.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// Why.
    pub verdict: Verdict,
    /// The name to count and log it by.
    pub what: What,
    /// What the driver would say.
    pub answer: Answer,
}

impl Refused {
    /// A refusal of the session's own, answered by RM's status where RM would.
    pub fn new(compiled: &Compiled, kind: FileKind, call: &Call<'_>, verdict: Verdict) -> Self {
        Self::of(compiled, kind, call, (verdict, call.what(kind)))
    }

    fn of(compiled: &Compiled, kind: FileKind, call: &Call<'_>, why: rm::Refusal) -> Self {
        let (verdict, what) = why;
        let offset = call.status_offset(compiled, kind);
        Self { verdict, what, answer: policy::answer(what, verdict, offset) }
    }
}

impl Call<'_> {
    /// The name of the call on a file of this kind: its control, class or function where it
    /// has one.
    pub fn what(&self, kind: FileKind) -> What {
        let nr = number(kind, self.cmd);
        rm::subject(kind, nr, self.argument).unwrap_or(What::ioctl(kind, nr))
    }

    /// Where RM leaves its status in the argument; [`NO_OFFSET`] if nowhere.
    pub fn status_offset(&self, compiled: &Compiled, kind: FileKind) -> u16 {
        let escape = compiled.escape(kind, number(kind, self.cmd), size(self));
        escape.map_or(NO_OFFSET, |entry| entry.status.get())
    }
}

/// A field whose original the caller gets back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Patch {
    /// The segment that has it.
    pub segment: u16,
    pub offset: u16,
    pub width: u8,
    /// Only where the host left zero: elsewhere it is an output.
    pub if_zero: bool,
    pub original: u64,
}

impl Patch {
    fn overlaps(&self, segment: u16, offset: u16, width: u8) -> bool {
        let end = |offset: u16, width: u8| u32::from(offset) + u32::from(width);
        self.segment == segment
            && u32::from(offset) < end(self.offset, self.width)
            && u32::from(self.offset) < end(offset, width)
    }
}

/// A segment's bytes for the host. A pointer that RM does not follow has no block.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Part {
    pub block: Option<BlockId>,
    /// Bytes that the guest has of it; the block may be longer.
    pub length: usize,
    /// The guest gets it back.
    pub written: bool,
    /// The segment with the pointer to it, and where in that.
    at: (u16, u16),
}

/// A host call, ready to be made.
#[derive(Debug)]
pub struct Prepared<'s> {
    pub(super) frame: Frame<'s>,
    pub(super) argument: BlockId,
    pub(super) parts: Bounded<Part, MAX_SEGMENTS>,
    pub(super) patches: Bounded<Patch, MAX_PATCHES>,
    descriptors: Bounded<Descriptor, MAX_FDS>,
    kind: FileKind,
    nr: u32,
    host_cmd: u32,
    params: Option<BlockId>,
    registered: Option<u16>,
    /// Memory that the call registers, and the segment that tells the guest what became of it.
    pages: Option<(u16, Offer)>,
}

/// Builds the host call for a request on a file of `kind`, or says why not.
pub fn prepare<'s>(
    compiled: &Compiled,
    kind: FileKind,
    call: &Call<'_>,
    files: &dyn Files,
    scratch: &'s mut Scratch,
) -> Result<Prepared<'s>, Refused> {
    let nr = number(kind, call.cmd);
    let refuse = |why| Refused::of(compiled, kind, call, why);
    let refuse_call = |verdict| refuse((verdict, What::ioctl(kind, nr)));

    policy::escape(compiled, kind, nr, size(call)).map_err(refuse_call)?;
    let host_cmd = host_cmd(kind, nr, call).map_err(refuse_call)?;
    let ioctl = layout(compiled, kind, call).ok_or_else(|| refuse_call(Verdict::Unsized))?;
    let plan = Plan::walk(&compiled.rules, ioctl, kind, nr, call)
        .ok_or_else(|| refuse_call(Verdict::Shape))?;
    let least = rm::judge(compiled, kind, nr, &plan).map_err(refuse)?;
    let numbers = resolve(files, &plan)
        .map_err(|errno| Refused { answer: Answer::Errno(errno), ..refuse_call(Verdict::File) })?;

    let limit = |_| Refused::new(compiled, kind, call, Verdict::Limit);
    let mut prepared = build(kind, &plan, least, scratch).map_err(limit)?;
    prepared.nr = nr;
    prepared.host_cmd = host_cmd;
    prepared.aim(&plan, &numbers).map_err(|_| refuse_call(Verdict::Shape))?;
    prepared.pages = plan.pages;
    if prepared.reply_len() > wire::MAX_RESPONSE as usize {
        return Err(limit(Errno::EMSGSIZE));
    }
    Ok(prepared)
}

/// What the driver goes by: `nvidia_ioctl` takes the low 8 bits, the others all.
pub(super) fn number(kind: FileKind, cmd: u32) -> u32 {
    match kind {
        FileKind::Ctl | FileKind::Gpu => cmd & 0xff,
        FileKind::Uvm | FileKind::Modeset | FileKind::Cap => cmd,
    }
}

fn size(call: &Call<'_>) -> u32 {
    u32::try_from(call.argument.len()).unwrap_or(u32::MAX)
}

/// The entry whose rules hold for the call. The guest follows an indirect one
/// itself and names the inner call, so none arrives.
pub(super) fn layout<'c>(
    compiled: &'c Compiled,
    kind: FileKind,
    call: &Call<'_>,
) -> Option<&'c Ioctl> {
    compiled
        .rules
        .ioctl(kind, call.cmd, size(call))
        .filter(|ioctl| ioctl.flags & ioctl_flags::INDIRECT == 0)
}

/// The number for the host, made from what was checked: the caller's other bits
/// could make it one that the kernel itself serves before the driver sees it.
///
/// The one ioctl of nvidia-modeset names another call, and no rule says what the
/// parameters of that reach.
fn host_cmd(kind: FileKind, nr: u32, call: &Call<'_>) -> Result<u32, Verdict> {
    match kind {
        FileKind::Ctl | FileKind::Gpu if call.argument.len() > MAX_IOCTL_SIZE => Err(Verdict::Size),
        FileKind::Ctl | FileKind::Gpu => Ok(RM_IOCTL | size(call) << 16 | nr),
        FileKind::Uvm => Ok(nr),
        FileKind::Modeset | FileKind::Cap => Err(Verdict::Unsized),
    }
}

/// What each descriptor is for the host.
fn resolve(files: &dyn Files, plan: &Plan<'_>) -> Result<Bounded<u64, MAX_FDS>, Errno> {
    let mut numbers = Bounded::default();
    for fd in plan.descriptors.iter() {
        let number = match fd.file {
            0 => fd.none,
            file => {
                let number = files.host_number(file, fd.kinds)?;
                u64::try_from(number).map_err(|_| Errno::EBADF)?
            }
        };
        numbers.push(number).ok_or(Errno::EMFILE)?;
    }
    Ok(numbers)
}

/// Copies argument and buffers into blocks. Their pointers are still the caller's.
fn build<'s>(
    kind: FileKind,
    plan: &Plan<'_>,
    least: u32,
    scratch: &'s mut Scratch,
) -> Result<Prepared<'s>, Errno> {
    let mut frame = scratch.frame();
    let argument = frame.block_of(plan.argument, 0)?;
    let mut parts = Bounded::default();
    let mut params = None;
    for segment in plan.segments.iter() {
        let is_params = segment.parent == 0 && segment.offset == rm::PARAMS;
        let part = part(&mut frame, segment, if is_params { least } else { 0 })?;
        parts.push(part).ok_or(Errno::ENOMEM)?;
        params = params.or(part.block.filter(|_| is_params));
    }
    Ok(Prepared {
        frame,
        argument,
        parts,
        patches: Bounded::default(),
        descriptors: plan.descriptors,
        kind,
        nr: 0,
        host_cmd: 0,
        params,
        registered: None,
        pages: None,
    })
}

fn part(frame: &mut Frame<'_>, segment: &Segment<'_>, least: u32) -> Result<Part, Errno> {
    let length = usize::try_from(segment.length).map_err(|_| Errno::ENOMEM)?;
    let longest = usize::try_from(segment.length.max(least)).map_err(|_| Errno::ENOMEM)?;
    let block = match segment.is_unused() {
        true => None,
        false => Some(frame.block_of(segment.bytes, longest)?),
    };
    let at = (segment.parent, segment.offset);
    Ok(Part { block, length, written: segment.is_written(), at })
}

impl Prepared<'_> {
    /// Aims every pointer at a block and every descriptor at a file, and remembers
    /// what the caller had there.
    fn aim(&mut self, plan: &Plan<'_>, numbers: &[u64]) -> Result<(), Errno> {
        let listing = plan.pages.as_ref().map(|(number, _)| usize::from(*number));
        for (index, segment) in plan.segments.iter().enumerate() {
            let parent = self.replace(segment.parent, segment.offset, 8, 0)?;
            if listing == Some(index + 1) {
                // The pointer is to no block: the session has the memory, and puts it there.
                continue;
            }
            if let Some(block) = self.parts.get(index).and_then(|part| part.block) {
                self.frame.point(parent, usize::from(segment.offset), block)?;
            }
        }
        for (fd, &number) in plan.descriptors.iter().zip(numbers) {
            self.replace(fd.segment, fd.offset, fd.width, number)?;
        }
        for &(segment, offset) in plan.unused.iter() {
            self.replace(segment, offset, 8, 0)?;
            if let Some(patch) = self.patches.last_mut().filter(|_| segment == 0) {
                patch.if_zero = rm::is_returned(self.kind, self.nr, plan.argument, offset);
            }
        }
        self.registered = rm::registered(self.kind, self.nr, plan.argument);
        Ok(())
    }

    /// Puts `value` in a field. The block that it is in; EFAULT if the field is not
    /// in one, or overlaps another that holds something else for the host.
    fn replace(
        &mut self,
        segment: u16,
        offset: u16,
        width: u8,
        value: u64,
    ) -> Result<BlockId, Errno> {
        if self.patches.iter().any(|patch| patch.overlaps(segment, offset, width)) {
            return Err(Errno::EFAULT);
        }
        let block = self.block(segment).ok_or(Errno::EFAULT)?;
        let original = set(self.frame.bytes_mut(block), offset, width, value)?;
        let patch = Patch { segment, offset, width, if_zero: false, original };
        self.patches.push(patch).ok_or(Errno::ENOMEM)?;
        Ok(block)
    }

    fn block(&self, segment: u16) -> Option<BlockId> {
        match usize::from(segment).checked_sub(1) {
            None => Some(self.argument),
            Some(index) => self.parts.get(index)?.block,
        }
    }

    /// The kind of file that the call is on.
    pub fn kind(&self) -> FileKind {
        self.kind
    }

    /// The ioctl's number, as the driver takes it.
    pub fn nr(&self) -> u32 {
        self.nr
    }

    /// The name of the call: its control, class or function where it has one.
    pub fn what(&self) -> What {
        rm::subject(self.kind, self.nr, self.argument()).unwrap_or(What::ioctl(self.kind, self.nr))
    }

    /// The argument, as the host sees it.
    pub fn argument(&self) -> &[u8] {
        self.frame.bytes(self.argument)
    }

    /// The argument, to change. Pointers and descriptors in it are the host's
    /// already; nothing of the guest's may be put in their place.
    pub fn argument_mut(&mut self) -> &mut [u8] {
        self.frame.bytes_mut(self.argument)
    }

    /// Parameters of a control or an allocation, at least as long as RM copies.
    pub fn params(&self) -> Option<&[u8]> {
        self.params.map(|block| self.frame.bytes(block))
    }

    /// See [`Prepared::params`] and [`Prepared::argument_mut`].
    pub fn params_mut(&mut self) -> Option<&mut [u8]> {
        self.params.map(|block| self.frame.bytes_mut(block))
    }

    /// All buffers that the call reaches.
    pub fn buffers(&self) -> impl Iterator<Item = &[u8]> + '_ {
        self.parts.iter().filter_map(|part| part.block).map(|block| self.frame.bytes(block))
    }

    /// The buffer that the pointer at `offset` of `segment` leads to: 0 is the argument, 1 the
    /// parameters, which are the only buffer of a control's argument.
    pub fn behind(&self, segment: u16, offset: u16) -> Option<&[u8]> {
        let part = self.parts.iter().find(|part| part.at == (segment, offset))?;
        part.block.map(|block| self.frame.bytes(block))
    }

    /// The buffer that the pointer at `offset` of a control's parameters leads to, to change.
    pub fn behind_params_mut(&mut self, offset: u16) -> Option<&mut [u8]> {
        let part = self.parts.iter().find(|part| part.at == (1, offset))?;
        part.block.map(|block| self.frame.bytes_mut(block))
    }

    /// The guest's file that the descriptor at `offset` of `segment` names: 0 is
    /// the argument, 1 the parameters.
    pub fn file_at(&self, segment: u16, offset: u16) -> Option<u32> {
        let here = |fd: &&Descriptor| fd.segment == segment && fd.offset == offset;
        self.descriptors.iter().find(here).map(|fd| fd.file).filter(|&file| file != 0)
    }

    /// Where the argument wants the address of memory that the caller registers: null until
    /// [`Prepared::register`].
    pub fn registered(&self) -> Option<u16> {
        self.registered
    }

    /// The memory that the caller registers, as the guest describes it.
    pub fn offer(&self) -> Option<&Offer> {
        self.pages.as_ref().map(|(_, offer)| offer)
    }

    /// Hands RM the same memory in this process.
    pub fn register(&mut self, memory: &Arc<SideBySide>) -> Result<(), Errno> {
        let offset = self.registered.ok_or(Errno::EINVAL)?;
        self.frame.register(self.argument, offset.into(), Arc::clone(memory).into())
    }

    /// Tells the guest that the host has the memory from now on.
    pub fn hold(&mut self) {
        let number = self.pages.as_ref().map(|(number, _)| *number);
        let Some(block) = number.and_then(|number| self.block(number)) else { return };
        if let Ok((head, _)) = wire::Pages::mut_from_prefix(self.frame.bytes_mut(block)) {
            head.held = 1.into();
        }
    }

    /// Makes the call. What the driver's ioctl returned; the blocks have the rest.
    pub fn execute(&mut self, host: &dyn Host, file: &HostFile) -> Result<i32, Errno> {
        if let Some(offset) = self.registered {
            let address = nvguest_abi::rules::read_uint(self.argument(), offset, 8);
            if address.unwrap_or(0) == 0 {
                return Err(Errno::EINVAL);
            }
        }
        host.ioctl(file, self.host_cmd, &mut self.frame)
    }

    /// Bytes of the reply after its header, if the call succeeds.
    pub fn reply_len(&self) -> usize {
        let written = self.parts.iter().filter(|part| part.written).map(|part| part.length);
        reply::length(self.argument().len(), written)
    }
}

/// Writes the low `width` bytes of `value` at `offset`, and returns what was there.
fn set(block: &mut [u8], offset: u16, width: u8, value: u64) -> Result<u64, Errno> {
    let original = nvguest_abi::rules::read_uint(block, offset, width).ok_or(Errno::EFAULT)?;
    let start = usize::from(offset);
    let field = block.get_mut(start..start + usize::from(width)).ok_or(Errno::EFAULT)?;
    let bytes = value.to_le_bytes();
    field.copy_from_slice(bytes.get(..field.len()).ok_or(Errno::EFAULT)?);
    Ok(original)
}
