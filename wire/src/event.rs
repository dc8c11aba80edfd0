//! What an endpoint tells its thread.

use std::net::SocketAddr;

use mr_pool::Buffer;
use verbs_sys::WcStatus;

use crate::header::FrameError;
use crate::message::{OutgoingMessage, Received};

/// Names a connection of one endpoint. An id is never used again: with an old one, every call is an
/// error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

impl ConnectionId {
    /// A small number that no other connection of the endpoint has now, below
    /// [`Config::max_connections`](crate::Config::max_connections): for a table beside the
    /// endpoint's.
    pub fn index(&self) -> usize {
        self.index as usize
    }

    /// The id as one number, to be kept where only a number fits.
    pub fn to_bits(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.index)
    }

    /// The id that [`to_bits`](Self::to_bits) made a number of.
    pub fn from_bits(bits: u64) -> Self {
        Self {
            index: bits as u32,
            generation: (bits >> 32) as u32,
        }
    }
}

/// Something that happened to an endpoint.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A connection that was [handed over](crate::Established::hand_over) is here.
    Connected {
        /// Its id from now on.
        conn: ConnectionId,
        /// The other side's TCP address.
        peer: SocketAddr,
    },
    /// A message has come.
    Message {
        /// From where.
        conn: ConnectionId,
        /// The message; it may be kept.
        message: Received,
    },
    /// A [`read`](crate::Endpoint::read) or [`read_chain`](crate::Endpoint::read_chain) is over.
    ReadDone {
        /// On which connection.
        conn: ConnectionId,
        /// What the caller gave with it.
        token: u64,
        /// Whether the bytes are there. Where not, the connection ends.
        result: Result<(), WcStatus>,
        /// The buffer that was read into.
        buffer: Buffer,
    },
    /// A [`write`](crate::Endpoint::write) or [`write_chain`](crate::Endpoint::write_chain) is over.
    WriteDone {
        /// On which connection.
        conn: ConnectionId,
        /// What the caller gave with it.
        token: u64,
        /// Whether the bytes are there. Where not, the connection ends.
        result: Result<(), WcStatus>,
        /// The buffer that was written from.
        buffer: Buffer,
    },
    /// A connection has ended; this is the last event with its id. Everything that was on its way
    /// is over, and the messages that could not be sent are dropped.
    Disconnected {
        /// Which.
        conn: ConnectionId,
        /// Why.
        cause: DisconnectCause,
    },
}

/// Why a connection ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DisconnectCause {
    /// The peer closed it on purpose.
    #[error("closed by the peer")]
    Closed,
    /// The peer's process or host is gone.
    #[error("the peer is gone")]
    PeerGone,
    /// A work request failed.
    #[error("a work request failed: {status:?}")]
    WorkRequest {
        /// The first status that was not a success.
        status: WcStatus,
    },
    /// The peer sent something that is not a message.
    #[error("the peer broke the protocol: {0}")]
    Frame(FrameError),
    /// The peer sent a message of a kind that there is not.
    #[error("the peer broke the protocol: message of reserved kind {kind:#06x}")]
    Kind {
        /// The kind.
        kind: u16,
    },
    /// The peer returned more credits than it was lent.
    #[error("the peer broke the protocol: it returned more credits than there are")]
    Credits,
    /// The peer said something over the socket that has no place there.
    #[error("the peer broke the protocol: it said something else than goodbye over the socket")]
    Socket,
    /// The device refused a work request.
    #[error("the device refused a work request; see the log")]
    Refused,
    /// The endpoint's completion queue failed; all of its connections end.
    #[error("the completion queue failed; see the log")]
    CompletionQueue,
}

/// Why a message was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SendErrorKind {
    /// As many messages wait for the peer as [`Config::queue_limit`](crate::Config::queue_limit)
    /// allows: try again after the next event of the connection.
    #[error("send: the connection's queue is full; go on after its next event")]
    WouldBlock,
    /// The connection has ended, or never was one of this endpoint.
    #[error("send: there is no such connection")]
    UnknownConnection,
    /// The message is longer than the peer's receive buffers.
    #[error(
        "send: message of {len} bytes is longer than the {limit} bytes that the connection can carry"
    )]
    TooLong {
        /// Bytes of the frame.
        len: usize,
        /// Bytes that there may be.
        limit: u32,
    },
    /// Nothing was encoded into the message.
    #[error("send: the message is empty; encode something first")]
    Empty,
}

/// A message that was not taken, and why.
#[derive(Debug, thiserror::Error)]
#[error("{kind}")]
pub struct SendError {
    /// Why.
    pub kind: SendErrorKind,
    /// The message.
    pub message: OutgoingMessage,
}

/// Why a READ or WRITE was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum OperationErrorKind {
    /// The send queue is full: try again after the next event of the connection.
    #[error("the connection's send queue is full; go on after its next event")]
    WouldBlock,
    /// The connection has ended, or never was one of this endpoint.
    #[error("there is no such connection")]
    UnknownConnection,
    /// A range is not within the buffer.
    #[error("a range is not within the buffer")]
    OutOfRange,
    /// The chain is empty, or longer than the send queue.
    #[error("the chain is empty or longer than the send queue")]
    ChainLength,
    /// The device refused the work request, and the connection ends.
    #[error("the device refused the work request; the connection ends")]
    Refused,
}

/// A READ or WRITE that was not taken, and why.
#[derive(Debug, thiserror::Error)]
#[error("{operation}: {kind}")]
pub struct OperationError {
    /// `"read"` or `"write"`.
    pub operation: &'static str,
    /// Why.
    pub kind: OperationErrorKind,
    /// The buffer that was to be read into or written from. It is missing only where half of a
    /// chain was posted; the device may be using it until the connection has ended.
    pub buffer: Option<Buffer>,
}
