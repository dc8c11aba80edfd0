//! Calls: what those leave who want a queue pair to be looked at.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::soft::layout::{CALLS_IN_GROUP, Calls, Line, MAX_QP};

const WORDS_IN_GROUP: usize = CALLS_IN_GROUP / 64;

impl Calls {
    pub(super) fn new() -> Self {
        Self {
            groups: Line(AtomicU64::new(0)),
            words: [const { AtomicU64::new(0) }; MAX_QP / 64],
        }
    }

    /// Asks for a look at a queue pair. What it is about was published before.
    pub(in crate::soft) fn call(&self, index: usize) {
        let word = index / 64 % self.words.len();
        self.words[word].fetch_or(1 << (index % 64), Ordering::Release);
        let group = word / WORDS_IN_GROUP;
        self.groups.0.fetch_or(1 << group, Ordering::Release);
    }

    /// Whether anybody has called.
    #[inline]
    pub(super) fn are_there(&self) -> bool {
        self.groups.0.load(Ordering::Relaxed) != 0
    }

    /// Takes all calls. One that comes meanwhile is taken now, or its group's bit stays.
    pub(super) fn take(&self, mut each: impl FnMut(usize)) {
        let mut groups = self.groups.0.swap(0, Ordering::AcqRel);
        while groups != 0 {
            let first = groups.trailing_zeros() as usize * WORDS_IN_GROUP;
            groups &= groups - 1;
            for word in first..first + WORDS_IN_GROUP {
                if self.words[word].load(Ordering::Relaxed) == 0 {
                    continue;
                }
                let mut bits = self.words[word].swap(0, Ordering::AcqRel);
                while bits != 0 {
                    each(word * 64 + bits.trailing_zeros() as usize);
                    bits &= bits - 1;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;

    #[test]
    fn every_call_is_taken_once() {
        let calls = Calls::new();
        assert!(!calls.are_there());
        let called = [0, 63, 64, 255, 256, MAX_QP - 1];
        for index in called.into_iter().chain(called) {
            calls.call(index);
        }
        assert!(calls.are_there());
        let mut taken = Vec::new();
        calls.take(|index| taken.push(index));
        assert_eq!(taken, called);
        assert!(!calls.are_there());
        calls.take(|index| panic!("{index} has not called again"));
    }

    /// Each caller publishes a count before it calls, and goes on only when that count was seen: a call
    /// that got lost would keep it waiting for ever.
    #[test]
    fn no_call_gets_lost_between_threads() {
        const ROUNDS: usize = 1_000;
        // Two in a word, two in a group, and one far off.
        const INDICES: [usize; 4] = [5, 6, 70, 9000];
        let calls = Calls::new();
        let published = INDICES.map(|_| AtomicUsize::new(0));
        let seen = INDICES.map(|_| AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for place in 0..INDICES.len() {
                let (calls, published, seen) = (&calls, &published[place], &seen[place]);
                scope.spawn(move || {
                    for round in 1..=ROUNDS {
                        published.store(round, Ordering::Relaxed);
                        calls.call(INDICES[place]);
                        while seen.load(Ordering::Relaxed) != round {
                            std::thread::yield_now();
                        }
                    }
                });
            }
            while seen
                .iter()
                .any(|seen| seen.load(Ordering::Relaxed) < ROUNDS)
            {
                if !calls.are_there() {
                    std::thread::yield_now();
                }
                calls.take(|index| {
                    let place = INDICES.iter().position(|other| *other == index);
                    let place = place.expect("nobody has called with this index");
                    let count = published[place].load(Ordering::Relaxed);
                    seen[place].store(count, Ordering::Relaxed);
                });
            }
        });
    }
}
