//! RDMA verbs in user space.

#![deny(unused_must_use)]

pub mod ffi;
mod provider;
pub mod soft;
