//! Where registered memory comes from: a trait, so that the pool's logic is tested without a
//! device.

use std::error::Error;
use std::fmt;
use std::ptr::NonNull;

/// A failure of the device or of the allocator, its own words kept.
pub(crate) type SourceError = Box<dyn Error + Send + Sync>;

/// Registers memory.
pub(crate) trait Source: Send + Sync + fmt::Debug {
    /// Allocates `len` bytes, aligned to 64, initialized, and registers them. On failure nothing
    /// stays allocated or registered.
    fn register(&self, len: usize) -> Result<Box<dyn Registration>, SourceError>;
}

/// Registered memory, valid and in place until [`deregister`](Self::deregister).
pub(crate) trait Registration: Send + Sync + fmt::Debug {
    /// The first byte.
    fn addr(&self) -> NonNull<u8>;
    /// Bytes registered.
    fn len(&self) -> usize;
    /// The key for local work requests.
    fn lkey(&self) -> u32;
    /// The key for peers.
    fn rkey(&self) -> u32;
    /// Deregisters, then frees. Nothing of the memory may be in use.
    fn deregister(self: Box<Self>) -> Result<(), SourceError>;
}
