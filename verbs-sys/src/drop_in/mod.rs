//! The software device as a C library: `libibverbs.so.1` for programs that were built against rdma-core's.
//!
//! What is here only gives the provider's calls the names of the C library, which `libibverbs.map` puts
//! under the versions that programs ask for, and lets [real devices](real) stand beside it. `cargo xtask dist` builds
//! it.

#[cfg(feature = "rdma-core")]
compile_error!(
    "features `drop-in` and `rdma-core` exclude each other: one is the C library, one calls it"
);

mod calls;
mod devices;
mod log;
mod names;
mod private;
mod real;
mod real_only;
mod tables;
mod waits;

pub(crate) use calls::query_port_sized;
