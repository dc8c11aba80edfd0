//! Where the client believes values to lie.
//!
//! A hint, never a truth: every READ from a remembered location is verified. So a wrong, old or forgotten entry costs
//! one request and nothing else, which is why entries may be keyed by hash alone and dropped at any time.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::protocol::Location;
use crate::segments::LONGEST;

/// Takes a key that is a hash already.
#[derive(Default)]
struct Identity(u64);

impl Hasher for Identity {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, hash: u64) {
        self.0 = hash;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

type Map = HashMap<u64, Entry, BuildHasherDefault<Identity>>;

struct Entry {
    key: Box<[u8]>,
    location: Location,
}

/// A bounded map from keys to locations.
///
/// Two generations: when the young one is full it becomes the old one, and what was old is forgotten; an entry found
/// in the old one moves to the young. Frequently used keys stay, at the price of one look-up.
pub struct Locations {
    young: Map,
    old: Map,
    generation: usize,
}

impl Locations {
    /// Remembers at most `limit` keys (at least 2).
    pub fn new(limit: usize) -> Self {
        Self {
            young: Map::default(),
            old: Map::default(),
            generation: (limit / 2).max(1),
        }
    }

    /// Where `key`, whose hash is `hash`, was last seen.
    #[inline]
    pub fn get(&mut self, hash: u64, key: &[u8]) -> Option<Location> {
        if let Some(entry) = self.young.get(&hash) {
            // Another key of the same hash: not this one.
            return (*entry.key == *key).then_some(entry.location);
        }
        self.promote(hash, key)
    }

    #[cold]
    fn promote(&mut self, hash: u64, key: &[u8]) -> Option<Location> {
        let entry = self.old.remove(&hash)?;
        if *entry.key != *key {
            return None;
        }
        let location = entry.location;
        self.insert(hash, entry);
        Some(location)
    }

    /// Remembers a location. Does not allocate when the key is known.
    ///
    /// One that a single READ cannot fetch is not remembered: no server gives one, and the memory for it is ours.
    #[inline]
    pub fn set(&mut self, hash: u64, key: &[u8], location: Location) {
        if location.length as usize > LONGEST {
            return self.forget(hash);
        }
        if let Some(entry) = self.young.get_mut(&hash)
            && *entry.key == *key
        {
            entry.location = location;
            return;
        }
        self.old.remove(&hash);
        self.insert(
            hash,
            Entry {
                key: key.into(),
                location,
            },
        );
    }

    /// Forgets a key.
    pub fn forget(&mut self, hash: u64) {
        self.young.remove(&hash);
        self.old.remove(&hash);
    }

    fn insert(&mut self, hash: u64, entry: Entry) {
        if self.young.len() >= self.generation && !self.young.contains_key(&hash) {
            self.old = std::mem::take(&mut self.young);
        }
        self.young.insert(hash, entry);
    }

    /// Keys remembered.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.young.len() + self.old.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::hash::key_hash;

    fn at(version: u64) -> Location {
        Location {
            address: version << 8,
            version,
            rkey: 1,
            length: 2,
        }
    }

    #[test]
    fn keys_of_one_hash_do_not_answer_for_each_other() {
        let mut locations = Locations::new(10);
        locations.set(5, b"a", at(1));
        assert_eq!(locations.get(5, b"b"), None);
        locations.set(5, b"b", at(2));
        assert_eq!(locations.get(5, b"a"), None);
        assert_eq!(locations.get(5, b"b"), Some(at(2)));
    }

    #[test]
    fn a_key_in_use_survives_any_number_of_others() {
        let mut locations = Locations::new(8);
        locations.set(key_hash(b"hot"), b"hot", at(1));
        for i in 0..1000u32 {
            let key = i.to_le_bytes();
            locations.set(key_hash(&key), &key, at(2));
            assert_eq!(locations.get(key_hash(b"hot"), b"hot"), Some(at(1)));
        }
    }

    #[test]
    fn a_location_that_no_read_can_fetch_is_not_remembered() {
        let mut locations = Locations::new(10);
        let long = |length: usize| Location {
            length: length as u32,
            ..at(1)
        };
        locations.set(5, b"a", long(LONGEST));
        assert_eq!(locations.get(5, b"a"), Some(long(LONGEST)));
        locations.set(5, b"a", long(LONGEST + 1));
        assert_eq!(locations.get(5, b"a"), None, "nor the one before");
        locations.set(5, b"a", long(u32::MAX as usize));
        assert_eq!(locations.get(5, b"a"), None);
    }

    proptest! {
        /// Whatever it remembers is the last that was set, and it never remembers too much.
        #[test]
        fn never_stale_and_bounded(ops in prop::collection::vec((0u8..12, 0u8..3, 1u64..1000), 1..200)) {
            let mut locations = Locations::new(6);
            let mut model: HashMap<u8, Location> = HashMap::new();
            for (key, op, version) in ops {
                let hash = key_hash(&[key]);
                match op {
                    0 => {
                        locations.set(hash, &[key], at(version));
                        model.insert(key, at(version));
                        prop_assert_eq!(locations.get(hash, &[key]), Some(at(version)));
                    }
                    1 => {
                        locations.forget(hash);
                        model.remove(&key);
                        prop_assert_eq!(locations.get(hash, &[key]), None);
                    }
                    _ => if let Some(found) = locations.get(hash, &[key]) {
                        prop_assert_eq!(Some(&found), model.get(&key));
                    }
                }
                prop_assert!(locations.len() <= 6);
            }
        }
    }
}
