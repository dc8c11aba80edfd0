//! The calls that make, change and destroy a context's objects, and its ops table: the C side of the
//! device.

mod regions;

use core::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::io::Errno;

pub(super) use self::regions::{dereg_mr, reg_mr, rereg_mr};

use super::ah::{self, Ah};
use super::channel::Channel;
use super::cq::Cq;
use super::device::{context, is_inherited};
use super::qp::Qp;
use super::shared;
use super::srq::Srq;
use crate::ffi::*;

/// The data path. What is missing is not supported, and says so.
pub(super) const OPS: ibv_context_ops = ibv_context_ops {
    post_send: Some(post_send),
    post_recv: Some(post_recv),
    poll_cq: Some(poll_cq),
    req_notify_cq: Some(req_notify_cq),
    alloc_mw: Some(regions::alloc_mw),
    bind_mw: Some(regions::bind_mw),
    dealloc_mw: Some(regions::dealloc_mw),
    post_srq_recv: Some(shared::post_srq_recv),
    ..ibv_context_ops::zeroed()
};

/// A protection domain. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Pd {
    pub(super) pd: ibv_pd,
    pub(super) id: u32,
    /// Regions, windows, queue pairs and shared receive queues made in it.
    pub(super) children: AtomicU32,
}

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

pub(super) unsafe fn alloc_pd(handle: *mut ibv_context) -> *mut ibv_pd {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        let id = process.pd_ids.take().ok_or(Errno::NOMEM)?;
        let pd = ibv_pd {
            context: handle,
            handle: id,
        };
        Ok(Box::into_raw(Box::new(Pd {
            pd,
            id,
            children: AtomicU32::new(0),
        }))
        .cast())
    }))
}

pub(super) unsafe fn dealloc_pd(handle: *mut ibv_pd) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    let pd = unsafe { &*handle.cast::<Pd>() };
    if pd.children.load(Ordering::Acquire) != 0 {
        return libc::EBUSY;
    }
    // SAFETY: see above; nothing refers to it any more.
    let pd = unsafe { Box::from_raw(handle.cast::<Pd>()) };
    // SAFETY: a domain's context outlives it.
    if let Ok(process) = unsafe { context(pd.pd.context) }.process() {
        process.pd_ids.give(pd.id);
    }
    0
}

pub(super) unsafe fn create_ah(handle: *mut ibv_pd, attr: *mut ibv_ah_attr) -> *mut ibv_ah {
    // SAFETY: see above.
    let (pd, attr) = unsafe { (&*handle.cast::<Pd>(), &*attr) };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        let ah = Ah::new(process, pd.pd.context, handle, attr)?;
        pd.children.fetch_add(1, Ordering::Relaxed);
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
    // SAFETY: a handle's domain outlives it.
    let pd = unsafe { &*pd.cast::<Pd>() };
    pd.children.fetch_sub(1, Ordering::Release);
    0
}

pub(super) unsafe fn create_comp_channel(handle: *mut ibv_context) -> *mut ibv_comp_channel {
    pointer(Channel::new(handle).map(|channel| Arc::into_raw(channel).cast_mut().cast()))
}

pub(super) unsafe fn destroy_comp_channel(handle: *mut ibv_comp_channel) -> c_int {
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

pub(super) unsafe fn get_cq_event(
    handle: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: see above.
    let channel = unsafe { &*handle.cast::<Channel>() };
    match channel.next_event() {
        Ok(found) => {
            // SAFETY: places for the results, by the man page; the queue's fields are written at
            // creation only.
            unsafe {
                cq.write(found.handle());
                cq_context.write((*found.handle()).cq_context);
            }
            0
        }
        Err(error) => failed(error),
    }
}

pub(super) unsafe fn ack_cq_events(cq: *mut ibv_cq, events: u32) {
    // SAFETY: see above.
    unsafe { &*cq.cast::<Cq>() }.acknowledge(events);
}

pub(super) unsafe fn create_cq(
    handle: *mut ibv_context,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *mut ibv_comp_channel,
    _vector: c_int,
) -> *mut ibv_cq {
    // SAFETY: see above.
    let context = unsafe { context(handle) };
    pointer(context.process().and_then(|process| {
        if !(1..=super::device::MAX_CQE).contains(&cqe) {
            return Err(Errno::INVAL);
        }
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
        fields.cq_context = cq_context;
        fields.cqe = cqe;
        Ok(
            Arc::into_raw(Cq::new(process, &context.events, fields, shared)?)
                .cast_mut()
                .cast(),
        )
    }))
}

pub(super) unsafe fn resize_cq(cq: *mut ibv_cq, cqe: c_int) -> c_int {
    if !(1..=super::device::MAX_CQE).contains(&cqe) {
        return libc::EINVAL;
    }
    // SAFETY: see above.
    code(unsafe { &*cq.cast::<Cq>() }.resize(cqe))
}

pub(super) unsafe fn destroy_cq(handle: *mut ibv_cq) -> c_int {
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

pub(super) unsafe fn create_qp(handle: *mut ibv_pd, init: *mut ibv_qp_init_attr) -> *mut ibv_qp {
    // SAFETY: see above.
    let (pd, init) = unsafe { (&*handle.cast::<Pd>(), &mut *init) };
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    pointer(context.process().and_then(|process| {
        if !matches!(init.qp_type, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD) {
            return Err(Errno::OPNOTSUPP);
        }
        if init.send_cq.is_null() || init.recv_cq.is_null() {
            return Err(Errno::INVAL);
        }
        let share = |cq: *mut ibv_cq| {
            let raw = cq.cast::<Cq>().cast_const();
            // SAFETY: the handle is a reference of its own; this makes one more.
            unsafe {
                Arc::increment_strong_count(raw);
                Arc::from_raw(raw)
            }
        };
        let queues = (share(init.send_cq), share(init.recv_cq));
        if queues.0.context() != pd.pd.context || queues.1.context() != pd.pd.context {
            return Err(Errno::INVAL);
        }
        if queues.0.is_broken() || queues.1.is_broken() {
            return Err(Errno::INVAL);
        }
        let srq = (!init.srq.is_null()).then(|| {
            let raw = init.srq.cast::<Srq>().cast_const();
            // SAFETY: the handle is a reference of its own; this makes one more.
            unsafe {
                Arc::increment_strong_count(raw);
                Arc::from_raw(raw)
            }
        });
        if srq
            .as_ref()
            .is_some_and(|srq| srq.context() != pd.pd.context)
        {
            return Err(Errno::INVAL);
        }
        let mut fields = ibv_qp::zeroed();
        fields.context = pd.pd.context;
        fields.srq = init.srq;
        fields.qp_context = init.qp_context;
        fields.pd = handle;
        fields.send_cq = init.send_cq;
        fields.recv_cq = init.recv_cq;
        fields.qp_type = init.qp_type;
        let qp = Qp::create(process, &context.events, pd.id, fields, queues, srq, init)?;
        init.cap = qp.cap();
        pd.children.fetch_add(1, Ordering::Relaxed);
        Ok(Arc::into_raw(qp).cast_mut().cast())
    }))
}

/// The queue pair behind a handle.
///
/// # Safety
///
/// The handle is a live queue pair of this provider.
#[inline]
unsafe fn qp<'a>(handle: *mut ibv_qp) -> &'a Qp {
    // SAFETY: the handle is the address of a `Qp` whose first field is the C structure.
    unsafe { &*handle.cast::<Qp>() }
}

pub(super) unsafe fn modify_qp(handle: *mut ibv_qp, attr: *mut ibv_qp_attr, mask: c_int) -> c_int {
    // SAFETY: see above.
    code(unsafe { qp(handle).modify(&*attr, mask as u32) })
}

pub(super) unsafe fn query_qp(
    handle: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: see above.
    unsafe { qp(handle).query(&mut *attr, &mut *init) };
    0
}

pub(super) unsafe fn destroy_qp(handle: *mut ibv_qp) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    if let Err(error) = unsafe { qp(handle) }.destroy() {
        return error.raw_os_error();
    }
    // SAFETY: written at creation only; a queue pair's domain outlives it.
    unsafe { &*(*handle).pd.cast::<Pd>() }
        .children
        .fetch_sub(1, Ordering::Release);
    // SAFETY: the handle is the reference that `create_qp` gave out.
    drop(unsafe { Arc::from_raw(handle.cast::<Qp>().cast_const()) });
    0
}

unsafe extern "C" fn post_send(
    handle: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: see above.
    unsafe { qp(handle).post_send(wr, bad) }
}

unsafe extern "C" fn post_recv(
    handle: *mut ibv_qp,
    wr: *mut ibv_recv_wr,
    bad: *mut *mut ibv_recv_wr,
) -> c_int {
    // SAFETY: see above.
    match unsafe { qp(handle).post_recv(wr) } {
        Ok(()) => 0,
        Err((code, wr)) => {
            // SAFETY: a place for the first request that was not posted, by the man page.
            unsafe { bad.write(wr) };
            code
        }
    }
}

unsafe extern "C" fn poll_cq(handle: *mut ibv_cq, entries: c_int, wcs: *mut ibv_wc) -> c_int {
    // SAFETY: see above.
    let cq = unsafe { &*handle.cast::<Cq>() };
    // SAFETY: the array has so many elements, and any bytes make an `ibv_wc`.
    if entries == 1 && cq.take_one(unsafe { &mut *wcs }) {
        return 1;
    }
    let Ok(entries) = usize::try_from(entries) else {
        return -1;
    };
    if entries == 0 {
        return 0;
    }
    // SAFETY: as above.
    let wcs = unsafe { core::slice::from_raw_parts_mut(wcs, entries) };
    match cq.poll(wcs) {
        Ok(filled) => filled as c_int,
        Err(error) => failed(error),
    }
}

unsafe extern "C" fn req_notify_cq(handle: *mut ibv_cq, solicited_only: c_int) -> c_int {
    // SAFETY: see above.
    unsafe { &*handle.cast::<Cq>() }.req_notify(solicited_only != 0);
    0
}
