#![doc = include_str!("../README.md")]

pub mod copy;
pub mod ffi;
pub mod owned;
pub mod soft;

mod ah;
mod async_event;
mod channel;
mod context;
mod cq;
mod device;
#[cfg(feature = "drop-in")]
mod drop_in;
mod error;
#[cfg(test)]
mod fake;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod memory;
mod mr;
mod mw;
mod pd;
mod prepared;
mod provider;
mod qp;
#[cfg(feature = "rdma-core")]
mod rdma_core;
mod srq;
#[cfg(test)]
mod tests;
mod work;

pub use ah::AddressHandle;
pub use async_event::{AsyncEvent, AsyncEventKind};
pub use channel::{CompletionChannel, CompletionEvent};
pub use context::{Context, GID_INDEX_VARIABLE, Gid};
pub use cq::CompletionQueue;
pub use device::{DEVICE_VARIABLE, Device, devices, find_device, fork_init};
pub use error::{
    AsyncEventError, BindError, CreateError, DeregisterError, DeviceError, EventError, MemoryError,
    PollError, QueuePairError, RawPostError, ReregisterError, ResizeError, SharedReceiveQueueError,
};
pub use memory::HostMemory;
pub use mr::{AccessFlags, MemoryRegion, Rereg};
pub use mw::{BindInfo, MemoryWindow, MwType};
pub use pd::ProtectionDomain;
pub use prepared::{PreparedSend, RequestFields};
pub use qp::{
    ParseEndpointError, PathOptions, QpAttrMask, QpState, QpType, QueuePair, QueuePairEndpoint,
    QueuePairInit,
};
pub use srq::SharedReceiveQueue;
pub use work::{RemoteAddr, SendFlags, Sge, WcOpcode, WcStatus, WorkCompletion};
