//! What a poll of a completion queue does for a queue pair: takes what has come, and hands out completions.

use std::sync::atomic::Ordering;

use super::Qp;
use super::responder::BURST;
use crate::ffi::ibv_wc;
use crate::soft::link::ring::UNITS;

/// Bursts that a peer can have left at most.
const MOST_BURSTS: u32 = UNITS / BURST + 1;

impl Qp {
    /// Takes what has come, then hands out completions, those of requests before those of receives, if the poll before
    /// had room for these.
    #[inline(never)] // Or it spills what the loop over the queue pairs keeps.
    pub(in crate::soft) fn poll(&self, wcs: &mut [ibv_wc], sends: bool, receives: bool) -> usize {
        let more = self.advance(sends, receives);
        let filled = self.hand_out(wcs, sends, receives);
        if more && filled < wcs.len() {
            return filled + self.poll_rest(&mut wcs[filled..], sends, receives);
        }
        filled
    }

    /// More has come than is taken at a time, and there is room for it: a program that was told of it may poll only
    /// once.
    #[cold]
    fn poll_rest(&self, wcs: &mut [ibv_wc], sends: bool, receives: bool) -> usize {
        let mut filled = 0;
        for _ in 0..MOST_BURSTS {
            let more = self.advance(sends, receives);
            filled += self.hand_out(&mut wcs[filled..], sends, receives);
            if !more || filled == wcs.len() {
                break;
            }
        }
        filled
    }

    #[inline(always)]
    fn hand_out(&self, wcs: &mut [ibv_wc], sends: bool, receives: bool) -> usize {
        if receives && self.receives_first.load(Ordering::Relaxed) {
            return self.hand_out_receives_first(wcs, sends);
        }
        let mut filled = 0;
        if sends {
            filled = self.sq.harvest(wcs, self.qpn);
        }
        if receives {
            if filled == wcs.len() {
                // A program that posts a request for each completion has one of a request at all times.
                let wait = self.rq.waiting() > 0;
                self.receives_first.store(wait, Ordering::Relaxed);
                return filled;
            }
            filled += self.hand_out_receives(&mut wcs[filled..]);
        }
        filled
    }

    /// The poll after one that had no room for receives.
    #[cold]
    fn hand_out_receives_first(&self, wcs: &mut [ibv_wc], sends: bool) -> usize {
        self.receives_first.store(false, Ordering::Relaxed);
        let mut filled = self.hand_out_receives(wcs);
        if sends {
            filled += self.sq.harvest(&mut wcs[filled..], self.qpn);
        }
        filled
    }

    #[inline(always)]
    fn hand_out_receives(&self, wcs: &mut [ibv_wc]) -> usize {
        let src_qp = self.responder.src_qp.load(Ordering::Relaxed);
        self.rq.harvest(wcs, self.qpn, src_qp)
    }

    /// Takes a burst of what has come. Whether there may be more.
    #[inline(always)]
    fn advance(&self, sends: bool, receives: bool) -> bool {
        // Messages bring acknowledgements with them.
        let more = receives && self.recv_can_progress() && self.receive(false);
        if sends && self.send_can_progress() {
            self.progress_send();
        }
        more
    }

    /// Takes all that has come.
    pub(in crate::soft) fn take_in(&self, sends: bool, receives: bool) {
        for _ in 0..MOST_BURSTS {
            if !self.advance(sends, receives) {
                break;
            }
        }
    }

    /// As [`take_in`](Self::take_in), by others than polls of its completion queue: whoever sleeps is told.
    pub(in crate::soft) fn take_in_and_tell(&self) {
        for _ in 0..MOST_BURSTS {
            if !(self.recv_can_progress() && self.receive(true)) {
                break;
            }
        }
    }

    /// Takes what has come; whether more of it is there that could be taken at once. (A message without a receive is
    /// not: whoever posts one tells of what comes of it.)
    pub(in crate::soft) fn take_in_and_look(&self, sends: bool, receives: bool) -> bool {
        let before = self.executed();
        self.take_in(sends, receives);
        receives && self.executed() != before && self.recv_can_progress()
    }
}
