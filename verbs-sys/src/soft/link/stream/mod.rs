//! The stream link: queue pairs that reach each other through a socket, and owners who run every
//! copy in their memory themselves.
//!
//! Between hosts it is TCP; within one it is a Unix socket, for processes that want exact keys (strict
//! mode), and for memory that its owner alone may reach. The framing is iWARP's: RDMAP (RFC 5040) and its
//! extensions (RFC 7306) in DDP segments (RFC 5041), those in MPA frames (RFC 5044), and MPA's
//! connection set-up (RFC 6581). All fields are big-endian but the CRC. What a peer sent becomes a type
//! that holds good values only, or a [`FrameError`].
//!
//! Each queue pair opens a connection for its own requests; answers come back on it. So a responder
//! that waits for a receive can stop reading without keeping its own requests' answers waiting.

mod fields;
pub(in crate::soft) mod fpdu;
pub(in crate::soft) mod frame;
pub(in crate::soft) mod mpa;
pub(in crate::soft) mod payload;
pub(in crate::soft) mod socket;
pub(in crate::soft) mod terminate;

use std::net::SocketAddr;

/// How the requests of a queue pair reach its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Route {
    /// Over TCP, from one of this host's addresses.
    Tcp { from: SocketAddr, to: SocketAddr },
    /// To a process of this host, by its slot.
    Host(u32),
}

/// Bytes of a peer are no frame.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub(in crate::soft) enum FrameError {
    /// A part has another length than its kind has.
    #[error("{part} has {found} bytes, not {expected}")]
    Length {
        part: &'static str,
        found: usize,
        expected: usize,
    },
    /// A ULPDU is shorter than a header or longer than a frame can carry.
    #[error(
        "a ULPDU of {len} bytes: it has {} to {}",
        frame::TAGGED_LEN,
        fpdu::MAX_ULPDU
    )]
    UlpduLength { len: usize },
    /// The bytes changed on their way.
    #[error("the frame carries the CRC {carried:#010x}, its bytes have {computed:#010x}")]
    Crc { carried: u32, computed: u32 },
    /// A protocol's version is not the one spoken here.
    #[error("{protocol} version {found}, not {expected}")]
    Version {
        protocol: &'static str,
        found: u16,
        expected: u16,
    },
    /// A tagged message has an untagged header, or the reverse.
    #[error("{opcode:?} in a segment with the tagged bit {tagged}")]
    Form { opcode: frame::Opcode, tagged: bool },
    /// An untagged message is on a queue that is not its own.
    #[error("{opcode:?} on queue {found}, not {expected}")]
    Queue {
        opcode: frame::Opcode,
        found: u32,
        expected: u32,
    },
    /// A message of one segment pretends to have several.
    #[error("{opcode:?} at message offset {offset} with the last bit {last}: it has one segment")]
    Segments {
        opcode: frame::Opcode,
        offset: u32,
        last: bool,
    },
    /// A message is not the next one of its queue.
    #[error("message {found} on queue {queue}, not {expected}")]
    Sequence {
        queue: u32,
        found: u32,
        expected: u32,
    },
    /// A field has a value that its kind cannot have.
    #[error("{field} is {value:#x}; expected {expected}")]
    Field {
        field: &'static str,
        value: u64,
        expected: &'static str,
    },
    /// The peer does not begin with MPA's key.
    #[error("no MPA {frame} frame: it begins with {found:02x?}")]
    Key { frame: &'static str, found: Vec<u8> },
}
