//! Work requests: ibv_post_send(3), ibv_post_recv(3).

use core::ffi::{c_int, c_uint, c_void};

use super::{ibv_ah, ibv_mw, ibv_mw_bind_info};

/// A scatter/gather element.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_sge {
    /// First byte.
    pub addr: u64,
    /// Bytes; 0 means 2^31 in IBTA's text but nothing here.
    pub length: u32,
    /// Key of the region it lies in; ignored for inline data.
    pub lkey: u32,
}

c_enum! {
    /// What a send request does.
    ibv_wr_opcode: c_uint {
        IBV_WR_RDMA_WRITE = 0,
        IBV_WR_RDMA_WRITE_WITH_IMM = 1,
        IBV_WR_SEND = 2,
        IBV_WR_SEND_WITH_IMM = 3,
        IBV_WR_RDMA_READ = 4,
        IBV_WR_ATOMIC_CMP_AND_SWP = 5,
        IBV_WR_ATOMIC_FETCH_AND_ADD = 6,
        IBV_WR_LOCAL_INV = 7,
        IBV_WR_BIND_MW = 8,
        IBV_WR_SEND_WITH_INV = 9,
        IBV_WR_TSO = 10,
        IBV_WR_DRIVER1 = 11,
        IBV_WR_ATOMIC_WRITE = 15,
    }
}

c_enum! {
    /// Bits of [`ibv_send_wr::send_flags`].
    ibv_send_flags: c_uint {
        /// Wait for earlier READs and atomics.
        IBV_SEND_FENCE = 1,
        /// Make a completion.
        IBV_SEND_SIGNALED = 1 << 1,
        /// Wake a receiver that waits for solicited events.
        IBV_SEND_SOLICITED = 1 << 2,
        /// Copy the bytes before returning; keys are ignored.
        IBV_SEND_INLINE = 1 << 3,
        IBV_SEND_IP_CSUM = 1 << 4,
    }
}

/// Target of a WRITE or READ.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_rdma {
    /// First byte in the peer's memory.
    pub remote_addr: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// Target and operands of an atomic.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_atomic {
    /// An 8-byte word in the peer's memory, aligned to 8.
    pub remote_addr: u64,
    /// What to compare with, or what to add.
    pub compare_add: u64,
    /// What to store if the comparison holds.
    pub swap: u64,
    /// The peer's key.
    pub rkey: u32,
}

/// Destination of a datagram.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_ud {
    /// Address handle.
    pub ah: *mut ibv_ah,
    /// The peer's queue pair.
    pub remote_qpn: u32,
    /// The peer's queue key.
    pub remote_qkey: u32,
}

/// The part of a send request that depends on its opcode.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_wr {
    /// For WRITE and READ.
    pub rdma: ibv_send_wr_rdma,
    /// For atomics.
    pub atomic: ibv_send_wr_atomic,
    /// For datagrams.
    pub ud: ibv_send_wr_ud,
}

/// The part of a send request that depends on the type of queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_qp_type {
    /// The peer's shared receive queue, for XRC.
    pub xrc: ibv_send_wr_xrc,
}

/// Target of an XRC request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_xrc {
    /// Number of the peer's shared receive queue.
    pub remote_srqn: u32,
}

/// A window to bind.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_bind_mw {
    /// The window.
    pub mw: *mut ibv_mw,
    /// Its new key.
    pub rkey: u32,
    /// What to bind to.
    pub bind_info: ibv_mw_bind_info,
}

/// A segmentation request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_send_wr_tso {
    /// The header to repeat.
    pub hdr: *mut c_void,
    /// Its bytes.
    pub hdr_sz: u16,
    /// Bytes of a segment.
    pub mss: u16,
}

/// The last part of a send request; an anonymous union in C.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_send_wr_extra {
    /// For [`IBV_WR_BIND_MW`].
    pub bind_mw: ibv_send_wr_bind_mw,
    /// For [`IBV_WR_TSO`].
    pub tso: ibv_send_wr_tso,
}

/// A send request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_send_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of the list, or null.
    pub next: *mut ibv_send_wr,
    /// The local bytes.
    pub sg_list: *mut ibv_sge,
    /// Elements of `sg_list`.
    pub num_sge: c_int,
    /// What to do.
    pub opcode: ibv_wr_opcode,
    /// [`ibv_send_flags`].
    pub send_flags: c_uint,
    /// Immediate in network byte order for opcodes with one; `invalidate_rkey` of C for those that
    /// invalidate.
    pub imm_data: u32,
    /// What the opcode needs.
    pub wr: ibv_send_wr_wr,
    /// What the type of queue pair needs.
    pub qp_type: ibv_send_wr_qp_type,
    /// What few opcodes need; has no name in C.
    pub extra: ibv_send_wr_extra,
}

/// A receive request.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_recv_wr {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// The next of the list, or null.
    pub next: *mut ibv_recv_wr,
    /// Where the message goes.
    pub sg_list: *mut ibv_sge,
    /// Elements of `sg_list`.
    pub num_sge: c_int,
}

/// An element of inline data, ibv_wr_set_inline_data_list(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_data_buf {
    /// First byte.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
}

zero_default!(ibv_send_wr, ibv_recv_wr, ibv_data_buf);
