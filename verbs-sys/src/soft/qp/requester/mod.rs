//! The requester: executes send requests.
//!
//! One-sided requests are executed in the posting thread, by the copy they ask for. Messages go to
//! the peer's ring and end when the peer acknowledges them. A request that cannot be executed yet
//! (the ring is full, an earlier message is not acknowledged, the peer is not ready) is kept, and
//! executed by a later poll or by the upkeep thread. One that needs memory which its owner alone may
//! reach makes this and all later requests go through a socket (`qp/stream`).

mod execute;
mod injected;
mod known;
mod message;
mod post;
mod progress;
mod straight;
#[cfg(test)]
mod tests;
mod unfenced;
mod valid;
mod window;

use std::sync::atomic::Ordering;
use std::sync::{Mutex, PoisonError};

use self::injected::Judged;
pub(super) use self::injected::{CORRUPTED, spoil, spoil_bytes};
pub(super) use self::known::Ranges;
pub(in crate::soft) use self::window::Bind;

use super::queues::Outcome;
use super::{Guarded32, Guarded64, now_ns, state};
use crate::ffi::{
    IBV_WC_SUCCESS, ibv_ah, ibv_qp_attr, ibv_send_wr, ibv_sge, ibv_wc_opcode, ibv_wc_status,
};
use crate::soft::ah::{Ah, Route};

/// How long a peer that is known never to answer is waited for at most, whatever the attributes say: half a
/// second.
const MAX_SILENCE_NS: u64 = 500_000_000;

/// So many fruitless polls after a one-sided request that only the owner of the memory can execute, its process is
/// asked to: its program takes no part in such a request, and may not poll. If it does poll, it has been faster.
const OWNER_POLLS: u32 = 64;

/// What the requester remembers of its connection; guarded by the send lock.
#[derive(Debug, Default)]
pub(super) struct State {
    /// Where the next record goes in the peer's ring, counted in units for ever.
    ring_at: Guarded32,
    /// Up to where lines of that ring are cleared.
    ring_cleared: Guarded32,
    /// Units of the ring the peer has consumed, and messages it has acknowledged.
    consumed: Guarded32,
    pub(in crate::soft::qp) acked: Guarded32,
    /// Messages that records of the peer have acknowledged; written under the receive lock.
    pub(super) heard: Guarded32,
    /// Since when the peer has not been ready, or is known to be silent; or 0.
    pub(in crate::soft::qp) waiting_since: Guarded64,
    /// Nonzero while the oldest message in flight is an atomic whose result must be fetched.
    atomic: Guarded32,
    /// Fruitless polls until the owner of the memory is asked to execute what is in flight; 0: it need not be.
    hurry: Guarded32,
    /// The oldest unfinished request when the upkeep thread last looked, plus one.
    stalled: Guarded32,
    /// An arena that could not be mapped.
    unmappable: Guarded32,
    /// Nonzero while an event is owed for the end of what is under way in SQD.
    announces_drained: Guarded32,
    /// In SQD: behind the last request that was posted before.
    begun: Guarded32,
    /// Where faults are wanted: the next request.
    judged: Mutex<Option<Judged>>,
    sq_psn: Guarded32,
    rnr_retry: Guarded32,
    /// Nanoseconds to wait for a peer that does not answer; 0 is for ever.
    pub(in crate::soft::qp) patience_ns: Guarded64,
}

impl State {
    pub(super) fn reset(&self) {
        for word in [
            &self.ring_at,
            &self.ring_cleared,
            &self.consumed,
            &self.acked,
            &self.heard,
            &self.atomic,
            &self.hurry,
            &self.stalled,
            &self.unmappable,
            &self.announces_drained,
        ] {
            word.store(0, Ordering::Relaxed);
        }
        self.waiting_since.store(0, Ordering::Relaxed);
        *self.judged.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Nobody answers. Whether that has lasted for as long as a requester repeats its packets; `lost`: and
    /// nobody ever will. The send lock is held.
    pub(in crate::soft::qp) fn has_waited(&self, lost: bool) -> bool {
        let now = now_ns();
        let since = match self.waiting_since.load(Ordering::Relaxed) {
            0 => {
                self.waiting_since.store(now, Ordering::Relaxed);
                return false;
            }
            since => since,
        };
        let patience = match self.patience_ns.load(Ordering::Relaxed) {
            0 if lost => MAX_SILENCE_NS,
            0 => return false,
            patience if lost => patience.min(MAX_SILENCE_NS),
            patience => patience,
        };
        now.saturating_sub(since) > patience
    }

    /// A poll has found nothing. Whether it is time to ask the owner of the memory.
    #[inline]
    pub(in crate::soft::qp) fn shall_hurry(&self) -> bool {
        let left = self.hurry.load(Ordering::Relaxed);
        if left != 0 {
            self.hurry.store(left - 1, Ordering::Relaxed);
        }
        left == 1
    }

    /// Whether the oldest unfinished request is the one of the last look.
    pub(in crate::soft::qp) fn is_stalled(&self, oldest: u32) -> bool {
        let mark = oldest.wrapping_add(1);
        self.stalled.swap(mark, Ordering::Relaxed) == mark
    }

    /// The PSN of the first request.
    pub(in crate::soft::qp) fn sq_psn(&self) -> u32 {
        self.sq_psn.load(Ordering::Relaxed)
    }

    pub(in crate::soft::qp) fn rnr_retry(&self) -> u8 {
        self.rnr_retry.load(Ordering::Relaxed) as u8
    }

    /// Takes over what the attributes say about sending.
    pub(super) fn adopt(&self, attr: &ibv_qp_attr) {
        self.sq_psn
            .store(attr.sq_psn & 0xff_ffff, Ordering::Relaxed);
        self.rnr_retry
            .store(u32::from(attr.rnr_retry & 7), Ordering::Relaxed);
        let attempts = u64::from(attr.retry_cnt & 7) + 1;
        let wait = state::ack_timeout(attr.timeout).map_or(0, |wait| wait.as_nanos() as u64);
        self.patience_ns
            .store(wait.saturating_mul(attempts), Ordering::Relaxed);
    }
}

/// A send request, wherever it was kept.
#[derive(Clone, Copy, Debug)]
pub(in crate::soft::qp) struct Request<'a> {
    pub(in crate::soft::qp) opcode: u32,
    flags: u32,
    pub(in crate::soft::qp) imm: u32,
    /// Of a datagram: the address handle.
    pub(in crate::soft::qp) remote_addr: u64,
    /// Of a datagram: the destination.
    pub(in crate::soft::qp) rkey: u32,
    /// Of a datagram: the queue key.
    pub(in crate::soft::qp) compare_add: u64,
    pub(in crate::soft::qp) swap: u64,
    /// Of XRC: the number of the peer's shared receive queue.
    pub(in crate::soft::qp) srqn: u32,
    pub(in crate::soft::qp) sges: &'a [ibv_sge],
}

impl<'a> Request<'a> {
    /// What all requests have; what there is for some operations only is 0.
    #[inline(always)]
    pub(super) fn new(wr: &ibv_send_wr, sges: &'a [ibv_sge]) -> Self {
        Self {
            opcode: wr.opcode,
            flags: wr.send_flags,
            imm: wr.imm_data,
            remote_addr: 0,
            rkey: 0,
            compare_add: 0,
            swap: 0,
            srqn: 0,
            sges,
        }
    }
}

impl Request<'_> {
    pub(in crate::soft::qp) fn is(&self, flag: u32) -> bool {
        self.flags & flag != 0
    }

    pub(super) fn remote_qpn(&self) -> u32 {
        self.rkey & state::MASK_24
    }

    pub(super) fn remote_qkey(&self) -> u32 {
        self.compare_add as u32
    }

    /// Where a datagram goes.
    ///
    /// # Safety
    ///
    /// Its address handle is not destroyed yet.
    pub(super) unsafe fn route(&self) -> Route {
        // SAFETY: by the caller's promise.
        unsafe { Ah::route(self.remote_addr as usize as *const ibv_ah) }
    }
}

/// How far a request got.
pub(in crate::soft::qp) enum Step {
    Done(Outcome),
    /// In the peer's ring.
    Sent(Outcome),
    /// Not now.
    Wait,
    Failed(ibv_wc_status),
    /// The arena must be mapped first, without the lock.
    Map(u32),
    /// Not this way: its owner must reach the memory. Everything before has ended.
    GoOver,
}

/// What is owed once the send lock is released.
#[derive(Default)]
struct Owed {
    /// A message went to a queue pair of this process, which shall take it.
    local: bool,
    /// A completion became visible.
    completed: bool,
    failed: bool,
    map: Option<u32>,
    /// A connection for our requests must be made.
    dial: bool,
}

impl Owed {
    #[inline]
    fn is_due(&self) -> bool {
        self.local || self.failed || self.map.is_some() || self.dial
    }
}

/// The wake-ups that a burst of messages owes to the peer.
#[derive(Default)]
pub(super) struct Bell {
    due: bool,
    solicited: bool,
    local: bool,
    /// What the last record acknowledges, if anything.
    acknowledged: Option<u32>,
}

pub(in crate::soft::qp) fn success(opcode: ibv_wc_opcode, byte_len: u32) -> Outcome {
    Outcome {
        status: IBV_WC_SUCCESS,
        opcode,
        byte_len,
        imm: None,
        source: None,
    }
}

#[inline]
pub(super) fn total(sges: &[ibv_sge]) -> u64 {
    sges.iter().map(|sge| u64::from(sge.length)).sum()
}

/// A C list as a slice.
///
/// # Safety
///
/// `first` leads `len` readable elements, or `len` is 0.
#[inline]
pub(super) unsafe fn list<'a>(first: *const ibv_sge, len: u32) -> &'a [ibv_sge] {
    if len == 0 || first.is_null() {
        return &[];
    }
    // SAFETY: by the caller's promise.
    unsafe { std::slice::from_raw_parts(first, len as usize) }
}
