//! The calls that make, change and destroy a context's objects, and its ops table: the C side of the
//! device.

mod completions;
mod device_memory;
mod domains;
mod prefetch;
mod queue_pairs;
mod regions;
mod windows;
mod xrc_domains;

use core::ffi::{c_int, c_void};

use rustix::io::Errno;

#[cfg(feature = "drop-in")]
pub(crate) use self::completions::take_cq_event;
pub(super) use self::completions::*;
pub(super) use self::device_memory::*;
pub(super) use self::domains::*;
pub(super) use self::prefetch::*;
pub(super) use self::queue_pairs::*;
pub(super) use self::regions::*;
pub(super) use self::xrc_domains::*;
#[cfg(any(feature = "drop-in", test))]
pub(crate) use self::{
    device_memory::{import_dm, unimport_dm},
    domains::{import_pd, unimport_pd},
    queue_pairs::qp_to_qp_ex,
    regions::{import_mr, reg_mr_iova, unimport_mr},
};
use super::ah::{self, Ah};
use super::device::{context, is_inherited};
use super::shared;
use crate::ffi::*;

/// The data path. What is missing is not supported, and says so.
pub(super) const OPS: ibv_context_ops = ibv_context_ops {
    post_send: Some(post_send),
    post_recv: Some(post_recv),
    poll_cq: Some(poll_cq),
    req_notify_cq: Some(req_notify_cq),
    alloc_mw: Some(windows::alloc_mw),
    bind_mw: Some(windows::bind_mw),
    dealloc_mw: Some(windows::dealloc_mw),
    post_srq_recv: Some(shared::post_srq_recv),
    ..ibv_context_ops::zeroed()
};

fn set_errno(error: Errno) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// What a call that gives a pointer returns on failure.
pub(super) fn null<T>(error: Errno) -> *mut T {
    set_errno(error);
    core::ptr::null_mut()
}

/// What a call that gives -1 on failure returns then.
pub(super) fn failed(error: Errno) -> c_int {
    set_errno(error);
    -1
}

pub(super) fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(null)
}

pub(super) fn code(result: Result<(), Errno>) -> c_int {
    result.map_or_else(Errno::raw_os_error, |()| 0)
}

// Every function below keeps the contract of `Provider` or of `ibv_context_ops`: handles are live
// objects of this provider, other pointers are valid as the man page of the call says.

pub(super) unsafe fn alloc_memory(handle: *mut ibv_context, len: usize) -> *mut c_void {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        let start = process.arenas.alloc(process.info(), len)?;
        Ok(start.cast())
    }))
}

pub(super) unsafe fn free_memory(handle: *mut ibv_context, start: *mut c_void, _: usize) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited(handle) } {
        return 0;
    }
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    code(context.process().and_then(|process| {
        process.arenas.free(process.info(), start as u64)?;
        for peer in process.peers() {
            // So that they unmap it.
            peer.kick();
        }
        Ok(())
    }))
}

pub(super) unsafe fn create_ah(handle: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: see above.
    let (pd, attr) = unsafe { (&*handle.cast::<Pd>(), &*attr) };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let ah = Ah::new(process, pd.pd.context, handle, attr)?;
        pd.enter();
        Ok(Box::into_raw(ah).cast())
    }))
}

pub(super) unsafe fn destroy_ah(handle: *mut ibv_ah) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    let pd = unsafe { ah::destroy(handle) };
    // SAFETY: entered when the address handle was made; its domain outlives it.
    unsafe { Pd::leave(pd) };
    0
}
