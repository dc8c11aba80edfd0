//! Messages on their way out and in: each owns the registered buffer that it stands in.

use std::fmt;

use mr_pool::{Buffer, Pool, PoolError};

use crate::archive::{Encode, View};
use crate::encode::{EncodeError, encode_internal, encode_raw, encode_with_body};
use crate::header::{CREDITS_OFFSET, Frame, FrameError, Header};
use crate::view::{ViewError, view};

/// A message to be sent, in the registered buffer that it is sent from.
///
/// Writing it again replaces what was there. It can be made and written on any thread.
pub struct OutgoingMessage {
    buffer: Buffer,
    /// Bytes of the frame; 0 until one is written.
    len: usize,
}

impl OutgoingMessage {
    /// An empty message with room for a frame of `capacity` bytes, header included, in memory of
    /// `pool`.
    ///
    /// # Errors
    ///
    /// [`PoolError`] where the pool has no memory for it.
    #[inline]
    pub fn new(pool: &Pool, capacity: usize) -> Result<Self, PoolError> {
        pool.take(capacity).map(Self::from)
    }

    /// Writes `value` as a message of kind `kind`; `tag` is for the caller, a request's number for
    /// example.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] where it does not fit; the message is then empty.
    pub fn encode<T: Encode>(&mut self, kind: u16, tag: u64, value: &T) -> Result<(), EncodeError> {
        self.encode_with_body(kind, tag, value, 0).map(|_| ())
    }

    /// Writes `value` as a message of kind `kind` and returns the `body_len` bytes behind it, which
    /// hold anything and are for the caller to fill.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] where it does not fit; the message is then empty.
    pub fn encode_with_body<T: Encode>(
        &mut self,
        kind: u16,
        tag: u64,
        value: &T,
        body_len: u32,
    ) -> Result<&mut [u8], EncodeError> {
        self.len = 0;
        let (len, body) = encode_with_body(self.buffer.as_mut_slice(), kind, tag, value, body_len)?;
        self.len = len;
        Ok(body)
    }

    /// Writes a message without an archive and returns its `body_len` bytes, which hold anything
    /// and are for the caller to fill.
    ///
    /// # Errors
    ///
    /// [`EncodeError`] where it does not fit; the message is then empty.
    pub fn encode_raw(
        &mut self,
        kind: u16,
        tag: u64,
        body_len: u32,
    ) -> Result<&mut [u8], EncodeError> {
        self.len = 0;
        let (len, body) = encode_raw(self.buffer.as_mut_slice(), kind, tag, body_len)?;
        self.len = len;
        Ok(body)
    }

    /// Bytes of the frame; 0 until one is written.
    #[inline]
    pub fn frame_len(&self) -> usize {
        self.len
    }

    /// What was written.
    ///
    /// # Errors
    ///
    /// [`FrameError::Truncated`] where nothing was.
    pub fn frame(&self) -> Result<Frame<'_>, FrameError> {
        Frame::parse(self.buffer.as_slice().get(..self.len).unwrap_or_default())
    }

    /// The buffer, to be used for something else.
    #[inline]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }

    /// A message that says nothing but its kind, one of this crate's own.
    pub(crate) fn internal(mut buffer: Buffer, kind: u16) -> Self {
        let len = encode_internal(buffer.as_mut_slice(), kind).unwrap_or(0);
        Self { buffer, len }
    }

    /// Fills in the credits that go with the message, at the last moment.
    #[inline]
    pub(crate) fn set_credits(&mut self, credits: u16) {
        if let Some(field) = self
            .buffer
            .as_mut_slice()
            .get_mut(CREDITS_OFFSET..CREDITS_OFFSET + 2)
        {
            field.copy_from_slice(&credits.to_le_bytes());
        }
    }
}

impl From<Buffer> for OutgoingMessage {
    /// An empty message in a buffer that was used for something else, a received message for
    /// example.
    #[inline]
    fn from(buffer: Buffer) -> Self {
        Self { buffer, len: 0 }
    }
}

impl fmt::Debug for OutgoingMessage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutgoingMessage")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}

/// A message that has come, in the registered buffer that it was received into, which nobody else
/// can write.
///
/// It may be kept as long as it is of use: a fresh buffer takes its place when the endpoint is polled
/// next.
pub struct Received {
    buffer: Buffer,
    header: Header,
}

impl Received {
    /// Takes a buffer whose first `len` bytes the device has written.
    #[inline]
    pub(crate) fn parse(buffer: Buffer, len: usize) -> Result<Self, FrameError> {
        let bytes = buffer.as_slice();
        let header = *Frame::parse(bytes.get(..len).unwrap_or(bytes))?.header();
        Ok(Self { buffer, header })
    }

    /// What the message is.
    #[inline]
    pub fn kind(&self) -> u16 {
        self.header.kind
    }

    /// What the sender tagged it with.
    #[inline]
    pub fn tag(&self) -> u64 {
        self.header.tag
    }

    /// Header and parts.
    #[inline]
    pub fn frame(&self) -> Frame<'_> {
        let len = self.header.frame_len() as usize;
        Frame::from_parts(
            self.header,
            self.buffer.as_slice().get(..len).unwrap_or_default(),
        )
    }

    /// The value, in place, after validation.
    ///
    /// # Errors
    ///
    /// [`ViewError`] where it is not a `T`.
    #[inline]
    pub fn view<T: View>(&self) -> Result<&T::Archived, ViewError> {
        view::<T>(&self.frame())
    }

    /// The raw bytes behind the value.
    #[inline]
    pub fn body(&self) -> &[u8] {
        self.frame().body()
    }

    /// The header.
    #[inline]
    pub(crate) fn header(&self) -> &Header {
        &self.header
    }

    /// The buffer, to be used for something else: a reply for example.
    #[inline]
    pub fn into_buffer(self) -> Buffer {
        self.buffer
    }
}

impl fmt::Debug for Received {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Received")
            .field("header", &self.header)
            .finish_non_exhaustive()
    }
}
