//! Payloads of a fixed layout.

use super::FrameError;
use super::fields::{Fields, Layout};

/// The payload of a READ's request (RFC 5040, section 4.4).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct ReadRequest {
    pub sink_stag: u32,
    pub sink_offset: u64,
    pub len: u32,
    pub source_stag: u32,
    pub source_offset: u64,
}

/// The payload of an atomic's request (RFC 7306, section 5.2.1), without its masks: they are always
/// those with which the operations are the verbs'.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct AtomicRequest {
    /// Compare and swap; otherwise fetch and add.
    pub swaps: bool,
    pub request_id: u32,
    pub stag: u32,
    pub offset: u64,
    pub add_or_swap: u64,
    /// Of no meaning, and zero on the wire, when adding.
    pub compare: u64,
}

/// The payload of an atomic's response (RFC 7306, section 5.2.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct AtomicResponse {
    pub request_id: u32,
    /// What was there before.
    pub original: u64,
}

/// The range that a WRITE of several segments is going to fill.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Announce {
    pub stag: u32,
    pub offset: u64,
    pub len: u32,
}

/// The payload of an immediate (RFC 7306, section 6.1): of its eight bytes verbs use the first four.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Immediate {
    /// In network order in memory, as the application gave it.
    pub data: u32,
}

impl ReadRequest {
    pub(in crate::soft) const LEN: usize = 28;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        Layout::new()
            .u32(self.sink_stag)
            .u64(self.sink_offset)
            .u32(self.len)
            .u32(self.source_stag)
            .u64(self.source_offset)
            .done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = exactly::<{ Self::LEN }>("a READ request's payload", payload)?;
        Ok(Self {
            sink_stag: fields.u32(),
            sink_offset: fields.u64(),
            len: fields.u32(),
            source_stag: fields.u32(),
            source_offset: fields.u64(),
        })
    }
}

impl AtomicRequest {
    pub(in crate::soft) const LEN: usize = 52;
    const FETCH_ADD: u32 = 0;
    const COMPARE_SWAP: u32 = 2;
    /// In the mask of an addition a bit ends a field: there are no fields but the whole.
    const ADD_MASK: u64 = 0;
    /// In the masks of a swap a bit takes part: all of them do.
    const SWAP_MASK: u64 = u64::MAX;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        let (code, mask, compare, compare_mask) = if self.swaps {
            let mask = Self::SWAP_MASK;
            (Self::COMPARE_SWAP, mask, self.compare, mask)
        } else {
            (Self::FETCH_ADD, Self::ADD_MASK, 0, 0)
        };
        Layout::new()
            .u32(code)
            .u32(self.request_id)
            .u32(self.stag)
            .u64(self.offset)
            .u64(self.add_or_swap)
            .u64(mask)
            .u64(compare)
            .u64(compare_mask)
            .done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = exactly::<{ Self::LEN }>("an atomic request's payload", payload)?;
        // The other bits are reserved.
        let code = fields.u32() & 0x0f;
        let swaps = match code {
            Self::FETCH_ADD => false,
            Self::COMPARE_SWAP => true,
            _ => return Err(field("atomic operation code", code.into(), "0 or 2")),
        };
        let (request_id, stag) = (fields.u32(), fields.u32());
        let (offset, add_or_swap) = (fields.u64(), fields.u64());
        let (mask, compare, compare_mask) = (fields.u64(), fields.u64(), fields.u64());
        if swaps {
            let all = "all ones";
            require("swap mask", mask, Self::SWAP_MASK, all)?;
            require("compare mask", compare_mask, Self::SWAP_MASK, all)?;
        } else {
            require("add mask", mask, Self::ADD_MASK, "zero")?;
        }
        Ok(Self {
            swaps,
            request_id,
            stag,
            offset,
            add_or_swap,
            compare: if swaps { compare } else { 0 },
        })
    }
}

impl AtomicResponse {
    pub(in crate::soft) const LEN: usize = 12;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        Layout::new().u32(self.request_id).u64(self.original).done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = exactly::<{ Self::LEN }>("an atomic response's payload", payload)?;
        Ok(Self {
            request_id: fields.u32(),
            original: fields.u64(),
        })
    }
}

impl Announce {
    pub(in crate::soft) const LEN: usize = 16;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        Layout::new()
            .u32(self.stag)
            .u64(self.offset)
            .u32(self.len)
            .done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = exactly::<{ Self::LEN }>("an announcement's payload", payload)?;
        Ok(Self {
            stag: fields.u32(),
            offset: fields.u64(),
            len: fields.u32(),
        })
    }
}

impl Immediate {
    pub(in crate::soft) const LEN: usize = 8;

    pub(in crate::soft) fn encode(&self) -> [u8; Self::LEN] {
        Layout::new().bytes(self.data.to_ne_bytes()).u32(0).done()
    }

    pub(in crate::soft) fn decode(payload: &[u8]) -> Result<Self, FrameError> {
        let mut fields = exactly::<{ Self::LEN }>("an immediate's payload", payload)?;
        let data = u32::from_ne_bytes(fields.bytes());
        // A completion has no place for them, and they are not dropped in silence.
        require(
            "second half of an immediate",
            fields.u32().into(),
            0,
            "zero",
        )?;
        Ok(Self { data })
    }
}

fn exactly<'a, const N: usize>(
    part: &'static str,
    payload: &'a [u8],
) -> Result<Fields<'a>, FrameError> {
    if payload.len() == N {
        return Ok(Fields::new(payload));
    }
    Err(FrameError::Length {
        part,
        found: payload.len(),
        expected: N,
    })
}

fn field(field: &'static str, value: u64, expected: &'static str) -> FrameError {
    FrameError::Field {
        field,
        value,
        expected,
    }
}

fn require(
    name: &'static str,
    value: u64,
    wanted: u64,
    expected: &'static str,
) -> Result<(), FrameError> {
    if value == wanted {
        Ok(())
    } else {
        Err(field(name, value, expected))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// What it decodes to, after every other length has been refused.
    fn only_whole<T: std::fmt::Debug>(
        bytes: &[u8],
        decode: impl Fn(&[u8]) -> Result<T, FrameError>,
    ) -> Result<T, FrameError> {
        let mut longer = bytes.to_vec();
        longer.push(0);
        for len in (0..=longer.len()).filter(|&len| len != bytes.len()) {
            assert!(
                matches!(
                    decode(&longer[..len]),
                    Err(FrameError::Length { found, expected, .. })
                        if found == len && expected == bytes.len()
                ),
                "{len} bytes"
            );
        }
        decode(bytes)
    }

    proptest! {
        #[test]
        fn payloads_round_trip(words: [u32; 3], longs: [u64; 3], swaps: bool) {
            let [first, second, third] = words;
            let read = ReadRequest {
                sink_stag: first,
                sink_offset: longs[0],
                len: second,
                source_stag: third,
                source_offset: longs[1],
            };
            prop_assert_eq!(only_whole(&read.encode(), ReadRequest::decode), Ok(read));
            let atomic = AtomicRequest {
                swaps,
                request_id: first,
                stag: second,
                offset: longs[0],
                add_or_swap: longs[1],
                compare: if swaps { longs[2] } else { 0 },
            };
            prop_assert_eq!(only_whole(&atomic.encode(), AtomicRequest::decode), Ok(atomic));
            let answer = AtomicResponse { request_id: first, original: longs[0] };
            prop_assert_eq!(only_whole(&answer.encode(), AtomicResponse::decode), Ok(answer));
            let announce = Announce { stag: first, offset: longs[0], len: second };
            prop_assert_eq!(only_whole(&announce.encode(), Announce::decode), Ok(announce));
            let immediate = Immediate { data: first };
            prop_assert_eq!(only_whole(&immediate.encode(), Immediate::decode), Ok(immediate));
        }

        #[test]
        fn any_bytes_are_a_good_payload_or_none(
            bytes in prop::collection::vec(any::<u8>(), AtomicRequest::LEN),
            code in 0u8..4,
            masks: [bool; 2],
        ) {
            let mut bytes = bytes;
            bytes[3] = code;
            for (place, mask) in [28, 44].into_iter().zip(masks) {
                bytes[place..place + 8].fill(if mask { 0xff } else { 0 });
            }
            if let Ok(request) = AtomicRequest::decode(&bytes) {
                prop_assert_eq!(AtomicRequest::decode(&request.encode()), Ok(request));
                prop_assert_eq!(request.swaps, code == 2);
            }
        }
    }

    #[test]
    fn an_atomic_request_looks_as_the_standard_draws_it() {
        let swap = AtomicRequest {
            swaps: true,
            request_id: 0x0102_0304,
            stag: 0x0506_0708,
            offset: 0x1112_1314_1516_1718,
            add_or_swap: 0x2122_2324_2526_2728,
            compare: 0x3132_3334_3536_3738,
        };
        let mut wanted = vec![0, 0, 0, 2, 1, 2, 3, 4, 5, 6, 7, 8];
        wanted.extend(0x11..=0x18);
        wanted.extend(0x21..=0x28);
        wanted.extend([0xff; 8]);
        wanted.extend(0x31..=0x38);
        wanted.extend([0xff; 8]);
        assert_eq!(swap.encode()[..], wanted[..]);

        let add = AtomicRequest {
            swaps: false,
            ..swap
        };
        let bytes = add.encode();
        assert_eq!(bytes[..4], [0; 4]);
        assert_eq!(bytes[28..], [0; 24], "no mask and nothing to compare");
        assert_eq!(
            AtomicRequest::decode(&bytes),
            Ok(AtomicRequest { compare: 0, ..add })
        );
    }

    #[test]
    fn operations_that_verbs_do_not_have_are_refused() {
        let request = AtomicRequest {
            swaps: true,
            request_id: 1,
            stag: 2,
            offset: 8,
            add_or_swap: 3,
            compare: 4,
        };
        let refused = |swaps, at: usize, name: &str| {
            let mut bytes = AtomicRequest { swaps, ..request }.encode();
            bytes[at] ^= 1;
            match AtomicRequest::decode(&bytes) {
                Err(FrameError::Field { field, .. }) => assert_eq!(field, name),
                other => panic!("{other:?}"),
            }
        };
        refused(true, 3, "atomic operation code");
        refused(false, 3, "atomic operation code");
        refused(true, 35, "swap mask");
        refused(true, 44, "compare mask");
        refused(false, 28, "add mask");
    }

    #[test]
    fn an_immediate_travels_as_the_bytes_it_is() {
        let immediate = Immediate {
            data: 0x0102_0304_u32.to_be(),
        };
        let mut bytes = immediate.encode();
        assert_eq!(bytes, [1, 2, 3, 4, 0, 0, 0, 0]);
        bytes[7] = 1;
        assert!(matches!(
            Immediate::decode(&bytes),
            Err(FrameError::Field { value: 1, .. })
        ));
    }
}
