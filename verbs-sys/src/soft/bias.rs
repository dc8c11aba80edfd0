//! Who may take a lock without a locked instruction: the thread that takes it again and again.
//!
//! A locked instruction costs as much as copying a kilobyte, and behind a copy it waits for that copy's
//! stores as well. So a lock is *biased*: its owner enters by an ordinary store and a look at whether
//! it still owns it. Whoever else wants in holds the lock first, and then takes the bias away by
//! membarrier(2): the kernel makes every running thread of the process execute a full fence, after
//! which either the owner has seen that it lost the bias, or we see that it is inside.
//!
//! ```text
//! owner:   inside = 1; (compiler fence) owner == me?        enter
//! other:   owner = 0;  membarrier();    wait until inside == 0
//! ```
//!
//! That is Dekker's algorithm with both of its fences on the rare side. A thread may be preempted just before its
//! store, and make it long after another has been given the bias. Therefore each has a place of its own to say
//! that it is inside, and few can have it. Where the kernel has no membarrier(2), or threads take turns, the lock
//! stays an ordinary one.

use std::sync::atomic::Ordering;

pub(super) use super::asymmetric::STREAK;
use super::asymmetric::{
    AtomicU32, AtomicU64, AtomicUsize, can_fence_everywhere, fence_everywhere, fence_here, thread,
};
use super::epoch::relax;

/// Threads that can have had the bias; for all others the lock is an ordinary one.
pub(super) const PLACES: usize = 4;

/// The epoch of each of those threads: odd while it is inside.
pub(super) type Epochs = [AtomicU64; PLACES];

/// Which thread has the bias. All but [`enter`](Self::enter) is for the holder of the lock.
#[derive(Debug, Default)]
pub(super) struct Bias {
    /// The thread that may enter, or 0.
    owner: AtomicUsize,
    /// Its place, below [`PLACES`]; written before `owner`.
    place: AtomicUsize,
    /// The threads that have places.
    threads: [AtomicUsize; PLACES],
    /// The thread that came last by the long way, and how often in a row.
    last: AtomicUsize,
    streak: AtomicU32,
    /// Times that the bias was taken away.
    revoked: AtomicU32,
}

/// The owner is inside, until it [leaves](Bias::leave). It is nothing but that: where the owner's place is is looked
/// up again, so that nobody has to keep it.
#[derive(Debug)]
#[must_use]
#[repr(C)]
pub(super) struct Inside(());

#[inline(always)]
fn step_out(epoch: &AtomicU64) {
    let next = epoch.load(Ordering::Relaxed).wrapping_add(1);
    epoch.store(next, Ordering::Release);
}

impl Bias {
    /// Enters, if the bias is this thread's, which is not inside.
    #[inline(always)]
    pub(super) fn enter(&self, epochs: &Epochs) -> Option<Inside> {
        let me = thread();
        // If the owner is this thread, so is the place: another's is written under a bias that this one
        // has lost.
        let place = self.place.load(Ordering::Acquire);
        if self.owner.load(Ordering::Relaxed) != me {
            return None;
        }
        // SAFETY: no other numbers are written.
        let epoch = unsafe { epochs.get_unchecked(place) };
        let before = epoch.load(Ordering::Relaxed);
        debug_assert!(before & 1 == 0, "it is inside");
        // Whoever has waited for the last time, and sees this one instead, has seen that one's end.
        epoch.store(before.wrapping_add(1), Ordering::Release);
        // The processor's fence is in the other's membarrier.
        fence_here();
        if self.owner.load(Ordering::Relaxed) == me {
            return Some(Inside(()));
        }
        // The place may be another's already.
        step_out(epoch);
        None
    }

    /// The owner leaves.
    #[inline(always)]
    pub(super) fn leave(&self, epochs: &Epochs, inside: Inside) {
        let Inside(()) = inside;
        // Nobody is given the bias while the owner is inside, so this is still its place.
        let place = self.place.load(Ordering::Relaxed);
        // SAFETY: no other numbers are written.
        step_out(unsafe { epochs.get_unchecked(place) });
    }

    /// This thread came the long way, and holds the lock: takes the bias from another thread that has it, and
    /// waits for it to come out.
    #[inline]
    pub(super) fn exclude(&self, epochs: &Epochs) {
        let owner = self.owner.load(Ordering::Relaxed);
        if owner != 0 && owner != thread() {
            self.revoke(epochs);
        }
    }

    #[cold]
    fn revoke(&self, epochs: &Epochs) {
        self.owner.store(0, Ordering::SeqCst);
        fence_everywhere();
        let mut spins = 0;
        for epoch in epochs {
            let seen = epoch.load(Ordering::Acquire);
            while seen & 1 != 0 && epoch.load(Ordering::Acquire) == seen {
                relax(&mut spins);
            }
        }
        let revoked = self.revoked.load(Ordering::Relaxed).saturating_add(1);
        self.revoked.store(revoked, Ordering::Relaxed);
    }

    /// Counts that this thread came the long way, and says whether that was often enough, in a row, for
    /// it to be given the bias.
    #[inline]
    pub(super) fn count(&self) -> bool {
        let me = thread();
        let streak = if self.last.load(Ordering::Relaxed) == me {
            self.streak.load(Ordering::Relaxed).saturating_add(1)
        } else {
            self.last.store(me, Ordering::Relaxed);
            0
        };
        self.streak.store(streak, Ordering::Relaxed);
        streak >= STREAK << self.revoked.load(Ordering::Relaxed).min(16)
    }

    /// Gives this thread the bias, if there is a place for it. `tell` is called before, with the number of places
    /// that may be in use.
    #[cold]
    pub(super) fn grant(&self, tell: impl FnOnce(usize)) {
        self.streak.store(0, Ordering::Relaxed);
        if !can_fence_everywhere() {
            return;
        }
        let me = thread();
        let is_mine = |thread: &AtomicUsize| matches!(thread.load(Ordering::Relaxed), it if it == me || it == 0);
        if let Some(place) = self.threads.iter().position(is_mine) {
            tell(place + 1);
            self.threads[place].store(me, Ordering::Relaxed);
            self.place.store(place, Ordering::Release);
            self.owner.store(me, Ordering::Release);
        }
    }

    /// This thread gives the bias up, if it has it. It may be inside.
    #[inline]
    pub(super) fn give_up(&self) {
        let mine = thread();
        if self.owner.load(Ordering::Relaxed) == mine {
            // Whoever takes it away at this moment writes the same.
            let (set, fail) = (Ordering::SeqCst, Ordering::Relaxed);
            let _ = self.owner.compare_exchange(mine, 0, set, fail);
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::sync::{Barrier, Mutex};

    use super::*;

    fn granted(bias: &Bias) -> Option<usize> {
        let mut told = None;
        bias.grant(|places| told = Some(places));
        told
    }

    #[test]
    fn a_thread_that_was_about_to_enter_disturbs_no_later_owner() {
        let (bias, epochs) = (Bias::default(), Epochs::default());
        if !can_fence_everywhere() {
            return;
        }
        assert_eq!(granted(&bias), Some(1));
        // What another thread writes late, having seen that it was the owner.
        let late = &epochs[0];
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bias.exclude(&epochs);
                assert_eq!(granted(&bias), Some(2));
                let inside = bias.enter(&epochs).unwrap();
                late.store(1, Ordering::Relaxed);
                late.store(2, Ordering::Relaxed);
                assert!(
                    epochs
                        .iter()
                        .any(|epoch| epoch.load(Ordering::Relaxed) & 1 != 0)
                );
                bias.leave(&epochs, inside);
            });
        });
        assert!(bias.enter(&epochs).is_none(), "it was taken away");
    }

    #[test]
    fn few_threads_can_have_it_and_each_keeps_its_place() {
        let (bias, epochs) = (Bias::default(), Epochs::default());
        if !can_fence_everywhere() {
            return;
        }
        assert_eq!(granted(&bias), Some(1));
        // All live at a time, so that no number comes again.
        let (lock, barrier) = (Mutex::new(Vec::new()), Barrier::new(PLACES));
        std::thread::scope(|scope| {
            for _ in 0..PLACES {
                scope.spawn(|| {
                    let mut places = lock.lock().unwrap();
                    places.push(granted(&bias));
                    drop(places);
                    barrier.wait();
                });
            }
        });
        let places = lock.into_inner().unwrap();
        assert_eq!(places, [Some(2), Some(3), Some(4), None]);
        bias.exclude(&epochs);
        assert_eq!(granted(&bias), Some(1), "its own");
    }

    #[test]
    fn it_is_given_after_a_streak_and_given_up_by_its_owner_only() {
        let (bias, epochs) = (Bias::default(), Epochs::default());
        assert_eq!((0..=STREAK).filter(|_| bias.count()).count(), 1);
        if granted(&bias).is_none() {
            return;
        }
        std::thread::scope(|scope| {
            scope.spawn(|| bias.give_up());
        });
        let inside = bias.enter(&epochs).expect("it has the bias");
        bias.leave(&epochs, inside);
        bias.give_up();
        assert!(bias.enter(&epochs).is_none(), "it gave it up");
    }
}
