//! Memory windows: ibv_alloc_mw(3), ibv_bind_mw(3).

use core::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use super::super::device::{context, is_inherited};
use super::super::qp::{Bind, Qp};
use super::{Pd, pointer};
use crate::ffi::*;

// Every function below keeps the contract of `ibv_context_ops`: handles are live objects of this
// provider, other pointers are valid as the man page of the call says.

pub(super) unsafe extern "C" fn alloc_mw(handle: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let rkey = process.windows.alloc(process, pd.id, type_)?;
        pd.enter();
        Ok(Box::into_raw(Box::new(ibv_mw {
            context: pd.pd.context,
            pd: handle,
            rkey,
            handle: rkey >> 8,
            type_,
        })))
    }))
}

/// Refuses at once what rdma-core's providers do; the rest is for the completion to tell.
pub(super) unsafe extern "C" fn bind_mw(
    qp: *mut ibv_qp,
    window: *mut ibv_mw,
    bind: *mut ibv_mw_bind,
) -> c_int {
    // SAFETY: see above; the field is written at creation only.
    let (qp, type_, pd) = unsafe { (&*qp.cast::<Qp>(), (*window).type_, (*window).pd) };
    // SAFETY: see above.
    let bind = unsafe { &*bind };
    let info = &bind.bind_info;
    let names_nothing = info.mr.is_null() && (info.addr != 0 || info.length != 0);
    if type_ != IBV_MW_TYPE_1 || names_nothing {
        return libc::EINVAL;
    }
    // SAFETY: a handle of this provider, by the man page.
    let number = |pd: *mut ibv_pd| unsafe { (*pd).handle };
    // SAFETY: see above.
    if unsafe { info.mr.as_ref() }.is_some_and(|region| number(region.pd) != number(pd)) {
        return libc::EPERM;
    }
    // SAFETY: a field of a live window, aligned as a u32 is; it is accessed as an atomic here, and
    // by the application only when it does not bind.
    let rkey = unsafe { AtomicU32::from_ptr(&raw mut (*window).rkey) };
    let next = ibv_inc_rkey(rkey.load(Ordering::Relaxed));
    // SAFETY: see above.
    let posted = unsafe { Bind::new(next, info) }
        .and_then(|checked| qp.post_bind(bind.wr_id, bind.send_flags, &checked));
    match posted {
        Ok(()) => {
            rkey.store(next, Ordering::Relaxed);
            0
        }
        Err(code) => code,
    }
}

pub(super) unsafe extern "C" fn dealloc_mw(handle: *mut ibv_mw) -> c_int {
    // SAFETY: see above.
    let window = unsafe { *handle };
    // SAFETY: a window's context outlives it.
    if unsafe { is_inherited(window.context) } {
        return 0;
    }
    // SAFETY: as above.
    if let Ok(process) = unsafe { context(window.context) }.process()
        && let Err(error) = process.windows.dealloc(process, window.handle)
    {
        return error.raw_os_error();
    }
    // SAFETY: see above; it is freed once, since the call succeeds.
    drop(unsafe { Box::from_raw(handle) });
    // SAFETY: entered when the window was made; a window's domain outlives it.
    unsafe { Pd::leave(window.pd) };
    0
}
