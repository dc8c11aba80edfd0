//! Messages: records in the peer's ring.

use std::sync::atomic::Ordering;

use super::super::{Qp, access};
use super::{Bell, CORRUPTED, Request, Step, success, total};
use crate::ffi::{
    IBV_QPS_RTS, IBV_SEND_INLINE, IBV_SEND_SOLICITED, IBV_WC_ATOMIC_WRITE, IBV_WC_COMP_SWAP,
    IBV_WC_FETCH_ADD, IBV_WC_RDMA_WRITE, IBV_WC_SEND, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND,
    IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_send_wr, ibv_sge,
};
use crate::soft::keys;
use crate::soft::layout::Target;
use crate::soft::link::ring::{self, Kind, Record, Ring, UNITS};
use crate::soft::link::{Link, Via};

impl Qp {
    /// Sends a message of one element that goes whole into the peer's ring, if nothing about it or before it is
    /// unusual; `false`: nothing was changed, and the general way knows what becomes of it. It makes the checks of that
    /// way. The send lock is held.
    ///
    /// # Safety
    ///
    /// As for `post_send`, of this one request.
    #[inline(always)]
    pub(super) unsafe fn send_straight(&self, wr: &ibv_send_wr, bell: &mut Bell) -> bool {
        let is_send = matches!(wr.opcode, IBV_WR_SEND | IBV_WR_SEND_WITH_IMM);
        let position = self.sq.tail.load(Ordering::Relaxed);
        if !is_send
            || i64::from(wr.num_sge) != self.one_sge
            || self.state() != IBV_QPS_RTS
            || self.sq.exec.load(Ordering::Relaxed) != position
            || self.sq.is_full(position)
            || self.requester.atomic.load(Ordering::Relaxed) != 0
            || self.streams.is_active()
        {
            return false;
        }
        // SAFETY: the send lock is held.
        let Some(link) = (unsafe { self.link() }).filter(|link| link.unchanged_target().is_some())
        else {
            return false;
        };
        // SAFETY: one element is readable by the caller's promise.
        let sge = unsafe { *wr.sg_list };
        let is_allowed = if wr.send_flags & IBV_SEND_INLINE != 0 {
            sge.length <= self.cap.max_inline_data
        } else {
            // An address that has to be translated is for the general way.
            let keys = &self.process.info().keys;
            !keys::is_indirect(sge.lkey) && access::check_here(keys, self.pd, &sge, 0).is_ok()
        };
        let len = sge.length as usize;
        if !is_allowed || len > ring::MAX_INLINE {
            return false;
        }
        let request = Request::new(wr, std::slice::from_ref(&sge));
        let Step::Sent(outcome) = self.message(link, (&request, false), len, bell) else {
            return false;
        };
        bell.due = true;
        bell.local = matches!(link.via, Via::Local);
        bell.solicited |= request.is(IBV_SEND_SOLICITED);
        let signaled = self.signals(wr.send_flags);
        self.sq
            .finish_at_once(position, wr.wr_id, outcome, signaled);
        let next = position.wrapping_add(1);
        self.sq.tail.store(next, Ordering::Relaxed);
        self.sq.exec.store(next, Ordering::Relaxed);
        true
    }

    /// SEND and RDMA WRITE with immediate: a record in the peer's ring. `idle`: everything before has
    /// ended.
    pub(super) fn message(
        &self,
        link: &Link,
        (request, idle): (&Request<'_>, bool),
        len: usize,
        bell: &mut Bell,
    ) -> Step {
        let kind = match request.opcode {
            IBV_WR_RDMA_WRITE_WITH_IMM => Kind::WriteImm,
            _ => Kind::Send,
        };
        if len <= ring::MAX_INLINE {
            return self.send_record(link, (request, bell), kind, len, 0, |ring, at| {
                let mut offset = 0;
                for sge in request.sges {
                    let (src, len) = (sge.addr as usize as *const u8, sge.length as usize);
                    // SAFETY: the element was checked under the send lock, or is inline data that is
                    // readable by the contract; the record was reserved for their sum.
                    unsafe { ring.write(at, offset, src, len) };
                    offset += len;
                }
            });
        }
        if !self.can_be_fetched(link, request) {
            return if idle { Step::GoOver } else { Step::Wait };
        }
        let payload = size_of_val(request.sges);
        self.send_record(
            link,
            (request, bell),
            kind,
            payload,
            ring::FETCH,
            |ring, at| {
                // SAFETY: an SGE is 16 bytes of integers; the record was reserved for all of them.
                unsafe { ring.write(at, 0, request.sges.as_ptr().cast(), payload) };
            },
        )
    }

    /// Whether the peer can fetch the bytes of a message from where they are. The send lock is held, and
    /// the elements are checked.
    fn can_be_fetched(&self, link: &Link, request: &Request<'_>) -> bool {
        let fetches = &link.info().responder.0.fetches;
        if matches!(link.via, Via::Local) || fetches.load(Ordering::Relaxed) != 0 {
            return true;
        }
        let keys = &self.process.info().keys;
        let can_be_mapped =
            |sge: &ibv_sge| keys::find(keys, sge.lkey).is_some_and(|range| range.arena() != 0);
        let mut elements = request.sges.iter().filter(|sge| sge.length > 0);
        elements.all(can_be_mapped)
    }

    pub(super) fn send_record(
        &self,
        link: &Link,
        (request, bell): (&Request<'_>, &mut Bell),
        kind: Kind,
        payload: usize,
        extra: u8,
        fill: impl FnOnce(&Ring, u32),
    ) -> Step {
        let requester = &self.requester;
        let units = ring::units_for(payload);
        let from = requester.ring_at.load(Ordering::Relaxed);
        let ring = Ring::of(link.mailbox());
        let used = from.wrapping_sub(requester.consumed.load(Ordering::Relaxed));
        let mut place = ring.reserve(from, units, UNITS - used);
        if place.is_none() {
            // The peer may have consumed more than it had when we last looked.
            let ack = self.mailbox().ack.load(Ordering::Acquire);
            let consumed = (ack >> 32) as u32;
            if let Some(free) = UNITS.checked_sub(from.wrapping_sub(consumed)) {
                // The next of a burst counts from there, too.
                requester.consumed.store(consumed, Ordering::Relaxed);
                place = ring.reserve(from, units, free);
            }
        }
        let Some((at, taken)) = place else {
            return Step::Wait;
        };
        fill(&ring, at);
        let with_imm = matches!(
            request.opcode,
            IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM
        );
        let mut flags = extra;
        for (set, flag) in [
            (with_imm, ring::WITH_IMM),
            (request.opcode == IBV_WR_SEND_WITH_INV, ring::WITH_INV),
            (request.is(CORRUPTED), ring::CORRUPTED),
            (request.is(IBV_SEND_SOLICITED), ring::SOLICITED),
            (self.signals(request.flags), ring::SIGNALED),
        ] {
            if set {
                flags |= flag;
            }
        }
        let is_xrc = self.is_xrc_sender();
        let hears = !is_xrc && link.info().responder.0.hears.load(Ordering::Relaxed) != 0;
        let executed = self.executed();
        if hears {
            flags |= ring::ACKNOWLEDGES;
            let exec = self.sq.exec.load(Ordering::Relaxed);
            if self.sq.done.load(Ordering::Relaxed) == exec {
                // The peer sees it first of all, so it cannot be stuck behind another record.
                bell.acknowledged = Some(executed);
            }
        } else {
            self.let_others_acknowledge();
        }
        let own = Target(self.info().responder.0.target.load(Ordering::Relaxed));
        let len = total(request.sges) as u32;
        let record = Record {
            kind,
            flags,
            num_sge: request.sges.len() as u8,
            rnr_retry: requester.rnr_retry.load(Ordering::Relaxed) as u8,
            units: units as u16,
            generation: own.generation() as u16,
            len,
            imm: request.imm,
            remote_addr: request.remote_addr,
            rkey: request.rkey,
            // Whoever sends requests of XRC executes none.
            executed: if is_xrc { request.srqn } else { executed },
        };
        let cleared = requester.ring_cleared.load(Ordering::Relaxed);
        let cleared = ring.publish(from, at, &record, cleared);
        requester.ring_cleared.store(cleared, Ordering::Relaxed);
        requester
            .ring_at
            .store(from.wrapping_add(taken), Ordering::Relaxed);
        if is_xrc {
            self.wake_shared(link, request);
        }
        let opcode = match kind {
            Kind::WriteImm => IBV_WC_RDMA_WRITE,
            Kind::CompareSwap => IBV_WC_COMP_SWAP,
            Kind::FetchAdd => IBV_WC_FETCH_ADD,
            Kind::AtomicWrite => IBV_WC_ATOMIC_WRITE,
            _ => IBV_WC_SEND,
        };
        Step::Sent(success(opcode, len))
    }
}
