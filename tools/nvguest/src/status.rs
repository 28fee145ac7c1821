//! What a backend says of its guest, as far as this program shows it.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use serde::Deserialize;
use serde_json::Value;

/// The state of a guest; the backend's `broker/report.rs` says what each field means.
#[derive(Clone, Debug, Deserialize)]
pub struct Status {
    pub pid: u32,
    pub version: String,
    pub release: String,
    pub profile: String,
    pub sandbox: String,
    pub workers: Vec<Worker>,
    pub placements: u64,
    pub placements_peak: u64,
    pub window_bytes: u64,
    pub arena: Option<Arena>,
    pub shares: BTreeMap<String, Share>,
    pub requests: BTreeMap<String, u64>,
    pub errors: BTreeMap<String, u64>,
    pub driver_errors: u64,
    pub in_flight: u64,
    pub events: u64,
    pub wakes: u64,
    pub latency: BTreeMap<String, Latency>,
    pub refusals: Vec<Refusal>,
    pub refused: u64,
    /// Video memory, of a backend that knows it.
    #[serde(default)]
    pub vram: Option<Vram>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Worker {
    pub pid: u32,
    pub guest_tgid: u32,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Arena {
    pub bytes: u64,
    pub ranges: u64,
    pub taken_bytes: u64,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Share {
    pub held: u64,
    pub most: u64,
}

#[derive(Clone, Debug, Default, Deserialize)]
pub struct Latency {
    pub calls: u64,
    pub sum_ns: u64,
    pub buckets: Vec<u64>,
}

#[derive(Clone, Debug, Deserialize)]
pub struct Refusal {
    pub reason: String,
    pub what: String,
    pub at_least: u64,
}

/// Bytes of video memory.
#[derive(Clone, Debug, Deserialize)]
pub struct Vram {
    #[serde(default)]
    pub used: Option<u64>,
    #[serde(default)]
    pub budget: Option<u64>,
}

impl Status {
    /// Reads an answer.
    pub fn read(answer: &Value) -> Result<Self> {
        serde_json::from_value(answer.clone()).context("the backend's status is not as expected")
    }

    /// The mode of its sandbox, and whether the kernel lacks a part of it.
    pub fn sandbox_in_short(&self) -> String {
        let mode = self.sandbox.split(':').next().unwrap_or_default();
        let gaps = mode != "off" && has_gaps(&self.sandbox);
        format!("{mode}{}", if gaps { ", gaps" } else { "" })
    }

    /// Calls of all classes by bucket.
    pub fn calls(&self) -> Vec<u64> {
        let mut all = Vec::new();
        for latency in self.latency.values() {
            all.resize(all.len().max(latency.buckets.len()), 0);
            all.iter_mut().zip(&latency.buckets).for_each(|(sum, calls)| *sum += calls);
        }
        all
    }
}

/// Whether a sandbox, as a backend describes it, lacks a part.
pub fn has_gaps(sandbox: &str) -> bool {
    sandbox.contains("no Landlock") || sandbox.contains("no seccomp")
}

/// The bound in µs that a share (of a thousand) of the calls does not exceed; `None` if there
/// is no call. The bound of the last bucket stands for all that took longer.
pub fn quantile(buckets: &[u64], thousandths: u64) -> Option<u64> {
    let calls: u64 = buckets.iter().sum();
    let wanted = (calls * thousandths).div_ceil(1000);
    let mut below = 0;
    let at = buckets.iter().position(|calls| {
        below += calls;
        below >= wanted
    })?;
    (calls > 0).then(|| 1 << at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quantile_is_the_bound_of_its_bucket() {
        let buckets = [0, 50, 0, 49, 1];
        assert_eq!(quantile(&buckets, 500), Some(2));
        assert_eq!(quantile(&buckets, 510), Some(8));
        assert_eq!(quantile(&buckets, 990), Some(8));
        assert_eq!(quantile(&buckets, 1000), Some(16));
        assert_eq!(quantile(&[0, 0], 500), None);
        assert_eq!(quantile(&[], 500), None);
    }
}
