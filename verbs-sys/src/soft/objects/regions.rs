//! Memory regions and windows.

use core::ffi::{c_int, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Instant;

use rustix::io::Errno;

use super::super::device::{Context, context, is_inherited};
use super::super::keys::Range;
use super::super::process::Process;
use super::super::qp::{Bind, Qp};
use super::super::segment;
use super::{Pd, pointer, set_errno};
use crate::ffi::*;

/// Access flags that this device knows; hints are accepted and have no effect.
const KNOWN_ACCESS: u32 = IBV_ACCESS_LOCAL_WRITE
    | IBV_ACCESS_REMOTE_WRITE
    | IBV_ACCESS_REMOTE_READ
    | IBV_ACCESS_REMOTE_ATOMIC
    | IBV_ACCESS_MW_BIND
    | IBV_ACCESS_HUGETLB
    | IBV_ACCESS_RELAXED_ORDERING;

/// A memory region. The C structure comes first: its address is the handle.
#[repr(C)]
struct Mr {
    mr: ibv_mr,
    access: u32,
}

// Every function below keeps the contract of `Provider` or of `ibv_context_ops`: handles are live
// objects of this provider, other pointers are valid as the man page of the call says.

pub(in crate::soft) unsafe fn reg_mr(
    handle: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> *mut ibv_mr {
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    let began = Instant::now();
    pointer(context.process().and_then(|process| {
        let access = access as u32;
        let range = prepare(process, pd.id, start as u64, len, access)?;
        let key = process.keys.publish(&process.info().keys, range)?;
        process.pinned.fetch_add(len as u64, Ordering::Relaxed);
        pd.children.fetch_add(1, Ordering::Relaxed);
        spend(context, began, len);
        let mr = ibv_mr {
            context: pd.pd.context,
            pd: handle,
            addr: start,
            length: len,
            handle: key >> 8,
            lkey: key,
            rkey: key,
        };
        Ok(Box::into_raw(Box::new(Mr { mr, access })).cast())
    }))
}

/// Returns when no operation in flight can touch the range any more. `EBUSY`: a window is bound to
/// it, or a stopped peer process is in the middle of an operation that may touch it; in the latter
/// case the key is dead already, and calling again has the rest.
pub(in crate::soft) unsafe fn dereg_mr(handle: *mut ibv_mr) -> c_int {
    // SAFETY: see above.
    let Mr { mr, access } = unsafe { &*handle.cast::<Mr>() };
    // SAFETY: a region's context outlives it.
    if unsafe { is_inherited(mr.context) } {
        return 0;
    }
    // SAFETY: a region's context outlives it.
    if let Ok(process) = unsafe { context(mr.context) }.process() {
        if let Err(error) = withdraw(process, mr.lkey, *access).and_then(|()| process.quiesce()) {
            return error.raw_os_error();
        }
        process.keys.recycle(mr.lkey);
        process
            .pinned
            .fetch_sub(mr.length as u64, Ordering::Relaxed);
    }
    // SAFETY: see above; it is freed once, since the call succeeds.
    let Mr { mr, .. } = *unsafe { Box::from_raw(handle.cast::<Mr>()) };
    // SAFETY: a region's domain outlives it.
    unsafe { &*mr.pd.cast::<Pd>() }
        .children
        .fetch_sub(1, Ordering::Release);
    0
}

/// Checks what a region shall be, and has its pages.
fn prepare(process: &Process, pd: u32, addr: u64, len: usize, access: u32) -> Result<Range, Errno> {
    let remote_change = access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) != 0;
    if access & !KNOWN_ACCESS != 0 || (remote_change && access & IBV_ACCESS_LOCAL_WRITE == 0) {
        return Err(Errno::INVAL);
    }
    segment::populate(addr, len, access & IBV_ACCESS_LOCAL_WRITE != 0)?;
    let arena = process.arenas.containing(addr, len);
    Ok(Range {
        access,
        pd,
        arena: arena.as_ref().map_or(0, |arena| arena.id),
        addr,
        len: len as u64,
        offset: arena.map_or(0, |arena| addr - arena.mapping.as_ptr() as u64),
    })
}

/// Takes as long as the options say that registration takes.
fn spend(context: &Context, began: Instant, len: usize) {
    if let Some(cost) = context.options.registration_cost {
        let cost = cost.of(len);
        while began.elapsed() < cost {
            std::hint::spin_loop();
        }
    }
}

/// ibv_rereg_mr(3): all or nothing. The key stays. Operations in flight have ended when it returns,
/// and the next ones find what is new.
pub(in crate::soft) unsafe fn rereg_mr(
    handle: *mut ibv_mr,
    flags: c_int,
    pd: *mut ibv_pd,
    start: *mut c_void,
    len: usize,
    access: c_int,
) -> c_int {
    let flags = flags as u32;
    let known =
        IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD | IBV_REREG_MR_CHANGE_ACCESS;
    let is_moved = flags & IBV_REREG_MR_CHANGE_TRANSLATION != 0;
    if flags == 0 || flags & !known != 0 || (is_moved && len == 0) {
        set_errno(Errno::INVAL);
        return IBV_REREG_MR_ERR_INPUT;
    }
    // SAFETY: see above; a region that is being changed is not used by other calls.
    let region = unsafe { &mut *handle.cast::<Mr>() };
    let pd = if flags & IBV_REREG_MR_CHANGE_PD != 0 {
        pd
    } else {
        region.mr.pd
    };
    let access = if flags & IBV_REREG_MR_CHANGE_ACCESS != 0 {
        access as u32
    } else {
        region.access
    };
    let (start, len) = if is_moved {
        (start, len)
    } else {
        (region.mr.addr, region.mr.length)
    };
    // SAFETY: see above.
    match unsafe { change(region, pd, (start, len), access) } {
        Ok(()) => 0,
        Err(error) => {
            set_errno(error);
            IBV_REREG_MR_ERR_CMD
        }
    }
}

/// # Safety
///
/// The region and the domain are live objects of this provider.
unsafe fn change(
    region: &mut Mr,
    handle: *mut ibv_pd,
    (start, len): (*mut c_void, usize),
    access: u32,
) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let new = unsafe { handle.cast::<Pd>().as_ref() }.ok_or(Errno::INVAL)?;
    if new.pd.context != region.mr.context {
        return Err(Errno::INVAL);
    }
    // SAFETY: a region's context outlives it.
    let context = unsafe { context(region.mr.context) };
    let process = context.process()?;
    let began = Instant::now();
    let (keys, key) = (&process.info().keys, region.mr.lkey);
    let range = prepare(process, new.id, start as u64, len, access)?;
    withdraw(process, key, region.access)?;
    if let Err(error) = process.quiesce() {
        // What is not over may see the old region, so that is what there is.
        process.keys.restore(keys, key);
        return Err(error);
    }
    process.keys.publish_as(keys, key, range);
    let former = region.mr.length as u64;
    process.pinned.fetch_add(len as u64, Ordering::Relaxed);
    process.pinned.fetch_sub(former, Ordering::Relaxed);
    new.children.fetch_add(1, Ordering::Relaxed);
    // SAFETY: a region's domain outlives it.
    unsafe { &*region.mr.pd.cast::<Pd>() }
        .children
        .fetch_sub(1, Ordering::Release);
    region.mr.pd = handle;
    (region.mr.addr, region.mr.length, region.access) = (start, len, access);
    spend(context, began, len);
    Ok(())
}

/// Makes a region's key dead, unless a window is bound to it.
fn withdraw(process: &Process, key: u32, access: u32) -> Result<(), Errno> {
    if access & IBV_ACCESS_MW_BIND != 0 {
        return process.windows.withdraw_region(process, key);
    }
    process.keys.revoke(&process.info().keys, key);
    Ok(())
}

pub(super) unsafe extern "C" fn alloc_mw(handle: *mut ibv_pd, type_: ibv_mw_type) -> *mut ibv_mw {
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let rkey = process.windows.alloc(process, pd.id, type_)?;
        pd.children.fetch_add(1, Ordering::Relaxed);
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
    // SAFETY: see above.
    if unsafe { info.mr.as_ref() }.is_some_and(|region| region.pd != pd) {
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
    // SAFETY: a window's domain outlives it.
    unsafe { &*window.pd.cast::<Pd>() }
        .children
        .fetch_sub(1, Ordering::Release);
    0
}
