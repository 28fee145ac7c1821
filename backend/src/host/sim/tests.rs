use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use nix::poll::{poll, PollFd, PollFlags, PollTimeout};
use nvguest_abi::FileKind;
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use super::client::{
    CHANNEL, CHANNEL_GROUP, DEVICE, OS_EVENT, SUBDEVICE, SYSTEM_MEMORY, USERMODE, VIDEO_MEMORY,
};
use super::layout::{
    Alloc64, Control, Dup, Event, Free, GetEvent, Heap, HeapDescriptor, Map, Memory, OsEvent,
    UnixEvent, Unmap, Version,
};
use super::*;
use crate::marshal::register::Registration;
use crate::marshal::scratch::Scratch;
use crate::transport::shared::{sealed_file, Piece, Shared};

/// NV01_EVENT_WITHOUT_EVENT_DATA | NV01_EVENT_NONSTALL_INTR, index FIFO_EVENT_MTHD
const DONE: u32 = 0x1800_0000 | events::FIFO;

fn card() -> OwnedFd {
    SimCards::create(1, SimCards::DEFAULT_SIZE).unwrap()
}

pub fn worker(card: &OwnedFd) -> SimHost {
    SimHost::new(card.try_clone().unwrap(), SimOptions::default()).unwrap()
}

/// A program of one worker: a control file, a client, a card's node, a device and a subdevice.
pub struct Program<'h> {
    host: &'h SimHost,
    pub ctl: HostFile,
    node: HostFile,
    card: u32,
    pub client: u32,
}

pub const DEV: u32 = 0xd0;
pub const SUB: u32 = 0xd1;

impl<'h> Program<'h> {
    fn new(host: &'h SimHost) -> Self {
        Self::on(host, 0)
    }

    pub fn on(host: &'h SimHost, card: u32) -> Self {
        let (ctl, node) = (open(host, FileKind::Ctl), open_card(host, card));
        let mut root = Alloc64 { class: client::CLIENT, ..Alloc64::new_zeroed() };
        call(host, &ctl, 0x2b, &mut root, None).unwrap();
        let program = Self { host, ctl, node, card, client: root.handle };
        assert_eq!(program.device(DEV, card), status::OK);
        assert_eq!(program.alloc(DEV, SUB, SUBDEVICE, &mut [0; 4]), status::OK);
        program
    }

    pub fn device(&self, handle: u32, card: u32) -> u32 {
        let mut params = [0; 56];
        params[..4].copy_from_slice(&card.to_le_bytes());
        self.alloc(self.client, handle, DEVICE, &mut params)
    }

    fn close(self) {
        self.host.close(self.ctl);
        self.host.close(self.node);
    }

    fn alloc_on(&self, file: &HostFile, names: (u32, u32), class: u32, params: &mut [u8]) -> u32 {
        let (parent, handle) = names;
        let mut argument =
            Alloc64 { client: self.client, parent, handle, class, ..Alloc64::new_zeroed() };
        call(self.host, file, 0x2b, &mut argument, Some((0x10, params))).unwrap();
        argument.status
    }

    pub fn alloc(&self, parent: u32, handle: u32, class: u32, params: &mut [u8]) -> u32 {
        self.alloc_on(&self.ctl, (parent, handle), class, params)
    }

    pub fn memory(&self, handle: u32, class: u32, size: u64) -> u32 {
        let mut params = Memory { size, ..Memory::new_zeroed() };
        self.alloc(DEV, handle, class, params.as_mut_bytes())
    }

    pub fn control(&self, object: u32, command: u32, params: &mut [u8]) -> u32 {
        let size = u32::try_from(params.len()).unwrap();
        let mut argument = Control {
            client: self.client,
            object,
            command,
            params_size: size,
            ..Control::new_zeroed()
        };
        let params = (!params.is_empty()).then_some((0x10, params));
        call(self.host, &self.ctl, 0x2a, &mut argument, params).unwrap();
        argument.status
    }

    pub fn free(&self, handle: u32) -> u32 {
        let mut argument = Free { client: self.client, parent: 0, handle, status: 0 };
        call(self.host, &self.ctl, 0x29, &mut argument, None).unwrap();
        argument.status
    }

    pub fn arm(&self, memory: u32, range: (u64, u64), target: &HostFile) -> (u32, Map) {
        let mut argument = Map {
            client: self.client,
            device: SUB,
            memory,
            offset: range.0,
            length: range.1,
            fd: target.number(),
            ..Map::new_zeroed()
        };
        call(self.host, &self.ctl, 0x4e, &mut argument, None).unwrap();
        (argument.status, argument)
    }

    /// Video memory as a VMM would map it.
    pub fn video(&self, handle: u32, size: u64) -> HostMapping {
        assert_eq!(self.memory(handle, VIDEO_MEMORY, size), status::OK);
        let node = open_card(self.host, self.card);
        assert_eq!(self.arm(handle, (0, size), &node).0, status::OK);
        self.host.mapping(&node, 0, size, true).unwrap()
    }

    pub fn duplicate(&self, handle: u32, other: &Program<'_>, source: u32) -> u32 {
        let mut argument = Dup {
            client: self.client,
            parent: DEV,
            handle,
            source_client: other.client,
            source,
            flags: 0,
            status: 0,
        };
        call(self.host, &self.ctl, 0x34, &mut argument, None).unwrap();
        argument.status
    }

    /// A file that an event of the subdevice makes readable.
    pub fn receiver(&self, event: u32, notify: u32) -> HostFile {
        let file = open_card(self.host, self.card);
        let mut ctl = self.ctl.number();
        call(self.host, &file, 201, &mut ctl, None).unwrap();
        assert_eq!(self.os_event(206, &file), status::OK);
        let mut params = Event {
            parent_client: 0,
            source: SUB,
            class: OS_EVENT,
            notify,
            data: u64::from(file.number().unsigned_abs()),
        };
        assert_eq!(self.alloc_on(&file, (SUB, event), OS_EVENT, params.as_mut_bytes()), status::OK);
        file
    }

    fn os_event(&self, nr: u32, file: &HostFile) -> u32 {
        let fd = file.number().unsigned_abs();
        let mut argument = OsEvent { client: self.client, device: DEV, fd, status: 0 };
        call(self.host, file, nr, &mut argument, None).unwrap();
        argument.status
    }
}

fn open(host: &SimHost, kind: FileKind) -> HostFile {
    let path = if kind == FileKind::Ctl { "/dev/nvidiactl" } else { "/dev/nvidia0" };
    host.open(&Node { path: path.into(), kind, minor: 0, gpu_id: 0 }, 2).unwrap()
}

pub fn open_card(host: &SimHost, card: u32) -> HostFile {
    let path = format!("/dev/nvidia{card}");
    host.open(&Node { path, kind: FileKind::Gpu, minor: card, gpu_id: 0 }, 2).unwrap()
}

/// Makes a call as marshalling does: the argument and what it points at are blocks of a frame.
pub fn call<T: IntoBytes + FromBytes + Immutable>(
    host: &SimHost,
    file: &HostFile,
    nr: u32,
    argument: &mut T,
    params: Option<(usize, &mut [u8])>,
) -> Result<i32, Errno> {
    let mut scratch = Scratch::new().unwrap();
    let mut frame = scratch.frame();
    let block = frame.block_of(argument.as_bytes(), 0).unwrap();
    let reached = params.map(|(at, bytes)| {
        let reached = frame.block_of(bytes, 0).unwrap();
        frame.point(block, at, reached).unwrap();
        (reached, bytes)
    });
    let size = u32::try_from(size_of::<T>()).unwrap();
    let result = host.ioctl(file, 0xc000_4600 | size << 16 | nr, &mut frame);
    argument.as_mut_bytes().copy_from_slice(frame.bytes(block));
    if let Some((reached, bytes)) = reached {
        bytes.copy_from_slice(frame.bytes(reached));
    }
    result
}

pub fn write(mapping: &HostMapping, bytes: &[u8]) {
    std::fs::File::from(mapping.fd.try_clone().unwrap())
        .write_all_at(bytes, mapping.offset)
        .unwrap();
}

pub fn read(mapping: &HostMapping) -> [u8; 4] {
    let mut bytes = [0; 4];
    std::fs::File::from(mapping.fd.try_clone().unwrap())
        .read_exact_at(&mut bytes, mapping.offset)
        .unwrap();
    bytes
}

/// Whether a level-triggered look finds the file readable.
pub fn readable(file: &HostFile) -> bool {
    let mut fds = [PollFd::new(file.watched(), PollFlags::POLLIN)];
    poll(&mut fds, PollTimeout::ZERO).unwrap() == 1
}

#[test]
fn freed_video_memory_is_handed_to_the_next_worker_at_once() {
    let card = card();
    let (one, other) = (worker(&card), worker(&card));
    let (victim, newcomer) = (Program::new(&one), Program::new(&other));
    let stale = victim.video(1, 1 << 20);
    write(&stale, b"old!");
    assert_eq!(victim.free(1), status::OK);
    let fresh = newcomer.video(1, 1 << 20);
    assert_eq!(fresh.offset, stale.offset);
    assert_eq!(read(&fresh), [0; 4]);
    write(&fresh, b"new!");
    assert_eq!(&read(&stale), b"new!", "a mapping that was kept shows the newcomer's memory");
}

#[test]
fn without_clearing_the_newcomer_reads_what_was_left() {
    let card = card();
    let options = SimOptions { clear_video_memory: false, ..SimOptions::default() };
    let host = SimHost::new(card, options).unwrap();
    let program = Program::new(&host);
    write(&program.video(1, 65536), b"left");
    program.free(1);
    assert_eq!(&read(&program.video(2, 65536)), b"left");
}

#[test]
fn memory_lives_until_the_last_duplicate_of_its_file_closes() {
    let card = card();
    let (one, other) = (worker(&card), worker(&card));
    let victim = Program::new(&one);
    let kept = victim.ctl.fd.try_clone().unwrap();
    let mapping = victim.video(1, 1 << 20);
    one.close(victim.ctl);
    drop(one);
    let newcomer = Program::new(&other);
    assert_ne!(newcomer.video(1, 1 << 20).offset, mapping.offset);
    drop(kept);
    assert_eq!(newcomer.video(2, 1 << 20).offset, mapping.offset);
}

#[test]
fn a_mapping_keeps_no_memory_alive() {
    let card = card();
    let host = worker(&card);
    let victim = Program::new(&host);
    let mapping = victim.video(1, 1 << 20);
    host.close(victim.ctl);
    let other = worker(&card);
    assert_eq!(Program::new(&other).video(1, 1 << 20).offset, mapping.offset);
}

#[test]
fn memory_that_was_duplicated_outlives_its_first_owner() {
    let card = card();
    let host = worker(&card);
    let (one, other) = (Program::new(&host), Program::new(&host));
    let mapping = one.video(1, 1 << 20);
    write(&mapping, b"kept");
    assert_eq!(other.duplicate(9, &one, 1), status::OK);
    host.close(one.ctl);
    let third = worker(&card);
    let newcomer = Program::new(&third);
    assert_ne!(newcomer.video(1, 1 << 20).offset, mapping.offset);
    let node = open(&host, FileKind::Gpu);
    assert_eq!(other.arm(9, (0, 1 << 20), &node).0, status::OK);
    assert_eq!(&read(&host.mapping(&node, 0, 1 << 20, false).unwrap()), b"kept");
    other.free(9);
    assert_eq!(newcomer.video(2, 1 << 20).offset, mapping.offset);
}

#[test]
fn a_card_that_is_full_refuses_and_takes_back() {
    let host = worker(&SimCards::create(1, 1 << 20).unwrap());
    let program = Program::new(&host);
    assert_eq!(program.memory(1, VIDEO_MEMORY, 768 << 10), status::OK);
    assert_eq!(program.memory(2, VIDEO_MEMORY, 512 << 10), status::NO_MEMORY);
    assert_eq!(program.memory(2, VIDEO_MEMORY, u64::MAX), status::NO_MEMORY);
    program.free(1);
    assert_eq!(program.memory(2, VIDEO_MEMORY, 1 << 20), status::OK);
}

#[test]
fn the_cards_file_can_neither_shrink_nor_grow() {
    let file = std::fs::File::from(card());
    let size = file.metadata().unwrap().len();
    assert!(file.set_len(size - 4096).is_err());
    assert!(file.set_len(size + 4096).is_err());
}

#[test]
fn workers_have_different_client_handles() {
    let card = card();
    let (one, other) = (worker(&card), worker(&card));
    let handles =
        [Program::new(&one).client, Program::new(&other).client, Program::new(&one).client];
    assert_eq!(handles, [0xc1d0_0001, 0xc1d0_0002, 0xc1d0_0003]);
}

#[test]
fn a_pointer_outside_scratch_memory_is_refused_loudly() {
    let host = worker(&card());
    let program = Program::new(&host);
    let mut argument = Control {
        client: program.client,
        object: program.client,
        command: 0x201,
        params: 0x7fff_1234_5000,
        params_size: 128,
        ..Control::new_zeroed()
    };
    assert_eq!(call(&host, &program.ctl, 0x2a, &mut argument, None), Err(Errno::EFAULT));
    assert_eq!(host.faults(), 1);
}

#[test]
fn a_block_shorter_than_the_class_is_refused_loudly() {
    let host = worker(&card());
    let program = Program::new(&host);
    let mut argument = Alloc64 {
        client: program.client,
        parent: DEV,
        handle: 1,
        class: VIDEO_MEMORY,
        ..Alloc64::new_zeroed()
    };
    let result = call(&host, &program.ctl, 0x2b, &mut argument, Some((0x10, &mut [0; 124])));
    assert_eq!(result, Err(Errno::EFAULT));
    assert_eq!(host.faults(), 1);
}

#[test]
fn a_descriptor_of_no_file_of_this_worker_is_refused_loudly() {
    let host = worker(&card());
    let program = Program::new(&host);
    program.memory(1, SYSTEM_MEMORY, 4096);
    let foreign = std::fs::File::open("/dev/null").unwrap();
    let mut map = Map {
        client: program.client,
        device: SUB,
        memory: 1,
        length: 4096,
        fd: foreign.as_raw_fd(),
        ..Map::new_zeroed()
    };
    assert_eq!(call(&host, &program.ctl, 0x4e, &mut map, None), Err(Errno::EBADF));
    let mut register = foreign.as_raw_fd();
    assert_eq!(call(&host, &program.ctl, 201, &mut register, None), Err(Errno::EBADF));
    assert_eq!(host.faults(), 2);
    map.fd = -1;
    call(&host, &program.ctl, 0x4e, &mut map, None).unwrap();
    assert_eq!((map.status, host.faults()), (status::INVALID_ARGUMENT, 2));
}

#[test]
fn the_release_is_asked_and_compared() {
    let host = worker(&card());
    let ctl = open(&host, FileKind::Ctl);
    let mut ask = Version { command: u32::from(b'2'), reply: 0, release: [0; 64] };
    call(&host, &ctl, 210, &mut ask, None).unwrap();
    assert!(ask.release.starts_with(b"580.159.04\0"));
    let mut same = Version { command: 0, ..ask };
    assert_eq!(call(&host, &ctl, 210, &mut same, None), Ok(0));
    let mut other = Version { command: 0, release: [b'1'; 64], ..ask };
    assert_eq!(call(&host, &ctl, 210, &mut other, None), Err(Errno::EINVAL));
    assert_eq!(other.release, ask.release);
}

#[test]
fn statuses_are_those_of_the_real_driver() {
    let host = worker(&card());
    let (one, other) = (Program::new(&host), Program::new(&host));
    assert_eq!(one.control(SUB, 0x2080_0fff, &mut [0; 16]), status::NOT_SUPPORTED);
    assert_eq!(one.control(DEV, 0x2080_014a, &mut [0; 268]), status::NOT_SUPPORTED);
    assert_eq!(one.control(SUB, 0x2080_014a, &mut [0; 264]), status::INVALID_ARGUMENT);
    assert_eq!(one.control(0xdead, 0x2080_014a, &mut [0; 268]), status::OBJECT_NOT_FOUND);
    assert_eq!(one.alloc(DEV, SUB, SUBDEVICE, &mut [0; 4]), status::INSERT_DUPLICATE_NAME);
    assert_eq!(one.alloc(one.client, 7, SUBDEVICE, &mut [0; 4]), status::INVALID_OBJECT_PARENT);
    assert_eq!(one.alloc(0xdead, 7, SUBDEVICE, &mut [0; 4]), status::OBJECT_NOT_FOUND);
    assert_eq!(one.alloc(DEV, 7, 0xfeed, &mut [0; 4]), status::INVALID_CLASS);
    assert_eq!(one.free(0xdead), status::OK);
    let (ctl, node) = (open(&host, FileKind::Ctl), open_card(&host, 0));
    let foreign = Program { host: &host, ctl, node, card: 0, client: other.client };
    assert_eq!(foreign.control(other.client, 0x201, &mut [0; 128]), status::INVALID_CLIENT);
    assert_eq!(foreign.alloc(other.client, 7, DEVICE, &mut [0; 56]), status::INVALID_OBJECT_HANDLE);
    for (nr, size) in [(0x7f_u32, 16_u32), (0x29, 20)] {
        let mut scratch = Scratch::new().unwrap();
        let mut frame = scratch.frame();
        frame.block(size as usize).unwrap();
        let cmd = 0xc000_4600 | size << 16 | nr;
        assert_eq!(host.ioctl(&one.ctl, cmd, &mut frame), Err(Errno::EINVAL));
    }
}

#[test]
fn freeing_a_parent_frees_its_children() {
    let host = worker(&card());
    let program = Program::new(&host);
    program.memory(1, SYSTEM_MEMORY, 4096);
    assert_eq!(program.free(DEV), status::OK);
    assert_eq!(program.control(SUB, 0x2080_0403, &mut [0; 8]), status::OBJECT_NOT_FOUND);
    assert_eq!(program.arm(1, (0, 4096), &open(&host, FileKind::Ctl)).0, status::OBJECT_NOT_FOUND);
    assert_eq!(program.free(program.client), status::OK);
    assert_eq!(program.control(program.client, 0x201, &mut [0; 128]), status::INVALID_CLIENT);
}

#[test]
fn a_file_is_armed_once_and_maps_as_its_node_does() {
    let host = worker(&card());
    let program = Program::new(&host);
    program.memory(1, VIDEO_MEMORY, 1 << 20);
    program.memory(2, SYSTEM_MEMORY, 65536);
    let (gpu, ctl) = (open(&host, FileKind::Gpu), open(&host, FileKind::Ctl));
    assert_eq!(host.mapping(&gpu, 0, 4096, true).unwrap_err(), Errno::EINVAL);
    assert_eq!(program.arm(1, (0, 65536), &ctl).0, status::INVALID_ARGUMENT);
    assert_eq!(program.arm(2, (0, 65536), &gpu).0, status::INVALID_ARGUMENT);
    assert_eq!(program.arm(1, (65536, 1 << 20), &gpu).0, status::INVALID_LIMIT);
    let (code, map) = program.arm(1, (65536, 65536), &gpu);
    assert_eq!((code, map.flags >> 23 & 7), (status::OK, 2));
    assert_eq!(program.arm(1, (0, 65536), &gpu).0, status::STATE_IN_USE);
    assert_eq!(host.mapping(&gpu, 0, 4096, true).unwrap_err(), Errno::ENXIO);
    assert_eq!(host.mapping(&gpu, 0, 65536, true).unwrap().offset % 65536, 0);
    assert_eq!(program.arm(2, (4096, 8192), &ctl).0, status::OK);
    assert_eq!(host.mapping(&ctl, 0, 4096, true).unwrap().length, 4096);
    assert_eq!(host.mapping(&ctl, 0, 16384, true).unwrap_err(), Errno(libc::ERANGE));
    let mut unmap = Unmap {
        client: program.client,
        device: SUB,
        memory: 1,
        linear: map.linear,
        ..Unmap::new_zeroed()
    };
    for expected in [status::OK, status::OBJECT_NOT_FOUND] {
        call(&host, &program.ctl, 0x4f, &mut unmap, None).unwrap();
        assert_eq!(unmap.status, expected);
    }
}

#[test]
fn memory_mapped_for_reading_is_not_mapped_for_writing() {
    let host = worker(&card());
    let program = Program::new(&host);
    program.memory(1, SYSTEM_MEMORY, 4096);
    let ctl = open(&host, FileKind::Ctl);
    let mut map = Map {
        client: program.client,
        device: SUB,
        memory: 1,
        length: 4096,
        flags: 1,
        fd: ctl.number(),
        ..Map::new_zeroed()
    };
    call(&host, &program.ctl, 0x4e, &mut map, None).unwrap();
    assert_eq!(host.mapping(&ctl, 0, 4096, true).unwrap_err(), Errno(libc::EACCES));
    assert!(host.mapping(&ctl, 0, 4096, false).is_ok());
}

#[test]
fn the_older_call_allocates_and_frees() {
    let host = worker(&card());
    let program = Program::new(&host);
    let mut heap =
        Heap { client: program.client, parent: DEV, function: 2, size: 4096, ..Heap::new_zeroed() };
    call(&host, &program.ctl, 0x4a, &mut heap, None).unwrap();
    assert_eq!((heap.status, heap.size, heap.total - heap.free), (0, 65536, 65536));
    assert_ne!(heap.memory, 0);
    heap.function = 3;
    call(&host, &program.ctl, 0x4a, &mut heap, None).unwrap();
    assert_eq!((heap.status, heap.total), (0, heap.free));
    heap.function = 28;
    call(&host, &program.ctl, 0x4a, &mut heap, None).unwrap();
    assert_eq!(heap.status, status::NOT_SUPPORTED);
}

/// 64 KiB of an arena, and what registers it under `handle`.
fn registration(program: &Program<'_>, handle: u32) -> (Piece, Registration) {
    let file = sealed_file("arena", 1 << 20).unwrap();
    let shared = Shared::map(file.into(), 1 << 20).unwrap();
    let (client, parent, flags) = (program.client, DEV, 0x4000);
    let registration =
        Registration { client, parent, handle, kind: 0, flags, attr: 0x2a00_0000, attr2: 0 };
    (shared.piece(65536, 65536).unwrap(), registration)
}

#[test]
fn registered_memory_is_the_programs_own_and_rm_maps_it_for_nobody() {
    let host = worker(&card());
    let program = Program::new(&host);
    let (piece, registration) = registration(&program, 7);
    let mut scratch = Scratch::new().unwrap();
    assert_eq!(registration.make(&host, &program.ctl, &mut scratch, &piece), Ok(7));
    let again = registration.make(&host, &program.ctl, &mut scratch, &piece);
    assert_eq!(again, Err(Some(status::INSERT_DUPLICATE_NAME)));
    let node = open(&host, FileKind::Ctl);
    assert_eq!(program.arm(7, (0, 65536), &node).0, status::NOT_SUPPORTED);
    assert_eq!(program.duplicate(8, &program, 7), status::OK);
    assert_eq!(program.arm(8, (0, 65536), &node).0, status::NOT_SUPPORTED);
    assert_eq!((program.free(7), program.free(8), host.faults()), (0, 0, 0));
}

#[test]
fn a_pointer_that_marshalling_did_not_register_is_a_fault() {
    let host = worker(&card());
    let program = Program::new(&host);
    let (piece, _) = registration(&program, 7);
    for (descriptor, limit) in [(piece.address(), 65535), (0x7fff_dead_b000, 65535), (0, u64::MAX)]
    {
        let mut argument = HeapDescriptor {
            client: program.client,
            parent: DEV,
            function: 27,
            descriptor,
            limit,
            ..HeapDescriptor::new_zeroed()
        };
        let made = call(&host, &program.ctl, 0x4a, &mut argument, None);
        assert_eq!(made, Err(Errno::EFAULT));
    }
    assert_eq!(host.faults(), 3);
}

#[test]
fn an_event_reaches_the_file_it_was_made_for() {
    let host = worker(&card());
    let program = Program::new(&host);
    let (one, other) = (program.receiver(0xe1, DONE), program.receiver(0xe2, DONE));
    assert_eq!(program.control(SUB, 0x2080_0308, &mut 0xe1_u32.to_le_bytes()), status::OK);
    assert_eq!((readable(&one), readable(&other)), (true, false));
    program.control(SUB, 0x2080_0308, &mut [0; 4]);
    assert!(readable(&other));
    assert_eq!(program.os_event(206, &one), status::INSUFFICIENT_RESOURCES);
    assert_eq!(program.os_event(207, &one), status::OK);
    assert_eq!(program.os_event(207, &one), status::INVALID_EVENT);
}

#[test]
fn an_event_with_data_stays_until_it_is_taken() {
    let host = worker(&card());
    let program = Program::new(&host);
    let action = |action: u32| {
        let mut params = [0_u8; 20];
        params[4..8].copy_from_slice(&action.to_le_bytes());
        program.control(SUB, 0x2080_0301, &mut params)
    };
    assert_eq!(action(2), status::INVALID_STATE);
    let file = program.receiver(0xe1, events::SOFTWARE);
    assert_eq!((action(2), action(2)), (status::OK, status::INVALID_STATE));
    for _ in 0..2 {
        assert_eq!(program.control(SUB, 0x2080_0302, &mut []), status::OK);
    }
    for (code, more) in [(status::OK, 1), (status::OK, 0), (status::OPERATING_SYSTEM, 0)] {
        assert_eq!(readable(&file), code == status::OK);
        let (mut argument, mut event) = (GetEvent::new_zeroed(), UnixEvent::new_zeroed());
        call(&host, &file, 0x52, &mut argument, Some((0, event.as_mut_bytes()))).unwrap();
        assert_eq!((argument.status, argument.more), (code, more));
        assert_eq!(event.object, if code == status::OK { 0xe1 } else { 0 });
    }
}

#[test]
fn work_rung_for_at_the_doorbell_is_done_and_told() {
    let host = worker(&card());
    let program = Program::new(&host);
    let userd = program.video(1, 65536);
    let mut params = [0_u8; 368];
    params[0x20] = 1;
    assert_eq!(program.alloc(DEV, 2, CHANNEL, &mut params), status::OK);
    assert_eq!(program.alloc(SUB, 3, USERMODE, &mut [0; 2]), status::OK);
    let node = open(&host, FileKind::Gpu);
    assert_eq!(program.arm(3, (0, 65536), &node).0, status::OK);
    let doorbell = host.mapping(&node, 0, 65536, true).unwrap();
    let mut token = [0; 4];
    assert_eq!(program.control(2, 0xc36f_0108, &mut token), status::OK);
    let done = program.receiver(0xe1, DONE);
    let at = |mapping: &HostMapping, offset| HostMapping {
        fd: mapping.fd.try_clone().unwrap(),
        offset: mapping.offset + offset,
        length: 4,
    };
    write(&at(&userd, 0x8c), &[5, 0, 0, 0]);
    write(&at(&doorbell, 0x90), &token);
    let started = Instant::now();
    while !readable(&done) {
        assert!(started.elapsed() < Duration::from_secs(10), "the event never came");
        std::thread::yield_now();
    }
    assert_eq!(read(&at(&userd, 0x88)), [5, 0, 0, 0]);
}

#[test]
fn a_call_that_waits_holds_up_no_other() {
    let host = worker(&card());
    let program = Program::new(&host);
    assert_eq!(program.alloc(DEV, 4, CHANNEL_GROUP, &mut [0; 20]), status::OK);
    let mut params = [1_u8, 1, 0, 0, 0, 0, 0, 0];
    params[4..].copy_from_slice(&300_000_u32.to_le_bytes());
    std::thread::scope(|scope| {
        let started = Instant::now();
        let waiting = scope.spawn(|| program.control(4, 0xa06c_0105, &mut params));
        for _ in 0..100 {
            assert_eq!(program.control(program.client, 0x201, &mut [0; 128]), status::OK);
        }
        assert!(started.elapsed() < Duration::from_millis(300));
        assert_eq!(waiting.join().unwrap(), status::TIMEOUT);
    });
}

#[test]
fn a_thousand_cycles_leave_nothing_behind() {
    let card = card();
    let host = worker(&card);
    let open_files = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let before = open_files();
    for _ in 0..1000 {
        let program = Program::new(&host);
        program.memory(1, VIDEO_MEMORY, 65536);
        program.close();
    }
    assert!(open_files() < before + 100, "other tests open some, but not a thousand");
    assert_eq!(host.inner.cards.usage(0).unwrap().used, 0);
    assert!(host.inner.files.read().unwrap().is_empty());
    assert!(host.inner.clients.read().unwrap().is_empty());
}

#[test]
fn a_file_that_is_no_card_is_refused() {
    let file = std::fs::File::from(card());
    file.write_all_at(b"other", 0).unwrap();
    let error = SimHost::new(file.into(), SimOptions::default()).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::InvalidData);
    assert!(file_is_memfd(&card()));
}

fn file_is_memfd(fd: &OwnedFd) -> bool {
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    std::fs::read_link(path).unwrap().to_string_lossy().contains("nvguest-cards")
}

/// Not a bar: says what a control costs here.
#[test]
fn a_control_is_cheap() {
    let host = worker(&card());
    let program = Program::new(&host);
    let mut scratch = Scratch::new().unwrap();
    let argument = Control {
        client: program.client,
        object: program.client,
        command: 0x201,
        params_size: 128,
        ..Control::new_zeroed()
    };
    let started = Instant::now();
    const COUNT: u32 = 20_000;
    for _ in 0..COUNT {
        let mut frame = scratch.frame();
        let block = frame.block_of(argument.as_bytes(), 0).unwrap();
        let params = frame.block(128).unwrap();
        frame.point(block, 0x10, params).unwrap();
        host.ioctl(&program.ctl, 0xc020_462a, &mut frame).unwrap();
    }
    println!("{:?} a control", started.elapsed() / COUNT);
    assert!(started.elapsed() / COUNT < Duration::from_micros(50));
}
