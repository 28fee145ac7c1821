//! What one process tries on the client of another, whose handles it was told.
//!
//! RM's own rules must hold between processes, in a guest as on a host: a client belongs to the
//! process that made it. The answers are shown; what is judged here is that nothing was given,
//! and by the other process (`--hold`) that its memory is what it was.

use std::os::fd::AsRawFd;

use crate::hostile::Tell;
use rmclient::abi::{class, control, escape, Share};
use rmclient::{call, wrong, Card, Client, Outcome, Place, Result, Session};

/// Memory of somebody else.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    client: u32,
    memory: u32,
}

/// Reads `CLIENT:MEMORY`, two hexadecimal handles.
pub fn target(text: &str) -> Result<Target, String> {
    let handle = |text: &str| u32::from_str_radix(text.trim_start_matches("0x"), 16).ok();
    let (client, memory) = text.split_once(':').ok_or("give CLIENT:MEMORY")?;
    match (handle(client), handle(memory)) {
        (Some(client), Some(memory)) => Ok(Target { client, memory }),
        _ => Err(format!("{text} is no pair of hexadecimal handles")),
    }
}

/// Tries all of it, and tells each answer to `tell`.
pub fn run(card: &Card, of: Target, tell: Tell<'_>) -> Result<()> {
    let session = Session::open(card)?;
    let own = &session.client;
    let theirs = own.posing_as(of.client)?;
    let file = session.map_file(Place::Video)?;
    let mut denied = |name: &str, outcome: Outcome| {
        let verdict = match outcome {
            Outcome::OK => wrong("it was given"),
            outcome => Ok(outcome.to_string()),
        };
        tell(name, verdict);
    };
    denied("control-of-theirs", theirs.control(of.client, control::ATTACHED_IDS, &mut [0; 128]));
    let names = (of.client, theirs.fresh());
    let object = theirs.alloc_on(&theirs.ctl, names, class::DEVICE, Some(&mut [0; 56]));
    denied("object-under-theirs", object);
    denied("duplicate-of-theirs", own.try_duplicate(session.device, (of.client, of.memory)).0);
    let range = (0, 4096);
    denied("map-of-theirs", theirs.arm(session.subdevice, of.memory, range, file.as_raw_fd()).0);
    denied("share-of-theirs", share_of(own, of));
    denied(
        "duplicate-of-shared-theirs",
        own.try_duplicate(session.device, (of.client, of.memory)).0,
    );
    denied("device-in-space-of-theirs", device_in_space_of(card, of)?);
    // RM says of some handles that are not there that they are free: the other process judges.
    for (name, handle) in [("memory", of.memory), ("client", of.client)] {
        let outcome = theirs.free(of.client, handle);
        tell(&format!("free-{name}-of-theirs"), Ok(outcome.to_string()));
    }
    Ok(())
}

/// The right to duplicate it, for the client that asks.
fn share_of(own: &Client, of: Target) -> Outcome {
    /// `RS_SHARE_TYPE_CLIENT`
    const CLIENT: u16 = 3;
    let mut argument = Share {
        client: of.client,
        object: of.memory,
        target: own.handle,
        access: 1,
        kind: CLIENT,
        ..Default::default()
    };
    call(&own.ctl, escape::RM_SHARE, &mut argument, None, |a| a.status)
}

/// A device whose address space is that of their device (`hClientShare`).
fn device_in_space_of(card: &Card, of: Target) -> Result<Outcome> {
    let client = Client::new()?;
    let mut params = [0; 56];
    params[..4].copy_from_slice(&card.instance.to_le_bytes());
    params[4..8].copy_from_slice(&of.client.to_le_bytes());
    let names = (client.handle, client.fresh());
    Ok(client.alloc_on(&client.ctl, names, class::DEVICE, Some(&mut params)))
}
