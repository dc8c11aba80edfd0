//! The software device. Until it is complete no call succeeds.

use core::ffi::{c_int, c_void};
use std::time::Duration;

use crate::{ffi, provider::Provider};

/// What registering memory shall cost on the software device, beside the work it does anyway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegistrationCost {
    /// Of each registration.
    pub base: Duration,
    /// Of each page in it.
    pub per_page: Duration,
}

impl RegistrationCost {
    /// As published for an RNIC: about 50 us for one page.
    pub const PUBLISHED: Self = Self {
        base: Duration::from_micros(50),
        per_page: Duration::from_nanos(250),
    };
}

/// How to open the software device.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Options {
    /// Charge this for each registration; `None` for nothing.
    pub registration_cost: Option<RegistrationCost>,
}

/// Opens `device`, null and `errno` on failure.
///
/// # Safety
/// `device` is of this provider's list, which has not been freed.
pub(crate) unsafe fn open(
    _device: *mut ffi::ibv_device,
    _options: &Options,
) -> *mut ffi::ibv_context {
    no_object()
}

fn no_object<T>() -> *mut T {
    rustix_errno(libc::EOPNOTSUPP);
    core::ptr::null_mut()
}

fn rustix_errno(value: c_int) {
    // SAFETY: the address of this thread's errno is always valid.
    unsafe { *libc::__errno_location() = value };
}

/// The software device's control calls.
pub(crate) static PROVIDER: Provider = Provider {
    is_software: true,
    get_device_list: |_| no_object::<*mut ffi::ibv_device>(),
    free_device_list: |_| (),
    get_device_guid: |_| 0,
    open_device: |_| no_object(),
    close_device: |_| libc::EOPNOTSUPP,
    query_device: |_, _| libc::EOPNOTSUPP,
    query_port: |_, _, _| libc::EOPNOTSUPP,
    query_gid: |_, _, _, _| libc::EOPNOTSUPP,
    alloc_memory: |_, _| no_object::<c_void>(),
    free_memory: |_, _, _| libc::EOPNOTSUPP,
    alloc_pd: |_| no_object(),
    dealloc_pd: |_| libc::EOPNOTSUPP,
    reg_mr: |_, _, _, _| no_object(),
    dereg_mr: |_| libc::EOPNOTSUPP,
    create_comp_channel: |_| no_object(),
    destroy_comp_channel: |_| libc::EOPNOTSUPP,
    get_cq_event: |_, _, _| -1,
    ack_cq_events: |_, _| (),
    create_cq: |_, _, _, _, _| no_object(),
    destroy_cq: |_| libc::EOPNOTSUPP,
    create_qp: |_, _| no_object(),
    modify_qp: |_, _, _| libc::EOPNOTSUPP,
    query_qp: |_, _, _, _| libc::EOPNOTSUPP,
    destroy_qp: |_| libc::EOPNOTSUPP,
};
