//! What an admin can ask: one JSON object for each connection of the admin socket.

use std::io::Write;
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::{json, Map, Value};

use super::Broker;
use crate::wire::Kind;

/// Version of the object's shape.
const SCHEMA: u32 = 1;
/// A client that does not read for so long is dropped.
const PATIENCE: Duration = Duration::from_secs(1);

/// Starts the thread that answers on `listener`.
pub fn start(broker: &Arc<Broker>, listener: UnixListener) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("admin".into())
        .stack_size(256 << 10)
        .spawn(move || {
            for client in listener.incoming().flatten() {
                if let Err(error) = answer(&broker, client) {
                    tracing::debug!(%error, "an admin's question went unanswered");
                }
            }
        })
        .context("Starting the admin thread failed")?;
    Ok(())
}

fn answer(broker: &Broker, mut client: UnixStream) -> std::io::Result<()> {
    client.set_write_timeout(Some(PATIENCE))?;
    let mut text = status(broker).to_string();
    text.push('\n');
    client.write_all(text.as_bytes())
}

/// The state of the guest.
pub fn status(broker: &Broker) -> Value {
    let (placements, window_bytes) = broker.window.usage();
    let workers: Vec<Value> = broker
        .workers
        .list()
        .into_iter()
        .map(|(number, pid, process)| {
            json!({"worker": number, "pid": pid, "guest_tgid": process.tgid})
        })
        .collect();
    let refusals: Vec<Value> = broker
        .workers
        .refusals()
        .into_iter()
        .map(|(verdict, what, count)| {
            json!({"reason": verdict.name(), "what": what.to_string(), "at_least": count})
        })
        .collect();
    let shares: Map<String, Value> = broker
        .shares
        .usage()
        .map(|(word, held, most)| (word.to_owned(), json!({"held": held, "most": most})))
        .collect();
    json!({
        "schema": SCHEMA,
        "sandbox": broker.sandbox.to_string(),
        "release": broker.compiled.release,
        "profile": broker.compiled.profile,
        "workers": workers,
        "placements": placements,
        "placements_peak": broker.window.peak(),
        "window_bytes": window_bytes,
        "arena": arena(broker),
        "shares": shares,
        "vram": vram(broker),
        "weight": broker.weight(),
        "slice_refused": broker.slice_refused().map(|status| format!("{status:#x}")),
        "lines_left_out": crate::log::left_out(),
        "requests": requests(broker),
        "events": broker.control.events_counted() + broker.workers.events_counted(),
        "refusals": refusals,
    })
}

/// The arena: bytes, of them taken, in so many ranges; null if there is none.
fn arena(broker: &Broker) -> Value {
    broker.window.arena().map_or(Value::Null, |arena| {
        let (ranges, taken) = arena.usage();
        json!({
            "bytes": arena.size(),
            "placed": arena.is_placed(),
            "ranges": ranges,
            "taken_bytes": taken,
        })
    })
}

/// Video memory that the guest's objects keep, and its budget in bytes, null for none. What RM
/// takes for itself is in neither.
fn vram(broker: &Broker) -> Value {
    let usage = broker.video.usage();
    json!({"used": usage.used, "budget": usage.limit(), "reserve": usage.reserve})
}

/// Requests served, by type.
fn requests(broker: &Broker) -> Map<String, Value> {
    Kind::ALL
        .into_iter()
        .map(|kind| {
            let count = match kind {
                // Queue 0 only passes these on; a worker counts them.
                Kind::Open | Kind::Close | Kind::Ioctl | Kind::Map | Kind::Unmap | Kind::Arm => {
                    broker.workers.counted(kind)
                }
                _ => broker.control.counted(kind),
            };
            (kind.name().to_owned(), count.into())
        })
        .collect()
}
