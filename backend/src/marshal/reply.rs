//! Scatter: what the host left in the blocks becomes a reply.

use nvguest_abi::compiled::Compiled;
use nvguest_abi::FileKind;
use zerocopy::IntoBytes;

use super::plan::Plan;
use super::prepare::{layout, number, Patch, Prepared, Refused};
use super::request::Call;
use crate::errno::Errno;
use crate::policy::Answer;
use crate::wire::{self, padded, IoctlResp};

impl Prepared<'_> {
    /// Appends what follows the header of the reply to a call that returned `result`.
    ///
    /// The caller's own pointers and descriptors are back in their places. A call
    /// that failed has its argument alone, as the driver copies it back too; one
    /// that failed with EFAULT has nothing.
    pub fn finish(&self, result: Result<i32, Errno>, out: &mut Vec<u8>) {
        if result == Err(Errno::EFAULT) {
            return;
        }
        out.reserve(self.reply_len());
        head(out, result.unwrap_or(0), self.argument().len());
        self.append(out, 0, self.argument());
        if result.is_err() {
            return;
        }
        for (segment, part) in (1_u16..).zip(self.parts.iter()) {
            let Some(block) = part.block.filter(|_| part.written) else { continue };
            let bytes = self.frame.bytes(block);
            self.append(out, segment, bytes.get(..part.length).unwrap_or(bytes));
        }
    }

    /// Appends a segment with the caller's own values in their places.
    fn append(&self, out: &mut Vec<u8>, segment: u16, bytes: &[u8]) {
        let start = out.len();
        append(out, bytes);
        let Some(written) = out.get_mut(start..start + bytes.len()) else { return };
        for patch in self.patches.iter().filter(|patch| patch.segment == segment) {
            patch.restore(written);
        }
    }
}

impl Patch {
    fn restore(&self, bytes: &mut [u8]) {
        let start = usize::from(self.offset);
        let original = self.original.to_le_bytes();
        let Some(field) = bytes.get_mut(start..start + usize::from(self.width)) else { return };
        let Some(original) = original.get(..field.len()) else { return };
        if !self.if_zero || field.iter().all(|&byte| byte == 0) {
            field.copy_from_slice(original);
        }
    }
}

impl Refused {
    /// Appends what follows the header of the reply to a call that was refused, or
    /// says which errno the reply has instead.
    ///
    /// Buffers come back as they were sent; those that only RM writes are zero.
    pub fn finish(
        &self,
        compiled: &Compiled,
        kind: FileKind,
        call: &Call<'_>,
        out: &mut Vec<u8>,
    ) -> Result<(), Errno> {
        let (offset, status) = match self.answer {
            Answer::Errno(errno) => return Err(errno),
            Answer::Status { offset, status } => (usize::from(offset), status),
        };
        let plan = layout(compiled, kind, call).and_then(|ioctl| {
            Plan::walk(&compiled.rules, ioctl, kind, number(kind, call.cmd), call)
        });
        let segments = match &plan {
            Some(plan) => &plan.segments[..],
            None if call.lengths.is_empty() => &[],
            None => return Err(Errno::EINVAL),
        };
        let written = || segments.iter().filter(|segment| segment.is_written());
        let lengths = written().map(|segment| segment.length as usize);
        if length(call.argument.len(), lengths) > wire::MAX_RESPONSE as usize {
            return Err(Errno::ENOMEM);
        }

        head(out, 0, call.argument.len());
        let start = out.len();
        append(out, call.argument);
        let field = out.get_mut(start..).and_then(|argument| argument.get_mut(offset..offset + 4));
        field.ok_or(Errno::EINVAL)?.copy_from_slice(&status.to_le_bytes());
        for segment in written() {
            let end = out.len() + padded(segment.length as usize);
            append(out, segment.bytes);
            out.resize(end, 0);
        }
        Ok(())
    }
}

/// Bytes of a reply after its header.
pub(super) fn length(argument: usize, written: impl Iterator<Item = usize>) -> usize {
    let parts = std::iter::once(argument).chain(written);
    parts.fold(size_of::<IoctlResp>(), |sum, part| sum.saturating_add(padded(part)))
}

fn head(out: &mut Vec<u8>, ret: i32, argument: usize) {
    let head = IoctlResp {
        // CAST: the same bits; the guest reads them back as an int.
        ret: (ret as u32).into(),
        arg_len: u32::try_from(argument).unwrap_or(u32::MAX).into(),
    };
    out.extend_from_slice(head.as_bytes());
}

fn append(out: &mut Vec<u8>, bytes: &[u8]) {
    let end = out.len() + padded(bytes.len());
    out.extend_from_slice(bytes);
    out.resize(end, 0);
}
