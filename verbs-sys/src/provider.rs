//! What a handle asks of the device it stands for.
//!
//! The control calls have the signatures and conventions of libibverbs: a call that gives a pointer
//! returns null and sets `errno` on failure, a call that gives an `int` returns 0 or a positive
//! errno value. The data path does not pass through here: it goes through
//! [`ibv_context::ops`](crate::ffi::ibv_context::ops), one indirect call from the handle.

use core::ffi::{c_int, c_void};

use crate::ffi::{
    ibv_ah, ibv_ah_attr, ibv_async_event, ibv_comp_channel, ibv_context, ibv_cq, ibv_device,
    ibv_device_attr, ibv_gid, ibv_mr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr,
    ibv_srq, ibv_srq_attr, ibv_srq_init_attr,
};

/// The control calls of one kind of device.
///
/// Contract of every function: pointers are live objects of this provider, made by the matching
/// call and not yet destroyed, or valid for the reads and writes that the man page describes.
pub(crate) struct Provider {
    /// Whether its devices are software in this process.
    pub(crate) is_software: bool,

    /// ibv_fork_init(3).
    pub(crate) fork_init: fn() -> c_int,
    /// ibv_get_device_list(3). Null with `ENOSYS`: this system has no such devices.
    pub(crate) get_device_list: unsafe fn(*mut c_int) -> *mut *mut ibv_device,
    /// ibv_free_device_list(3). Devices that are open stay usable.
    pub(crate) free_device_list: unsafe fn(*mut *mut ibv_device),
    /// ibv_get_device_guid(3), network byte order.
    pub(crate) get_device_guid: unsafe fn(*mut ibv_device) -> u64,
    /// ibv_open_device(3).
    pub(crate) open_device: unsafe fn(*mut ibv_device) -> *mut ibv_context,
    /// ibv_close_device(3).
    pub(crate) close_device: unsafe fn(*mut ibv_context) -> c_int,
    /// ibv_query_device(3).
    pub(crate) query_device: unsafe fn(*mut ibv_context, *mut ibv_device_attr) -> c_int,
    /// ibv_query_port(3).
    pub(crate) query_port: unsafe fn(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int,
    /// ibv_query_gid(3).
    pub(crate) query_gid: unsafe fn(*mut ibv_context, u8, c_int, *mut ibv_gid) -> c_int,
    /// ibv_query_pkey(3), network byte order.
    pub(crate) query_pkey: unsafe fn(*mut ibv_context, u8, c_int, *mut u16) -> c_int,

    /// ibv_get_async_event(3): 0, or -1 with `errno`.
    pub(crate) get_async_event: unsafe fn(*mut ibv_context, *mut ibv_async_event) -> c_int,
    /// ibv_ack_async_event(3).
    pub(crate) ack_async_event: unsafe fn(*mut ibv_async_event),

    /// Page-aligned zeroed memory of the given bytes that this device reaches best; null and
    /// `errno` on failure.
    pub(crate) alloc_memory: unsafe fn(*mut ibv_context, usize) -> *mut c_void,
    /// Frees what `alloc_memory` gave, with the same length. Nothing may be registered in it.
    pub(crate) free_memory: unsafe fn(*mut ibv_context, *mut c_void, usize) -> c_int,

    /// ibv_alloc_pd(3).
    pub(crate) alloc_pd: unsafe fn(*mut ibv_context) -> *mut ibv_pd,
    /// ibv_dealloc_pd(3).
    pub(crate) dealloc_pd: unsafe fn(*mut ibv_pd) -> c_int,
    /// ibv_reg_mr(3).
    pub(crate) reg_mr: unsafe fn(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr,
    /// ibv_rereg_mr(3): 0, or an `IBV_REREG_MR_ERR_*` and `errno`.
    pub(crate) rereg_mr:
        unsafe fn(*mut ibv_mr, c_int, *mut ibv_pd, *mut c_void, usize, c_int) -> c_int,
    /// ibv_dereg_mr(3).
    pub(crate) dereg_mr: unsafe fn(*mut ibv_mr) -> c_int,

    /// ibv_create_ah(3).
    pub(crate) create_ah: unsafe fn(*mut ibv_pd, *mut ibv_ah_attr) -> *mut ibv_ah,
    /// ibv_destroy_ah(3).
    pub(crate) destroy_ah: unsafe fn(*mut ibv_ah) -> c_int,

    /// ibv_create_comp_channel(3).
    pub(crate) create_comp_channel: unsafe fn(*mut ibv_context) -> *mut ibv_comp_channel,
    /// ibv_destroy_comp_channel(3).
    pub(crate) destroy_comp_channel: unsafe fn(*mut ibv_comp_channel) -> c_int,
    /// ibv_get_cq_event(3): 0, or -1 with `errno`.
    pub(crate) get_cq_event:
        unsafe fn(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int,
    /// ibv_ack_cq_events(3).
    pub(crate) ack_cq_events: unsafe fn(*mut ibv_cq, u32),

    /// ibv_create_cq(3).
    pub(crate) create_cq: unsafe fn(
        *mut ibv_context,
        c_int,
        *mut c_void,
        *mut ibv_comp_channel,
        c_int,
    ) -> *mut ibv_cq,
    /// ibv_resize_cq(3).
    pub(crate) resize_cq: unsafe fn(*mut ibv_cq, c_int) -> c_int,
    /// ibv_destroy_cq(3).
    pub(crate) destroy_cq: unsafe fn(*mut ibv_cq) -> c_int,

    /// ibv_create_qp(3).
    pub(crate) create_qp: unsafe fn(*mut ibv_pd, *mut ibv_qp_init_attr) -> *mut ibv_qp,
    /// ibv_modify_qp(3).
    pub(crate) modify_qp: unsafe fn(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int,
    /// ibv_query_qp(3).
    pub(crate) query_qp:
        unsafe fn(*mut ibv_qp, *mut ibv_qp_attr, c_int, *mut ibv_qp_init_attr) -> c_int,
    /// ibv_destroy_qp(3).
    pub(crate) destroy_qp: unsafe fn(*mut ibv_qp) -> c_int,

    /// ibv_create_srq(3).
    pub(crate) create_srq: unsafe fn(*mut ibv_pd, *mut ibv_srq_init_attr) -> *mut ibv_srq,
    /// ibv_modify_srq(3).
    pub(crate) modify_srq: unsafe fn(*mut ibv_srq, *mut ibv_srq_attr, c_int) -> c_int,
    /// ibv_query_srq(3).
    pub(crate) query_srq: unsafe fn(*mut ibv_srq, *mut ibv_srq_attr) -> c_int,
    /// ibv_destroy_srq(3).
    pub(crate) destroy_srq: unsafe fn(*mut ibv_srq) -> c_int,
}

/// Every provider of this build, real devices first.
pub(crate) static PROVIDERS: &[&Provider] = &[
    #[cfg(feature = "rdma-core")]
    &crate::rdma_core::PROVIDER,
    &crate::soft::PROVIDER,
];

/// The addresses of port 1 of a real device that can be routed to, if that is known.
pub(crate) fn routable_gids(device: &crate::Device) -> Option<Vec<(u8, crate::Gid)>> {
    #[cfg(feature = "rdma-core")]
    if !device.is_software() {
        return crate::rdma_core::routable_gids(&device.name());
    }
    let _ = device;
    None
}
