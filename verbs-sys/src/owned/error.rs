//! Why a request was not posted.

use std::{fmt, io, ops::Range};

/// A request that was not posted, with the buffer it came with.
pub struct Rejected<B> {
    /// Why.
    pub error: PostError,
    /// The buffer. It is missing only with [`PostError::ChainBroken`]: the queue pair keeps it until
    /// it is dropped, because the device may be using it.
    pub buffer: Option<B>,
}

impl<B> Rejected<B> {
    pub(super) fn new(error: PostError, buffer: B) -> Self {
        Self {
            error,
            buffer: Some(buffer),
        }
    }
}

impl<B> fmt::Debug for Rejected<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rejected")
            .field("error", &self.error)
            .finish_non_exhaustive()
    }
}

impl<B> fmt::Display for Rejected<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<B> std::error::Error for Rejected<B> {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.error.source()
    }
}

/// Drops the buffer.
impl<B> From<Rejected<B>> for PostError {
    fn from(rejected: Rejected<B>) -> Self {
        rejected.error
    }
}

/// Why a request was not posted.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// A chain was posted in part. The queue pair has been moved to the error state.
    #[error("only {posted} of a chain of {len} requests were posted; the connection is lost")]
    ChainBroken {
        /// Requests that were posted.
        posted: usize,
        /// Requests of the chain.
        len: usize,
        /// The system's error.
        source: io::Error,
    },
    /// A chain with no requests, or with more than the queue can ever hold.
    #[error("a chain of {len} requests cannot be posted to a queue of {max}")]
    ChainLength {
        /// Requests of the chain.
        len: usize,
        /// Requests that the queue holds.
        max: usize,
    },
    /// The device refused the request.
    #[error("{call} refused the request; is the queue pair connected?")]
    Device {
        /// The call.
        call: &'static str,
        /// The system's error.
        source: io::Error,
    },
    /// The queue is full; a completion makes room.
    #[error("the {queue} queue is full with {max} requests; poll for completions first")]
    Full {
        /// Which queue.
        queue: &'static str,
        /// Requests that it holds.
        max: usize,
    },
    /// More bytes than the queue pair takes inline.
    #[error("{len} bytes are too many for inline data, of which this queue pair takes {max}")]
    InlineTooLong {
        /// Bytes given.
        len: usize,
        /// Most bytes.
        max: u32,
    },
    /// A prepared chain has no such buffer.
    #[error("there is no buffer {index} in a chain of {len} buffers")]
    NoBuffer {
        /// The index given, counted from 0.
        index: usize,
        /// Buffers of the chain.
        len: usize,
    },
    /// The chain was prepared by another queue pair, or is released.
    #[error("this queue pair has no such prepared chain; it was released, or is of another one")]
    NotPrepared,
    /// A prepared chain is still at work.
    #[error("{executions} executions of the chain have not completed; poll for completions first")]
    Outstanding {
        /// How many.
        executions: u32,
    },
    /// The range does not lie in the buffer.
    #[error("bytes {} to {} do not lie in a buffer of {len}", .range.start, .range.end)]
    Range {
        /// The range given.
        range: Range<usize>,
        /// Bytes of the buffer.
        len: u32,
    },
}
