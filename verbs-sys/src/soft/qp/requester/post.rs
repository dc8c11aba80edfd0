//! Posting: a request is validated, then executed at once or kept for later.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::access;
use super::super::queues::Kept;
use super::super::stream::is_answered;
use super::super::{MAX_SGE, Qp};
use super::injected::untold;
use super::unfenced::post_alone;
use super::window::is_about_window;
use super::{Bell, Owed, Request, Step, total};
use crate::ffi::*;
use crate::soft::keys;

impl Qp {
    /// ibv_post_send(3) on a chain: 0, or what is wrong with the first request that was not posted, which
    /// `bad` then names.
    ///
    /// # Safety
    ///
    /// `wr` leads a valid chain of requests whose lists and inline data are readable; `bad` is a place for
    /// a pointer.
    #[inline(always)]
    pub(in crate::soft) unsafe fn post_send(
        &self,
        wr: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> i32 {
        // SAFETY: the chain is valid by the caller's promise.
        let Some(first) = (unsafe { wr.as_ref() }) else {
            return 0;
        };
        match (first.opcode, first.next.is_null()) {
            // SAFETY: as above.
            (IBV_WR_RDMA_WRITE, true) => unsafe { post_alone::<true>(self, wr, bad) },
            // SAFETY: as above.
            (IBV_WR_RDMA_READ, true) => unsafe { post_alone::<false>(self, wr, bad) },
            // SAFETY: as above.
            (IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ, false) => unsafe { self.post_run(wr, bad) },
            // SAFETY: as above.
            _ => unsafe { self.post_fenced(wr, bad) },
        }
    }

    /// Posts a chain of which not even the front is straight, behind a fence.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    unsafe fn post_fenced(&self, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> i32 {
        self.lock_sends();
        // SAFETY: by the caller's promise; the lock is held.
        unsafe { self.post_rest(wr, bad) }
    }

    /// As [`post_send`](Self::post_send) on a chain of so many valid requests, of which none is posted where
    /// there is no room for all.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    pub(in crate::soft::qp) unsafe fn post_whole(
        &self,
        wr: *mut ibv_send_wr,
        count: u32,
        bad: *mut *mut ibv_send_wr,
    ) -> i32 {
        self.lock_sends();
        if self.sq.room(self.sq.tail.load(Ordering::Relaxed)) < count {
            self.unlock_sends();
            return libc::ENOMEM;
        }
        // SAFETY: by the caller's promise; the lock is held.
        unsafe { self.post_locked(wr, bad) }
    }

    /// Posts a chain. The send lock is held, and released.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(always)]
    pub(super) unsafe fn post_locked(
        &self,
        wr: *mut ibv_send_wr,
        bad: *mut *mut ibv_send_wr,
    ) -> i32 {
        // SAFETY: the chain is valid by the caller's promise; the lock is held.
        let rest = unsafe { self.execute_front(wr) };
        if rest.is_null() {
            self.count_post();
            self.unlock_sends();
            return 0;
        }
        // SAFETY: as above.
        unsafe { self.post_rest(rest, bad) }
    }

    /// Posts what is not straight. The send lock is held, and released.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    pub(super) unsafe fn post_rest(&self, wr: *mut ibv_send_wr, bad: *mut *mut ibv_send_wr) -> i32 {
        // SAFETY: by the caller's promise.
        match unsafe { self.post_chain(wr) } {
            Ok(()) => 0,
            Err((code, wr)) => {
                // SAFETY: by the caller's promise.
                unsafe { bad.write(wr) };
                code
            }
        }
    }

    /// The general way. The send lock is held, and released.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[inline(never)]
    unsafe fn post_chain(&self, mut wr: *mut ibv_send_wr) -> Result<(), (i32, *mut ibv_send_wr)> {
        if !matches!(self.state(), IBV_QPS_RTS | IBV_QPS_SQD | IBV_QPS_ERR) {
            self.unlock_sends();
            return Err((libc::EINVAL, wr));
        }
        if let Some(endpoint) = &self.datagrams {
            self.unlock_sends();
            // SAFETY: by the caller's promise.
            unsafe { self.meet(endpoint, wr) };
            self.lock_sends();
        }
        let word = self.send_epoch();
        let mut copied = 0;
        self.post_burst(|owed, bell| {
            // SAFETY: the chain is valid by the caller's promise.
            while let Some(request) = unsafe { wr.as_ref() } {
                // SAFETY: as above.
                if unsafe { self.send_straight(request, bell) } {
                    // SAFETY: one element, as was found.
                    let len = unsafe { (*request.sg_list).length };
                    access::pass(word, &mut copied, len.into());
                    wr = request.next;
                    continue;
                }
                // SAFETY: as above.
                let rest = unsafe { self.execute_run(wr, &mut owed.completed, &mut copied) };
                if rest != wr {
                    wr = rest;
                    continue;
                }
                // SAFETY: as above.
                let posted = unsafe { self.post_one(request, owed, bell) };
                let len = posted.map_err(|code| (code, wr))?;
                access::pass(word, &mut copied, len);
                wr = request.next;
            }
            Ok(())
        })
    }

    /// Posts some requests. The send lock is held, and released.
    #[inline]
    pub(super) fn post_burst<T>(&self, post: impl FnOnce(&mut Owed, &mut Bell) -> T) -> T {
        let mut owed = Owed::default();
        let mut bell = Bell::default();
        if self.send_can_progress() {
            // What has ended need not keep these requests waiting.
            self.take_acknowledgements(&mut owed);
        }
        let result = post(&mut owed, &mut bell);
        self.finish_burst(&mut owed, &bell);
        self.unlock_sends();
        self.acknowledge_behind_answer(bell.acknowledged);
        self.settle(&mut owed);
        result
    }

    /// Validates one request, and executes or keeps it; says how many bytes it has. The send lock is held.
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
    ) -> Result<u64, i32> {
        // SAFETY: by the caller's promise.
        let request = unsafe { self.request(wr) }?;
        let has_keys = !request.is(IBV_SEND_INLINE);
        if has_keys && request.sges.iter().any(|sge| keys::is_indirect(sge.lkey)) {
            // SAFETY: as above.
            unsafe { self.enqueue_translated(wr.wr_id, &request, owed, bell) }?;
        } else {
            // SAFETY: as above.
            unsafe { self.enqueue(wr.wr_id, &request, owed, bell) }?;
        }
        Ok(total(request.sges))
    }

    /// As [`enqueue`](Self::enqueue), with elements whose addresses have to be translated.
    ///
    /// # Safety
    ///
    /// As for `enqueue`.
    #[cold]
    #[inline(never)]
    unsafe fn enqueue_translated(
        &self,
        wr_id: u64,
        request: &Request<'_>,
        owed: &mut Owed,
        bell: &mut Bell,
    ) -> Result<(), i32> {
        let keys = &self.process.info().keys;
        let is_target = is_answered(request.opcode);
        let mut sges = [ibv_sge::default(); MAX_SGE as usize];
        for (to, from) in sges.iter_mut().zip(request.sges) {
            *to = keys::posted(keys, *from, is_target);
        }
        let request = Request {
            sges: &sges[..request.sges.len()],
            ..*request
        };
        // SAFETY: by the caller's promise.
        unsafe { self.enqueue(wr_id, &request, owed, bell) }
    }

    /// Executes or keeps a validated request. The send lock is held.
    ///
    /// # Safety
    ///
    /// The request's inline data must be readable.
    #[inline]
    pub(super) unsafe fn enqueue(
        &self,
        wr_id: u64,
        request: &Request<'_>,
        owed: &mut Owed,
        bell: &mut Bell,
    ) -> Result<(), i32> {
        let position = self.sq.tail.load(Ordering::Relaxed);
        if self.sq.is_full(position) {
            return Err(libc::ENOMEM);
        }
        self.sq.start(position, wr_id);
        self.sq
            .tail
            .store(position.wrapping_add(1), Ordering::Relaxed);
        let first = self.sq.exec.load(Ordering::Relaxed) == position;
        let executed =
            first && self.state() == IBV_QPS_RTS && self.step(position, request, owed, bell);
        let has_answer = executed
            && (self.requester.atomic.load(Ordering::Relaxed) != 0
                || (self.streams.is_active() && is_answered(request.opcode)));
        if !executed || has_answer {
            // SAFETY: inline data is readable by the caller's promise.
            unsafe { self.keep(position, request) };
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
        let signaled = self.signals(request.flags);
        let executed = match &self.injector {
            None => self.execute(position, request, bell),
            Some(injector) => self.execute_among_faults(injector, position, request, bell),
        };
        match self.forgive(executed, request) {
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
            Step::GoOver => {
                self.go_over();
                owed.dial = true;
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

    /// What becomes of a request that the peer refused, or that found no peer: without
    /// acknowledgements nobody learns of it.
    #[inline]
    fn forgive(&self, step: Step, request: &Request<'_>) -> Step {
        let lost = match step {
            Step::Failed(status) => {
                self.is_unreliable() && !matches!(status, IBV_WC_LOC_LEN_ERR | IBV_WC_LOC_PROT_ERR)
            }
            Step::Wait => self.is_unreliable() && self.peer_is_missing(),
            _ => false,
        };
        if !lost || is_about_window(request.opcode) {
            return step;
        }
        untold(request)
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
            srqn: request.srqn,
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
    pub(super) fn run_backlog(&self, owed: &mut Owed, bell: &mut Bell) {
        let backlog = self
            .sq
            .backlog
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let mut copied = 0;
        while owed.map.is_none() {
            let position = self.sq.exec.load(Ordering::Relaxed);
            let end = match (self.begun_in_sqd(), self.state()) {
                (Some(begun), _) => begun,
                (None, IBV_QPS_RTS) => self.sq.tail.load(Ordering::Relaxed),
                _ => return,
            };
            if position == end {
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
                srqn: kept.srqn,
                sges,
            };
            if !self.step(position, &request, owed, bell) {
                return;
            }
            access::pass(self.send_epoch(), &mut copied, total(sges));
        }
    }
}
