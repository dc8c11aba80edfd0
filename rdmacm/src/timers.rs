//! Deadlines: at most one for each thing that can have one.

use std::collections::{BTreeSet, HashMap};
use std::time::Instant;

use crate::shared::Key;

/// All deadlines of a process.
#[derive(Debug, Default)]
pub struct Timers {
    armed: HashMap<Key, Instant>,
    order: BTreeSet<(Instant, Key)>,
}

impl Timers {
    /// Sets the deadline of a thing, in place of the one it has.
    pub fn set(&mut self, key: Key, at: Instant) {
        self.clear(key);
        self.armed.insert(key, at);
        self.order.insert((at, key));
    }

    /// Takes a thing's deadline away, if it has one.
    pub fn clear(&mut self, key: Key) {
        if let Some(at) = self.armed.remove(&key) {
            self.order.remove(&(at, key));
        }
    }

    /// The earliest.
    #[must_use]
    pub fn next(&self) -> Option<Instant> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes one that has passed.
    pub fn take_due(&mut self, now: Instant) -> Option<Key> {
        let (at, key) = *self.order.first()?;
        if at > now {
            return None;
        }
        self.clear(key);
        Some(key)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn deadlines_come_in_their_order_and_once() {
        let start = Instant::now();
        let at = |millis| start + Duration::from_millis(millis);
        let mut timers = Timers::default();
        timers.set(1, at(30));
        timers.set(2, at(10));
        timers.set(3, at(20));
        timers.set(1, at(5));
        timers.clear(3);
        assert_eq!(timers.next(), Some(at(5)));
        assert_eq!(timers.take_due(at(4)), None);
        assert_eq!(timers.take_due(at(40)), Some(1));
        assert_eq!(timers.take_due(at(40)), Some(2));
        assert_eq!((timers.take_due(at(40)), timers.next()), (None, None));
    }
}
