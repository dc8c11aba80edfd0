//! Devices: the software one, and after it the real ones that there are.

use core::ffi::{c_char, c_int};
use core::ptr;

use super::log;
use super::real::{self, Real, call};
use crate::ffi::*;
use crate::soft::{self, PROVIDER};

/// What stands in front of a list that was given out: how many pointers it is in all, and the list of the system's
/// library, which lives as long.
const FRONT: usize = 2;

/// ibv_get_device_list(3). Ours is the first, as it is where there are no others.
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device {
    log::start();
    let theirs = real::load().map_or(ptr::null_mut(), list_of);
    let mut list = vec![ptr::null_mut(), theirs.cast(), real::soft_device()];
    if !theirs.is_null() {
        let mut next = theirs;
        // SAFETY: the list ends in a null pointer, which is not passed.
        while let Some(device) = unsafe { next.read().as_mut() } {
            list.push(device);
            // SAFETY: as above.
            next = unsafe { next.add(1) };
        }
    }
    // SAFETY: null, or a place for the count, by the man page.
    if let Some(count) = unsafe { count.as_mut() } {
        *count = (list.len() - FRONT) as c_int;
    }
    list.push(ptr::null_mut());
    list[0] = ptr::without_provenance_mut(list.len());
    let list: *mut *mut ibv_device = Box::into_raw(list.into_boxed_slice()).cast();
    // SAFETY: there are more.
    unsafe { list.add(FRONT) }
}

/// The list of the system's library, null if it has none.
fn list_of(real: &Real) -> *mut *mut ibv_device {
    let count = ptr::null_mut();
    let list = call!(real, ibv_get_device_list(count: *mut c_int) -> *mut *mut ibv_device);
    if list.is_null() {
        let error = std::io::Error::last_os_error();
        tracing::warn!(%error, "the system's library lists no devices");
    }
    list
}

/// ibv_free_device_list(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_free_device_list(list: *mut *mut ibv_device) {
    if list.is_null() {
        return;
    }
    // SAFETY: the list came from `ibv_get_device_list`, which put these in front of it, and is freed once.
    let all = unsafe {
        let front = list.sub(FRONT);
        Box::from_raw(ptr::slice_from_raw_parts_mut(front, front.read().addr()))
    };
    let list: *mut *mut ibv_device = all[1].cast();
    if let Some(real) = real::loaded().filter(|_| !list.is_null()) {
        call!(real, ibv_free_device_list(list: *mut *mut ibv_device) -> ());
    }
}

/// ibv_get_device_name(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_get_device_name(device: *mut ibv_device) -> *const c_char {
    // SAFETY: a device of the list; the name ends in a 0.
    unsafe { (&raw const (*device).name).cast() }
}

/// ibv_open_device(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_open_device(device: *mut ibv_device) -> *mut ibv_context {
    // SAFETY: a device of the list, by the man page.
    let Some(real) = (unsafe { real::of(device) }) else {
        // SAFETY: the provider's contract is the man page's.
        return unsafe { (PROVIDER.open_device)(device) };
    };
    let context = call!(real, ibv_open_device(device: *mut ibv_device) -> *mut ibv_context);
    // SAFETY: just opened.
    unsafe { real::watch(context) };
    context
}

/// ibv_import_device(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_import_device(cmd_fd: c_int) -> *mut ibv_context {
    let Some(real) = real::load().filter(|_| is_of_kernel(cmd_fd)) else {
        // SAFETY: the contract is the man page's.
        return unsafe { soft::import_device(cmd_fd) };
    };
    let context = call!(real, ibv_import_device(cmd_fd: c_int) -> *mut ibv_context);
    // SAFETY: just opened.
    unsafe { real::watch(context) };
    context
}

/// Whether a descriptor is of a file of the kernel's for a device; ours are of memory.
fn is_of_kernel(fd: c_int) -> bool {
    // SAFETY: zeros are valid for numbers.
    let mut status: libc::stat = unsafe { core::mem::zeroed() };
    // SAFETY: any number, and a place for the result.
    let found = unsafe { libc::fstat(fd, &raw mut status) } == 0;
    found && status.st_mode & libc::S_IFMT == libc::S_IFCHR
}

/// ibv_close_device(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_close_device(context: *mut ibv_context) -> c_int {
    // SAFETY: an open context, by the man page.
    let Some(real) = (unsafe { real::of(context) }) else {
        // SAFETY: the provider's contract is the man page's.
        return unsafe { (PROVIDER.close_device)(context) };
    };
    // Before another thread can be given the same address.
    real::forget(context);
    call!(real, ibv_close_device(context: *mut ibv_context) -> c_int)
}

/// ibv_ack_async_event(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ibv_ack_async_event(event: *mut ibv_async_event) {
    if real::loaded().is_some() {
        // SAFETY: an event that was not yet acknowledged, by the man page.
        let Some(context) = (unsafe { real::context_of(&*event) }) else {
            // Nobody counts those of ports and devices.
            return;
        };
        // SAFETY: the object is alive, so its context is.
        if let Some(real) = unsafe { real::of(context) } {
            return call!(real, ibv_ack_async_event(event: *mut ibv_async_event) -> ());
        }
    }
    // SAFETY: the provider's contract is the man page's.
    unsafe { (PROVIDER.ack_async_event)(event) }
}

/// ibv_fork_init(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_fork_init() -> c_int {
    let ours = (PROVIDER.fork_init)();
    real::fork_init().unwrap_or(ours)
}

/// ibv_is_fork_initialized(3): `IBV_FORK_UNNEEDED` for the software device.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_is_fork_initialized() -> c_int {
    real::loaded().map_or(2, |real| call!(real, ibv_is_fork_initialized() -> c_int))
}
