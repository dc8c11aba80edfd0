//! What follows a post: acknowledgements, refusals, errors, and the wake-ups owed to others.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::queues::Outcome;
use super::super::{Qp, access, state};
use super::{Bell, Owed};
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_EVENT_SQ_DRAINED, IBV_QPS_ERR, IBV_QPS_SQD, IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, ibv_sge,
    ibv_wc_status,
};
use crate::soft::layout::{NAK_VALID, NOTICE_ACCESS, NOTICE_INVALID};
use crate::soft::link::peer::Mapped;
use crate::soft::link::ring::UNITS;
use crate::soft::link::{Link, Via};

impl Qp {
    /// Whether a poll has anything to do for the send queue.
    #[inline]
    pub(in crate::soft::qp) fn send_can_progress(&self) -> bool {
        if !self.waits() {
            return false;
        }
        let mailbox = self.mailbox();
        let (executed, _) = self.acknowledged();
        if self.requester.shall_hurry() {
            self.hurry_owner();
        }
        executed != self.requester.acked.load(Ordering::Relaxed)
            || mailbox.nak.load(Ordering::Relaxed) != 0
            || self.sq.exec.load(Ordering::Relaxed) != self.sq.tail.load(Ordering::Relaxed)
            || self.state() == IBV_QPS_ERR
            || self.streams.is_active()
    }

    /// The application may not poll before it is told: the owner of the memory is asked at once, if a request needs
    /// it.
    pub(in crate::soft) fn hurry(&self) {
        if self.waits() && self.requester.hurry.swap(0, Ordering::Relaxed) != 0 {
            self.hurry_owner();
        }
    }

    #[cold]
    fn hurry_owner(&self) {
        if let Some(link) = self.shared_link() {
            link.kick();
        }
    }

    /// Takes acknowledgements and executes what waited for them.
    pub(in crate::soft::qp) fn progress_send(&self) {
        let mut owed = self.advance_sends();
        self.settle(&mut owed);
    }

    fn advance_sends(&self) -> Owed {
        let mut owed = Owed::default();
        let mut bell = Bell::default();
        self.lock_sends();
        let heard = if self.streams.is_active() {
            self.hear_stream()
        } else {
            Ok(())
        };
        self.take_acknowledgements(&mut owed);
        if self.state() == IBV_QPS_ERR {
            self.flush_sends(&mut owed);
        } else if let Err(status) = heard
            && self.waits()
        {
            self.lose_peer(status, &mut owed);
        } else if self.sq.exec.load(Ordering::Relaxed) != self.sq.tail.load(Ordering::Relaxed) {
            self.run_backlog(&mut owed, &mut bell);
        }
        self.finish_burst(&mut owed, &bell);
        self.unlock_sends();
        owed
    }

    /// Messages that the peer says it has executed, and units of its ring that it has consumed.
    #[inline]
    fn acknowledged(&self) -> (u32, u32) {
        if self.streams.is_active() {
            // A count that comes another way may be ahead of the data that answers bring.
            let consumed = self.requester.consumed.load(Ordering::Relaxed);
            return (self.streams.acknowledged(), consumed);
        }
        let heard = self.requester.heard.load(Ordering::Acquire);
        let ack = self.mailbox().ack.load(Ordering::Acquire);
        let (executed, consumed) = (ack as u32, (ack >> 32) as u32);
        // Records are not read when they come, so either may be the newer one.
        let is_newer = (heard.wrapping_sub(executed) as i32) > 0;
        (if is_newer { heard } else { executed }, consumed)
    }

    pub(super) fn take_acknowledgements(&self, owed: &mut Owed) {
        let mailbox = self.mailbox();
        // The refusal is published after the last acknowledgement, so it is read first.
        let nak = mailbox.nak.load(Ordering::Acquire);
        let (acked, consumed) = self.acknowledged();
        let requester = &self.requester;
        let newly = acked.wrapping_sub(requester.acked.load(Ordering::Relaxed));
        let done = self.sq.done.load(Ordering::Relaxed);
        let in_flight = self.sq.exec.load(Ordering::Relaxed).wrapping_sub(done);
        let used = requester
            .ring_at
            .load(Ordering::Relaxed)
            .wrapping_sub(consumed);
        if newly > in_flight || used > UNITS {
            // No responder of ours says this.
            if in_flight > 0 {
                self.fail(IBV_WC_REM_OP_ERR, owed);
            }
            return;
        }
        requester.acked.store(acked, Ordering::Relaxed);
        requester.consumed.store(consumed, Ordering::Relaxed);
        if newly > 0 {
            requester.hurry.store(0, Ordering::Relaxed);
            if requester.atomic.swap(0, Ordering::Relaxed) != 0 {
                self.take_atomic_result(done);
            }
            let now_done = done.wrapping_add(newly);
            self.sq.done.store(now_done, Ordering::Release);
            owed.completed |= self.sq.have_completion(done, now_done);
            if requester.announces_drained.load(Ordering::Relaxed) != 0 {
                self.report_drained();
            }
        }
        if nak & NAK_VALID != 0 && newly < in_flight {
            self.fail(nak as u8 as ibv_wc_status, owed);
        }
    }

    /// Whether nothing is under way: what is queued has ended, or was not begun.
    pub(in crate::soft::qp) fn is_drained(&self) -> bool {
        let begun = match self.begun_in_sqd() {
            Some(begun) => begun,
            None => self.sq.exec.load(Ordering::Relaxed),
        };
        begun == self.sq.done.load(Ordering::Relaxed)
    }

    /// Behind which request the send queue stops in SQD, where some are still to be sent.
    pub(super) fn begun_in_sqd(&self) -> Option<u32> {
        let sends = self.streams.is_active() && self.state() == IBV_QPS_SQD;
        sends.then(|| self.requester.begun.load(Ordering::Relaxed))
    }

    /// The queue pair goes to SQD: what was posted before has begun, even if the socket took nothing of
    /// it yet.
    pub(in crate::soft::qp) fn stop_sends(&self) {
        self.lock_sends();
        let tail = self.sq.tail.load(Ordering::Relaxed);
        self.requester.begun.store(tail, Ordering::Relaxed);
        self.state.store(IBV_QPS_SQD, Ordering::Release);
        self.unlock_sends();
    }

    /// The queue pair has gone to SQD: an event shall tell when what was under way has ended.
    pub(in crate::soft::qp) fn announce_drained(&self, wanted: bool) {
        self.lock_sends();
        let announces = &self.requester.announces_drained;
        announces.store(wanted.into(), Ordering::Relaxed);
        if wanted {
            self.report_drained();
        }
        self.unlock_sends();
        // The application may not poll until it hears.
        self.process.nudge_later();
    }

    /// The send lock is held, and the event is wanted.
    #[cold]
    fn report_drained(&self) {
        if self.is_drained() {
            self.requester.announces_drained.store(0, Ordering::Relaxed);
            if self.state() == IBV_QPS_SQD {
                self.raise(IBV_EVENT_SQ_DRAINED);
            }
        }
    }

    /// An atomic that the peer executed: fetches the value, if the buffer is still registered.
    fn take_atomic_result(&self, position: u32) {
        let found = self.mailbox().result.load(Ordering::Acquire);
        // Where it is not, nobody is told: the operation was done.
        let _ = self.answered(position, |sges| self.deliver_atomic(sges, found));
    }

    /// Does something with the buffers that the answer to a kept request goes to, if they are still
    /// registered. The send lock is held.
    pub(in crate::soft::qp) fn answered(
        &self,
        position: u32,
        deliver: impl FnOnce(&[ibv_sge]),
    ) -> Result<(), ibv_wc_status> {
        let index = self.sq.index(position);
        let backlog = self
            .sq
            .backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let count = backlog.requests[index].num_sge as usize;
        let sges = &backlog.sges[index * backlog.max_sge..][..count];
        let keys = &self.process.info().keys;
        let check = |sge| access::check_here(keys, self.pd, sge, IBV_ACCESS_LOCAL_WRITE);
        sges.iter().try_for_each(check)?;
        deliver(sges);
        Ok(())
    }

    /// Ends the oldest unfinished request with an error, and the queue pair with it. The send lock is
    /// held and no earlier request is unfinished.
    #[cold]
    pub(super) fn fail(&self, status: ibv_wc_status, owed: &mut Owed) {
        let position = self.sq.done.load(Ordering::Relaxed);
        tracing::debug!(qpn = self.qpn, status, "a send request failed");
        self.enter_error();
        self.sq.finish(position, Outcome::failed(status), true);
        self.sq
            .done
            .store(position.wrapping_add(1), Ordering::Release);
        let notice = match status {
            IBV_WC_REM_ACCESS_ERR => NOTICE_ACCESS,
            IBV_WC_REM_INV_REQ_ERR => NOTICE_INVALID,
            _ => 0,
        };
        // SAFETY: the send lock is held.
        if let Some(link) = unsafe { self.link() }.filter(|_| notice != 0) {
            // What it has executed of the peer's counts, whatever comes of the connection.
            self.acknowledge_at_the_end();
            if link.connected_target().is_some() {
                link.mailbox().notices.fetch_or(notice, Ordering::Release);
            }
            owed.local |= matches!(link.via, Via::Local);
            link.kick();
        }
        self.flush_sends(owed);
    }

    /// As [`flush_sends`](Self::flush_sends), for those who do not hold the lock.
    pub(in crate::soft::qp) fn flush_sends_now(&self) {
        let mut owed = Owed::default();
        self.lock_sends();
        self.take_acknowledgements(&mut owed);
        self.flush_sends(&mut owed);
        self.finish_burst(&mut owed, &Bell::default());
        self.unlock_sends();
    }

    /// Ends all unfinished requests. The send lock is held and the state is ERR.
    pub(super) fn flush_sends(&self, owed: &mut Owed) {
        let tail = self.sq.tail.load(Ordering::Relaxed);
        let mut position = self.sq.done.load(Ordering::Relaxed);
        while position != tail {
            self.sq
                .finish(position, Outcome::failed(IBV_WC_WR_FLUSH_ERR), true);
            position = position.wrapping_add(1);
        }
        self.sq.exec.store(tail, Ordering::Relaxed);
        self.sq.done.store(tail, Ordering::Release);
        self.close_outbound();
        owed.completed = true;
        owed.failed = true;
    }

    /// Wakes whoever sleeps for what was published. The send lock is held.
    #[inline]
    pub(super) fn finish_burst(&self, owed: &mut Owed, bell: &Bell) {
        if self.streams.is_active() {
            self.flush_stream();
            if bell.due && self.send_cq.is_armed() {
                // Nobody may poll until it is told.
                self.watch_stream();
            }
        } else if bell.due {
            owed.local |= bell.local;
            // SAFETY: the send lock is held.
            if let Some(link) = unsafe { self.link() } {
                link.call();
                if let Some(peer) = &link.recv_bell {
                    peer.ring(bell.solicited);
                }
            }
            if self.send_cq.is_armed() {
                // We may be about to sleep, and the peer's program may never look.
                self.process.nudge_later();
                self.hurry();
            }
        }
        if owed.completed {
            self.send_cq.notify(self, owed.failed);
        } else if self.is_resting() && self.waits() {
            self.call_if_resting(&self.send_cq);
        }
    }

    /// Pays what is owed. No lock is held.
    #[inline]
    pub(super) fn settle(&self, owed: &mut Owed) {
        if owed.is_due() {
            self.settle_slowly(std::mem::take(owed));
        }
    }

    fn settle_slowly(&self, mut owed: Owed) {
        let Some(link) = self.shared_link() else {
            return;
        };
        while owed.is_due() {
            if owed.failed {
                self.flush_recvs();
            }
            if owed.local
                && let Some(peer) = self.process.qp(link.dest_qpn)
            {
                peer.progress_recv(true);
            }
            if owed.dial && self.stream_is_awaited() {
                self.dial(&link);
            }
            if let Some(arena) = owed.map {
                match link.map_arena(&self.process, arena) {
                    Some(Mapped::Done) => {}
                    Some(Mapped::Later) => {
                        self.process.nudge_later();
                        return;
                    }
                    None => self.requester.unmappable.store(arena, Ordering::Relaxed),
                }
            }
            let again = owed.map.is_some() || (!owed.dial && self.send_can_progress());
            owed = if again {
                self.advance_sends()
            } else {
                Owed::default()
            };
        }
    }

    /// Whether the peer's queue pair can no longer answer what is in flight.
    pub(in crate::soft::qp) fn peer_is_gone(&self, link: &Link) -> bool {
        if !self.waits() {
            return false;
        }
        if self.streams.is_active() {
            return self.stream_is_lost();
        }
        // What was not sent yet learns by itself that nobody answers.
        !self.is_drained() && link.is_lost()
    }

    /// Ends messages that a peer which is gone has not taken. Without acknowledgements they have
    /// succeeded once they were sent. The send lock is held.
    fn lose_messages(&self, owed: &mut Owed) {
        let done = self.sq.done.load(Ordering::Relaxed);
        let sent = self.sq.exec.load(Ordering::Relaxed);
        self.sq.done.store(sent, Ordering::Release);
        owed.completed |= self.sq.have_completion(done, sent);
        self.run_backlog(owed, &mut Bell::default());
    }

    /// Nobody will ever answer what is in flight: it ends, and with it the queue pair. Where nothing says why,
    /// that is not known before the requester has repeated it often enough. The send lock is held.
    fn lose_peer(&self, status: ibv_wc_status, owed: &mut Owed) {
        if self.is_unreliable() {
            self.lose_messages(owed);
        } else if status != IBV_WC_RETRY_EXC_ERR || self.requester.has_waited(true) {
            self.fail(status, owed);
        }
    }

    /// The peer at this link will never answer: ends what is in flight, in time. Nothing happens if the link is
    /// of an earlier connection.
    pub(in crate::soft::qp) fn abandon(&self, link: &Link) {
        let mut owed = Owed::default();
        self.lock_sends();
        // SAFETY: the send lock is held.
        let is_ours = unsafe { self.link() }.is_some_and(|ours| std::ptr::eq(ours, link));
        // What it acknowledged before it went counts.
        self.take_acknowledgements(&mut owed);
        let is_gone = is_ours && self.peer_is_gone(link) && state::is_connected(self.state());
        if is_gone {
            self.lose_peer(IBV_WC_RETRY_EXC_ERR, &mut owed);
        }
        let has_failed = is_gone && !state::is_connected(self.state());
        self.finish_burst(&mut owed, &Bell::default());
        self.unlock_sends();
        self.settle(&mut owed);
        if has_failed {
            self.send_cq.ring_for_the_dead();
            self.recv_cq.ring_for_the_dead();
        }
    }
}
