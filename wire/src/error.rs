//! Errors of setting connections up.

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use crate::config::ConfigError;
use crate::greeting::{GreetingError, RejectReason};

/// A failure of the device or of the memory pool, its own words kept.
pub type DeviceFailure = Box<dyn Error + Send + Sync>;

/// Why there is no endpoint.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EndpointError {
    /// A setting has a value it cannot have.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The device cannot do what was asked.
    #[error("endpoint: cannot {doing} on device {device}")]
    Device {
        /// The device's name.
        device: String,
        /// What failed.
        doing: &'static str,
        /// The device's own words.
        source: DeviceFailure,
    },
    /// The kernel has no more descriptors, or the like.
    #[error("endpoint: cannot {doing}")]
    Io {
        /// What failed.
        doing: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
}

/// Why a connection did not come to be, on either side.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The address means nothing.
    #[error("connect: {address} is not an address")]
    Resolve {
        /// What was given.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// Nobody answers there.
    #[error("connect: cannot reach {peer}; is a server listening there?")]
    Unreachable {
        /// The address.
        peer: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The socket failed.
    #[error("greeting with {peer}: cannot {doing}")]
    Io {
        /// The other side.
        peer: SocketAddr,
        /// What failed.
        doing: &'static str,
        /// The kernel's reason.
        source: io::Error,
    },
    /// The peer said nothing for too long.
    #[error("greeting with {peer}: no {waiting_for} within {after:?}")]
    Timeout {
        /// The other side.
        peer: SocketAddr,
        /// What did not come.
        waiting_for: &'static str,
        /// How long it had.
        after: Duration,
    },
    /// The peer closed in the middle.
    #[error("greeting with {peer}: closed by the peer before its {waiting_for}")]
    Closed {
        /// The other side.
        peer: SocketAddr,
        /// What did not come.
        waiting_for: &'static str,
    },
    /// The peer says something that is not a greeting.
    #[error("greeting with {peer}: the peer says something that is not understood")]
    Malformed {
        /// The other side.
        peer: SocketAddr,
        /// What is wrong with it.
        source: GreetingError,
    },
    /// The peer is of another version.
    #[error(
        "greeting with {peer}: wrong protocol version: the peer speaks {theirs}, this side {ours}; use the same release \
         on both sides"
    )]
    Version {
        /// The other side.
        peer: SocketAddr,
        /// Its version.
        theirs: u16,
        /// Ours.
        ours: u16,
    },
    /// The peer refuses.
    #[error("greeting with {peer}: refused by the peer ({reason:?}): {text}")]
    Rejected {
        /// The other side.
        peer: SocketAddr,
        /// Why, for a program.
        reason: RejectReason,
        /// Why, for a person.
        text: String,
    },
    /// This side refuses, and has told the peer so.
    #[error("greeting with {peer}: refused ({reason:?}): {text}")]
    Refused {
        /// The other side.
        peer: SocketAddr,
        /// Why, for a program.
        reason: RejectReason,
        /// Why, for a person.
        text: String,
    },
    /// The device or the memory pool failed while the connection was set up.
    #[error("greeting with {peer}: cannot {doing}")]
    Device {
        /// The other side.
        peer: SocketAddr,
        /// What failed.
        doing: &'static str,
        /// Its own words.
        source: DeviceFailure,
    },
    /// The endpoint has as many connections as it was made for.
    #[error(
        "connect: the endpoint has all of its {limit} connections; close some or raise Config::max_connections"
    )]
    Full {
        /// Connections it takes.
        limit: u32,
    },
    /// The endpoint is gone, or this is not the endpoint that the connection was made for.
    #[error("connect: the endpoint that the connection was made for is not here")]
    WrongEndpoint,
}

/// Why nothing listens.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BindError {
    /// The address means nothing.
    #[error("listen: {address} is not an address")]
    Resolve {
        /// What was given.
        address: String,
        /// The resolver's reason.
        source: io::Error,
    },
    /// Somebody else listens there.
    #[error("listen: address {address} is in use; stop what listens there or choose another port")]
    AddressInUse {
        /// The address.
        address: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// Any other reason.
    #[error("listen: cannot listen at {address}")]
    Io {
        /// The address.
        address: SocketAddr,
        /// The kernel's reason.
        source: io::Error,
    },
    /// There is no endpoint to make connections for.
    #[error("listen: no endpoint to accept connections for")]
    NoEndpoint,
}

/// Why [`Listener::accept`](crate::Listener::accept) returns without a connection.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AcceptError {
    /// [`Stopper::stop`](crate::Stopper::stop) was called.
    #[error("accept: stopped")]
    Stopped,
    /// One peer's connection did not come to be; others are not concerned, and the listener goes
    /// on.
    #[error("accept: a connection did not come to be")]
    Greeting(#[source] ConnectError),
    /// The listening socket failed.
    #[error("accept: the listening socket failed")]
    Io(#[source] io::Error),
}
