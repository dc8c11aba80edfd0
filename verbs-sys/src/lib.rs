//! RDMA verbs in user space.

#![deny(unused_must_use)]

pub mod copy;
pub mod ffi;
mod provider;
pub mod soft;
