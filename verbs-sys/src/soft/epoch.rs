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

/// How long an epoch may last before its holder is taken for stopped: a copy of one chunk takes less
/// than a millisecond, whatever else the machine does.
const STOPPED_AFTER: Duration = Duration::from_secs(2);

/// Waits until what runs under the word now has ended, or its process has died. `false`: the process
/// lives and does not move (a debugger or SIGSTOP holds it), and when it goes on it will end what it
/// was at.
#[must_use]
#[inline(always)]
pub(super) fn quiesce(word: &AtomicU64, dead: impl Fn() -> bool) -> bool {
    let epoch = word.load(Ordering::SeqCst);
    if epoch & 1 == 0 {
        return true;
    }
    await_change(word, epoch, dead)
}

#[cold]
fn await_change(word: &AtomicU64, epoch: u64, dead: impl Fn() -> bool) -> bool {
    let mut spins = 0u32;
    let mut since = None;
    while word.load(Ordering::Acquire) == epoch {
        relax(&mut spins);
        if spins > 1_000 && spins.is_multiple_of(64) {
            if dead() {
                return true;
            }
            if since.get_or_insert_with(Instant::now).elapsed() > STOPPED_AFTER {
                return false;
            }
        }
    }
    true
}

/// Waits until what the requester and the responder of a queue pair are at has ended, as [`quiesce`].
#[must_use]
#[inline(always)]
pub(super) fn quiesce_qp(qp: &QpInfo, dead: impl Fn() -> bool + Copy) -> bool {
    let sends = &qp.sends.0;
    let of_lock = quiesce(&sends.epoch, dead) && quiesce(&qp.rq_epoch.0, dead);
    of_lock && sends.biased().iter().all(|word| quiesce(word, dead))
}

/// The same for a queue pair of this process.
#[inline(always)]
pub(super) fn quiesce_own(qp: &QpInfo) {
    // Our own threads are stopped only when we are.
    while !quiesce_qp(qp, || false) {}
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

    #[test]
    fn waiting_ends_when_the_epoch_changes_or_its_holder_is_gone_or_stopped() {
        let word = AtomicU64::new(0);
        assert!(quiesce(&word, || false), "nobody is at it");
        lock(&word);
        assert!(quiesce(&word, || true), "the holder is dead");
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| quiesce(&word, || false));
            while !waiter.is_finished() {
                renew(&word);
            }
            assert!(waiter.join().unwrap(), "another epoch is enough");
        });
        assert!(!quiesce(&word, || false), "the holder is stopped");
        unlock(&word);
        assert!(quiesce(&word, || false));
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
