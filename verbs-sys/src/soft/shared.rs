//! The C side of shared receive queues.

use core::ffi::c_int;
use std::sync::Arc;

use super::device::{context, is_inherited};
use super::objects::{Pd, code, pointer};
use super::srq::Srq;
use crate::ffi::*;

// Every function below keeps the contract of `Provider` or of `ibv_context_ops`: handles are live
// objects of this provider, other pointers are valid as the man page of the call says.

/// The queue behind a handle.
///
/// # Safety
///
/// The handle is a live shared receive queue of this provider.
#[inline]
unsafe fn srq<'a>(handle: *mut ibv_srq) -> &'a Srq {
    // SAFETY: the handle is the address of a `Srq` whose first field is the C structure.
    unsafe { &*handle.cast::<Srq>() }
}

pub(super) unsafe fn create_srq(handle: *mut ibv_pd, init: *mut ibv_srq_init_attr) -> *mut ibv_srq {
    // SAFETY: see above.
    let (pd, init) = unsafe { (&*handle.cast::<Pd>(), &*init) };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let mut fields = ibv_srq::zeroed();
        fields.context = pd.pd.context;
        fields.srq_context = init.srq_context;
        fields.pd = handle;
        let srq = Srq::new(process, &context.events, pd.id, fields, &init.attr)?;
        pd.enter();
        Ok(Arc::into_raw(srq).cast_mut().cast())
    }))
}

pub(super) unsafe fn modify_srq(
    handle: *mut ibv_srq,
    attr: *mut ibv_srq_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: see above.
    code(unsafe { srq(handle).modify(&*attr, mask as u32) })
}

pub(super) unsafe fn query_srq(handle: *mut ibv_srq, attr: *mut ibv_srq_attr) -> c_int {
    // SAFETY: see above.
    unsafe { attr.write(srq(handle).query()) };
    0
}

pub(super) unsafe fn destroy_srq(handle: *mut ibv_srq) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    if let Err(error) = unsafe { srq(handle) }.retire() {
        return error.raw_os_error();
    }
    // SAFETY: written at creation only; entered then, and the queue's domain outlives it.
    unsafe { Pd::leave((*handle).pd) };
    // SAFETY: the handle is the reference that `create_srq` gave out.
    drop(unsafe { Arc::from_raw(handle.cast::<Srq>().cast_const()) });
    0
}

pub(super) unsafe extern "C" fn post_srq_recv(
    handle: *mut ibv_srq,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: see above.
    match unsafe { srq(handle).post(wr) } {
        Ok(()) => 0,
        Err((code, wr)) => {
            // SAFETY: a place for the first request that was not posted, by the man page.
            unsafe { bad.write(wr) };
            code
        }
    }
}
