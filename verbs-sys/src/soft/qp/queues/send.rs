//! The send queue, and what it keeps for later.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};

use super::{HAS_COMPLETION, HAS_IMM, HAS_SOURCE, Outcome, Slots};
use crate::ffi::{ibv_sge, ibv_wc};

/// A send request kept for later, because what is before it has not ended.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::soft::qp) struct Kept {
    pub opcode: u32,
    pub flags: u32,
    pub imm: u32,
    pub num_sge: u32,
    pub inline_len: u32,
    pub rkey: u32,
    pub remote_addr: u64,
    pub compare_add: u64,
    pub swap: u64,
    pub srqn: u32,
}

/// Requests kept for later; untouched, and unlocked, while every request is executed at once.
#[derive(Debug)]
pub(in crate::soft::qp) struct Backlog {
    pub requests: Box<[Kept]>,
    pub sges: Box<[ibv_sge]>,
    pub inline: Box<[u8]>,
    pub max_sge: usize,
    pub max_inline: usize,
}

/// The send queue.
///
/// `done <= exec <= tail`: requests before `done` have ended, those up to `exec` are messages that
/// the peer has not acknowledged, those up to `tail` are kept for later.
#[derive(Debug)]
pub(in crate::soft::qp) struct SendQueue {
    slots: Slots,
    pub tail: AtomicU32,
    pub exec: AtomicU32,
    pub done: AtomicU32,
    /// Where the poller looks next, and up to where slots are free again: behind the last polled
    /// completion, since a request without one holds its slot until a later one is polled.
    scan: AtomicU32,
    head: AtomicU32,
    pub backlog: Mutex<Backlog>,
}

impl SendQueue {
    pub(in crate::soft::qp) fn new(limit: u32, max_sge: u32, max_inline: u32) -> Self {
        let slots = Slots::new(limit);
        let len = slots.slots.len();
        let (max_sge, max_inline) = (max_sge as usize, max_inline as usize);
        Self {
            backlog: Mutex::new(Backlog {
                requests: vec![Kept::default(); len].into(),
                sges: vec![ibv_sge::default(); len * max_sge].into(),
                inline: vec![0; len * max_inline].into(),
                max_sge,
                max_inline,
            }),
            slots,
            tail: AtomicU32::new(0),
            exec: AtomicU32::new(0),
            done: AtomicU32::new(0),
            scan: AtomicU32::new(0),
            head: AtomicU32::new(0),
        }
    }

    pub(in crate::soft::qp) fn reset(&self) {
        for index in [&self.tail, &self.exec, &self.done, &self.scan, &self.head] {
            index.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(in crate::soft::qp) fn is_full(&self, tail: u32) -> bool {
        self.room(tail) == 0
    }

    /// How many more requests it has room for.
    #[inline]
    pub(in crate::soft::qp) fn room(&self, tail: u32) -> u32 {
        let held = tail.wrapping_sub(self.head.load(Ordering::Acquire));
        self.slots.limit.saturating_sub(held)
    }

    /// Requests it has room for.
    pub(in crate::soft::qp) fn places(&self) -> u32 {
        self.slots.limit
    }

    /// Completions that wait to be polled. No poll is under way.
    pub(in crate::soft::qp) fn waiting(&self) -> u32 {
        let done = self.done.load(Ordering::Acquire);
        let mut scan = self.scan.load(Ordering::Relaxed);
        let mut found = 0;
        while scan != done {
            let outcome = self.slots.at(scan).outcome.load(Ordering::Relaxed);
            found += u32::from(outcome & HAS_COMPLETION != 0);
            scan = scan.wrapping_add(1);
        }
        found
    }

    /// Whether every request has begun.
    pub(in crate::soft::qp) fn is_begun(&self) -> bool {
        self.exec.load(Ordering::Relaxed) == self.tail.load(Ordering::Relaxed)
    }

    pub(in crate::soft::qp) fn index(&self, position: u32) -> usize {
        (position & self.slots.mask) as usize
    }

    #[inline]
    pub(in crate::soft::qp) fn start(&self, position: u32, wr_id: u64) {
        self.slots
            .at(position)
            .wr_id
            .store(wr_id, Ordering::Relaxed);
    }

    /// Writes a request that has ended at once; visible to the poller after [`end_at_once`](Self::end_at_once).
    #[inline(always)]
    pub(in crate::soft::qp) fn finish_at_once(
        &self,
        position: u32,
        wr_id: u64,
        outcome: Outcome,
        completion: bool,
    ) {
        let slot = self.slots.at(position);
        slot.wr_id.store(wr_id, Ordering::Relaxed);
        slot.finish(outcome, completion);
    }

    /// Publishes requests that have ended at once, up to here. None is unfinished.
    #[inline(always)]
    pub(in crate::soft::qp) fn end_at_once(&self, next: u32) {
        self.tail.store(next, Ordering::Relaxed);
        self.exec.store(next, Ordering::Relaxed);
        self.done.store(next, Ordering::Release);
    }

    /// Writes how a request ended; visible to the poller once `done` passes it.
    #[inline]
    pub(in crate::soft::qp) fn finish(&self, position: u32, outcome: Outcome, completion: bool) {
        self.slots.at(position).finish(outcome, completion);
    }

    /// Whether any of the requests from one position to another has a completion.
    pub(in crate::soft::qp) fn have_completion(&self, mut from: u32, to: u32) -> bool {
        while from != to {
            if self.slots.at(from).outcome.load(Ordering::Relaxed) & HAS_COMPLETION != 0 {
                return true;
            }
            from = from.wrapping_add(1);
        }
        false
    }

    /// Whether any request from one position up to another, where the queue had ended since, has a completion that
    /// waits or was polled. No poll is under way.
    pub(in crate::soft::qp) fn completed_between(&self, from: u32, to: u32) -> bool {
        let ended = to.wrapping_sub(from);
        let polled = self.head.load(Ordering::Relaxed).wrapping_sub(from);
        // `head` is behind a completion that was polled, and slots from there on hold what they held.
        (1..=ended).contains(&polled)
            || ended as usize > self.slots.slots.len()
            || self.have_completion(from, to)
    }

    /// Moves one completion out, if the next that there is is of the usual kind. Called by one poller at a time.
    #[inline(always)]
    pub(in crate::soft::qp) fn take_one(&self, wc: &mut ibv_wc, qp_num: u32) -> bool {
        let done = self.done.load(Ordering::Acquire);
        let mut scan = self.scan.load(Ordering::Relaxed);
        while scan != done {
            let slot = self.slots.at(scan);
            let word = slot.outcome.load(Ordering::Relaxed);
            scan = scan.wrapping_add(1);
            match word & (HAS_COMPLETION | HAS_IMM | HAS_SOURCE) {
                HAS_COMPLETION => {
                    slot.complete_plainly(wc, word, qp_num, 0);
                    self.head.store(scan, Ordering::Release);
                    self.scan.store(scan, Ordering::Relaxed);
                    return true;
                }
                0 => {}
                _ => return false,
            }
        }
        false
    }

    /// Moves completions out. Called by one poller at a time.
    #[inline(always)]
    pub(in crate::soft::qp) fn harvest(&self, wcs: &mut [ibv_wc], qp_num: u32) -> usize {
        let done = self.done.load(Ordering::Acquire);
        let mut scan = self.scan.load(Ordering::Relaxed);
        let mut filled = 0;
        while scan != done
            && let Some(wc) = wcs.get_mut(filled)
        {
            let completes = self.slots.at(scan).complete(wc, qp_num, 0);
            scan = scan.wrapping_add(1);
            if completes {
                filled += 1;
                self.head.store(scan, Ordering::Release);
            }
        }
        self.scan.store(scan, Ordering::Relaxed);
        filled
    }
}
