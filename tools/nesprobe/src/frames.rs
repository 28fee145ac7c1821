//! The loop that draws, and its pace.

use std::collections::VecDeque;
use std::thread::sleep;
use std::time::{Duration, Instant};

use crate::args::Wait;
use crate::error::Result;
use crate::load::Load;
use crate::sys;
use crate::vk::Waited;

/// A frame that was drawn.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Frame {
    /// When it was submitted, since the run began.
    pub begin: Duration,
    /// From before its submission until its fence was seen signalled.
    pub wall: Duration,
    /// The part of it that the program spent in submitting it.
    pub submit: Duration,
    /// What the device says that it took, in milliseconds.
    pub gpu_ms: Option<f64>,
    /// Whether it was done after the next one was due.
    pub late: bool,
}

/// How to draw.
#[derive(Debug, Clone, Copy)]
pub struct Plan {
    /// No frame begins after so long.
    pub time: Duration,
    /// No more frames than this.
    pub frames: usize,
    /// From the beginning of one frame to that of the next; as soon as may be, unless told.
    pub period: Option<Duration>,
    /// How to wait for a frame.
    pub wait: Wait,
}

/// What was drawn.
#[derive(Debug, Default)]
pub struct Run {
    /// Each frame, in the order of submission.
    pub frames: Vec<Frame>,
    /// From the beginning to the end of the last frame.
    pub time: Duration,
    /// Processor time of the process in that time.
    pub cpu: Duration,
}

/// Draws as planned, or until an end is asked for.
pub fn draw(load: &mut Load, plan: &Plan) -> Result<Run> {
    let frames = Vec::with_capacity(plan.frames.min(1 << 16));
    let cpu = sys::cpu_time()?;
    let mut looped = Loop {
        load,
        wait: plan.wait,
        start: Instant::now(),
        flying: VecDeque::with_capacity(16),
        frames,
        next: 0,
    };
    looped.turn(plan)?;
    let time = looped.start.elapsed();
    Ok(Run { frames: looped.frames, time, cpu: sys::cpu_time()?.saturating_sub(cpu) })
}

struct Loop<'a> {
    load: &'a mut Load,
    wait: Wait,
    start: Instant,
    /// Submitted and not known to be done, oldest first.
    flying: VecDeque<Flying>,
    frames: Vec<Frame>,
    next: usize,
}

struct Flying {
    slot: usize,
    begin: Duration,
    submit: Duration,
    deadline: Duration,
}

impl Loop<'_> {
    fn turn(&mut self, plan: &Plan) -> Result<()> {
        let mut pace = plan.period.map(Pace::new);
        let mut begun = 0;
        while begun < plan.frames {
            if self.flying.len() == self.load.slots() {
                self.finish_oldest()?;
            }
            let mut deadline = Duration::MAX;
            if let Some(pace) = &mut pace {
                let due = pace.next(self.start.elapsed());
                deadline = due + pace.period;
                self.wait_until(due)?;
            }
            if self.start.elapsed() >= plan.time || sys::stopped() {
                break;
            }
            self.begin(deadline)?;
            begun += 1;
        }
        while !self.flying.is_empty() {
            self.finish_oldest()?;
        }
        Ok(())
    }

    fn begin(&mut self, deadline: Duration) -> Result<()> {
        let slot = self.next;
        self.next = (slot + 1) % self.load.slots();
        let begin = self.start.elapsed();
        self.load.submit(slot)?;
        let submit = self.start.elapsed() - begin;
        self.flying.push_back(Flying { slot, begin, submit, deadline });
        Ok(())
    }

    /// Waits for the oldest frame, however long it takes.
    fn finish_oldest(&mut self) -> Result<()> {
        if let Some(oldest) = self.flying.front() {
            self.load.wait(oldest.slot, self.wait)?;
        }
        self.note_oldest()
    }

    /// The oldest frame was just seen to be done.
    fn note_oldest(&mut self) -> Result<()> {
        let end = self.start.elapsed();
        if let Some(Flying { slot, begin, submit, deadline }) = self.flying.pop_front() {
            let gpu_ms = self.load.finish(slot)?;
            let (wall, late) = (end - begin, end > deadline);
            self.frames.push(Frame { begin, wall, submit, gpu_ms, late });
        }
        Ok(())
    }

    /// Lets time pass until the next frame is due, and notes frames that are done meanwhile.
    fn wait_until(&mut self, due: Duration) -> Result<()> {
        loop {
            let left = due.saturating_sub(self.start.elapsed());
            if left.is_zero() {
                return Ok(());
            }
            match self.flying.front() {
                None => sleep(left),
                Some(oldest) => match self.load.wait_for(oldest.slot, left)? {
                    Waited::Signalled => self.note_oldest()?,
                    Waited::Late => return Ok(()),
                },
            }
        }
    }
}

/// When paced frames begin: at multiples of the period. A frame that could not begin in time
/// begins when it can; times that went by meanwhile get no frame.
struct Pace {
    period: Duration,
    turn: u32,
}

impl Pace {
    fn new(period: Duration) -> Pace {
        Pace { period, turn: 0 }
    }

    /// When the next frame is due, if it is now so long since the run began.
    fn next(&mut self, now: Duration) -> Duration {
        // CAST: runs end long before their 2^32nd frame; a float that is too great saturates.
        let current = (now.as_secs_f64() / self.period.as_secs_f64()) as u32;
        let turn = self.turn.max(current);
        self.turn = turn.saturating_add(1);
        self.period * turn
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PERIOD: Duration = Duration::from_millis(10);

    fn dues(times: &[u64]) -> Vec<u64> {
        let mut pace = Pace::new(PERIOD);
        let next = |ms: &u64| pace.next(Duration::from_millis(*ms)).as_millis();
        times.iter().map(next).map(|it| u64::try_from(it).unwrap()).collect()
    }

    #[test]
    fn frames_in_time_are_due_at_multiples_of_the_period() {
        assert_eq!(dues(&[0, 4, 13, 29]), [0, 10, 20, 30]);
    }

    #[test]
    fn a_frame_that_is_behind_is_due_at_once_and_delays_no_other() {
        // The first frame took until 12: the second was due at 10, the third is due at 20.
        assert_eq!(dues(&[0, 12, 17]), [0, 10, 20]);
    }

    #[test]
    fn times_that_went_by_get_no_frame() {
        assert_eq!(dues(&[0, 47, 48]), [0, 40, 50]);
    }
}
