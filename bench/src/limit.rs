//! The limit: a plain copy of the same bytes between buffers laid out as in the run.
//!
//! It goes through the same driver as a store: as many values, visited in the same order, made
//! and checked in the same places, copied from as many buffers and into as many as a batch has.
//! What is left out is all that a store does beside the copy.

use anyhow::Result;

use crate::measure::{Store, batch};

/// Values are laid out at multiples of this, as in a registered arena.
const ALIGNMENT: usize = 64;

/// The store that is only `memcpy`: `put` copies into a table, `get` copies out of it.
#[derive(Debug)]
pub struct Copies {
    size: usize,
    stride: usize,
    table: Vec<u8>,
    /// Where puts copy from, a value per slot.
    sources: Vec<u8>,
    /// Where gets copy to, a value per slot.
    values: Vec<u8>,
}

impl Copies {
    /// A table of `keys` values of `size` bytes, all its pages touched.
    pub fn new(size: usize, keys: usize) -> Self {
        let stride = size.next_multiple_of(ALIGNMENT);
        // Not zero: zeroed pages would all be one until written.
        Self {
            size,
            stride,
            table: vec![0xa5; stride * keys],
            sources: vec![0xa5; stride * batch(size)],
            values: vec![0xa5; stride * batch(size)],
        }
    }

    fn at(&self, place: usize) -> std::ops::Range<usize> {
        let start = place * self.stride;
        start..start + self.size
    }
}

impl Store for Copies {
    fn take(&mut self, _slot: usize, _size: usize) -> Result<()> {
        Ok(())
    }

    fn taken(&mut self, slot: usize) -> Option<&mut [u8]> {
        let place = self.at(slot);
        self.sources.get_mut(place)
    }

    fn put(&mut self, _key: &[u8], index: u32, slot: usize) -> Result<()> {
        let (to, from) = (self.at(index as usize), self.at(slot));
        self.table[to].copy_from_slice(&self.sources[from]);
        Ok(())
    }

    fn put_copied(&mut self, _key: &[u8], index: u32, value: &[u8]) -> Result<()> {
        let to = self.at(index as usize);
        self.table[to].copy_from_slice(value);
        Ok(())
    }

    fn get(&mut self, _key: &[u8], index: u32, slot: usize) -> Result<()> {
        let (to, from) = (self.at(slot), self.at(index as usize));
        self.values[to].copy_from_slice(&self.table[from]);
        Ok(())
    }

    fn value(&self, slot: usize) -> Option<&[u8]> {
        self.values.get(self.at(slot))
    }

    fn release(&mut self, _slot: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_put_is_got() {
        let mut copies = Copies::new(100, 3);
        copies.taken(1).unwrap().fill(7);
        copies.put(b"", 2, 1).unwrap();
        copies.get(b"", 2, 0).unwrap();
        assert_eq!(copies.value(0).unwrap(), [7; 100]);
        copies.put_copied(b"", 0, &[8; 100]).unwrap();
        copies.get(b"", 0, 1).unwrap();
        assert_eq!(copies.value(1).unwrap(), [8; 100]);
        copies.get(b"", 1, 0).unwrap();
        assert_eq!(copies.value(0).unwrap(), [0xa5; 100]);
    }
}
