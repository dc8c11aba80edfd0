//! The straight way: WRITEs and READs of one element, with nothing unfinished before them in the queue.
//!
//! It makes the checks of the general way, in the same words, and leaves everything unusual to it: a request
//! that is refused here has changed nothing. What was looked up for a key is kept for the next request
//! (`known.rs`). The straight requests at the front of a chain are a *run*: they are executed under one epoch, and all
//! are published at once.

use std::sync::atomic::Ordering;

use super::super::Qp;
use super::super::access::{self, CHUNK, Direction};
use super::known::Known;
use super::success;
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_READ, IBV_ACCESS_REMOTE_WRITE, IBV_QPS_RTS,
    IBV_SEND_INLINE, IBV_SEND_SIGNALED, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, ibv_send_wr,
};
use crate::soft::layout::Target;
use crate::soft::link::Link;

/// A peer that is ready, and the bytes that may be copied before others have their turn.
struct Ready<'a> {
    link: &'a Link,
    target: Target,
    most: usize,
}

impl<'a> Ready<'a> {
    #[inline(always)]
    fn new(link: &'a Link, most: usize) -> Option<Self> {
        let target = link.connected_target()?;
        Some(Self { link, target, most })
    }
}

/// A request that was executed.
struct Executed {
    len: u32,
    signaled: bool,
    /// The kernel has copied, which takes long.
    crossed: bool,
}

impl Qp {
    /// Executes a WRITE or a READ if it is of the straight kind; whether its completion is one that somebody
    /// has to be told of. The send lock is held, and what is known of keys holds. If `KNOWN`, nothing else is looked
    /// up, and the kernel is not asked: that would need registers which the usual way can do without.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn execute_alone<const WRITE: bool, const KNOWN: bool>(
        &self,
        wr: &ibv_send_wr,
        link: &Link,
    ) -> Option<bool> {
        let position = self.straight_position()?;
        if self.sq.is_full(position) {
            return None;
        }
        let ready = Ready::new(link, CHUNK)?;
        // SAFETY: as for this function.
        let executed = unsafe { self.execute_straight::<WRITE, KNOWN>(wr, position, &ready) }?;
        self.sq.end_at_once(position.wrapping_add(1));
        Some(executed.signaled)
    }

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
        self.renew_known();
        let Some(first) = self.straight_position() else {
            return wr;
        };
        // SAFETY: the send lock is held.
        let link = unsafe { self.link() };
        let Some(mut ready) = link.and_then(|link| Ready::new(link, CHUNK.saturating_sub(*copied)))
        else {
            return wr;
        };
        let end = first.wrapping_add(self.sq.room(first));
        let mut position = first;
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { wr.as_ref() } {
            if position == end {
                break;
            }
            let executed = match request.opcode {
                // SAFETY: as for this function, and the opcode is the one that is meant.
                IBV_WR_RDMA_WRITE => unsafe {
                    self.execute_straight::<true, false>(request, position, &ready)
                },
                // SAFETY: as above.
                IBV_WR_RDMA_READ => unsafe {
                    self.execute_straight::<false, false>(request, position, &ready)
                },
                _ => None,
            };
            let Some(executed) = executed else { break };
            ready.most = match executed.crossed {
                true => 0,
                false => ready.most - executed.len as usize,
            };
            *copied += executed.len as usize;
            *completed |= executed.signaled;
            position = position.wrapping_add(1);
            wr = request.next;
        }
        if position != first {
            self.sq.end_at_once(position);
        }
        access::pass(self.send_epoch(), copied, 0);
        wr
    }

    /// Where the next request goes, if requests can be executed and none is unfinished.
    #[inline(always)]
    fn straight_position(&self) -> Option<u32> {
        let position = self.sq.tail.load(Ordering::Relaxed);
        let idle = self.sq.done.load(Ordering::Relaxed) == position;
        (idle && self.state() == IBV_QPS_RTS).then_some(position)
    }

    /// Executes a WRITE or a READ if it is of the straight kind, and writes how it ended.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn execute_straight<const WRITE: bool, const KNOWN: bool>(
        &self,
        wr: &ibv_send_wr,
        position: u32,
        ready: &Ready<'_>,
    ) -> Option<Executed> {
        let (access, local_access, opcode) = if WRITE {
            (IBV_ACCESS_REMOTE_WRITE, 0, IBV_WC_RDMA_WRITE)
        } else {
            let access = IBV_ACCESS_REMOTE_READ;
            (access, IBV_ACCESS_LOCAL_WRITE, IBV_WC_RDMA_READ)
        };
        let refused = !WRITE && self.is_unreliable();
        if i64::from(wr.num_sge) != self.one_sge || refused || !ready.target.allows(access) {
            return None;
        }
        // SAFETY: one element is readable by the caller's promise.
        let sge = unsafe { &*wr.sg_list };
        let len = sge.length as usize;
        // Of no bytes there is nothing to copy, and a key is not looked at.
        if len.wrapping_sub(1) >= ready.most {
            return None;
        }
        // SAFETY: the send lock is held.
        let known = unsafe { self.known() };
        if wr.send_flags & IBV_SEND_INLINE == 0 {
            let local = known.local::<KNOWN>(self, sge.lkey)?;
            local.offset(sge.addr, len, local_access)?;
        } else if !WRITE || len > self.cap.max_inline_data as usize {
            return None;
        }
        // SAFETY: the opcode says that this member is meant; all are plain integers.
        let to = unsafe { wr.wr.rdma };
        let remote = known.remote::<KNOWN>(ready.link, ready.target, to.rkey)?;
        let offset = remote.offset(to.remote_addr, len, access)?;
        let here = sge.addr as usize as *mut u8;
        let mut crossed = false;
        match remote.at(offset) {
            // SAFETY: both ranges were checked under the send lock, which their owners wait for.
            Some(there) if WRITE => unsafe { copy::copy_shared(there, here, len) },
            // SAFETY: as above.
            Some(there) => unsafe { copy::read_shared(here, there, len) },
            None if KNOWN => return None,
            None => {
                cross::<WRITE>(remote, to.remote_addr, here, len)?;
                crossed = true;
            }
        }
        access::in_order();
        let signaled = self.sq_sig_all || wr.send_flags & IBV_SEND_SIGNALED != 0;
        let outcome = success(opcode, sge.length);
        self.sq
            .finish_at_once(position, wr.wr_id, outcome, signaled);
        Some(Executed {
            len: sge.length,
            signaled,
            crossed,
        })
    }
}

/// What the kernel refuses is asked for again in the general way, which knows what to say.
#[cold]
fn cross<const WRITE: bool>(remote: &Known, addr: u64, here: *mut u8, len: usize) -> Option<()> {
    let direction = if WRITE {
        Direction::ToPeer
    } else {
        Direction::FromPeer
    };
    access::cross(direction, remote.pid()?, addr, here, len).ok()
}
