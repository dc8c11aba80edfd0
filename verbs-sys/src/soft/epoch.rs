//! The lock that is also an epoch.
//!
//! A queue pair executes requests while its word is odd. Whoever takes something away (a key, a
//! state, an access right) first unpublishes it and then waits until every odd word it could matter
//! to has *changed*: what runs afterwards has seen the new state. Waiting for "even" would starve
//! under load, and counting users per key would share a line between all of them and could not tell
//! whose count a dead process left behind.

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// Takes the lock, spinning. The holder is at most one copy away from letting go.
#[inline]
pub(super) fn lock(word: &AtomicU64) {
    let mut spins = 0u32;
    loop {
        let epoch = word.load(Ordering::Relaxed);
        if epoch & 1 == 0
            && word
                .compare_exchange_weak(epoch, epoch + 1, Ordering::SeqCst, Ordering::Relaxed)
                .is_ok()
        {
            return;
        }
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

/// Waits until what runs under the word now has ended, or its process has died.
pub(super) fn quiesce(word: &AtomicU64, dead: impl Fn() -> bool) {
    let epoch = word.load(Ordering::SeqCst);
    if epoch & 1 == 0 {
        return;
    }
    let mut spins = 0u32;
    while word.load(Ordering::Acquire) == epoch {
        relax(&mut spins);
        if spins > 1_000 && spins.is_multiple_of(64) && dead() {
            return;
        }
    }
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
