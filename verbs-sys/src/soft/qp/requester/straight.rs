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
    IBV_SEND_INLINE, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WR_RDMA_READ, IBV_WR_RDMA_WRITE,
    ibv_send_wr,
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

    /// A peer that was ready before, and has not changed since.
    #[inline(always)]
    fn unchanged(link: &'a Link) -> Option<Self> {
        let target = link.unchanged_target()?;
        let most = CHUNK;
        Some(Self { link, target, most })
    }
}

/// Requests at the front of a chain, as far as they were executed.
struct Run<'a> {
    /// The next, and its place in the queue.
    wr: *mut ibv_send_wr,
    position: u32,
    /// Behind the last place that is free.
    end: u32,
    /// There is a completion that somebody has to be told of.
    completed: bool,
    ready: Ready<'a>,
    /// What was left to be copied when it was ended before.
    over: usize,
}

impl<'a> Run<'a> {
    fn new(qp: &Qp, wr: *mut ibv_send_wr, position: u32, ready: Ready<'a>) -> Self {
        Self {
            wr,
            position,
            end: position.wrapping_add(qp.sq.room(position)),
            completed: false,
            ready,
            over: 0,
        }
    }
}

/// A request that was executed.
struct Executed {
    len: u32,
    /// The kernel has copied, which takes long.
    crossed: bool,
}

impl Qp {
    /// Executes a WRITE or a READ if it is of the straight kind; whether its completion is one that somebody
    /// has to be told of. The send lock is held, and what is known of keys holds. If `IN_PLACE`, nothing else is looked
    /// up, and only what needs no call is copied: calls take registers which the usual way can do without.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn execute_alone<const WRITE: bool, const IN_PLACE: bool>(
        &self,
        wr: *const ibv_send_wr,
        link: &Link,
    ) -> Option<bool> {
        let position = self.straight_position()?;
        if self.sq.is_full(position) {
            return None;
        }
        let ready = if IN_PLACE {
            // SAFETY: the send lock is held.
            if !unsafe { self.known() }.is_confirmed() {
                return None;
            }
            Ready::unchanged(link)?
        } else {
            // SAFETY: the send lock is held.
            unsafe { self.known() }.forget_lost();
            Ready::new(link, CHUNK)?
        };
        // SAFETY: as for this function.
        let executed = unsafe { self.execute_straight::<WRITE, IN_PLACE>(wr, &ready) }?;
        // Read once more, so that it need not be kept.
        let position = self.sq.tail.load(Ordering::Relaxed);
        // SAFETY: as for this function.
        let signaled = unsafe { self.end_straight::<WRITE>(wr, position, executed) };
        self.sq.end_at_once(position.wrapping_add(1));
        Some(signaled)
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

    /// Executes the run at the front of a chain, as far as all is known and copied in place, tells of its completions,
    /// and gives what is left of the chain. The send lock is held, and what is known of keys holds.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn execute_front_in_place(
        &self,
        wr: *mut ibv_send_wr,
        link: &Link,
    ) -> *mut ibv_send_wr {
        let (Some(first), Some(ready)) = (self.straight_position(), Ready::unchanged(link)) else {
            return wr;
        };
        // SAFETY: as for this function.
        let run = unsafe { self.run_in_place(Run::new(self, wr, first, ready)) };
        if run.position != first {
            self.sq.end_at_once(run.position);
        }
        if run.completed {
            self.send_cq.notify(self, false);
        }
        run.wr
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
        wr: *mut ibv_send_wr,
        completed: &mut bool,
        copied: &mut usize,
    ) -> *mut ibv_send_wr {
        // SAFETY: the chain is valid by the caller's promise.
        let opcode = unsafe { wr.as_ref() }.map(|request| request.opcode);
        if !matches!(opcode, Some(IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ)) {
            return wr;
        }
        self.renew_known();
        let Some(first) = self.straight_position() else {
            return wr;
        };
        // SAFETY: the send lock is held.
        let link = unsafe { self.link() };
        let most = CHUNK.saturating_sub(*copied);
        let Some(ready) = link.and_then(|link| Ready::new(link, most)) else {
            return wr;
        };
        // SAFETY: as for this function.
        let mut run = unsafe { self.run_in_place(Run::new(self, wr, first, ready)) };
        if !run.wr.is_null() {
            // SAFETY: as above.
            run = unsafe { self.run_anyhow(run) };
        }
        if run.position != first {
            self.sq.end_at_once(run.position);
        }
        *completed |= run.completed;
        *copied += most - (run.ready.most + run.over);
        access::pass(self.send_epoch(), copied, 0);
        run.wr
    }

    /// Goes on with a run, for as long as all is known and copied in place.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    unsafe fn run_in_place<'a>(&self, run: Run<'a>) -> Run<'a> {
        // SAFETY: the send lock is held.
        if !unsafe { self.known() }.is_confirmed() {
            return run;
        }
        // SAFETY: as for this function.
        unsafe { self.go_on::<true>(run) }
    }

    /// Goes on with a run, whatever has to be looked up or called for.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    unsafe fn run_anyhow<'a>(&self, run: Run<'a>) -> Run<'a> {
        // SAFETY: the send lock is held.
        unsafe { self.known() }.forget_lost();
        // SAFETY: as for this function.
        unsafe { self.go_on::<false>(run) }
    }

    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn go_on<'a, const IN_PLACE: bool>(&self, mut run: Run<'a>) -> Run<'a> {
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { run.wr.as_ref() } {
            if run.position == run.end {
                break;
            }
            let (opcode, next) = (request.opcode, request.next);
            let executed = match opcode {
                // SAFETY: as for this function, and the opcode is the one that is meant.
                IBV_WR_RDMA_WRITE => unsafe { self.execute_next::<true, IN_PLACE>(&mut run) },
                // SAFETY: as above.
                IBV_WR_RDMA_READ => unsafe { self.execute_next::<false, IN_PLACE>(&mut run) },
                _ => None,
            };
            if executed.is_none() {
                break;
            }
            run.position = run.position.wrapping_add(1);
            run.wr = next;
        }
        run
    }

    /// Executes the next WRITE or READ of a run, if it is of the straight kind, and writes how it ended.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn execute_next<const WRITE: bool, const IN_PLACE: bool>(
        &self,
        run: &mut Run<'_>,
    ) -> Option<()> {
        // SAFETY: as for this function.
        let executed = unsafe { self.execute_straight::<WRITE, IN_PLACE>(run.wr, &run.ready) }?;
        run.ready.most -= executed.len as usize;
        if executed.crossed {
            // So long that others shall have their turn, however much that was.
            run.over = run.ready.most;
            run.ready.most = 0;
        }
        // SAFETY: as for this function.
        run.completed |= unsafe { self.end_straight::<WRITE>(run.wr, run.position, executed) };
        Some(())
    }

    /// Where the next request goes, if requests can be executed and none is unfinished.
    #[inline(always)]
    fn straight_position(&self) -> Option<u32> {
        let position = self.sq.tail.load(Ordering::Relaxed);
        let idle = self.sq.done.load(Ordering::Relaxed) == position;
        (idle && self.state() == IBV_QPS_RTS).then_some(position)
    }

    /// Writes how a request ended; whether somebody has to be told.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn end_straight<const WRITE: bool>(
        &self,
        wr: *const ibv_send_wr,
        position: u32,
        executed: Executed,
    ) -> bool {
        let opcode = if WRITE {
            IBV_WC_RDMA_WRITE
        } else {
            IBV_WC_RDMA_READ
        };
        // SAFETY: readable by the caller's promise.
        let (wr_id, flags) = unsafe { ((*wr).wr_id, (*wr).send_flags) };
        let signaled = self.signals(flags);
        let outcome = success(opcode, executed.len);
        self.sq.finish_at_once(position, wr_id, outcome, signaled);
        signaled
    }

    /// Executes a WRITE or a READ if it is of the straight kind.
    ///
    /// The request is given as a pointer, and not as a reference, so that its fields are read where they are needed and no
    /// registers kept for them.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    unsafe fn execute_straight<const WRITE: bool, const IN_PLACE: bool>(
        &self,
        wr: *const ibv_send_wr,
        ready: &Ready<'_>,
    ) -> Option<Executed> {
        let (access, local_access) = if WRITE {
            (IBV_ACCESS_REMOTE_WRITE, 0)
        } else {
            (IBV_ACCESS_REMOTE_READ, IBV_ACCESS_LOCAL_WRITE)
        };
        let refused = !WRITE && self.is_unreliable();
        // SAFETY: readable by the caller's promise.
        let (num_sge, sg_list, flags) = unsafe { ((*wr).num_sge, (*wr).sg_list, (*wr).send_flags) };
        if i64::from(num_sge) != self.one_sge || refused || !ready.target.allows(access) {
            return None;
        }
        // SAFETY: one element is readable by the caller's promise.
        let sge = unsafe { *sg_list };
        let len = sge.length as usize;
        // Of no bytes there is nothing to copy, and a key is not looked at.
        if len.wrapping_sub(1) >= ready.most {
            return None;
        }
        // SAFETY: the send lock is held.
        let known = unsafe { self.known() };
        if flags & IBV_SEND_INLINE == 0 {
            let local = known.local::<IN_PLACE>(self, sge.lkey)?;
            local.offset(sge.addr, len, local_access)?;
        } else if !WRITE || len > self.cap.max_inline_data as usize {
            return None;
        }
        // SAFETY: the opcode says that this member is meant; all are plain integers.
        let to = unsafe { (*wr).wr.rdma };
        let remote = known.remote::<IN_PLACE>(ready.link, ready.target, to.rkey)?;
        let here = sge.addr as usize as *mut u8;
        let mut crossed = false;
        if IN_PLACE {
            let there = remote.place(to.remote_addr, len, access)?;
            let (to, from) = if WRITE { (there, here) } else { (here, there) };
            // SAFETY: both ranges were checked under the send lock, which their owners wait for.
            if !unsafe { copy::copy_in_place::<WRITE>(to, from, len) } {
                return None;
            }
            access::in_order();
            return Some(Executed {
                len: sge.length,
                crossed,
            });
        }
        let offset = remote.offset(to.remote_addr, len, access)?;
        match remote.at(offset) {
            // SAFETY: as above.
            Some(there) if WRITE => unsafe { copy::copy_shared(there, here, len) },
            // SAFETY: as above.
            Some(there) => unsafe { copy::read_shared(here, there, len) },
            None => {
                cross::<WRITE>(remote, to.remote_addr, here, len)?;
                crossed = true;
            }
        }
        access::in_order();
        Some(Executed {
            len: sge.length,
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
