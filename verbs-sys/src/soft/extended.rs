//! The extended operations of a context, which C programs call through a table of their own.

#[cfg(test)]
mod tests;

use core::ffi::c_int;

use super::device;
use super::objects;
use super::shared;
use crate::ffi::*;

/// Puts what the device has into a context's table. What is missing is not supported, and the callers say
/// so.
pub(super) fn offer(verbs: &mut verbs_context) {
    verbs.query_device_ex = Some(query_device_ex);
    verbs.query_rt_values = Some(query_rt_values);
    verbs.create_cq_ex = Some(objects::create_cq_ex);
    verbs.modify_cq = Some(objects::modify_cq);
    verbs.create_qp_ex = Some(objects::create_qp_ex);
    verbs.open_xrcd = Some(objects::open_xrcd);
    verbs.close_xrcd = Some(objects::close_xrcd);
    verbs.create_srq_ex = Some(shared::create_srq_ex);
    verbs.get_srq_num = Some(shared::get_srq_num);
    verbs.alloc_td = Some(objects::alloc_td);
    verbs.dealloc_td = Some(objects::dealloc_td);
    verbs.alloc_parent_domain = Some(objects::alloc_parent_domain);
    verbs.alloc_dm = Some(objects::alloc_dm);
    verbs.free_dm = Some(objects::free_dm);
    verbs.reg_dm_mr = Some(objects::reg_dm_mr);
    verbs.alloc_null_mr = Some(objects::alloc_null_mr);
    verbs.advise_mr = Some(objects::advise_mr);
}

/// The device's clock is the machine's, in nanoseconds.
const CLOCK_KHZ: u64 = 1_000_000;

// Every function below keeps the contract of `verbs_context`: contexts are open ones of this provider, other
// pointers are valid as the man page of the call says.

/// ibv_query_device_ex(3) for a structure of so many bytes.
unsafe extern "C" fn query_device_ex(
    context: *mut ibv_context,
    input: *const ibv_query_device_ex_input,
    attr: *mut ibv_device_attr_ex,
    len: usize,
) -> c_int {
    // SAFETY: see above; the input may be null.
    if unsafe { input.as_ref() }.is_some_and(|input| input.comp_mask != 0) {
        return libc::EINVAL;
    }
    let mut filled = ibv_device_attr_ex::zeroed();
    // SAFETY: see above, and a place for the result.
    unsafe { device::query_device(context, &raw mut filled.orig_attr) };
    // What is not there yet is fetched when it is used, by any request.
    filled.odp_caps.general_caps = IBV_ODP_SUPPORT | IBV_ODP_SUPPORT_IMPLICIT;
    let messages = IBV_ODP_SUPPORT_SEND | IBV_ODP_SUPPORT_RECV | IBV_ODP_SUPPORT_SRQ_RECV;
    filled.odp_caps.ud_odp_caps = messages;
    filled.odp_caps.uc_odp_caps = messages | IBV_ODP_SUPPORT_WRITE;
    filled.odp_caps.rc_odp_caps =
        messages | IBV_ODP_SUPPORT_WRITE | IBV_ODP_SUPPORT_READ | IBV_ODP_SUPPORT_ATOMIC;
    filled.xrc_odp_caps = filled.odp_caps.rc_odp_caps;
    filled.hca_core_clock = CLOCK_KHZ;
    filled.device_cap_flags_ex = filled.orig_attr.device_cap_flags.into();
    filled.cq_mod_caps.max_cq_count = u16::MAX;
    filled.cq_mod_caps.max_cq_period = u16::MAX;
    filled.max_dm_size = objects::MAX_DEVICE_MEMORY as u64;
    filled.phys_port_cnt_ex = filled.orig_attr.phys_port_cnt.into();
    let known = len.min(size_of::<ibv_device_attr_ex>());
    // SAFETY: the place has `len` bytes, the result as many as are copied.
    unsafe {
        attr.cast::<u8>().write_bytes(0, len);
        core::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), attr.cast(), known);
    }
    0
}

/// ibv_query_rt_values_ex(3).
unsafe extern "C" fn query_rt_values(
    _context: *mut ibv_context,
    values: *mut ibv_values_ex,
) -> c_int {
    // SAFETY: see above.
    let values = unsafe { &mut *values };
    let has_clock = values.comp_mask & IBV_VALUES_MASK_RAW_CLOCK != 0;
    if has_clock {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicRaw);
        values.raw_clock = libc::timespec {
            tv_sec: now.tv_sec,
            tv_nsec: now.tv_nsec,
        };
    }
    values.comp_mask &= IBV_VALUES_MASK_RAW_CLOCK;
    0
}
