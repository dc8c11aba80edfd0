//! Finding a connection by its id and by its queue pair's number.

use crate::event::ConnectionId;

/// Values under ids that are never used again.
#[derive(Debug)]
pub(crate) struct Slots<T> {
    slots: Vec<Slot<T>>,
    free: Vec<u32>,
}

#[derive(Debug)]
struct Slot<T> {
    /// Counts up with each id that has ended.
    generation: u32,
    value: Option<T>,
}

impl<T> Slots<T> {
    pub(crate) fn new(capacity: u32) -> Self {
        let slots = (0..capacity)
            .map(|_| Slot {
                generation: 0,
                value: None,
            })
            .collect();
        Self {
            slots,
            free: (0..capacity).rev().collect(),
        }
    }

    /// Puts a value into a free slot; gives it back where there is none.
    pub(crate) fn insert(&mut self, value: T) -> Result<ConnectionId, T> {
        let Some(index) = self.free.pop() else {
            return Err(value);
        };
        let Some(slot) = self.slots.get_mut(index as usize) else {
            return Err(value);
        };
        slot.value = Some(value);
        Ok(ConnectionId {
            index,
            generation: slot.generation,
        })
    }

    /// The value under `id`, unless its id has ended.
    #[inline]
    pub(crate) fn get_mut(&mut self, id: ConnectionId) -> Option<&mut T> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            None
        } else {
            slot.value.as_mut()
        }
    }

    /// The value under `id`, unless its id has ended.
    #[inline]
    pub(crate) fn get(&self, id: ConnectionId) -> Option<&T> {
        let slot = self.slots.get(id.index as usize)?;
        if slot.generation != id.generation {
            None
        } else {
            slot.value.as_ref()
        }
    }

    /// The value in a slot, whether its id has ended or not.
    #[inline]
    pub(crate) fn at_mut(&mut self, index: u32) -> Option<&mut T> {
        self.slots.get_mut(index as usize)?.value.as_mut()
    }

    /// The present id of a slot.
    #[inline]
    pub(crate) fn id(&self, index: u32) -> ConnectionId {
        let generation = self
            .slots
            .get(index as usize)
            .map_or(0, |slot| slot.generation);
        ConnectionId { index, generation }
    }

    /// Ends the id of a slot; its value stays until [`remove`](Self::remove).
    pub(crate) fn retire(&mut self, index: u32) {
        if let Some(slot) = self.slots.get_mut(index as usize) {
            slot.generation = slot.generation.wrapping_add(1);
        }
    }

    /// Takes a value out, ends its id, and makes its slot free.
    pub(crate) fn remove(&mut self, index: u32) -> Option<T> {
        let value = self.slots.get_mut(index as usize)?.value.take()?;
        self.retire(index);
        self.free.push(index);
        Some(value)
    }

    /// The slots that have a value.
    pub(crate) fn indices(&self) -> impl Iterator<Item = u32> {
        self.slots
            .iter()
            .zip(0..)
            .filter(|(slot, _)| slot.value.is_some())
            .map(|(_, index)| index)
    }
}

/// From queue pair numbers to slots: open addressing, because it is asked once per completion.
#[derive(Debug)]
pub(crate) struct QpTable {
    /// Queue pair number and slot; a power of two, at most half full.
    entries: Vec<Option<(u32, u32)>>,
}

impl QpTable {
    pub(crate) fn new(capacity: u32) -> Self {
        let len = (capacity.max(4) as usize * 2).next_power_of_two();
        Self {
            entries: vec![None; len],
        }
    }

    #[inline]
    fn home(&self, qp_num: u32) -> usize {
        // Fibonacci hashing: the numbers of one process differ in few bits.
        (qp_num.wrapping_mul(0x9e37_79b9) >> 8) as usize & (self.entries.len() - 1)
    }

    /// The slot of a queue pair.
    #[inline]
    pub(crate) fn get(&self, qp_num: u32) -> Option<u32> {
        let mut at = self.home(qp_num);
        loop {
            match self.entries[at] {
                Some((number, index)) if number == qp_num => return Some(index),
                Some(_) => at = (at + 1) & (self.entries.len() - 1),
                None => return None,
            }
        }
    }

    /// Enters a queue pair. There are never more than the table was made for, so a free entry is
    /// found.
    pub(crate) fn insert(&mut self, qp_num: u32, index: u32) {
        let mut at = self.home(qp_num);
        while self.entries[at].is_some_and(|(number, _)| number != qp_num) {
            at = (at + 1) & (self.entries.len() - 1);
        }
        self.entries[at] = Some((qp_num, index));
    }

    /// Forgets a queue pair.
    pub(crate) fn remove(&mut self, qp_num: u32) {
        let mask = self.entries.len() - 1;
        let mut hole = self.home(qp_num);
        loop {
            match self.entries[hole] {
                Some((number, _)) if number == qp_num => break,
                Some(_) => hole = (hole + 1) & mask,
                None => return,
            }
        }
        // Entries behind the hole move up unless that would put them before their home.
        let mut at = hole;
        loop {
            at = (at + 1) & mask;
            let Some((number, _)) = self.entries[at] else {
                break;
            };
            let from_home = at.wrapping_sub(self.home(number)) & mask;
            let from_hole = at.wrapping_sub(hole) & mask;
            if from_home >= from_hole {
                self.entries[hole] = self.entries[at];
                hole = at;
            }
        }
        self.entries[hole] = None;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn table_is_a_map(steps in prop::collection::vec((0u32..40, any::<bool>(), 0u32..1000), 0..300)) {
            let mut table = QpTable::new(16);
            let mut oracle = HashMap::new();
            for (number, insert, index) in steps {
                // Numbers as they come: some close together, some that differ in high bits only.
                let qp_num = (number % 20) | (number / 20) << 12;
                if insert && (oracle.len() < 16 || oracle.contains_key(&qp_num)) {
                    table.insert(qp_num, index);
                    oracle.insert(qp_num, index);
                } else {
                    table.remove(qp_num);
                    oracle.remove(&qp_num);
                }
                for number in 0..40 {
                    let qp_num = (number % 20) | (number / 20) << 12;
                    prop_assert_eq!(table.get(qp_num), oracle.get(&qp_num).copied());
                }
            }
        }
    }

    #[test]
    fn ids_end() {
        let mut slots = Slots::new(2);
        let first = slots.insert("first").unwrap();
        let second = slots.insert("second").unwrap();
        assert_eq!(slots.insert("third"), Err("third"));
        assert_eq!(slots.get_mut(first), Some(&mut "first"));
        slots.retire(first.index);
        assert_eq!(slots.get_mut(first), None);
        assert_eq!(slots.at_mut(first.index), Some(&mut "first"));
        assert_eq!(slots.remove(first.index), Some("first"));
        let again = slots.insert("again").unwrap();
        assert_eq!(again.index, first.index);
        assert_ne!(again, first);
        assert_eq!(
            (slots.get(first), slots.get(again), slots.get(second)),
            (None, Some(&"again"), Some(&"second"))
        );
        assert_eq!(slots.indices().collect::<Vec<_>>(), [0, 1]);
    }
}
