//! The readiness of one file: an edge of the host's is remembered, an arm of the guest's asks
//! for a number of reports, and each report takes all edges that came before it.
//! `tests/arming.rs` checks it together with the guest's half.

/// What came and was not told, and how many more reports somebody wants.
#[derive(Default)]
pub struct Readiness {
    edges: u32,
    wanted: u32,
}

/// What the guest is to be told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Report {
    /// All that came since the last report. Nothing: only the promise is taken back.
    pub mask: u32,
    /// Reports that will come after this one without another arm.
    pub more: u32,
}

impl Readiness {
    /// An edge came: what to report, if somebody wants to know.
    pub fn edge(&mut self, mask: u32) -> Option<Report> {
        self.edges |= mask;
        self.report()
    }

    /// Somebody wants to know, `reports` times: what came before, at once.
    pub fn arm(&mut self, reports: u32) -> Option<Report> {
        self.wanted = self.wanted.max(reports);
        self.report()
    }

    /// Takes back what was promised; whether something was.
    pub fn withdraw(&mut self) -> bool {
        std::mem::take(&mut self.wanted) > 0
    }

    fn report(&mut self) -> Option<Report> {
        if self.edges == 0 || self.wanted == 0 {
            return None;
        }
        self.wanted -= 1;
        Some(Report { mask: std::mem::take(&mut self.edges), more: self.wanted })
    }
}
