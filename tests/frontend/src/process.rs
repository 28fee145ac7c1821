//! A guest process and its files.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

use nvguest_abi::FileKind;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::gather::{Bytes, Call, Names, Ourselves};
use crate::guest::{body_of, header, message};
use crate::pins::Program;
use crate::wire::{self, Kind};
use crate::{Error, Guest, Result};

/// A process of the guest.
pub struct Process {
    /// Its guest.
    pub guest: Arc<Guest>,
    /// How its requests name it.
    pub caller: wire::Caller,
    slot: AtomicU32,
}

impl Process {
    /// The process `tgid` that started at `start_ns`.
    pub fn new(guest: Arc<Guest>, tgid: u32, start_ns: u64) -> Arc<Self> {
        let caller =
            wire::Caller { tgid: tgid.into(), euid: 1000.into(), start_ns: start_ns.into() };
        Arc::new(Self { guest, caller, slot: AtomicU32::new(wire::NO_SLOT) })
    }

    /// Its worker's slot, as the last OPEN said.
    pub fn slot(&self) -> u32 {
        self.slot.load(Ordering::Acquire)
    }

    /// Opens a node by its name below `/dev`, in the process's own slot if it has one.
    pub fn open(self: &Arc<Self>, name: &str) -> Result<File> {
        let (node, kind) = self.guest.node(name)?;
        let slot = self.slot();
        match self.open_in(slot, node, kind) {
            // The worker has ended for want of files; the slot is another's.
            Err(Error::Errno(nix::libc::ENODEV)) if slot != wire::NO_SLOT => {
                let same = (Ordering::AcqRel, Ordering::Relaxed);
                let _ = self.slot.compare_exchange(slot, wire::NO_SLOT, same.0, same.1);
                self.open_in(wire::NO_SLOT, node, kind)
            }
            opened => opened,
        }
    }

    /// Opens a node by a request on one slot's queue.
    pub fn open_in(self: &Arc<Self>, slot: u32, node: u32, kind: FileKind) -> Result<File> {
        let body = wire::OpenReq { node: node.into(), flags: 2.into() };
        let request = message(header(Kind::Open, 0, self.caller), body.as_bytes());
        let mut reply = [0; size_of::<wire::RespHeader>() + size_of::<wire::OpenResp>()];
        let count = self.guest.queue(slot).call(&request, &mut reply)?;
        let opened = wire::OpenResp::read_from_bytes(body_of(&reply[..count])?)
            .map_err(|_| Error::Malformed("OPEN"))?;
        let slot = opened.slot.get();
        self.slot.store(slot, Ordering::Release);
        Ok(File { process: Arc::clone(self), handle: opened.file.get(), kind, slot })
    }
}

/// A file of a guest process. Dropping it closes nothing, as when a process is killed
/// and its guest has not told the backend.
#[derive(Clone)]
pub struct File {
    /// Its process.
    pub process: Arc<Process>,
    /// Its name on the wire.
    pub handle: u32,
    /// What it is.
    pub kind: FileKind,
    /// The queue for its requests.
    pub slot: u32,
}

/// A placement, as the guest maps it.
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Where it is in this process.
    pub address: *mut u8,
    /// Bytes.
    pub length: u64,
    /// Where it is in the window.
    pub offset: u64,
    /// Its name on the wire.
    pub placement: u32,
    /// How it is to be cached.
    pub cache: u8,
    /// Whether it may be written.
    pub read_only: bool,
}

// SAFETY: an address and numbers; whoever reads or writes there does so volatile.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Reads a word of the memory, whatever is there now.
    pub fn read(&self, offset: usize) -> u64 {
        assert!(offset % 8 == 0 && (offset as u64) < self.length);
        // SAFETY: in the window, which outlives its guest's mappings; aligned.
        unsafe { self.address.add(offset).cast::<u64>().read_volatile() }
    }

    /// Writes a word of the memory, whatever is there now.
    pub fn write(&self, offset: usize, value: u64) {
        assert!(offset % 8 == 0 && (offset as u64) < self.length);
        // SAFETY: as in `read`.
        unsafe { self.address.add(offset).cast::<u64>().write_volatile(value) }
    }
}

impl File {
    /// A request of this file's with this body; the reply's body.
    pub fn request(&self, kind: Kind, body: &[u8], room: usize) -> Result<Vec<u8>> {
        let request = message(header(kind, self.handle, self.process.caller), body);
        let room = size_of::<wire::RespHeader>() + room;
        let reply = self.process.guest.request(self.slot, &request, room)?;
        Ok(body_of(&reply)?.to_vec())
    }

    /// A request whose reply has nothing but its header.
    fn plain(&self, kind: Kind, body: &[u8]) -> Result<()> {
        let request = message(header(kind, self.handle, self.process.caller), body);
        let mut reply = [0; size_of::<wire::RespHeader>()];
        let count = self.process.guest.queue(self.slot).call(&request, &mut reply)?;
        body_of(&reply[..count]).map(drop)
    }

    /// CLOSE.
    pub fn close(&self) -> Result<()> {
        self.plain(Kind::Close, &[])
    }

    /// ARM.
    pub fn arm(&self) -> Result<()> {
        self.plain(Kind::Arm, &[])
    }

    /// An ioctl whose argument reaches nothing else, or only through [`File::ioctl_raw`]'s
    /// contract. RM's own number: `_IOWR('F', nr, T)`.
    ///
    /// # Safety
    ///
    /// Pointers in `argument` must be null or lead to as much memory as RM reads and writes.
    pub unsafe fn rm<T: FromBytes + IntoBytes + Immutable + KnownLayout>(
        &self,
        nr: u32,
        argument: &mut T,
        names: &dyn Names,
    ) -> Result<i32> {
        let size = u32::try_from(size_of::<T>()).expect("INVARIANT: arguments are small");
        let cmd = 0xc000_4600 | size << 16 | nr;
        // SAFETY: passed on.
        unsafe { self.ioctl_raw(cmd, argument.as_mut_bytes().as_mut_ptr(), names) }
    }

    /// An ioctl as a program makes it.
    ///
    /// # Safety
    ///
    /// As for the ioctl: `argument`, and the pointers in it that the schema follows, must
    /// be null or lead to as much memory as the driver would read and write.
    pub unsafe fn ioctl_raw(&self, cmd: u32, argument: *mut u8, names: &dyn Names) -> Result<i32> {
        let guest = &self.process.guest;
        let rules = &guest.probe()?.rules;
        // SAFETY: passed on, until the call is finished.
        let own = unsafe { Ourselves::vouched_for() };
        let caller = Program { own, pins: &guest.pins };
        let argument = argument.expose_provenance() as u64;
        let call = Call::gather(caller, rules, (self.kind, cmd), argument, names);
        let call = call.map_err(Error::Errno)?;
        let mut request = Bytes::default();
        let mut head = header(Kind::Ioctl, self.handle, self.process.caller);
        request.grow(size_of::<wire::ReqHeader>());
        call.write(&mut request);
        // CAST: a request has at most a MiB.
        head.len = (request.as_slice().len() as u32).into();
        request.front(size_of::<wire::ReqHeader>()).copy_from_slice(head.as_bytes());
        let room = size_of::<wire::RespHeader>() + call.reply_len();
        let mut reply = Bytes::default();
        let count = guest.queue(self.slot).call(request.as_slice(), reply.grow(room))?;
        let reply = reply.as_slice().get(..count).unwrap_or(&[]);
        let (resp, body) =
            wire::RespHeader::read_from_prefix(reply).map_err(|_| Error::Malformed("IOCTL"))?;
        let status = resp.status.get();
        let outcome = call.finish(body, status != 0).map_err(Error::Errno)?;
        match i32::try_from(status).unwrap_or(i32::MAX) {
            0 => Ok(outcome),
            errno => Err(Error::Errno(errno)),
        }
    }

    /// MAP.
    pub fn map(&self, length: u64, writable: bool) -> Result<Mapping> {
        let write = if writable { wire::PROT_WRITE } else { 0 };
        let body = wire::MapReq {
            offset: 0.into(),
            length: length.into(),
            prot: (wire::PROT_READ | write).into(),
            reserved: 0.into(),
        };
        let request = message(header(Kind::Map, self.handle, self.process.caller), body.as_bytes());
        let mut reply = [0; size_of::<wire::RespHeader>() + size_of::<wire::MapResp>()];
        let guest = &self.process.guest;
        let count = guest.queue(self.slot).call(&request, &mut reply)?;
        let mapped = wire::MapResp::read_from_bytes(body_of(&reply[..count])?)
            .map_err(|_| Error::Malformed("MAP"))?;
        let window = guest.window.as_ref().ok_or(Error::Malformed("MAP"))?;
        let offset = mapped.window_offset.get();
        let length = mapped.length.get();
        if offset.checked_add(length).is_none_or(|end| end > window.size()) {
            return Err(Error::Malformed("MAP"));
        }
        Ok(Mapping {
            address: window.at(offset),
            length,
            offset,
            placement: mapped.placement.get(),
            cache: mapped.cache,
            read_only: mapped.flags & wire::MAP_READ_ONLY != 0,
        })
    }

    /// UNMAP.
    pub fn unmap(&self, mapping: &Mapping) -> Result<()> {
        let body = wire::UnmapReq { placement: mapping.placement.into(), reserved: 0.into() };
        self.plain(Kind::Unmap, body.as_bytes())
    }
}
