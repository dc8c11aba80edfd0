//! Executing one request: what it may do, and the copy or atomic that it is.

use std::sync::atomic::Ordering;

use super::super::access::{self, Cursor, Direction, Place, Trouble};
use super::super::stream::is_answered;
use super::super::{MAX_MESSAGE, Qp};
use super::window::is_about_window;
use super::{Bell, OWNER_POLLS, Request, Step, success, total};
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_SEND_INLINE, IBV_WC_ATOMIC_WRITE, IBV_WC_COMP_SWAP,
    IBV_WC_FETCH_ADD, IBV_WC_LOC_LEN_ERR, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE,
    IBV_WC_REM_INV_REQ_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WR_ATOMIC_CMP_AND_SWP,
    IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV, ibv_sge,
    ibv_wc_status,
};
use crate::soft::epoch;
use crate::soft::layout::{NOTICE_FIRST, Readiness, Target};
use crate::soft::link::ring::{Kind, OPERANDS};
use crate::soft::link::{Link, Via};

impl Qp {
    #[inline]
    pub(super) fn execute(&self, position: u32, request: &Request<'_>, bell: &mut Bell) -> Step {
        if let Some(endpoint) = &self.datagrams {
            return match self.check_lists(request, 0) {
                Ok(()) => self.send_datagram(endpoint, request),
                Err(status) => Step::Failed(status),
            };
        }
        if is_about_window(request.opcode) {
            return self.manage_window(position, request);
        }
        // SAFETY: the send lock is held.
        let Some(link) = (unsafe { self.link() }) else {
            return Step::Failed(IBV_WC_RETRY_EXC_ERR);
        };
        if self.streams.is_active() {
            return self.execute_by_owner(position, request);
        }
        let idle = self.sq.done.load(Ordering::Relaxed) == position;
        let one_sided = !matches!(
            request.opcode,
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV | IBV_WR_RDMA_WRITE_WITH_IMM
        );
        // A one-sided request must not overtake a message, nor anything a remote atomic.
        if !idle && (one_sided || self.requester.atomic.load(Ordering::Relaxed) != 0) {
            return Step::Wait;
        }
        let len = total(request.sges);
        if len > MAX_MESSAGE {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let access = if is_write(request.opcode) || !one_sided {
            0
        } else {
            IBV_ACCESS_LOCAL_WRITE
        };
        if let Err(status) = self.check_lists(request, access) {
            return Step::Failed(status);
        }
        let target = match self.target(link) {
            Ok(target) => target,
            Err(step) => return step,
        };
        let done = match request.opcode {
            IBV_WR_RDMA_WRITE => self.rdma(link, target, request, len as usize, Direction::ToPeer),
            IBV_WR_RDMA_READ => self.rdma(link, target, request, len as usize, Direction::FromPeer),
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                self.atomic(link, target, (request, bell), len)
            }
            IBV_WR_ATOMIC_WRITE => self.atomic_write(link, target, (request, bell)),
            _ => self.message(link, (request, idle), len as usize, bell),
        };
        if let Step::Sent(_) = done {
            bell.local = matches!(link.via, Via::Local);
        }
        done
    }

    /// A request that the owner of the memory executes.
    fn execute_by_owner(&self, position: u32, request: &Request<'_>) -> Step {
        let len = total(request.sges);
        if len > MAX_MESSAGE {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let access = if is_answered(request.opcode) {
            IBV_ACCESS_LOCAL_WRITE
        } else {
            0
        };
        if request.opcode == IBV_WR_ATOMIC_WRITE {
            return self.send_word_on_stream(request, position);
        }
        match self.check_lists(request, access) {
            Ok(()) => self.send_on_stream(request, position, len),
            Err(status) => Step::Failed(status),
        }
    }

    /// An atomic WRITE that the owner of the memory executes: one whole frame, which does not outlive the
    /// request.
    fn send_word_on_stream(&self, request: &Request<'_>, position: u32) -> Step {
        if !request.remote_addr.is_multiple_of(8) {
            return Step::Failed(IBV_WC_REM_INV_REQ_ERR);
        }
        let word = [ibv_sge {
            addr: &raw const request.compare_add as u64,
            length: 8,
            lkey: 0,
        }];
        let request = Request {
            sges: &word,
            ..*request
        };
        self.send_on_stream(&request, position, 8)
    }

    /// Checks the local side of a request.
    #[inline]
    fn check_lists(&self, request: &Request<'_>, access: u32) -> Result<(), ibv_wc_status> {
        if request.is(IBV_SEND_INLINE) {
            return Ok(());
        }
        let keys = &self.process.info().keys;
        request
            .sges
            .iter()
            .try_for_each(|sge| access::check_here(keys, self.pd, sge, access))
    }

    /// What the peer accepts now; otherwise whether to wait for it.
    #[inline]
    fn target(&self, link: &Link) -> Result<Target, Step> {
        if let Some(target) = link.connected_target() {
            return Ok(target);
        }
        self.first_target(link)
    }

    /// Before the first request: the peer is ready once it expects the PSN we begin with.
    #[cold]
    fn first_target(&self, link: &Link) -> Result<Target, Step> {
        let responder = &link.info().responder.0;
        let target = link.target();
        let ready = target.readiness() == Readiness::Ready
            && target.dest_qpn() == self.qpn
            && target.serves(self.service_of_peer());
        let psn = responder.rq_psn.load(Ordering::Relaxed);
        let expects_us = psn == self.requester.sq_psn.load(Ordering::Relaxed);
        if ready && expects_us && link.know(target) {
            self.requester.waiting_since.store(0, Ordering::Relaxed);
            if responder.awaits_first.load(Ordering::Relaxed) != 0 {
                let notices = &link.mailbox().notices;
                notices.fetch_or(NOTICE_FIRST, Ordering::Release);
                // The peer may not poll before it has heard.
                match link.via {
                    Via::Local => self.process.nudge_later(),
                    _ => link.kick(),
                }
            }
            return Ok(target);
        }
        let lost = link.is_known() || target.readiness() == Readiness::Gone;
        Err(self.unanswered(lost))
    }

    /// A peer that does not answer is asked again until the QP's time-out and retries are used up, as a
    /// requester does whose packets nobody answers. `lost`: it never will.
    #[cold]
    pub(in crate::soft::qp) fn unanswered(&self, lost: bool) -> Step {
        if self.requester.has_waited(lost) {
            Step::Failed(IBV_WC_RETRY_EXC_ERR)
        } else {
            Step::Wait
        }
    }

    /// Whether nobody is there yet to take requests. The send lock is held.
    pub(super) fn peer_is_missing(&self) -> bool {
        // SAFETY: the send lock is held.
        let link = unsafe { self.link() };
        match link {
            Some(_) if self.streams.is_active() => self.stream_has_nobody(),
            _ => link.is_none_or(|link| link.connected_target().is_none()),
        }
    }

    /// RDMA WRITE and READ.
    #[inline]
    fn rdma(
        &self,
        link: &Link,
        target: Target,
        request: &Request<'_>,
        len: usize,
        direction: Direction,
    ) -> Step {
        let (opcode, access, local_access) = match direction {
            Direction::ToPeer => (IBV_WC_RDMA_WRITE, IBV_ACCESS_REMOTE_WRITE, 0),
            Direction::FromPeer => (
                IBV_WC_RDMA_READ,
                IBV_ACCESS_REMOTE_READ,
                IBV_ACCESS_LOCAL_WRITE,
            ),
        };
        if !target.allows(access) {
            return Step::Failed(IBV_WC_REM_INV_REQ_ERR);
        }
        if let Err(status) = self.pd_at_peer(link, target, request) {
            return Step::Failed(status);
        }
        if len == 0 {
            return Step::Done(success(opcode, 0));
        }
        let check = |target: Target| -> Result<Place, Trouble> {
            if !target.allows(access) {
                return Err(Trouble::Status(IBV_WC_REM_INV_REQ_ERR));
            }
            let pd = self.pd_at_peer(link, target, request);
            access::reach(
                link,
                pd.map_err(Trouble::Status)?,
                request.rkey,
                request.remote_addr,
                len,
                access,
            )
        };
        let place = match check(target) {
            Ok(place) => place,
            Err(trouble) => return self.trouble(trouble),
        };
        let renew = || {
            epoch::renew(self.send_epoch());
            self.check_lists(request, local_access)
                .map_err(Trouble::Status)?;
            let lost = Trouble::Status(IBV_WC_RETRY_EXC_ERR);
            check(self.target(link).map_err(|_| lost)?)
        };
        let mut list = Cursor::new(request.sges.iter().copied());
        // SAFETY: both sides were checked under the send lock, which is held; inline data is readable
        // by the contract of post_send.
        match unsafe { access::transfer(direction, place, &mut list, len, renew) } {
            Ok(()) => Step::Done(success(opcode, len as u32)),
            Err(trouble) => self.trouble(trouble),
        }
    }

    fn atomic(
        &self,
        link: &Link,
        target: Target,
        (request, bell): (&Request<'_>, &mut Bell),
        len: u64,
    ) -> Step {
        if len != 8 {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let is_aligned = request.remote_addr.is_multiple_of(8);
        if !is_aligned || !target.allows(IBV_ACCESS_REMOTE_ATOMIC) {
            return Step::Failed(IBV_WC_REM_INV_REQ_ERR);
        }
        let (addr, rkey) = (request.remote_addr, request.rkey);
        let swaps = request.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
        let pd = match self.pd_at_peer(link, target, request) {
            Ok(pd) => pd,
            Err(status) => return Step::Failed(status),
        };
        match access::reach(link, pd, rkey, addr, 8, IBV_ACCESS_REMOTE_ATOMIC) {
            Ok(Place::Here(word)) if !word.addr().is_multiple_of(8) => {
                Step::Failed(IBV_WC_REM_INV_REQ_ERR)
            }
            Ok(Place::Here(word)) => {
                // SAFETY: eight aligned bytes, checked under the send lock.
                let found = unsafe {
                    if swaps {
                        copy::compare_swap_u64(word.cast(), request.compare_add, request.swap)
                    } else {
                        copy::fetch_add_u64(word.cast(), request.compare_add)
                    }
                };
                self.deliver_atomic(request.sges, found);
                let opcode = if swaps {
                    IBV_WC_COMP_SWAP
                } else {
                    IBV_WC_FETCH_ADD
                };
                Step::Done(success(opcode, 8))
            }
            // Memory that cannot be mapped: its owner runs the operation.
            Ok(Place::There { .. }) | Err(Trouble::OutOfReach) => {
                let kind = if swaps {
                    Kind::CompareSwap
                } else {
                    Kind::FetchAdd
                };
                let operands = [request.compare_add, request.swap];
                let step = self.send_operands(link, (request, bell), kind, operands);
                if let Step::Sent(_) = step {
                    self.requester.atomic.store(1, Ordering::Relaxed);
                }
                step
            }
            Err(trouble) => self.trouble(trouble),
        }
    }

    /// A WRITE of eight bytes that nobody sees half of.
    fn atomic_write(
        &self,
        link: &Link,
        target: Target,
        (request, bell): (&Request<'_>, &mut Bell),
    ) -> Step {
        let access = IBV_ACCESS_REMOTE_WRITE;
        if !request.remote_addr.is_multiple_of(8) || !target.allows(access) {
            return Step::Failed(IBV_WC_REM_INV_REQ_ERR);
        }
        let value = request.compare_add;
        let (addr, rkey) = (request.remote_addr, request.rkey);
        match access::reach(link, target.pd(), rkey, addr, 8, access) {
            Ok(Place::Here(word)) if !word.addr().is_multiple_of(8) => {
                Step::Failed(IBV_WC_REM_INV_REQ_ERR)
            }
            Ok(Place::Here(word)) => {
                // SAFETY: eight aligned bytes, checked under the send lock.
                unsafe { copy::store_u64(word.cast(), value) };
                Step::Done(success(IBV_WC_ATOMIC_WRITE, 8))
            }
            // The kernel does not promise to copy a word whole.
            Ok(Place::There { .. }) | Err(Trouble::OutOfReach) => {
                self.send_operands(link, (request, bell), Kind::AtomicWrite, [value, 0])
            }
            Err(trouble) => self.trouble(trouble),
        }
    }

    /// An atomic operation that the owner of the memory shall run.
    fn send_operands(
        &self,
        link: &Link,
        posted: (&Request<'_>, &mut Bell),
        kind: Kind,
        operands: [u64; 2],
    ) -> Step {
        let step = self.send_record(link, posted, kind, OPERANDS, 0, |ring, at| {
            // SAFETY: the record was reserved for these two words.
            unsafe { ring.write(at, 0, operands.as_ptr().cast(), OPERANDS) };
        });
        if let Step::Sent(_) = step {
            self.requester.hurry.store(OWNER_POLLS, Ordering::Relaxed);
        }
        step
    }

    /// Writes what an atomic found into the request's buffer.
    pub(super) fn deliver_atomic(&self, sges: &[ibv_sge], found: u64) {
        let mut list = Cursor::new(sges.iter().copied());
        let from = Place::Here((&raw const found).cast_mut().cast());
        // SAFETY: the list was checked under the send lock; the other side is a local variable.
        let _ = unsafe { access::transfer(Direction::FromPeer, from, &mut list, 8, || Ok(from)) };
    }

    fn trouble(&self, trouble: Trouble) -> Step {
        match trouble {
            Trouble::Unmapped(arena)
                if self.requester.unmappable.load(Ordering::Relaxed) == arena =>
            {
                // Its owner does not answer.
                self.unanswered(true)
            }
            Trouble::Unmapped(arena) => Step::Map(arena),
            Trouble::OutOfReach => Step::GoOver,
            Trouble::Status(IBV_WC_RETRY_EXC_ERR) => self.unanswered(true),
            Trouble::Status(status) => Step::Failed(status),
        }
    }
}

/// Whether a request changes the peer's memory, and takes nothing from it.
fn is_write(opcode: u32) -> bool {
    matches!(opcode, IBV_WR_RDMA_WRITE | IBV_WR_ATOMIC_WRITE)
}
