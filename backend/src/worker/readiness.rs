//! The readiness of one file: an edge of the host's is remembered, an arm of the guest's asks
//! for one, and an edge and an arm make one report.
//!
//! Every step is a read-modify-write, so of two that cross the later one has seen the
//! earlier: nothing here rests on an order between different words. `tests/arming.rs`
//! compiles this file against a model checker's atomics.

use super::atomic::{AtomicBool, AtomicU32, Ordering};

/// What came and was not told, and whether somebody wants to be told.
#[derive(Default)]
pub struct Readiness {
    edges: AtomicU32,
    armed: AtomicBool,
}

impl Readiness {
    /// An edge came: all that came since the last report, if somebody armed for it.
    pub fn edge(&self, mask: u32) -> Option<u32> {
        self.edges.fetch_or(mask, Ordering::AcqRel);
        self.take_if_armed()
    }

    /// Somebody wants to know: what came before, at once.
    pub fn arm(&self) -> Option<u32> {
        self.armed.swap(true, Ordering::AcqRel);
        if self.edges.fetch_or(0, Ordering::AcqRel) == 0 {
            return None;
        }
        self.take_if_armed()
    }

    /// Of an edge and an arm that cross, exactly one takes both.
    fn take_if_armed(&self) -> Option<u32> {
        self.armed.swap(false, Ordering::AcqRel).then(|| self.edges.swap(0, Ordering::AcqRel))
    }
}
