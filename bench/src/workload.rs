//! What is put and got: keys, values that carry a stamp of their put, and the order of the keys.
//!
//! Every word of a value depends on its key and on the number of its put, so a value of another
//! key, of an earlier put, or torn between two puts fails the comparison at its first wrong word.

use std::fmt;

/// The value sizes of the founding complaint, in bytes.
pub const SIZES: [usize; 4] = [128, 4 << 10, 50 << 10, 1 << 20];

/// Added from word to word of a value: odd, so 2^64 words pass before one repeats.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// Which put of which key a value stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Index of the key in its [`Workload`].
    pub key: u32,
    /// Number of the put of that key, from 1.
    pub version: u32,
}

impl Stamp {
    /// First word of the value: the stamp itself, so that a wrong value tells where it came from.
    fn word(self) -> u64 {
        u64::from(self.key) << 32 | u64::from(self.version)
    }

    fn from_word(word: u64) -> Self {
        Self {
            key: (word >> 32) as u32,
            version: word as u32,
        }
    }

    /// The word after the stamp; each later one is `STEP` more.
    fn seed(self) -> u64 {
        let mixed = (self.word() ^ 0xd6e8_feb8_6659_fd93).wrapping_mul(0xff51_afd7_ed55_8ccd);
        mixed ^ mixed >> 32
    }

    /// Writes the value of this stamp over all of `value`.
    pub fn fill(self, value: &mut [u8]) {
        let (words, tail) = value.as_chunks_mut::<8>();
        let mut next = self.seed();
        for (index, word) in words.iter_mut().enumerate() {
            if index == 0 {
                *word = self.word().to_le_bytes();
            } else {
                *word = next.to_le_bytes();
                next = next.wrapping_add(STEP);
            }
        }
        let last = next.to_le_bytes();
        let length = tail.len();
        tail.copy_from_slice(&last[..length]);
    }

    /// Compares every byte of `value` with what [`Stamp::fill`] writes.
    ///
    /// # Errors
    /// The first word that differs, with what stands in its place.
    pub fn check(self, value: &[u8], size: usize) -> Result<(), Mismatch> {
        let wrong = |offset| Mismatch {
            expected: self,
            found: value
                .first_chunk()
                .map(|word| Stamp::from_word(u64::from_le_bytes(*word))),
            length: value.len(),
            size,
            offset,
        };
        if value.len() != size {
            return Err(wrong(0));
        }
        let (words, tail) = value.as_chunks::<8>();
        let mut next = self.seed();
        if let Some((first, rest)) = words.split_first() {
            if u64::from_le_bytes(*first) != self.word() {
                return Err(wrong(0));
            }
            // Blocks are compared without a branch per word, so that the compiler uses vectors.
            for (index, block) in rest.chunks(64).enumerate() {
                let start = next;
                let mut difference = 0;
                for word in block {
                    difference |= u64::from_le_bytes(*word) ^ next;
                    next = next.wrapping_add(STEP);
                }
                if difference != 0 {
                    let mut expected = start;
                    let bad = block.iter().position(|word| {
                        let differs = u64::from_le_bytes(*word) != expected;
                        expected = expected.wrapping_add(STEP);
                        differs
                    });
                    return Err(wrong((1 + index * 64 + bad.unwrap_or(0)) * 8));
                }
            }
        }
        if tail != &next.to_le_bytes()[..tail.len()] {
            return Err(wrong(words.len() * 8));
        }
        Ok(())
    }
}

/// A value that is not the one its key should hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mismatch {
    expected: Stamp,
    found: Option<Stamp>,
    length: usize,
    size: usize,
    offset: usize,
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "wrong value: expected {} bytes of put {} of key {}, got {} bytes that differ at byte {}",
            self.size, self.expected.version, self.expected.key, self.length, self.offset
        )?;
        match self.found {
            Some(found) => write!(
                f,
                " and begin as put {} of key {}",
                found.version, found.key
            ),
            None => Ok(()),
        }
    }
}

impl std::error::Error for Mismatch {}

/// The keys of one value size and the versions they hold in one store.
#[derive(Clone, Debug)]
pub struct Workload {
    size: usize,
    keys: Vec<Vec<u8>>,
    versions: Vec<u32>,
    order: Vec<u32>,
    next: usize,
}

impl Workload {
    /// `keys` keys of values of `size` bytes, visited in a fixed order that is not that of their
    /// numbers, so that no prefetcher runs ahead of it.
    pub fn new(size: usize, keys: usize) -> Self {
        let keys = keys.clamp(1, u32::MAX as usize);
        let mut order: Vec<u32> = (0..keys as u32).collect();
        // Fisher-Yates with a fixed seed: every store and every run visits the keys alike.
        let mut state = STEP ^ size as u64;
        for last in (1..order.len()).rev() {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            order.swap(last, (state % (last as u64 + 1)) as usize);
        }
        Self {
            size,
            keys: (0..keys)
                .map(|key| format!("size-{size}/value-{key:06}").into_bytes())
                .collect(),
            versions: vec![0; keys],
            order,
            next: 0,
        }
    }

    /// As many keys as make `working_set` bytes of values, at least 8 and at most `most`.
    pub fn of_working_set(size: usize, working_set: usize, most: usize) -> Self {
        Self::new(size, (working_set / size.max(1)).clamp(8, most.max(8)))
    }

    /// Bytes of one value.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Number of keys.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    /// Never: a workload has at least one key.
    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The bytes of key number `index`.
    pub fn key(&self, index: u32) -> &[u8] {
        &self.keys[index as usize]
    }

    /// The next key in turn.
    pub fn advance(&mut self) -> u32 {
        let key = self.order[self.next];
        self.next = (self.next + 1) % self.order.len();
        key
    }

    /// Counts a new put of `key` and returns the stamp its value must carry.
    pub fn next_put(&mut self, key: u32) -> Stamp {
        let version = &mut self.versions[key as usize];
        *version = version.wrapping_add(1).max(1);
        self.stored(key)
    }

    /// The stamp of the value that `key` holds.
    pub fn stored(&self, key: u32) -> Stamp {
        Stamp {
            key,
            version: self.versions[key as usize],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAMP: Stamp = Stamp { key: 7, version: 3 };

    #[test]
    fn a_filled_value_checks_at_every_length() {
        for size in (0..40).chain([127, 128, 513, 4096, 51_200, 1 << 20]) {
            let mut value = vec![0xaa; size];
            STAMP.fill(&mut value);
            assert_eq!(STAMP.check(&value, size), Ok(()), "{size} bytes");
        }
    }

    #[test]
    fn every_changed_byte_is_found_where_it_stands() {
        let mut value = vec![0; 1203];
        STAMP.fill(&mut value);
        for byte in 0..value.len() {
            value[byte] ^= 1;
            let mismatch = STAMP.check(&value, value.len()).unwrap_err();
            assert_eq!(mismatch.offset, byte / 8 * 8);
            value[byte] ^= 1;
        }
    }

    #[test]
    fn values_of_other_keys_other_puts_and_other_lengths_are_refused() {
        let mut value = vec![0; 128];
        STAMP.fill(&mut value);
        for other in [
            Stamp { key: 8, ..STAMP },
            Stamp {
                version: 2,
                ..STAMP
            },
        ] {
            let mismatch = other.check(&value, 128).unwrap_err();
            assert_eq!(mismatch.found, Some(STAMP));
        }
        assert!(STAMP.check(&value[..127], 128).is_err());
        assert!(STAMP.check(&[], 128).is_err());
    }

    #[test]
    fn a_value_torn_between_two_puts_is_refused() {
        let mut value = vec![0; 4096];
        let mut older = vec![0; 4096];
        STAMP.fill(&mut value);
        Stamp {
            version: 2,
            ..STAMP
        }
        .fill(&mut older);
        for cut in (8..4096).step_by(8) {
            let mut torn = value.clone();
            torn[cut..].copy_from_slice(&older[cut..]);
            assert_eq!(STAMP.check(&torn, 4096).unwrap_err().offset, cut);
        }
    }

    #[test]
    fn every_key_has_its_turn() {
        let mut workload = Workload::of_working_set(4096, 1 << 20, 1000);
        assert_eq!(workload.len(), 256);
        let mut seen: Vec<u32> = (0..256).map(|_| workload.advance()).collect();
        assert_ne!(seen, (0..256).collect::<Vec<_>>());
        let first = seen[0];
        seen.sort_unstable();
        assert_eq!(seen, (0..256).collect::<Vec<_>>());
        assert_eq!(workload.advance(), first);
    }

    #[test]
    fn puts_count_per_key() {
        let mut workload = Workload::new(128, 4);
        assert_eq!(workload.next_put(2), Stamp { key: 2, version: 1 });
        assert_eq!(workload.next_put(2), Stamp { key: 2, version: 2 });
        assert_eq!(workload.next_put(3).version, 1);
        assert_eq!(workload.stored(2).version, 2);
    }
}
