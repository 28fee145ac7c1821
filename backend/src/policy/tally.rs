//! Refusals, counted by name: how users learn, and report, what a guest was denied.

use std::collections::BTreeMap;

use nvguest_abi::compiled::Verdict;

use super::What;

/// Names kept at most: a guest can make up as many as there are numbers.
pub const MAX_NAMES: usize = 256;

/// Counts of refusals by reason and name.
#[derive(Debug, Default)]
pub struct Tally {
    counts: BTreeMap<(Verdict, What), u64>,
    unnamed: u64,
}

impl Tally {
    /// Counts one refusal and says how often it has come; 0 if its name found no room.
    pub fn count(&mut self, verdict: Verdict, what: What) -> u64 {
        self.add(verdict, what, 1)
    }

    /// Counts `times` refusals of one name.
    pub fn add(&mut self, verdict: Verdict, what: What, times: u64) -> u64 {
        if self.counts.len() >= MAX_NAMES && !self.counts.contains_key(&(verdict, what)) {
            self.unnamed = self.unnamed.saturating_add(times);
            return 0;
        }
        let count = self.counts.entry((verdict, what)).or_default();
        *count = count.saturating_add(times);
        *count
    }

    /// Each name with its reason and count, in the order of reasons.
    pub fn iter(&self) -> impl Iterator<Item = (Verdict, What, u64)> + '_ {
        self.counts.iter().map(|(&(verdict, what), &count)| (verdict, what, count))
    }

    /// Refusals whose names came after the table was full.
    pub fn unnamed(&self) -> u64 {
        self.unnamed
    }

    /// All refusals.
    pub fn total(&self) -> u64 {
        self.counts.values().fold(self.unnamed, |total, &count| total.saturating_add(count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_new_once_for_each_reason() {
        let mut tally = Tally::default();
        let what = What::Control(0x2080_0123);
        assert_eq!(tally.count(Verdict::Unknown, what), 1);
        assert_eq!(tally.count(Verdict::Unknown, what), 2);
        assert_eq!(tally.count(Verdict::Size, what), 1);
        let counted: Vec<_> = tally.iter().collect();
        assert_eq!(counted, [(Verdict::Unknown, what, 2), (Verdict::Size, what, 1)]);
    }

    #[test]
    fn a_guest_that_makes_up_names_fills_the_table_and_no_more() {
        let mut tally = Tally::default();
        let made_up = 10 * MAX_NAMES as u32;
        let new =
            (0..made_up).map(|n| tally.count(Verdict::Unknown, What::Control(n))).sum::<u64>();
        assert_eq!(new, MAX_NAMES as u64);
        assert_eq!(tally.iter().count(), MAX_NAMES);
        assert_eq!(tally.total(), u64::from(made_up));
        assert_eq!(tally.unnamed(), u64::from(made_up) - MAX_NAMES as u64);
    }
}
