//! What must be refused, and how.

use std::os::fd::AsRawFd;

use nix::libc;

use super::{check, Check};
use rmclient::abi::{self, class, control, escape, status};
use rmclient::{call, wrong, Card, Client, Outcome, Place, Result, Session};

/// `NV_ERR_INSERT_DUPLICATE_NAME`
const TAKEN: Outcome = Outcome::Status(0x19);
/// `NV_ERR_INSUFFICIENT_RESOURCES`
pub const NO_RESOURCES: Outcome = Outcome::Status(0x1a);
/// `NV_ERR_INVALID_ARGUMENT`
const BAD_ARGUMENT: Outcome = Outcome::Status(status::INVALID_ARGUMENT);
/// `NV_ERR_INVALID_CLASS`
const NO_CLASS: Outcome = Outcome::Status(0x22);
/// `NV_ERR_INVALID_CLIENT`
const NO_CLIENT: Outcome = Outcome::Status(0x23);
/// `NV_ERR_INVALID_EVENT`
pub const NO_EVENT: Outcome = Outcome::Status(0x28);
/// `NV_ERR_INVALID_OBJECT_HANDLE`
pub const NO_HANDLE: Outcome = Outcome::Status(0x33);
/// `NV_ERR_INVALID_OBJECT_PARENT`
const BAD_PARENT: Outcome = Outcome::Status(0x36);
/// `NV_ERR_INVALID_STATE`
pub const BAD_STATE: Outcome = Outcome::Status(0x40);
/// `NV_ERR_NOT_SUPPORTED`
const UNSUPPORTED: Outcome = Outcome::Status(0x56);
/// `NV_ERR_OBJECT_NOT_FOUND`
pub const NO_OBJECT: Outcome = Outcome::Status(0x57);
/// `NV_ERR_STATE_IN_USE`
pub const IN_USE: Outcome = Outcome::Status(0x63);

pub const CHECKS: &[Check] = &[
    check("bad-client", "a handle that is no client is refused", bad_client),
    check("foreign-client", "another file's client is refused", foreign_client),
    check("bad-object", "a control of no object is refused", bad_object),
    check("bad-parent", "an object under a parent of the wrong kind is refused", bad_parent),
    check("taken-handle", "a handle in use is refused", taken_handle),
    check("bad-size", "a control of another size is refused", bad_size),
    check("unknown-control", "a control that no class has is refused", unknown_control),
    check("wrong-object", "a control of another class is refused", wrong_object),
    check("unknown-class", "a class that does not exist is refused", unknown_class),
    check("missing-params", "memory without parameters is refused", missing_params),
    check("bad-map-file", "memory is armed only on a file of its kind", bad_map_file),
    check("bad-map-range", "memory is armed only within its size", bad_map_range),
    check("unmapped", "undoing a mapping that was never made is refused", unmapped),
    check("unknown-ioctl", "a number that no call has is refused", unknown_ioctl),
    check("wrong-node", "a card's node does not take what the control node takes", wrong_node),
    check("wrong-argument-size", "an argument of another size is refused", wrong_argument_size),
];

fn bad_client(_: &Card) -> Result<String> {
    let client = Client::new()?;
    let mut argument = abi::Control {
        client: 0xc1d0_fff0,
        object: 0xc1d0_fff0,
        command: control::ATTACHED_IDS,
        params_size: 128,
        ..Default::default()
    };
    call(&client.ctl, escape::RM_CONTROL, &mut argument, Some(&mut [0; 128]), |a| a.status)
        .expect(NO_CLIENT, "a control of no client")?;
    Ok("refused".into())
}

fn foreign_client(_: &Card) -> Result<String> {
    let (one, other) = (Client::new()?, Client::new()?);
    let mut argument = abi::Control {
        client: one.handle,
        object: one.handle,
        command: control::ATTACHED_IDS,
        params_size: 128,
        ..Default::default()
    };
    call(&other.ctl, escape::RM_CONTROL, &mut argument, Some(&mut [0; 128]), |a| a.status)
        .expect(NO_CLIENT, "a control of another file's client")?;
    Ok("refused".into())
}

fn bad_object(_: &Card) -> Result<String> {
    let client = Client::new()?;
    client
        .control(0xdead_0001, control::NAME_STRING, &mut [0; 132])
        .expect(NO_OBJECT, "a control of no object")?;
    Ok("refused".into())
}

fn bad_parent(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let client = &session.client;
    let alloc = |parent, class, params: &mut [u8]| {
        client.alloc_on(&client.ctl, (parent, client.fresh()), class, Some(params))
    };
    alloc(client.handle, class::SUBDEVICE, &mut [0; 4])
        .expect(BAD_PARENT, "a subdevice under a client")?;
    alloc(0xdead_0002, class::SUBDEVICE, &mut [0; 4])
        .expect(NO_OBJECT, "a subdevice under nothing")?;
    Ok("refused".into())
}

fn taken_handle(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let names = (session.device, session.subdevice);
    session
        .client
        .alloc_on(&session.client.ctl, names, class::SUBDEVICE, Some(&mut [0; 4]))
        .expect(TAKEN, "a second object with a handle")?;
    Ok("refused".into())
}

fn bad_size(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    session
        .client
        .control(session.subdevice, control::GID_INFO, &mut [0; 264])
        .expect(BAD_ARGUMENT, "a control of 264 bytes instead of 268")?;
    session
        .client
        .control(session.subdevice, control::GID_INFO, &mut [0; 272])
        .expect(BAD_ARGUMENT, "a control of 272 bytes instead of 268")?;
    Ok("refused".into())
}

fn unknown_control(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    session
        .client
        .control(session.subdevice, control::NONE, &mut [0; 16])
        .expect(UNSUPPORTED, "a control that no class has")?;
    Ok("refused".into())
}

fn wrong_object(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    session
        .client
        .control(session.device, control::GID_INFO, &mut [0; 268])
        .expect(UNSUPPORTED, "a subdevice's control of a device")?;
    Ok("refused".into())
}

fn unknown_class(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let names = (session.device, session.client.fresh());
    session
        .client
        .alloc_on(&session.client.ctl, names, 0xfeed, Some(&mut [0; 64]))
        .expect(NO_CLASS, "an object of class 0xfeed")?;
    Ok("refused".into())
}

fn missing_params(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let names = (session.device, session.client.fresh());
    session
        .client
        .alloc_on(&session.client.ctl, names, class::VIDEO_MEMORY, None)
        .expect(BAD_ARGUMENT, "memory without parameters")?;
    Ok("refused".into())
}

fn bad_map_file(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let video = session.memory(Place::Video, 65536)?;
    let system = session.memory(Place::System, 65536)?;
    for (memory, place) in [(video, Place::System), (system, Place::Video)] {
        let file = session.map_file(place)?;
        let (outcome, _) =
            session.client.arm(session.subdevice, memory, (0, 65536), file.as_raw_fd());
        outcome.expect(BAD_ARGUMENT, "RM_MAP_MEMORY on a file of the other kind")?;
    }
    let (outcome, _) = session.client.arm(session.subdevice, video, (0, 65536), -1);
    outcome.expect(BAD_ARGUMENT, "RM_MAP_MEMORY on no file")?;
    Ok("refused".into())
}

fn bad_map_range(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    for place in [Place::Video, Place::System] {
        let memory = session.memory(place, 65536)?;
        let file = session.map_file(place)?;
        let (outcome, _) =
            session.client.arm(session.subdevice, memory, (0, 64 << 20), file.as_raw_fd());
        if outcome == Outcome::OK {
            return wrong(format!("64 MiB of 64 KiB of {place:?} memory could be armed"));
        }
    }
    Ok("refused".into())
}

fn unmapped(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::System, 65536)?;
    session
        .client
        .unmap(session.subdevice, memory, 0x1234_5000)
        .expect(NO_OBJECT, "RM_UNMAP_MEMORY of what was never mapped")?;
    Ok("refused".into())
}

fn unknown_ioctl(card: &Card) -> Result<String> {
    for file in [rmclient::open(rmclient::CONTROL_NODE)?, rmclient::open(&card.node)?] {
        call(&file, escape::NONE, &mut [0_u64; 2], None, |_| status::OK)
            .expect(Outcome::Errno(libc::EINVAL), "a call with number 0x7f")?;
    }
    Ok("refused".into())
}

fn wrong_node(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let refused = Outcome::Errno(libc::EINVAL);
    let mut argument = abi::Control {
        client: session.client.handle,
        object: session.client.handle,
        command: control::ATTACHED_IDS,
        params_size: 128,
        ..Default::default()
    };
    call(&session.card_file, escape::RM_CONTROL, &mut argument, Some(&mut [0; 128]), |a| a.status)
        .expect(refused, "RM_CONTROL on a card's node")?;
    let mut infos = [abi::CardInfo::default(); 32];
    call(&session.card_file, escape::CARD_INFO, &mut infos, None, |_| status::OK)
        .expect(refused, "CARD_INFO on a card's node")?;
    Ok("refused".into())
}

fn wrong_argument_size(_: &Card) -> Result<String> {
    let ctl = rmclient::open(rmclient::CONTROL_NODE)?;
    call(&ctl, escape::RM_FREE, &mut [0_u32; 5], None, |_| status::OK)
        .expect(Outcome::Errno(libc::EINVAL), "RM_FREE with 20 bytes instead of 16")?;
    Ok("refused".into())
}
