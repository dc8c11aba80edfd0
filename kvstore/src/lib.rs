//! Put and get over registered memory: a key-value store whose reads need no server.
//!
//! A [`Server`] keeps values in self-describing blocks of registered memory. A [`Client`] that has learned where a value
//! lies READs it from there, verifies it and asks nobody; everything else is a message.
#![forbid(unsafe_code)]

mod block;
mod client;
mod config;
mod error;
mod hash;
mod limits;
mod protocol;
mod server;

pub use client::{Client, ClientStats, Typed, Value, ValueBuffer};
pub use config::{ClientConfig, INLINE_VALUE, Memory, ServerConfig, Wait};
pub use error::{ConnectError, OperationError, Refusal, ServeError};
pub use limits::{KEY_LENGTHS, LimitError, MAX_VALUE, check_key, check_value};
pub use protocol::Statistics;
pub use server::{Server, Shutdown};
