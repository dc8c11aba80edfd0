//! Building send requests.

use std::{ops::Range, ptr};

use super::{PostError, WorkKind};
use crate::{
    RemoteAddr, SendFlags, Sge,
    ffi::{self, ibv_send_wr, ibv_send_wr_atomic, ibv_send_wr_rdma, ibv_send_wr_wr, ibv_wr_opcode},
};

/// What makes one send request differ from another.
pub(super) struct Request {
    pub(super) kind: WorkKind,
    pub(super) opcode: ibv_wr_opcode,
    pub(super) flags: SendFlags,
    pub(super) imm: Option<u32>,
    pub(super) wr: ibv_send_wr_wr,
}

impl Request {
    #[inline]
    pub(super) fn send(flags: SendFlags, imm: Option<u32>) -> Self {
        let opcode = match imm {
            None => ffi::IBV_WR_SEND,
            Some(_) => ffi::IBV_WR_SEND_WITH_IMM,
        };
        let wr = rdma(RemoteAddr { addr: 0, rkey: 0 });
        Self {
            kind: WorkKind::Send,
            opcode,
            flags,
            imm,
            wr,
        }
    }

    #[inline]
    pub(super) fn read(remote: RemoteAddr) -> Self {
        Self::one_sided(WorkKind::Read, ffi::IBV_WR_RDMA_READ, None, rdma(remote))
    }

    #[inline]
    pub(super) fn write(remote: RemoteAddr, imm: Option<u32>) -> Self {
        let opcode = match imm {
            None => ffi::IBV_WR_RDMA_WRITE,
            Some(_) => ffi::IBV_WR_RDMA_WRITE_WITH_IMM,
        };
        Self::one_sided(WorkKind::Write, opcode, imm, rdma(remote))
    }

    pub(super) fn fetch_add(remote: RemoteAddr, add: u64) -> Self {
        let wr = atomic(remote, add, 0);
        Self::one_sided(WorkKind::Atomic, ffi::IBV_WR_ATOMIC_FETCH_AND_ADD, None, wr)
    }

    pub(super) fn compare_swap(remote: RemoteAddr, compare: u64, swap: u64) -> Self {
        let wr = atomic(remote, compare, swap);
        Self::one_sided(WorkKind::Atomic, ffi::IBV_WR_ATOMIC_CMP_AND_SWP, None, wr)
    }

    #[inline]
    fn one_sided(
        kind: WorkKind,
        opcode: ibv_wr_opcode,
        imm: Option<u32>,
        wr: ibv_send_wr_wr,
    ) -> Self {
        Self {
            kind,
            opcode,
            flags: SendFlags::empty(),
            imm,
            wr,
        }
    }
}

#[inline]
fn rdma(remote: RemoteAddr) -> ibv_send_wr_wr {
    ibv_send_wr_wr {
        rdma: ibv_send_wr_rdma {
            remote_addr: remote.addr,
            rkey: remote.rkey,
        },
    }
}

fn atomic(remote: RemoteAddr, compare_add: u64, swap: u64) -> ibv_send_wr_wr {
    let RemoteAddr {
        addr: remote_addr,
        rkey,
    } = remote;
    ibv_send_wr_wr {
        atomic: ibv_send_wr_atomic {
            remote_addr,
            compare_add,
            swap,
            rkey,
        },
    }
}

/// The bytes `range` of the buffer `whole`.
#[inline]
pub(super) fn part_of(whole: Sge, range: Range<usize>) -> Result<Sge, PostError> {
    if range.start > range.end || range.end > whole.length as usize {
        return Err(PostError::Range {
            range,
            len: whole.length,
        });
    }
    let length = (range.end - range.start) as u32;
    Ok(Sge {
        addr: whole.addr + range.start as u64,
        length,
        lkey: whole.lkey,
    })
}

/// Room to build a chain of READs or WRITEs in.
pub(super) struct Chain {
    requests: Vec<ibv_send_wr>,
    elements: Vec<Sge>,
}

// SAFETY: the pointers in the requests are set and used within one call.
unsafe impl Send for Chain {}
// SAFETY: as above; a shared reference gives no access to them.
unsafe impl Sync for Chain {}

impl Chain {
    pub(super) fn new(max: u32) -> Self {
        Self {
            requests: vec![ibv_send_wr::zeroed(); max as usize],
            elements: vec![Sge::default(); max as usize],
        }
    }

    /// Sets what the request at `place`, which is less than the maximum, copies between.
    pub(super) fn set(
        &mut self,
        place: usize,
        opcode: ibv_wr_opcode,
        sge: Sge,
        remote: RemoteAddr,
    ) {
        self.elements[place] = sge;
        self.requests[place].opcode = opcode;
        self.requests[place].wr = rdma(remote);
    }

    /// Makes a list of the first `len` requests, at least one and at most the maximum. All have the
    /// word `word`, but the last has the word `last` and is signaled.
    pub(super) fn link(&mut self, len: usize, word: u64, last: u64) -> *mut ibv_send_wr {
        let max = self.requests.len();
        let elements = self.elements.as_mut_ptr();
        let requests = self.requests.as_mut_ptr();
        // Through the pointer that the list will be read with, so that no reference comes between.
        for place in 0..len.min(max) {
            let is_last = place + 1 == len;
            // SAFETY: `place` is less than the number of requests.
            let request = unsafe { &mut *requests.add(place) };
            request.sg_list = elements.wrapping_add(place);
            request.num_sge = 1;
            request.wr_id = if is_last { last } else { word };
            request.send_flags = if is_last { ffi::IBV_SEND_SIGNALED } else { 0 };
            request.next = if is_last {
                ptr::null_mut()
            } else {
                requests.wrapping_add(place + 1)
            };
        }
        requests
    }

    /// Which request of the chain it is.
    pub(super) fn position(&self, request: *const ibv_send_wr) -> Option<usize> {
        self.requests
            .iter()
            .position(|candidate| ptr::eq(candidate, request))
    }
}
