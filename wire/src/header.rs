//! The fixed header in front of every message, and the frame it describes.
//!
//! A frame is `header | archive | padding | body`. The archive is an rkyv archive whose root is at
//! its end, so its exact length stands in the header. The body is raw bytes that need no encoding
//! (a value being put, say); it starts at the next multiple of [`BODY_ALIGN`], so a receive buffer
//! that is aligned gives an aligned body.
//!
//! All integers are little-endian and the header has no alignment of its own. Parsing never panics
//! and never reads past the slice it is given; a frame is exactly as long as its header says, no
//! shorter and no longer.

use std::ops::Range;

use zerocopy::byteorder::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// First four bytes of every message: `b"zcm1"`, read as a little-endian integer.
pub const MAGIC: u32 = u32::from_le_bytes(*b"zcm1");

/// Version of the message format. A frame of any other version is refused.
pub const VERSION: u16 = 1;

/// Bytes that the header takes at the start of a frame.
pub const HEADER_LEN: usize = 32;

/// The body of a frame starts at a multiple of this many bytes from the frame's start.
pub const BODY_ALIGN: usize = 16;

/// Kinds from here up belong to this crate; a message of a caller has a smaller one.
pub const FIRST_RESERVED_KIND: u16 = 0xff00;

/// The kind of a message that only returns credits.
pub(crate) const KIND_CREDIT: u16 = 0xff01;

/// What the header of a message says, in native form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Header {
    /// What the message is; the meaning is the caller's below [`FIRST_RESERVED_KIND`].
    pub kind: u16,
    /// Free for the caller: a request's number, echoed in its reply.
    pub tag: u64,
    /// Receives that the sender has posted again since its last message, for its peer to spend.
    pub credits: u16,
    /// Length of the archive in bytes; 0 where there is none.
    pub archive_len: u32,
    /// Length of the body in bytes; 0 where there is none.
    pub body_len: u32,
}

/// The header as it travels.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, Immutable, KnownLayout, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: U32,
    version: U16,
    kind: U16,
    archive_len: U32,
    body_len: U32,
    credits: U16,
    reserved: [U16; 3],
    tag: U64,
}

const _: () = assert!(size_of::<RawHeader>() == HEADER_LEN);
const _: () = assert!(HEADER_LEN.is_multiple_of(BODY_ALIGN));

/// Where the credits stand in a frame; they are filled in when the message is posted.
pub(crate) const CREDITS_OFFSET: usize = 16;
const _: () = assert!(std::mem::offset_of!(RawHeader, credits) == CREDITS_OFFSET);

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Fewer bytes than a header.
    #[error("message of {len} bytes is shorter than its {HEADER_LEN}-byte header")]
    Truncated {
        /// Bytes there are.
        len: usize,
    },
    /// The first four bytes are not [`MAGIC`].
    #[error(
        "message starts with {found:#010x} instead of {MAGIC:#010x}: the peer does not speak this protocol"
    )]
    Magic {
        /// What stands there.
        found: u32,
    },
    /// Another version of the format.
    #[error("message has format version {found}, this side speaks {VERSION}")]
    Version {
        /// The message's version.
        found: u16,
    },
    /// Bytes that must be zero are not.
    #[error("message has reserved header bits set")]
    Reserved,
    /// The frame is not as long as its header says.
    #[error("message of {len} bytes, but its header says {expected}")]
    Length {
        /// Bytes there are.
        len: usize,
        /// Bytes that the header describes.
        expected: u64,
    },
}

impl Header {
    /// The header at the start of `bytes`, without looking at what follows it.
    ///
    /// # Errors
    ///
    /// [`FrameError`] unless magic, version and reserved bits are as they must be.
    pub fn parse(bytes: &[u8]) -> Result<Self, FrameError> {
        let Ok((raw, _)) = RawHeader::ref_from_prefix(bytes) else {
            return Err(FrameError::Truncated { len: bytes.len() });
        };
        if raw.magic.get() != MAGIC {
            return Err(FrameError::Magic {
                found: raw.magic.get(),
            });
        }
        if raw.version.get() != VERSION {
            return Err(FrameError::Version {
                found: raw.version.get(),
            });
        }
        if raw.reserved.iter().any(|half| half.get() != 0) {
            return Err(FrameError::Reserved);
        }
        Ok(Self {
            kind: raw.kind.get(),
            tag: raw.tag.get(),
            credits: raw.credits.get(),
            archive_len: raw.archive_len.get(),
            body_len: raw.body_len.get(),
        })
    }

    /// The header as it travels.
    pub fn to_bytes(&self) -> [u8; HEADER_LEN] {
        let raw = RawHeader {
            magic: U32::new(MAGIC),
            version: U16::new(VERSION),
            kind: U16::new(self.kind),
            archive_len: U32::new(self.archive_len),
            body_len: U32::new(self.body_len),
            credits: U16::new(self.credits),
            reserved: [U16::ZERO; 3],
            tag: U64::new(self.tag),
        };
        zerocopy::transmute!(raw)
    }

    /// Bytes of the whole frame: header, archive, padding and body.
    pub fn frame_len(&self) -> u64 {
        let archive_end = HEADER_LEN as u64 + u64::from(self.archive_len);
        if self.body_len == 0 {
            archive_end
        } else {
            archive_end.next_multiple_of(BODY_ALIGN as u64) + u64::from(self.body_len)
        }
    }

    /// Where the archive stands in the frame. Only meaningful once the frame's length is known to
    /// be right.
    fn archive_range(&self) -> Range<usize> {
        HEADER_LEN..HEADER_LEN + self.archive_len as usize
    }

    /// Where the body stands in the frame. Only meaningful once the frame's length is known to be
    /// right.
    fn body_range(&self) -> Range<usize> {
        let end = self.frame_len() as usize;
        end - self.body_len as usize..end
    }
}

/// A message in place: its header, and where its parts are.
///
/// ```
/// use wire::{Frame, Header, HEADER_LEN};
///
/// let header = Header { kind: 7, tag: 42, body_len: 3, ..Header::default() };
/// let mut bytes = header.to_bytes().to_vec();
/// bytes.extend(b"abc");
/// let frame = Frame::parse(&bytes)?;
/// assert_eq!((frame.header().tag, frame.body()), (42, &b"abc"[..]));
/// assert!(Frame::parse(&bytes[..HEADER_LEN]).is_err());
/// # Ok::<(), wire::FrameError>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Frame<'a> {
    header: Header,
    bytes: &'a [u8],
}

impl<'a> Frame<'a> {
    /// The frame that `bytes` are, all of them.
    ///
    /// # Errors
    ///
    /// [`FrameError`] where they are not exactly one frame.
    pub fn parse(bytes: &'a [u8]) -> Result<Self, FrameError> {
        let header = Header::parse(bytes)?;
        let expected = header.frame_len();
        if bytes.len() as u64 != expected {
            return Err(FrameError::Length {
                len: bytes.len(),
                expected,
            });
        }
        Ok(Self { header, bytes })
    }

    /// A frame whose header was parsed and found to describe `bytes` before.
    pub(crate) fn from_parts(header: Header, bytes: &'a [u8]) -> Self {
        debug_assert_eq!(bytes.len() as u64, header.frame_len());
        Self { header, bytes }
    }

    /// What the header says.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The archive's bytes, unchecked; [`view`](crate::view) gives the value.
    pub fn archive(&self) -> &'a [u8] {
        self.bytes
            .get(self.header.archive_range())
            .unwrap_or_default()
    }

    /// The raw bytes behind the archive.
    pub fn body(&self) -> &'a [u8] {
        self.bytes.get(self.header.body_range()).unwrap_or_default()
    }
}
