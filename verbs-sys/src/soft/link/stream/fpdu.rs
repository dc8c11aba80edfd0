//! MPA's frames (RFC 5044, section 4): a length, a segment, padding and a CRC. No markers.

use super::FrameError;
use super::frame::TAGGED_LEN;

/// The longest segment of a frame, in bytes with its header.
pub(in crate::soft) const MAX_ULPDU: usize = 65_532;

const LENGTH: usize = 2;
const CRC: usize = 4;

/// Bytes of the frame around a segment of so many.
pub(in crate::soft) const fn fpdu_len(ulpdu: usize) -> usize {
    (LENGTH + ulpdu).next_multiple_of(4) + CRC
}

/// Begins a frame at the end of `buf`; the segment is then appended to it.
pub(in crate::soft) fn begin(buf: &mut Vec<u8>) -> usize {
    let start = buf.len();
    buf.extend([0; LENGTH]);
    start
}

/// Ends the frame that [`begin`] began at `start`, whose segment has at most [`MAX_ULPDU`] bytes.
pub(in crate::soft) fn finish(buf: &mut Vec<u8>, start: usize, crc: bool) {
    let ulpdu = buf.len() - start - LENGTH;
    debug_assert!((TAGGED_LEN..=MAX_ULPDU).contains(&ulpdu), "{ulpdu} bytes");
    buf[start..start + LENGTH].copy_from_slice(&(ulpdu as u16).to_be_bytes());
    let end = start + fpdu_len(ulpdu) - CRC;
    buf.resize(end, 0);
    let sum = if crc { crc32c(&buf[start..]) } else { 0 };
    buf.extend(sum.to_le_bytes());
}

/// Takes the first frame: its segment, and how many bytes the frame has. `None`: more bytes are
/// needed. Without `crc` the CRC is there but means nothing.
pub(in crate::soft) fn split(buf: &[u8], crc: bool) -> Result<Option<(&[u8], usize)>, FrameError> {
    let Some(&length) = buf.first_chunk() else {
        return Ok(None);
    };
    let len = usize::from(u16::from_be_bytes(length));
    if !(TAGGED_LEN..=MAX_ULPDU).contains(&len) {
        return Err(FrameError::UlpduLength { len });
    }
    let whole = fpdu_len(len);
    let Some((covered, &carried)) = buf.get(..whole).and_then(<[u8]>::split_last_chunk) else {
        return Ok(None);
    };
    if crc {
        let (carried, computed) = (u32::from_le_bytes(carried), crc32c(covered));
        if carried != computed {
            return Err(FrameError::Crc { carried, computed });
        }
    }
    Ok(Some((&covered[LENGTH..LENGTH + len], whole)))
}

/// Bytes of the first frame, once its length is there.
pub(in crate::soft) fn expected(buf: &[u8]) -> Option<usize> {
    let &length = buf.first_chunk()?;
    Some(fpdu_len(u16::from_be_bytes(length).into()))
}

/// The CRC of iSCSI and MPA (RFC 3720, section 12.1).
fn crc32c(bytes: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn frame(ulpdu: &[u8], crc: bool) -> Vec<u8> {
        let mut buf = Vec::new();
        let start = begin(&mut buf);
        buf.extend(ulpdu);
        finish(&mut buf, start, crc);
        buf
    }

    /// Bit by bit, as the standard defines it.
    fn slow_crc32c(bytes: &[u8]) -> u32 {
        !bytes.iter().fold(!0, |sum, &byte| {
            (0..8).fold(sum ^ u32::from(byte), |sum: u32, _| {
                (sum >> 1) ^ if sum & 1 == 1 { 0x82f6_3b78 } else { 0 }
            })
        })
    }

    /// RFC 3720, appendix B.4.
    #[test]
    fn known_sums() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        let read = [
            0x01, 0xc0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x14, 0, 0, 0, 0, 0, 4, 0, 0, 0,
            0, 0x14, 0, 0, 0, 0x18, 0x28, 0, 0, 0, 0, 0, 0, 0, 0x02, 0, 0, 0, 0, 0, 0, 0,
        ];
        let vectors: [(&[u8], u32); 5] = [
            (&[0; 32], 0x8a91_36aa),
            (&[0xff; 32], 0x62a8_ab43),
            (&ascending, 0x46dd_794e),
            (&descending, 0x113f_db5c),
            (&read, 0xd996_3a56),
        ];
        for (bytes, sum) in vectors {
            assert_eq!(crc32c(bytes), sum, "{bytes:02x?}");
            assert_eq!(slow_crc32c(bytes), sum, "{bytes:02x?}");
        }
        assert_eq!(
            crc32c(b"123456789"),
            0xe306_9283,
            "the catalogue's check value"
        );
    }

    #[test]
    fn a_frame_looks_as_the_standard_draws_it() {
        let ulpdu: Vec<u8> = (1..=15).collect();
        let buf = frame(&ulpdu, true);
        assert_eq!(buf[..2], [0, 15]);
        assert_eq!(buf[2..17], ulpdu[..]);
        assert_eq!(buf[17..20], [0; 3]);
        assert_eq!(buf[20..], slow_crc32c(&buf[..20]).to_le_bytes());
        let buf = frame(&ulpdu, false);
        assert_eq!(buf[20..], [0; 4]);
    }

    proptest! {
        #[test]
        fn the_fast_sum_is_the_slow_one(bytes in prop::collection::vec(any::<u8>(), 0..2000)) {
            prop_assert_eq!(crc32c(&bytes), slow_crc32c(&bytes));
        }

        #[test]
        fn a_stream_of_frames_is_split_again(
            ulpdus in prop::collection::vec(
                prop::collection::vec(any::<u8>(), TAGGED_LEN..200), 1..8,
            ),
            crc: bool,
        ) {
            let mut stream = Vec::new();
            for ulpdu in &ulpdus {
                let start = begin(&mut stream);
                stream.extend(ulpdu);
                finish(&mut stream, start, crc);
                prop_assert_eq!(stream.len() - start, fpdu_len(ulpdu.len()));
            }
            let mut rest = &stream[..];
            for ulpdu in &ulpdus {
                let (found, consumed) = split(rest, crc).unwrap().unwrap();
                prop_assert_eq!(found, &ulpdu[..]);
                prop_assert_eq!(expected(rest), Some(consumed));
                rest = &rest[consumed..];
            }
            prop_assert_eq!(split(rest, crc), Ok(None));
        }

        #[test]
        fn a_truncated_frame_waits_for_the_rest(
            ulpdu in prop::collection::vec(any::<u8>(), TAGGED_LEN..100), crc: bool,
        ) {
            let whole = frame(&ulpdu, crc);
            for len in 0..whole.len() {
                prop_assert_eq!(split(&whole[..len], crc), Ok(None));
                prop_assert_eq!(expected(&whole[..len]), (len >= 2).then_some(whole.len()));
            }
        }

        /// Also in the length: behind the frame is noise, so that a longer one is there too.
        #[test]
        fn a_flipped_bit_is_noticed(
            ulpdu in prop::collection::vec(any::<u8>(), TAGGED_LEN..100), bit: prop::sample::Index,
            seed: u32,
        ) {
            let mut stream = frame(&ulpdu, true);
            let bit = bit.index(stream.len() * 8);
            stream[bit / 8] ^= 1 << (bit % 8);
            let noise = (0..16_500u32).map(|word| (word ^ seed).wrapping_mul(0x9e37_79b1));
            stream.extend(noise.flat_map(u32::to_le_bytes));
            let noticed = matches!(
                split(&stream, true),
                Err(FrameError::Crc { .. } | FrameError::UlpduLength { .. })
            );
            prop_assert!(noticed, "bit {}", bit);
        }

        #[test]
        fn any_bytes_are_split_within_their_bounds(
            bytes in prop::collection::vec(any::<u8>(), 0..400), len in 0u16..400, crc: bool,
        ) {
            let mut bytes = bytes;
            if let Some(length) = bytes.first_chunk_mut() {
                *length = len.to_be_bytes();
            }
            if let Ok(Some((ulpdu, consumed))) = split(&bytes, crc) {
                prop_assert!(consumed <= bytes.len());
                prop_assert_eq!(ulpdu.len(), usize::from(len));
            }
        }
    }

    #[test]
    fn every_bit_of_a_frame_is_covered() {
        let whole = frame(&(0..21).collect::<Vec<u8>>(), true);
        for bit in 16..whole.len() * 8 {
            let mut changed = whole.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(
                matches!(split(&changed, true), Err(FrameError::Crc { .. })),
                "bit {bit}"
            );
        }
    }

    #[test]
    fn lengths_that_no_segment_has_are_refused_at_once() {
        for len in [0, 1, TAGGED_LEN - 1, MAX_ULPDU + 1, 0xffff] {
            let length = (len as u16).to_be_bytes();
            assert_eq!(split(&length, true), Err(FrameError::UlpduLength { len }));
        }
        for len in [TAGGED_LEN, MAX_ULPDU] {
            assert_eq!(split(&(len as u16).to_be_bytes(), true), Ok(None));
            let whole = frame(&vec![7; len], true);
            assert_eq!(
                split(&whole, true),
                Ok(Some((&vec![7; len][..], whole.len())))
            );
        }
    }

    #[test]
    fn a_sum_that_was_not_agreed_on_is_not_looked_at() {
        let ulpdu = [1; 20];
        let mut buf = frame(&ulpdu, false);
        assert_eq!(split(&buf, false), Ok(Some((&ulpdu[..], buf.len()))));
        assert!(matches!(split(&buf, true), Err(FrameError::Crc { .. })));
        let last = buf.len() - 1;
        buf[last] = 1;
        assert!(split(&buf, false).is_ok());
    }
}
