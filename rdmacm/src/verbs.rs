//! The verbs that the connection manager calls: those of whatever `libibverbs.so.1` the process has, so
//! that both libraries share one device. Tests have a device of their own in their place.

#![allow(clippy::missing_safety_doc)] // the man pages

#[cfg(not(test))]
use core::ffi::{c_int, c_void};

#[cfg(not(test))]
use verbs_sys::ffi::{
    ibv_comp_channel, ibv_context, ibv_cq, ibv_device, ibv_device_attr, ibv_gid, ibv_pd,
    ibv_port_attr, ibv_qp, ibv_qp_attr, ibv_qp_init_attr, ibv_srq, ibv_srq_init_attr,
};

/// Declares the calls, of the C library or of the tests' device.
macro_rules! calls {
    ($(fn $name:ident($($arg:ident: $type:ty),*) $(-> $result:ty)?;)+) => {
        #[cfg(not(test))]
        unsafe extern "C" {$(
            #[doc = concat!(stringify!($name), "(3).")]
            pub fn $name($($arg: $type),*) $(-> $result)?;
        )+}

        #[cfg(test)]
        pub use crate::fake::{$($name),+};
    };
}

calls! {
    fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device;
    fn ibv_free_device_list(list: *mut *mut ibv_device);
    fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context;
    fn ibv_query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    fn ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int;
    fn ibv_query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    fn ibv_alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    fn ibv_create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    fn ibv_destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    fn ibv_create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int) -> *mut ibv_cq;
    fn ibv_destroy_cq(cq: *mut ibv_cq) -> c_int;
    fn ibv_create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    fn ibv_modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    fn ibv_destroy_qp(qp: *mut ibv_qp) -> c_int;
    fn ibv_create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    fn ibv_destroy_srq(srq: *mut ibv_srq) -> c_int;
}
