//! XRC domains.

use core::ffi::c_int;

use super::super::device::{context, is_inherited};
use super::super::xrc::Handle;
use super::pointer;
use crate::ffi::*;

// Every function below keeps the contract of `verbs_context`: handles are live objects of this provider, other
// pointers are valid as the man page of the call says.

/// ibv_open_xrcd(3).
pub(in crate::soft) unsafe extern "C" fn open_xrcd(
    handle: *mut ibv_context,
    attr: *mut ibv_xrcd_init_attr,
) -> *mut ibv_xrcd {
    // SAFETY: see above.
    let (context, attr) = unsafe { (context(handle), &*attr) };
    let opened = Handle::open(context, handle, attr);
    pointer(opened.map(|xrcd| Box::into_raw(xrcd).cast()))
}

/// Fails with `EBUSY` while something that was made by this handle is there.
pub(in crate::soft) unsafe extern "C" fn close_xrcd(handle: *mut ibv_xrcd) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    if unsafe { &*handle.cast::<Handle>() }.is_used() {
        return libc::EBUSY;
    }
    // SAFETY: boxed by `open_xrcd`, and closed once.
    drop(unsafe { Box::from_raw(handle.cast::<Handle>()) });
    0
}
