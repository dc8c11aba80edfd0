//! What a fuzz target is, and the test that tries each without a fuzzer. A part of every crate that
//! has targets.

/// A parser of bytes that a peer controls.
#[derive(Clone, Copy, Debug)]
pub struct Target {
    /// What the driver calls it by.
    pub name: &'static str,
    /// Parses bytes, and panics where the result is not sound. Whether they were good.
    pub run: fn(&[u8]) -> bool,
    /// Good bytes, of every kind that there is.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

/// Tries every seed, which must be good, and bytes near to them: all that begin like one, all with a
/// bit flipped, and many that are put together at random.
#[cfg(test)]
pub(crate) fn try_near_the_seeds(targets: &[Target]) {
    for target in targets {
        let seeds = (target.seeds)();
        let mut near = 0_usize;
        let mut refused = 0_usize;
        let mut attempt = |bytes: &[u8]| {
            near += 1;
            refused += usize::from(!(target.run)(bytes));
        };
        for (index, seed) in seeds.iter().enumerate() {
            assert!((target.run)(seed), "seed {index} of {}", target.name);
            for len in 0..seed.len() {
                attempt(&seed[..len]);
            }
            for bit in 0..seed.len() * 8 {
                let mut bytes = seed.clone();
                bytes[bit / 8] ^= 1 << (bit % 8);
                attempt(&bytes);
            }
        }
        let mut random = Random(0x9e37_79b9_7f4a_7c15);
        for _ in 0..10_000 {
            attempt(&random.mixture(&seeds));
        }
        assert!(near > 10_000, "{} has no seeds", target.name);
        assert!(refused > 0, "{} takes anything", target.name);
    }
}

/// Numbers that are the same in every run (xorshift64*).
#[cfg(test)]
struct Random(u64);

#[cfg(test)]
impl Random {
    /// A number below another that is not zero.
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let number = self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        number as usize % end
    }

    /// A seed with a few changes.
    fn mixture(&mut self, seeds: &[Vec<u8>]) -> Vec<u8> {
        let mut bytes = seeds[self.below(seeds.len())].clone();
        for _ in 0..=self.below(4) {
            let at = self.below(bytes.len() + 1);
            let end = at + self.below(bytes.len() - at + 1).min(8);
            match self.below(5) {
                0 => bytes[at..end].fill([0, 1, 0x7f, 0x80, 0xff][self.below(5)]),
                1 => bytes.splice(at..at, [self.below(256) as u8]).for_each(drop),
                2 => drop(bytes.drain(at..end)),
                3 => bytes.extend_from_within(at..end),
                _ => {
                    let other = &seeds[self.below(seeds.len())];
                    bytes.truncate(at);
                    bytes.extend(other.iter().skip(at));
                }
            }
            if let Some(byte) = bytes.get_mut(at) {
                *byte = self.below(256) as u8;
            }
        }
        bytes
    }
}
