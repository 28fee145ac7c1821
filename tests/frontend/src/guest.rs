//! The guest as a whole: its queues, and the messages that are not one process's.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::{Arc, OnceLock};

use nvguest_abi::rules::Rules;
use nvguest_abi::FileKind;
use vmm_sys_util::eventfd::EventFd;
use zerocopy::{FromBytes, IntoBytes};

use crate::events::{self, EventQueue, Mailbox, Sink};
use crate::memory::Memory;
use crate::pins::Pins;
use crate::queue::{Manner, Queue};
use crate::ring::Layout;
use crate::vmm::{Options, Vmm};
use crate::window::{Place, Window};
use crate::wire::{self, Kind};
use crate::{Error, Process, Result};

/// Bytes of NODES or SCHEMA that are asked for at once.
const CHUNK: u32 = 2048;

/// One record of NODES.
#[derive(Clone, Debug)]
pub struct NodeRecord {
    /// What it is and how large.
    pub header: wire::NodeHeader,
    /// Its name.
    pub name: String,
    /// Its content, or the name of its major.
    pub data: Vec<u8>,
}

/// A guest that has a device.
pub struct Guest {
    /// The VMM.
    pub vmm: Vmm,
    /// Its memory.
    pub memory: Arc<Memory>,
    /// Its window, if the backend has one.
    pub window: Option<Arc<Window>>,
    /// Event records that nobody has taken.
    pub mailbox: Arc<Mailbox>,
    /// Memory that its programs register.
    pub pins: Pins,
    /// Options it was made with.
    pub options: Options,
    control: Vec<Queue>,
    events: Vec<Arc<EventQueue>>,
    schema: OnceLock<Schema>,
    stop: Arc<EventFd>,
}

/// What a guest downloads at probe.
#[derive(Debug)]
pub struct Schema {
    /// The answer to HELLO.
    pub hello: wire::HelloResp,
    /// The gather rules.
    pub rules: Rules,
    /// What to create.
    pub nodes: Vec<NodeRecord>,
}

impl Guest {
    /// A guest of the backend that listens on `socket`, with a mailbox for events.
    pub fn connect(socket: &Path, options: Options) -> Result<Arc<Self>> {
        let mailbox = Arc::new(Mailbox::default());
        let sink = mailbox.sink();
        Self::start(UnixStream::connect(socket)?, options, mailbox, sink)
    }

    /// A guest on a connected socket, whose event records go to `sink`.
    pub fn start(
        stream: UnixStream,
        options: Options,
        mailbox: Arc<Mailbox>,
        sink: Sink,
    ) -> Result<Arc<Self>> {
        Self::start_in(stream, options, (mailbox, sink), None)
    }

    /// The same with something else that takes the placements.
    pub fn start_in(
        stream: UnixStream,
        options: Options,
        (mailbox, sink): (Arc<Mailbox>, Sink),
        place: Option<Arc<dyn Place>>,
    ) -> Result<Arc<Self>> {
        let mut vmm = Vmm::connect(stream, &options)?;
        let pairs = 1 + options.slots;
        let queue = Queue::bytes(options.queue_size);
        let fixed = pairs * (queue + EventQueue::bytes(options.queue_size));
        let memory = Arc::new(Memory::create(fixed, options.heap)?);
        let size = match vmm.shmem() {
            Ok(sizes) => sizes[usize::from(wire::SHM_WINDOW)],
            Err(_) => 0,
        };
        let window = match size {
            0 => None,
            size => Some(Arc::new(Window::reserve(size, options.hole)?)),
        };
        if let Some(window) = &window {
            let place = place.unwrap_or_else(|| window.clone());
            vmm.serve(Arc::clone(&memory), place, &options)?;
        }
        vmm.start(&memory, &options)?;
        let mut guest = Self {
            vmm,
            memory,
            window,
            mailbox,
            pins: Pins::default(),
            options,
            control: Vec::new(),
            events: Vec::new(),
            schema: OnceLock::new(),
            stop: Arc::new(EventFd::new(nix::libc::EFD_CLOEXEC)?),
        };
        guest.make_queues(pairs)?;
        let (queues, stop) = (guest.events.clone(), Arc::clone(&guest.stop));
        events::serve(queues, stop, sink, guest.options.attentive)?;
        for pair in 0..pairs {
            guest.vmm.start_queue(2 * pair, guest.control[pair].ring(), 0)?;
            guest.vmm.start_queue(2 * pair + 1, guest.events[pair].ring(), 0)?;
        }
        Ok(Arc::new(guest))
    }

    fn make_queues(&mut self, pairs: usize) -> Result<()> {
        let options = &self.options;
        let size = options.queue_size;
        let manner = Manner {
            event_idx: options.event_idx,
            indirect: options.indirect,
            poll: options.poll,
            patience: options.patience,
        };
        let mut base = 0;
        for _ in 0..pairs {
            let memory = Arc::clone(&self.memory);
            self.control.push(Queue::new(Arc::clone(&memory), Layout { base, size }, manner)?);
            base += Queue::bytes(size);
            let (event_idx, buffers) = (options.event_idx, options.event_buffers);
            let layout = Layout { base, size };
            self.events.push(Arc::new(EventQueue::new(memory, layout, event_idx, buffers)?));
            base += EventQueue::bytes(size);
        }
        Ok(())
    }

    /// The control queue of a slot, or the broker's for [`wire::NO_SLOT`].
    pub fn queue(&self, slot: u32) -> &Queue {
        let index = slot.checked_add(1).map_or(0, |index| index as usize);
        self.control.get(index).unwrap_or(&self.control[0])
    }

    /// The event queue of a slot, or the broker's for [`wire::NO_SLOT`].
    pub fn event_queue(&self, slot: u32) -> &EventQueue {
        let index = slot.checked_add(1).map_or(0, |index| index as usize);
        self.events.get(index).unwrap_or(&self.events[0])
    }

    /// Sends a request on a slot's queue; the whole reply, at most `room` bytes.
    pub fn request(&self, slot: u32, request: &[u8], room: usize) -> Result<Vec<u8>> {
        let mut reply = vec![0; room];
        let count = self.queue(slot).call(request, &mut reply)?;
        reply.truncate(count);
        Ok(reply)
    }

    /// HELLO.
    pub fn hello(&self, flags: u32) -> Result<wire::HelloResp> {
        let body = wire::HelloReq { version: u32::from(wire::VERSION).into(), flags: flags.into() };
        let header = header(Kind::Hello, 0, wire::Caller::default());
        let reply = self.simple(header, body.as_bytes())?;
        wire::HelloResp::read_from_bytes(&reply).map_err(|_| Error::Malformed("HELLO"))
    }

    /// CLOCK.
    pub fn clock(&self) -> Result<wire::ClockResp> {
        let header = header(Kind::Clock, 0, wire::Caller::default());
        let reply = self.simple(header, &[])?;
        wire::ClockResp::read_from_bytes(&reply).map_err(|_| Error::Malformed("CLOCK"))
    }

    /// A message of the guest as a whole, on the broker's queue; the reply's body.
    fn simple(&self, header: wire::ReqHeader, body: &[u8]) -> Result<Vec<u8>> {
        let reply = self.request(wire::NO_SLOT, &message(header, body), 4096)?;
        Ok(body_of(&reply)?.to_vec())
    }

    /// NODES or SCHEMA, whole.
    pub fn download(&self, kind: Kind, length: u32) -> Result<Vec<u8>> {
        let mut blob = Vec::new();
        while blob.len() < length as usize {
            // CAST: below `length`.
            let offset = blob.len() as u32;
            let read = wire::ReadReq { offset: offset.into(), size: CHUNK.into() };
            let part = self.simple(header(kind, 0, wire::Caller::default()), read.as_bytes())?;
            if part.is_empty() {
                return Err(Error::Malformed("a download"));
            }
            blob.extend_from_slice(&part);
        }
        Ok(blob)
    }

    /// Everything that a guest asks at probe; asked once.
    pub fn probe(&self) -> Result<&Schema> {
        if let Some(schema) = self.schema.get() {
            return Ok(schema);
        }
        let hello = self.hello(wire::HELLO_FRESH)?;
        let nodes = self.download(Kind::Nodes, hello.nodes_len.get())?;
        let schema = self.download(Kind::Schema, hello.schema_len.get())?;
        let (rules, rest) = Rules::from_schema(&schema).ok_or(Error::Malformed("SCHEMA"))?;
        if !rest.is_empty() {
            return Err(Error::Malformed("SCHEMA"));
        }
        let nodes = parse_nodes(&nodes).ok_or(Error::Malformed("NODES"))?;
        Ok(self.schema.get_or_init(|| Schema { hello, rules, nodes }))
    }

    /// The number of a device node, and what it is, by its name below `/dev`.
    pub fn node(&self, name: &str) -> Result<(u32, FileKind)> {
        let nodes = &self.probe()?.nodes;
        let device =
            |node: &NodeRecord| node.header.kind.get() == wire::NODE_CDEV && node.name == name;
        let index = nodes.iter().position(device).ok_or(Error::Errno(nix::libc::ENOENT))?;
        let kind = FileKind::from_number(nodes[index].header.file_kind);
        // CAST: nodes are few.
        Ok((index as u32, kind.ok_or(Error::Malformed("NODES"))?))
    }

    /// A process of the guest.
    pub fn process(self: &Arc<Self>, tgid: u32) -> Arc<Process> {
        Process::new(Arc::clone(self), tgid, 1_000_000_007)
    }

    /// Ends the connection, as a VMM that ends does.
    pub fn hang_up(&self) {
        use std::os::fd::AsRawFd;
        let frontend = self.vmm.frontend();
        let _ = nix::sys::socket::shutdown(frontend.as_raw_fd(), nix::sys::socket::Shutdown::Both);
    }

    /// Chains that came back on any queue without having been asked.
    pub fn strays(&self) -> u64 {
        self.control.iter().map(Queue::strays).sum()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.stop.write(1);
        self.hang_up();
    }
}

/// A request's header; [`message`] fills in its length.
pub fn header(kind: Kind, file: u32, caller: wire::Caller) -> wire::ReqHeader {
    let kind = (kind as u32).into();
    wire::ReqHeader { kind, file: file.into(), caller, ..wire::ReqHeader::default() }
}

/// A whole request.
pub fn message(mut header: wire::ReqHeader, body: &[u8]) -> Vec<u8> {
    let length = size_of::<wire::ReqHeader>() + body.len();
    header.len = u32::try_from(length).expect("INVARIANT: requests are small").into();
    [header.as_bytes(), body].concat()
}

/// The body of a reply, or the errno that it has instead.
pub fn body_of(reply: &[u8]) -> Result<&[u8]> {
    let (header, body) =
        wire::RespHeader::read_from_prefix(reply).map_err(|_| Error::Malformed("a request"))?;
    match header.status.get() {
        0 if header.len.get() as usize == reply.len() => Ok(body),
        0 => Err(Error::Malformed("a request")),
        errno => Err(Error::Errno(i32::try_from(errno).unwrap_or(i32::MAX))),
    }
}

fn parse_nodes(mut blob: &[u8]) -> Option<Vec<NodeRecord>> {
    let mut nodes = Vec::new();
    while !blob.is_empty() {
        let (header, rest) = wire::NodeHeader::read_from_prefix(blob).ok()?;
        let (name, rest) = rest.split_at_checked(wire::padded(header.name_len.get() as usize))?;
        let (data, rest) = rest.split_at_checked(wire::padded(header.data_len.get() as usize))?;
        let name = std::str::from_utf8(&name[..header.name_len.get() as usize]).ok()?.to_owned();
        nodes.push(NodeRecord {
            header,
            name,
            data: data[..header.data_len.get() as usize].to_vec(),
        });
        blob = rest;
    }
    Some(nodes)
}
