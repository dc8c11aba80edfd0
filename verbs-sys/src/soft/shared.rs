//! The C side of shared receive queues.

use core::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;

use super::cq::Cq;
use super::device::{context, is_inherited};
use super::objects::{Pd, code, pointer, share};
use super::srq::Srq;
use super::xrc;
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
        let srq = Srq::new(process, &context.events, pd.id, fields, &init.attr, None)?;
        pd.enter();
        Ok(Arc::into_raw(srq).cast_mut().cast())
    }))
}

/// ibv_create_srq_ex(3): one without a type, or of an XRC domain.
pub(super) unsafe extern "C" fn create_srq_ex(
    handle: *mut ibv_context,
    init: *mut ibv_srq_init_attr_ex,
) -> *mut ibv_srq {
    // SAFETY: see above.
    let init = unsafe { &*init };
    let has = |bit| init.comp_mask & bit == bit;
    let known = (IBV_SRQ_INIT_ATTR_TM << 1) - 1;
    let srq_type = if has(IBV_SRQ_INIT_ATTR_TYPE) {
        init.srq_type
    } else {
        IBV_SRQT_BASIC
    };
    if init.comp_mask & !known != 0 || !matches!(srq_type, IBV_SRQT_BASIC | IBV_SRQT_XRC) {
        return pointer(Err(Errno::OPNOTSUPP));
    }
    // SAFETY: live objects or null, by the man page.
    let pd = unsafe { init.pd.as_ref() };
    if !has(IBV_SRQ_INIT_ATTR_PD) || pd.is_none_or(|pd| pd.context != handle) {
        return pointer(Err(Errno::INVAL));
    }
    if srq_type == IBV_SRQT_XRC {
        // SAFETY: see above.
        return pointer(unsafe { create_xrc_srq(handle, init) });
    }
    let mut plain = ibv_srq_init_attr {
        srq_context: init.srq_context,
        attr: init.attr,
    };
    // SAFETY: see above.
    unsafe { create_srq(init.pd, &raw mut plain) }
}

/// # Safety
///
/// The context is open, the protection domain live; the others are live or null.
unsafe fn create_xrc_srq(
    handle: *mut ibv_context,
    init: &ibv_srq_init_attr_ex,
) -> Result<*mut ibv_srq, Errno> {
    let needed = IBV_SRQ_INIT_ATTR_XRCD | IBV_SRQ_INIT_ATTR_CQ;
    if init.comp_mask & needed != needed {
        return Err(Errno::INVAL);
    }
    // SAFETY: by the caller's promise.
    let (context, pd) = unsafe { (context(handle), &*init.pd.cast::<Pd>()) };
    // SAFETY: by the caller's promise.
    let xrcd = unsafe { init.xrcd.cast::<xrc::Handle>().as_ref() }.ok_or(Errno::INVAL)?;
    if init.cq.is_null() || xrcd.xrcd.context != handle {
        return Err(Errno::INVAL);
    }
    // SAFETY: the handle is a reference of its own.
    let cq = unsafe { share(init.cq.cast::<Cq>()) };
    if cq.context() != handle || cq.is_broken() {
        return Err(Errno::INVAL);
    }
    let mut fields = ibv_srq::zeroed();
    (fields.context, fields.srq_context, fields.pd) = (handle, init.srq_context, init.pd);
    let (process, events) = (context.process()?, &context.events);
    let member = xrcd.enter();
    let xrc = Some((member.clone(), &cq));
    let srq = Srq::new(process, events, pd.id, fields, &init.attr, xrc)
        .inspect_err(|_| member.leave())?;
    pd.enter();
    Ok(Arc::into_raw(srq).cast_mut().cast())
}

/// ibv_get_srq_num(3).
pub(super) unsafe extern "C" fn get_srq_num(handle: *mut ibv_srq, number: *mut u32) -> c_int {
    // SAFETY: see above.
    let Some(port) = unsafe { srq(handle) }.port() else {
        return libc::EINVAL;
    };
    // SAFETY: a place for the result, by the man page.
    unsafe { number.write(port.number) };
    0
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
