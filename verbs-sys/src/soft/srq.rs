//! Shared receive queues: receives that several queue pairs take from.
//!
//! A receive is taken when a message for it is at the front of a queue pair's ring, moves into that
//! queue pair's own receive queue, and lives on there as any other. So completing and polling are as
//! without sharing, and the shared part is one short lock for each message.

use std::cell::UnsafeCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::cq::Cq;
use super::epoch;
use super::events::{AsyncEvents, Source};
use super::layout::{SharedTarget, qpn};
use super::process::Process;
use super::qp::{MAX_SGE, MAX_WR, RecvQueue};
use super::xrc::{Membership, Port, Unready};
use crate::ffi::{
    IBV_EVENT_SRQ_LIMIT_REACHED, IBV_SRQ_LIMIT, IBV_SRQ_MAX_WR, ibv_async_event,
    ibv_async_event_element, ibv_context, ibv_recv_wr, ibv_srq, ibv_srq_attr,
};

/// A shared receive queue. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Srq {
    srq: UnsafeCell<ibv_srq>,
    process: Arc<Process>,
    index: u32,
    /// Whose keys the receives are checked with, whatever domain a queue pair is of.
    pub(super) pd: u32,
    max_wr: AtomicU32,
    max_sge: u32,
    /// Guards `receives`, `limit` and `max_wr`. Held for the copy of one receive or of one posted
    /// chain, or of all receives when the size changes.
    lock: AtomicU64,
    receives: UnsafeCell<RecvQueue>,
    /// The event is due when fewer receives than this are left; 0 when it is not wanted.
    limit: AtomicU32,
    /// Queue pairs whose front message has found no receive.
    waiting: Mutex<VecDeque<u32>>,
    /// How many those are, or were.
    waiting_count: AtomicUsize,
    /// Queue pairs made with it.
    users: AtomicU32,
    /// Where its receives complete, if requests name it; otherwise that is at the queue pair.
    port: Option<Arc<Port>>,
    async_events: Source,
}

// SAFETY: the C structure is written only at creation, the receives under the lock; the rest is Send.
unsafe impl Send for Srq {}
// SAFETY: as for Send; the rest is Sync.
unsafe impl Sync for Srq {}

impl std::fmt::Debug for Srq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Srq")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl Srq {
    /// ibv_create_srq(3), and with `xrc` one that requests name. The limit is not set at creation.
    ///
    /// # Errors
    /// `EINVAL` for sizes the device does not have.
    pub(super) fn new(
        process: &Arc<Process>,
        async_events: &Arc<AsyncEvents>,
        pd: u32,
        fields: ibv_srq,
        attr: &ibv_srq_attr,
        xrc: Option<(Membership, &Arc<Cq>)>,
    ) -> Result<Arc<Self>, Errno> {
        if !(1..=MAX_WR).contains(&attr.max_wr) || attr.max_sge > MAX_SGE {
            return Err(Errno::INVAL);
        }
        let index = process.srq_indices.take().ok_or(Errno::NOMEM)?;
        let port = xrc.map(|(member, cq)| {
            let number = qpn(process.slot, index as usize);
            Port::new(process, member, number, Arc::clone(cq))
        });
        let srq = Arc::new(Self {
            srq: UnsafeCell::new(ibv_srq {
                handle: index,
                ..fields
            }),
            process: Arc::clone(process),
            index,
            pd,
            max_wr: AtomicU32::new(attr.max_wr),
            max_sge: attr.max_sge,
            lock: AtomicU64::new(0),
            receives: UnsafeCell::new(RecvQueue::new(attr.max_wr, attr.max_sge)),
            limit: AtomicU32::new(0),
            waiting: Mutex::default(),
            waiting_count: AtomicUsize::new(0),
            users: AtomicU32::new(0),
            port,
            async_events: Source::new(async_events),
        });
        if let Some(port) = &srq.port {
            port.cq().attach_port(port);
            process.xrc.add(port.number, Arc::clone(&srq));
            let sleeps_at = port.cq().bell().map(|(cq, _)| cq);
            let target = SharedTarget::new(port.domain().id, pd, sleeps_at);
            process.info().srqs[index as usize].store(target.0, Ordering::SeqCst);
        }
        Ok(srq)
    }

    /// Where its receives complete, if requests name it.
    pub(super) fn port(&self) -> Option<&Arc<Port>> {
        self.port.as_ref()
    }

    pub(super) fn handle(&self) -> *mut ibv_srq {
        self.srq.get()
    }

    pub(super) fn context(&self) -> *mut ibv_context {
        // SAFETY: written at creation only.
        unsafe { (*self.srq.get()).context }
    }

    pub(super) fn max_sge(&self) -> u32 {
        self.max_sge
    }

    pub(super) fn async_events(&self) -> &Source {
        &self.async_events
    }

    /// A queue pair is made with it.
    pub(super) fn attach(&self) {
        self.users.fetch_add(1, Ordering::Relaxed);
    }

    /// A queue pair made with it has gone.
    pub(super) fn detach(&self, qpn: u32) {
        let mut waiting = self.waiting();
        waiting.retain(|other| *other != qpn);
        self.waiting_count.store(waiting.len(), Ordering::Relaxed);
        drop(waiting);
        self.users.fetch_sub(1, Ordering::Release);
    }

    /// ibv_destroy_srq(3): the receives that are left are gone without a completion.
    ///
    /// # Errors
    /// `EBUSY` while a queue pair uses it.
    pub(super) fn retire(&self) -> Result<(), Errno> {
        if self.users.load(Ordering::Acquire) != 0 {
            return Err(Errno::BUSY);
        }
        if let Some(port) = &self.port {
            self.process.info().srqs[self.index as usize].store(0, Ordering::SeqCst);
            self.process.xrc.remove(port.number);
            port.shut_down(Unready::Gone);
            port.cq().detach_port(port);
            // Who has one of its receives leaves off.
            self.process.quiesce_own();
            port.member.leave();
        }
        self.async_events.retire();
        self.process.srq_indices.give(self.index);
        Ok(())
    }

    /// Does something with the receives that nobody else does anything with.
    #[inline(always)]
    fn with_receives<T>(&self, act: impl FnOnce(&mut RecvQueue) -> T) -> T {
        epoch::lock(&self.lock);
        // SAFETY: reached here alone, by one thread at a time.
        let result = act(unsafe { &mut *self.receives.get() });
        epoch::unlock(&self.lock);
        result
    }

    /// ibv_modify_srq(3): everything that the mask names, or nothing. Receives that are posted stay.
    ///
    /// # Errors
    /// `EINVAL` for a size that the device does not have, or that is less than the limit or than the
    /// receives posted; `ENOMEM`.
    pub(super) fn modify(&self, attr: &ibv_srq_attr, mask: u32) -> Result<(), Errno> {
        if mask & !(IBV_SRQ_MAX_WR | IBV_SRQ_LIMIT) != 0 {
            return Err(Errno::INVAL);
        }
        let resizes = mask & IBV_SRQ_MAX_WR != 0;
        if resizes && !(1..=MAX_WR).contains(&attr.max_wr) {
            return Err(Errno::INVAL);
        }
        // Made before the lock is taken, for which messages wait.
        let new = resizes.then(|| RecvQueue::new(attr.max_wr, self.max_sge));
        self.with_receives(|receives| {
            let max_wr = match &new {
                Some(_) => attr.max_wr,
                None => self.max_wr.load(Ordering::Relaxed),
            };
            let limit = if mask & IBV_SRQ_LIMIT != 0 {
                attr.srq_limit
            } else {
                self.limit.load(Ordering::Relaxed)
            };
            if limit > max_wr || receives.posted() > max_wr {
                return Err(Errno::INVAL);
            }
            self.limit.store(limit, Ordering::Relaxed);
            Ok(new.map(|new| {
                while receives.move_oldest(&new).is_some() {}
                self.max_wr.store(max_wr, Ordering::Relaxed);
                std::mem::replace(receives, new)
            }))
        })
        // What was there before is freed without the lock.
        .map(drop)
    }

    /// ibv_query_srq(3).
    pub(super) fn query(&self) -> ibv_srq_attr {
        ibv_srq_attr {
            max_wr: self.max_wr.load(Ordering::Relaxed),
            max_sge: self.max_sge,
            srq_limit: self.limit.load(Ordering::Relaxed),
        }
    }

    /// ibv_post_srq_recv(3) on a chain. Messages that waited for these receives are taken.
    ///
    /// # Safety
    ///
    /// `wr` leads a valid chain of requests whose lists are readable.
    pub(super) unsafe fn post(
        &self,
        mut wr: *mut ibv_recv_wr,
    ) -> Result<(), (i32, *mut ibv_recv_wr)> {
        let keys = &self.process.info().keys;
        let result = self.with_receives(|receives| {
            // SAFETY: the chain is valid by the caller's promise.
            while let Some(request) = unsafe { wr.as_ref() } {
                // SAFETY: as above.
                unsafe { receives.post_request(request, self.max_sge, keys) }
                    .map_err(|code| (code, wr))?;
                wr = request.next;
            }
            Ok(())
        });
        self.serve_waiting();
        result
    }

    /// Moves the oldest receive to a queue pair's own queue, which has room; `false` if there is
    /// none. The queue pair's receive lock is held.
    #[inline]
    pub(super) fn take(&self, to: &RecvQueue) -> bool {
        let (left, is_low) = self.with_receives(|receives| {
            let left = receives.move_oldest(to);
            let limit = self.limit.load(Ordering::Relaxed);
            let is_low = left.is_some_and(|left| left < limit);
            if is_low {
                self.limit.store(0, Ordering::Relaxed);
            }
            (left, is_low)
        });
        if is_low {
            self.async_events.raise(ibv_async_event {
                element: ibv_async_event_element { srq: self.handle() },
                event_type: IBV_EVENT_SRQ_LIMIT_REACHED,
            });
        }
        left.is_some()
    }

    /// As [`take`](Self::take), for a message that has found no receive: the queue pair is
    /// remembered, and served when one is posted. `is_listed` is its own flag for that.
    #[cold]
    pub(super) fn take_later(&self, to: &RecvQueue, qpn: u32, is_listed: &AtomicBool) -> bool {
        if is_listed.swap(true, Ordering::Relaxed) {
            return false;
        }
        self.take_listed(to, qpn, |_| true)
    }

    /// As [`take_later`](Self::take_later), for a queue pair that may wait for several shared queues in turn.
    #[cold]
    pub(super) fn take_later_of_several(&self, to: &RecvQueue, qpn: u32) -> bool {
        self.take_listed(to, qpn, |waiting| !waiting.contains(&qpn))
    }

    fn take_listed(
        &self,
        to: &RecvQueue,
        qpn: u32,
        is_new: impl FnOnce(&VecDeque<u32>) -> bool,
    ) -> bool {
        let mut waiting = self.waiting();
        if is_new(&waiting) {
            waiting.push_back(qpn);
        }
        self.waiting_count.store(waiting.len(), Ordering::Relaxed);
        drop(waiting);
        // Whoever posts after this has taken the lock after us, and sees the count. Whoever posted
        // before has left a receive.
        self.take(to)
    }

    /// Takes back the receive that a queue pair took last and will not use; `false` if there is no room, as others
    /// were posted since. The queue pair's receive lock is held, so those that wait for a receive are to be
    /// [served](Self::serve_waiting) afterwards.
    #[cold]
    pub(super) fn take_back(&self, from: &RecvQueue) -> bool {
        self.with_receives(|receives| receives.move_back(from))
    }

    /// Serves queue pairs that wait, in their order, as long as there are receives. No lock is held.
    pub(super) fn serve_waiting(&self) {
        while self.waiting_count.load(Ordering::Relaxed) != 0
            && self.with_receives(|receives| receives.posted()) != 0
        {
            let mut waiting = self.waiting();
            let Some(qpn) = waiting.pop_front() else {
                return;
            };
            self.waiting_count.store(waiting.len(), Ordering::Relaxed);
            drop(waiting);
            if let Some(qp) = self.process.qp(qpn) {
                qp.receive_shared();
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, VecDeque<u32>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use crate::ffi::*;
    use crate::soft::PROVIDER;

    /// The handles keep an object alive as long as others need it, so this is for those who do
    /// without them.
    #[test]
    fn what_is_in_use_is_not_destroyed() {
        // SAFETY: each call gets live objects of the ones before, and places for its results.
        unsafe {
            let list = (PROVIDER.get_device_list)(ptr::null_mut());
            let context = (PROVIDER.open_device)(*list);
            (PROVIDER.free_device_list)(list);
            let pd = (PROVIDER.alloc_pd)(context);
            let cq = (PROVIDER.create_cq)(context, 4, ptr::null_mut(), ptr::null_mut(), 0);
            let mut init = ibv_srq_init_attr::zeroed();
            (init.attr.max_wr, init.attr.max_sge) = (4, 1);
            let srq = (PROVIDER.create_srq)(pd, &mut init);
            let mut init = ibv_qp_init_attr {
                send_cq: cq,
                recv_cq: cq,
                srq,
                qp_type: IBV_QPT_RC,
                ..ibv_qp_init_attr::zeroed()
            };
            init.cap.max_recv_wr = 7;
            let qp = (PROVIDER.create_qp)(pd, &mut init);
            assert_eq!(init.cap.max_recv_wr, 0);
            assert_eq!((*qp).srq, srq);
            assert_eq!((PROVIDER.destroy_srq)(srq), libc::EBUSY);
            assert_eq!((PROVIDER.destroy_qp)(qp), 0);
            assert_eq!((PROVIDER.dealloc_pd)(pd), libc::EBUSY);
            assert_eq!((PROVIDER.destroy_srq)(srq), 0);
            assert_eq!((PROVIDER.destroy_cq)(cq), 0);
            assert_eq!((PROVIDER.dealloc_pd)(pd), 0);
            assert_eq!((PROVIDER.close_device)(context), 0);
        }
    }
}
