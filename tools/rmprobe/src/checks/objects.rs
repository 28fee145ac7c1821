//! Clients and what they own: make, share, free.

use super::{check, Check};
use rmclient::abi::{class, control};
use rmclient::{wrong, Card, Client, Outcome, Place, Result, Session};

pub const CHECKS: &[Check] = &[
    check("client", "two clients have different handles", client),
    check("device", "a device and a subdevice are made and freed", device),
    check("duplicate", "a duplicate outlives what it was made of, with its contents", duplicate),
    check("free-with-parent", "what is freed takes its children with it", free_with_parent),
    check("free-unknown", "freeing what is not there is no error", free_unknown),
    check("close", "a closed file frees its clients", close),
];

fn client(_: &Card) -> Result<String> {
    let (one, other) = (Client::new()?, Client::new()?);
    match one.handle != other.handle && one.handle >> 20 == 0xc1d {
        true => Ok("different".into()),
        false => wrong(format!("the clients are {:#x} and {:#x}", one.handle, other.handle)),
    }
}

fn device(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    session.client.free(session.device, session.subdevice).ok("freeing a subdevice")?;
    session.client.free(session.client.handle, session.device).ok("freeing a device")?;
    session.client.free(session.client.handle, session.client.handle).ok("freeing a client")?;
    Ok("freed".into())
}

fn duplicate(card: &Card) -> Result<String> {
    const SIZE: u64 = 256 << 10;
    let (one, other) = (Session::open(card)?, Session::open(card)?);
    for place in [Place::Video, Place::System] {
        let memory = one.memory(place, SIZE)?;
        let mapped = one.map(place, memory, SIZE)?;
        mapped.mapping.fill(17, 65536);
        let shared = other.client.duplicate(other.device, &one.client, memory)?;
        one.unmap(memory, mapped)?;
        one.client.free(one.device, memory).ok("freeing what was duplicated")?;
        let again = other.map(place, shared, SIZE)?;
        match again.mapping.wrong(17, 65536) {
            0 => other.unmap(shared, again)?,
            words => {
                return wrong(format!("{words} words of {place:?} memory are not those written"))
            }
        }
        other.client.free(other.device, shared).ok("freeing the duplicate")?;
    }
    Ok("video and system memory".into())
}

fn free_with_parent(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let memory = session.memory(Place::System, 4096)?;
    session.client.free(session.client.handle, session.device).ok("freeing a device")?;
    // Not a control whose answer RM caches: that one is answered after the free too.
    session
        .client
        .control(session.subdevice, control::GET_TIME, &mut [0; 8])
        .expect(super::errors::NO_OBJECT, "a control of a subdevice whose device was freed")?;
    let file = session.map_file(Place::System)?;
    let (outcome, _) = session.client.arm(
        session.client.handle,
        memory,
        (0, 4096),
        super::identity::number(&file) as i32,
    );
    match outcome {
        Outcome::OK => wrong("memory could be mapped whose device was freed"),
        _ => Ok("gone".into()),
    }
}

fn free_unknown(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    session.client.free(session.device, 0xdead_beef).ok("freeing a handle that is not there")?;
    Ok("accepted".into())
}

fn close(card: &Card) -> Result<String> {
    let session = Session::open(card)?;
    let Client { ctl, handle, .. } = session.client;
    drop(session.card_file);
    drop(ctl);
    let next = Client::new()?;
    let mut argument = rmclient::abi::Alloc {
        client: handle,
        parent: handle,
        handle: next.fresh(),
        class: class::DEVICE,
        ..Default::default()
    };
    rmclient::call(
        &next.ctl,
        rmclient::abi::escape::RM_ALLOC,
        &mut argument,
        Some(&mut [0; 56]),
        |a| a.status,
    )
    .expect(super::errors::NO_HANDLE, "a device of a client whose file was closed")?;
    Ok("gone".into())
}
