//! What two sides say to each other over TCP before their queue pairs are connected: the bytes, and
//! nothing else.
//!
//! ```text
//! client                          server
//!   HELLO  ------------------------>          who I am, where my queue pair is
//!          <------------------------  HELLO   (the server's queue pair can receive by now)
//!   READY  ------------------------>          both can receive: the server may send
//!          <------------------------  READY   the server looks at its completion queue: the client may send
//! ```
//!
//! Either side may say REJECT instead and close, and either says BYE before it closes a connection
//! on purpose. A frame is a 12-byte preamble (magic, version, type, length of the rest), which
//! stays as it is in every version, and a rest that depends on the type. Integers are
//! little-endian.

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First four bytes of every greeting frame.
const MAGIC: [u8; 4] = *b"zcg\0";

/// Version of the greeting. It covers the hello's layout and the meaning of everything behind it.
pub const GREETING_VERSION: u16 = 1;

/// Longest frame in bytes, preamble included. Longer ones are refused before they are read.
pub(crate) const MAX_FRAME: usize = 512;

/// Longest text of a rejection in bytes.
const MAX_TEXT: usize = 256;

const TYPE_HELLO: u16 = 1;
const TYPE_READY: u16 = 2;
const TYPE_REJECT: u16 = 3;
const TYPE_BYE: u16 = 4;

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct Preamble {
    magic: [u8; 4],
    version: U16,
    kind: U16,
    length: U32,
}

/// Bytes of the preamble.
const PREAMBLE_LEN: usize = size_of::<Preamble>();

#[derive(Clone, Copy, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHello {
    gid: [u8; 16],
    qp_num: U32,
    psn: U32,
    message_size: U32,
    recv_depth: U32,
    application: U32,
    application_version: U32,
    flags: U32,
    lid: U16,
    mtu: u8,
    max_rd_atomic: u8,
    max_dest_rd_atomic: u8,
    reserved: [u8; 3],
}

const _: () = assert!(PREAMBLE_LEN == 12 && size_of::<RawHello>() == 52);

/// The sender's device is the software one.
const FLAG_SOFTWARE: u32 = 1;

/// One side of a connection, as the other needs to know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Queue pair number, 24 bits.
    pub qp_num: u32,
    /// First packet sequence number the side will send with, 24 bits.
    pub psn: u32,
    /// GID of the side's port.
    pub gid: [u8; 16],
    /// LID of the side's port; 0 on Ethernet and on the software device.
    pub lid: u16,
    /// Path MTU that the side can do, as `enum ibv_mtu`: 1 is 256 bytes, 5 is 4096.
    pub mtu: u8,
    /// READs and atomics the side will have in flight at once, at most.
    pub max_rd_atomic: u8,
    /// READs and atomics the side can answer at once.
    pub max_dest_rd_atomic: u8,
    /// Receives that the side can keep posted: the peer's credits.
    pub recv_depth: u32,
    /// Bytes of each of those receives: the longest frame the peer may send.
    pub message_size: u32,
    /// What is spoken on top, by the caller's numbering.
    pub application: u32,
    /// Which version of it.
    pub application_version: u32,
    /// Whether the side's device is the software device, which only connects to its own kind.
    pub software: bool,
}

/// Why a side refuses a connection, as it tells its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum RejectReason {
    /// The greeting has another version.
    Version,
    /// The greeting could not be understood.
    Malformed,
    /// Something else is spoken on top, or another version of it.
    Application,
    /// One side has a software device, the other a real one.
    Device,
    /// The side has as many connections as it can take.
    Full,
    /// The side failed at its own device or memory.
    Failed,
    /// The side is being shut down.
    ShuttingDown,
    /// A reason that this version does not know.
    Other(u16),
}

impl RejectReason {
    fn code(self) -> u16 {
        match self {
            Self::Version => 1,
            Self::Malformed => 2,
            Self::Application => 3,
            Self::Device => 4,
            Self::Full => 5,
            Self::Failed => 6,
            Self::ShuttingDown => 7,
            Self::Other(code) => code,
        }
    }

    fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Version,
            2 => Self::Malformed,
            3 => Self::Application,
            4 => Self::Device,
            5 => Self::Full,
            6 => Self::Failed,
            7 => Self::ShuttingDown,
            code => Self::Other(code),
        }
    }
}

/// One frame of the greeting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Greeting {
    Hello(Hello),
    Ready,
    Reject { reason: RejectReason, text: String },
    Bye,
}

/// Why bytes are not a greeting.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum GreetingError {
    /// The first bytes are not those of a greeting: something else listens or calls there.
    #[error(
        "greeting starts with {found:02x?} instead of {MAGIC:02x?}: the peer does not speak this protocol"
    )]
    Magic {
        /// What stands there.
        found: [u8; 4],
    },
    /// Another version.
    #[error("peer speaks version {found} of the greeting, this side version {GREETING_VERSION}")]
    Version {
        /// The peer's version.
        found: u16,
    },
    /// A type of frame that there is not, or not at this point.
    #[error("greeting has a frame of type {found} where {expected} must stand")]
    Type {
        /// The frame's type.
        found: u16,
        /// What was expected.
        expected: &'static str,
    },
    /// A frame that is not as long as its type is.
    #[error("greeting frame of type {kind} says it has {length} bytes")]
    Length {
        /// The frame's type.
        kind: u16,
        /// The length it gives.
        length: u32,
    },
    /// A field with a value it cannot have.
    #[error("greeting's {field} is {value}, which it cannot be")]
    Field {
        /// The field.
        field: &'static str,
        /// Its value.
        value: u64,
    },
}

impl Greeting {
    /// The frame as it travels.
    pub(crate) fn to_bytes(&self) -> Vec<u8> {
        let (kind, rest) = match self {
            Self::Hello(hello) => (TYPE_HELLO, RawHello::from(hello).as_bytes().to_vec()),
            Self::Ready => (TYPE_READY, Vec::new()),
            Self::Reject { reason, text } => {
                let end = text.floor_char_boundary(MAX_TEXT);
                let mut rest = reason.code().to_le_bytes().to_vec();
                rest.extend_from_slice(&text.as_bytes()[..end]);
                (TYPE_REJECT, rest)
            }
            Self::Bye => (TYPE_BYE, Vec::new()),
        };
        let preamble = Preamble {
            magic: MAGIC,
            version: U16::new(GREETING_VERSION),
            kind: U16::new(kind),
            length: U32::new(rest.len() as u32),
        };
        [preamble.as_bytes(), &rest].concat()
    }

    /// The frame at the start of `bytes` and how many of them it takes, or `None` where there are
    /// not enough yet.
    ///
    /// What cannot become a frame is an error at once, however few bytes there are.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, GreetingError> {
        let seen = bytes.len().min(MAGIC.len());
        if bytes[..seen] != MAGIC[..seen] {
            let mut found = [0; 4];
            found[..seen].copy_from_slice(&bytes[..seen]);
            return Err(GreetingError::Magic { found });
        }
        let Ok((preamble, rest)) = Preamble::ref_from_prefix(bytes) else {
            return Ok(None);
        };
        let (kind, length) = (preamble.kind.get(), preamble.length.get());
        // A rejection is understood whatever version it comes from: it may be about ours.
        if preamble.version.get() != GREETING_VERSION && kind != TYPE_REJECT {
            return Err(GreetingError::Version {
                found: preamble.version.get(),
            });
        }
        let fits = match kind {
            TYPE_HELLO => length as usize == size_of::<RawHello>(),
            TYPE_READY | TYPE_BYE => length == 0,
            TYPE_REJECT => (2..=2 + MAX_TEXT).contains(&(length as usize)),
            found => {
                return Err(GreetingError::Type {
                    found,
                    expected: "a frame of the greeting",
                });
            }
        };
        if !fits {
            return Err(GreetingError::Length { kind, length });
        }
        let Some(rest) = rest.get(..length as usize) else {
            return Ok(None);
        };
        let greeting = match kind {
            TYPE_HELLO => Self::Hello(Hello::parse(rest)?),
            TYPE_READY => Self::Ready,
            TYPE_REJECT => {
                let (code, text) = rest.split_first_chunk().unwrap_or((&[0; 2], &[]));
                let reason = RejectReason::from_code(u16::from_le_bytes(*code));
                Self::Reject {
                    reason,
                    text: printable(text),
                }
            }
            _ => Self::Bye,
        };
        Ok(Some((greeting, PREAMBLE_LEN + rest.len())))
    }

    /// How many bytes must be read before [`parse`](Self::parse) can go on: never more than belong
    /// to this frame.
    ///
    /// What cannot become a frame is an error here already.
    pub(crate) fn missing(bytes: &[u8]) -> Result<usize, GreetingError> {
        if Self::parse(bytes)?.is_some() {
            return Ok(0);
        }
        let rest = Preamble::ref_from_prefix(bytes)
            .map_or(0, |(preamble, _)| preamble.length.get() as usize);
        Ok(PREAMBLE_LEN + rest - bytes.len())
    }

    /// What the frame is, for an error about it.
    pub(crate) fn type_code(&self) -> u16 {
        match self {
            Self::Hello(_) => TYPE_HELLO,
            Self::Ready => TYPE_READY,
            Self::Reject { .. } => TYPE_REJECT,
            Self::Bye => TYPE_BYE,
        }
    }
}

/// A peer's text, made safe to print on a terminal.
fn printable(text: &[u8]) -> String {
    String::from_utf8_lossy(text)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
}

impl From<&Hello> for RawHello {
    fn from(hello: &Hello) -> Self {
        Self {
            gid: hello.gid,
            qp_num: U32::new(hello.qp_num),
            psn: U32::new(hello.psn),
            message_size: U32::new(hello.message_size),
            recv_depth: U32::new(hello.recv_depth),
            application: U32::new(hello.application),
            application_version: U32::new(hello.application_version),
            flags: U32::new(if hello.software { FLAG_SOFTWARE } else { 0 }),
            lid: U16::new(hello.lid),
            mtu: hello.mtu,
            max_rd_atomic: hello.max_rd_atomic,
            max_dest_rd_atomic: hello.max_dest_rd_atomic,
            reserved: [0; 3],
        }
    }
}

impl Hello {
    fn parse(bytes: &[u8]) -> Result<Self, GreetingError> {
        let Ok(raw) = RawHello::read_from_bytes(bytes) else {
            return Err(GreetingError::Length {
                kind: TYPE_HELLO,
                length: bytes.len() as u32,
            });
        };
        let within = |field: &'static str, value: u32, range: std::ops::RangeInclusive<u32>| {
            let value_ok = range.contains(&value);
            if value_ok {
                Ok(value)
            } else {
                Err(GreetingError::Field {
                    field,
                    value: u64::from(value),
                })
            }
        };
        let max_24_bits = (1 << 24) - 1;
        let flags = within("flags", raw.flags.get(), 0..=FLAG_SOFTWARE)?;
        for byte in raw.reserved {
            within("reserved byte", u32::from(byte), 0..=0)?;
        }
        Ok(Self {
            qp_num: within("qp_num", raw.qp_num.get(), 0..=max_24_bits)?,
            psn: within("psn", raw.psn.get(), 0..=max_24_bits)?,
            gid: raw.gid,
            lid: raw.lid.get(),
            mtu: within("mtu", u32::from(raw.mtu), 1..=5)? as u8,
            max_rd_atomic: raw.max_rd_atomic,
            max_dest_rd_atomic: raw.max_dest_rd_atomic,
            recv_depth: within("recv_depth", raw.recv_depth.get(), MIN_DEPTH..=MAX_DEPTH)?,
            message_size: within(
                "message_size",
                raw.message_size.get(),
                MIN_MESSAGE_SIZE..=MAX_MESSAGE_SIZE,
            )?,
            application: raw.application.get(),
            application_version: raw.application_version.get(),
            software: flags & FLAG_SOFTWARE != 0,
        })
    }
}

/// Fewest receives a side may keep posted: with fewer, credits cannot come back.
pub(crate) const MIN_DEPTH: u32 = 4;

/// Most receives a side may keep posted: credits are counted in 16 bits.
pub(crate) const MAX_DEPTH: u32 = 1 << 15;

/// Smallest receive buffer in bytes.
pub(crate) const MIN_MESSAGE_SIZE: u32 = 64;

/// Largest receive buffer in bytes.
pub(crate) const MAX_MESSAGE_SIZE: u32 = 1 << 30;

#[cfg(test)]
mod tests;
