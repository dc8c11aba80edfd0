//! The client: put, get, delete, each one synchronous operation on one connection.

mod link;
mod locations;
mod typed;
mod value;

use std::fmt;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};

use mr_pool::{Buffer, Pool};
use verbs_sys::RemoteAddr;
use wire::{Encode, Received, View};

pub use value::{Typed, Value, ValueBuffer, ViewError};

use crate::block::{CHECKSUMMED, Checksummed, Expected, HEADER, Header, value_offset};
use crate::config::{ClientConfig, INLINE_VALUE, Memory};
use crate::device;
use crate::error::{ConnectError, OperationError, Refusal};
use crate::hash::key_hash;
use crate::limits::{check_key, check_value};
use crate::protocol::{
    self, ArchivedReply, Commit, Delete, Get, Location, Put, Reply, Reserve, Stat, Statistics,
    Status, Unpin, kind,
};
use crate::segments;
use link::Link;
use locations::Locations;

/// The longest block, in bytes, that a client keeps reserved between two puts: what it may cost the server for each
/// idle client, and small beside what copying a longer value takes.
const RESERVED_AHEAD: usize = 1 << 20;

/// Whether a reserved block is right for a value: long enough, and little of it wasted.
fn suits(block: &Location, length: usize) -> bool {
    let room = block.length as usize;
    length <= room && room - length <= room / 8 + 64
}

/// Where the value of `length` bytes is in a block.
fn value_at(block: &Location, length: usize) -> RemoteAddr {
    RemoteAddr {
        addr: block.address.wrapping_add(value_offset(length) as u64),
        rkey: block.rkey,
    }
}

/// A connection to a server: one operation at a time; for more at once, connect more clients. It may move between
/// threads.
///
/// Every operation ends within the configured time. One that leaves its outcome unknown closes the connection.
pub struct Client {
    /// Tells its buffers from those of other clients of this process.
    number: u64,
    link: Link,
    /// Where buffers for values come from.
    values: Pool,
    messages: Pool,
    locations: Locations,
    /// The block of the server that the next long value may be written to.
    reserved: Option<Location>,
    /// Whether to hold one between operations.
    reserves_ahead: bool,
    inline_value: usize,
    counts: Counts,
    /// Bytes to start with when the next typed value is encoded.
    typed_guess: usize,
}

/// What a client counts. Fields may be added.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ClientStats {
    /// Memory registrations since the client was connected, those of the set-up included.
    pub registrations: u64,
    /// Bytes of registered memory.
    pub registered_bytes: u64,
    /// Gets that were READs from a remembered location, without the server.
    pub one_sided_gets: u64,
    /// Gets that asked the server.
    pub requested_gets: u64,
    /// Of those, gets that found their remembered location out of date first.
    pub stale_locations: u64,
    /// Puts whose value travelled in the request.
    pub inline_puts: u64,
    /// Puts whose value this client wrote to the server's memory.
    pub written_puts: u64,
}

#[derive(Default)]
struct Counts {
    one_sided_gets: u64,
    requested_gets: u64,
    stale_locations: u64,
    inline_puts: u64,
    written_puts: u64,
}

impl Client {
    /// Connects to the server at `address`.
    ///
    /// # Errors
    /// [`ConnectError`] when the device cannot be had, or no server of this version answers within the timeout.
    pub fn connect(address: SocketAddr, config: &ClientConfig) -> Result<Self, ConnectError> {
        let device = |source| ConnectError::Device { source };
        let pd = device::open(config.device.as_deref()).map_err(device)?;
        let messages = device::messages(&pd).map_err(device)?;
        let values =
            device::values(&pd).ceiling(usize::try_from(config.ceiling).unwrap_or(usize::MAX));
        let (values, inline_value) = match config.memory {
            Memory::Pooled => (values, config.inline_value.min(INLINE_VALUE)),
            // The value itself must lie in the memory that is registered for the operation.
            Memory::PerOperation => (values.unpooled(), 0),
        };
        let values = values.build().map_err(|source| device(source.into()))?;
        static LAST: AtomicU64 = AtomicU64::new(0);
        Ok(Self {
            number: LAST.fetch_add(1, Ordering::Relaxed) + 1,
            link: Link::connect(&pd, &messages, address, config)?,
            values,
            messages,
            locations: Locations::new(config.locations),
            reserved: None,
            // The other way to have memory keeps nothing from one operation to the next.
            reserves_ahead: config.memory == Memory::Pooled,
            inline_value,
            counts: Counts::default(),
            typed_guess: 1024,
        })
    }

    /// The server's address.
    pub fn server(&self) -> SocketAddr {
        self.link.server()
    }

    /// Stores `value` under `key`, replacing what was there. After this returns, every get of any client finds it, or
    /// something newer.
    ///
    /// # Errors
    /// [`OperationError`]; unless it says that the outcome is unknown, the old value stands.
    #[inline]
    pub fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), OperationError> {
        self.put_with(key, value.len(), |room| room.copy_from_slice(value))
    }

    /// As [`put`](Self::put), with a value of `length` bytes that `fill` writes straight into registered memory. What
    /// is there before is arbitrary; `fill` should write all of it.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    #[inline]
    pub fn put_with(
        &mut self,
        key: &[u8],
        length: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), OperationError> {
        check_key(key)?;
        self.link.begin();
        if length > self.inline_value {
            let mut value = self.buffer(length)?;
            fill(&mut value);
            return self.put_written(key, &mut value);
        }
        self.counts.inline_puts += 1;
        let message = self.link.message(|message, number| {
            // `inline_value` is a small number.
            message
                .encode_with_body(kind::PUT, number, &Put { key }, length as u32)
                .map(fill)
        })?;
        let reply = self.link.request(message)?;
        self.finish_put(key, length, &reply)
    }

    /// Registered memory for a value of `length` bytes, with arbitrary content: to be filled, then put, as often as
    /// need be.
    ///
    /// # Errors
    /// [`OperationError::Limit`], and [`OperationError::Memory`] at the client's ceiling.
    pub fn buffer(&mut self, length: usize) -> Result<ValueBuffer, OperationError> {
        check_value(length)?;
        let buffer = self.take(length)?;
        Ok(ValueBuffer {
            buffer: Some(buffer),
            client: self.number,
        })
    }

    /// As [`put`](Self::put), with a value that already is in registered memory.
    ///
    /// # Errors
    /// As [`put`](Self::put), and [`OperationError::Buffer`] for one that is not this client's or has lost its memory.
    pub fn put_buffer(
        &mut self,
        key: &[u8],
        value: &mut ValueBuffer,
    ) -> Result<(), OperationError> {
        let reason = if value.buffer.is_none() {
            Some("lost its memory when an operation on it did not end")
        } else if value.client != self.number {
            Some("is another client's")
        } else {
            None
        };
        if let Some(reason) = reason {
            return Err(OperationError::Buffer { reason });
        }
        if value.len() <= self.inline_value {
            return self.put(key, value);
        }
        check_key(key)?;
        self.link.begin();
        self.put_written(key, value)
    }

    /// As [`put`](Self::put), with a value that is serialized straight into registered memory.
    ///
    /// # Errors
    /// As [`put`](Self::put), and [`OperationError::Encode`].
    pub fn put_value<T: Encode>(&mut self, key: &[u8], value: &T) -> Result<(), OperationError> {
        let (mut encoded, guess) =
            typed::encode(value, self.typed_guess, |length| self.buffer(length))?;
        self.typed_guess = guess;
        self.put_buffer(key, &mut encoded)
    }

    /// The value of `key`; `None` when there is none.
    ///
    /// # Errors
    /// [`OperationError`].
    #[inline]
    pub fn get(&mut self, key: &[u8]) -> Result<Option<Value>, OperationError> {
        check_key(key)?;
        self.link.begin();
        let hash = key_hash(key);
        if let Some(location) = self.locations.get(hash, key) {
            let value = self.read_remembered(hash, location)?;
            if value.is_some() {
                self.counts.one_sided_gets += 1;
                return Ok(value);
            }
            self.counts.stale_locations += 1;
            self.locations.forget(hash);
        }
        self.get_by_request(hash, key)
    }

    /// As [`get`](Self::get), for a value that was put with [`put_value`](Self::put_value).
    ///
    /// # Errors
    /// As [`get`](Self::get); whether the bytes are a `T` is checked by [`Typed::view`].
    pub fn get_value<T: View>(&mut self, key: &[u8]) -> Result<Option<Typed<T>>, OperationError> {
        Ok(self.get(key)?.map(Typed::new))
    }

    /// Removes `key`; whether it was there.
    ///
    /// # Errors
    /// [`OperationError`].
    pub fn delete(&mut self, key: &[u8]) -> Result<bool, OperationError> {
        check_key(key)?;
        self.link.begin();
        let message = self
            .link
            .message(|message, number| message.encode(kind::DELETE, number, &Delete { key }))?;
        let reply = self.link.request(message)?;
        self.locations.forget(key_hash(key));
        let (status, _, _) = self.reply(&reply)?;
        match status {
            Status::Ok => Ok(true),
            Status::NotFound => Ok(false),
            status => Err(self.refused(status, 0)),
        }
    }

    /// What the server counts.
    ///
    /// # Errors
    /// [`OperationError`].
    pub fn server_statistics(&mut self) -> Result<Statistics, OperationError> {
        self.link.begin();
        let message = self
            .link
            .message(|message, number| message.encode(kind::STAT, number, &Stat { reserved: 0 }))?;
        let reply = self.link.request(message)?;
        match reply.view::<Statistics>() {
            Ok(statistics) if reply.kind() == kind::STATISTICS => Ok(statistics.into()),
            Ok(_) => Err(self.unexpected(&reply)),
            Err(error) => Err(self.link.broken(error.to_string())),
        }
    }

    /// What this client counts.
    pub fn stats(&self) -> ClientStats {
        let (values, messages) = (self.values.stats(), self.messages.stats());
        ClientStats {
            registrations: values.registrations + messages.registrations,
            registered_bytes: (values.registered_bytes + messages.registered_bytes) as u64,
            one_sided_gets: self.counts.one_sided_gets,
            requested_gets: self.counts.requested_gets,
            stale_locations: self.counts.stale_locations,
            inline_puts: self.counts.inline_puts,
            written_puts: self.counts.written_puts,
        }
    }

    #[inline]
    fn take(&self, length: usize) -> Result<Buffer, OperationError> {
        self.values
            .take(length)
            .map_err(|source| OperationError::Memory {
                length,
                source: source.into(),
            })
    }

    /// WRITEs the value to a block of the server, and asks it behind that to publish it. The copy is ours to make: this
    /// processor has just written the value.
    fn put_written(&mut self, key: &[u8], value: &mut ValueBuffer) -> Result<(), OperationError> {
        self.counts.written_puts += 1;
        let length = value.len();
        let block = match self.reserved.take().filter(|block| suits(block, length)) {
            Some(block) => block,
            None => self.reserve(length)?,
        };
        let request = Commit {
            key,
            reservation: block.version,
            length: length as u64,
            again: self.reserves_ahead && block.length as usize <= RESERVED_AHEAD,
        };
        let message = self
            .link
            .message(|message, number| message.encode(kind::COMMIT, number, &request))?;
        let reply = self.link.write_and_request(
            &mut value.buffer,
            length,
            value_at(&block, length),
            message,
        )?;
        self.finish_put(key, length, &reply)
    }

    fn reserve(&mut self, length: usize) -> Result<Location, OperationError> {
        let request = Reserve {
            length: length as u64,
        };
        let message = self
            .link
            .message(|message, number| message.encode(kind::RESERVE, number, &request))?;
        let reply = self.link.request(message)?;
        let (status, ..) = self.reply(&reply)?;
        if status != Status::Ok {
            return Err(self.refused(status, length));
        }
        match self.reserved.take() {
            Some(block) if block.length as usize >= length => Ok(block),
            _ => Err(self.link.broken("a reservation without a block".into())),
        }
    }

    #[inline]
    fn finish_put(
        &mut self,
        key: &[u8],
        length: usize,
        reply: &Received,
    ) -> Result<(), OperationError> {
        let (status, location, cacheable) = self.reply(reply)?;
        if status != Status::Ok {
            return Err(self.refused(status, length));
        }
        let hash = key_hash(key);
        if cacheable {
            self.locations.set(hash, key, location);
        } else {
            self.locations.forget(hash);
        }
        Ok(())
    }

    /// READs the value at a remembered location; `None` when it is not there any more.
    #[inline]
    fn read_remembered(
        &mut self,
        key_hash: u64,
        location: Location,
    ) -> Result<Option<Value>, OperationError> {
        let expected = Expected {
            version: location.version,
            key_hash,
            length: location.length as usize,
        };
        let length = expected.length;
        let remote = RemoteAddr {
            addr: location.address,
            rkey: location.rkey,
        };
        if length <= CHECKSUMMED {
            let buffer = self.take(HEADER + length)?;
            let buffer = self.link.read(buffer, &[(0..HEADER + length, remote)])?;
            let (head, value) = buffer.as_slice().split_at(HEADER);
            let is_valid = Header::parse(head)
                .is_some_and(|header| expected.matches(&header, Checksummed::Value(value)));
            return Ok(is_valid.then(|| Value::read(buffer, HEADER..HEADER + length)));
        }
        // The header behind the value: what it says was so when the whole value had been read.
        let tail = length.next_multiple_of(8);
        let buffer = self.take(tail + HEADER)?;
        let chain = [
            (0..length, value_at(&location, length)),
            (tail..tail + HEADER, remote),
        ];
        let buffer = self.link.read(buffer, &chain)?;
        let is_valid = buffer
            .as_slice()
            .get(tail..)
            .and_then(Header::parse)
            .is_some_and(|header| expected.matches(&header, Checksummed::HeaderOnly));
        Ok(is_valid.then(|| Value::read(buffer, 0..length)))
    }

    /// Asks the server, which answers with the value, or holds it until it was READ.
    #[cold]
    fn get_by_request(&mut self, hash: u64, key: &[u8]) -> Result<Option<Value>, OperationError> {
        self.counts.requested_gets += 1;
        let message = self
            .link
            .message(|message, number| message.encode(kind::GET, number, &Get { key }))?;
        let reply = self.link.request(message)?;
        if reply.kind() == kind::VALUE {
            let location = match reply.view::<protocol::Value>() {
                Ok(value) => Location::from(&value.location),
                Err(error) => return Err(self.link.broken(error.to_string())),
            };
            self.locations.set(hash, key, location);
            return Ok(Some(Value::message(reply)));
        }
        let (status, location, cacheable) = self.reply(&reply)?;
        match status {
            Status::Ok => {}
            Status::NotFound => return Ok(None),
            status => return Err(self.refused(status, 0)),
        }
        let value = self.read_pinned(location);
        // Whatever became of the READ, the block need not be held any longer.
        let version = location.version;
        let unpin = self
            .link
            .message(|message, number| message.encode(kind::UNPIN, number, &Unpin { version }));
        let unpinned = unpin.and_then(|message| self.link.post(message));
        let value = value?;
        unpinned?;
        if cacheable {
            self.locations.set(hash, key, location);
        }
        Ok(Some(value))
    }

    /// READs a value that the server holds for us: it cannot change, nor go away.
    fn read_pinned(&mut self, location: Location) -> Result<Value, OperationError> {
        let length = location.length as usize;
        if let Err(limit) = check_value(length) {
            return Err(self.link.broken(limit.to_string()));
        }
        let buffer = self.take(length)?;
        let chain: Vec<_> = segments::of(0..length, value_at(&location, length)).collect();
        let buffer = self.link.read(buffer, &chain)?;
        Ok(Value::read(buffer, 0..length))
    }

    /// What a [`Reply`] says.
    #[inline]
    fn reply(&mut self, reply: &Received) -> Result<(Status, Location, bool), OperationError> {
        if reply.kind() != kind::REPLY {
            return Err(self.unexpected(reply));
        }
        match reply.view::<Reply>() {
            Ok(ArchivedReply {
                status,
                location,
                reserved,
                cacheable,
            }) => {
                let reserved = Location::from(reserved);
                if reserved != Location::NONE {
                    self.reserved = Some(reserved);
                }
                Ok((Status::from(*status), location.into(), *cacheable))
            }
            Err(error) => Err(self.link.broken(error.to_string())),
        }
    }

    #[cold]
    fn unexpected(&mut self, message: &Received) -> OperationError {
        self.link.broken(format!(
            "message of kind {} where it has no place",
            message.kind()
        ))
    }

    /// The error for a refusal; `length` is the value's.
    #[cold]
    fn refused(&mut self, status: Status, length: usize) -> OperationError {
        let reason = match status {
            Status::OutOfMemory => Refusal::OutOfMemory,
            Status::OutOfLimits => Refusal::OutOfLimits,
            Status::Registration => Refusal::Registration,
            Status::Malformed => Refusal::Malformed,
            Status::Ok | Status::NotFound => {
                return self
                    .link
                    .broken(format!("status {status:?} where it has no place"));
            }
        };
        OperationError::Refused { length, reason }
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client")
            .field("server", &self.server())
            .field("stats", &self.stats())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Server, ServerConfig};

    /// A buffer is emptied by an operation that does not end. It must not be taken for an empty value.
    #[test]
    fn a_buffer_that_lost_its_memory_is_refused() {
        let server = Server::bind(([127, 0, 0, 1], 0).into(), &ServerConfig::default()).unwrap();
        let (address, shutdown) = (server.local_addr(), server.shutdown_handle());
        let running = std::thread::spawn(|| server.run());
        let mut client = Client::connect(address, &ClientConfig::default()).unwrap();
        client.put(b"key", b"value").unwrap();
        let mut buffer = client.buffer(5).unwrap();
        buffer.buffer = None;
        let error = client.put_buffer(b"key", &mut buffer).unwrap_err();
        assert!(matches!(error, OperationError::Buffer { .. }), "{error}");
        // Nothing has happened to the value, nor to the connection.
        assert_eq!(*client.get(b"key").unwrap().unwrap(), *b"value");
        drop(client);
        shutdown.shutdown();
        running.join().unwrap().unwrap();
    }
}
