//! The short way: rdma_create_ep(3) and rdma_get_request(3).

use core::ffi::c_int;
use core::ptr;

use rustix::io::Errno;
use verbs_sys::ffi::{ibv_pd, ibv_qp_init_attr};

use super::addresses::{bind, resolve_address, resolve_route};
use super::code;
use super::ids::{create, rdma_destroy_id};
use super::queues::{create_qp, destroy_qp, rdma_destroy_srq};
use crate::abi::{RAI_PASSIVE, RDMA_CM_EVENT_CONNECT_REQUEST, rdma_addrinfo, rdma_cm_id};
use crate::address::read;
use crate::deliver::{acknowledge, drop_event, next};
use crate::id::Id;
use crate::shared::Shared;

/// rdma_create_ep(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_ep(
    id: *mut *mut rdma_cm_id,
    info: *mut rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> c_int {
    // SAFETY: null, or readable by the caller's promise.
    let Some(info) = (unsafe { info.as_ref() }) else {
        return code(Err(Errno::INVAL));
    };
    // SAFETY: by the caller's promise.
    code(unsafe { create_ep(info, pd, init) }.map(|made| {
        // SAFETY: a place for the result.
        unsafe { id.write(made) };
    }))
}

unsafe fn create_ep(
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<*mut rdma_cm_id, Errno> {
    let (space, qp_type) = (info.ai_port_space as u32, info.ai_qp_type as u32);
    // SAFETY: no channel is given.
    let id = unsafe { create(ptr::null_mut(), ptr::null_mut(), space, qp_type)? };
    // SAFETY: just made; the rest by the caller's promise.
    let prepared = unsafe { prepare(id, info, pd, init) };
    match prepared {
        Ok(()) => Ok(id),
        Err(error) => {
            // SAFETY: just made, and nobody has seen it.
            unsafe { rdma_destroy_ep(id) };
            Err(error)
        }
    }
}

unsafe fn prepare(
    id: *mut rdma_cm_id,
    info: &rdma_addrinfo,
    pd: *mut ibv_pd,
    init: *mut ibv_qp_init_attr,
) -> Result<(), Errno> {
    if info.ai_flags & RAI_PASSIVE != 0 {
        // SAFETY: by the caller's promise.
        unsafe { bind(id, read(info.ai_src_addr)?)? };
        // SAFETY: null, or readable by the caller's promise.
        if let Some(init) = unsafe { init.as_ref() } {
            let mut init = *init;
            init.qp_type = info.ai_qp_type as u32;
            // SAFETY: the identifier is alive.
            unsafe { (*id.cast::<Id>()).template = Some((pd, init)) };
        }
        return Ok(());
    }
    let source = if info.ai_src_addr.is_null() || info.ai_src_len == 0 {
        None
    } else {
        // SAFETY: by the caller's promise.
        Some(unsafe { read(info.ai_src_addr)? })
    };
    // SAFETY: as above.
    unsafe { resolve_address(id, source, read(info.ai_dst_addr)?)? };
    // SAFETY: as above.
    unsafe { resolve_route(id)? };
    if !init.is_null() {
        // SAFETY: as above.
        unsafe { (*init).qp_type = info.ai_qp_type as u32 };
        // SAFETY: as above.
        unsafe { create_qp(id, pd, init)? };
    }
    if info.ai_connect_len != 0 && !info.ai_connect.is_null() {
        let start = info.ai_connect.cast::<u8>();
        // SAFETY: as above.
        let prefix = unsafe { std::slice::from_raw_parts(start, info.ai_connect_len) };
        // SAFETY: the identifier is alive.
        unsafe { (*id.cast::<Id>()).prefix = prefix.to_vec() };
    }
    Ok(())
}

/// rdma_destroy_ep(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_ep(id: *mut rdma_cm_id) {
    if id.is_null() {
        return;
    }
    // SAFETY: by the caller's promise.
    unsafe {
        destroy_qp(id);
        rdma_destroy_srq(id);
        rdma_destroy_id(id);
    }
}

/// rdma_get_request(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_request(
    listener: *mut rdma_cm_id,
    id: *mut *mut rdma_cm_id,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { get_request(listener) }.map(|requested| {
        // SAFETY: a place for the result.
        unsafe { id.write(requested) };
    }))
}

unsafe fn get_request(listener: *mut rdma_cm_id) -> Result<*mut rdma_cm_id, Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(listener)? };
    if !Shared::get().lock().endpoint(key)?.synchronous {
        return Err(Errno::INVAL);
    }
    // SAFETY: as above, and the channel is the identifier's own.
    let event = unsafe {
        drop_event(listener);
        next((*listener).channel)?
    };
    // SAFETY: just made.
    let (kind, status, id) = unsafe { ((*event).event, (*event).status, (*event).id) };
    if kind != RDMA_CM_EVENT_CONNECT_REQUEST || status != 0 {
        // SAFETY: nobody has seen it.
        unsafe { acknowledge(event) };
        return Err(Errno::INVAL);
    }
    // SAFETY: alive, as before.
    let template = unsafe { (*listener.cast::<Id>()).template };
    if let Some((pd, mut init)) = template {
        // SAFETY: the identifier was just made, and what the template names lives as long as who listens.
        unsafe { (*id).event = event };
        // SAFETY: as above.
        if let Err(error) = unsafe { create_qp(id, pd, &raw mut init) } {
            // SAFETY: nobody has seen it; its event goes with it.
            unsafe { rdma_destroy_id(id) };
            return Err(error);
        }
    } else {
        // SAFETY: as above.
        unsafe { (*id).event = event };
    }
    Ok(id)
}
