//! Executing requests among faults that are made on purpose (`soft/injection.rs`).

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use super::super::stream::pieces;
use super::super::{Qp, now_ns};
use super::window::is_about_window;
use super::{Bell, Request, Step, success, total};
use crate::copy;
use crate::ffi::*;
use crate::soft::injection::{Fate, Injector};

/// Beside the flags of a request: a bit of its data is to be changed on the way.
pub(in crate::soft::qp) const CORRUPTED: u32 = 1 << 31;

/// The request that is next, and what becomes of it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Judged {
    position: u32,
    fate: Fate,
    /// Not to be executed before; 0 is at once.
    until_ns: u64,
}

impl Qp {
    /// As [`execute`](Self::execute), but for what is wanted to go wrong. The send lock is held.
    #[cold]
    pub(super) fn execute_among_faults(
        &self,
        injector: &Injector,
        position: u32,
        request: &Request<'_>,
        bell: &mut Bell,
    ) -> Step {
        if is_about_window(request.opcode) {
            return self.execute(position, request, bell);
        }
        let Judged { fate, until_ns, .. } = self.judge_request(injector, position, request);
        if now_ns() < until_ns {
            return Step::Wait;
        }
        if fate.is_lost {
            return self.lose_request(position, request);
        }
        if fate.finds_no_receive && self.requester.rnr_retry() != 7 {
            return Step::Failed(IBV_WC_RNR_RETRY_EXC_ERR);
        }
        if !fate.is_corrupted {
            return self.execute(position, request, bell);
        }
        let corrupted = Request {
            flags: request.flags | CORRUPTED,
            ..*request
        };
        let step = self.execute(position, &corrupted, bell);
        if let Step::Done(outcome) = step {
            match request.opcode {
                IBV_WR_RDMA_WRITE => self.spoil_written(request, bell),
                // SAFETY: the elements were checked, and written to, under the send lock, which is held.
                IBV_WR_RDMA_READ => unsafe {
                    spoil(request.sges.iter().copied(), total(request.sges))
                },
                // A datagram is changed before it goes.
                _ => {}
            }
            return Step::Done(outcome);
        }
        step
    }

    /// What becomes of the request, which may have been asked before.
    fn judge_request(&self, injector: &Injector, position: u32, request: &Request<'_>) -> Judged {
        let mut judged = self
            .requester
            .judged
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(judged) = *judged
            && judged.position == position
        {
            return judged;
        }
        let is_message = matches!(
            request.opcode,
            IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV | IBV_WR_RDMA_WRITE_WITH_IMM
        );
        let has_data = (is_message
            || matches!(request.opcode, IBV_WR_RDMA_WRITE | IBV_WR_RDMA_READ))
            && total(request.sges) > 0;
        let needs_receive = is_message && self.is_reliable();
        let fate = injector.next_request(has_data, needs_receive);
        tracing::debug!(qpn = self.qpn, position, ?fate, "among injected faults");
        let new = Judged {
            position,
            fate,
            until_ns: fate.delay.map_or(0, |by| now_ns() + by.as_nanos() as u64),
        };
        *judged = Some(new);
        new
    }

    /// Nobody hears of the request, nor of its repetitions.
    fn lose_request(&self, position: u32, request: &Request<'_>) -> Step {
        if !self.is_reliable() {
            return untold(request);
        }
        if self.sq.done.load(Ordering::Relaxed) != position {
            return Step::Wait;
        }
        self.unanswered(true)
    }

    /// Writes one byte of what was written once more, changed.
    fn spoil_written(&self, request: &Request<'_>, bell: &mut Bell) {
        let at = spoilt_byte(total(request.sges));
        let Some((from, _)) = pieces(request.sges.iter().copied(), at, 1).next() else {
            return;
        };
        let mut byte = 0u8;
        // SAFETY: the element was checked under the send lock, which is held, or is inline data.
        unsafe { copy::read_shared(&raw mut byte, from, 1) };
        byte ^= 1;
        let element = [ibv_sge {
            addr: &raw const byte as u64,
            length: 1,
            lkey: 0,
        }];
        let again = Request {
            flags: request.flags | IBV_SEND_INLINE,
            remote_addr: request.remote_addr.wrapping_add(at),
            sges: &element,
            ..*request
        };
        // Nothing is in flight: it was executed at once.
        let position = self.sq.done.load(Ordering::Relaxed);
        let _ = self.execute(position, &again, bell);
    }
}

/// Which byte of a message is changed.
fn spoilt_byte(len: u64) -> u64 {
    len / 2
}

/// Changes a bit of a message that was written to these buffers.
///
/// # Safety
///
/// The elements that hold its `len` bytes are writable, and checked under a lock that is held.
pub(in crate::soft::qp) unsafe fn spoil(buffers: impl Iterator<Item = ibv_sge>, len: u64) {
    if let Some((at, _)) = pieces(buffers, spoilt_byte(len), 1).next() {
        let mut byte = 0u8;
        // SAFETY: by the caller's promise.
        unsafe {
            copy::read_shared(&raw mut byte, at, 1);
            byte ^= 1;
            copy::write_shared(at, &raw const byte, 1);
        }
    }
}

/// Changes a bit of a message in this process's own hands.
pub(in crate::soft::qp) fn spoil_bytes(bytes: &mut [u8]) {
    let at = spoilt_byte(bytes.len() as u64) as usize;
    if let Some(byte) = bytes.get_mut(at) {
        *byte ^= 1;
    }
}

/// A request that ends well whatever has become of it: without acknowledgements nobody learns.
pub(super) fn untold(request: &Request<'_>) -> Step {
    let opcode = match request.opcode {
        IBV_WR_SEND | IBV_WR_SEND_WITH_IMM | IBV_WR_SEND_WITH_INV => IBV_WC_SEND,
        _ => IBV_WC_RDMA_WRITE,
    };
    Step::Done(success(opcode, total(request.sges) as u32))
}
