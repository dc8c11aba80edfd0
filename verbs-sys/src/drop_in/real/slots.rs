//! Functions in a context that programs call inline and that say in `errno` why they fail.
//!
//! Those of a real device set `errno` of the other C library, which the program does not see. So each context has ours
//! in their place, which carry it over. Those that tell by their result, as all of the data path do, stay as they are.

use core::ffi::{c_uint, c_void};
use core::mem::{offset_of, transmute};
use std::collections::BTreeMap;
use std::sync::{PoisonError, RwLock};

use super::handle::Open;
use super::{Missing, loaded};
use crate::ffi::*;

/// What was in the contexts that are open, by their addresses.
static SAVED: RwLock<BTreeMap<usize, Saved>> = RwLock::new(BTreeMap::new());

/// Puts our functions into a context of a real device; null is none.
///
/// # Safety
///
/// The context was just opened by the system's library, and nobody else knows it.
pub(in crate::drop_in) unsafe fn watch(context: *mut ibv_context) {
    if context.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    let saved = unsafe { replace(context) };
    let mut all = SAVED.write().unwrap_or_else(PoisonError::into_inner);
    all.insert(context.addr(), saved);
}

/// Forgets a context that is about to be closed.
pub(in crate::drop_in) fn forget(context: *mut ibv_context) {
    let mut all = SAVED.write().unwrap_or_else(PoisonError::into_inner);
    all.remove(&context.addr());
}

fn saved(context: *mut ibv_context) -> Option<Saved> {
    let all = SAVED.read().unwrap_or_else(PoisonError::into_inner);
    all.get(&context.addr()).copied()
}

/// Defines our functions, and how they get into a context. Behind `in` is the part of the context.
macro_rules! slots {
    (
        $($name:ident($first:ident: $of:ty $(, $arg:ident: $type:ty)*) in $place:ident;)+
    ) => {
        /// The functions that were in a context before.
        #[derive(Clone, Copy, Default)]
        struct Saved {
            $($name: ibv_unused_fn,)+
        }

        /// Puts ours in the places of those that there are.
        ///
        /// # Safety
        ///
        /// As for [`watch`].
        unsafe fn replace(context: *mut ibv_context) -> Saved {
            let mut saved = Saved::default();
            $(
                // SAFETY: by the caller's promise.
                if let Some(place) = unsafe { $place(context, offset_of!($place, $name)) } {
                    // SAFETY: a function's place in the context.
                    unsafe {
                        saved.$name = place.read();
                        if saved.$name.is_some() {
                            let ours: unsafe extern "C" fn($of $(, $type)*) -> *mut c_void = $name;
                            place.write(Some(transmute::<*const (), unsafe extern "C" fn()>(ours as *const ())));
                        }
                    }
                }
            )+
            saved
        }

        $(
            unsafe extern "C" fn $name($first: $of $(, $arg: $type)*) -> *mut c_void {
                // SAFETY: a live object of an open context, by the man page.
                let context: *mut ibv_context = unsafe { $first.context() };
                let before = saved(context).and_then(|saved| saved.$name);
                let (Some(real), Some(before)) = (loaded(), before) else {
                    return Missing::missing();
                };
                // SAFETY: it was in the place of a function with this signature.
                let before = unsafe {
                    transmute::<unsafe extern "C" fn(), unsafe extern "C" fn($of $(, $type)*) -> *mut c_void>(before)
                };
                let _inside = real.enter();
                // SAFETY: the caller's promise to it.
                unsafe { before($first $(, $arg)*) }
            }
        )+
    };
}

/// The place of a function in the older part of a context.
///
/// # Safety
///
/// The context is open.
unsafe fn ibv_context_ops(context: *mut ibv_context, offset: usize) -> Option<*mut ibv_unused_fn> {
    // SAFETY: a field of the context, and a function in it.
    Some(unsafe { (&raw mut (*context).ops).byte_add(offset).cast() })
}

/// The place of a function in the newer part, if the context has one that reaches so far.
///
/// # Safety
///
/// The context is open.
unsafe fn verbs_context(context: *mut ibv_context, offset: usize) -> Option<*mut ibv_unused_fn> {
    // SAFETY: an open context.
    if unsafe { (*context).abi_compat } != __VERBS_ABI_IS_EXTENDED {
        return None;
    }
    // It may be shorter than ours, at the front: only what it says that it has is touched.
    let outer: *mut verbs_context = context
        .wrapping_byte_sub(offset_of!(verbs_context, context))
        .cast();
    let size: *const usize = outer
        .wrapping_byte_add(offset_of!(verbs_context, sz))
        .cast();
    // SAFETY: the size lies right before the context, as the mark says.
    let size = unsafe { size.read() };
    (size_of::<verbs_context>() - offset <= size).then(|| outer.wrapping_byte_add(offset).cast())
}

slots! {
    alloc_mw(pd: *mut ibv_pd, kind: ibv_mw_type) in ibv_context_ops;
    alloc_null_mr(pd: *mut ibv_pd) in verbs_context;
    create_counters(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    reg_dm_mr(pd: *mut ibv_pd, dm: *mut ibv_dm, offset: u64, len: usize, access: c_uint) in verbs_context;
    alloc_dm(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_flow_action_esp(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    alloc_parent_domain(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    alloc_td(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_rwq_ind_table(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_wq(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_cq_ex(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    ibv_create_flow(qp: *mut ibv_qp, attr: *mut c_void) in verbs_context;
    open_qp(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_qp_ex(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    create_srq_ex(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
    open_xrcd(context: *mut ibv_context, attr: *mut c_void) in verbs_context;
}
