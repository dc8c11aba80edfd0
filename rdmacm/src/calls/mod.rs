//! The calls of librdmacm, under the names of the C library.
//!
//! Each keeps the contract of its man page. Most check their arguments, look up the identifier's other
//! half, and begin what then goes on by messages and events.

#![allow(clippy::missing_safety_doc)] // the man pages

mod addresses;
mod addrinfo;
mod channels;
mod connections;
mod endpoints;
mod ids;
mod queues;
mod unsupported;

use core::ffi::c_int;

use rustix::io::Errno;

fn set_errno(error: Errno) {
    // SAFETY: the place is this thread's.
    unsafe { *libc::__errno_location() = error.raw_os_error() };
}

/// What a call that gives an `int` returns.
fn code(result: Result<(), Errno>) -> c_int {
    match result {
        Ok(()) => 0,
        Err(error) => failed(error),
    }
}

/// What it returns on failure.
fn failed(error: Errno) -> c_int {
    set_errno(error);
    -1
}

/// What a call that gives a pointer returns.
fn pointer<T>(result: Result<*mut T, Errno>) -> *mut T {
    result.unwrap_or_else(|error| {
        set_errno(error);
        core::ptr::null_mut()
    })
}

/// All of them, for tests to call.
#[cfg(test)]
pub mod testing {
    pub use super::addresses::*;
    pub use super::addrinfo::*;
    pub use super::channels::*;
    pub use super::connections::*;
    pub use super::endpoints::*;
    pub use super::ids::*;
    pub use super::queues::*;
}
