//! What has come since a completion queue was armed (`cq/notify.rs`).

use std::sync::atomic::Ordering;

use super::Qp;

/// Up to where the two queues of a queue pair had ended at some time.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::soft) struct Marks {
    sends: u32,
    receives: u32,
}

impl Qp {
    /// Up to where both queues have ended by now.
    pub(in crate::soft) fn marks(&self) -> Marks {
        Marks {
            sends: self.sq.done.load(Ordering::Acquire),
            receives: self.rq.done.load(Ordering::Acquire),
        }
    }

    /// Whether completions came between two marks, polled by now or not. No poll is under way, and the queues were
    /// not emptied since.
    pub(in crate::soft) fn completed_between(
        &self,
        (from, to): (Marks, Marks),
        sends: bool,
        receives: bool,
    ) -> bool {
        // Every receive has a completion.
        receives && from.receives != to.receives
            || sends && self.sq.completed_between(from.sends, to.sends)
    }
}
