//! The two work queues of a queue pair. A slot holds its request until it is executed, then its
//! completion until that is polled.
//!
//! Slots are atomics: the send side is written under the send lock and the receive side under the
//! receive lock, while whoever polls the completion queue reads what was published before `done`.

mod recv;
mod send;

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::state;
use crate::ffi::{
    IBV_WC_GRH, IBV_WC_RECV, IBV_WC_SUCCESS, IBV_WC_WITH_IMM, IBV_WC_WITH_INV, ibv_wc,
    ibv_wc_opcode, ibv_wc_status,
};

pub(in crate::soft) use self::recv::RecvQueue;
pub(super) use self::send::{Kept, SendQueue};

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
