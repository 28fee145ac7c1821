//! What an admin who looks is shown of a call. Nothing is kept for it while nobody does: it is
//! read from the request and its reply.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use nvguest_abi::rules::read_uint;
use zerocopy::FromBytes;

use super::session::{GuestFile, Session};
use crate::errno::Errno;
use crate::marshal::Call;
use crate::policy::What;
use crate::transport::trace::Record;
use crate::wire::{self, Kind};

impl Session {
    /// Writes down a call that was just served: how long it took, what came of it, and its
    /// reply with room for the header.
    pub fn traced(
        &self,
        request: &[u8],
        file: Option<&GuestFile>,
        (took, outcome, reply): (Duration, Result<(), Errno>, &[u8]),
    ) {
        let Ok((header, body)) = wire::ReqHeader::read_from_prefix(request) else { return };
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let ioctl = file.filter(|_| Kind::from_number(header.kind.get()) == Some(Kind::Ioctl));
        let ioctl = ioctl.and_then(|file| Some((file, Call::parse(body).ok()?)));
        self.trace.note(&Record {
            at_ns: nanos(now),
            took_ns: nanos(took),
            tgid: self.start.process.tgid,
            // CAST: kinds are few; what is none was not admitted.
            kind: header.kind.get() as u8,
            file: file.map_or(Record::NO_FILE, |file| file.kind as u8),
            what: ioctl.as_ref().map(|(file, call)| parts(call.what(file.kind))),
            errno: outcome.err().map_or(0, Errno::status),
            status: ioctl.and_then(|(file, call)| self.status_of(file, &call, reply)),
        });
    }

    /// RM's status in the reply to a call; `None` where RM leaves none.
    fn status_of(&self, file: &GuestFile, call: &Call<'_>, reply: &[u8]) -> Option<u32> {
        let offset = call.status_offset(&self.start.compiled, file.kind);
        let body = reply.get(size_of::<wire::RespHeader>()..)?;
        let (head, rest) = wire::IoctlResp::read_from_prefix(body).ok()?;
        let argument = rest.get(..head.arg_len.get() as usize)?;
        u32::try_from(read_uint(argument, offset, 4)?).ok()
    }
}

fn parts(what: What) -> (u8, u32) {
    let (part, number) = what.to_parts();
    // CAST: parts are below 256, and numbers have 32 bits.
    (part as u8, number as u32)
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
