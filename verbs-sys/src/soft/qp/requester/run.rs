//! The straight requests of a chain, one after the other: a run.
//!
//! A run is executed under one epoch, in which no key that it has found can be taken away, and the peer
//! cannot leave the connection. So each looks things up only where it differs from the one before, and all
//! are published at once. As in the straight way for one, everything unusual is left to the general way.

use std::sync::atomic::Ordering;

use super::super::Qp;
use super::super::access::{self, CHUNK};
use super::success;
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_RTS,
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, ibv_send_wr,
};
use crate::soft::keys::{self, Live};
use crate::soft::layout::Target;
use crate::soft::link::{Link, Via};

/// A range that a key names, looked up in this epoch. Key 0 names none.
#[derive(Clone, Copy)]
struct Known {
    key: u32,
    access: u32,
    /// Where it starts, and its bytes.
    range: (u64, u64),
    /// Where its start is mapped here.
    base: *mut u8,
}

impl Known {
    const NOTHING: Self = Self {
        key: 0,
        access: 0,
        range: (0, 0),
        base: std::ptr::null_mut(),
    };

    /// The range is told apart from the key: what a peer says of it is read once, as it could say something
    /// else the second time.
    fn new(key: u32, live: Live<'_>, range: (u64, u64), base: *mut u8) -> Self {
        Self {
            key,
            access: live.access(),
            range,
            base,
        }
    }

    /// Where these bytes are, if they lie in the range and the key gives the right.
    #[inline(always)]
    fn place(&self, addr: u64, len: usize, access: u32) -> Option<*mut u8> {
        let offset = keys::offset_in(self.range, self.access, addr, len, access)?;
        Some(self.base.wrapping_add(offset as usize))
    }
}

impl Qp {
    /// Executes the run at the front of a chain, tells of its completions, and gives what is left of the
    /// chain. The send lock is held.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    pub(super) unsafe fn execute_front(&self, wr: *mut ibv_send_wr) -> *mut ibv_send_wr {
        let (mut completed, mut copied) = (false, 0);
        // SAFETY: as for this function.
        let rest = unsafe { self.execute_run(wr, &mut completed, &mut copied) };
        if completed {
            self.send_cq.notify(self, false);
        }
        rest
    }

    /// Executes requests from the front of a chain for as long as they are straight, and gives the first
    /// that it did not execute. `completed` is set if there is a completion that somebody has to be told of;
    /// `copied` is as in [`access::pass`]. The send lock is held; its epoch may be another one afterwards.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    pub(super) unsafe fn execute_run(
        &self,
        mut wr: *mut ibv_send_wr,
        completed: &mut bool,
        copied: &mut usize,
    ) -> *mut ibv_send_wr {
        let first = self.sq.tail.load(Ordering::Relaxed);
        let idle = self.sq.done.load(Ordering::Relaxed) == first;
        if !idle || self.state() != IBV_QPS_RTS || self.cap.max_send_sge == 0 {
            return wr;
        }
        // SAFETY: the send lock is held.
        let Some(link) = (unsafe { self.link() }) else {
            return wr;
        };
        let Some(target) = link.connected_target() else {
            return wr;
        };
        let (mut local, mut remote) = (Known::NOTHING, Known::NOTHING);
        let (mut position, mut sum) = (first, *copied);
        let end = first.wrapping_add(self.sq.room(first));
        let writes = target.allows(IBV_ACCESS_REMOTE_WRITE);
        let reads = target.allows(IBV_ACCESS_REMOTE_READ) && !self.is_unreliable();
        let mut told = false;
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { wr.as_ref() } {
            let (access, local_access, opcode) = match request.opcode {
                IBV_WR_RDMA_WRITE if writes => (IBV_ACCESS_REMOTE_WRITE, 0, IBV_WC_RDMA_WRITE),
                IBV_WR_RDMA_READ if reads => {
                    let access = IBV_ACCESS_REMOTE_READ;
                    (access, IBV_ACCESS_LOCAL_WRITE, IBV_WC_RDMA_READ)
                }
                _ => break,
            };
            let is_straight = request.num_sge == 1 && request.send_flags & IBV_SEND_INLINE == 0;
            if !is_straight || position == end {
                break;
            }
            // SAFETY: one element is readable by the caller's promise.
            let sge = unsafe { &*request.sg_list };
            // SAFETY: the opcode says that this member is meant; all are plain integers.
            let rdma = unsafe { request.wr.rdma };
            let len = sge.length as usize;
            if len == 0 || len > CHUNK.saturating_sub(sum) {
                break;
            }
            if sge.lkey != local.key {
                local = self.known_here(sge.lkey);
            }
            if rdma.rkey != remote.key {
                remote = known_there(link, target, rdma.rkey);
            }
            let Some(here) = local.place(sge.addr, len, local_access) else {
                break;
            };
            let Some(there) = remote.place(rdma.remote_addr, len, access) else {
                break;
            };
            if request.opcode == IBV_WR_RDMA_WRITE {
                // SAFETY: both ranges were checked under this epoch, which their owners wait for.
                unsafe { copy::copy_shared(there, here, len) };
            } else {
                // SAFETY: as above.
                unsafe { copy::read_shared(here, there, len) };
            }
            access::in_order();
            sum += len;
            let signaled = self.sq_sig_all || request.send_flags & IBV_SEND_SIGNALED != 0;
            told |= signaled;
            let outcome = success(opcode, sge.length);
            self.sq
                .finish_at_once(position, request.wr_id, outcome, signaled);
            position = position.wrapping_add(1);
            wr = request.next;
        }
        *completed |= told;
        if position != first {
            self.sq.tail.store(position, Ordering::Relaxed);
            self.sq.exec.store(position, Ordering::Relaxed);
            self.sq.done.store(position, Ordering::Release);
        }
        *copied = sum;
        access::pass(&self.info().sq_epoch.0, copied, 0);
        wr
    }

    #[inline(never)]
    fn known_here(&self, lkey: u32) -> Known {
        match keys::lookup(&self.process.info().keys, lkey) {
            Some(live) if live.is_of(self.pd) => {
                let range = live.range();
                Known::new(lkey, live, range, range.0 as usize as *mut u8)
            }
            _ => Known::NOTHING,
        }
    }
}

#[inline(never)]
fn known_there(link: &Link, target: Target, rkey: u32) -> Known {
    let live = keys::lookup(link.keys(), rkey);
    let Some(live) = live.filter(|live| live.serves(target.pd(), link.dest_qpn)) else {
        return Known::NOTHING;
    };
    let range = live.range();
    let base = match &link.via {
        Via::Local => Some(range.0 as usize as *mut u8),
        Via::Shm(peer) if live.arena() != 0 => {
            let len = usize::try_from(range.1).unwrap_or(usize::MAX);
            peer.mapped(live.arena(), live.offset(), len)
        }
        _ => None,
    };
    base.map_or(Known::NOTHING, |base| Known::new(rkey, live, range, base))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, AtomicU64};

    use super::*;
    use crate::soft::layout::{KeyEntry, MAX_KEYS};

    /// A peer's own table is its own to write, whenever it likes.
    #[test]
    fn a_range_is_no_longer_than_what_was_mapped_for_it() {
        let empty = || KeyEntry {
            live: AtomicU32::new(0),
            access: AtomicU32::new(0),
            pd: AtomicU32::new(0),
            arena: AtomicU32::new(0),
            addr: AtomicU64::new(0),
            len: AtomicU64::new(0),
            offset: AtomicU64::new(0),
        };
        let keys: Vec<KeyEntry> = (0..MAX_KEYS).map(|_| empty()).collect();
        let keys: &[KeyEntry; MAX_KEYS] = keys[..].try_into().unwrap();
        let (key, entry) = (1 << 8, &keys[1]);
        entry.addr.store(0x1000, Ordering::Relaxed);
        entry.len.store(64, Ordering::Relaxed);
        entry.live.store(key, Ordering::Release);
        let live = keys::lookup(keys, key).unwrap();
        let range = live.range();
        entry.len.store(u64::MAX, Ordering::Relaxed);
        let known = Known::new(key, live, range, std::ptr::null_mut());
        assert_eq!(known.place(0x1030, 16, 0).map(<*mut u8>::addr), Some(0x30));
        assert_eq!(known.place(0x1030, 17, 0), None);
        assert_eq!(known.place(0xfff, 1, 0), None);
    }
}
