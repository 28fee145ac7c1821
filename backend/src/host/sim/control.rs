//! RM_CONTROL: the methods that objects have here, by command.

use std::sync::atomic::Ordering;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use zerocopy::FromBytes;

use super::client::{self, Object};
use super::escape::{Answer, Call};
use super::events::SOFTWARE;
use super::identity::{self, Identity};
use super::layout::{Control, Preempt, SetNotification};
use super::{status, Inner, CRASH_US};
use crate::errno::Errno;

/// A method: its command, the classes that have it, its size, and what it does.
struct Method {
    command: u32,
    classes: &'static [u32],
    size: usize,
    run: fn(&On<'_>, &mut [u8]) -> Result<u32, Errno>,
}

/// What a method is called on.
struct On<'a> {
    inner: &'a Inner,
    /// The object's card. No method of a client asks for one.
    card: Identity,
    client: u32,
    handle: u32,
    object: Object,
}

const fn method(
    command: u32,
    classes: &'static [u32],
    size: usize,
    run: fn(&On<'_>, &mut [u8]) -> Result<u32, Errno>,
) -> Method {
    Method { command, classes, size, run }
}

/// Its entries are elsewhere: `Call::fb_info_elsewhere` runs it.
const FB_GET_INFO: u32 = 0x2080_1301;

const ROOT: &[u32] = &[client::CLIENT];
const SUB: &[u32] = &[client::SUBDEVICE];
const CHANNEL: &[u32] = &[client::CHANNEL];
const GROUP: &[u32] = &[client::CHANNEL_GROUP];

/// Sorted by command. Names and sizes are of `ctrl/*.h` of release 580.
const METHODS: &[Method] = &[
    // GPU_GET_ATTACHED_IDS, GPU_GET_ID_INFO, GPU_GET_DEVICE_IDS, GPU_GET_ID_INFO_V2
    method(0x201, ROOT, 128, attached_ids),
    method(0x202, ROOT, 40, id_info),
    method(0x204, ROOT, 4, device_ids),
    method(0x205, ROOT, 32, id_info_v2),
    // GPU_GET_PROBED_IDS, GPU_GET_PCI_INFO
    method(0x214, ROOT, 384, probed_ids),
    method(0x21b, ROOT, 12, pci_info),
    // GPU_GET_UUID_INFO, GPU_GET_UUID_FROM_GPU_ID, GPU_GET_ACTIVE_DEVICE_IDS
    method(0x274, ROOT, 272, uuid_info),
    method(0x275, ROOT, 268, uuid_of),
    method(0x288, ROOT, 3076, active_devices),
    // GPU_GET_NUM_SUBDEVICES
    method(0x80_0280, &[client::DEVICE], 4, one),
    // GPU_GET_NAME_STRING, GPU_GET_ID, GPU_GET_GID_INFO
    method(0x2080_0110, SUB, 132, name_string),
    method(0x2080_0142, SUB, 4, gpu_id),
    method(0x2080_014a, SUB, 268, gid_info),
    // EVENT_SET_NOTIFICATION, EVENT_SET_TRIGGER, EVENT_SET_TRIGGER_FIFO
    method(0x2080_0301, SUB, 20, set_notification),
    method(0x2080_0302, SUB, 0, trigger),
    method(0x2080_0308, SUB, 4, trigger_fifo),
    // TIMER_GET_TIME
    method(0x2080_0403, SUB, 8, get_time),
    // FB_GET_INFO, FB_GET_INFO_V2, BUS_GET_PCI_INFO
    method(FB_GET_INFO, SUB, 16, nothing),
    method(0x2080_1303, SUB, 1028, fb_info),
    method(0x2080_1801, SUB, 16, bus_pci_info),
    // NVA06C_CTRL_CMD_GPFIFO_SCHEDULE, SET_TIMESLICE, GET_TIMESLICE, PREEMPT
    method(0xa06c_0101, GROUP, 3, nothing),
    method(0xa06c_0103, GROUP, 8, set_slice),
    method(0xa06c_0104, GROUP, 8, get_slice),
    method(0xa06c_0105, GROUP, 8, preempt),
    // NVA06F_CTRL_CMD_GPFIFO_SCHEDULE
    method(0xa06f_0103, CHANNEL, 3, nothing),
    // NVC36F_CTRL_CMD_GPFIFO_GET_WORK_SUBMIT_TOKEN
    method(0xc36f_0108, CHANNEL, 4, submit_token),
];

impl Call<'_, '_> {
    /// RM_CONTROL.
    pub(super) fn control(&mut self) -> Answer {
        let mut argument: Control = self.argument()?;
        argument.status = self.call_method(&argument)?;
        self.answer(&argument)
    }

    fn call_method(&mut self, argument: &Control) -> Result<u32, Errno> {
        let Some(client) = self.client(argument.client) else { return Ok(status::INVALID_CLIENT) };
        let Some(object) = client.owned().get(argument.object).cloned() else {
            return Ok(status::OBJECT_NOT_FOUND);
        };
        // The null command is answered by every object.
        if argument.command == 0 {
            return Ok(status::OK);
        }
        let Ok(at) = METHODS.binary_search_by_key(&argument.command, |method| method.command)
        else {
            return Ok(status::NOT_SUPPORTED);
        };
        let method = &METHODS[at];
        if !method.classes.contains(&object.class) {
            return Ok(status::NOT_SUPPORTED);
        }
        let size = argument.params_size as usize;
        if size != method.size || (argument.params == 0) != (size == 0) {
            return Ok(status::INVALID_ARGUMENT);
        }
        let inner = self.inner;
        let card = Identity::of(object.card.unwrap_or_default());
        let on = On { inner, card, client: client.handle, handle: argument.object, object };
        if size == 0 {
            return (method.run)(&on, &mut []);
        }
        if method.command == FB_GET_INFO {
            return self.fb_info_elsewhere(&on, argument.params);
        }
        (method.run)(&on, self.follow(argument.params, size, "control parameters at")?)
    }
}

impl Call<'_, '_> {
    /// FB_GET_INFO: a number of entries, and a pointer to them.
    fn fb_info_elsewhere(&mut self, on: &On<'_>, params: u64) -> Result<u32, Errno> {
        let params = self.follow(params, 16, "control parameters at")?;
        let (count, at) = (get_u32(params, 0) as usize, get_u64(params, 8));
        if count == 0 || count > 128 || at == 0 {
            return Ok(status::INVALID_ARGUMENT);
        }
        fb_entries(on, self.follow(at, count * 8, "a list at")?)
    }
}

fn put_u32(params: &mut [u8], at: usize, value: u32) {
    params[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn get_u32(params: &[u8], at: usize) -> u32 {
    params[at..at + 4].iter().rev().fold(0, |value, &byte| value << 8 | u32::from(byte))
}

fn get_u64(params: &[u8], at: usize) -> u64 {
    u64::from(get_u32(params, at + 4)) << 32 | u64::from(get_u32(params, at))
}

fn nothing(_: &On<'_>, _: &mut [u8]) -> Result<u32, Errno> {
    Ok(status::OK)
}

fn one(_: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    put_u32(params, 0, 1);
    Ok(status::OK)
}

fn attached_ids(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    params.fill(0xff);
    for card in on.inner.cards.all() {
        put_u32(params, 4 * card.number as usize, card.gpu_id());
    }
    Ok(status::OK)
}

/// Attached ones, excluded ones, and flags of the first.
fn probed_ids(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    params[256..].fill(0);
    params[128..256].fill(0xff);
    attached_ids(on, &mut params[..128])
}

fn device_ids(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    put_u32(params, 0, on.inner.cards.all().fold(0, |mask, card| mask | 1 << card.number));
    Ok(status::OK)
}

/// The card that the parameters name at `at`.
fn named(on: &On<'_>, params: &[u8], at: usize) -> Option<Identity> {
    on.inner.cards.all().find(|card| card.gpu_id() == get_u32(params, at))
}

/// Instances of device and card are its number, all else is number 0, but its board and its NUMA
/// node, which it has none of.
fn id_info_v2(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(card) = named(on, params, 0) else { return Ok(status::INVALID_ARGUMENT) };
    params[4..].fill(0);
    put_u32(params, 8, card.number);
    put_u32(params, 0x18, card.number);
    put_u32(params, 0x1c, u32::MAX);
    Ok(status::OK)
}

/// As above, with a pointer at 0x10 that the driver never writes through.
fn id_info(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(card) = named(on, params, 0) else { return Ok(status::INVALID_ARGUMENT) };
    params[4..0x10].fill(0);
    params[0x18..].fill(0);
    put_u32(params, 8, card.number);
    put_u32(params, 0x20, card.number);
    put_u32(params, 0x24, u32::MAX);
    Ok(status::OK)
}

fn pci_info(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(card) = named(on, params, 0) else { return Ok(status::INVALID_ARGUMENT) };
    put_u32(params, 4, 0);
    put_u32(params, 8, u32::from(card.slot) << 16 | u32::from(card.bus));
    Ok(status::OK)
}

/// How many, and of each its card and its MIG instances, of which there are none.
fn active_devices(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let mut count = 0;
    for (card, place) in on.inner.cards.all().zip(params[4..].chunks_exact_mut(12)) {
        place.fill(0xff);
        put_u32(place, 0, card.gpu_id());
        count += 1;
    }
    put_u32(params, 0, count);
    Ok(status::OK)
}

/// Which card has this UUID, in bytes or as text by the flags at 256.
fn uuid_info(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let flags = get_u32(params, 256);
    let has = |card: &Identity| uuid(*card, flags).is_some_and(|uuid| params.starts_with(&uuid));
    let Some(card) = on.inner.cards.all().find(has) else { return Ok(status::OBJECT_NOT_FOUND) };
    put_u32(params, 260, card.gpu_id());
    put_u32(params, 264, card.number);
    put_u32(params, 268, 0);
    Ok(status::OK)
}

/// The UUID of the card that is named.
fn uuid_of(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(card) = named(on, params, 0) else { return Ok(status::OBJECT_NOT_FOUND) };
    let Some(uuid) = uuid(card, get_u32(params, 4)) else { return Ok(status::INVALID_ARGUMENT) };
    params[8..264].fill(0);
    params[8..8 + uuid.len()].copy_from_slice(&uuid);
    // CAST: 41 at most.
    put_u32(params, 264, uuid.len() as u32);
    Ok(status::OK)
}

fn bus_pci_info(_: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let [vendor, device] = identity::PCI_ID.map(u32::from);
    put_u32(params, 0, device << 16 | vendor);
    put_u32(params, 4, 0x18be << 16 | vendor);
    put_u32(params, 8, 0xa1);
    put_u32(params, 12, device);
    Ok(status::OK)
}

fn gpu_id(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    put_u32(params, 0, on.card.gpu_id());
    Ok(status::OK)
}

/// Flags 0 ask for ASCII, 1 for 16-bit characters.
fn name_string(_: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let wide = match get_u32(params, 0) {
        0 => 1,
        1 => 2,
        _ => return Ok(status::INVALID_ARGUMENT),
    };
    params[4..].fill(0);
    for (index, byte) in identity::NAME.bytes().enumerate() {
        params[4 + index * wide] = byte;
    }
    Ok(status::OK)
}

/// Flags 0 ask for text, 2 for bytes.
fn uuid(card: Identity, flags: u32) -> Option<Vec<u8>> {
    match flags {
        0 => Some([card.uuid_text().as_bytes(), &[0]].concat()),
        2 => Some(card.uuid().to_vec()),
        _ => None,
    }
}

fn gid_info(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(gid) = uuid(on.card, get_u32(params, 4)) else {
        return Ok(status::INVALID_ARGUMENT);
    };
    params[12..].fill(0);
    params[12..12 + gid.len()].copy_from_slice(&gid);
    // CAST: 41 at most.
    put_u32(params, 8, gid.len() as u32);
    Ok(status::OK)
}

fn set_notification(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Ok(wanted) = SetNotification::read_from_bytes(params) else { return Err(Errno::EINVAL) };
    let source = (on.client, on.handle);
    Ok(on.inner.events().set_action(source, wanted.event, wanted.action))
}

fn trigger(on: &On<'_>, _: &mut [u8]) -> Result<u32, Errno> {
    on.inner.events().notify(on.card.number, SOFTWARE);
    Ok(status::OK)
}

fn trigger_fifo(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    on.inner.events().notify_work(on.card.number, get_u32(params, 0));
    Ok(status::OK)
}

/// Nanoseconds of the real-time clock.
fn get_time(_: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // CAST: enough until the year 2554.
    params[..8].copy_from_slice(&(now.as_nanos() as u64).to_le_bytes());
    Ok(status::OK)
}

/// A list of (index, value); sizes are in KiB.
fn fb_info(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let count = get_u32(params, 0) as usize;
    if count > 128 {
        return Ok(status::INVALID_ARGUMENT);
    }
    fb_entries(on, &mut params[4..4 + count * 8])
}

fn fb_entries(on: &On<'_>, list: &mut [u8]) -> Result<u32, Errno> {
    let usage = on.inner.cards.usage(on.card.number)?;
    let kib = |bytes: u64| u32::try_from(bytes >> 10).unwrap_or(u32::MAX);
    for at in (0..list.len() / 8).map(|index| index * 8) {
        let value = match get_u32(list, at) {
            // BAR1, RAM, total RAM, heap, mappable heap, BAR1 available, usable RAM
            0x5 | 0x7 | 0x8 | 0x9 | 0xa | 0x1d | 0x20 => kib(usage.total),
            // Free heap, largest free region, largest free part of BAR1
            0x16 | 0x12 | 0x1f => kib(usage.total.saturating_sub(usage.used)),
            // Bus width
            0xb => 64,
            0..=0x3a => 0,
            _ => return Ok(status::INVALID_ARGUMENT),
        };
        put_u32(list, at + 4, value);
    }
    Ok(status::OK)
}

/// What the card does is said, for tests to see past what a worker tells its guest.
fn set_slice(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(slice) = &on.object.slice else { return Ok(status::INVALID_ARGUMENT) };
    let us = get_u64(params, 0);
    if us == 0 {
        return Ok(status::INVALID_ARGUMENT);
    }
    if on.inner.options.keep_slices {
        return Ok(status::NOT_SUPPORTED);
    }
    slice.store(us, Ordering::Relaxed);
    tracing::debug!("simulated card: group {:#x} has {us} us at a time", on.handle);
    Ok(status::OK)
}

fn get_slice(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(slice) = &on.object.slice else { return Ok(status::INVALID_ARGUMENT) };
    params[..8].copy_from_slice(&slice.load(Ordering::Relaxed).to_le_bytes());
    Ok(status::OK)
}

/// A preempt that waits does so for its whole time-out, as an H200's does for a group that was
/// never scheduled. So a test can stay in a call for as long as it wants (the real limit is one
/// second), and crash a worker that allows it.
fn preempt(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Ok(wanted) = Preempt::read_from_bytes(params) else { return Err(Errno::EINVAL) };
    if wanted.manual == 0 || wanted.wait == 0 {
        return Ok(status::OK);
    }
    if wanted.timeout_us == CRASH_US && on.inner.options.crash_on_request {
        tracing::warn!("simulated card: this worker ends now, as it was asked to");
        std::process::abort();
    }
    thread::sleep(Duration::from_micros(wanted.timeout_us.into()));
    Ok(status::TIMEOUT)
}

fn submit_token(on: &On<'_>, params: &mut [u8]) -> Result<u32, Errno> {
    let Some(token) = on.object.channel else { return Ok(status::INVALID_ARGUMENT) };
    put_u32(params, 0, token);
    Ok(status::OK)
}
