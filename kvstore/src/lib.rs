#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]

mod block;
mod client;
mod config;
mod device;
mod error;
#[cfg(any(test, fuzzing))]
#[doc(hidden)]
pub mod fuzzing;
mod hash;
mod limits;
mod protocol;
mod segments;
mod server;
mod spin;

pub use client::{Client, ClientStats, Typed, Value, ValueBuffer, ViewError};
pub use config::{ClientConfig, INLINE_VALUE, Memory, ServerConfig, Wait};
pub use error::{ConnectError, OperationError, Refusal, ServeError};
pub use limits::{KEY_LENGTHS, LimitError, MAX_VALUE, check_key, check_value};
pub use protocol::Statistics;
pub use server::{Server, Shutdown};
