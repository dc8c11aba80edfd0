//! The calls that wait, which are points where a thread can be cancelled, pthread_cancel(3), as the C library's are.
//!
//! A cancelled thread unwinds from the call of libc in which it sleeps, through everything above. So it sleeps here, in
//! functions that have nothing to be dropped, and what else they call has come back by then.

use core::ffi::{c_int, c_void};

use super::real::{self, Real, call};
use crate::ffi::*;
use crate::soft;

unsafe extern "C-unwind" {
    // The libc crate's do not unwind.
    fn read(fd: c_int, buffer: *mut c_void, count: usize) -> isize;
    fn poll(fds: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int;
}

unsafe extern "C" {
    fn pthread_setcancelstate(state: c_int, old: *mut c_int) -> c_int;
}

/// `PTHREAD_CANCEL_DISABLE`.
const CANCEL_DISABLE: c_int = 1;

/// Waits for a descriptor to have something to read, -1 with `errno` if that fails. One that is non-blocking is not
/// waited for.
///
/// # Safety
///
/// The descriptor is open.
unsafe extern "C-unwind" fn wait(fd: c_int) -> c_int {
    // SAFETY: an open descriptor.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    if flags >= 0 && flags & libc::O_NONBLOCK != 0 {
        return 0;
    }
    let mut wanted = libc::pollfd {
        fd,
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one structure.
    unsafe { poll(&raw mut wanted, 1, -1) }
}

/// Runs what does not wait, during which the thread is not cancelled: a call of the system's library, where what would
/// unwind it knows nothing of the other namespace, or what holds locks of ours. The former has been [waited for](wait),
/// so it comes back at once, but for one that another thread was quicker to take.
fn uncancelled(call: impl FnOnce() -> c_int) -> c_int {
    let mut before = 0;
    // SAFETY: a place for the old state.
    unsafe { pthread_setcancelstate(CANCEL_DISABLE, &raw mut before) };
    let code = call();
    // SAFETY: as above.
    unsafe { pthread_setcancelstate(before, &raw mut before) };
    code
}

fn real_cq_event(
    real: &Real,
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    uncancelled(
        || call!(real, ibv_get_cq_event(channel: *mut ibv_comp_channel, cq: *mut *mut ibv_cq, cq_context: *mut *mut c_void) -> c_int),
    )
}

fn real_async_event(real: &Real, context: *mut ibv_context, event: *mut ibv_async_event) -> c_int {
    uncancelled(
        || call!(real, ibv_get_async_event(context: *mut ibv_context, event: *mut ibv_async_event) -> c_int),
    )
}

/// ibv_get_cq_event(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_cq_event(
    channel: *mut ibv_comp_channel,
    cq: *mut *mut ibv_cq,
    cq_context: *mut *mut c_void,
) -> c_int {
    // SAFETY: a live channel, by the caller's promise.
    if let Some(real) = unsafe { real::of(channel) } {
        // SAFETY: as above.
        if unsafe { wait((*channel).fd) } < 0 {
            return -1;
        }
        return real_cq_event(real, channel, cq, cq_context);
    }
    loop {
        let mut count = 0_u64;
        // SAFETY: the descriptor of a live channel, by the caller's promise, and a place for as many bytes.
        if unsafe { read((*channel).fd, (&raw mut count).cast(), size_of::<u64>()) } < 0 {
            return -1;
        }
        // SAFETY: by the caller's promise.
        let take = || unsafe { soft::take_cq_event(channel, cq, cq_context) };
        if uncancelled(|| take().into()) != 0 {
            return 0;
        }
    }
}

/// ibv_get_async_event(3).
///
/// # Safety
///
/// As the man page says.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn ibv_get_async_event(
    context: *mut ibv_context,
    event: *mut ibv_async_event,
) -> c_int {
    // SAFETY: an open context, by the caller's promise.
    if let Some(real) = unsafe { real::of(context) } {
        // SAFETY: as above.
        if unsafe { wait((*context).async_fd) } < 0 {
            return -1;
        }
        return real_async_event(real, context, event);
    }
    loop {
        // SAFETY: by the caller's promise.
        if unsafe { soft::take_async_event(context, event) } {
            return 0;
        }
        // SAFETY: the descriptor of an open context, by the caller's promise.
        let fd = unsafe { (*context).async_fd };
        // SAFETY: an open descriptor.
        let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
        if flags >= 0 && flags & libc::O_NONBLOCK != 0 {
            // SAFETY: the place is this thread's.
            unsafe { *libc::__errno_location() = libc::EAGAIN };
            return -1;
        }
        let mut wanted = libc::pollfd {
            fd,
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one structure.
        if unsafe { poll(&raw mut wanted, 1, -1) } < 0 {
            return -1;
        }
    }
}
