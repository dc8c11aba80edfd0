//! Numbers that follow from a seed.

/// SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// A length from 1 to `most`, small ones as often as large ones.
    pub fn len(&mut self, most: u64) -> usize {
        let bits = self.below(u64::from(most.ilog2()) + 1) as u32;
        let least = 1 << bits;
        (least + self.below(least)).min(most) as usize
    }
}

/// Bytes that follow from a seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut random = Random::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend(random.next().to_ne_bytes());
    }
    bytes.truncate(len);
    bytes
}
