//! Whether polls visit a queue pair unasked; the completion queue decides (`cq/crowd.rs`).

use std::sync::atomic::{AtomicU32, Ordering};

use super::Qp;
use crate::soft::cq::Cq;
use crate::soft::layout::qpn_index;

/// Which sides of a queue pair are not visited unasked.
#[derive(Debug, Default)]
pub(super) struct Resting(AtomicU32);

const SENDS: u32 = 1;
const RECEIVES: u32 = 2;

fn sides(sends: bool, receives: bool) -> u32 {
    if sends && receives {
        SENDS | RECEIVES
    } else if sends {
        SENDS
    } else {
        RECEIVES
    }
}

impl Qp {
    /// From now on whoever has something for the polls of this queue must call. What came just before
    /// may go without.
    pub(in crate::soft) fn rest(&self, cq: u32, sends: bool, receives: bool) {
        if receives {
            let resting = &self.info().responder.0.resting;
            resting.store(cq + 1, Ordering::SeqCst);
        }
        self.resting
            .0
            .fetch_or(sides(sends, receives), Ordering::SeqCst);
    }

    /// Undoes [`rest`](Self::rest).
    pub(in crate::soft) fn end_rest(&self, sends: bool, receives: bool) {
        if receives {
            let resting = &self.info().responder.0.resting;
            resting.store(0, Ordering::Relaxed);
        }
        self.resting
            .0
            .fetch_and(!sides(sends, receives), Ordering::Relaxed);
    }

    /// Whether either side rests.
    #[inline(always)]
    pub(in crate::soft) fn is_resting(&self) -> bool {
        self.resting.0.load(Ordering::Relaxed) != 0
    }

    /// Polls of this queue, one of our two, shall find something.
    #[cold]
    pub(in crate::soft) fn call_if_resting(&self, cq: &Cq) {
        let resting = self.resting.0.load(Ordering::Relaxed);
        if resting != 0 {
            let side = if std::ptr::eq(cq, &raw const *self.send_cq) {
                SENDS
            } else {
                RECEIVES
            };
            // Both sides of a queue pair rest at a time where the queue is the same.
            if resting & side != 0 {
                cq.call(self.index());
            }
        }
    }

    /// Its place in the process's table.
    pub(in crate::soft) fn index(&self) -> usize {
        qpn_index(self.qpn)
    }

    /// Whether a poll has nothing to do for it, and nothing is under way that would not call.
    pub(in crate::soft) fn is_quiet(&self, sends: bool, receives: bool) -> bool {
        !(sends && self.waits() || receives && self.recv_can_progress())
    }
}
