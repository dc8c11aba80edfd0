//! The messages between client and server: a rkyv archive each, one type per kind, viewed in place.
//!
//! A request carries a number in the frame's `tag`, which its reply repeats. Small values are the frame's raw body,
//! behind the archive: written once, where they are sent from, and aligned for use where they arrive. Keys are
//! `[u8]`, whose validation costs the same at any length.
//!
//! rkyv archives do not evolve: any change here comes with a new [`VERSION`], which the rendezvous compares before the
//! first message.

use rkyv::with::InlineAsBox;
use rkyv::{Archive, Serialize};

/// Version of the messages and of the block format, compared when a connection is set up.
pub const VERSION: u32 = 2;

/// What a message is, as it stands in the header of its frame.
pub mod kind {
    /// [`Put`](super::Put), the value in the body. Answered by `REPLY`.
    pub const PUT: u16 = 1;
    /// [`Reserve`](super::Reserve). Answered by `REPLY`.
    pub const RESERVE: u16 = 2;
    /// [`Get`](super::Get). Answered by `VALUE` when the value is small, else by `REPLY`.
    pub const GET: u16 = 3;
    /// [`Delete`](super::Delete). Answered by `REPLY`.
    pub const DELETE: u16 = 4;
    /// [`Unpin`](super::Unpin). Not answered.
    pub const UNPIN: u16 = 5;
    /// [`Stat`](super::Stat). Answered by `STATISTICS`.
    pub const STAT: u16 = 6;
    /// [`Commit`](super::Commit). Answered by `REPLY`.
    pub const COMMIT: u16 = 7;
    /// [`Reply`](super::Reply).
    pub const REPLY: u16 = 16;
    /// [`Value`](super::Value), the value in the body.
    pub const VALUE: u16 = 17;
    /// [`Statistics`](super::Statistics).
    pub const STATISTICS: u16 = 18;
}

/// Stores the value in the body.
#[derive(Archive, Debug, Serialize)]
pub struct Put<'a> {
    /// The key.
    #[rkyv(with = InlineAsBox)]
    pub key: &'a [u8],
}

/// Asks for a block to WRITE a value to, which the reply brings as [`Reply::reserved`].
#[derive(Archive, Debug, Serialize)]
pub struct Reserve {
    /// Bytes of the value.
    pub length: u64,
}

/// Stores the value that was written to a reserved block. The client writes it no more.
#[derive(Archive, Debug, Serialize)]
pub struct Commit<'a> {
    /// The key.
    #[rkyv(with = InlineAsBox)]
    pub key: &'a [u8],
    /// The version of [`Reply::reserved`].
    pub reservation: u64,
    /// Bytes of the value; not more than were reserved.
    pub length: u64,
    /// Whether to reserve as much again: the reply then brings the next block, if there is room, and a client that
    /// goes on putting values of a size asks only once.
    pub again: bool,
}

/// Asks for a value.
#[derive(Archive, Debug, Serialize)]
pub struct Get<'a> {
    /// The key.
    #[rkyv(with = InlineAsBox)]
    pub key: &'a [u8],
}

/// Removes a key.
#[derive(Archive, Debug, Serialize)]
pub struct Delete<'a> {
    /// The key.
    #[rkyv(with = InlineAsBox)]
    pub key: &'a [u8],
}

/// Lets go of the block that the last [`Get`] pinned.
#[derive(Archive, Debug, Serialize)]
pub struct Unpin {
    /// Its version.
    pub version: u64,
}

/// Asks for the server's statistics.
#[derive(Archive, Debug, Serialize)]
pub struct Stat {
    /// No meaning; an archive has at least one byte.
    pub reserved: u8,
}

/// How a request ended.
#[derive(Archive, Clone, Copy, Debug, Eq, PartialEq, Serialize)]
#[rkyv(derive(Clone, Copy, Debug, Eq, PartialEq))]
pub enum Status {
    /// Done.
    Ok,
    /// There is no such key.
    NotFound,
    /// The server's memory ceiling leaves no room; the old value stands.
    OutOfMemory,
    /// Key or value outside the limits; nothing was done.
    OutOfLimits,
    /// The request was not understood; nothing was done.
    Malformed,
    /// The server could not register memory; the old value stands.
    Registration,
}

/// Where a version of a value lies in the server's memory.
#[derive(Archive, Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Location {
    /// Address of the block's header in the server.
    pub address: u64,
    /// Version of the block; 0 in [`Location::NONE`].
    pub version: u64,
    /// Remote key of the block's memory.
    pub rkey: u32,
    /// Bytes of the value.
    pub length: u32,
}

impl Location {
    /// No location.
    pub const NONE: Self = Self {
        address: 0,
        version: 0,
        rkey: 0,
        length: 0,
    };
}

impl From<&ArchivedLocation> for Location {
    fn from(archived: &ArchivedLocation) -> Self {
        Self {
            address: archived.address.to_native(),
            version: archived.version.to_native(),
            rkey: archived.rkey.to_native(),
            length: archived.length.to_native(),
        }
    }
}

/// The end of a put, a delete, or a get of a large value.
#[derive(Archive, Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Reply {
    /// Where the value is now, or [`Location::NONE`].
    ///
    /// After a get the block is pinned: it stays intact until [`Unpin`], the client's next [`Get`], or its end.
    pub location: Location,
    /// A block that is the client's to write, value behind header, or [`Location::NONE`]: until its next [`Reserve`],
    /// its [`Commit`], or its end. Its version names the reservation.
    pub reserved: Location,
    /// How it ended.
    pub status: Status,
    /// Whether the location may be kept and read later. What is read then must be verified, but the memory can be
    /// read as long as the server lives.
    pub cacheable: bool,
}

/// A small value, in the body.
#[derive(Archive, Clone, Copy, Debug, Eq, PartialEq, Serialize)]
pub struct Value {
    /// Where it is, to be kept and read later.
    pub location: Location,
}

/// What the server counts.
#[derive(Archive, Clone, Copy, Debug, Default, Eq, PartialEq, Serialize)]
pub struct Statistics {
    /// Keys stored.
    pub keys: u64,
    /// Bytes of their values.
    pub value_bytes: u64,
    /// Blocks handed out: stored, replaced and still pinned, or being filled.
    pub live_blocks: u64,
    /// Bytes handed out for them, headers and rounding included.
    pub live_bytes: u64,
    /// Bytes of registered memory, messages included.
    pub registered_bytes: u64,
    /// Memory registrations since the start.
    pub registrations: u64,
    /// Clients connected.
    pub connections: u64,
    /// Puts that succeeded.
    pub puts: u64,
    /// Gets that came as requests; the server does not see the others.
    pub gets: u64,
    /// Deletes that removed a key.
    pub deletes: u64,
}

impl From<&ArchivedStatistics> for Statistics {
    fn from(archived: &ArchivedStatistics) -> Self {
        Self {
            keys: archived.keys.to_native(),
            value_bytes: archived.value_bytes.to_native(),
            live_blocks: archived.live_blocks.to_native(),
            live_bytes: archived.live_bytes.to_native(),
            registered_bytes: archived.registered_bytes.to_native(),
            registrations: archived.registrations.to_native(),
            connections: archived.connections.to_native(),
            puts: archived.puts.to_native(),
            gets: archived.gets.to_native(),
            deletes: archived.deletes.to_native(),
        }
    }
}

impl From<ArchivedStatus> for Status {
    fn from(archived: ArchivedStatus) -> Self {
        match archived {
            ArchivedStatus::Ok => Self::Ok,
            ArchivedStatus::NotFound => Self::NotFound,
            ArchivedStatus::OutOfMemory => Self::OutOfMemory,
            ArchivedStatus::OutOfLimits => Self::OutOfLimits,
            ArchivedStatus::Malformed => Self::Malformed,
            ArchivedStatus::Registration => Self::Registration,
        }
    }
}
