//! The receive queue.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::super::requester;
use super::{Outcome, Slots};
use crate::ffi::{ibv_recv_wr, ibv_sge, ibv_wc};
use crate::soft::keys;
use crate::soft::layout::{KeyEntry, MAX_KEYS};

/// The receive queue: `head <= done <= tail`.
#[derive(Debug)]
pub(in crate::soft) struct RecvQueue {
    slots: Slots,
    /// addr, then length | lkey << 32
    sges: Box<[[AtomicU64; 2]]>,
    num_sge: Box<[AtomicU32]>,
    max_sge: usize,
    /// One less than the number of element lists: receives wait for messages in that many slots.
    list_mask: u32,
    pub tail: AtomicU32,
    pub done: AtomicU32,
    head: AtomicU32,
}

impl RecvQueue {
    pub(in crate::soft) fn new(limit: u32, max_sge: u32) -> Self {
        Self::with_lists(limit, max_sge, limit)
    }

    /// For completions of at most `limit` receives that come one at a time from elsewhere.
    pub(in crate::soft::qp) fn fed_one_by_one(limit: u32, max_sge: u32) -> Self {
        Self::with_lists(limit, max_sge, 1)
    }

    fn with_lists(limit: u32, max_sge: u32, lists: u32) -> Self {
        let slots = Slots::new(limit);
        let lists = lists.max(1).next_power_of_two();
        let (len, max_sge) = (lists as usize, max_sge as usize);
        Self {
            slots,
            sges: (0..len * max_sge).map(|_| Default::default()).collect(),
            num_sge: (0..len).map(|_| AtomicU32::default()).collect(),
            max_sge,
            list_mask: lists - 1,
            tail: AtomicU32::new(0),
            done: AtomicU32::new(0),
            head: AtomicU32::new(0),
        }
    }

    pub(in crate::soft::qp) fn reset(&self) {
        for index in [&self.tail, &self.done, &self.head] {
            index.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(in crate::soft::qp) fn is_full(&self, tail: u32) -> bool {
        tail.wrapping_sub(self.head.load(Ordering::Acquire)) >= self.slots.limit
    }

    /// Requests it has room for.
    pub(in crate::soft::qp) fn places(&self) -> u32 {
        self.slots.limit
    }

    /// Completions that wait to be polled. No poll is under way.
    pub(in crate::soft::qp) fn waiting(&self) -> u32 {
        let done = self.done.load(Ordering::Acquire);
        done.wrapping_sub(self.head.load(Ordering::Relaxed))
    }

    /// Posts one request as ibv_post_recv(3) does. The queue's lock is held.
    ///
    /// # Safety
    ///
    /// The request's list is readable.
    #[inline(always)]
    pub(in crate::soft) unsafe fn post_request(
        &self,
        request: &ibv_recv_wr,
        max_sge: u32,
        keys: &[KeyEntry; MAX_KEYS],
    ) -> Result<(), i32> {
        let num_sge = match u32::try_from(request.num_sge) {
            Ok(n) if n <= max_sge => n,
            _ => return Err(libc::EINVAL),
        };
        let tail = self.tail.load(Ordering::Relaxed);
        if self.is_full(tail) {
            return Err(libc::ENOMEM);
        }
        // SAFETY: the list has `num_sge` elements by the caller's promise.
        let sges = unsafe { requester::list(request.sg_list, num_sge) };
        let posted = |sge: &ibv_sge| keys::posted(keys, *sge, true);
        self.post(tail, request.wr_id, sges.iter().map(posted));
        Ok(())
    }

    /// Moves the oldest posted receive to another queue, which has room and nothing else posted, and
    /// says how many are left; `None` if there was none. Both queues' locks are held.
    #[inline]
    pub(in crate::soft) fn move_oldest(&self, to: &Self) -> Option<u32> {
        let position = self.done.load(Ordering::Relaxed);
        let tail = self.tail.load(Ordering::Relaxed);
        if position == tail {
            return None;
        }
        let wr_id = self.slots.at(position).wr_id.load(Ordering::Relaxed);
        to.post(
            to.tail.load(Ordering::Relaxed),
            wr_id,
            self.buffers(position),
        );
        let next = position.wrapping_add(1);
        self.done.store(next, Ordering::Relaxed);
        // What moved away has no completion here.
        self.head.store(next, Ordering::Release);
        Some(tail.wrapping_sub(next))
    }

    /// Undoes [`move_oldest`](Self::move_oldest): the only receive posted to the other queue is the oldest of this
    /// one again. `false`: there is no room for it. Both queues' locks are held.
    pub(in crate::soft) fn move_back(&self, from: &Self) -> bool {
        if self.is_full(self.tail.load(Ordering::Relaxed)) {
            return false;
        }
        let theirs = from.done.load(Ordering::Relaxed);
        let position = self.done.load(Ordering::Relaxed).wrapping_sub(1);
        let wr_id = from.slots.at(theirs).wr_id.load(Ordering::Relaxed);
        self.write(position, wr_id, from.buffers(theirs));
        self.done.store(position, Ordering::Relaxed);
        self.head.store(position, Ordering::Release);
        from.tail.store(theirs, Ordering::Relaxed);
        true
    }

    /// Receives that are posted and not used.
    #[inline]
    pub(in crate::soft) fn posted(&self) -> u32 {
        let tail = self.tail.load(Ordering::Relaxed);
        tail.wrapping_sub(self.done.load(Ordering::Relaxed))
    }

    #[inline]
    fn post(&self, position: u32, wr_id: u64, sges: impl ExactSizeIterator<Item = ibv_sge>) {
        self.write(position, wr_id, sges);
        self.tail.store(position.wrapping_add(1), Ordering::Relaxed);
    }

    #[inline]
    fn write(&self, position: u32, wr_id: u64, sges: impl ExactSizeIterator<Item = ibv_sge>) {
        self.slots
            .at(position)
            .wr_id
            .store(wr_id, Ordering::Relaxed);
        let index = (position & self.list_mask) as usize;
        self.num_sge[index].store(sges.len() as u32, Ordering::Relaxed);
        for (place, sge) in self.sges[index * self.max_sge..].iter().zip(sges) {
            place[0].store(sge.addr, Ordering::Relaxed);
            place[1].store(
                u64::from(sge.length) | u64::from(sge.lkey) << 32,
                Ordering::Relaxed,
            );
        }
    }

    /// The buffers of a posted receive.
    #[inline]
    pub(in crate::soft::qp) fn buffers(
        &self,
        position: u32,
    ) -> impl ExactSizeIterator<Item = ibv_sge> + Clone {
        let index = (position & self.list_mask) as usize;
        let len = self.num_sge[index].load(Ordering::Relaxed) as usize;
        let first = index * self.max_sge;
        self.sges[first..first + len].iter().map(|place| {
            let word = place[1].load(Ordering::Relaxed);
            let addr = place[0].load(Ordering::Relaxed);
            ibv_sge {
                addr,
                length: word as u32,
                lkey: (word >> 32) as u32,
            }
        })
    }

    /// Ends the oldest posted receive and publishes its completion.
    #[inline]
    pub(in crate::soft::qp) fn complete(&self, position: u32, outcome: Outcome) {
        self.slots.at(position).finish(outcome, true);
        self.done.store(position.wrapping_add(1), Ordering::Release);
    }

    #[inline]
    pub(in crate::soft::qp) fn harvest(
        &self,
        wcs: &mut [ibv_wc],
        qp_num: u32,
        src_qp: u32,
    ) -> usize {
        let done = self.done.load(Ordering::Acquire);
        let mut head = self.head.load(Ordering::Relaxed);
        let mut filled = 0;
        while head != done
            && let Some(wc) = wcs.get_mut(filled)
        {
            filled += usize::from(self.slots.at(head).complete(wc, qp_num, src_qp));
            head = head.wrapping_add(1);
        }
        if filled > 0 {
            self.head.store(head, Ordering::Release);
        }
        filled
    }
}
