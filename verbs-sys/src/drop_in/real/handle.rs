//! From an object to its device.

use crate::ffi::*;

/// A pointer that programs have of an object.
pub(in crate::drop_in) trait Handle: Copy {
    /// The device it belongs to.
    ///
    /// # Safety
    ///
    /// The object is alive, as is the context it belongs to; whose they are does not matter.
    unsafe fn device(self) -> *mut ibv_device;
}

impl Handle for *mut ibv_device {
    unsafe fn device(self) -> *mut ibv_device {
        self
    }
}

/// An object of an open device, or the device that is open.
pub(super) trait Open: Copy {
    /// The context it belongs to.
    ///
    /// # Safety
    ///
    /// The object is alive.
    unsafe fn context(self) -> *mut ibv_context;
}

impl Open for *mut ibv_context {
    unsafe fn context(self) -> *mut ibv_context {
        self
    }
}

/// Objects whose structure names the context.
macro_rules! of_context {
    ($($type:ty),+) => {
        $(impl Open for *mut $type {
            unsafe fn context(self) -> *mut ibv_context {
                // SAFETY: alive, by the caller's promise.
                unsafe { (*self).context }
            }
        })+

        open!(ibv_context, $($type),+);
    };
}

macro_rules! open {
    ($($type:ty),+) => {
        $(impl Handle for *mut $type {
            unsafe fn device(self) -> *mut ibv_device {
                // SAFETY: alive, as its context is, by the caller's promise.
                unsafe { (*self.context()).device }
            }
        })+
    };
}

of_context!(
    ibv_pd,
    ibv_mr,
    ibv_dm,
    ibv_ah,
    ibv_comp_channel,
    ibv_cq,
    ibv_qp,
    ibv_srq
);

/// The context of an event's object; `None` for an event of a port or of the device.
///
/// # Safety
///
/// The event is not acknowledged yet, so its object is alive.
pub(in crate::drop_in) unsafe fn context_of(event: &ibv_async_event) -> Option<*mut ibv_context> {
    match event.event_type {
        IBV_EVENT_DEVICE_FATAL
        | IBV_EVENT_PORT_ACTIVE
        | IBV_EVENT_PORT_ERR
        | IBV_EVENT_LID_CHANGE
        | IBV_EVENT_PKEY_CHANGE
        | IBV_EVENT_SM_CHANGE
        | IBV_EVENT_CLIENT_REREGISTER
        | IBV_EVENT_GID_CHANGE => None,
        // SAFETY: the other types set a pointer, in the same place for all, and each structure behind it, of
        // a queue of whatever kind, begins with its context.
        _ => Some(unsafe { event.element.wq.cast::<*mut ibv_context>().read() }),
    }
}
