//! The lock that is also an epoch.
//!
//! A queue pair executes requests while its word is odd. Whoever takes something away (a key, a
//! state, an access right) first unpublishes it and then waits until every odd word it could matter
//! to has *changed*: what runs afterwards has seen the new state. Waiting for "even" would starve
//! under load, and counting users per key would share a line between all of them and could not tell
//! whose count a dead process left behind.

use std::sync::atomic::{AtomicU64, Ordering, fence};
use std::time::{Duration, Instant};

use super::layout::QpInfo;

/// Takes the lock, spinning. The holder is at most one copy away from letting go.
#[inline(always)]
pub(super) fn lock(word: &AtomicU64) {
    if !try_lock(word) {
        lock_slowly(word);
    }
}

/// Takes the lock if nobody has it; whether nobody had.
#[inline(always)]
pub(super) fn try_lock(word: &AtomicU64) -> bool {
    // Setting the last bit of an even number adds 1.
    word.fetch_or(1, Ordering::SeqCst) & 1 == 0
}

#[cold]
fn lock_slowly(word: &AtomicU64) {
    let mut spins = 0u32;
    while word.load(Ordering::Relaxed) & 1 != 0 || !try_lock(word) {
        relax(&mut spins);
    }
}

/// Gives the lock back. Only its holder may call this.
#[inline]
pub(super) fn unlock(word: &AtomicU64) {
    word.store(word.load(Ordering::Relaxed) + 1, Ordering::Release);
}

/// Starts a new epoch without letting go: lets waiters pass in the middle of a long copy. What was
/// checked before must be checked again.
#[inline]
pub(super) fn renew(word: &AtomicU64) {
    word.store(word.load(Ordering::Relaxed) + 2, Ordering::SeqCst);
    fence(Ordering::SeqCst);
}

/// Whose epoch is waited for.
pub(super) trait Holder {
    /// Whether it has ended.
    fn has_exited(&self) -> bool;
    /// Whether a signal or a debugger holds it.
    fn is_stopped(&self) -> bool;
}

/// A thread of this process: it is stopped only when we are.
pub(super) struct Own;

impl Holder for Own {
    fn has_exited(&self) -> bool {
        false
    }

    fn is_stopped(&self) -> bool {
        false
    }
}

/// How long an epoch may last before its holder is asked for: a copy of one chunk takes less than a
/// millisecond, but where a machine has much to do, or stands still as a whole, its holder may get no processor.
const SUSPECT_AFTER: Duration = Duration::from_secs(2);
/// After so many times of that it is taken for stopped, whatever it seems to be: a container may be frozen.
const SUSPICIONS: u32 = 15;

/// Waits until what runs under the word now has ended, or its process has died. `false`: the process
/// lives and does not move (a debugger or SIGSTOP holds it), and when it goes on it will end what it
/// was at.
#[must_use]
#[inline(always)]
pub(super) fn quiesce(word: &AtomicU64, holder: &impl Holder) -> bool {
    let epoch = word.load(Ordering::SeqCst);
    if epoch & 1 == 0 {
        return true;
    }
    await_change(word, epoch, holder)
}

#[cold]
fn await_change(word: &AtomicU64, epoch: u64, holder: &impl Holder) -> bool {
    let mut spins = 0u32;
    let mut suspicions = 0;
    let mut since = None;
    while word.load(Ordering::Acquire) == epoch {
        relax(&mut spins);
        if spins > 1_000 && spins.is_multiple_of(64) {
            if holder.has_exited() {
                return true;
            }
            if since.get_or_insert_with(Instant::now).elapsed() > SUSPECT_AFTER {
                suspicions += 1;
                if holder.is_stopped() || suspicions == SUSPICIONS {
                    return false;
                }
                since = None;
            }
        }
    }
    true
}

/// Waits until what the requester and the responder of a queue pair are at has ended, as [`quiesce`].
#[must_use]
#[inline(always)]
pub(super) fn quiesce_qp(qp: &QpInfo, holder: &impl Holder) -> bool {
    let sends = &qp.sends.0;
    let of_lock = quiesce(&sends.epoch, holder) && quiesce(&qp.rq_epoch.0, holder);
    of_lock && sends.biased().iter().all(|word| quiesce(word, holder))
}

/// Waits until what a thread of this process runs under the word has ended.
#[inline(always)]
pub(super) fn quiesce_own_word(word: &AtomicU64) {
    while !quiesce(word, &Own) {}
}

/// The same for a queue pair of this process.
#[inline(always)]
pub(super) fn quiesce_own(qp: &QpInfo) {
    while !quiesce_qp(qp, &Own) {}
}

/// Spins politely: after a while the holder has surely lost its core, so give it ours.
#[inline]
pub(super) fn relax(spins: &mut u32) {
    *spins = spins.wrapping_add(1);
    if *spins > 500 {
        std::thread::yield_now();
    } else {
        std::hint::spin_loop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One of which it is said.
    struct Of {
        has_exited: bool,
        is_stopped: bool,
    }

    impl Holder for Of {
        fn has_exited(&self) -> bool {
            self.has_exited
        }

        fn is_stopped(&self) -> bool {
            self.is_stopped
        }
    }

    const RUNS: Of = Of {
        has_exited: false,
        is_stopped: false,
    };

    #[test]
    fn waiting_ends_when_the_epoch_changes_or_its_holder_is_gone_or_stopped() {
        let word = AtomicU64::new(0);
        assert!(quiesce(&word, &RUNS), "nobody is at it");
        lock(&word);
        let dead = Of {
            has_exited: true,
            ..RUNS
        };
        assert!(quiesce(&word, &dead), "the holder is dead");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| quiesce(&word, &RUNS));
            while !waiter.is_finished() {
                renew(&word);
            }
            assert!(waiter.join().unwrap(), "another epoch is enough");
        });
        let stopped = Of {
            is_stopped: true,
            ..RUNS
        };
        assert!(!quiesce(&word, &stopped), "the holder is stopped");
        unlock(&word);
        assert!(quiesce(&word, &stopped));
    }

    #[test]
    fn a_holder_that_gets_no_processor_is_waited_for() {
        /// Ends its epoch when somebody has asked for the second time.
        struct Starved<'a>(&'a AtomicU64, AtomicU64);

        impl Holder for Starved<'_> {
            fn has_exited(&self) -> bool {
                false
            }

            fn is_stopped(&self) -> bool {
                if self.1.fetch_add(1, Ordering::Relaxed) == 1 {
                    unlock(self.0);
                }
                false
            }
        }

        let word = AtomicU64::new(0);
        lock(&word);
        let starved = Starved(&word, AtomicU64::new(0));
        assert!(quiesce(&word, &starved));
        assert_eq!(starved.1.into_inner(), 2);
    }

    #[test]
    fn the_lock_excludes() {
        let word = AtomicU64::new(0);
        let inside = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..10_000 {
                        lock(&word);
                        assert_eq!(inside.fetch_add(1, Ordering::Relaxed), 0);
                        inside.fetch_sub(1, Ordering::Relaxed);
                        unlock(&word);
                    }
                });
            }
        });
        assert_eq!(word.load(Ordering::Relaxed), 60_000);
    }
}
