#![doc = include_str!("../README.md")]
#![deny(unsafe_code)]

mod barrier;
mod buffer;
mod class;
mod dedicated;
mod device;
mod engine;
mod error;
mod free_list;
mod grow;
mod local;
mod pool;
mod raw;
mod segmented;
mod shard;
mod source;
mod space;
mod stats;
mod sync;
#[cfg(test)]
mod tests;

/// The layer below, of which this crate's API has types.
pub use verbs_sys;

pub use buffer::{Buffer, Kind, Private, Shared};
pub use error::{BuildError, PoolError, RangeError};
pub use pool::{AtCeiling, Pool, PoolBuilder};
pub use stats::{ClassStats, Stats};
