//! The calls of libibverbs that the software device answers, under the names of the C library.

use core::ffi::{c_int, c_void};

use super::real::theirs;
use crate::ffi::*;
use crate::soft::{self, PROVIDER};

/// Exports calls of the provider: same arguments, same results. The first argument tells whose they are.
macro_rules! forward {
    ($($name:ident = $call:ident($first:ident: $of:ty $(, $arg:ident: $type:ty)*) -> $result:ty;)+) => {$(
        #[doc = concat!(stringify!($name), "(3).")]
        ///
        /// # Safety
        ///
        /// As the man page says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($first: $of $(, $arg: $type)*) -> $result {
            theirs!($first, $name($first: $of $(, $arg: $type)*) -> $result);
            // SAFETY: the provider's contract is the man page's.
            unsafe { (PROVIDER.$call)($first $(, $arg)*) }
        }
    )+};
}

forward! {
    ibv_get_device_guid = get_device_guid(device: *mut ibv_device) -> u64;
    ibv_query_device = query_device(context: *mut ibv_context, attr: *mut ibv_device_attr) -> c_int;
    ibv_query_gid = query_gid(context: *mut ibv_context, port: u8, index: c_int, gid: *mut ibv_gid) -> c_int;
    ibv_query_pkey = query_pkey(context: *mut ibv_context, port: u8, index: c_int, pkey: *mut u16) -> c_int;
    ibv_alloc_pd = alloc_pd(context: *mut ibv_context) -> *mut ibv_pd;
    ibv_dealloc_pd = dealloc_pd(pd: *mut ibv_pd) -> c_int;
    ibv_reg_mr = reg_mr(pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> *mut ibv_mr;
    ibv_rereg_mr = rereg_mr(mr: *mut ibv_mr, flags: c_int, pd: *mut ibv_pd, addr: *mut c_void, len: usize, access: c_int) -> c_int;
    ibv_dereg_mr = dereg_mr(mr: *mut ibv_mr) -> c_int;
    ibv_create_ah = create_ah(pd: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah;
    ibv_destroy_ah = destroy_ah(ah: *mut ibv_ah) -> c_int;
    ibv_create_comp_channel = create_comp_channel(context: *mut ibv_context) -> *mut ibv_comp_channel;
    ibv_destroy_comp_channel = destroy_comp_channel(channel: *mut ibv_comp_channel) -> c_int;
    ibv_ack_cq_events = ack_cq_events(cq: *mut ibv_cq, events: u32) -> ();
    ibv_create_cq = create_cq(context: *mut ibv_context, cqe: c_int, cq_context: *mut c_void, channel: *mut ibv_comp_channel, vector: c_int) -> *mut ibv_cq;
    ibv_resize_cq = resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int;
    ibv_destroy_cq = destroy_cq(cq: *mut ibv_cq) -> c_int;
    ibv_create_qp = create_qp(pd: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp;
    ibv_modify_qp = modify_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int;
    ibv_query_qp = query_qp(qp: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int, init: *mut ibv_qp_init_attr) -> c_int;
    ibv_destroy_qp = destroy_qp(qp: *mut ibv_qp) -> c_int;
    ibv_create_srq = create_srq(pd: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq;
    ibv_modify_srq = modify_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr, mask: c_int) -> c_int;
    ibv_query_srq = query_srq(srq: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int;
    ibv_destroy_srq = destroy_srq(srq: *mut ibv_srq) -> c_int;
}

/// Bytes of the structure that callers of the symbol know: all but what came later.
const OLD_PORT_ATTR: usize = 48;

/// ibv_query_port(3), as a symbol. Callers that know the whole structure use the operation of the context.
///
/// # Safety
///
/// As the man page says; `attr` has 48 bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_query_port(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
) -> c_int {
    theirs!(context, ibv_query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int);
    // SAFETY: by the caller's promise.
    unsafe { query_port_sized(context, port, attr, OLD_PORT_ATTR) }
}

/// ibv_query_port(3) for a structure of so many bytes.
///
/// # Safety
///
/// As the man page says; `attr` has `len` bytes.
pub(crate) unsafe extern "C" fn query_port_sized(
    context: *mut ibv_context,
    port: u8,
    attr: *mut ibv_port_attr,
    len: usize,
) -> c_int {
    let mut filled = ibv_port_attr::zeroed();
    // SAFETY: by the caller's promise, and a place for the result.
    let code = unsafe { (PROVIDER.query_port)(context, port, &raw mut filled) };
    if code == 0 {
        let len = len.min(size_of::<ibv_port_attr>());
        // SAFETY: both have so many bytes.
        unsafe {
            core::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), attr.cast(), len);
        }
    }
    code
}

/// ibv_reg_mr_iova(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut ibv_mr {
    theirs!(pd, ibv_reg_mr_iova(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: c_int) -> *mut ibv_mr);
    // SAFETY: as here.
    unsafe { ibv_reg_mr_iova2(pd, addr, len, iova, access as u32) }
}

/// ibv_reg_mr(3) as its macro calls it where the access flags are no constant.
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_reg_mr_iova2(
    pd: *mut ibv_pd,
    addr: *mut c_void,
    len: usize,
    iova: u64,
    access: u32,
) -> *mut ibv_mr {
    theirs!(pd, ibv_reg_mr_iova2(pd: *mut ibv_pd, addr: *mut c_void, len: usize, iova: u64, access: u32) -> *mut ibv_mr);
    // The upper bits say what a device may leave out.
    let access = access & (IBV_ACCESS_OPTIONAL_FIRST - 1);
    // SAFETY: by the caller's promise.
    unsafe { soft::reg_mr_iova(pd, addr, len, iova, access as c_int) }
}

/// `IBV_ACCESS_OPTIONAL_FIRST`.
const IBV_ACCESS_OPTIONAL_FIRST: u32 = 1 << 20;

pub(super) fn set_errno(code: c_int) {
    // SAFETY: the place is this thread's.
    unsafe { *libc::__errno_location() = code };
}

/// Exports calls that only C programs make: same arguments, same results.
macro_rules! export {
    ($($name:ident = $call:ident($first:ident: $of:ty $(, $arg:ident: $type:ty)*) -> $result:ty;)+) => {$(
        #[doc = concat!(stringify!($name), "(3).")]
        ///
        /// # Safety
        ///
        /// As the man page says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($first: $of $(, $arg: $type)*) -> $result {
            theirs!($first, $name($first: $of $(, $arg: $type)*) -> $result);
            // SAFETY: the contract is the man page's.
            unsafe { soft::$call($first $(, $arg)*) }
        }
    )+};
}

export! {
    ibv_qp_to_qp_ex = qp_to_qp_ex(qp: *mut ibv_qp) -> *mut ibv_qp_ex;
    ibv_import_pd = import_pd(context: *mut ibv_context, handle: u32) -> *mut ibv_pd;
    ibv_unimport_pd = unimport_pd(pd: *mut ibv_pd) -> ();
    ibv_import_mr = import_mr(pd: *mut ibv_pd, handle: u32) -> *mut ibv_mr;
    ibv_unimport_mr = unimport_mr(mr: *mut ibv_mr) -> ();
    ibv_import_dm = import_dm(context: *mut ibv_context, handle: u32) -> *mut ibv_dm;
    ibv_unimport_dm = unimport_dm(dm: *mut ibv_dm) -> ();
}

/// ibv_init_ah_from_wc(3): 0, or -1.
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_init_ah_from_wc(
    context: *mut ibv_context,
    port: u8,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    attr: *mut ibv_ah_attr,
) -> c_int {
    theirs!(context, ibv_init_ah_from_wc(context: *mut ibv_context, port: u8, wc: *mut ibv_wc, grh: *mut ibv_grh, attr: *mut ibv_ah_attr) -> c_int);
    // SAFETY: by the caller's promise.
    match unsafe { soft::init_ah_from_wc(context, port, &*wc, grh) } {
        Some(found) => {
            // SAFETY: a place for the result.
            unsafe { attr.write(found) };
            0
        }
        None => -1,
    }
}

/// ibv_create_ah_from_wc(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_create_ah_from_wc(
    pd: *mut ibv_pd,
    wc: *mut ibv_wc,
    grh: *mut ibv_grh,
    port: u8,
) -> *mut ibv_ah {
    theirs!(pd, ibv_create_ah_from_wc(pd: *mut ibv_pd, wc: *mut ibv_wc, grh: *mut ibv_grh, port: u8) -> *mut ibv_ah);
    // SAFETY: by the caller's promise.
    match unsafe { soft::init_ah_from_wc((*pd).context, port, &*wc, grh) } {
        // SAFETY: as above.
        Some(mut attr) => unsafe { (PROVIDER.create_ah)(pd, &raw mut attr) },
        None => {
            set_errno(libc::EINVAL);
            core::ptr::null_mut()
        }
    }
}

/// ibv_get_pkey_index(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_pkey_index(
    context: *mut ibv_context,
    port: u8,
    pkey: u16,
) -> c_int {
    theirs!(context, ibv_get_pkey_index(context: *mut ibv_context, port: u8, pkey: u16) -> c_int);
    let mut found = 0;
    // SAFETY: by the caller's promise, and a place for the result.
    let code = unsafe { (PROVIDER.query_pkey)(context, port, 0, &raw mut found) };
    if code == 0 && found == pkey { 0 } else { -1 }
}
