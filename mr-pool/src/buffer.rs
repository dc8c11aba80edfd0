//! Buffers: registered memory that returns to its pool when dropped.

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

use crate::error::RangeError;
use crate::free_list::Block;
use crate::raw::Bytes;
use crate::{class, dedicated, engine};

/// A pool's kind: whether peers may write its memory.
pub trait Kind: sealed::Sealed + Send + Sync + 'static {}

/// Peers may read the memory but not write it, so a buffer's bytes can be seen as a slice.
#[derive(Clone, Copy, Debug)]
pub struct Private(());

/// Peers may write the memory, or do atomics on it, at any time: bytes are copied in and out.
///
/// ```compile_fail
/// fn peers_may_be_writing(buffer: &mr_pool::Buffer<mr_pool::Shared>) -> &[u8] {
///     buffer.as_slice()
/// }
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Shared(());

impl Kind for Private {}
impl Kind for Shared {}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Private {}
    impl Sealed for super::Shared {}
}

/// Registered memory, aligned to 64 bytes, for one owner; dropping it returns it to its pool.
///
/// It holds what it held when it was last dropped: nothing is cleared. It may outlive every handle
/// of its pool, and be dropped by any thread.
pub struct Buffer<K: Kind = crate::Private> {
    bytes: Bytes,
    /// rkey above lkey.
    keys: u64,
    /// Number of the pool it goes back to.
    pool: u64,
    /// What goes back.
    block: Block,
    kind: PhantomData<K>,
}

impl<K: Kind> Drop for Buffer<K> {
    #[inline]
    fn drop(&mut self) {
        engine::give(self.pool, self.block);
    }
}

impl<K: Kind> Buffer<K> {
    #[inline]
    pub(crate) fn new(pool: u64, block: Block, addr: NonNull<u8>, keys: u64, len: usize) -> Self {
        Self {
            bytes: Bytes::claim(addr, len),
            keys,
            pool,
            block,
            kind: PhantomData,
        }
    }

    /// Address of the first byte, as work requests and peers name it.
    #[inline]
    pub fn addr(&self) -> u64 {
        self.bytes.addr().as_ptr().expose_provenance() as u64
    }

    /// Address of the first byte, for posting work by hand: valid for [`len`](Self::len) bytes
    /// while the buffer lives. Whoever writes through it answers for the slices of a private
    /// buffer, and for races on a shared one.
    #[inline]
    pub fn as_ptr(&self) -> *mut u8 {
        self.bytes.addr().as_ptr()
    }

    /// The key for local work requests.
    #[inline]
    pub fn lkey(&self) -> u32 {
        self.keys as u32
    }

    /// The key for peers.
    #[inline]
    pub fn rkey(&self) -> u32 {
        (self.keys >> 32) as u32
    }

    /// Length, in bytes: what was asked for, or less after [`truncate`](Self::truncate).
    #[inline]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Whether it has no bytes.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.bytes.len() == 0
    }

    /// Bytes of the block behind it, at least [`len`](Self::len).
    pub fn capacity(&self) -> usize {
        match self.block.is_dedicated() {
            false => class::size(self.block.class()),
            true => dedicated::len(self.pool, self.block.key()),
        }
    }

    /// Whether it has a registration of its own, which ends with it: it was taken longer than the
    /// largest class, or from an unpooled pool. The memory of any other buffer stays registered when
    /// it is dropped, until the pool gives up the region.
    #[inline]
    pub fn is_dedicated(&self) -> bool {
        self.block.is_dedicated()
    }

    /// Shortens it to `len` bytes; a longer `len` changes nothing. The block stays the same.
    #[inline]
    pub fn truncate(&mut self, len: usize) {
        self.bytes.set_len(len.min(self.len()));
    }

    /// Lengthens (or shortens) it to `len` bytes of the same block.
    ///
    /// # Errors
    /// [`RangeError`] for more than [`capacity`](Self::capacity); nothing changes then.
    #[inline]
    pub fn resize(&mut self, len: usize) -> Result<(), RangeError> {
        let capacity = self.capacity();
        if len > capacity {
            return Err(RangeError {
                offset: 0,
                len,
                buffer: capacity,
            });
        }
        self.bytes.set_len(len);
        Ok(())
    }

    #[inline]
    fn check(&self, offset: usize, len: usize) -> Result<(), RangeError> {
        let buffer = self.len();
        match offset.checked_add(len) {
            Some(end) if end <= buffer => Ok(()),
            _ => Err(RangeError {
                offset,
                len,
                buffer,
            }),
        }
    }
}

impl Buffer<Private> {
    /// The same memory as a shared buffer: its bytes are no longer seen as a slice, but can be
    /// written through `&self`, in whole words. For memory that peers go on reading while it is
    /// written; what peers may do stays what the pool was registered for, and the memory goes back
    /// to the pool that it came from.
    #[inline]
    pub fn into_shared(self) -> Buffer<Shared> {
        let this = ManuallyDrop::new(self);
        Buffer::new(
            this.pool,
            this.block,
            this.bytes.addr(),
            this.keys,
            this.len(),
        )
    }

    /// The bytes.
    #[inline]
    pub fn as_slice(&self) -> &[u8] {
        self.bytes.as_slice()
    }

    /// The bytes, for writing.
    #[inline]
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        self.bytes.as_mut_slice()
    }

    /// Copies `from` to `offset`.
    ///
    /// # Errors
    /// [`RangeError`] if it would reach beyond the buffer; nothing is written then.
    #[inline]
    pub fn write_at(&mut self, offset: usize, from: &[u8]) -> Result<(), RangeError> {
        self.check(offset, from.len())?;
        self.as_mut_slice()[offset..offset + from.len()].copy_from_slice(from);
        Ok(())
    }

    /// Copies from `offset` to `into`.
    ///
    /// # Errors
    /// [`RangeError`] if it would reach beyond the buffer; nothing is read then.
    #[inline]
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, into.len())?;
        into.copy_from_slice(&self.as_slice()[offset..offset + into.len()]);
        Ok(())
    }
}

impl Buffer<Shared> {
    /// Copies `from` to `offset`. Peers may read and write the bytes meanwhile: aligned words of 8
    /// bytes are written whole and once ([`verbs_sys::copy`]).
    ///
    /// # Errors
    /// [`RangeError`] if it would reach beyond the buffer; nothing is written then.
    #[inline]
    pub fn write_at(&self, offset: usize, from: &[u8]) -> Result<(), RangeError> {
        self.check(offset, from.len())?;
        self.bytes.write_shared(offset, from);
        Ok(())
    }

    /// Copies from `offset` to `into`. Peers may write the bytes meanwhile: aligned words of 8
    /// bytes are read whole and once.
    ///
    /// # Errors
    /// [`RangeError`] if it would reach beyond the buffer; nothing is read then.
    #[inline]
    pub fn read_at(&self, offset: usize, into: &mut [u8]) -> Result<(), RangeError> {
        self.check(offset, into.len())?;
        self.bytes.read_shared(offset, into);
        Ok(())
    }
}

impl AsRef<[u8]> for Buffer<Private> {
    fn as_ref(&self) -> &[u8] {
        self.as_slice()
    }
}

impl AsMut<[u8]> for Buffer<Private> {
    fn as_mut(&mut self) -> &mut [u8] {
        self.as_mut_slice()
    }
}

impl<K: Kind> fmt::Debug for Buffer<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("addr", &format_args!("{:#x}", self.addr()))
            .field("len", &self.len())
            .field("capacity", &self.capacity())
            .field("lkey", &format_args!("{:#x}", self.lkey()))
            .field("rkey", &format_args!("{:#x}", self.rkey()))
            .finish()
    }
}
