//! A lock that costs no locked instruction to the thread that takes it again and again (`bias.rs`): a completion
//! queue is nearly always polled by one thread, some 10 million times a second.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::Ordering;

use super::asymmetric::AtomicBool;
use super::bias::{Bias, Epochs, Inside};
use super::epoch::relax;

/// The lock, and what it guards.
#[derive(Debug, Default)]
pub(super) struct Biased<T> {
    bias: Bias,
    epochs: Epochs,
    /// For all who do not have the bias.
    lock: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard, of which there is one at a time.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            bias: Bias::default(),
            epochs: Epochs::default(),
            lock: AtomicBool::new(false),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock, spinning. Not to be taken again by its holder.
    #[inline(always)]
    pub(super) fn lock(&self) -> Guard<'_, T> {
        match self.try_own() {
            Some(guard) => guard,
            None => self.lock_slowly(),
        }
    }

    /// Takes the lock if the bias is this thread's.
    #[inline(always)]
    pub(super) fn try_own(&self) -> Option<Guard<'_, T>> {
        let inside = self.bias.enter(&self.epochs)?;
        Some(Guard {
            lock: self,
            inside: Some(inside),
        })
    }

    #[cold]
    fn lock_slowly(&self) -> Guard<'_, T> {
        let mut spins = 0;
        while self
            .lock
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            relax(&mut spins);
        }
        self.bias.exclude(&self.epochs);
        if self.bias.count() {
            self.bias.grant(|_| ());
        }
        Guard {
            lock: self,
            inside: None,
        }
    }
}

/// Holds the lock.
#[derive(Debug)]
pub(super) struct Guard<'a, T> {
    lock: &'a Biased<T>,
    inside: Option<Inside>,
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: one guard at a time: by `lock`, and by the bias being taken away under it.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        match self.inside.take() {
            Some(inside) => self.lock.bias.leave(&self.lock.epochs, inside),
            None => self.lock.lock.store(false, Ordering::Release),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::bias::STREAK;
    use super::*;

    #[test]
    fn one_thread_gets_the_bias_and_another_takes_it_away() {
        let lock = Biased::new(0u64);
        for _ in 0..=STREAK {
            *lock.lock() += 1;
        }
        let had_bias = lock.try_own().is_some();
        *lock.lock() += 1;
        std::thread::scope(|scope| {
            scope.spawn(|| *lock.lock() += 1);
        });
        assert!(lock.try_own().is_none());
        assert_eq!(*lock.lock(), u64::from(STREAK) + 3);
        for _ in 0..=2 * STREAK {
            *lock.lock() += 1;
        }
        assert_eq!(lock.try_own().is_some(), had_bias, "it comes back");
    }

    /// Torn updates show whether two were ever inside.
    #[test]
    fn it_excludes_however_threads_take_turns() {
        const ROUNDS: u64 = 200;
        // Long stretches of one thread give it the bias, which the others then take away.
        const STRETCH: u64 = 2_000;
        let lock = Biased::new((0u64, 0u64));
        std::thread::scope(|scope| {
            for number in 0..3 {
                let lock = &lock;
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let length = if (round + number).is_multiple_of(3) {
                            STRETCH
                        } else {
                            5
                        };
                        for _ in 0..length {
                            let mut pair = lock.lock();
                            assert_eq!(pair.0, pair.1);
                            pair.0 += 1;
                            std::hint::black_box(&mut *pair);
                            pair.1 += 1;
                        }
                        std::thread::yield_now();
                    }
                });
            }
        });
        let stretches = |number: u64| {
            (0..ROUNDS)
                .filter(|round| (round + number).is_multiple_of(3))
                .count()
        };
        let want: u64 = (0..3)
            .map(|number| {
                let long = stretches(number) as u64;
                long * STRETCH + (ROUNDS - long) * 5
            })
            .sum();
        assert_eq!(*lock.lock(), (want, want));
    }
}
