//! Completion channels and queues.

use core::ffi::{c_int, c_void};
use std::sync::Arc;

use rustix::io::Errno;

use super::super::channel::Channel;
use super::super::cq::{Cq, READABLE, Usage};
use super::super::device::{COMP_VECTORS, MAX_CQE, context, is_inherited};
use super::{code, failed, null, pointer};
use crate::ffi::*;

// Every function below keeps the contract of `Provider`, `ibv_context_ops` or `verbs_context`: handles
// are live objects of this provider, other pointers are valid as the man page of the call says.

pub(in crate::soft) unsafe fn create_comp_channel(
    handle: *mut ibv_context,
) -> *mut ibv_comp_channel {
    pointer(Channel::new(handle).map(|channel| Arc::into_raw(channel).cast_mut().cast()))
}

pub(in crate::soft) unsafe fn destroy_comp_channel(handle: *mut ibv_comp_channel) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    let raw = handle.cast::<Channel>().cast_const();
    // SAFETY: see above.
    if unsafe { &*raw }.has_cqs() {
        return libc::EBUSY;
    }
    // SAFETY: the handle is the reference that `create_comp_channel` gave out.
    drop(unsafe { Arc::from_raw(raw) });
    0
}

pub(in crate::soft) unsafe fn get_cq_event(
    handle: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: see above.
    let channel = unsafe { &*handle.cast::<Channel>() };
    match channel.next_event() {
        Ok(found) => {
            // SAFETY: places for the results, by the man page.
            unsafe { tell_cq(&found, cq, cq_context) };
            0
        }
        Err(error) => failed(error),
    }
}

/// Takes an event of a channel whose descriptor has just been read, if that was for one.
///
/// # Safety
///
/// As for ibv_get_cq_event(3).
#[cfg(feature = "drop-in")]
pub(crate) unsafe fn take_cq_event(
    handle: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> bool {
    // SAFETY: see above.
    let Some(found) = (unsafe { &*handle.cast::<Channel>() }).take_event() else {
        return false;
    };
    // SAFETY: places for the results, by the man page.
    unsafe { tell_cq(&found, cq, cq_context) };
    true
}

/// # Safety
///
/// Both are places for the results.
unsafe fn tell_cq(found: &Cq, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) {
    // SAFETY: by the caller's promise; the queue's fields are written at creation only.
    unsafe {
        cq.write(found.handle());
        cq_context.write((*found.handle()).cq_context);
    }
}

pub(in crate::soft) unsafe fn ack_cq_events(cq: *mut ibv_cq, events: u32) {
    // SAFETY: see above.
    unsafe { &*cq.cast::<Cq>() }.acknowledge(events);
}

pub(in crate::soft) unsafe fn create_cq(
    handle: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    vector: c_int,
) -> *mut ibv_cq {
    let mut attr = ibv_cq_init_attr_ex::zeroed();
    // What is negative is too much.
    attr.cqe = cqe as u32;
    attr.cq_context = cq_context;
    attr.channel = channel;
    attr.comp_vector = vector as u32;
    // SAFETY: as here.
    pointer(unsafe { make_cq(handle, &attr, Usage::default()) }).cast()
}

/// # Safety
///
/// The context and the channel are live objects of this provider; the channel may be null.
unsafe fn make_cq(
    handle: *mut ibv_context,
    attr: &ibv_cq_init_attr_ex,
    usage: Usage,
) -> Result<*mut ibv_cq_ex, Errno> {
    // SAFETY: by the caller's promise.
    let context = unsafe { context(handle) };
    let process = context.process()?;
    let entries = c_int::try_from(attr.cqe).map_err(|_| Errno::INVAL)?;
    if !(1..=MAX_CQE).contains(&entries) || attr.comp_vector >= COMP_VECTORS {
        return Err(Errno::INVAL);
    }
    let channel = attr.channel;
    let shared = (!channel.is_null()).then(|| {
        let raw = channel.cast::<Channel>().cast_const();
        // SAFETY: the handle is a reference of its own; this makes one more.
        unsafe {
            Arc::increment_strong_count(raw);
            Arc::from_raw(raw)
        }
    });
    let mut fields = ibv_cq::zeroed();
    fields.context = handle;
    fields.channel = channel;
    fields.cq_context = attr.cq_context;
    fields.cqe = entries;
    let cq = Cq::new(process, &context.events, fields, shared, usage)?;
    Ok(Arc::into_raw(cq).cast_mut().cast())
}

/// ibv_create_cq_ex(3).
pub(in crate::soft) unsafe extern "C" fn create_cq_ex(
    handle: *mut ibv_context,
    attr: *mut ibv_cq_init_attr_ex,
) -> *mut ibv_cq_ex {
    // SAFETY: see above.
    let attr = unsafe { &*attr };
    let flags = match attr.comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS {
        0 => 0,
        _ => attr.flags,
    };
    let known = IBV_CREATE_CQ_ATTR_SINGLE_THREADED | IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN;
    if attr.comp_mask & !(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD) != 0 {
        return null(Errno::INVAL);
    }
    if attr.wc_flags & !READABLE != 0 || flags & !known != 0 {
        return null(Errno::OPNOTSUPP);
    }
    let usage = Usage {
        is_extended: true,
        is_single_threaded: flags & IBV_CREATE_CQ_ATTR_SINGLE_THREADED != 0,
        ignores_overrun: flags & IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN != 0,
    };
    // SAFETY: as here.
    pointer(unsafe { make_cq(handle, attr, usage) })
}

/// ibv_modify_cq(3): events are not held back, whatever moderation allows.
pub(in crate::soft) unsafe extern "C" fn modify_cq(
    _cq: *mut ibv_cq,
    attr: *mut ibv_modify_cq_attr,
) -> c_int {
    // SAFETY: see above.
    match unsafe { (*attr).attr_mask } {
        IBV_CQ_ATTR_MODERATE => 0,
        _ => libc::EINVAL,
    }
}

pub(in crate::soft) unsafe fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    if !(1..=MAX_CQE).contains(&cqe) {
        return libc::EINVAL;
    }
    // SAFETY: see above.
    code(unsafe { &*cq.cast::<Cq>() }.resize(cqe))
}

pub(in crate::soft) unsafe fn destroy_cq(handle: *mut ibv_cq) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    let raw = handle.cast::<Cq>().cast_const();
    // SAFETY: see above.
    if let Err(error) = unsafe { &*raw }.retire() {
        return error.raw_os_error();
    }
    // SAFETY: the handle is the reference that `create_cq` gave out.
    drop(unsafe { Arc::from_raw(raw) });
    0
}

pub(in crate::soft) unsafe extern "C" fn poll_cq(
    handle: *mut ibv_cq,
    entries: c_int,
    wcs: *mut ibv_wc,
) -> c_int {
    // SAFETY: see above.
    let cq = unsafe { &*handle.cast::<Cq>() };
    // SAFETY: the array has so many elements, and any bytes make an `ibv_wc`.
    if entries == 1 && cq.take_one(unsafe { &mut *wcs }) {
        return 1;
    }
    // SAFETY: as here.
    unsafe { poll_all(cq, entries, wcs) }
}

/// A function of its own, jumped to, so that the usual way needs no stack.
///
/// # Safety
///
/// As for `poll_cq`.
#[inline(never)]
unsafe extern "C" fn poll_all(cq: &Cq, entries: c_int, wcs: *mut ibv_wc) -> c_int {
    let Ok(entries) = usize::try_from(entries) else {
        return -1;
    };
    if entries == 0 {
        return 0;
    }
    // SAFETY: the array has so many elements, and any bytes make an `ibv_wc`.
    let wcs = unsafe { core::slice::from_raw_parts_mut(wcs, entries) };
    match cq.poll(wcs) {
        Ok(filled) => filled as c_int,
        Err(error) => failed(error),
    }
}

pub(in crate::soft) unsafe extern "C" fn req_notify_cq(
    handle: *mut ibv_cq,
    solicited_only: c_int,
) -> c_int {
    // SAFETY: see above.
    unsafe { &*handle.cast::<Cq>() }.req_notify(solicited_only != 0);
    0
}
