//! The two work queues of a queue pair. A slot holds its request until it is executed, then its
//! completion until that is polled.
//!
//! Slots are atomics: the send side is written under the send lock and the receive side under the
//! receive lock, while whoever polls the completion queue reads what was published before `done`.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::{requester, state};
use crate::ffi::{
    IBV_WC_GRH, IBV_WC_RECV, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_recv_wr,
    ibv_sge, ibv_wc, ibv_wc_opcode, ibv_wc_status,
};
use crate::soft::keys;
use crate::soft::layout::{KeyEntry, MAX_KEYS};

/// How a request ended, as its completion will tell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Outcome {
    pub status: ibv_wc_status,
    pub opcode: ibv_wc_opcode,
    pub byte_len: u32,
    pub imm: Option<u32>,
    /// Of a datagram: the queue pair it came from.
    pub source: Option<u32>,
}

impl Outcome {
    pub(super) fn failed(status: ibv_wc_status) -> Self {
        Self {
            status,
            opcode: 0,
            byte_len: 0,
            imm: None,
            source: None,
        }
    }
}

#[derive(Debug, Default)]
struct Slot {
    wr_id: AtomicU64,
    /// status | opcode << 8 | the flags below | byte_len << 32
    outcome: AtomicU64,
    imm: AtomicU32,
    source: AtomicU32,
}

const HAS_IMM: u64 = 1 << 24;
const HAS_COMPLETION: u64 = 1 << 25;
const HAS_SOURCE: u64 = 1 << 26;
/// Beside [`IBV_WC_RECV`] in an [`Outcome`]: what came is not an immediate but a key that the message
/// has invalidated.
const INVALIDATED: ibv_wc_opcode = 1 << 15;

impl Slot {
    #[inline]
    fn finish(&self, outcome: Outcome, completion: bool) {
        let word = u64::from(outcome.status)
            | u64::from(outcome.opcode) << 8
            | if outcome.imm.is_some() { HAS_IMM } else { 0 }
            | if completion { HAS_COMPLETION } else { 0 }
            | if outcome.source.is_some() {
                HAS_SOURCE
            } else {
                0
            }
            | u64::from(outcome.byte_len) << 32;
        self.outcome.store(word, Ordering::Relaxed);
        if let Some(imm) = outcome.imm {
            self.imm.store(imm, Ordering::Relaxed);
        }
        if let Some(source) = outcome.source {
            self.source.store(source, Ordering::Relaxed);
        }
    }

    /// Writes the completion, if the request has one.
    #[inline(always)]
    fn complete(&self, wc: &mut ibv_wc, qp_num: u32, src_qp: u32) -> bool {
        let word = self.outcome.load(Ordering::Relaxed);
        if word & HAS_COMPLETION == 0 {
            return false;
        }
        self.complete_plainly(wc, word, qp_num, src_qp);
        if word & (HAS_IMM | HAS_SOURCE) != 0 {
            self.complete_rarer(wc, word);
        }
        true
    }

    /// What every completion has.
    #[inline(always)]
    fn complete_plainly(&self, wc: &mut ibv_wc, word: u64, qp_num: u32, src_qp: u32) {
        let status = (word & 0xff) as u32;
        let opcode = (word >> 8 & 0xffff) as u32 & !INVALIDATED;
        let byte_len = (word >> 32) as u32;
        // As few stores as may be: they fill the store buffer while those before wait for a line.
        let fields: [u64; size_of::<ibv_wc>() / 8] = [
            self.wr_id.load(Ordering::Relaxed),
            pair(status, opcode),
            pair(0, byte_len),
            pair(0, qp_num),
            pair(src_qp, 0),
            0,
        ];
        // SAFETY: as large and as aligned, and any bytes make an `ibv_wc`; the fields are in its order.
        unsafe { std::ptr::from_mut(wc).cast::<[u64; 6]>().write(fields) };
    }

    /// What few completions have.
    fn complete_rarer(&self, wc: &mut ibv_wc, word: u64) {
        if word & HAS_IMM != 0 {
            wc.imm_data = self.imm.load(Ordering::Relaxed);
            wc.wc_flags |= match (word >> 8) as u32 & INVALIDATED {
                0 => IBV_WC_WITH_IMM,
                _ => IBV_WC_WITH_INV,
            };
        }
        if word & HAS_SOURCE != 0 {
            let source = self.source.load(Ordering::Relaxed);
            wc.src_qp = source & state::MASK_24;
            wc.sl = (source >> 24) as u8;
            wc.wc_flags |= IBV_WC_GRH;
        }
    }
}

/// Two fields of a C structure that follow each other in eight bytes.
#[inline(always)]
fn pair(first: u32, second: u32) -> u64 {
    let (first, second) = (u64::from(first), u64::from(second));
    if cfg!(target_endian = "little") {
        first | second << 32
    } else {
        first << 32 | second
    }
}

/// Positions count up for ever; a slot's index is its position modulo the number of slots.
#[derive(Debug)]
struct Slots {
    slots: Box<[Slot]>,
    mask: u32,
    limit: u32,
}

impl Slots {
    fn new(limit: u32) -> Self {
        let len = limit.max(1).next_power_of_two();
        Self {
            slots: (0..len).map(|_| Slot::default()).collect(),
            mask: len - 1,
            limit,
        }
    }

    #[inline]
    fn at(&self, position: u32) -> &Slot {
        // SAFETY: as many slots as a power of two, which the mask is one less than.
        unsafe { self.slots.get_unchecked((position & self.mask) as usize) }
    }
}

/// A send request kept for later, because what is before it has not ended.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Kept {
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
pub(super) struct Backlog {
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
pub(super) struct SendQueue {
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
    pub(super) fn new(limit: u32, max_sge: u32, max_inline: u32) -> Self {
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

    pub(super) fn reset(&self) {
        for index in [&self.tail, &self.exec, &self.done, &self.scan, &self.head] {
            index.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn is_full(&self, tail: u32) -> bool {
        self.room(tail) == 0
    }

    /// How many more requests it has room for.
    #[inline]
    pub(super) fn room(&self, tail: u32) -> u32 {
        let held = tail.wrapping_sub(self.head.load(Ordering::Acquire));
        self.slots.limit.saturating_sub(held)
    }

    /// Requests it has room for.
    pub(super) fn places(&self) -> u32 {
        self.slots.limit
    }

    /// Completions that wait to be polled. No poll is under way.
    pub(super) fn waiting(&self) -> u32 {
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
    pub(super) fn is_begun(&self) -> bool {
        self.exec.load(Ordering::Relaxed) == self.tail.load(Ordering::Relaxed)
    }

    pub(super) fn index(&self, position: u32) -> usize {
        (position & self.slots.mask) as usize
    }

    #[inline]
    pub(super) fn start(&self, position: u32, wr_id: u64) {
        self.slots
            .at(position)
            .wr_id
            .store(wr_id, Ordering::Relaxed);
    }

    /// Writes a request that has ended at once; visible to the poller after [`end_at_once`](Self::end_at_once).
    #[inline(always)]
    pub(super) fn finish_at_once(
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
    pub(super) fn end_at_once(&self, next: u32) {
        self.tail.store(next, Ordering::Relaxed);
        self.exec.store(next, Ordering::Relaxed);
        self.done.store(next, Ordering::Release);
    }

    /// Writes how a request ended; visible to the poller once `done` passes it.
    #[inline]
    pub(super) fn finish(&self, position: u32, outcome: Outcome, completion: bool) {
        self.slots.at(position).finish(outcome, completion);
    }

    /// Whether any of the requests from one position to another has a completion.
    pub(super) fn have_completion(&self, mut from: u32, to: u32) -> bool {
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
    pub(super) fn completed_between(&self, from: u32, to: u32) -> bool {
        let ended = to.wrapping_sub(from);
        let polled = self.head.load(Ordering::Relaxed).wrapping_sub(from);
        // `head` is behind a completion that was polled, and slots from there on hold what they held.
        (1..=ended).contains(&polled)
            || ended as usize > self.slots.slots.len()
            || self.have_completion(from, to)
    }

    /// Moves one completion out, if the next that there is is of the usual kind. Called by one poller at a time.
    #[inline(always)]
    pub(super) fn take_one(&self, wc: &mut ibv_wc, qp_num: u32) -> bool {
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
    pub(super) fn harvest(&self, wcs: &mut [ibv_wc], qp_num: u32) -> usize {
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
    pub(super) fn fed_one_by_one(limit: u32, max_sge: u32) -> Self {
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

    pub(super) fn reset(&self) {
        for index in [&self.tail, &self.done, &self.head] {
            index.store(0, Ordering::Relaxed);
        }
    }

    #[inline]
    pub(super) fn is_full(&self, tail: u32) -> bool {
        tail.wrapping_sub(self.head.load(Ordering::Acquire)) >= self.slots.limit
    }

    /// Requests it has room for.
    pub(super) fn places(&self) -> u32 {
        self.slots.limit
    }

    /// Completions that wait to be polled. No poll is under way.
    pub(super) fn waiting(&self) -> u32 {
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
    pub(super) fn buffers(&self, position: u32) -> impl ExactSizeIterator<Item = ibv_sge> + Clone {
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
    pub(super) fn complete(&self, position: u32, outcome: Outcome) {
        self.slots.at(position).finish(outcome, true);
        self.done.store(position.wrapping_add(1), Ordering::Release);
    }

    #[inline]
    pub(super) fn harvest(&self, wcs: &mut [ibv_wc], qp_num: u32, src_qp: u32) -> usize {
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

/// A successful receive.
pub(super) fn received(byte_len: u32, imm: Option<u32>) -> Outcome {
    Outcome {
        status: IBV_WC_SUCCESS,
        opcode: IBV_WC_RECV,
        byte_len,
        imm,
        source: None,
    }
}

/// A successful receive of a message that has invalidated a key.
pub(super) fn received_invalidating(byte_len: u32, key: u32) -> Outcome {
    Outcome {
        opcode: IBV_WC_RECV | INVALIDATED,
        ..received(byte_len, Some(key))
    }
}
