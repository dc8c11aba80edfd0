//! Executing one message: finding its receive, and placing its bytes.

use std::sync::atomic::Ordering;

use super::super::access::{self, Cursor, Direction, Place, Trouble};
use super::super::queues::{Outcome, received, received_invalidating};
use super::super::requester::spoil;
use super::super::{MAX_SGE, Qp};
use super::Step;
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_WRITE,
    IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_QPT_RC,
    IBV_WC_LOC_LEN_ERR, IBV_WC_LOC_PROT_ERR, IBV_WC_LOC_QP_OP_ERR, IBV_WC_RECV_RDMA_WITH_IMM,
    IBV_WC_REM_ACCESS_ERR, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR,
    IBV_WC_SUCCESS, ibv_sge, ibv_wc_status,
};
use crate::soft::epoch;
use crate::soft::layout::Target;
use crate::soft::link::Link;
use crate::soft::link::ring::{self, Kind, Record, Ring};
use crate::soft::mw::{Progress, Refused};
use crate::soft::srq::Srq;

/// Why a message is not in its place.
enum Unplaced {
    /// What its receive ends with.
    Status(ibv_wc_status),
    /// An arena of the requester must be mapped first.
    Unmapped(u32),
    /// It cannot be fetched, as its requester has left, or for this reason, which is the requester's.
    Lost(Option<ibv_wc_status>),
}

impl Qp {
    pub(super) fn take(&self, link: &Link, ring: &Ring, at: u32, record: &Record) -> Step {
        let needed = match record.kind {
            Kind::Skip | Kind::Send => None,
            Kind::WriteImm | Kind::AtomicWrite => Some(IBV_ACCESS_REMOTE_WRITE),
            Kind::CompareSwap | Kind::FetchAdd => Some(IBV_ACCESS_REMOTE_ATOMIC),
        };
        if needed.is_some_and(|right| !self.allows(right)) {
            return Step::Refused(IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR));
        }
        if let Some(receiver) = &self.receiver
            && let Err(step) = self.select(receiver, record.executed)
        {
            return step;
        }
        match record.kind {
            Kind::Skip => Step::Done,
            Kind::Send => self.take_send(link, ring, at, record),
            Kind::WriteImm => self.take_write_imm(link, ring, at, record),
            Kind::CompareSwap | Kind::FetchAdd | Kind::AtomicWrite => {
                self.take_atomic(link, ring, at, record)
            }
        }
    }

    /// The receive for the message at the front. The receive lock is held.
    #[inline(always)]
    pub(in crate::soft::qp) fn next_receive(&self) -> Result<u32, Step> {
        let position = self.rq.done.load(Ordering::Relaxed);
        if position != self.rq.tail.load(Ordering::Relaxed) {
            return Ok(position);
        }
        match (&self.srq, &self.receiver) {
            (Some(srq), _) => self.take_shared(srq, position),
            (None, Some(receiver)) => self.take_selected(receiver, position),
            (None, None) => Err(Step::NotReady),
        }
    }

    /// Moves a shared receive to this position of our own queue, where nothing is posted.
    fn take_shared(&self, srq: &Srq, position: u32) -> Result<u32, Step> {
        if self.rq.is_full(position) {
            return Err(Step::Full);
        }
        let is_listed = &self.responder.is_listed;
        // What is lost without a receive does not wait for one.
        let waits = self.qp_type == IBV_QPT_RC;
        if srq.take(&self.rq) || (waits && srq.take_later(&self.rq, self.qpn, is_listed)) {
            Ok(position)
        } else {
            Err(Step::NotReady)
        }
    }

    /// The protection domain that receives are checked in: that of whoever they were posted to.
    pub(in crate::soft::qp) fn recv_pd(&self) -> u32 {
        match &self.srq {
            Some(srq) => srq.pd,
            None => self.named_pd(),
        }
    }

    /// The protection domain that keys are checked in which a request names.
    fn named_pd(&self) -> u32 {
        match &self.receiver {
            Some(receiver) => receiver.pd(),
            None => self.pd,
        }
    }

    fn take_send(&self, link: &Link, ring: &Ring, at: u32, record: &Record) -> Step {
        let position = match self.next_receive() {
            Ok(position) => position,
            Err(step) => return step,
        };
        let buffers = self.rq.buffers(position);
        let room: u64 = buffers.clone().map(|sge| u64::from(sge.length)).sum();
        if u64::from(record.len) > room {
            self.rq
                .complete(position, Outcome::failed(IBV_WC_LOC_LEN_ERR));
            return Step::Refused(IBV_WC_REM_INV_REQ_ERR, None);
        }
        let pd = self.recv_pd();
        let keys = &self.process.info().keys;
        let writable = |sge: &ibv_sge| access::check_here(keys, pd, sge, IBV_ACCESS_LOCAL_WRITE);
        match self.place(link, ring, at, record, buffers, writable) {
            Ok(()) if record.flags & ring::WITH_INV != 0 => {
                self.take_invalidation(position, record.imm, record.len)
            }
            Ok(()) => {
                let imm = (record.flags & ring::WITH_IMM != 0).then_some(record.imm);
                self.rq.complete(position, received(record.len, imm));
                Step::Done
            }
            Err(Unplaced::Unmapped(arena)) => Step::Map(arena),
            Err(Unplaced::Lost(told)) => Step::Lost(told),
            Err(Unplaced::Status(local)) => {
                self.rq.complete(position, Outcome::failed(local));
                Step::Refused(IBV_WC_REM_OP_ERR, None)
            }
        }
    }

    /// Whether this queue pair lets its peer do what the `IBV_ACCESS_REMOTE_*` bit says.
    pub(in crate::soft::qp) fn allows(&self, access: u32) -> bool {
        let target = Target(self.info().responder.0.target.load(Ordering::Relaxed));
        target.allows(access)
    }

    /// The end of a SEND of `len` bytes that invalidates a key. While the key's last users are at it, the
    /// message is taken again, from the beginning.
    pub(in crate::soft::qp) fn take_invalidation(&self, position: u32, key: u32, len: u32) -> Step {
        let by = self.window_user(&self.info().rq_epoch.0);
        match self.process.windows.invalidate(&by, key) {
            Ok(Progress::Done) => {
                self.rq.complete(position, received_invalidating(len, key));
                Step::Done
            }
            Ok(Progress::Later) => Step::Later,
            Err(Refused) => {
                self.rq
                    .complete(position, Outcome::failed(IBV_WC_REM_INV_REQ_ERR));
                Step::Refused(IBV_WC_REM_ACCESS_ERR, None)
            }
        }
    }

    fn take_write_imm(&self, link: &Link, ring: &Ring, at: u32, record: &Record) -> Step {
        let position = match self.next_receive() {
            Ok(position) => position,
            Err(step) => return step,
        };
        if record.len > 0 {
            let granted = || {
                self.grants(
                    record.rkey,
                    record.remote_addr,
                    record.len as usize,
                    IBV_ACCESS_REMOTE_WRITE,
                )
            };
            let target = match granted() {
                Ok(addr) => ibv_sge {
                    addr,
                    length: record.len,
                    lkey: record.rkey,
                },
                Err(status) => return Step::Refused(status, Some(IBV_EVENT_QP_ACCESS_ERR)),
            };
            let still = |sge: &ibv_sge| match granted()? {
                addr if addr == sge.addr => Ok(()),
                _ => Err(IBV_WC_REM_ACCESS_ERR),
            };
            match self.place(link, ring, at, record, std::iter::once(target), still) {
                Ok(()) => {}
                Err(Unplaced::Unmapped(arena)) => return Step::Map(arena),
                Err(Unplaced::Lost(told)) => return Step::Lost(told),
                Err(Unplaced::Status(_)) => {
                    return Step::Refused(IBV_WC_REM_OP_ERR, Some(IBV_EVENT_QP_FATAL));
                }
            }
        }
        let outcome = Outcome {
            status: IBV_WC_SUCCESS,
            opcode: IBV_WC_RECV_RDMA_WITH_IMM,
            byte_len: record.len,
            imm: Some(record.imm),
            source: None,
        };
        self.rq.complete(position, outcome);
        Step::Done
    }

    /// An atomic on memory that the requester cannot map.
    fn take_atomic(&self, link: &Link, ring: &Ring, at: u32, record: &Record) -> Step {
        if !record.remote_addr.is_multiple_of(8) {
            return Step::Refused(IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR));
        }
        let access = match record.kind {
            Kind::AtomicWrite => IBV_ACCESS_REMOTE_WRITE,
            _ => IBV_ACCESS_REMOTE_ATOMIC,
        };
        let word = match self.grants(record.rkey, record.remote_addr, 8, access) {
            Ok(addr) if addr.is_multiple_of(8) => addr as usize as *mut u64,
            Ok(_) => return Step::Refused(IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR)),
            Err(status) => return Step::Refused(status, Some(IBV_EVENT_QP_ACCESS_ERR)),
        };
        let operands: *const u64 = ring.payload(at).cast();
        // SAFETY: the operands lie in the ring, at a multiple of eight; the word was checked under
        // the receive lock, which its deregistration waits for.
        let found = unsafe {
            let first = copy::load_u64(operands);
            match record.kind {
                Kind::CompareSwap => {
                    copy::compare_swap_u64(word, first, copy::load_u64(operands.wrapping_add(1)))
                }
                Kind::FetchAdd => copy::fetch_add_u64(word, first),
                _ => {
                    copy::store_u64(word, first);
                    return Step::Done;
                }
            }
        };
        if self.takes_answers(link) {
            link.mailbox().result.store(found, Ordering::Release);
        }
        Step::Done
    }

    /// Whether a range may be accessed by rkey, and where it is in memory.
    pub(in crate::soft::qp) fn grants(
        &self,
        rkey: u32,
        addr: u64,
        len: usize,
        access: u32,
    ) -> Result<u64, ibv_wc_status> {
        let keys = &self.process.info().keys;
        let by = (self.named_pd(), self.qpn);
        access::check_named(keys, by, rkey, addr, len, access)
    }

    /// Copies a message to our buffers, each of which `check` finds to be writable: out of the ring,
    /// or out of the requester's memory.
    fn place(
        &self,
        link: &Link,
        ring: &Ring,
        at: u32,
        record: &Record,
        buffers: impl Iterator<Item = ibv_sge> + Clone,
        check: impl Fn(&ibv_sge) -> Result<(), ibv_wc_status>,
    ) -> Result<(), Unplaced> {
        self.place_whole(link, ring, at, record, buffers.clone(), check)?;
        if record.flags & ring::CORRUPTED != 0 {
            // SAFETY: the bytes were checked and written under the receive lock, which is held.
            unsafe { spoil(buffers, record.len.into()) };
        }
        Ok(())
    }

    fn place_whole(
        &self,
        link: &Link,
        ring: &Ring,
        at: u32,
        record: &Record,
        buffers: impl Iterator<Item = ibv_sge> + Clone,
        check: impl Fn(&ibv_sge) -> Result<(), ibv_wc_status>,
    ) -> Result<(), Unplaced> {
        let len = record.len as usize;
        let writable = |buffers: &mut dyn Iterator<Item = ibv_sge>| {
            let mut left = len;
            buffers
                .take_while(|sge| {
                    let wanted = left > 0;
                    left = left.saturating_sub(sge.length as usize);
                    wanted
                })
                .try_for_each(|sge| check(&sge))
        };
        writable(&mut buffers.clone()).map_err(Unplaced::Status)?;
        let mut list = Cursor::new(buffers.clone());
        if record.flags & ring::FETCH == 0 {
            let from = Place::Here(ring.payload(at));
            // SAFETY: the record's payload lies in the ring; the buffers were checked under the
            // receive lock, which is held.
            let placed =
                unsafe { access::transfer(Direction::FromPeer, from, &mut list, len, || Ok(from)) };
            // Nothing is in its way.
            return placed.map_err(|_| Unplaced::Status(IBV_WC_LOC_QP_OP_ERR));
        }
        let mut sources = [ibv_sge::default(); MAX_SGE as usize];
        let count = usize::from(record.num_sge).min(sources.len());
        let bytes = count * size_of::<ibv_sge>();
        // SAFETY: the record's units hold `num_sge` elements, checked when it was decoded; any bytes
        // make an SGE.
        unsafe { copy::read_shared(sources.as_mut_ptr().cast(), ring.payload(at), bytes) };
        // Once the requester has left the connection, its program may do with the memory what it likes.
        let goes_on = || {
            if self.takes_answers(link) {
                Ok(())
            } else {
                Err(Trouble::Status(IBV_WC_RETRY_EXC_ERR))
            }
        };
        let unplaced = |trouble| match trouble {
            Trouble::Unmapped(arena) => Unplaced::Unmapped(arena),
            Trouble::Status(IBV_WC_RETRY_EXC_ERR) => Unplaced::Lost(None),
            _ if link.has_left() || !self.takes_answers(link) => Unplaced::Lost(None),
            Trouble::OutOfReach | Trouble::Status(IBV_WC_REM_OP_ERR) => {
                Unplaced::Lost(Some(IBV_WC_REM_OP_ERR))
            }
            // It was there when it was sent.
            Trouble::Status(_) => Unplaced::Lost(Some(IBV_WC_LOC_PROT_ERR)),
        };
        goes_on().map_err(unplaced)?;
        let source_pd = link.target().pd();
        let mut left = len;
        for source in &sources[..count] {
            let piece = (source.length as usize).min(left);
            if piece == 0 {
                continue;
            }
            let reach = || {
                let place = access::reach_listed(link, source_pd, source, piece);
                let unmappable = self.responder.unmappable.load(Ordering::Relaxed);
                place.map_err(|trouble| match trouble {
                    Trouble::Unmapped(arena) if arena == unmappable => Trouble::OutOfReach,
                    trouble => trouble,
                })
            };
            let place = reach().map_err(unplaced)?;
            let mut ours = None;
            let renew = || {
                epoch::renew(&self.info().rq_epoch.0);
                goes_on()?;
                writable(&mut buffers.clone()).map_err(|status| {
                    ours = Some(status);
                    Trouble::Status(status)
                })?;
                reach()
            };
            // SAFETY: both sides were checked under the receive lock, which is held.
            let placed =
                unsafe { access::transfer(Direction::FromPeer, place, &mut list, piece, renew) };
            placed.map_err(|trouble| ours.map_or_else(|| unplaced(trouble), Unplaced::Status))?;
            left -= piece;
        }
        if left == 0 {
            Ok(())
        } else {
            Err(Unplaced::Status(IBV_WC_LOC_QP_OP_ERR))
        }
    }
}
