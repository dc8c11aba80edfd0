//! Queue pairs.

use core::ffi::c_int;
use std::sync::Arc;

use rustix::io::Errno;

use super::super::cq::Cq;
use super::super::device::{context, is_inherited};
use super::super::qp::{self, Qp, Receives};
use super::super::srq::Srq;
use super::super::xrc;
use super::{Pd, code, null, pointer};
use crate::ffi::*;

// Every function below keeps the contract of `Provider`, `ibv_context_ops` or `verbs_context`: handles
// are live objects of this provider, other pointers are valid as the man page of the call says.

/// Who a queue pair belongs to, and how it is posted to.
struct Place {
    pd: *mut ibv_pd,
    is_extended: bool,
}

pub(in crate::soft) unsafe fn create_qp(
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> *mut ibv_qp {
    let place = Place {
        pd,
        is_extended: false,
    };
    // SAFETY: as here.
    pointer(unsafe { make_qp(&place, &mut *init) })
}

/// # Safety
///
/// The domain and what the attributes name are live objects of this provider, or null.
unsafe fn make_qp(place: &Place, init: &mut ibv_qp_init_attr) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: by the caller's promise.
    let pd = unsafe { place.pd.cast::<Pd>().as_ref() }.ok_or(Errno::INVAL)?;
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(pd.pd.context) };
    let process = context.process()?;
    let is_xrc = init.qp_type == IBV_QPT_XRC_SEND;
    if !matches!(init.qp_type, IBV_QPT_RC | IBV_QPT_UC | IBV_QPT_UD) && !is_xrc {
        return Err(Errno::OPNOTSUPP);
    }
    if is_xrc {
        // It receives nothing.
        (init.recv_cq, init.srq) = (core::ptr::null_mut(), core::ptr::null_mut());
    }
    if init.send_cq.is_null() || (init.recv_cq.is_null() && !is_xrc) {
        return Err(Errno::INVAL);
    }
    let recv_cq = if is_xrc { init.send_cq } else { init.recv_cq };
    let queues = [init.send_cq, recv_cq].map(|cq| {
        // SAFETY: the handle is a reference of its own.
        unsafe { share(cq.cast::<Cq>()) }
    });
    let is_usable = |cq: &Arc<Cq>| cq.context() == pd.pd.context && !cq.is_broken();
    if !queues.iter().all(is_usable) {
        return Err(Errno::INVAL);
    }
    let srq = (!init.srq.is_null()).then(|| {
        // SAFETY: the handle is a reference of its own.
        unsafe { share(init.srq.cast::<Srq>()) }
    });
    if srq
        .as_ref()
        .is_some_and(|srq| srq.context() != pd.pd.context)
    {
        return Err(Errno::INVAL);
    }
    let mut fields = ibv_qp_ex::zeroed();
    fields.qp_base.context = pd.pd.context;
    fields.qp_base.srq = init.srq;
    fields.qp_base.qp_context = init.qp_context;
    fields.qp_base.pd = place.pd;
    fields.qp_base.send_cq = init.send_cq;
    fields.qp_base.recv_cq = init.recv_cq;
    fields.qp_base.qp_type = init.qp_type;
    if place.is_extended {
        qp::offer_builders(&mut fields);
    }
    let [send, recv] = queues;
    let queues = (send, recv);
    let receives = match srq {
        Some(srq) => Receives::Shared(srq),
        None if is_xrc => Receives::Nothing,
        None => Receives::Own,
    };
    let events = &context.events;
    let qp = Qp::create(process, events, pd.id, fields, queues, receives, init)?;
    init.cap = qp.cap();
    pd.enter();
    Ok(Arc::into_raw(qp).cast_mut().cast())
}

/// Makes a queue pair that takes requests of XRC. Of the attributes only type and context count.
///
/// # Safety
///
/// The XRC domain is a live object of this provider, or null.
unsafe fn make_xrc_target(
    handle: *mut ibv_context,
    xrcd: *mut ibv_xrcd,
    init: &mut ibv_qp_init_attr,
) -> Result<*mut ibv_qp, Errno> {
    // SAFETY: by the caller's promise.
    let xrcd = unsafe { xrcd.cast::<xrc::Handle>().as_ref() }.ok_or(Errno::INVAL)?;
    if xrcd.xrcd.context != handle {
        return Err(Errno::INVAL);
    }
    // SAFETY: a domain's context outlives it.
    let context = unsafe { context(handle) };
    let mut fields = ibv_qp_ex::zeroed();
    fields.qp_base.context = handle;
    fields.qp_base.qp_context = init.qp_context;
    fields.qp_base.qp_type = init.qp_type;
    let (process, events) = (context.process()?, &context.events);
    let member = xrcd.enter();
    let domain = &member.domain;
    let (id, queue) = (domain.id, &domain.no_queue);
    let queues = (Arc::clone(queue), Arc::clone(queue));
    let receives = Receives::Named(member.clone());
    let qp = Qp::create(process, events, id, fields, queues, receives, init)
        .inspect_err(|_| member.leave())?;
    init.cap = qp.cap();
    Ok(Arc::into_raw(qp).cast_mut().cast())
}

/// One more reference to an object.
///
/// # Safety
///
/// The handle is one, made by `Arc::into_raw`.
pub(in crate::soft) unsafe fn share<T>(handle: *mut T) -> Arc<T> {
    // SAFETY: by the caller's promise.
    unsafe {
        Arc::increment_strong_count(handle.cast_const());
        Arc::from_raw(handle)
    }
}

/// What [`ibv_qp_ex`] offers, by type of queue pair; the table of ibv_wr_post(3).
fn send_ops(qp_type: ibv_qp_type) -> u64 {
    let sends = IBV_QP_EX_WITH_SEND | IBV_QP_EX_WITH_SEND_WITH_IMM;
    let connected = sends
        | IBV_QP_EX_WITH_RDMA_WRITE
        | IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM
        | IBV_QP_EX_WITH_LOCAL_INV
        | IBV_QP_EX_WITH_BIND_MW
        | IBV_QP_EX_WITH_SEND_WITH_INV;
    let reliable = connected
        | IBV_QP_EX_WITH_RDMA_READ
        | IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP
        | IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD;
    match qp_type {
        IBV_QPT_UD => sends,
        IBV_QPT_UC => connected,
        IBV_QPT_XRC_RECV => 0,
        IBV_QPT_XRC_SEND => reliable,
        _ => reliable | IBV_QP_EX_WITH_ATOMIC_WRITE,
    }
}

/// ibv_create_qp_ex(3).
pub(in crate::soft) unsafe extern "C" fn create_qp_ex(
    handle: *mut ibv_context,
    init: *mut ibv_qp_init_attr_ex,
) -> *mut ibv_qp {
    // SAFETY: see above.
    let wanted = unsafe { &mut *init };
    let has = |bit| wanted.comp_mask & bit != 0;
    // What hardware does with packets, if it is asked for at all.
    let is_special = has(IBV_QP_INIT_ATTR_IND_TABLE | IBV_QP_INIT_ATTR_RX_HASH)
        || (has(IBV_QP_INIT_ATTR_CREATE_FLAGS) && wanted.create_flags != 0)
        || (has(IBV_QP_INIT_ATTR_MAX_TSO_HEADER) && wanted.max_tso_header != 0);
    let known = (IBV_QP_INIT_ATTR_SEND_OPS_FLAGS << 1) - 1;
    let is_extended = has(IBV_QP_INIT_ATTR_SEND_OPS_FLAGS);
    let too_much = is_extended && wanted.send_ops_flags & !send_ops(wanted.qp_type) != 0;
    if is_special || has(!known) || too_much {
        return null(Errno::OPNOTSUPP);
    }
    let is_xrc_target = wanted.qp_type == IBV_QPT_XRC_RECV;
    // SAFETY: see above.
    let is_here = has(IBV_QP_INIT_ATTR_PD)
        && unsafe { wanted.pd.as_ref() }.is_some_and(|pd| pd.context == handle);
    let has_domain = if is_xrc_target {
        has(IBV_QP_INIT_ATTR_XRCD)
    } else {
        is_here
    };
    if !has_domain {
        return null(Errno::INVAL);
    }
    let mut init = ibv_qp_init_attr {
        qp_context: wanted.qp_context,
        send_cq: wanted.send_cq,
        recv_cq: wanted.recv_cq,
        srq: wanted.srq,
        cap: wanted.cap,
        qp_type: wanted.qp_type,
        sq_sig_all: wanted.sq_sig_all,
    };
    let place = Place {
        pd: wanted.pd,
        is_extended,
    };
    // SAFETY: as here.
    let made = unsafe {
        if is_xrc_target {
            make_xrc_target(handle, wanted.xrcd.cast(), &mut init)
        } else {
            make_qp(&place, &mut init)
        }
    };
    wanted.cap = init.cap;
    pointer(made)
}

/// ibv_qp_to_qp_ex(3): null if it was not made to be posted to call by call.
#[cfg(any(feature = "drop-in", test))]
pub(crate) unsafe fn qp_to_qp_ex(handle: *mut ibv_qp) -> *mut ibv_qp_ex {
    // SAFETY: see above.
    if unsafe { qp(handle) }.is_extended() {
        handle.cast()
    } else {
        core::ptr::null_mut()
    }
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

pub(in crate::soft) unsafe fn modify_qp(
    handle: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    mask: c_int,
) -> c_int {
    // SAFETY: see above.
    code(unsafe { qp(handle).modify(&*attr, mask as u32) })
}

pub(in crate::soft) unsafe fn query_qp(
    handle: *mut ibv_qp,
    attr: *mut ibv_qp_attr,
    _mask: c_int,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: see above.
    unsafe { qp(handle).query(&mut *attr, &mut *init) };
    0
}

pub(in crate::soft) unsafe fn destroy_qp(handle: *mut ibv_qp) -> c_int {
    // SAFETY: see above.
    if unsafe { is_inherited((*handle).context) } {
        return 0;
    }
    // SAFETY: see above.
    if let Err(error) = unsafe { qp(handle) }.destroy() {
        return error.raw_os_error();
    }
    // SAFETY: written at creation only.
    let pd = unsafe { (*handle).pd };
    if !pd.is_null() {
        // SAFETY: entered at creation, and a queue pair's domain outlives it.
        unsafe { Pd::leave(pd) };
    }
    // SAFETY: the handle is the reference that `create_qp` gave out.
    drop(unsafe { Arc::from_raw(handle.cast::<Qp>().cast_const()) });
    0
}

pub(in crate::soft) unsafe extern "C" fn post_send(
    handle: *mut ibv_qp,
    wr: *mut ibv_send_wr,
    bad: *mut *mut ibv_send_wr,
) -> c_int {
    // SAFETY: see above.
    unsafe { qp(handle).post_send(wr, bad) }
}

pub(in crate::soft) unsafe extern "C" fn post_recv(
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
