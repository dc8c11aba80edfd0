//! The self-describing block that holds one version of one value in the server's registered memory.
//!
//! ```text
//! offset  0  state     u64  version << 1 | live
//!         8  key hash  u64  XXH3 of the key
//!        16  length    u64  bytes of the value
//!        24  checksum  u64  of the header and, up to CHECKSUMMED bytes, of the value
//!        32  value, up to CHECKSUMMED bytes
//!        64  value, if longer
//! ```
//!
//! All fields are little-endian and stand at multiples of 8, so that each is one word to the copy routine of the
//! device: it is read whole or not at all. A version is used once in the life of a server. A reader that knows
//! the version it wants therefore needs no more than this header to tell whether the bytes it got are that
//! value; [`Expected::matches`] and the module [`crate::server::index`] give the argument.

use xxhash_rust::xxh3::xxh3_64;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Bytes of the header in front of a value. Half a cache line, as much as any typed value is aligned to.
pub const HEADER: usize = size_of::<Header>();

/// The longest value, in bytes, that is checksummed. Above it the reader fetches the header once more behind the
/// value: a second READ in the same chain costs the same at any length, a checksum as much as the copy.
pub const CHECKSUMMED: usize = 512;

/// Where the value of `length` bytes starts in its block. A short one follows its header, and both are fetched by one
/// READ. A long one, fetched apart, leaves the cache line of the header alone: its writer's processor and the server's,
/// which writes the header, then have no line in common.
pub fn value_offset(length: usize) -> usize {
    if Checksummed::covers(length) {
        HEADER
    } else {
        CACHE_LINE
    }
}

const CACHE_LINE: usize = 64;

/// What stands in front of a value.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Header {
    state: U64,
    key_hash: U64,
    length: U64,
    checksum: U64,
}

/// Whether a block is the current version of its key.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum State {
    /// Replaced or deleted: a reader must not take it for the current value.
    Retired,
    /// Published, and not replaced since.
    Live,
}

impl State {
    /// The first word of a header. Writing it, as one word, is how a block is retired.
    pub fn word(self, version: u64) -> [u8; 8] {
        (version << 1 | u64::from(self == State::Live)).to_le_bytes()
    }
}

/// What a reader expects to find at a location it knows.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Expected {
    /// The version it was told.
    pub version: u64,
    /// Hash of the key it looks for.
    pub key_hash: u64,
    /// Bytes of the value.
    pub length: usize,
}

impl Header {
    /// The header of a live block that holds `value` under the given version.
    pub fn live(expected: Expected, value: Checksummed<'_>) -> Self {
        Self {
            state: U64::from_bytes(State::Live.word(expected.version)),
            key_hash: expected.key_hash.into(),
            length: (expected.length as u64).into(),
            checksum: checksum(&expected, value).into(),
        }
    }

    /// The header as it stands in memory.
    pub fn bytes(&self) -> &[u8] {
        self.as_bytes()
    }

    /// The header at the start of `bytes`; `None` when there are too few.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        Self::read_from_prefix(bytes).ok().map(|(header, _)| header)
    }

    /// State and version.
    #[cfg(test)]
    pub fn state(&self) -> (State, u64) {
        let word = self.state.get();
        let state = if word & 1 == 1 {
            State::Live
        } else {
            State::Retired
        };
        (state, word >> 1)
    }
}

/// How the bytes of a value take part in the check of its header.
#[derive(Clone, Copy, Debug)]
pub enum Checksummed<'a> {
    /// Short: the checksum covers the bytes.
    Value(&'a [u8]),
    /// Long: the header is read again behind the value instead.
    HeaderOnly,
}

impl<'a> Checksummed<'a> {
    /// Whether a value of so many bytes is checksummed.
    pub fn covers(length: usize) -> bool {
        length <= CHECKSUMMED
    }

    /// The rule applied to a value that is at hand.
    pub fn of(value: &'a [u8]) -> Self {
        if Self::covers(value.len()) {
            Self::Value(value)
        } else {
            Self::HeaderOnly
        }
    }
}

impl Expected {
    /// Whether `header` and `value`, fetched by one READ, are the expected version while it was live.
    ///
    /// For a value that is not checksummed this only means that the header was live when *it* was read; the value
    /// is proven by a second header, read after it, for which this holds too.
    pub fn matches(&self, header: &Header, value: Checksummed<'_>) -> bool {
        *header == Header::live(*self, value)
    }
}

/// Mixes version, key hash and length into the checksum of the value: a header of one version never vouches for the
/// bytes of another, even when its words were read at different times.
fn checksum(expected: &Expected, value: Checksummed<'_>) -> u64 {
    // Odd 64-bit constants with well-spread bits (fractions of the golden ratio and of sqrt(2)).
    const A: u64 = 0x9e37_79b9_7f4a_7c15;
    const B: u64 = 0x6a09_e667_f3bc_c909;
    let header = (expected.version.wrapping_mul(A) ^ expected.key_hash)
        .rotate_left(29)
        .wrapping_mul(B)
        ^ expected.length as u64;
    match value {
        Checksummed::Value(bytes) => xxh3_64(bytes).wrapping_add(header.wrapping_mul(A)),
        Checksummed::HeaderOnly => header.wrapping_mul(A),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn expected(version: u64, key: &[u8], length: usize) -> Expected {
        Expected {
            version,
            key_hash: crate::hash::key_hash(key),
            length,
        }
    }

    #[test]
    fn the_layout_is_part_of_the_format() {
        let value = b"value";
        let header = Header::live(
            expected(0x0102, b"key", value.len()),
            Checksummed::of(value),
        );
        let bytes = header.bytes();
        assert_eq!(HEADER, 32);
        assert_eq!(bytes[..8], [0x05, 0x02, 0, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[8..16], crate::hash::key_hash(b"key").to_le_bytes());
        assert_eq!(bytes[16..24], 5u64.to_le_bytes());
        assert_eq!(Header::parse(bytes), Some(header));
        assert_eq!(Header::parse(&bytes[..31]), None);
    }

    #[test]
    fn a_retired_block_does_not_match_and_still_tells_its_version() {
        let want = expected(7, b"key", 3);
        let mut bytes = [0; HEADER];
        bytes.copy_from_slice(Header::live(want, Checksummed::of(b"abc")).bytes());
        bytes[..8].copy_from_slice(&State::Retired.word(7));
        let header = Header::parse(&bytes).unwrap();
        assert_eq!(header.state(), (State::Retired, 7));
        assert!(!want.matches(&header, Checksummed::of(b"abc")));
    }

    #[test]
    fn fresh_memory_is_no_block() {
        let header = Header::parse(&[0; HEADER]).unwrap();
        assert_eq!(header.state().0, State::Retired);
        assert!(!expected(0, b"", 0).matches(&header, Checksummed::of(b"")));
    }

    proptest! {
        #[test]
        fn a_live_block_matches_its_expectation(
            version in 0..u64::MAX >> 1,
            key in prop::collection::vec(any::<u8>(), 1..64),
            value in prop::collection::vec(any::<u8>(), 0..2 * CHECKSUMMED),
        ) {
            let want = expected(version, &key, value.len());
            let header = Header::live(want, Checksummed::of(&value));
            prop_assert!(want.matches(&header, Checksummed::of(&value)));
        }

        /// A READ that overlaps the reuse of a block may return, word by word, the old or the new content.
        #[test]
        fn no_mixture_of_two_versions_passes(
            key in prop::collection::vec(any::<u8>(), 1..16),
            words in 0usize..=CHECKSUMMED / 8,
            old in any::<[u8; 8]>(),
            new in any::<[u8; 8]>(),
            take_new in prop::collection::vec(any::<bool>(), 4 + CHECKSUMMED / 8),
        ) {
            let image = |version: u64, fill: [u8; 8]| {
                let value = fill.repeat(words);
                let header = Header::live(expected(version, &key, value.len()), Checksummed::of(&value));
                let mut image = header.bytes().to_vec();
                image.extend_from_slice(&value);
                image
            };
            let (a, b) = (image(1, old), image(2, new));
            let mixed: Vec<u8> = a.chunks(8).zip(b.chunks(8)).zip(&take_new)
                .flat_map(|((a, b), take_new)| if *take_new { b } else { a })
                .copied()
                .collect();
            let header = Header::parse(&mixed).unwrap();
            let value = &mixed[HEADER..];
            for (version, image) in [(1, &a), (2, &b)] {
                let passes = expected(version, &key, value.len()).matches(&header, Checksummed::of(value));
                prop_assert_eq!(passes, mixed == *image);
            }
        }

        #[test]
        fn any_flipped_bit_fails(
            value in prop::collection::vec(any::<u8>(), 0..CHECKSUMMED),
            bit in any::<prop::sample::Index>(),
        ) {
            let want = expected(9, b"key", value.len());
            let mut image = Header::live(want, Checksummed::of(&value)).bytes().to_vec();
            image.extend_from_slice(&value);
            let bit = bit.index(image.len() * 8);
            image[bit / 8] ^= 1 << (bit % 8);
            let header = Header::parse(&image).unwrap();
            prop_assert!(!want.matches(&header, Checksummed::of(&image[HEADER..])));
        }
    }
}
