//! What can go wrong, one type per kind of operation.

use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use wire::{AcceptError, BindError};

use crate::device::Source;
use crate::limits::LimitError;

/// A client could not be connected.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The device could not be found or set up.
    #[error("set up device: {source}")]
    Device {
        /// What the device said; for an unknown name, the names there are.
        #[source]
        source: Source,
    },
    /// Nobody answered as a server should: no server at the address, another protocol or version, or too slow.
    #[error(transparent)]
    Greeting(#[from] wire::ConnectError),
}

/// A server could not be started, or had to stop.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ServeError {
    /// The device could not be found or set up.
    #[error("set up device: {source}")]
    Device {
        /// What the device said; for an unknown name, the names there are.
        #[source]
        source: Source,
    },
    /// The address could not be listened on; it may be in use.
    #[error(transparent)]
    Listen(#[from] BindError),
    /// The listening socket failed.
    #[error(transparent)]
    Accept(AcceptError),
    /// A thread could not be started.
    #[error("start a thread: {0}; raise the limit on threads")]
    Thread(#[source] io::Error),
    /// A worker's device failed, and the server with it.
    #[error("worker: {source}")]
    Worker {
        /// What failed.
        #[source]
        source: Source,
    },
}

/// A put, get, delete or stat failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OperationError {
    /// The connection is gone: the server ended, or an earlier operation closed it. Whether an operation that was on
    /// its way was carried out is unknown. Connect again.
    #[error("connection to the server at {address} is gone: {reason}; connect again")]
    Disconnected {
        /// The server's address.
        address: SocketAddr,
        /// What was seen of it.
        reason: String,
    },
    /// This buffer cannot be put by this client; nothing was sent.
    #[error("the value's buffer {reason}; take another with Client::buffer")]
    Buffer {
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The typed value could not be encoded.
    #[error("encode value: {source}")]
    Encode {
        /// What the serializer said.
        #[source]
        source: Source,
    },
    /// Key or value outside the limits; nothing was sent.
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The client's memory for values is exhausted, or could not be registered; nothing was sent.
    #[error("registered memory for a value of {length} bytes: {source}")]
    Memory {
        /// Bytes of the value.
        length: usize,
        /// What the pool said.
        #[source]
        source: Source,
    },
    /// The server sent what no server of this version sends. The connection was closed.
    #[error("server at {address} sent an unexpected message: {reason}")]
    Protocol {
        /// The server's address.
        address: SocketAddr,
        /// What was wrong with it.
        reason: String,
    },
    /// The server refused; the old value, if any, stands.
    #[error("server refused a value of {length} bytes: {reason}")]
    Refused {
        /// Bytes of the value.
        length: usize,
        /// Why.
        reason: Refusal,
    },
    /// No reply within the configured time. Whether the operation was carried out is unknown. The connection was closed.
    #[error(
        "no reply from the server at {address} within {timeout:?}; connect again, with a longer timeout if need be"
    )]
    TimedOut {
        /// The server's address.
        address: SocketAddr,
        /// The configured time.
        timeout: Duration,
    },
}

/// Why a server refused a request.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Key or value outside the server's limits.
    #[error("key or value outside the server's limits")]
    OutOfLimits,
    /// The ceiling on the server's memory.
    #[error("its memory ceiling is reached; delete values or start it with more memory")]
    OutOfMemory,
    /// The server could not make sense of the request.
    #[error("it did not understand the request")]
    Malformed,
    /// The server could not register memory.
    #[error("it could not register memory; raise its limit on locked memory (ulimit -l)")]
    Registration,
}
