//! A lock that one call of an application takes and a later one gives back, as ibv_start_poll(3) and
//! ibv_end_poll(3) do.

use std::sync::atomic::{AtomicU32, Ordering};

use rustix::thread::futex;

const FREE: u32 = 0;
const TAKEN: u32 = 1;
/// Taken, and somebody may be asleep.
const AWAITED: u32 = 2;

/// Who has the turn; nobody's at first.
#[derive(Debug, Default)]
pub(super) struct Turn(AtomicU32);

impl Turn {
    /// Waits for the turn, and takes it. Not to be taken again by the thread that has it.
    #[inline]
    pub(super) fn take(&self) {
        let taken = self
            .0
            .compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed);
        if taken.is_err() {
            self.wait();
        }
    }

    #[cold]
    fn wait(&self) {
        while self.0.swap(AWAITED, Ordering::Acquire) != FREE {
            // An error says that it is worth a look: the word has changed, or a signal came.
            let _ = futex::wait(&self.0, futex::Flags::PRIVATE, AWAITED, None);
        }
    }

    /// Gives it back. Does nothing where nobody has it.
    #[inline]
    pub(super) fn give(&self) {
        if self.0.swap(FREE, Ordering::Release) == AWAITED {
            let _ = futex::wake(&self.0, futex::Flags::PRIVATE, 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::UnsafeCell;

    use super::*;

    struct Guarded(Turn, UnsafeCell<u32>);

    // SAFETY: the value is reached by whoever has the turn.
    unsafe impl Sync for Guarded {}

    #[test]
    fn one_at_a_time_has_the_turn() {
        const ROUNDS: u32 = 20_000;
        let guarded = Guarded(Turn::default(), UnsafeCell::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let Guarded(turn, value) = &guarded;
                    for _ in 0..ROUNDS {
                        turn.take();
                        // SAFETY: we have the turn.
                        unsafe { *value.get() += 1 };
                        turn.give();
                    }
                });
            }
        });
        assert_eq!(guarded.1.into_inner(), 4 * ROUNDS);
    }

    #[test]
    fn whoever_sleeps_is_woken() {
        let turn = Turn::default();
        turn.take();
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| {
                turn.take();
                turn.give();
            });
            while turn.0.load(Ordering::Relaxed) != AWAITED {
                std::thread::yield_now();
            }
            assert!(!waiter.is_finished());
            turn.give();
        });
        turn.take();
    }

    #[test]
    fn giving_what_nobody_has_does_nothing() {
        let turn = Turn::default();
        turn.give();
        turn.take();
        turn.give();
        turn.take();
    }
}
