//! Telling the requester what was executed, and what was refused.

use std::sync::atomic::Ordering;

use super::super::Qp;
use super::{COMPLETES, OWED};
use crate::ffi::ibv_wc_status;
use crate::soft::epoch;
use crate::soft::layout::NAK_VALID;
use crate::soft::link::Link;
use crate::soft::link::ring::UNITS;

impl Qp {
    #[inline]
    pub(super) fn owes_acknowledgement(&self) -> bool {
        self.responder.unacknowledged.load(Ordering::Relaxed) != 0
    }

    /// The message at the front was executed. The receive lock is held.
    #[inline]
    pub(in crate::soft::qp) fn count_executed(&self) {
        let responder = &self.responder;
        responder.not_ready_since.store(0, Ordering::Relaxed);
        let executed = responder.executed.load(Ordering::Relaxed);
        responder
            .executed
            .store(executed.wrapping_add(1), Ordering::Release);
    }

    /// Messages executed so far.
    #[inline]
    pub(in crate::soft::qp) fn executed(&self) -> u32 {
        self.responder.executed.load(Ordering::Acquire)
    }

    /// Acknowledges what a poll has taken, now that the answer is on its way; `told` is what the
    /// answer itself has acknowledged.
    #[inline]
    pub(in crate::soft::qp) fn acknowledge_behind_answer(&self, told: Option<u32>) {
        if self.owes_acknowledgement() {
            let responder = &self.responder;
            epoch::lock(&self.info().rq_epoch.0);
            let consumed = responder.ring_at.load(Ordering::Relaxed);
            let untold = consumed.wrapping_sub(responder.told_consumed.load(Ordering::Relaxed));
            if told == Some(self.executed()) && untold < UNITS / 4 {
                // The answer has rung the one bell there is, too.
                responder.unacknowledged.store(0, Ordering::Relaxed);
            // SAFETY: the receive lock is held.
            } else if let Some(link) = unsafe { self.link() } {
                self.acknowledge(link);
            }
            epoch::unlock(&self.info().rq_epoch.0);
        }
    }

    /// Acknowledges everything where the peer finds it without a poll: this side is about to leave.
    pub(in crate::soft::qp) fn acknowledge_at_the_end(&self) {
        epoch::lock(&self.info().rq_epoch.0);
        // SAFETY: the receive lock is held.
        if let Some(link) = unsafe { self.link() } {
            self.acknowledge_all(link);
        }
        epoch::unlock(&self.info().rq_epoch.0);
    }

    /// Waits for another thread that takes messages, until it has acknowledged them: their completions can be polled,
    /// and answered, before that. Whoever takes messages never waits for the send lock.
    #[inline]
    pub(in crate::soft::qp) fn let_others_acknowledge(&self) {
        epoch::quiesce_own_word(&self.info().rq_epoch.0);
    }

    /// The process ends: as [`acknowledge`](Self::acknowledge), unless somebody is at it.
    pub(in crate::soft) fn acknowledge_at_exit(&self) {
        let word = &self.info().rq_epoch.0;
        if self.owes_acknowledgement() && epoch::try_lock(word) {
            // SAFETY: the receive lock is held.
            if let Some(link) = unsafe { self.link() } {
                self.acknowledge(link);
            }
            epoch::unlock(word);
        }
    }

    /// Whether the peer is still in the connection that its records were of.
    #[inline]
    pub(in crate::soft::qp) fn takes_answers(&self, link: &Link) -> bool {
        link.takes_answers(self.qpn, self.responder.generation.load(Ordering::Relaxed))
    }

    /// The receive lock is held.
    pub(super) fn acknowledge_all(&self, link: &Link) {
        let unacknowledged = &self.responder.unacknowledged;
        unacknowledged.fetch_or(OWED, Ordering::Relaxed);
        self.acknowledge(link);
    }

    /// Tells the peer what was executed. The receive lock is held.
    #[inline]
    pub(super) fn acknowledge(&self, link: &Link) {
        let responder = &self.responder;
        let owed = responder.unacknowledged.load(Ordering::Relaxed);
        if owed == 0 {
            return;
        }
        responder.unacknowledged.store(0, Ordering::Relaxed);
        if !self.takes_answers(link) {
            return;
        }
        let consumed = responder.ring_at.load(Ordering::Relaxed);
        responder.told_consumed.store(consumed, Ordering::Relaxed);
        let ack = u64::from(self.executed()) | u64::from(consumed) << 32;
        link.mailbox().ack.store(ack, Ordering::Release);
        if let Some(bell) = &link.send_bell {
            if owed & COMPLETES != 0 {
                bell.ring(false);
            } else if bell.is_armed() {
                // What waits behind an unsignaled message may have a completion, and its program sleeps.
                link.kick();
            }
        }
    }

    pub(super) fn nak(&self, link: &Link, status: ibv_wc_status, answered: &mut bool) {
        tracing::debug!(qpn = self.qpn, status, "refused a message");
        // The refusal is of the message after the last acknowledged one.
        self.acknowledge_all(link);
        if self.takes_answers(link) {
            let nak = NAK_VALID | u64::from(status);
            link.mailbox().nak.store(nak, Ordering::Release);
        }
        *answered = true;
        if let Some(bell) = &link.send_bell {
            bell.ring(true);
        }
        link.kick();
    }
}
