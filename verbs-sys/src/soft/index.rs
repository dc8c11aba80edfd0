//! Small numbers handed out and taken back, oldest first.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

/// Gives each holder its own number below a limit. Numbers come back into use first-in first-out and
/// only once many are free, so that a stale reference to a number rarely meets a new holder.
#[derive(Debug)]
pub(super) struct IndexPool {
    state: Mutex<State>,
    limit: u32,
    recycle_after: usize,
}

#[derive(Debug)]
struct State {
    recycled: VecDeque<u32>,
    fresh: u32,
}

impl IndexPool {
    pub(super) fn new(first: u32, limit: usize, recycle_after: usize) -> Self {
        let state = Mutex::new(State {
            recycled: VecDeque::new(),
            fresh: first,
        });
        Self {
            state,
            limit: limit as u32,
            recycle_after,
        }
    }

    pub(super) fn take(&self) -> Option<u32> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.recycled.len() > self.recycle_after || state.fresh >= self.limit {
            return state.recycled.pop_front();
        }
        state.fresh += 1;
        Some(state.fresh - 1)
    }

    pub(super) fn give(&self, index: u32) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .recycled
            .push_back(index);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_come_back_in_order() {
        let pool = IndexPool::new(1, 5, 2);
        let taken: Vec<_> = std::iter::from_fn(|| pool.take()).collect();
        assert_eq!(taken, [1, 2, 3, 4]);
        for index in [3, 1, 4, 2] {
            pool.give(index);
        }
        assert_eq!(
            std::iter::from_fn(|| pool.take()).collect::<Vec<_>>(),
            [3, 1, 4, 2]
        );
    }

    #[test]
    fn a_freed_number_rests() {
        let pool = IndexPool::new(0, 100, 2);
        let first = pool.take().unwrap();
        pool.give(first);
        assert_ne!(pool.take(), Some(first));
    }
}
