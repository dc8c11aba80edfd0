//! Channels and their events, and the list of devices.

use core::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use rustix::io::Errno;
use verbs_sys::ffi::ibv_context;

use super::{code, failed, pointer};
use crate::abi::{rdma_cm_event, rdma_cm_event_type, rdma_event_channel};
use crate::deliver::{self, Next};
use crate::device::last_errno;
use crate::id::Channel;
use crate::shared::Shared;

/// rdma_create_event_channel(3).
#[unsafe(no_mangle)]
pub extern "C" fn rdma_create_event_channel() -> *mut rdma_event_channel {
    let shared = Shared::get();
    // A program asks this to learn whether there is a device at all.
    pointer(
        shared
            .devices()
            .and_then(|_| Channel::create(&mut shared.lock())),
    )
}

/// rdma_destroy_event_channel(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_event_channel(channel: *mut rdma_event_channel) {
    if !channel.is_null() {
        // SAFETY: by the caller's promise.
        unsafe { Channel::destroy(&mut Shared::get().lock(), channel) };
    }
}

unsafe extern "C-unwind" {
    // The libc crate's does not unwind.
    fn recv(fd: c_int, buffer: *mut c_void, len: usize, flags: c_int) -> isize;
    fn pause() -> c_int;
}

/// rdma_get_cm_event(3). A thread that waits in it can be cancelled, pthread_cancel(3), as the system call of the C library
/// is such a point. The thread then unwinds through this function, which therefore has nothing to be dropped while it waits;
/// of a channel that a cancelled thread waited for, the descriptors stay.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn rdma_get_cm_event(
    channel: *mut rdma_event_channel,
    event: *mut *mut rdma_cm_event,
) -> c_int {
    if event.is_null() {
        return code(Err(Errno::INVAL));
    }
    loop {
        // SAFETY: by the caller's promise; a channel that ends while this waits has no event for it.
        let ends = match unsafe { deliver::look(channel) } {
            Ok(Next::Event(next)) => {
                // SAFETY: a place for the result.
                unsafe { event.write(next) };
                return 0;
            }
            Ok(Next::Later(ends)) => Arc::into_raw(ends),
            Ok(Next::Never) => {
                // SAFETY: it only waits for a signal.
                unsafe { pause() };
                return -1;
            }
            Err(error) => return failed(error),
        };
        let mut byte = 0_u8;
        // SAFETY: just made from a reference that is given back below.
        let fd = unsafe { (*ends).fd() };
        // SAFETY: an open descriptor, and a place for a byte.
        let received = unsafe { recv(fd, (&raw mut byte).cast(), 1, libc::MSG_PEEK) };
        // Before what is dropped changes it.
        let error = (received < 0).then(last_errno);
        // SAFETY: it was made above, and is not used any more.
        drop(unsafe { Arc::from_raw(ends) });
        if let Some(error) = error {
            return failed(error);
        }
    }
}

/// rdma_ack_cm_event(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_ack_cm_event(event: *mut rdma_cm_event) -> c_int {
    if event.is_null() {
        return code(Err(Errno::INVAL));
    }
    // SAFETY: by the caller's promise.
    unsafe { deliver::acknowledge(event) };
    0
}

/// rdma_event_str(3).
#[unsafe(no_mangle)]
pub extern "C" fn rdma_event_str(event: rdma_cm_event_type) -> *const c_char {
    let name = match event {
        0 => c"RDMA_CM_EVENT_ADDR_RESOLVED",
        1 => c"RDMA_CM_EVENT_ADDR_ERROR",
        2 => c"RDMA_CM_EVENT_ROUTE_RESOLVED",
        3 => c"RDMA_CM_EVENT_ROUTE_ERROR",
        4 => c"RDMA_CM_EVENT_CONNECT_REQUEST",
        5 => c"RDMA_CM_EVENT_CONNECT_RESPONSE",
        6 => c"RDMA_CM_EVENT_CONNECT_ERROR",
        7 => c"RDMA_CM_EVENT_UNREACHABLE",
        8 => c"RDMA_CM_EVENT_REJECTED",
        9 => c"RDMA_CM_EVENT_ESTABLISHED",
        10 => c"RDMA_CM_EVENT_DISCONNECTED",
        11 => c"RDMA_CM_EVENT_DEVICE_REMOVAL",
        12 => c"RDMA_CM_EVENT_MULTICAST_JOIN",
        13 => c"RDMA_CM_EVENT_MULTICAST_ERROR",
        14 => c"RDMA_CM_EVENT_ADDR_CHANGE",
        15 => c"RDMA_CM_EVENT_TIMEWAIT_EXIT",
        _ => c"UNKNOWN EVENT",
    };
    name.as_ptr()
}

/// rdma_get_devices(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_devices(count: *mut c_int) -> *mut *mut ibv_context {
    pointer(Shared::get().devices().and_then(|devices| {
        let bytes = (devices.len() + 1) * size_of::<*mut ibv_context>();
        // SAFETY: any size may be asked for.
        let list: *mut *mut ibv_context = unsafe { libc::malloc(bytes) }.cast();
        if list.is_null() {
            return Err(Errno::NOMEM);
        }
        let contexts = devices.iter().map(|device| device.context);
        for (index, context) in contexts.chain([core::ptr::null_mut()]).enumerate() {
            // SAFETY: there is a place for each, and for the null behind them.
            unsafe { list.add(index).write(context) };
        }
        // SAFETY: null, or a place for the result.
        if let Some(count) = unsafe { count.as_mut() } {
            *count = devices.len() as c_int;
        }
        Ok(list)
    }))
}

/// rdma_free_devices(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_free_devices(list: *mut *mut ibv_context) {
    // SAFETY: it came from `rdma_get_devices`, which has it from malloc.
    unsafe { libc::free(list.cast()) };
}
