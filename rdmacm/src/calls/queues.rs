//! Queue pairs and shared receive queues of identifiers.

use core::ffi::c_int;
use core::mem::offset_of;
use core::ptr;

use rustix::io::Errno;
use verbs_sys::ffi::*;

use super::code;
use crate::abi::{ibv_srq_init_attr_ex, rdma_cm_id};
use crate::deliver::move_qp;
use crate::device::{check, check_pointer};
use crate::id::Id;
use crate::shared::{Key, Shared};
use crate::verbs;

/// `IBV_SRQ_INIT_ATTR_TYPE` and `IBV_SRQ_INIT_ATTR_PD`.
const SRQ_TYPE: u32 = 1;
const SRQ_PD: u32 = 2;
/// `IBV_SRQT_BASIC`.
const BASIC: u32 = 0;

/// The newer functions of a context, if it has any.
///
/// # Safety
///
/// The context is open.
unsafe fn extended(context: *mut ibv_context) -> Option<*mut verbs_context> {
    // SAFETY: by the caller's promise.
    let marked = unsafe { (*context).abi_compat } == __VERBS_ABI_IS_EXTENDED;
    let start = context.wrapping_byte_sub(offset_of!(verbs_context, context));
    marked.then_some(start.cast())
}

/// One of these functions, if the context is new enough to have a place for it.
macro_rules! operation {
    ($context:expr, $name:ident) => {{
        let size = size_of::<verbs_context>() - offset_of!(verbs_context, $name);
        extended($context).and_then(|context| {
            let is_there = (*context).sz >= size;
            is_there.then(|| (*context).$name).flatten()
        })
    }};
}

/// rdma_create_qp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { create_qp(id, pd, init) })
}

/// Makes a queue pair of an identifier.
///
/// # Safety
///
/// As for rdma_create_qp(3).
pub unsafe fn create_qp(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    if init.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: by the caller's promise.
    unsafe { equip(id, pd, init, |pd| verbs::ibv_create_qp(pd, init)) }
}

/// rdma_create_qp_ex(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_qp_ex(
    id: *mut rdma_cm_id,
    init: *mut ibv_qp_init_attr_ex,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { create_qp_ex(id, init) })
}

unsafe fn create_qp_ex(id: *mut rdma_cm_id, init: *mut ibv_qp_init_attr_ex) -> Result<(), Errno> {
    if init.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: by the caller's promise.
    let (mask, given) = unsafe { ((*init).comp_mask, (*init).pd) };
    let pd = if mask & IBV_QP_INIT_ATTR_PD == 0 {
        ptr::null_mut()
    } else {
        given
    };
    let make = |pd: *mut ibv_pd| {
        // SAFETY: as above.
        unsafe {
            (*init).pd = pd;
            (*init).comp_mask = mask | IBV_QP_INIT_ATTR_PD;
            if (*init).comp_mask == IBV_QP_INIT_ATTR_PD {
                return verbs::ibv_create_qp(pd, init.cast());
            }
            match operation!((*pd).context, create_qp_ex) {
                Some(create) => create((*pd).context, init),
                None => {
                    super::set_errno(Errno::OPNOTSUPP);
                    ptr::null_mut()
                }
            }
        }
    };
    // SAFETY: as above; the structure begins as the classic one does.
    unsafe { equip(id, pd, init.cast(), make) }
}

/// Makes what a queue pair needs, the queue pair, and gets it ready.
///
/// # Safety
///
/// As for rdma_create_qp(3); `make` creates a queue pair as `init` says.
unsafe fn equip(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
    make: impl FnOnce(*mut ibv_pd) -> *mut ibv_qp,
) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    // SAFETY: as above.
    let (id_ref, init) = unsafe { (&mut *id, &mut *init) };
    let verbs = id_ref.verbs;
    if !id_ref.qp.is_null() || verbs.is_null() {
        return Err(Errno::INVAL);
    }
    let pd = if pd.is_null() { id_ref.pd } else { pd };
    // SAFETY: a live protection domain, or null.
    if pd.is_null() || unsafe { (*pd).context } != verbs {
        return Err(Errno::INVAL);
    }
    if init.srq.is_null() {
        init.srq = id_ref.srq;
    }
    // SAFETY: by the caller's promise.
    let made = unsafe { complete_queues(id_ref, id, init) }
        .and_then(|()| check_pointer(make(pd)))
        .and_then(|qp| {
            id_ref.qp = qp;
            // SAFETY: as above, and the queue pair was just made.
            unsafe { begin(id, key) }
        });
    match made {
        Ok(()) => {
            id_ref.pd = pd;
            Ok(())
        }
        Err(error) => {
            // SAFETY: what was made here, nobody uses yet.
            unsafe { destroy_qp(id) };
            Err(error)
        }
    }
}

/// Makes the completion queues that the application does not give.
unsafe fn complete_queues(
    id: &mut rdma_cm_id,
    handle: *mut rdma_cm_id,
    init: &mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    let (verbs, cap) = (id.verbs, init.cap);
    let make = |entries: u32| {
        // SAFETY: an open device.
        let channel = check_pointer(unsafe { verbs::ibv_create_comp_channel(verbs) })?;
        let entries = c_int::try_from(entries.max(1)).unwrap_or(c_int::MAX);
        // SAFETY: as above, and the channel was just made.
        let cq = unsafe { verbs::ibv_create_cq(verbs, entries, handle.cast(), channel, 0) };
        check_pointer(cq).map(|cq| (channel, cq)).inspect_err(|_| {
            // SAFETY: just made, and unused.
            unsafe { verbs::ibv_destroy_comp_channel(channel) };
        })
    };
    if init.send_cq.is_null() {
        (id.send_cq_channel, id.send_cq) = make(cap.max_send_wr)?;
        init.send_cq = id.send_cq;
    }
    if init.recv_cq.is_null() {
        (id.recv_cq_channel, id.recv_cq) = make(cap.max_recv_wr)?;
        init.recv_cq = id.recv_cq;
    }
    Ok(())
}

/// Receives can be posted from now on; to a queue pair for datagrams, sends too.
unsafe fn begin(id: *mut rdma_cm_id, key: Key) -> Result<(), Errno> {
    let states: &[ibv_qp_state] = if Shared::get().lock().endpoint(key)?.is_datagram() {
        &[IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS]
    } else {
        &[IBV_QPS_INIT]
    };
    for state in states {
        // SAFETY: by the caller's promise.
        unsafe { move_qp(id, key, *state)? };
    }
    Ok(())
}

/// rdma_destroy_qp(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_qp(id: *mut rdma_cm_id) {
    if !id.is_null() {
        // SAFETY: by the caller's promise.
        unsafe { destroy_qp(id) };
    }
}

/// Destroys the queue pair of an identifier, and the completion queues that were made for it.
///
/// # Safety
///
/// The identifier is alive, and nobody uses its queue pair.
pub unsafe fn destroy_qp(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's promise.
    let id = unsafe { &mut *id };
    let qp = std::mem::replace(&mut id.qp, ptr::null_mut());
    if !qp.is_null() {
        // SAFETY: as above.
        unsafe { verbs::ibv_destroy_qp(qp) };
    }
    let queues = [
        (&mut id.send_cq, &mut id.send_cq_channel),
        (&mut id.recv_cq, &mut id.recv_cq_channel),
    ];
    for (cq, channel) in queues {
        let cq = std::mem::replace(cq, ptr::null_mut());
        if !cq.is_null() {
            // SAFETY: made for the queue pair, which is gone.
            unsafe { verbs::ibv_destroy_cq(cq) };
        }
        let channel = std::mem::replace(channel, ptr::null_mut());
        if !channel.is_null() {
            // SAFETY: as above.
            unsafe { verbs::ibv_destroy_comp_channel(channel) };
        }
    }
}

/// rdma_create_srq(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    init: *mut ibv_srq_init_attr,
) -> c_int {
    if init.is_null() {
        return code(Err(Errno::INVAL));
    }
    let make = |pd| {
        // SAFETY: by the caller's promise.
        unsafe { verbs::ibv_create_srq(pd, init) }
    };
    // SAFETY: as above.
    code(unsafe { create_srq(id, pd, make) })
}

/// rdma_create_srq_ex(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_srq_ex(
    id: *mut rdma_cm_id,
    init: *mut ibv_srq_init_attr_ex,
) -> c_int {
    if init.is_null() {
        return code(Err(Errno::INVAL));
    }
    // SAFETY: by the caller's promise.
    let (mask, kind, given) = unsafe { ((*init).comp_mask, (*init).srq_type, (*init).pd) };
    let pd = if mask & SRQ_PD == 0 {
        ptr::null_mut()
    } else {
        given
    };
    let make = |pd: *mut ibv_pd| {
        // SAFETY: as above; the structure begins as the classic one does.
        unsafe {
            (*init).pd = pd;
            (*init).comp_mask = mask | SRQ_PD;
            if mask & SRQ_TYPE == 0 || kind == BASIC {
                return verbs::ibv_create_srq(pd, init.cast());
            }
            match operation!((*pd).context, create_srq_ex) {
                Some(create) => create((*pd).context, init.cast()),
                None => {
                    super::set_errno(Errno::OPNOTSUPP);
                    ptr::null_mut()
                }
            }
        }
    };
    // SAFETY: as above.
    code(unsafe { create_srq(id, pd, make) })
}

unsafe fn create_srq(
    id: *mut rdma_cm_id,
    pd: *mut ibv_pd,
    make: impl FnOnce(*mut ibv_pd) -> *mut ibv_srq,
) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    unsafe { Id::key(id)? };
    // SAFETY: as above.
    let id = unsafe { &mut *id };
    let pd = if pd.is_null() { id.pd } else { pd };
    if !id.srq.is_null() || id.verbs.is_null() || pd.is_null() {
        return Err(Errno::INVAL);
    }
    // SAFETY: a live protection domain.
    if unsafe { (*pd).context } != id.verbs {
        return Err(Errno::INVAL);
    }
    id.srq = check_pointer(make(pd))?;
    id.pd = pd;
    Ok(())
}

/// rdma_destroy_srq(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_srq(id: *mut rdma_cm_id) {
    // SAFETY: null, or alive by the caller's promise.
    let Some(id) = (unsafe { id.as_mut() }) else {
        return;
    };
    let srq = std::mem::replace(&mut id.srq, ptr::null_mut());
    if !srq.is_null() {
        // SAFETY: by the caller's promise nobody uses it. Where it fails, there is nobody to tell.
        let _ = check(unsafe { verbs::ibv_destroy_srq(srq) });
    }
}
