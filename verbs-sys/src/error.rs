//! One error for each kind of operation. The operating system's error is always the `source`.

use std::{ffi::c_int, fmt, io};

use crate::{QpAttrMask, QpState};

/// Finding, opening or asking a device failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DeviceError {
    /// ibv_fork_init(3) failed.
    #[error("ibv_fork_init failed; it must come before anything else is done with a device")]
    Fork(#[source] io::Error),
    /// ibv_get_device_list(3) failed.
    #[error("ibv_get_device_list failed")]
    List(#[source] io::Error),
    /// The list of devices is empty.
    #[error("there is no RDMA device on this machine")]
    None,
    /// The device lacks a function without which nothing works.
    #[error("device {device} does not implement {call}, which every verbs device must have")]
    Incomplete {
        /// Name of the device.
        device: String,
        /// The missing function.
        call: &'static str,
    },
    /// Options of the software device were given for a real one.
    #[error("device {device} is not the software device, so it has no software options")]
    NotSoftware {
        /// Name of the device.
        device: String,
    },
    /// ibv_open_device(3) failed.
    #[error("ibv_open_device({device}) failed; is there permission to use the device?")]
    Open {
        /// Name of the device.
        device: String,
        /// The system's error.
        source: io::Error,
    },
    /// A question to an open device failed.
    #[error("{call} failed on device {device}; check the port and the index")]
    Query {
        /// The call with its arguments.
        call: String,
        /// Name of the device.
        device: String,
        /// The system's error.
        source: io::Error,
    },
    /// No entry of the port's GID table can be used.
    #[error(
        "port {port} of device {device} has no usable GID; set VERBS_GID_INDEX to a valid index"
    )]
    NoGid {
        /// Name of the device.
        device: String,
        /// The port.
        port: u8,
    },
    /// There is no device of that name.
    #[error(
        "there is no device {name:?}; there are: {available}{}",
        if cfg!(feature = "rdma-core") { "" } else { " (a build with the feature rdma-core has real ones, too)" }
    )]
    Unknown {
        /// The name asked for.
        name: String,
        /// The names there are, separated by commas.
        available: String,
    },
}

/// Allocating, registering or deregistering memory failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The device could not allocate memory.
    #[error("could not allocate {len} bytes of memory for the device")]
    Allocate {
        /// Bytes asked for.
        len: usize,
        /// The system's error.
        source: io::Error,
    },
    /// ibv_reg_mr(3) failed.
    #[error(
        "ibv_reg_mr of {len} bytes at {addr:#x} with access {access:#x} failed; remote write and \
         atomic access need local write, and the range must be mapped"
    )]
    Register {
        /// First byte.
        addr: u64,
        /// Bytes.
        len: usize,
        /// The access flags.
        access: u32,
        /// The system's error.
        source: io::Error,
    },
}

/// ibv_dereg_mr(3) failed; the region is given back, still registered.
#[derive(Debug, thiserror::Error)]
#[error("ibv_dereg_mr of the region with rkey {:#x} failed; is a window still bound to it?", .region.rkey())]
pub struct DeregisterError {
    /// The region.
    pub region: crate::MemoryRegion,
    /// The system's error.
    pub source: io::Error,
}

/// ibv_rereg_mr(3) failed; the region is given back.
#[derive(Debug, thiserror::Error)]
#[error(
    "ibv_rereg_mr of the region with rkey {:#x} failed{}; a bound window gives EBUSY, wrong rights or \
     none of the flags EINVAL, memory that is not there EFAULT",
    .region.rkey(),
    if *.is_usable { "" } else { ", and it can only be deregistered" }
)]
pub struct ReregisterError {
    /// The region.
    pub region: crate::MemoryRegion,
    /// Whether the region is what it was. Otherwise it must not be used, only dropped.
    pub is_usable: bool,
    /// The system's error.
    pub source: io::Error,
}

/// Posting the bind of a memory window failed; the window is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// ibv_bind_mw(3) failed.
    #[error(
        "ibv_bind_mw of the window with rkey {rkey:#x} failed; a full queue gives ENOMEM, a region \
         of another protection domain EPERM, a window of type 2 EINVAL"
    )]
    Refused {
        /// The window's key.
        rkey: u32,
        /// The system's error.
        source: io::Error,
    },
    /// Objects of different contexts were to be used together.
    #[error("ibv_bind_mw: the {other} belongs to another context than the window")]
    OtherContext {
        /// What does not belong.
        other: &'static str,
    },
}

/// Creating a protection domain, memory window, completion channel, completion queue, queue pair or
/// shared receive queue failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CreateError {
    /// The device refused.
    #[error("{call} failed; compare the sizes asked for with ibv_query_device")]
    Refused {
        /// The call with its arguments.
        call: String,
        /// The system's error.
        source: io::Error,
    },
    /// Objects of different contexts were to be used together.
    #[error("{call}: the {other} belongs to another context; open the device once and use that")]
    OtherContext {
        /// The call.
        call: &'static str,
        /// What does not belong.
        other: &'static str,
    },
}

/// ibv_modify_qp(3) or ibv_query_qp(3) failed; the queue pair is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum QueuePairError {
    /// The change was refused.
    #[error(
        "ibv_modify_qp of queue pair {qp_num:#x} from {from:?} to {to:?} with {mask:?} failed; \
         the man page lists which attributes each transition needs"
    )]
    Modify {
        /// The queue pair.
        qp_num: u32,
        /// State before the call.
        from: QpState,
        /// State asked for (the one before if the mask names none).
        to: QpState,
        /// Attributes given.
        mask: QpAttrMask,
        /// The system's error.
        source: io::Error,
    },
    /// The question failed.
    #[error("ibv_query_qp of queue pair {qp_num:#x} failed")]
    Query {
        /// The queue pair.
        qp_num: u32,
        /// The system's error.
        source: io::Error,
    },
    /// The port could not be asked for the properties that a connection needs.
    #[error("could not learn about the port of queue pair {qp_num:#x}")]
    Port {
        /// The queue pair.
        qp_num: u32,
        /// Why.
        source: DeviceError,
    },
}

/// ibv_modify_srq(3) or ibv_query_srq(3) failed; the shared receive queue is as before.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SharedReceiveQueueError {
    /// The change was refused.
    #[error(
        "ibv_modify_srq with mask {mask:#x} failed; the size is at least the limit and the receives \
         posted, and not every device changes it"
    )]
    Modify {
        /// `IBV_SRQ_*` bits.
        mask: u32,
        /// The system's error.
        source: io::Error,
    },
    /// The question failed.
    #[error("ibv_query_srq failed")]
    Query(#[source] io::Error),
}

/// Waiting for, taking or asking for a completion event failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EventError {
    /// ibv_get_cq_event(3) failed.
    #[error("ibv_get_cq_event failed")]
    Get(#[source] io::Error),
    /// ibv_req_notify_cq(3) failed.
    #[error("ibv_req_notify_cq failed")]
    Notify(#[source] io::Error),
    /// Waiting for the channel's file descriptor failed.
    #[error("waiting for the completion channel failed")]
    Wait(#[source] io::Error),
}

/// Waiting for or taking an asynchronous event failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AsyncEventError {
    /// ibv_get_async_event(3) failed.
    #[error("ibv_get_async_event failed")]
    Get(#[source] io::Error),
    /// Waiting for the context's file descriptor failed.
    #[error("waiting for an asynchronous event failed")]
    Wait(#[source] io::Error),
}

/// ibv_poll_cq(3) failed: the completion queue is unusable.
#[derive(Debug, thiserror::Error)]
#[error("ibv_poll_cq failed; the completion queue has overrun or its device is gone")]
pub struct PollError {
    /// The system's error.
    pub source: io::Error,
}

/// ibv_resize_cq(3) failed; the completion queue is as before.
#[derive(Debug, thiserror::Error)]
#[error(
    "ibv_resize_cq to {cqe} entries failed; fewer than completions wait and more than max_cqe of the \
     device give EINVAL"
)]
pub struct ResizeError {
    /// Entries asked for.
    pub cqe: u32,
    /// The system's error.
    pub source: io::Error,
}

/// ibv_post_send(3), ibv_post_recv(3) or ibv_post_srq_recv(3) refused a request.
#[derive(thiserror::Error)]
#[error("{call} refused a request; a full queue gives ENOMEM, a wrong request or state EINVAL")]
pub struct RawPostError<R> {
    /// The call.
    pub call: &'static str,
    /// The first request that was not posted; the ones before it in the list were.
    pub bad_wr: *mut R,
    /// The system's error.
    pub source: io::Error,
}

impl<R> fmt::Debug for RawPostError<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RawPostError")
            .field("call", &self.call)
            .field("bad_wr", &self.bad_wr)
            .field("source", &self.source)
            .finish()
    }
}

// SAFETY: the address of the request is only a value here; using it is up to unsafe code.
unsafe impl<R> Send for RawPostError<R> {}
// SAFETY: as above.
unsafe impl<R> Sync for RawPostError<R> {}

/// A C call's result: 0, a positive errno value, or -1 with `errno` set.
#[inline]
pub(crate) fn check(code: c_int) -> io::Result<()> {
    match code {
        0 => Ok(()),
        1.. => Err(io::Error::from_raw_os_error(code)),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Logs that destroying an object failed: a destructor can do no more.
pub(crate) fn log_destroy(call: &'static str, result: io::Result<()>) {
    if let Err(error) = result {
        tracing::error!(call, %error, "could not destroy a verbs object; it leaks");
    }
}
