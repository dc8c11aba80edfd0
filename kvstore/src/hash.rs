//! The store's two hashes of a key.
//!
//! [`key_hash`] is part of the format: it stands in every block's header and is the same in every process.
//! [`KeyHasher`] places keys in the server's index; its seed is drawn at start, so that clients cannot know
//! which keys share a bucket.

use std::hash::{BuildHasher, Hasher, RandomState};

use xxhash_rust::xxh3::{xxh3_64, xxh3_64_with_seed};

/// Hash of a key as it stands in a block's header: XXH3, 64 bits, seed 0.
pub fn key_hash(key: &[u8]) -> u64 {
    xxh3_64(key)
}

/// Builds the hasher of the server's index, seeded once per index.
#[derive(Clone, Debug)]
pub struct SeededHash {
    seed: u64,
}

impl SeededHash {
    /// A fresh random seed.
    pub fn random() -> Self {
        Self {
            // The standard library's map seed is the one source of randomness that needs no further crate.
            seed: RandomState::new().build_hasher().finish(),
        }
    }
}

impl BuildHasher for SeededHash {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher { state: self.seed }
    }
}

/// XXH3 of each written slice, seeded with what came before.
#[derive(Clone, Debug)]
pub struct KeyHasher {
    state: u64,
}

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.state = xxh3_64_with_seed(bytes, self.state);
    }

    // The length prefix of a slice; the slice itself follows and mixes it in.
    fn write_usize(&mut self, n: usize) {
        self.state = self.state.rotate_left(32).wrapping_add(n as u64);
    }

    fn finish(&self) -> u64 {
        self.state
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_header_hash_is_fixed_by_the_format() {
        assert_eq!(key_hash(b""), 0x2d06_8005_38d3_94c2);
        assert_ne!(key_hash(b"a"), key_hash(b"b"));
    }

    #[test]
    fn a_borrowed_key_hashes_like_an_owned_one() {
        let build = SeededHash::random();
        let owned: Box<[u8]> = b"some key".as_slice().into();
        assert_eq!(
            build.hash_one(&owned),
            build.hash_one(b"some key".as_slice())
        );
        assert_ne!(
            build.hash_one(b"a".as_slice()),
            build.hash_one(b"b".as_slice())
        );
    }
}
