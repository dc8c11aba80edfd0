//! What is to know about operations.

use verbs_sys::{AccessFlags, ffi};

/// For the text of a program.
pub fn name(opcode: ffi::ibv_wr_opcode) -> &'static str {
    match opcode {
        ffi::IBV_WR_RDMA_WRITE => "WRITE",
        ffi::IBV_WR_RDMA_WRITE_WITH_IMM => "WRITE_IMM",
        ffi::IBV_WR_SEND => "SEND",
        ffi::IBV_WR_SEND_WITH_IMM => "SEND_IMM",
        ffi::IBV_WR_RDMA_READ => "READ",
        ffi::IBV_WR_ATOMIC_CMP_AND_SWP => "CMP_SWAP",
        ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => "FETCH_ADD",
        ffi::IBV_WR_LOCAL_INV => "LOCAL_INV",
        ffi::IBV_WR_SEND_WITH_INV => "SEND_INV",
        _ => "?",
    }
}

pub fn is_atomic(opcode: ffi::ibv_wr_opcode) -> bool {
    matches!(
        opcode,
        ffi::IBV_WR_ATOMIC_CMP_AND_SWP | ffi::IBV_WR_ATOMIC_FETCH_AND_ADD
    )
}

/// Whether bytes come back.
pub fn is_answered(opcode: ffi::ibv_wr_opcode) -> bool {
    is_atomic(opcode) || opcode == ffi::IBV_WR_RDMA_READ
}

pub fn takes_receive(opcode: ffi::ibv_wr_opcode) -> bool {
    matches!(
        opcode,
        ffi::IBV_WR_SEND
            | ffi::IBV_WR_SEND_WITH_IMM
            | ffi::IBV_WR_SEND_WITH_INV
            | ffi::IBV_WR_RDMA_WRITE_WITH_IMM
    )
}

/// The right that a peer needs.
pub fn right(opcode: ffi::ibv_wr_opcode) -> AccessFlags {
    match opcode {
        ffi::IBV_WR_RDMA_READ => AccessFlags::REMOTE_READ,
        ffi::IBV_WR_ATOMIC_CMP_AND_SWP | ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => {
            AccessFlags::REMOTE_ATOMIC
        }
        _ => AccessFlags::REMOTE_WRITE,
    }
}
