//! The requester: executes send requests.
//!
//! One-sided requests are executed in the posting thread, by the copy they ask for. Messages go to
//! the peer's ring and end when the peer acknowledges them. A request that cannot be executed yet
//! (the ring is full, an earlier message is not acknowledged, the peer is not ready) is kept, and
//! executed by a later poll or by the service thread.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::epoch;
use super::super::layout::{NAK_VALID, Readiness, Target};
use super::super::link::ring::{self, Kind, Record, Ring, UNITS};
use super::super::link::{Link, Via};
use super::access::{self, Cursor, Direction, Place, Trouble};
use super::queues::{Kept, Outcome};
use super::{Guarded32, Guarded64, MAX_MESSAGE, Qp, now_ns, state};
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_QPS_ERR, IBV_QPS_RTS, IBV_QPS_SQD, IBV_SEND_INLINE,
    IBV_SEND_SIGNALED, IBV_SEND_SOLICITED, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD, IBV_WC_LOC_LEN_ERR,
    IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, IBV_WC_SEND, IBV_WC_SUCCESS, IBV_WC_WR_FLUSH_ERR,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND, IBV_WR_SEND_WITH_IMM, ibv_qp_attr, ibv_send_wr,
    ibv_sge, ibv_wc_opcode, ibv_wc_status,
};

/// What the requester remembers of its connection; guarded by the send lock.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Where the next record goes in the peer's ring, counted in units for ever.
    ring_at: Guarded32,
    /// Units of the ring the peer has consumed, and messages it has acknowledged.
    consumed: Guarded32,
    acked: Guarded32,
    /// Since when the peer has not been ready, or 0.
    waiting_since: Guarded64,
    /// Nonzero while the oldest message in flight is an atomic whose result must be fetched.
    atomic: Guarded32,
    /// An arena that could not be mapped.
    unmappable: Guarded32,
    sq_psn: Guarded32,
    rnr_retry: Guarded32,
    /// Nanoseconds to wait for a peer that does not answer; 0 is for ever.
    patience_ns: Guarded64,
}

impl State {
    pub(super) fn reset(&self) {
        for word in [
            &self.ring_at,
            &self.consumed,
            &self.acked,
            &self.atomic,
            &self.unmappable,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.waiting_since.store(0, Ordering::Relaxed);
    }

    /// Takes over what the attributes say about sending.
    pub(super) fn adopt(&self, attr: &ibv_qp_attr) {
        self.sq_psn
            .store(attr.sq_psn & 0xff_ffff, Ordering::Relaxed);
        self.rnr_retry
            .store(u32::from(attr.rnr_retry & 7), Ordering::Relaxed);
        let attempts = u64::from(attr.retry_cnt & 7) + 1;
        let wait = state::ack_timeout(attr.timeout).map_or(0, |wait| wait.as_nanos() as u64);
        self.patience_ns
            .store(wait.saturating_mul(attempts), Ordering::Relaxed);
    }
}

/// A send request, wherever it was kept.
#[derive(Clone, Copy, Debug)]
struct Request<'a> {
    opcode: u32,
    flags: u32,
    imm: u32,
    remote_addr: u64,
    rkey: u32,
    compare_add: u64,
    swap: u64,
    sges: &'a [ibv_sge],
}

impl Request<'_> {
    fn is(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }
}

/// How far a request got.
enum Step {
    Done(Outcome),
    /// In the peer's ring.
    Sent(Outcome),
    /// Not now.
    Wait,
    Failed(ibv_wc_status),
    /// The arena must be mapped first, without the lock.
    Map(u32),
}

/// What is owed once the send lock is released.
#[derive(Default)]
struct Owed {
    /// A message went to a queue pair of this process, which shall take it.
    local: bool,
    /// A completion became visible.
    completed: bool,
    failed: bool,
    map: Option<u32>,
}

impl Qp {
    /// ibv_post_send(3) on a chain.
    ///
    /// # Safety
    ///
    /// `wr` leads a valid chain of requests whose lists and inline data are readable.
    pub(in crate::soft) unsafe fn post_send(
        &self,
        mut wr: *mut ibv_send_wr,
    ) -> Result<(), (i32, *mut ibv_send_wr)> {
        if !matches!(self.state(), IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR) {
            return Err((libc::EINVAL, wr));
        }
        let mut owed = Owed::default();
        let mut bell = Bell::default();
        let mut result = Ok(());
        epoch::lock(&self.info().sq_epoch.0);
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { wr.as_ref() } {
            // SAFETY: as above.
            if let Err(code) = unsafe { self.post_one(request, &mut owed, &mut bell) } {
                result = Err((code, wr));
                break;
            }
            wr = request.next;
        }
        self.finish_burst(&mut owed, bell);
        epoch::unlock(&self.info().sq_epoch.0);
        self.settle(owed);
        result
    }

    /// Validates one request, and executes or keeps it. The send lock is held.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline]
    unsafe fn post_one(
        &self,
        wr: &ibv_send_wr,
        owed: &mut Owed,
        bell: &mut Bell,
    ) -> Result<(), i32> {
        let num_sge = u32::try_from(wr.num_sge).map_err(|_| libc::EINVAL)?;
        if num_sge > self.cap.max_send_sge {
            return Err(libc::EINVAL);
        }
        // SAFETY: the list has `num_sge` elements by the caller's promise.
        let sges = unsafe { list(wr.sg_list, num_sge) };
        let mut request = Request {
            opcode: wr.opcode,
            flags: wr.send_flags,
            imm: wr.imm_data,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            sges,
        };
        match wr.opcode {
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM => {}
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM | IBV_WR_RDMA_READ => {
                // SAFETY: the opcode says which member is meant; all are plain integers.
                let rdma = unsafe { wr.wr.rdma };
                request.remote_addr = rdma.remote_addr;
                request.rkey = rdma.rkey;
            }
            IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD => {
                // SAFETY: as above.
                let atomic = unsafe { wr.wr.atomic };
                request.remote_addr = atomic.remote_addr;
                request.rkey = atomic.rkey;
                request.compare_add = atomic.compare_add;
                request.swap = atomic.swap;
            }
            _ => return Err(libc::EINVAL),
        }
        if request.is(IBV_SEND_INLINE) {
            let returns_data = matches!(
                wr.opcode,
                IBV_WR_RDMA_READ | IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD
            );
            if returns_data || total(sges) > u64::from(self.cap.max_inline_data) {
                return Err(libc::EINVAL);
            }
        }
        let position = self.sq.tail.load(Ordering::Relaxed);
        if self.sq.is_full(position) {
            return Err(libc::ENOMEM);
        }
        self.sq.start(position, wr.wr_id);
        self.sq
            .tail
            .store(position.wrapping_add(1), Ordering::Relaxed);
        let first = self.sq.exec.load(Ordering::Relaxed) == position;
        let executed =
            first && self.state() == IBV_QPS_RTS && self.step(position, &request, owed, bell);
        let atomic_sent = executed && self.requester.atomic.load(Ordering::Relaxed) != 0;
        if !executed || atomic_sent {
            // SAFETY: inline data is readable by the caller's promise.
            unsafe { self.keep(position, &request) };
        }
        if !executed {
            if self.state() == IBV_QPS_ERR {
                self.flush_sends(owed);
            } else {
                self.process.nudge_later();
            }
        }
        Ok(())
    }

    /// Executes the request at `exec`; `false` if it must be kept.
    #[inline]
    fn step(&self, position: u32, request: &Request<'_>, owed: &mut Owed, bell: &mut Bell) -> bool {
        let signaled = self.sq_sig_all || request.is(IBV_SEND_SIGNALED);
        match self.execute(position, request, bell) {
            Step::Done(outcome) => {
                self.sq.finish(position, outcome, signaled);
                self.sq
                    .exec
                    .store(position.wrapping_add(1), Ordering::Relaxed);
                self.sq
                    .done
                    .store(position.wrapping_add(1), Ordering::Release);
                owed.completed |= signaled;
            }
            Step::Sent(outcome) => {
                // Written now, seen when `done` passes it: when the peer has acknowledged.
                self.sq.finish(position, outcome, signaled);
                self.sq
                    .exec
                    .store(position.wrapping_add(1), Ordering::Relaxed);
                bell.due = true;
                bell.solicited |= request.is(IBV_SEND_SOLICITED);
            }
            Step::Wait => return false,
            Step::Map(arena) => {
                owed.map = Some(arena);
                return false;
            }
            Step::Failed(status) => {
                // Requests before this one end first.
                if self.sq.done.load(Ordering::Relaxed) != position {
                    return false;
                }
                self.fail(status, owed);
            }
        }
        true
    }

    fn execute(&self, position: u32, request: &Request<'_>, bell: &mut Bell) -> Step {
        // SAFETY: the send lock is held.
        let Some(link) = (unsafe { self.link() }) else {
            return Step::Failed(IBV_WC_RETRY_EXC_ERR);
        };
        let idle = self.sq.done.load(Ordering::Relaxed) == position;
        let one_sided = !matches!(
            request.opcode,
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_RDMA_WRITE_WITH_IMM
        );
        // A one-sided request must not overtake a message, nor anything a remote atomic.
        if !idle && (one_sided || self.requester.atomic.load(Ordering::Relaxed) != 0) {
            return Step::Wait;
        }
        let len = total(request.sges);
        if len > MAX_MESSAGE {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let access = if matches!(request.opcode, IBV_WR_RDMA_WRITE) || !one_sided {
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
                self.atomic(link, target, request, len)
            }
            _ => self.message(link, request, len as usize),
        };
        if let Step::Sent(_) = done {
            bell.local = matches!(link.via, Via::Local);
        }
        done
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
            .try_for_each(|sge| access::check_local(keys, self.pd, sge, access))
    }

    /// What the peer accepts now; otherwise whether to wait for it.
    #[inline]
    fn target(&self, link: &Link) -> Result<Target, Step> {
        let responder = &link.info().responder.0;
        let target = Target(responder.target.load(Ordering::SeqCst));
        let known = link.generation.load(Ordering::Relaxed);
        if target.readiness() == Readiness::Ready && target.dest_qpn() == self.qpn {
            if known == target.generation() {
                return Ok(target);
            }
            let psn = responder.rq_psn.load(Ordering::Relaxed);
            if known == Link::UNKNOWN && psn == self.requester.sq_psn.load(Ordering::Relaxed) {
                link.generation
                    .store(target.generation(), Ordering::Relaxed);
                self.requester.waiting_since.store(0, Ordering::Relaxed);
                return Ok(target);
            }
        }
        Err(self.not_ready(link, target, known))
    }

    /// A peer that is not ready is asked again until the QP's time-out and retries are used up, as a
    /// requester whose packets nobody answers does; one that can never become ready fails at once.
    #[cold]
    fn not_ready(&self, link: &Link, target: Target, known: u32) -> Step {
        let lost = known != Link::UNKNOWN || target.readiness() == Readiness::Gone;
        if lost || link.is_dead() {
            return Step::Failed(IBV_WC_RETRY_EXC_ERR);
        }
        let since = self.requester.waiting_since.load(Ordering::Relaxed);
        let patience = self.requester.patience_ns.load(Ordering::Relaxed);
        let now = now_ns();
        if since == 0 {
            self.requester.waiting_since.store(now, Ordering::Relaxed);
        } else if patience != 0 && now.saturating_sub(since) > patience {
            return Step::Failed(IBV_WC_RETRY_EXC_ERR);
        }
        Step::Wait
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
        if len == 0 {
            return Step::Done(success(opcode, 0));
        }
        let check = |target: Target| -> Result<Place, Trouble> {
            if !target.allows(access) {
                return Err(Trouble::Status(IBV_WC_REM_ACCESS_ERR));
            }
            access::resolve(
                link,
                target.pd(),
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
            epoch::renew(&self.info().sq_epoch.0);
            self.check_lists(request, local_access)?;
            let target = self.target(link).map_err(|_| IBV_WC_RETRY_EXC_ERR)?;
            match check(target) {
                Ok(_) => Ok(()),
                Err(Trouble::Status(status)) => Err(status),
                Err(Trouble::Unmapped(_)) => Err(IBV_WC_REM_OP_ERR),
            }
        };
        let mut list = Cursor::new(request.sges.iter().copied());
        // SAFETY: both sides were checked under the send lock, which is held; inline data is readable
        // by the contract of post_send.
        match unsafe { access::transfer(direction, place, &mut list, len, renew) } {
            Ok(()) => Step::Done(success(opcode, len as u32)),
            Err(status) => Step::Failed(status),
        }
    }

    fn atomic(&self, link: &Link, target: Target, request: &Request<'_>, len: u64) -> Step {
        if len != 8 {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        if !request.remote_addr.is_multiple_of(8) {
            return Step::Failed(IBV_WC_REM_INV_REQ_ERR);
        }
        if !target.allows(IBV_ACCESS_REMOTE_ATOMIC) {
            return Step::Failed(IBV_WC_REM_ACCESS_ERR);
        }
        let (addr, rkey) = (request.remote_addr, request.rkey);
        let swaps = request.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
        match access::resolve(link, target.pd(), rkey, addr, 8, IBV_ACCESS_REMOTE_ATOMIC) {
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
            Ok(Place::There { .. }) | Err(Trouble::Status(IBV_WC_REM_OP_ERR)) => {
                let kind = if swaps {
                    Kind::CompareSwap
                } else {
                    Kind::FetchAdd
                };
                let step = self.send_record(link, request, kind, 16, 0, |ring, at| {
                    let words = [request.compare_add, request.swap];
                    // SAFETY: the record was reserved for these sixteen bytes.
                    unsafe { ring.write(at, 0, words.as_ptr().cast(), 16) };
                });
                if let Step::Sent(_) = step {
                    self.requester.atomic.store(1, Ordering::Relaxed);
                }
                step
            }
            Err(trouble) => self.trouble(trouble),
        }
    }

    /// Writes what an atomic found into the request's buffer.
    fn deliver_atomic(&self, sges: &[ibv_sge], found: u64) {
        let mut list = Cursor::new(sges.iter().copied());
        let from = Place::Here((&raw const found).cast_mut().cast());
        // SAFETY: the list was checked under the send lock; the other side is a local variable.
        let _ = unsafe { access::transfer(Direction::FromPeer, from, &mut list, 8, || Ok(())) };
    }

    fn trouble(&self, trouble: Trouble) -> Step {
        match trouble {
            Trouble::Unmapped(arena)
                if self.requester.unmappable.load(Ordering::Relaxed) == arena =>
            {
                Step::Failed(IBV_WC_REM_OP_ERR)
            }
            Trouble::Unmapped(arena) => Step::Map(arena),
            Trouble::Status(status) => Step::Failed(status),
        }
    }

    /// SEND and RDMA WRITE with immediate: a record in the peer's ring.
    fn message(&self, link: &Link, request: &Request<'_>, len: usize) -> Step {
        let kind = match request.opcode {
            IBV_WR_RDMA_WRITE_WITH_IMM => Kind::WriteImm,
            _ => Kind::Send,
        };
        if len <= ring::MAX_INLINE {
            return self.send_record(link, request, kind, len, 0, |ring, at| {
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
        let payload = size_of_val(request.sges);
        self.send_record(link, request, kind, payload, ring::FETCH, |ring, at| {
            // SAFETY: an SGE is 16 bytes of integers; the record was reserved for all of them.
            unsafe { ring.write(at, 0, request.sges.as_ptr().cast(), payload) };
        })
    }

    fn send_record(
        &self,
        link: &Link,
        request: &Request<'_>,
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
            let used = from.wrapping_sub((ack >> 32) as u32);
            place = UNITS
                .checked_sub(used)
                .and_then(|free| ring.reserve(from, units, free));
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
            (request.is(IBV_SEND_SOLICITED), ring::SOLICITED),
            (
                self.sq_sig_all || request.is(IBV_SEND_SIGNALED),
                ring::SIGNALED,
            ),
        ] {
            if set {
                flags |= flag;
            }
        }
        let len = total(request.sges) as u32;
        let record = Record {
            kind,
            flags,
            num_sge: request.sges.len() as u8,
            rnr_retry: requester.rnr_retry.load(Ordering::Relaxed) as u8,
            units: units as u16,
            len,
            imm: request.imm,
            remote_addr: request.remote_addr,
            rkey: request.rkey,
        };
        ring.publish(from, at, &record);
        requester
            .ring_at
            .store(from.wrapping_add(taken), Ordering::Relaxed);
        let opcode = match kind {
            Kind::WriteImm => IBV_WC_RDMA_WRITE,
            Kind::CompareSwap => IBV_WC_COMP_SWAP,
            Kind::FetchAdd => IBV_WC_FETCH_ADD,
            _ => IBV_WC_SEND,
        };
        Step::Sent(success(opcode, len))
    }

    /// Copies a request into the backlog.
    ///
    /// # Safety
    ///
    /// The request's inline data must be readable.
    #[cold]
    unsafe fn keep(&self, position: u32, request: &Request<'_>) {
        let index = self.sq.index(position);
        let mut backlog = self
            .sq
            .backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let (max_sge, max_inline) = (backlog.max_sge, backlog.max_inline);
        let mut kept = Kept {
            opcode: request.opcode,
            flags: request.flags,
            imm: request.imm,
            num_sge: request.sges.len() as u32,
            inline_len: 0,
            rkey: request.rkey,
            remote_addr: request.remote_addr,
            compare_add: request.compare_add,
            swap: request.swap,
        };
        if request.is(IBV_SEND_INLINE) {
            let mut room = &mut backlog.inline[index * max_inline..][..max_inline];
            for sge in request.sges {
                let (bytes, rest) = room.split_at_mut(sge.length as usize);
                // SAFETY: readable by the caller's promise; the destination is our own.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        sge.addr as usize as *const u8,
                        bytes.as_mut_ptr(),
                        bytes.len(),
                    );
                }
                kept.inline_len += sge.length;
                room = rest;
            }
        } else {
            backlog.sges[index * max_sge..][..request.sges.len()].copy_from_slice(request.sges);
        }
        backlog.requests[index] = kept;
    }

    /// Executes kept requests as far as they go. The send lock is held.
    fn run_backlog(&self, owed: &mut Owed, bell: &mut Bell) {
        let backlog = self
            .sq
            .backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        while self.state() == IBV_QPS_RTS && owed.map.is_none() {
            let position = self.sq.exec.load(Ordering::Relaxed);
            if position == self.sq.tail.load(Ordering::Relaxed) {
                return;
            }
            let index = self.sq.index(position);
            let kept = &backlog.requests[index];
            let inline;
            let sges = if kept.flags & IBV_SEND_INLINE != 0 {
                let addr = backlog.inline[index * backlog.max_inline..].as_ptr() as u64;
                inline = [ibv_sge {
                    addr,
                    length: kept.inline_len,
                    lkey: 0,
                }];
                &inline[..]
            } else {
                &backlog.sges[index * backlog.max_sge..][..kept.num_sge as usize]
            };
            let request = Request {
                opcode: kept.opcode,
                flags: kept.flags,
                imm: kept.imm,
                remote_addr: kept.remote_addr,
                rkey: kept.rkey,
                compare_add: kept.compare_add,
                swap: kept.swap,
                sges,
            };
            if !self.step(position, &request, owed, bell) {
                return;
            }
        }
    }

    /// Whether a poll has anything to do for the send queue.
    #[inline]
    pub(super) fn send_can_progress(&self) -> bool {
        if !self.waits() {
            return false;
        }
        let mailbox = self.mailbox();
        mailbox.ack.load(Ordering::Relaxed) as u32 != self.requester.acked.load(Ordering::Relaxed)
            || mailbox.nak.load(Ordering::Relaxed) != 0
            || self.sq.exec.load(Ordering::Relaxed) != self.sq.tail.load(Ordering::Relaxed)
            || self.state() == IBV_QPS_ERR
    }

    /// Takes acknowledgements and executes what waited for them.
    pub(super) fn progress_send(&self) {
        let owed = self.advance_sends();
        self.settle(owed);
    }

    fn advance_sends(&self) -> Owed {
        let mut owed = Owed::default();
        let mut bell = Bell::default();
        epoch::lock(&self.info().sq_epoch.0);
        self.take_acknowledgements(&mut owed);
        if self.state() == IBV_QPS_ERR {
            self.flush_sends(&mut owed);
        } else if self.sq.exec.load(Ordering::Relaxed) != self.sq.tail.load(Ordering::Relaxed) {
            self.run_backlog(&mut owed, &mut bell);
        }
        self.finish_burst(&mut owed, bell);
        epoch::unlock(&self.info().sq_epoch.0);
        owed
    }

    fn take_acknowledgements(&self, owed: &mut Owed) {
        let mailbox = self.mailbox();
        // The refusal is published after the last acknowledgement, so it is read first.
        let nak = mailbox.nak.load(Ordering::Acquire);
        let ack = mailbox.ack.load(Ordering::Acquire);
        let requester = &self.requester;
        let (acked, consumed) = (ack as u32, (ack >> 32) as u32);
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
            if requester.atomic.swap(0, Ordering::Relaxed) != 0 {
                self.take_atomic_result(done);
            }
            self.sq
                .done
                .store(done.wrapping_add(newly), Ordering::Release);
            owed.completed = true;
        }
        if nak & NAK_VALID != 0 && newly < in_flight {
            self.fail(nak as u8 as ibv_wc_status, owed);
        }
    }

    /// An atomic that the peer executed: fetches the value, if the buffer is still registered.
    fn take_atomic_result(&self, position: u32) {
        let found = self.mailbox().result.load(Ordering::Acquire);
        let index = self.sq.index(position);
        let backlog = self
            .sq
            .backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let count = backlog.requests[index].num_sge as usize;
        let sges = &backlog.sges[index * backlog.max_sge..][..count];
        let keys = &self.process.info().keys;
        let valid = |sge| access::check_local(keys, self.pd, sge, IBV_ACCESS_LOCAL_WRITE).is_ok();
        if sges.iter().all(valid) {
            self.deliver_atomic(sges, found);
        }
    }

    /// Ends the oldest unfinished request with an error, and the queue pair with it. The send lock is
    /// held and no earlier request is unfinished.
    #[cold]
    fn fail(&self, status: ibv_wc_status, owed: &mut Owed) {
        let position = self.sq.done.load(Ordering::Relaxed);
        tracing::debug!(qpn = self.qpn, status, "a send request failed");
        self.enter_error();
        self.sq.finish(position, Outcome::failed(status), true);
        self.sq
            .done
            .store(position.wrapping_add(1), Ordering::Release);
        let breaks_peer = matches!(status, IBV_WC_REM_ACCESS_ERR | IBV_WC_REM_INV_REQ_ERR);
        // SAFETY: the send lock is held.
        if let Some(link) = unsafe { self.link() }.filter(|_| breaks_peer) {
            link.mailbox().fault.store(1, Ordering::Release);
            owed.local |= matches!(link.via, Via::Local);
            link.kick();
        }
        self.flush_sends(owed);
    }

    /// As [`flush_sends`](Self::flush_sends), for those who do not hold the lock.
    pub(super) fn flush_sends_now(&self) {
        let mut owed = Owed::default();
        epoch::lock(&self.info().sq_epoch.0);
        self.take_acknowledgements(&mut owed);
        self.flush_sends(&mut owed);
        self.finish_burst(&mut owed, Bell::default());
        epoch::unlock(&self.info().sq_epoch.0);
    }

    /// Ends all unfinished requests. The send lock is held and the state is ERR.
    fn flush_sends(&self, owed: &mut Owed) {
        let tail = self.sq.tail.load(Ordering::Relaxed);
        let mut position = self.sq.done.load(Ordering::Relaxed);
        while position != tail {
            self.sq
                .finish(position, Outcome::failed(IBV_WC_WR_FLUSH_ERR), true);
            position = position.wrapping_add(1);
        }
        self.sq.exec.store(tail, Ordering::Relaxed);
        self.sq.done.store(tail, Ordering::Release);
        owed.completed = true;
        owed.failed = true;
    }

    /// Wakes whoever sleeps for what was published. The send lock is held.
    #[inline]
    fn finish_burst(&self, owed: &mut Owed, bell: Bell) {
        if bell.due {
            owed.local |= bell.local;
            // SAFETY: the send lock is held.
            let link = unsafe { self.link() };
            if let Some(peer) = link.and_then(|link| link.recv_bell.as_ref()) {
                peer.ring(bell.solicited);
            }
        }
        if owed.completed {
            self.send_cq.notify(owed.failed);
        }
    }

    /// Pays what is owed. No lock is held.
    #[inline]
    fn settle(&self, owed: Owed) {
        if owed.local || owed.failed || owed.map.is_some() {
            self.settle_slowly(owed);
        }
    }

    fn settle_slowly(&self, mut owed: Owed) {
        let Some(link) = self.shared_link() else {
            return;
        };
        while owed.local || owed.failed || owed.map.is_some() {
            if owed.failed {
                self.flush_recvs();
            }
            if owed.local
                && let Some(peer) = self.process.qp(link.dest_qpn)
            {
                peer.progress_recv(true);
            }
            if let (Some(arena), Via::Shm(peer)) = (owed.map, &link.via)
                && let Err(error) = peer.map_arena(&self.process, arena)
            {
                tracing::warn!(arena, %error, "cannot map memory of a peer");
                self.requester.unmappable.store(arena, Ordering::Relaxed);
            }
            let again = owed.map.is_some() || self.send_can_progress();
            owed = if again {
                self.advance_sends()
            } else {
                Owed::default()
            };
        }
    }

    /// Whether the peer's queue pair can no longer answer what is in flight.
    pub(super) fn peer_is_gone(&self, link: &Link) -> bool {
        let known = link.generation.load(Ordering::Relaxed);
        if known == Link::UNKNOWN || !self.waits() {
            return false;
        }
        let target = Target(link.info().responder.0.target.load(Ordering::SeqCst));
        target.readiness() != Readiness::Ready
            || target.generation() != known
            || target.dest_qpn() != self.qpn
    }

    /// The peer will never answer: ends what is in flight, and if its process has died, the queue
    /// pair.
    pub(super) fn abandon(&self, dead: bool) {
        let mut owed = Owed::default();
        epoch::lock(&self.info().sq_epoch.0);
        // What it acknowledged before it went counts.
        self.take_acknowledgements(&mut owed);
        if state::is_connected(self.state()) {
            if self.waits() {
                self.fail(IBV_WC_RETRY_EXC_ERR, &mut owed);
            } else if dead {
                self.enter_error();
                owed.failed = true;
            }
        }
        self.finish_burst(&mut owed, Bell::default());
        epoch::unlock(&self.info().sq_epoch.0);
        self.settle(owed);
    }
}

/// The wake-ups that a burst of messages owes to the peer.
#[derive(Default)]
struct Bell {
    due: bool,
    solicited: bool,
    local: bool,
}

fn success(opcode: ibv_wc_opcode, byte_len: u32) -> Outcome {
    Outcome {
        status: IBV_WC_SUCCESS,
        opcode,
        byte_len,
        imm: None,
    }
}

#[inline]
fn total(sges: &[ibv_sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// A C list as a slice.
///
/// # Safety
///
/// `first` leads `len` readable elements, or `len` is 0.
#[inline]
pub(super) unsafe fn list<'a>(first: *const ibv_sge, len: u32) -> &'a [ibv_sge] {
    if len == 0 || first.is_null() {
        return &[];
    }
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts(first, len as usize) }
}
