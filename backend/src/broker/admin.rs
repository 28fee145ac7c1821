//! What an admin can ask and set: a request and its answer, each one line of JSON, for each
//! connection of the admin socket.
//!
//! ```text
//! → {"schema":1,"request":"status"}
//! ← {"schema":1,"answer":{…}}                     the fields of `Report`
//! → {"schema":1,"request":"limits"}               add "set":{"files":"100"} to change some
//! ← {"schema":1,"answer":{"processes":256,"limits":{"files":{"guest":100,…},…}}}
//! → {"schema":1,"request":"metrics"}
//! ← {"schema":1,"answer":"# HELP …"}
//! → {"schema":1,"request":"trace"}                answered by a stream: [`super::trace`]
//! ← {"schema":1,"error":"what failed, and what to do"}
//! ```
//!
//! Whoever asks is this process's user or root: the socket is nobody else's, and the kernel
//! says who connected.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde::Deserialize;
use serde_json::{json, Map, Value};

use super::metrics;
use super::report::Report;
use super::{trace, Broker};
use crate::budgets::{NO_BUDGET, WEIGHTS};
use crate::limits::{amount, effect, TABLE};
use crate::transport::trace::Wanted;

/// Version of requests and answers.
pub const SCHEMA: u64 = 1;
/// A client that does not ask or read for so long is dropped.
pub const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of a request at most.
const MAX_REQUEST: u64 = 64 << 10;

/// A request.
#[derive(Debug, Deserialize)]
#[serde(tag = "request", rename_all = "lowercase")]
enum Request {
    /// The state of the guest.
    Status,
    /// What the guest may have; changes what is named first.
    Limits {
        #[serde(default)]
        set: BTreeMap<String, String>,
    },
    /// The state of the guest as Prometheus has it.
    Metrics,
    /// The guest's calls, from now on: all, or the slow, or those that fail, or both.
    Trace {
        #[serde(default)]
        slow_ns: Option<u64>,
        #[serde(default)]
        errors: bool,
    },
}

/// Starts the thread that answers on `listener`.
pub fn start(broker: &Arc<Broker>, listener: UnixListener) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("admin".into())
        .stack_size(256 << 10)
        .spawn(move || {
            for client in listener.incoming().flatten() {
                if let Err(error) = serve(&broker, client) {
                    tracing::debug!(%error, "an admin's question went unanswered");
                }
            }
        })
        .context("Starting the admin thread failed")?;
    Ok(())
}

/// The state of the guest in a line of the log, which has no room for every bucket.
pub fn summary(broker: &Broker) -> Value {
    let mut status = json!(Report::of(broker));
    if let Some(fields) = status.as_object_mut() {
        fields.remove("latency");
    }
    status
}

fn serve(broker: &Arc<Broker>, mut client: UnixStream) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let asker = getsockopt(&client, PeerCredentials)?.uid();
    let mut line = String::new();
    BufReader::new((&client).take(MAX_REQUEST)).read_line(&mut line)?;
    let outcome = match asker {
        0 => answer(broker, &client, &line),
        user if user == broker.sandbox.user => answer(broker, &client, &line),
        user => Err(format!(
            "user {user} is neither root nor user {}, whose backend this is",
            broker.sandbox.user
        )),
    };
    let reply = match outcome {
        Ok(None) => return Ok(()),
        Ok(Some(answer)) => json!({"schema": SCHEMA, "answer": answer}),
        Err(error) => json!({"schema": SCHEMA, "error": error}),
    };
    client.write_all(format!("{reply}\n").as_bytes())
}

/// The answer; `None` if a thread of its own gives it.
fn answer(broker: &Arc<Broker>, client: &UnixStream, line: &str) -> Result<Option<Value>, String> {
    Ok(Some(match parse(line)? {
        Request::Status => json!(Report::of(broker)),
        Request::Metrics => metrics::render(&Report::of(broker)).into(),
        Request::Limits { set } => {
            change(broker, &set)?;
            limits(broker)
        }
        Request::Trace { slow_ns, errors } => {
            let client = client.try_clone();
            let client = client.map_err(|error| format!("the stream cannot be kept: {error}"))?;
            trace::start(broker, client, Wanted { slow_ns, errors })?;
            return Ok(None);
        }
    }))
}

fn parse(line: &str) -> Result<Request, String> {
    let request: Value = serde_json::from_str(line)
        .map_err(|error| format!("the request is not a line of JSON: {error}"))?;
    match request["schema"].as_u64() {
        Some(SCHEMA) => {}
        _ => {
            return Err(format!(
                "the request has schema {} and this backend speaks {SCHEMA}; use the nvguest of \
                 its version, {}",
                request["schema"],
                env!("CARGO_PKG_VERSION")
            ))
        }
    }
    serde_json::from_value(request).map_err(|error| format!("the request is not known: {error}"))
}

/// Changes limits: all that are named, or none.
fn change(broker: &Broker, set: &BTreeMap<String, String>) -> Result<(), String> {
    let budget = |key| set.get(key).map(String::as_str);
    let vram = budget("vram").map(memory).transpose()?;
    let weight = budget("weight").map(share).transpose()?;
    let others = set.iter().filter(|(key, _)| !["vram", "weight"].contains(&key.as_str()));
    broker.limits.set(others.map(|(key, value)| (key.as_str(), value.as_str())))?;
    vram.into_iter().for_each(|bytes| broker.set_vram(bytes));
    weight.into_iter().for_each(|weight| broker.set_weight(weight));
    if !set.is_empty() {
        tracing::warn!(?set, "an admin changed limits");
    }
    Ok(())
}

fn memory(text: &str) -> Result<u64, String> {
    match text {
        "none" => Ok(NO_BUDGET),
        text => amount(text).ok_or_else(|| format!("vram={text} is no size, e.g. 8G, nor none")),
    }
}

fn share(text: &str) -> Result<u32, String> {
    let weight = text.parse().ok().filter(|weight| WEIGHTS.contains(weight));
    weight.ok_or_else(|| {
        format!("weight={text} is not from {} to {}", WEIGHTS.start(), WEIGHTS.end())
    })
}

/// What the guest may have, and since when a change of it holds.
fn limits(broker: &Broker) -> Value {
    let now = broker.limits.now();
    let rows: Map<String, Value> = TABLE
        .iter()
        .map(|row| {
            let (guest, process) = (now.guest(row.resource), now.process(row.resource));
            let holds = effect(row.resource);
            (row.key.to_owned(), json!({"guest": guest, "process": process, "holds": holds}))
        })
        .collect();
    let (vram, weight) = (broker.video.usage().limit(), broker.weight());
    json!({"processes": now.processes, "vram": vram, "weight": weight, "limits": rows})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_of_another_schema_is_answered_with_ours() {
        for line in [r#"{"request":"status"}"#, r#"{"schema":2,"request":"status"}"#] {
            let error = parse(line).unwrap_err();
            assert!(error.contains("this backend speaks 1"), "{error}");
        }
    }

    #[test]
    fn an_unknown_request_is_answered_with_those_that_are_known() {
        let error = parse(r#"{"schema":1,"request":"reboot"}"#).unwrap_err();
        assert!(error.contains("`reboot`") && error.contains("`limits`"), "{error}");
        assert!(parse("").unwrap_err().contains("JSON"));
        assert!(parse(r#"{"schema":1,"request":"limits","set":{"files":1}}"#).is_err());
    }
}
