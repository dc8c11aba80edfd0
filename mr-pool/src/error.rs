//! What can go wrong, and what to do about it.

use std::time::Duration;

use thiserror::Error;
use verbs_sys::AccessFlags;

use crate::source::SourceError;

/// Why [`PoolBuilder::build`](crate::PoolBuilder::build) refused.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum BuildError {
    /// The access flags let peers write, which the bytes of a private buffer, being visible as a
    /// slice, must not suffer.
    #[error(
        "access {access:?} lets peers write, so bytes may not be seen as slices: \
         make the pool shared with PoolBuilder::shared, or drop those flags"
    )]
    PeersMayWrite {
        /// The flags asked for.
        access: AccessFlags,
    },
    /// No span of blocks fits under the ceiling.
    #[error(
        "a ceiling of {ceiling} bytes is below the {least} a pool divides: \
         raise PoolBuilder::ceiling"
    )]
    CeilingTooLow {
        /// The ceiling asked for, in bytes.
        ceiling: usize,
        /// The lowest there may be, in bytes.
        least: usize,
    },
}

/// Why a buffer could not be had. Nothing was taken, and nothing stays registered because of it.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum PoolError {
    /// Registering more would pass the ceiling, and the pool does not wait.
    #[error(
        "taking {requested} bytes would pass the pool's ceiling of {ceiling} registered bytes \
         ({registered} are registered, {live} of them in live buffers): \
         drop buffers, or raise PoolBuilder::ceiling"
    )]
    CeilingReached {
        /// Length asked for, in bytes.
        requested: usize,
        /// Bytes registered.
        registered: usize,
        /// Bytes of live buffers.
        live: usize,
        /// The ceiling, in bytes.
        ceiling: usize,
    },
    /// The pool waited for buffers to come back, and too few did.
    #[error(
        "taking {requested} bytes waited {waited:?} at the pool's ceiling of {ceiling} registered \
         bytes ({registered} are registered, {live} of them in live buffers): drop buffers, raise \
         PoolBuilder::ceiling, or wait longer with PoolBuilder::at_ceiling"
    )]
    CeilingTimeout {
        /// Length asked for, in bytes.
        requested: usize,
        /// Bytes registered.
        registered: usize,
        /// Bytes of live buffers.
        live: usize,
        /// The ceiling, in bytes.
        ceiling: usize,
        /// How long it waited.
        waited: Duration,
    },
    /// The device or the allocator refused.
    #[error(
        "registering {len} bytes failed: {source} \
         (if it is for want of memory, see the locked-memory limit, `ulimit -l`)"
    )]
    Register {
        /// Bytes it tried to register.
        len: usize,
        /// The refusal.
        source: SourceError,
    },
    /// No state of the pool could serve this length.
    #[error(
        "{requested} bytes can never be had under the pool's ceiling of {ceiling} registered \
         bytes: raise PoolBuilder::ceiling"
    )]
    TooLong {
        /// Length asked for, in bytes.
        requested: usize,
        /// The ceiling, in bytes.
        ceiling: usize,
    },
}

/// An access outside a buffer.
#[derive(Clone, Copy, Debug, Eq, Error, PartialEq)]
#[error("{len} bytes at offset {offset} reach beyond a buffer of {buffer} bytes")]
pub struct RangeError {
    /// Where the access starts, in bytes.
    pub offset: usize,
    /// Its length, in bytes.
    pub len: usize,
    /// The buffer's length, in bytes.
    pub buffer: usize,
}
