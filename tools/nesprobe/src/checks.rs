//! Verdicts: how they are reached, told and counted.

use std::sync::mpsc::{channel, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use serde::Serialize;

use crate::error::Result;
use crate::picture::Picture;
use crate::report;

/// A check that takes longer hangs.
const PATIENCE: Duration = Duration::from_secs(120);

/// What a check saw.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// What it should.
    Same(String),
    /// Something else.
    Differs {
        /// What should have been seen.
        expected: String,
        /// What was.
        got: String,
    },
    /// Nothing, because there is nothing to be seen here.
    Nothing(String),
}

impl Seen {
    /// Whether one value is the other; `what` says what it shows if it is.
    pub fn equal<T: PartialEq + std::fmt::Display>(what: &str, expected: T, got: T) -> Seen {
        if expected == got {
            return Seen::Same(what.to_owned());
        }
        Seen::Differs { expected: expected.to_string(), got: got.to_string() }
    }

    /// Whether a picture is the one that was expected; its colours are what is seen.
    pub fn picture(expected: &Picture, got: &Picture) -> Seen {
        match expected.first_difference(got) {
            None => Seen::Same(got.tally()),
            Some(first) => Seen::Differs {
                expected: expected.tally(),
                got: format!("{} ({first})", got.tally()),
            },
        }
    }

    /// Whether bytes, seen as words, are the ones that were expected.
    pub fn words(what: &str, expected: &[u8], got: &[u8]) -> Seen {
        let word = |bytes: &[u8], at: usize| {
            let bytes = bytes.get(at * 4..at * 4 + 4).unwrap_or_default();
            bytes.iter().rev().map(|byte| format!("{byte:02x}")).collect::<String>()
        };
        let pairs = expected.chunks(4).zip(got.chunks(4));
        match pairs.clone().position(|(a, b)| a != b) {
            None if expected.len() == got.len() => Seen::Same(what.to_owned()),
            None => Seen::equal(what, expected.len(), got.len()),
            Some(at) => Seen::Differs {
                expected: format!("{} at word {at}", word(expected, at)),
                got: format!(
                    "{}, and {} of {} words wrong",
                    word(got, at),
                    pairs.filter(|(a, b)| a != b).count(),
                    expected.len() / 4
                ),
            },
        }
    }
}

#[derive(Debug, Serialize)]
struct Verdict {
    check: String,
    outcome: &'static str,
    detail: String,
}

/// Runs checks one after another and tells what came of them.
pub struct Checks {
    as_json: bool,
    verdicts: Vec<Verdict>,
}

impl Checks {
    /// No checks yet.
    pub fn new(as_json: bool) -> Checks {
        Checks { as_json, verdicts: Vec::new() }
    }

    /// Runs a check. One that never comes back ends the process, saying so.
    pub fn run(&mut self, name: &str, check: impl FnOnce() -> Result<Seen>) {
        let watch = Watch::over(name);
        let seen = check();
        drop(watch);
        let (outcome, detail) = match seen {
            Ok(Seen::Same(what)) => ("ok", what),
            Ok(Seen::Differs { expected, got }) => {
                ("FAIL", format!("expected {expected}; got {got}"))
            }
            Ok(Seen::Nothing(why)) => ("skip", why),
            Err(error) => ("FAIL", error.to_string()),
        };
        if !self.as_json {
            report::line(format_args!("{outcome:<4} {name}: {detail}"));
        }
        self.verdicts.push(Verdict { check: name.to_owned(), outcome, detail });
    }

    fn count(&self, outcome: &str) -> usize {
        self.verdicts.iter().filter(|it| it.outcome == outcome).count()
    }

    /// Sums up. Whether no check failed.
    pub fn end(&self, about: &impl Serialize) -> Result<bool> {
        let [ok, failed, skipped] = ["ok", "FAIL", "skip"].map(|it| self.count(it));
        if self.as_json {
            #[derive(Serialize)]
            struct All<'a, T> {
                #[serde(flatten)]
                about: &'a T,
                ok: usize,
                failed: usize,
                skipped: usize,
                checks: &'a [Verdict],
            }
            report::json(&All { about, ok, failed, skipped, checks: &self.verdicts })?;
        } else {
            report::line(format_args!("{ok} ok, {failed} failed, {skipped} skipped"));
            for verdict in self.verdicts.iter().filter(|it| it.outcome == "FAIL") {
                report::line(format_args!("differs: {}", verdict.check));
            }
        }
        Ok(failed == 0)
    }
}

/// Ends the process if it is not dropped in time: a device that hangs cannot be let go of.
struct Watch(#[allow(dead_code)] Sender<()>);

impl Watch {
    fn over(name: &str) -> Watch {
        let (sender, receiver) = channel();
        let name = name.to_owned();
        thread::spawn(move || {
            if receiver.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                let seconds = PATIENCE.as_secs();
                report::line(format_args!("FAIL {name}: no end within {seconds} s; given up"));
                std::process::exit(1);
            }
        });
        Watch(sender)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_word_is_placed_and_counted() {
        let seen = Seen::words("x", &[1, 0, 0, 0, 2, 0, 0, 0], &[1, 0, 0, 0, 3, 0, 0, 0]);
        let expected = "00000002 at word 1".to_owned();
        let got = "00000003, and 1 of 2 words wrong".to_owned();
        assert_eq!(seen, Seen::Differs { expected, got });
    }

    #[test]
    fn fewer_bytes_than_expected_differ() {
        assert!(matches!(Seen::words("x", &[0; 8], &[0; 4]), Seen::Differs { .. }));
    }

    #[test]
    fn a_skipped_check_is_no_failure_and_a_failed_call_is() {
        let mut checks = Checks::new(true);
        checks.run("a", || Ok(Seen::Nothing("no such queue".to_owned())));
        assert!(checks.end(&()).unwrap());
        checks.run("b", || Err(crate::error::Error::Unfit("no".to_owned())));
        assert!(!checks.end(&()).unwrap());
    }
}
