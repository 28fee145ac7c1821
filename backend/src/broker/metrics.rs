//! The state of the guest for Prometheus: OpenMetrics text, over HTTP on a Unix socket, and
//! in a file for node_exporter's textfile collector.
//!
//! Names and units are those of Prometheus' conventions: base units, `_total` on counters.
//! What the metrics say comes from [`Report`] and from nowhere else.
#![forbid(unsafe_code)]

use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::text::encode;
use prometheus_client::encoding::{DescriptorEncoder, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::registry::{Registry, Unit};

use super::report::{Latency, Report};
use super::Broker;
use crate::transport::counts::{bound, BUCKETS};

/// A client that does not ask or read for so long is dropped.
const PATIENCE: Duration = Duration::from_secs(1);
/// Bytes of a request at most.
const MAX_REQUEST: u64 = 8 << 10;
/// How often the file is written.
const PERIOD: Duration = Duration::from_secs(10);
const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// The metrics' text.
pub fn render(report: &Report) -> String {
    // Every metric has the prefix; the guest's name is a label of each.
    let name = report.name.clone().unwrap_or_default();
    let labels = [("guest".into(), name.into())];
    let mut registry = Registry::with_prefix_and_labels("nvguest", labels.into_iter());
    registry.register_collector(Box::new(Metrics(report.clone())));
    let mut text = String::with_capacity(32 << 10);
    encode(&mut text, &registry).expect("INVARIANT: writing to a string does not fail");
    text
}

/// Starts the thread that answers scrapes on `listener`.
pub fn serve(broker: &Arc<Broker>, listener: UnixListener) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("metrics".into())
        .stack_size(256 << 10)
        .spawn(move || {
            for client in listener.incoming().flatten() {
                if let Err(error) = scrape(&broker, &client) {
                    tracing::debug!(%error, "a scrape went unanswered");
                }
            }
        })
        .context("Starting the metrics thread failed")?;
    Ok(())
}

/// Starts the thread that keeps the file.
pub fn keep_file(broker: &Arc<Broker>) -> Result<()> {
    let broker = Arc::clone(broker);
    std::thread::Builder::new()
        .name("metrics-file".into())
        .stack_size(256 << 10)
        .spawn(move || loop {
            let text = render(&Report::of(&broker));
            if let Err(error) = broker.starter.publish(text.as_bytes()) {
                tracing::warn!(%error, "the metrics file could not be written");
            }
            std::thread::sleep(PERIOD);
        })
        .context("Starting the thread of the metrics file failed")?;
    Ok(())
}

/// HTTP as far as `curl --unix-socket` and a scraper need it: whatever is asked, these are
/// the metrics.
fn scrape(broker: &Broker, mut client: &UnixStream) -> io::Result<()> {
    client.set_read_timeout(Some(PATIENCE))?;
    client.set_write_timeout(Some(PATIENCE))?;
    let request = BufReader::new(client.take(MAX_REQUEST));
    for line in request.lines() {
        if line?.is_empty() {
            break;
        }
    }
    let text = render(&Report::of(broker));
    let length = text.len();
    let head = format!(
        "HTTP/1.0 200 OK\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {length}\r\n\
         Connection: close\r\n\r\n"
    );
    client.write_all((head + &text).as_bytes())
}

#[derive(Debug)]
struct Metrics(Report);

/// Label sets of one metric, each with its value.
type Rows<'a, V> = &'a [(&'a [(&'a str, &'a str)], V)];

impl Collector for Metrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(&mut encoder);
        self.identity(&mut out)?;
        self.traffic(&mut out)?;
        self.latency(&mut out)?;
        self.memory(&mut out)?;
        self.card(&mut out)?;
        self.limits(&mut out)
    }
}

impl Metrics {
    fn identity(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let it = &self.0;
        let build: &[_] =
            &[("version", it.version), ("driver", &it.release), ("profile", &it.profile)];
        out.gauges("build_info", "The backend, the driver and its profile", None, &[(build, 1)])?;
        let layers: Rows<'_, u64> = &[
            (&[("layer", "landlock")], it.landlock_abi.into()),
            (&[("layer", "seccomp")], it.seccomp.into()),
        ];
        let help = "What confines the broker: ABI of Landlock, whether seccomp filters; 0 for none";
        out.gauges("sandbox", help, None, layers)?;
        let workers = it.workers.len() as u64;
        out.gauge("workers", "Guest processes that have a card open", None, workers)
    }

    fn traffic(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let it = &self.0;
        let by_type = |counts: &std::collections::BTreeMap<&'static str, u64>| {
            counts.iter().map(|(&kind, &count)| ([("type", kind)], count)).collect::<Vec<_>>()
        };
        let requests = by_type(&it.requests);
        out.counters("requests", "Requests served", &slices(&requests))?;
        let errors = by_type(&it.errors);
        out.counters("errors", "Requests answered with an errno", &slices(&errors))?;
        let help = "Calls that the driver answered with a status other than OK";
        out.counter("driver_errors", help, it.driver_errors)?;
        out.counter("events", "Event records sent to the guest", it.events)?;
        out.counter("wakes", "Times that a worker slept and was woken", it.wakes)?;
        let help = "Requests in the slots' queues that were taken and not answered";
        out.gauge("queue_depth", help, None, it.in_flight as u64)?;
        let mut reasons = std::collections::BTreeMap::<&str, u64>::new();
        for refusal in &it.refusals {
            *reasons.entry(refusal.reason).or_default() += refusal.at_least;
        }
        let named: u64 = reasons.values().sum();
        reasons.insert("unnamed", it.refused.saturating_sub(named));
        let reasons: Vec<_> = reasons.into_iter().map(|(r, n)| ([("reason", r)], n)).collect();
        out.counters("refused", "Calls refused, at least", &slices(&reasons))?;
        out.counter("log_lines_left_out", "Lines of the broker's log left out", it.lines_left_out)
    }

    fn latency(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let help = "Time that a call took in the worker, by what it is for";
        let kind = MetricType::Histogram;
        let mut metric =
            out.0.encode_descriptor("call_duration", help, Some(&Unit::Seconds), kind)?;
        for (class, latency) in &self.0.latency {
            let labels = [("class", *class)];
            encode_latency(metric.encode_family(&labels)?, latency)?;
        }
        Ok(())
    }

    fn memory(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let it = &self.0;
        let bytes = Some(&Unit::Bytes);
        out.gauge("placements", "Live placements in the window", None, it.placements.into())?;
        let help = "Most placements that were live at once";
        out.gauge("placements_peak", help, None, it.placements_peak.into())?;
        out.gauge("window", "Window that placements take", bytes, it.window_bytes)?;
        let Some(arena) = &it.arena else { return Ok(()) };
        out.gauge("arena_size", "Size of the arena", bytes, arena.bytes)?;
        out.gauge("arena_taken", "Arena that is taken", bytes, arena.taken_bytes)?;
        out.gauge("arena_ranges", "Ranges of the arena that are taken", None, arena.ranges as u64)
    }

    fn card(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let (vram, bytes) = (&self.0.vram, Some(&Unit::Bytes));
        let help = "The guest's share of the card's time";
        out.gauge("weight", help, None, self.0.weight.into())?;
        out.gauge("vram_used", "Video memory that the guest's objects keep", bytes, vram.used)?;
        // A guest without a budget has none to show.
        let Some(budget) = vram.budget else { return Ok(()) };
        out.gauge("vram_budget", "Video memory that the guest may have", bytes, budget)?;
        let help = "Of the budget, for small allocations alone";
        out.gauge("vram_reserve", help, bytes, vram.reserve)
    }

    fn limits(&self, out: &mut Out<'_, '_>) -> fmt::Result {
        let rows = |value: fn(&super::report::Share) -> u64| {
            let shares = self.0.shares.iter();
            shares.map(|(&key, share)| ([("resource", key)], value(share))).collect::<Vec<_>>()
        };
        let (held, most) = (rows(|share| share.held), rows(|share| share.most));
        out.gauges("limit_used", "What the guest's processes hold", None, &slices(&held))?;
        out.gauges("limit", "What they may hold at most", None, &slices(&most))
    }
}

fn encode_latency(mut metric: MetricEncoder<'_>, latency: &Latency) -> fmt::Result {
    // The encoder wants its infinite bound spelled so.
    let le = |at: usize| if at + 1 == BUCKETS { f64::MAX } else { bound(at) };
    let buckets: [(f64, u64); BUCKETS] = std::array::from_fn(|at| (le(at), latency.buckets[at]));
    // CAST: Prometheus has f64, exact here up to 104 days.
    let sum = latency.sum_ns as f64 / 1e9;
    metric.encode_histogram::<NoLabelSet>(sum, latency.calls, &buckets, None)
}

/// A gauge has a sign, and the encoder fails on what does not fit: a limit so high is none.
fn shown(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

fn slices<'a, const N: usize, V: Copy>(
    rows: &'a [([(&'a str, &'a str); N], V)],
) -> Vec<(&'a [(&'a str, &'a str)], V)> {
    rows.iter().map(|(labels, value)| (labels.as_slice(), *value)).collect()
}

/// What the metrics are written to.
struct Out<'o, 'e>(&'o mut DescriptorEncoder<'e>);

impl Out<'_, '_> {
    fn gauge(&mut self, name: &str, help: &str, unit: Option<&Unit>, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        metric.encode_gauge(&shown(value))
    }

    fn gauges(
        &mut self,
        name: &str,
        help: &str,
        unit: Option<&Unit>,
        rows: Rows<'_, u64>,
    ) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, unit, MetricType::Gauge)?;
        for (labels, value) in rows {
            metric.encode_family(labels)?.encode_gauge(&shown(*value))?;
        }
        Ok(())
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        metric.encode_counter::<NoLabelSet, _, u64>(&value, None)
    }

    fn counters(&mut self, name: &str, help: &str, rows: Rows<'_, u64>) -> fmt::Result {
        let mut metric = self.0.encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in rows {
            let mut one = metric.encode_family(labels)?;
            one.encode_counter::<NoLabelSet, _, u64>(value, None)?;
        }
        Ok(())
    }
}
