//! Calls that real devices answer, and the software device does not.

use core::ffi::c_int;

use super::real::{Missing, theirs};
use crate::ffi::*;

/// Exports calls that have a result of their own for an object of ours.
macro_rules! real_only {
    ($($name:ident($first:ident: $of:ty $(, $arg:ident: $type:ty)*) -> $result:ty, or $ours:expr;)+) => {$(
        #[doc = concat!(stringify!($name), "(3): not of the software device.")]
        ///
        /// # Safety
        ///
        /// As the man page says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($first: $of $(, $arg: $type)*) -> $result {
            theirs!($first, $name($first: $of $(, $arg: $type)*) -> $result);
            let _ = ($($arg,)*);
            $ours
        }
    )+};
}

real_only! {
    ibv_get_device_index(device: *mut ibv_device) -> c_int, or -1;
    ibv_attach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int, or libc::EOPNOTSUPP;
    ibv_detach_mcast(qp: *mut ibv_qp, gid: *const ibv_gid, lid: u16) -> c_int, or libc::EOPNOTSUPP;
    ibv_query_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int, or libc::EOPNOTSUPP;
    ibv_set_ece(qp: *mut ibv_qp, ece: *mut ibv_ece) -> c_int, or libc::EOPNOTSUPP;
    ibv_resolve_eth_l2_from_gid(context: *mut ibv_context, attr: *mut ibv_ah_attr, mac: *mut u8, vlan: *mut u16) -> c_int, or libc::EOPNOTSUPP;
    ibv_reg_dmabuf_mr(pd: *mut ibv_pd, offset: u64, len: usize, iova: u64, fd: c_int, access: c_int) -> *mut ibv_mr, or Missing::missing();
    ibv_query_qp_data_in_order(qp: *mut ibv_qp, opcode: c_int, flags: u32) -> c_int, or 0;
}
