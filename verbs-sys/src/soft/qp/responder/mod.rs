//! The responder: takes the peer's messages from the ring, matches them with posted receives, and
//! acknowledges them. It runs when the application polls the receive completion queue, when a
//! receive is posted for a message that waits, when a sender of this process delivers, and in the
//! upkeep thread when a peer asks for it.

mod acknowledge;
mod notices;
mod take;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::queues::Outcome;
use super::{Guarded32, Guarded64, Qp, access, now_ns, state};
use crate::ffi::{
    IBV_EVENT_QP_LAST_WQE_REACHED, IBV_EVENT_QP_REQ_ERR, IBV_QPS_ERR, IBV_QPS_RESET,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_RNR_RETRY_EXC_ERR, IBV_WC_WR_FLUSH_ERR, ibv_event_type,
    ibv_qp_attr, ibv_recv_wr, ibv_wc_status,
};
use crate::soft::epoch;
use crate::soft::link::peer::Mapped;
use crate::soft::link::ring::{self, Kind, Ring};
use crate::soft::srq::Srq;

/// Messages taken under one hold of the lock.
pub(super) const BURST: u32 = 64;
const OWED: u32 = 1;
const COMPLETES: u32 = 2;
/// The RNR retry count that stands for "without end".
const RNR_FOREVER: u8 = 7;

/// What the responder remembers of its connection; guarded by the receive lock.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Where the next record is in our ring, counted in units for ever.
    ring_at: Guarded32,
    /// Messages executed.
    executed: Guarded32,
    /// Whether messages were executed that the peer has not been told of ([`OWED`]), and whether it
    /// wants a completion for one of them ([`COMPLETES`]).
    unacknowledged: Guarded32,
    /// The peer's connection, as its records say; 0 is none.
    generation: Guarded32,
    /// Units of our ring that the peer knows to be free again.
    told_consumed: Guarded32,
    /// Since when the message at the front has found no receive, or 0.
    not_ready_since: Guarded64,
    unmappable: Guarded32,
    /// Nonzero once a message was refused without an error of this side: nothing more is taken.
    closed: Guarded32,
    pub(super) src_qp: Guarded32,
    /// Whether the shared receive queue knows that this queue pair waits for it. Survives a reset, as
    /// its entry does.
    is_listed: AtomicBool,
    /// Nonzero once the last receive from the shared queue was told of.
    last_told: Guarded32,
    /// Nonzero once the peer's beginning was told of.
    established: Guarded32,
    /// Nanoseconds between two attempts of a sender that found no receive.
    rnr_timer_ns: Guarded64,
}

impl State {
    pub(super) fn reset(&self) {
        for word in [
            &self.unacknowledged,
            &self.told_consumed,
            &self.generation,
            &self.ring_at,
            &self.executed,
            &self.unmappable,
            &self.closed,
            &self.last_told,
            &self.established,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.not_ready_since.store(0, Ordering::Relaxed);
    }

    /// Takes over what the attributes say about receiving.
    pub(super) fn adopt(&self, attr: &ibv_qp_attr) {
        let timer = state::rnr_timer(attr.min_rnr_timer).as_nanos() as u64;
        self.rnr_timer_ns.store(timer, Ordering::Relaxed);
    }

    /// Whether nothing more is taken of the peer.
    pub(super) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed) != 0
    }

    /// Whether a message waits for a receive.
    pub(super) fn is_not_ready(&self) -> bool {
        self.not_ready_since.load(Ordering::Relaxed) != 0
    }
}

/// How a message fared.
pub(super) enum Step {
    /// Executed; the flags say what the requester wants to know.
    Done,
    /// No place for its completion: polls are behind.
    Full,
    /// No receive is posted for it.
    NotReady,
    /// A key it invalidates is still in use.
    Later,
    /// Refused: what the requester is told, and the event that tells our side, if no completion does.
    Refused(ibv_wc_status, Option<ibv_event_type>),
    /// The requester's arena must be mapped first, without the lock.
    Map(u32),
    /// Not all of it can be had from its requester, who has left, or who is told this: it never came.
    Lost(Option<ibv_wc_status>),
}

/// What is to be done without the lock.
enum After {
    Nothing,
    /// An arena is to be mapped before going on.
    Map(u32),
    /// A receive went back to the shared queue, for which others may wait.
    ServeShared,
}

impl Qp {
    /// ibv_post_recv(3) on a chain.
    ///
    /// # Safety
    ///
    /// `wr` leads a valid chain of requests whose lists are readable.
    pub(in crate::soft) unsafe fn post_recv(
        &self,
        mut wr: *mut ibv_recv_wr,
    ) -> Result<(), (i32, *mut ibv_recv_wr)> {
        let has_none = self.srq.is_some() || self.receiver.is_some();
        if self.state() == IBV_QPS_RESET || has_none {
            return Err((libc::EINVAL, wr));
        }
        let (mut result, keys) = (Ok(()), &self.process.info().keys);
        epoch::lock(&self.info().rq_epoch.0);
        let may_be_awaited = self.rq.posted() == 0;
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { wr.as_ref() } {
            // SAFETY: as above.
            if let Err(code) = unsafe { self.rq.post_request(request, self.cap.max_recv_sge, keys) }
            {
                result = Err((code, wr));
                break;
            }
            wr = request.next;
        }
        epoch::unlock(&self.info().rq_epoch.0);
        // A message waits for a receive only where none was posted. What is owed for earlier ones is not paid here: the
        // answer that the program may be about to send brings it along.
        if (may_be_awaited || self.state() == IBV_QPS_ERR) && self.something_came() {
            self.receive(true);
        }
        result
    }

    /// A receive was posted to the shared queue, which this queue pair waits for.
    pub(in crate::soft) fn receive_shared(&self) {
        self.responder.is_listed.store(false, Ordering::Relaxed);
        if self.recv_can_progress() {
            self.receive(true);
        }
    }

    /// Whether a poll has anything to do for the receive side.
    #[inline]
    pub(super) fn recv_can_progress(&self) -> bool {
        self.owes_acknowledgement() || self.something_came()
    }

    /// Whether there is something to take for the receive side.
    #[inline]
    fn something_came(&self) -> bool {
        if self.streams.is_stalled() {
            return true;
        }
        let flushes = || {
            self.state() == IBV_QPS_ERR
                && self.rq.done.load(Ordering::Relaxed) != self.rq.tail.load(Ordering::Relaxed)
        };
        if let Some(endpoint) = &self.datagrams {
            return self.datagrams_wait(endpoint) || flushes();
        }
        let at = self.responder.ring_at.load(Ordering::Relaxed);
        let mailbox = self.mailbox();
        if Ring::of(mailbox).has(at) && !self.responder.is_closed() {
            return true;
        }
        if mailbox.notices.load(Ordering::Relaxed) != 0 && state::is_connected(self.state()) {
            return true;
        }
        flushes()
    }

    /// Takes messages, and tells a sender of this process about it. Whether so many that there may be more.
    pub(in crate::soft) fn receive(&self, notify: bool) -> bool {
        let before = self.executed();
        if self.progress_recv(notify)
            && self.is_local.load(Ordering::Relaxed)
            && let Some(link) = self.shared_link()
            && let Some(sender) = self.process.qp(link.dest_qpn)
            && sender.send_can_progress()
        {
            sender.progress_send();
        }
        self.executed().wrapping_sub(before) >= BURST
    }

    /// Takes messages from the ring as far as it goes; returns whether any was answered. `notify`:
    /// the caller is not a poll of the completion queue, so whoever sleeps on it must be woken.
    pub(super) fn progress_recv(&self, notify: bool) -> bool {
        let mut answered = false;
        let mut solicited = false;
        loop {
            epoch::lock(&self.info().rq_epoch.0);
            let before = self.rq.done.load(Ordering::Relaxed);
            let was_connected = state::is_connected(self.state());
            let mut after = match &self.datagrams {
                Some(endpoint) => {
                    self.take_datagrams(endpoint, &mut solicited);
                    After::Nothing
                }
                None => self.take_messages(notify, &mut answered, &mut solicited),
            };
            let more = self.streams.has_inbound() && {
                let more = self.take_stream(&mut solicited);
                if !self.streams.has_inbound() && self.return_shared() {
                    after = After::ServeShared;
                }
                more
            };
            let failed = self.state() == IBV_QPS_ERR;
            if failed {
                self.flush_posted_recvs();
                solicited = true;
            }
            let tells = notify && self.rq.done.load(Ordering::Relaxed) != before;
            if tells && self.streams.is_active() && self.waits() {
                // Acknowledgements have a connection of their own, and have come before what answers their messages.
                epoch::unlock(&self.info().rq_epoch.0);
                self.progress_send();
                epoch::lock(&self.info().rq_epoch.0);
            }
            if tells {
                // Under the lock, so that who arms the queue meanwhile can wait for it.
                self.recv_cq.notify(self, std::mem::take(&mut solicited));
            }
            epoch::unlock(&self.info().rq_epoch.0);
            if self.streams.is_peer_awaited() {
                self.open_for_streams();
            }
            if failed && was_connected {
                // The send queue fails with the receive queue.
                self.progress_send();
            }
            if more {
                continue;
            }
            let arena = match after {
                After::Nothing => break,
                After::Map(arena) => arena,
                After::ServeShared => {
                    if let Some(srq) = self.srq_in_use() {
                        srq.serve_waiting();
                    }
                    break;
                }
            };
            let Some(link) = self.shared_link() else {
                continue;
            };
            match link.map_arena(&self.process, arena) {
                Some(Mapped::Done) => {}
                Some(Mapped::Later) => {
                    self.process.nudge_later();
                    break;
                }
                None => self.responder.unmappable.store(arena, Ordering::Relaxed),
            }
        }
        answered
    }

    /// The receive lock is held.
    fn take_messages(&self, notify: bool, answered: &mut bool, solicited: &mut bool) -> After {
        // SAFETY: the receive lock is held.
        let Some(link) = (unsafe { self.link() }) else {
            return After::Nothing;
        };
        self.acknowledge(link);
        if !state::is_connected(self.state()) {
            return After::Nothing;
        }
        let ring = Ring::of(self.mailbox());
        let mut wants_completion = false;
        let mut refused = None;
        let (mut after, mut lost) = (After::Nothing, false);
        let (mut taken, mut copied) = (0, 0);
        while taken < BURST && !self.responder.is_closed() {
            let at = self.responder.ring_at.load(Ordering::Relaxed);
            if !ring.has(at) {
                break;
            }
            let Some(record) = ring.header(at) else {
                tracing::error!(qpn = self.qpn, "the peer's ring holds no valid record");
                refused = Some((IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR)));
                break;
            };
            let next = at.wrapping_add(u32::from(record.units));
            let generation = u32::from(record.generation);
            self.responder
                .generation
                .store(generation, Ordering::Relaxed);
            if record.flags & ring::ACKNOWLEDGES != 0 {
                // Whether or not the message itself can be taken now.
                let heard = &self.requester.heard;
                heard.store(record.executed, Ordering::Release);
            }
            if record.kind == Kind::Skip {
                self.responder.ring_at.store(next, Ordering::Relaxed);
                continue;
            }
            let receives = self.rq.done.load(Ordering::Relaxed);
            let step = self.take(link, &ring, at, &record);
            lost |= matches!(step, Step::Lost(_));
            self.deliver_selected(record.flags & ring::SOLICITED != 0);
            let step = match step {
                // Nobody is told of what is lost, but a receive that has failed.
                Step::NotReady | Step::Lost(_) if self.is_unreliable() => Step::Done,
                Step::Refused(..)
                    if self.is_unreliable() && receives == self.rq.done.load(Ordering::Relaxed) =>
                {
                    Step::Done
                }
                step => step,
            };
            match step {
                Step::Done => {
                    taken += 1;
                    self.responder.ring_at.store(next, Ordering::Relaxed);
                    self.count_executed();
                    wants_completion |= record.flags & ring::SIGNALED != 0;
                    *solicited |= record.flags & ring::SOLICITED != 0;
                    let word = &self.info().rq_epoch.0;
                    access::pass(word, &mut copied, record.len.into());
                }
                // The next poll makes room, and comes here again.
                Step::Full => break,
                Step::NotReady => {
                    if self.out_of_patience(record.rnr_retry) {
                        // The requester fails; this side stays as it is, and takes no more of it.
                        self.responder.closed.store(1, Ordering::Relaxed);
                        self.responder.not_ready_since.store(0, Ordering::Relaxed);
                        self.nak(link, IBV_WC_RNR_RETRY_EXC_ERR, answered);
                    }
                    break;
                }
                Step::Later => {
                    self.process.nudge_later();
                    break;
                }
                Step::Refused(status, event) => {
                    refused = Some((status, event));
                    break;
                }
                Step::Map(arena) => {
                    after = After::Map(arena);
                    break;
                }
                Step::Lost(told) => {
                    tracing::debug!(
                        qpn = self.qpn,
                        told,
                        "a message cannot be had from its sender"
                    );
                    // What is behind it did not come either.
                    self.responder.closed.store(1, Ordering::Relaxed);
                    self.responder.not_ready_since.store(0, Ordering::Relaxed);
                    if let Some(status) = told {
                        self.nak(link, status, answered);
                    }
                    break;
                }
            }
        }
        if taken > 0 {
            *answered = true;
            let owed = if wants_completion {
                OWED | COMPLETES
            } else {
                OWED
            };
            self.responder.unacknowledged.store(owed, Ordering::Relaxed);
            // A poller acknowledges with its answer or its next poll: the store misses the cache,
            // and the answer's first locked instruction would wait for it. Whoever is about to
            // sleep may not come back for long, and whoever sleeps waits for it.
            let awaited =
                wants_completion && link.send_bell.as_ref().is_some_and(|bell| bell.is_armed());
            let later = !notify
                && !awaited
                && refused.is_none()
                && !self.is_local.load(Ordering::Relaxed)
                && !self.recv_cq.is_armed();
            if !later {
                self.acknowledge(link);
            }
        }
        if let Some((status, event)) = refused {
            if !self.is_unreliable() {
                self.nak(link, status, answered);
            }
            self.enter_error();
            if let Some(event) = event {
                self.raise(event);
            }
        } else if self.mailbox().notices.load(Ordering::Relaxed) != 0 {
            self.take_notices();
        }
        if lost && self.return_shared() {
            after = After::ServeShared;
        }
        after
    }

    /// A message that was begun never came whole: the receive that it would have used goes back to the shared
    /// queue that it is of, unless others were posted in its place. Whether it did. The receive lock is held.
    #[cold]
    fn return_shared(&self) -> bool {
        let is_held = self.rq.posted() != 0 && state::is_connected(self.state());
        let srq = self.srq_in_use().filter(|_| is_held);
        let is_back = srq.is_some_and(|srq| srq.take_back(&self.rq));
        if let Some(receiver) = self.receiver.as_ref().filter(|_| is_back) {
            receiver.release();
        }
        is_back
    }

    /// The shared queue that the message at the front has its receive of.
    #[cold]
    fn srq_in_use(&self) -> Option<Arc<Srq>> {
        match &self.receiver {
            None => self.srq.clone(),
            Some(receiver) => receiver.current(),
        }
    }

    /// Whether a message has waited for a receive for as long as its requester retries.
    pub(super) fn out_of_patience(&self, rnr_retry: u8) -> bool {
        if rnr_retry == RNR_FOREVER {
            return false;
        }
        let since = self.responder.not_ready_since.load(Ordering::Relaxed);
        let now = now_ns();
        if since == 0 {
            self.responder.not_ready_since.store(now, Ordering::Relaxed);
            self.process.nudge_later();
            return rnr_retry == 0;
        }
        let timer = self.responder.rnr_timer_ns.load(Ordering::Relaxed);
        now.saturating_sub(since) >= timer.saturating_mul(u64::from(rnr_retry))
    }

    /// Ends posted receives after the queue pair has failed, and wakes who waits for them.
    pub(super) fn flush_recvs(&self) {
        epoch::lock(&self.info().rq_epoch.0);
        let flushed = self.flush_posted_recvs();
        epoch::unlock(&self.info().rq_epoch.0);
        if flushed {
            self.recv_cq.notify(self, true);
        }
    }

    /// The receive lock is held.
    fn flush_posted_recvs(&self) -> bool {
        if self.state() != IBV_QPS_ERR {
            return false;
        }
        self.close_inbound();
        let tail = self.rq.tail.load(Ordering::Relaxed);
        let mut position = self.rq.done.load(Ordering::Relaxed);
        let any = position != tail;
        while position != tail {
            self.rq
                .complete(position, Outcome::failed(IBV_WC_WR_FLUSH_ERR));
            position = position.wrapping_add(1);
        }
        self.deliver_selected(true);
        if self.srq.is_some() && self.responder.last_told.swap(1, Ordering::Relaxed) == 0 {
            // Receives it has taken are ended; those of the shared queue stay there.
            self.raise(IBV_EVENT_QP_LAST_WQE_REACHED);
        }
        any
    }
}
