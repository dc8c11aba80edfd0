//! Posting made safe by ownership.
//!
//! An [`OwnedQueuePair`] takes a buffer with each request and gives it back with the completion, so
//! that nobody can touch, reuse or free bytes that the device is working on. Code that forbids
//! `unsafe` can use everything here; the promise is made once, by the type of the buffers
//! ([`Registered`]).
//!
//! Every request is signaled, except that a chain makes one completion. Nothing is allocated after
//! [`OwnedQueuePair::new`], but by [`OwnedQueuePair::prepare`], which lays out a chain that is executed
//! many times.

mod error;
mod prepared;
mod queue_pair;
mod request;
mod slots;
#[cfg(test)]
mod tests;

use std::fmt;

pub use self::{
    error::{PostError, Rejected},
    prepared::{Prepared, PreparedFields, PreparedRequest},
    queue_pair::OwnedQueuePair,
};
use crate::{MemoryRegion, Sge, WcStatus};

/// A buffer in registered memory.
///
/// # Safety
/// [`sge`](Self::sge) always gives the same range of memory. That memory is valid for reading and
/// writing, and stays where it is when the value moves, as long as the value lives. While the value
/// is inside an [`OwnedQueuePair`] no other code of this process holds a reference to those bytes,
/// or counts on their values, but through a reference to the value itself that the queue pair gave.
pub unsafe trait Registered: Send {
    /// Address, length and local key of the whole buffer.
    fn sge(&self) -> Sge;
}

// SAFETY: the range is fixed; it is valid for as long as the region lives, by the device's memory that
// it keeps or by the contract of `ProtectionDomain::reg_mr`, either of which also says that no one
// counts on the bytes while the device is at work on them.
unsafe impl Registered for MemoryRegion {
    /// The whole region, or its first 4,294,967,295 bytes.
    #[inline]
    fn sge(&self) -> Sge {
        let length = u32::try_from(self.len()).unwrap_or(u32::MAX);
        Sge {
            addr: self.addr(),
            length,
            lkey: self.lkey(),
        }
    }
}

/// What a request was.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum WorkKind {
    /// An atomic; the buffer holds the value from before.
    Atomic,
    /// An execution of a prepared chain.
    Prepared,
    /// One READ or a chain of READs.
    Read,
    /// A receive; a message is in the buffer.
    Recv,
    /// A receive that a WRITE with immediate used up; the buffer was not written to.
    RecvWrite,
    /// A SEND.
    Send,
    /// A WRITE.
    Write,
}

/// A request that the device has finished with.
pub struct Completed<B> {
    /// What posting it gave.
    pub token: u64,
    /// What it was.
    pub kind: WorkKind,
    /// How it ended.
    pub status: WcStatus,
    /// Bytes received or read; 0 for other kinds and after an error.
    pub byte_len: u32,
    /// The immediate that came with a message or a WRITE, host byte order.
    pub imm: Option<u32>,
    /// The buffer; `None` for inline data.
    pub buffer: Option<B>,
}

impl<B> fmt::Debug for Completed<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Completed")
            .field("token", &format_args!("{:#x}", self.token))
            .field("kind", &self.kind)
            .field("status", &self.status)
            .field("byte_len", &self.byte_len)
            .field("imm", &self.imm)
            .finish_non_exhaustive()
    }
}
