//! What one process tries on the client of another, whose handles it was told.
//!
//! RM's own rules must hold between processes, in a guest as on a host: a client belongs to the
//! process that made it. The answers are shown; what is judged here is that nothing was given,
//! and by the other process (`--hold`) that its memory is what it was.

use std::os::fd::AsRawFd;

use crate::abi::{class, control, escape, Alloc, Control, Free, Map, Share};
use crate::rm::{call, wrong, Card, Client, Outcome, Place, Result, Session};

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
pub fn run(card: &Card, of: Target, tell: &mut dyn FnMut(&str, Result<String>)) -> Result<()> {
    let session = Session::open(card)?;
    let own = &session.client;
    let mut denied = |name: &str, outcome: Outcome| {
        let verdict = match outcome {
            Outcome::OK => wrong("it was given"),
            outcome => Ok(outcome.to_string()),
        };
        tell(name, verdict);
    };
    denied("control-of-theirs", control_of(own, of.client));
    denied("object-under-theirs", alloc_under(own, of.client));
    denied("duplicate-of-theirs", own.try_duplicate(session.device, (of.client, of.memory)).0);
    denied("map-of-theirs", map_of(&session, of)?);
    denied("share-of-theirs", share_of(own, of));
    // RM says of some handles that are not there that they are free: the other process judges.
    for (name, handle) in [("memory", of.memory), ("client", of.client)] {
        let outcome = free_of(own, of.client, handle);
        tell(&format!("free-{name}-of-theirs"), Ok(outcome.to_string()));
    }
    Ok(())
}

fn control_of(own: &Client, client: u32) -> Outcome {
    let mut params = [0; 128];
    let params_size = 128;
    let command = control::ATTACHED_IDS;
    let mut argument =
        Control { client, object: client, command, params_size, ..Default::default() };
    call(&own.ctl, escape::RM_CONTROL, &mut argument, Some(&mut params), |a| a.status)
}

fn alloc_under(own: &Client, client: u32) -> Outcome {
    let handle = own.fresh();
    let params_size = 56;
    let mut argument = Alloc {
        client,
        parent: client,
        handle,
        class: class::DEVICE,
        params_size,
        ..Default::default()
    };
    call(&own.ctl, escape::RM_ALLOC, &mut argument, Some(&mut [0; 56]), |a| a.status)
}

fn map_of(session: &Session, of: Target) -> Result<Outcome> {
    let file = session.map_file(Place::Video)?;
    let mut argument = Map {
        client: of.client,
        device: session.subdevice,
        memory: of.memory,
        length: 4096,
        fd: file.as_raw_fd(),
        ..Default::default()
    };
    Ok(call(&session.client.ctl, escape::RM_MAP_MEMORY, &mut argument, None, |a| a.status))
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

fn free_of(own: &Client, client: u32, handle: u32) -> Outcome {
    let mut argument = Free { client, parent: client, handle, status: 0 };
    call(&own.ctl, escape::RM_FREE, &mut argument, None, |a| a.status)
}
