//! Finds the cost that takes a given time.

use std::time::Duration;

use crate::args::Wait;
use crate::error::{Error, Result};
use crate::frames::{self, Plan};
use crate::load::Load;
use crate::stats::Stats;

/// Steps after which it is given up.
const STEPS: usize = 24;

/// Steps in which half of the tolerance is aimed for.
const PATIENT: usize = 12;

/// How far the median may be from what was asked for.
const TOLERANCE: f64 = 0.01;

/// A cost, and the median of its frames in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Point {
    /// Steps for each pixel.
    pub cost: u32,
    /// The median.
    pub ms: f64,
}

/// Finds the cost whose median frame takes `target` milliseconds, within 1 %, and leaves the load
/// recorded with it.
pub fn calibrate(load: &mut Load, target: f64, first: u32, wait: Wait) -> Result<Point> {
    let frames = ((1000.0 / target) as usize).clamp(9, 101);
    let plan = Plan { time: Duration::MAX, frames, period: None, wait };
    search(target, first, |cost| {
        load.set_cost(cost)?;
        let run = frames::draw(load, &plan)?;
        let stats = Stats::of(run.frames.iter().map(|it| it.wall.as_secs_f64() * 1e3));
        Ok(stats.map_or(f64::MAX, |it| it.p50))
    })
}

fn search(target: f64, first: u32, mut measure: impl FnMut(u32) -> Result<f64>) -> Result<Point> {
    let mut points: Vec<Point> = Vec::new();
    let mut cost = first.max(1);
    for step in 0..STEPS {
        let ms = measure(cost)?;
        let tolerance = if step < PATIENT { TOLERANCE / 2.0 } else { TOLERANCE };
        points.push(Point { cost, ms });
        if off(target, ms) <= tolerance {
            return Ok(Point { cost, ms });
        }
        if cost == 1 && ms > target {
            return Err(Error::Unfit(format!(
                "a frame takes {ms:.3} ms even at cost 1, not {target} ms; make the picture \
                 smaller with --width and --height"
            )));
        }
        cost = propose(target, &points);
    }
    let by_distance = |a: &&Point, b: &&Point| off(target, a.ms).total_cmp(&off(target, b.ms));
    let best = points.iter().min_by(by_distance).copied();
    if let Some(Point { cost, .. }) = best.filter(|best| off(target, best.ms) <= TOLERANCE) {
        // Once more, to be left recorded; a machine that does not hold still shows here.
        let ms = measure(cost)?;
        if off(target, ms) <= TOLERANCE {
            return Ok(Point { cost, ms });
        }
    }
    Err(Error::Unfit(format!(
        "no cost was found whose median frame takes {target} ms within 1 %; the nearest was \
         {best:?}: is something else running?"
    )))
}

fn off(target: f64, ms: f64) -> f64 {
    (ms - target).abs() / target
}

/// The cost to try next: on the line through the two points nearest to the target, or in
/// proportion while there is one. Of points that are equally near the newest counts.
fn propose(target: f64, points: &[Point]) -> u32 {
    let mut near: Vec<Point> = points.iter().rev().copied().collect();
    near.sort_by(|a, b| off(target, a.ms).total_cmp(&off(target, b.ms)));
    let Some(&best) = near.first() else { return 1 };
    let other = near.iter().find(|it| it.cost != best.cost);
    let slope = other.map(|it| (best.ms - it.ms) / (f64::from(best.cost) - f64::from(it.cost)));
    let cost = f64::from(best.cost);
    let wanted = match slope.filter(|it| *it > 0.0) {
        Some(slope) => cost + (target - best.ms) / slope,
        None => cost * target / best.ms,
    };
    // CAST: a float that is out of range saturates.
    let next = wanted.clamp(cost / 16.0, cost * 16.0).round().max(1.0) as u32;
    if points.iter().all(|it| it.cost != next) || off(target, best.ms) <= TOLERANCE {
        return next;
    }
    let nearer = if best.ms < target { best.cost.saturating_add(1) } else { best.cost - 1 };
    nearer.max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(target: f64, first: u32, time: impl Fn(u32) -> f64) -> Result<Point> {
        search(target, first, |cost| Ok(time(cost)))
    }

    #[test]
    fn a_cost_is_found_from_far_below_and_far_above() {
        let time = |cost| 0.05 + f64::from(cost) * 0.0003;
        for first in [1, 1000, 4_000_000] {
            let point = found(10.0, first, time).unwrap();
            assert!(off(10.0, point.ms) <= TOLERANCE, "{point:?}");
        }
    }

    #[test]
    fn a_load_that_grows_unevenly_is_found_too() {
        let time = |cost| if cost < 5000 { 0.5 } else { f64::from(cost - 5000) * 0.001 + 0.5 };
        let point = found(4.0, 1000, time).unwrap();
        assert!(off(4.0, point.ms) <= TOLERANCE, "{point:?}");
    }

    #[test]
    fn a_time_that_even_the_least_cost_exceeds_is_refused() {
        let error = found(1.0, 1000, |_| 3.0).unwrap_err().to_string();
        assert!(error.contains("cost 1"), "{error}");
    }

    #[test]
    fn a_time_that_was_right_once_and_is_not_again_is_refused() {
        let mut turn = 0;
        let error = search(10.0, 1000, |_| {
            turn += 1;
            // Near enough in a step that aims for half of the tolerance, and never again.
            Ok(if turn == 5 { 10.08 } else { 10.0 + f64::from(turn) })
        });
        assert!(error.is_err());
    }

    #[test]
    fn a_card_that_is_never_the_same_is_refused() {
        let mut turn = 0.0;
        let error = search(10.0, 1000, |_| {
            turn += 1.0;
            Ok(50.0 + turn)
        });
        assert!(error.is_err());
    }
}
