//! Real devices, and the kernel's soft ones, through rdma-core.
//!
//! The control calls are those of `ibverbs-sys`; its structures have the layout of ours, which
//! `layout.rs` checks at compile time, so pointers are cast and nothing is converted. `ibverbs`
//! answers what kinds of address a port has.

mod layout;

use std::{
    ffi::{c_int, c_uint, c_void},
    mem::{offset_of, size_of},
    ptr,
};

use ibverbs_sys as sys;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::{
    Gid,
    ffi::{self, ibv_context, ibv_port_attr, verbs_context},
    provider::Provider,
};

/// From this many bytes on, memory is asked for in huge pages.
const HUGE_PAGE: usize = 2 << 20;

// SAFETY of every call below: `Provider` asks its callers for what the C function of the same name
// asks for, and the structures are laid out alike.

/// The control calls of real devices.
pub(crate) static PROVIDER: Provider = Provider {
    is_software: false,
    // SAFETY: it has no conditions.
    fork_init: || unsafe { sys::ibv_fork_init() },
    // SAFETY: see above.
    get_device_list: |count| unsafe { sys::ibv_get_device_list(count).cast() },
    // SAFETY: see above.
    free_device_list: |list| unsafe { sys::ibv_free_device_list(list.cast()) },
    // SAFETY: see above.
    get_device_guid: |device| unsafe { sys::ibv_get_device_guid(device.cast()) },
    // SAFETY: see above.
    open_device: |device| unsafe { sys::ibv_open_device(device.cast()).cast() },
    // SAFETY: see above.
    close_device: |context| unsafe { sys::ibv_close_device(context.cast()) },
    // SAFETY: see above.
    query_device: |context, attr| unsafe { sys::ibv_query_device(context.cast(), attr.cast()) },
    query_port,
    query_gid: |context, port, index, gid| {
        // SAFETY: see above.
        unsafe { sys::ibv_query_gid(context.cast(), port, index, gid.cast()) }
    },
    query_pkey: |context, port, index, pkey| {
        // SAFETY: see above.
        unsafe { sys::ibv_query_pkey(context.cast(), port, index, pkey.cast()) }
    },
    get_async_event: |context, event| {
        // SAFETY: see above.
        unsafe { sys::ibv_get_async_event(context.cast(), event.cast()) }
    },
    // SAFETY: see above.
    ack_async_event: |event| unsafe { sys::ibv_ack_async_event(event.cast()) },
    alloc_memory,
    free_memory,
    // SAFETY: see above.
    alloc_pd: |context| unsafe { sys::ibv_alloc_pd(context.cast()).cast() },
    // SAFETY: see above.
    dealloc_pd: |pd| unsafe { sys::ibv_dealloc_pd(pd.cast()) },
    reg_mr: |pd, addr, len, access| {
        // SAFETY: see above.
        unsafe { sys::ibv_reg_mr(pd.cast(), addr, len, access).cast() }
    },
    rereg_mr: |mr, flags, pd, addr, len, access| {
        // SAFETY: see above.
        unsafe { sys::ibv_rereg_mr(mr.cast(), flags, pd.cast(), addr, len, access) }
    },
    // SAFETY: see above.
    dereg_mr: |mr| unsafe { sys::ibv_dereg_mr(mr.cast()) },
    // SAFETY: see above.
    create_ah: |pd, attr| unsafe { sys::ibv_create_ah(pd.cast(), attr.cast()).cast() },
    // SAFETY: see above.
    destroy_ah: |ah| unsafe { sys::ibv_destroy_ah(ah.cast()) },
    // SAFETY: see above.
    create_comp_channel: |context| unsafe { sys::ibv_create_comp_channel(context.cast()).cast() },
    // SAFETY: see above.
    destroy_comp_channel: |channel| unsafe { sys::ibv_destroy_comp_channel(channel.cast()) },
    // SAFETY: see above.
    get_cq_event: |channel, cq, word| unsafe {
        sys::ibv_get_cq_event(channel.cast(), cq.cast(), word)
    },
    // SAFETY: see above.
    ack_cq_events: |cq, count| unsafe { sys::ibv_ack_cq_events(cq.cast(), count) },
    create_cq: |context, cqe, word, channel, vector| {
        // SAFETY: see above.
        unsafe { sys::ibv_create_cq(context.cast(), cqe, word, channel.cast(), vector).cast() }
    },
    // SAFETY: see above.
    resize_cq: |cq, cqe| unsafe { sys::ibv_resize_cq(cq.cast(), cqe) },
    // SAFETY: see above.
    destroy_cq: |cq| unsafe { sys::ibv_destroy_cq(cq.cast()) },
    // SAFETY: see above.
    create_qp: |pd, attr| unsafe { sys::ibv_create_qp(pd.cast(), attr.cast()).cast() },
    // SAFETY: see above.
    modify_qp: |qp, attr, mask| unsafe { sys::ibv_modify_qp(qp.cast(), attr.cast(), mask) },
    query_qp: |qp, attr, mask, init| {
        // SAFETY: see above.
        unsafe { sys::ibv_query_qp(qp.cast(), attr.cast(), mask, init.cast()) }
    },
    // SAFETY: see above.
    destroy_qp: |qp| unsafe { sys::ibv_destroy_qp(qp.cast()) },
    // SAFETY: see above.
    create_srq: |pd, init| unsafe { sys::ibv_create_srq(pd.cast(), init.cast()).cast() },
    // SAFETY: see above.
    modify_srq: |srq, attr, mask| unsafe { sys::ibv_modify_srq(srq.cast(), attr.cast(), mask) },
    // SAFETY: see above.
    query_srq: |srq, attr| unsafe { sys::ibv_query_srq(srq.cast(), attr.cast()) },
    // SAFETY: see above.
    destroy_srq: |srq| unsafe { sys::ibv_destroy_srq(srq.cast()) },
};

/// What the inline `ibv_query_port` of C does: the newer function if the context has one, else the
/// old symbol, which knows a shorter structure.
unsafe fn query_port(context: *mut ibv_context, port: u8, attr: *mut ibv_port_attr) -> c_int {
    // SAFETY: the caller gives an open context.
    let is_extended = unsafe { (*context).abi_compat } == ffi::__VERBS_ABI_IS_EXTENDED;
    if is_extended {
        let outer = context.wrapping_byte_sub(offset_of!(verbs_context, context));
        let outer = outer.cast::<verbs_context>();
        // SAFETY: an extended context stands in a `verbs_context`, whose size field is right before
        // it, whatever the size.
        let size = unsafe { (&raw const (*outer).sz).read() };
        if size >= size_of::<verbs_context>() - offset_of!(verbs_context, query_port) {
            // SAFETY: the structure is large enough to have this field.
            if let Some(query_port) = unsafe { (&raw const (*outer).query_port).read() } {
                // SAFETY: the caller gives room for the attributes.
                return unsafe { query_port(context, port, attr, size_of::<ibv_port_attr>()) };
            }
        }
    }
    // SAFETY: the caller gives room for the attributes, of which the old symbol fills a part.
    unsafe {
        attr.write(ibv_port_attr::zeroed());
        sys::ibv_query_port(context.cast(), port, attr.cast())
    }
}

unsafe fn alloc_memory(_: *mut ibv_context, len: usize) -> *mut c_void {
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice.
    match unsafe { mmap_anonymous(ptr::null_mut(), len, access, MapFlags::PRIVATE) } {
        Ok(addr) => {
            if len >= HUGE_PAGE {
                // SAFETY: the mapping was just made. Without huge pages small ones do.
                let _ = unsafe { madvise(addr, len, Advice::LinuxHugepage) };
            }
            addr
        }
        Err(error) => {
            // SAFETY: the address of this thread's errno is always valid.
            unsafe { *libc::__errno_location() = error.raw_os_error() };
            ptr::null_mut()
        }
    }
}

unsafe fn free_memory(_: *mut ibv_context, addr: *mut c_void, len: usize) -> c_int {
    // SAFETY: the caller gives a mapping of `alloc_memory` that nobody uses any more.
    match unsafe { munmap(addr, len) } {
        Ok(()) => 0,
        Err(error) => error.raw_os_error(),
    }
}

/// The addresses of port 1 of the device `name` that speak RoCE v2 or InfiniBand, with their
/// indices, if `ibverbs` can tell. The port must be active.
pub(crate) fn routable_gids(name: &str) -> Option<Vec<(u8, Gid)>> {
    let devices = ibverbs::devices().ok()?;
    let device = devices.iter().find(|device| {
        device
            .name()
            .is_some_and(|found| found.to_bytes() == name.as_bytes())
    })?;
    let context = device.open().ok()?;
    let table = context.gid_table().iter();
    let found = table
        .filter(|entry| {
            entry.port_num == 1 && entry.gid_type as c_uint != ffi::IBV_GID_TYPE_ROCE_V1
        })
        .filter_map(|entry| {
            let index = u8::try_from(entry.gid_index).ok()?;
            // SAFETY: all 16 bytes are initialized, whichever field they were set by.
            Some((index, Gid(unsafe { sys::ibv_gid::from(entry.gid).raw })))
        });
    Some(found.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_zeroed_aligned_and_freed() {
        for len in [1, 4096, HUGE_PAGE + 1] {
            // SAFETY: no context is needed.
            let addr = unsafe { alloc_memory(ptr::null_mut(), len) };
            assert!(!addr.is_null() && addr.addr() % 4096 == 0);
            // SAFETY: the mapping is `len` bytes long.
            let last = unsafe { addr.cast::<u8>().add(len - 1).read() };
            assert_eq!(last, 0);
            // SAFETY: the mapping is not used any more.
            assert_eq!(unsafe { free_memory(ptr::null_mut(), addr, len) }, 0);
        }
    }

    #[test]
    fn a_device_nobody_has_has_no_addresses() {
        assert!(routable_gids("no such device").is_none());
    }
}
