//! Protection domains, memory regions and windows, address handles: ibv_alloc_pd(3), ibv_reg_mr(3),
//! ibv_alloc_mw(3), ibv_create_ah(3).

use core::ffi::{c_int, c_uint, c_void};

use super::{ibv_context, ibv_gid};

/// A protection domain: what may be used together.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_pd {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// Number in the provider.
    pub handle: u32,
}

c_enum! {
    /// What local and remote work may do to a region: bits for ibv_reg_mr(3) and for
    /// [`ibv_qp_attr::qp_access_flags`](super::ibv_qp_attr::qp_access_flags).
    ibv_access_flags: c_uint {
        IBV_ACCESS_LOCAL_WRITE = 1,
        IBV_ACCESS_REMOTE_WRITE = 1 << 1,
        IBV_ACCESS_REMOTE_READ = 1 << 2,
        IBV_ACCESS_REMOTE_ATOMIC = 1 << 3,
        IBV_ACCESS_MW_BIND = 1 << 4,
        IBV_ACCESS_ZERO_BASED = 1 << 5,
        IBV_ACCESS_ON_DEMAND = 1 << 6,
        IBV_ACCESS_HUGETLB = 1 << 7,
        IBV_ACCESS_FLUSH_GLOBAL = 1 << 8,
        IBV_ACCESS_FLUSH_PERSISTENT = 1 << 9,
        /// First of the optional flags, which a device may ignore.
        IBV_ACCESS_RELAXED_ORDERING = 1 << 20,
    }
}

/// A registered memory region.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mr {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The protection domain it belongs to.
    pub pd: *mut ibv_pd,
    /// First byte.
    pub addr: *mut c_void,
    /// Bytes.
    pub length: usize,
    /// Number in the provider.
    pub handle: u32,
    /// Key for local scatter/gather elements.
    pub lkey: u32,
    /// Key for remote access.
    pub rkey: u32,
}

c_enum! {
    /// What ibv_rereg_mr(3) changes.
    ibv_rereg_mr_flags: c_uint {
        IBV_REREG_MR_CHANGE_TRANSLATION = 1,
        IBV_REREG_MR_CHANGE_PD = 1 << 1,
        IBV_REREG_MR_CHANGE_ACCESS = 1 << 2,
    }
}

c_enum! {
    /// How ibv_rereg_mr(3) fails.
    ibv_rereg_mr_err_code: c_int {
        /// The arguments are wrong; the region is as before.
        IBV_REREG_MR_ERR_INPUT = -1,
        /// The new range cannot be kept from child processes; the region is as before.
        IBV_REREG_MR_ERR_DONT_FORK_NEW = -2,
        /// The region is as wanted, but the old range is still kept from child processes.
        IBV_REREG_MR_ERR_DO_FORK_OLD = -3,
        /// The device refused; the region is good for nothing but deregistering.
        IBV_REREG_MR_ERR_CMD = -4,
        /// The same, and the new range is still kept from child processes.
        IBV_REREG_MR_ERR_CMD_AND_DO_FORK_NEW = -5,
    }
}

c_enum! {
    /// Types of memory window.
    ibv_mw_type: c_uint {
        /// Bound by ibv_bind_mw(3).
        IBV_MW_TYPE_1 = 1,
        /// Bound by a work request.
        IBV_MW_TYPE_2 = 2,
    }
}

/// A memory window.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The protection domain it belongs to.
    pub pd: *mut ibv_pd,
    /// Key for remote access.
    pub rkey: u32,
    /// Number in the provider.
    pub handle: u32,
    /// Its type; `type` in C.
    pub type_: ibv_mw_type,
}

/// The range a window is bound to.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw_bind_info {
    /// The region.
    pub mr: *mut ibv_mr,
    /// First byte.
    pub addr: u64,
    /// Bytes.
    pub length: u64,
    /// [`ibv_access_flags`].
    pub mw_access_flags: c_uint,
}

/// A request of ibv_bind_mw(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_mw_bind {
    /// Comes back in the completion.
    pub wr_id: u64,
    /// [`ibv_send_flags`](super::ibv_send_flags).
    pub send_flags: c_uint,
    /// What to bind to.
    pub bind_info: ibv_mw_bind_info,
}

/// The key after `rkey`: its lowest byte is the caller's to choose, the rest names the window.
/// ibv_inc_rkey(3).
#[must_use]
pub const fn ibv_inc_rkey(rkey: u32) -> u32 {
    (rkey & !0xff) | (rkey.wrapping_add(1) & 0xff)
}

/// The global part of an address.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_global_route {
    /// Destination.
    pub dgid: ibv_gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Index of the source in the port's GID table.
    pub sgid_index: u8,
    /// Hops left.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// Global route header as it stands in front of a received datagram.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_grh {
    /// Version, traffic class and flow label, network byte order.
    pub version_tclass_flow: u32,
    /// Payload length, network byte order.
    pub paylen: u16,
    /// Next header.
    pub next_hdr: u8,
    /// Hops left.
    pub hop_limit: u8,
    /// Source.
    pub sgid: ibv_gid,
    /// Destination.
    pub dgid: ibv_gid,
}

/// The address of a remote port.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_ah_attr {
    /// Global part, valid if `is_global` is not 0.
    pub grh: ibv_global_route,
    /// Destination's local identifier, unused on RoCE.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Path bits of the source.
    pub src_path_bits: u8,
    /// Limit of the rate, encoded; 0 for none.
    pub static_rate: u8,
    /// Whether `grh` counts.
    pub is_global: u8,
    /// Local port, counted from 1.
    pub port_num: u8,
}

/// An address handle.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_ah {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The protection domain it belongs to.
    pub pd: *mut ibv_pd,
    /// Number in the provider.
    pub handle: u32,
}

zero_default!(
    ibv_pd,
    ibv_mr,
    ibv_mw,
    ibv_mw_bind_info,
    ibv_mw_bind,
    ibv_global_route,
    ibv_grh,
    ibv_ah_attr,
    ibv_ah
);
