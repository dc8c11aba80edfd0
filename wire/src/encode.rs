//! Writing a message straight into the bytes that will be sent.

use std::mem::MaybeUninit;

use rkyv::api::low::to_bytes_in_with_alloc;
use rkyv::ser::allocator::SubAllocator;
use rkyv::ser::writer::Buffer;

use crate::archive::{Cause, Encode};
use crate::header::{BODY_ALIGN, FIRST_RESERVED_KIND, HEADER_LEN, Header};

/// Bytes of stack that the serializer may use as scratch; only nested containers (`Vec<String>`)
/// need any.
const SCRATCH_LEN: usize = 1024;

/// Why a message could not be written.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// rkyv refused: the archive does not fit, or the value nests deeper than the scratch space
    /// allows.
    #[error(
        "encode: message of kind {kind} does not fit a buffer of {capacity} bytes, or nests too deep: {cause}"
    )]
    Archive {
        /// The message's kind.
        kind: u16,
        /// Bytes there were for the whole frame.
        capacity: usize,
        /// What the serializer said.
        #[source]
        cause: Cause,
    },
    /// The archive fits, but not the body behind it.
    #[error(
        "encode: frame of {needed} bytes does not fit a buffer of {capacity} bytes; take a larger buffer"
    )]
    TooLong {
        /// Bytes that the frame needs.
        needed: u64,
        /// Bytes there were.
        capacity: usize,
    },
    /// The kind is one of this crate's own.
    #[error(
        "encode: kind {kind:#06x} is reserved; kinds of a caller are below {FIRST_RESERVED_KIND:#06x}"
    )]
    ReservedKind {
        /// The kind asked for.
        kind: u16,
    },
}

/// Writes the message `value` into `slot` and returns its length in bytes.
///
/// `slot` must be aligned as the archive needs (a pooled buffer is), and only the bytes of the
/// returned length are written: send no more than those. Nothing is allocated.
///
/// # Errors
///
/// [`EncodeError`] where it does not fit; `slot`'s bytes are then unspecified.
///
/// ```
/// #[derive(rkyv::Archive, rkyv::Serialize)]
/// struct Get { key: [u8; 4] }
///
/// #[repr(align(16))]
/// struct Slot([u8; 256]);
///
/// let mut slot = Slot([0; 256]);
/// let len = wire::encode(&mut slot.0, 3, 77, &Get { key: *b"name" })?;
/// let frame = wire::Frame::parse(&slot.0[..len])?;
/// assert_eq!(frame.header().kind, 3);
/// assert_eq!(&wire::view::<Get>(&frame)?.key, b"name");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn encode<T: Encode>(
    slot: &mut [u8],
    kind: u16,
    tag: u64,
    value: &T,
) -> Result<usize, EncodeError> {
    encode_with_body(slot, kind, tag, value, 0).map(|(len, _)| len)
}

/// Writes the message `value` into `slot` with room for `body_len` raw bytes behind it, and returns
/// the frame's length and the body's bytes, which hold whatever was in `slot` and are for the
/// caller to fill.
///
/// # Errors
///
/// As [`encode`].
pub fn encode_with_body<'a, T: Encode>(
    slot: &'a mut [u8],
    kind: u16,
    tag: u64,
    value: &T,
    body_len: u32,
) -> Result<(usize, &'a mut [u8]), EncodeError> {
    let capacity = slot.len();
    let Some(room) = slot.get_mut(HEADER_LEN..) else {
        return Err(EncodeError::TooLong {
            needed: HEADER_LEN as u64,
            capacity,
        });
    };
    let mut scratch = [const { MaybeUninit::uninit() }; SCRATCH_LEN];
    let written =
        to_bytes_in_with_alloc(value, Buffer::from(room), SubAllocator::new(&mut scratch))
            .map_err(|cause| EncodeError::Archive {
                kind,
                capacity,
                cause,
            })?
            .len();
    finish(slot, kind, tag, written, body_len)
}

/// Writes a message that is only a header and `body_len` raw bytes, and returns the frame's length
/// and the body's bytes, which are for the caller to fill.
///
/// # Errors
///
/// As [`encode`].
pub fn encode_raw(
    slot: &mut [u8],
    kind: u16,
    tag: u64,
    body_len: u32,
) -> Result<(usize, &mut [u8]), EncodeError> {
    finish(slot, kind, tag, 0, body_len)
}

/// The header in front of an archive that is already in place, the padding behind it, and the body.
fn finish(
    slot: &mut [u8],
    kind: u16,
    tag: u64,
    archive_len: usize,
    body_len: u32,
) -> Result<(usize, &mut [u8]), EncodeError> {
    if kind >= FIRST_RESERVED_KIND {
        return Err(EncodeError::ReservedKind { kind });
    }
    let capacity = slot.len();
    let Ok(archive_len) = u32::try_from(archive_len) else {
        return Err(EncodeError::TooLong {
            needed: archive_len as u64,
            capacity,
        });
    };
    let header = Header {
        kind,
        tag,
        credits: 0,
        archive_len,
        body_len,
    };
    let too_long = EncodeError::TooLong {
        needed: header.frame_len(),
        capacity,
    };
    let Ok(len) = usize::try_from(header.frame_len()) else {
        return Err(too_long);
    };
    let Some((head, body)) = slot
        .get_mut(..len)
        .and_then(|frame| frame.split_at_mut_checked(len - body_len as usize))
    else {
        return Err(too_long);
    };
    let Some(head_bytes) = head.first_chunk_mut::<HEADER_LEN>() else {
        return Err(too_long);
    };
    *head_bytes = header.to_bytes();
    if body_len > 0 {
        // What an earlier message left in the padding must not travel.
        let archive_end = HEADER_LEN + archive_len as usize;
        debug_assert!(head.len() - archive_end < BODY_ALIGN);
        head[archive_end..].fill(0);
    }
    Ok((len, body))
}

/// A message of this crate's own that carries nothing but its header.
pub(crate) fn encode_internal(slot: &mut [u8], kind: u16) -> Option<usize> {
    let header = Header {
        kind,
        ..Header::default()
    };
    slot.first_chunk_mut::<HEADER_LEN>().map(|head| {
        *head = header.to_bytes();
        HEADER_LEN
    })
}
