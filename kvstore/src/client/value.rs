//! Values in registered memory of the client: to be put, and got.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};

use mr_pool::Buffer;
use wire::{Received, View};

/// Registered memory for one value to be put: write it through `DerefMut`, then
/// [`Client::put_buffer`](crate::Client::put_buffer). Dropping it gives the memory back.
///
/// If the connection is lost while the value is being written to the server, the memory may be lost with it: the
/// buffer is then empty, and putting it again is an error.
pub struct ValueBuffer {
    pub(super) buffer: Option<Buffer>,
    /// The client it is of.
    pub(super) client: u64,
}

impl Deref for ValueBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().map_or(&[], Buffer::as_slice)
    }
}

impl DerefMut for ValueBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().map_or(&mut [], Buffer::as_mut_slice)
    }
}

impl fmt::Debug for ValueBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ValueBuffer")
            .field("length", &self.len())
            .finish_non_exhaustive()
    }
}

/// A value that was got: its bytes, in registered memory of this client that nobody can write while this lives.
/// Dropping it gives the memory back to its pool.
pub struct Value {
    held: Held,
}

/// Where the bytes arrived.
enum Held {
    /// In a buffer of their own, by READ.
    Read(Buffer, Range<usize>),
    /// In the body of a message.
    Message(Received),
}

impl Value {
    /// `range` lies within the buffer.
    pub(super) fn read(buffer: Buffer, range: Range<usize>) -> Self {
        Self {
            held: Held::Read(buffer, range),
        }
    }

    pub(super) fn message(message: Received) -> Self {
        Self {
            held: Held::Message(message),
        }
    }

    /// The bytes as an archived `T`, in place. Every call validates all of it; keep the reference.
    ///
    /// # Errors
    /// [`ViewError`]: the bytes are not an archive of `T`.
    pub fn view<T: View>(&self) -> Result<&T::Archived, ViewError> {
        wire::view_bytes::<T>(self).map_err(|cause| ViewError {
            length: self.len(),
            expected: std::any::type_name::<T>(),
            cause: Box::new(cause),
        })
    }
}

impl Deref for Value {
    type Target = [u8];

    #[inline]
    fn deref(&self) -> &[u8] {
        match &self.held {
            Held::Read(buffer, range) => buffer.as_slice().get(range.clone()).unwrap_or_default(),
            Held::Message(message) => message.body(),
        }
    }
}

impl AsRef<[u8]> for Value {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

impl fmt::Debug for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Value")
            .field("length", &self.len())
            .finish_non_exhaustive()
    }
}

/// A value that is not what was expected.
#[derive(Debug, thiserror::Error)]
#[error("value of {length} bytes is not a valid {expected}: {cause}")]
#[non_exhaustive]
pub struct ViewError {
    /// Bytes of the value.
    pub length: usize,
    /// The type asked for.
    pub expected: &'static str,
    /// What the validator said.
    #[source]
    pub cause: Box<wire::Cause>,
}

/// A value that was got as a `T`.
pub struct Typed<T> {
    value: Value,
    of: PhantomData<fn() -> T>,
}

impl<T: View> Typed<T> {
    pub(super) fn new(value: Value) -> Self {
        Self {
            value,
            of: PhantomData,
        }
    }

    /// The archived value, in place. Every call validates all of it; keep the reference.
    ///
    /// # Errors
    /// [`ViewError`]: the bytes are not an archive of `T`.
    pub fn view(&self) -> Result<&T::Archived, ViewError> {
        self.value.view::<T>()
    }

    /// The bytes.
    pub fn into_value(self) -> Value {
        self.value
    }
}

impl<T> fmt::Debug for Typed<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Typed")
            .field("value", &self.value)
            .finish_non_exhaustive()
    }
}
