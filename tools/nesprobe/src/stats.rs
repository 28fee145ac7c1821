//! Means and percentiles.

use serde::Serialize;

/// What is said of many times.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Stats {
    /// The arithmetic mean.
    pub mean: f64,
    /// The median.
    pub p50: f64,
    /// Nine of ten are not above it.
    pub p90: f64,
    /// 99 of 100 are not above it.
    pub p99: f64,
    /// 999 of 1000 are not above it.
    #[serde(rename = "p99.9")]
    pub p999: f64,
    /// The greatest.
    pub max: f64,
}

impl Stats {
    /// Of these values, in their unit; none if there are no values.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Option<Stats> {
        let mut sorted: Vec<f64> = values.into_iter().collect();
        sorted.sort_by(f64::total_cmp);
        Some(Stats {
            mean: mean(sorted.iter().copied())?,
            p50: nearest_rank(&sorted, 500)?,
            p90: nearest_rank(&sorted, 900)?,
            p99: nearest_rank(&sorted, 990)?,
            p999: nearest_rank(&sorted, 999)?,
            max: *sorted.last()?,
        })
    }
}

/// The mean; none of no values.
pub fn mean(values: impl IntoIterator<Item = f64>) -> Option<f64> {
    let (mut sum, mut count) = (0.0, 0_u32);
    for value in values {
        sum += value;
        count += 1;
    }
    (count > 0).then(|| sum / f64::from(count))
}

/// The smallest value that `thousandths` of all are not above: a value that was measured, never
/// one between two.
fn nearest_rank(sorted: &[f64], thousandths: usize) -> Option<f64> {
    let rank = (sorted.len() * thousandths).div_ceil(1000).max(1);
    sorted.get(rank - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_those_of_the_nearest_rank() {
        let stats = Stats::of((1..=1000).rev().map(f64::from)).unwrap();
        assert_eq!((stats.p50, stats.p90, stats.p99), (500.0, 900.0, 990.0));
        assert_eq!((stats.p999, stats.max, stats.mean), (999.0, 1000.0, 500.5));
    }

    #[test]
    fn of_few_values_a_high_percentile_is_the_greatest() {
        let stats = Stats::of([15.0, 20.0, 35.0, 40.0, 50.0]).unwrap();
        assert_eq!((stats.p50, stats.p90, stats.p999), (35.0, 50.0, 50.0));
        let one = Stats::of([3.0]).unwrap();
        assert_eq!((one.p50, one.max), (3.0, 3.0));
    }

    #[test]
    fn of_no_values_nothing_is_said() {
        assert_eq!(Stats::of([]), None);
    }
}
