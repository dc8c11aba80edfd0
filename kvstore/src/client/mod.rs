//! The client: put, get, delete, each one synchronous operation on one connection.

pub mod locations;

use std::marker::PhantomData;
use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};

use crate::config::ClientConfig;
use crate::error::{ConnectError, OperationError};
use crate::protocol::Statistics;

/// A connection to a server. One operation at a time; for more, connect more clients. `Send`, so it may move between
/// threads.
#[derive(Debug)]
pub struct Client {
    address: SocketAddr,
}

/// What a client counts.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Memory registrations since the client was connected, those of the set-up included.
    pub registrations: u64,
    /// Bytes of registered memory.
    pub registered_bytes: u64,
    /// Gets that were one READ, without the server.
    pub one_sided_gets: u64,
    /// Gets that asked the server.
    pub requested_gets: u64,
    /// Of those, gets whose remembered location turned out to be out of date.
    pub stale_locations: u64,
    /// Puts whose value travelled in the request.
    pub inline_puts: u64,
    /// Puts whose value the server READ from this client.
    pub fetched_puts: u64,
}

/// Registered memory for one value to be put: write it through `DerefMut`, then [`Client::put_buffer`].
#[derive(Debug)]
pub struct ValueBuffer {}

impl Deref for ValueBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &[]
    }
}

impl DerefMut for ValueBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut []
    }
}

/// A value that was got: its bytes, in registered memory of this client that nobody else can write. The memory returns
/// to its pool when this is dropped.
#[derive(Debug)]
pub struct Value {}

impl Deref for Value {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &[]
    }
}

impl Value {
    /// The bytes as an archived `T`, in place. Every call validates; keep the reference.
    ///
    /// # Errors
    /// The bytes are not an archive of `T`.
    pub fn view<T: rkyv::Archive>(&self) -> Result<&T::Archived, OperationError> {
        Err(OperationError::Encode {
            source: "not connected".into(),
        })
    }
}

/// A typed value that was got.
#[derive(Debug)]
pub struct Typed<T> {
    value: Value,
    of: PhantomData<fn() -> T>,
}

impl<T: rkyv::Archive> Typed<T> {
    /// The archived value, in place. Every call validates; keep the reference.
    ///
    /// # Errors
    /// The bytes are not an archive of `T`.
    pub fn view(&self) -> Result<&T::Archived, OperationError> {
        self.value.view::<T>()
    }
}

impl Client {
    /// Connects to the server at `address`.
    ///
    /// # Errors
    /// [`ConnectError`] when the device cannot be had, or no server of this version answers within the timeout.
    pub fn connect(address: SocketAddr, _config: &ClientConfig) -> Result<Self, ConnectError> {
        Ok(Self { address })
    }

    /// The server's address.
    pub fn server(&self) -> SocketAddr {
        self.address
    }

    /// Stores `value` under `key`, replacing what was there. When this returns, every later get of any client sees it
    /// or something newer.
    ///
    /// # Errors
    /// [`OperationError`]; unless it says that the outcome is unknown, the old value stands.
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), OperationError> {
        self.put_with(key, value.len(), |room| room.copy_from_slice(value))
    }

    /// As [`put`](Self::put), with a value of `length` bytes that `fill` writes straight into registered memory. The
    /// memory holds arbitrary bytes before; `fill` overwrites all of it.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_with(
        &mut self,
        _key: &[u8],
        _length: usize,
        _fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), OperationError> {
        Err(self.gone())
    }

    /// Registered memory for a value of `length` bytes, with arbitrary content, to be filled and then put (more than
    /// once if need be).
    ///
    /// # Errors
    /// [`OperationError::Memory`] at the client's ceiling.
    pub fn buffer(&mut self, _length: usize) -> Result<ValueBuffer, OperationError> {
        Err(self.gone())
    }

    /// As [`put`](Self::put), with a value that already is in registered memory.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn put_buffer(&mut self, _key: &[u8], _value: &ValueBuffer) -> Result<(), OperationError> {
        Err(self.gone())
    }

    /// As [`put`](Self::put), with a value that is serialized straight into registered memory.
    ///
    /// # Errors
    /// As [`put`](Self::put), and [`OperationError::Encode`].
    pub fn put_value<T>(&mut self, _key: &[u8], _value: &T) -> Result<(), OperationError> {
        Err(self.gone())
    }

    /// The value of `key`; `None` when there is none.
    ///
    /// # Errors
    /// [`OperationError`].
    pub fn get(&mut self, _key: &[u8]) -> Result<Option<Value>, OperationError> {
        Err(self.gone())
    }

    /// As [`get`](Self::get), for a value that was put with [`put_value`](Self::put_value).
    ///
    /// # Errors
    /// As [`get`](Self::get); whether the bytes are a `T` is checked by [`Typed::view`].
    pub fn get_value<T: rkyv::Archive>(
        &mut self,
        key: &[u8],
    ) -> Result<Option<Typed<T>>, OperationError> {
        Ok(self.get(key)?.map(|value| Typed {
            value,
            of: PhantomData,
        }))
    }

    /// Removes `key`; whether it was there.
    ///
    /// # Errors
    /// [`OperationError`].
    pub fn delete(&mut self, _key: &[u8]) -> Result<bool, OperationError> {
        Err(self.gone())
    }

    /// What the server counts.
    ///
    /// # Errors
    /// [`OperationError`].
    pub fn server_statistics(&mut self) -> Result<Statistics, OperationError> {
        Err(self.gone())
    }

    /// What this client counts.
    pub fn stats(&self) -> ClientStats {
        ClientStats::default()
    }

    fn gone(&self) -> OperationError {
        OperationError::Disconnected {
            address: self.address,
            reason: "not connected".into(),
        }
    }
}
