//! The straight way: a WRITE or READ of one element, with nothing unfinished before it in the queue.
//!
//! It makes the checks of the general way, in the same words, and leaves everything unusual to it:
//! a request that is refused here has changed nothing.

use std::sync::atomic::Ordering;

use super::super::Qp;
use super::super::access::{self, CHUNK, Direction, Place};
use super::success;
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_RTS,
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, ibv_send_wr,
};

impl Qp {
    /// Executes a request if it is of the straight kind, and tells of its completion. The send lock is
    /// held.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn execute_direct(&self, wr: &ibv_send_wr) -> bool {
        // SAFETY: as for this function.
        let signaled = unsafe { self.execute_straight(wr) };
        if signaled == Some(true) {
            self.send_cq.notify(self, false);
        }
        signaled.is_some()
    }

    /// Executes a request if it is of the straight kind; whether its completion is one that somebody
    /// has to be told of. The send lock is held.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn execute_straight(&self, wr: &ibv_send_wr) -> Option<bool> {
        match wr.opcode {
            // SAFETY: as for this function, and the opcode is the one that is meant.
            IBV_WR_RDMA_WRITE => unsafe { self.execute_one::<true>(wr) },
            // SAFETY: as above.
            IBV_WR_RDMA_READ if !self.is_unreliable() => unsafe { self.execute_one::<false>(wr) },
            _ => None,
        }
    }

    /// # Safety
    ///
    /// As for `post_send`; the request is a WRITE or a READ.
    #[inline(always)]
    unsafe fn execute_one<const WRITE: bool>(&self, wr: &ibv_send_wr) -> Option<bool> {
        let straight = wr.num_sge == 1 && self.cap.max_send_sge != 0 && self.state() == IBV_QPS_RTS;
        let position = self.sq.tail.load(Ordering::Relaxed);
        let idle = self.sq.done.load(Ordering::Relaxed) == position;
        if !straight || !idle || self.sq.is_full(position) {
            return None;
        }
        // SAFETY: one element is readable by the caller's promise.
        let sge = unsafe { &*wr.sg_list };
        let len = sge.length as usize;
        // Inline data needs no key.
        let inline = wr.send_flags & IBV_SEND_INLINE != 0;
        let most = match (inline, WRITE) {
            (false, _) => CHUNK,
            (true, true) => self.cap.max_inline_data as usize,
            (true, false) => return None,
        };
        if len == 0 || len > most {
            return None;
        }
        // SAFETY: the opcode says that this member is meant; all are plain integers.
        let remote = unsafe { wr.wr.rdma };
        // SAFETY: the send lock is held.
        let link = unsafe { self.link() }?;
        let target = link.connected_target()?;
        let (access, local_access, opcode, direction) = if WRITE {
            let direction = Direction::ToPeer;
            (IBV_ACCESS_REMOTE_WRITE, 0, IBV_WC_RDMA_WRITE, direction)
        } else {
            let (access, local) = (IBV_ACCESS_REMOTE_READ, IBV_ACCESS_LOCAL_WRITE);
            (access, local, IBV_WC_RDMA_READ, Direction::FromPeer)
        };
        let keys = &self.process.info().keys;
        if !inline {
            access::check_local(keys, self.pd, sge, local_access).ok()?;
        }
        if !target.allows(access) {
            return None;
        }
        let (addr, rkey) = (remote.remote_addr, remote.rkey);
        let place = access::resolve(link, target.pd(), rkey, addr, len, access).ok()?;
        let here = sge.addr as usize as *mut u8;
        match place {
            // SAFETY: both ranges were checked under the send lock, which their owners wait for.
            Place::Here(there) if WRITE => unsafe { copy::copy_shared(there, here, len) },
            // SAFETY: as above.
            Place::Here(there) => unsafe { copy::read_shared(here, there, len) },
            // What the kernel refuses is asked for again in the general way, which knows what to say.
            Place::There { pid, addr } => access::cross(direction, pid, addr, here, len).ok()?,
        }
        access::in_order();
        let signaled = self.sq_sig_all || wr.send_flags & IBV_SEND_SIGNALED != 0;
        let next = position.wrapping_add(1);
        let outcome = success(opcode, sge.length);
        self.sq
            .finish_at_once(position, wr.wr_id, outcome, signaled);
        self.sq.tail.store(next, Ordering::Relaxed);
        self.sq.exec.store(next, Ordering::Relaxed);
        self.sq.done.store(next, Ordering::Release);
        Some(signaled)
    }
}
