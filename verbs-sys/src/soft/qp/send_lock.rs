//! The send lock of a queue pair, which is also an epoch (`epoch.rs`), and has a bias (`bias.rs`) where posts need
//! no fence (`fencing.rs`).

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::Qp;
use crate::soft::bias::{Bias, Inside};
use crate::soft::link::Link;
use crate::soft::{asymmetric, epoch, fencing};

/// The part of the lock that peers do not see.
#[derive(Debug, Default)]
pub(super) struct SendLock {
    bias: Bias,
    /// The thread that has left the bias in the middle of a chain and goes on under the lock, or 0.
    claim: AtomicUsize,
}

impl Qp {
    /// The word that is odd while the lock is held, but for the bias.
    #[inline(always)]
    pub(super) fn send_epoch(&self) -> &AtomicU64 {
        &self.info().sends.0.epoch
    }

    /// Takes the lock, spinning, with a fence.
    #[inline]
    pub(super) fn lock_sends(&self) {
        let sends = &self.info().sends.0;
        let lock = &self.send_lock;
        let mut spins = 0;
        loop {
            epoch::lock(&sends.epoch);
            lock.bias.exclude(&sends.biased);
            let claim = lock.claim.load(Ordering::Acquire);
            if claim == 0 {
                return;
            }
            if claim == asymmetric::thread() {
                lock.claim.store(0, Ordering::Relaxed);
                return;
            }
            // Whoever has a claim was in before us.
            epoch::unlock(&sends.epoch);
            epoch::relax(&mut spins);
        }
    }

    /// Leaves, and [takes the lock](Self::lock_sends) with a fence before any other thread.
    pub(super) fn leave_and_lock_sends(&self, inside: Inside) {
        // Whoever waits for us to leave, or finds the lock free afterwards, sees this.
        let claim = &self.send_lock.claim;
        claim.store(asymmetric::thread(), Ordering::Release);
        self.leave_sends(inside);
        self.lock_sends();
    }

    /// Lets it go. Only its holder may call this.
    #[inline]
    pub(super) fn unlock_sends(&self) {
        epoch::unlock(self.send_epoch());
    }

    /// Takes the lock without a fence, if its bias is this thread's.
    #[inline(always)]
    pub(super) fn enter_sends(&self) -> Option<Inside> {
        self.send_lock.bias.enter(&self.info().sends.0.biased)
    }

    /// Lets it go again.
    #[inline(always)]
    pub(super) fn leave_sends(&self, inside: Inside) {
        self.send_lock
            .bias
            .leave(&self.info().sends.0.biased, inside);
    }

    /// The connection, if a request may be executed on it though the lock was taken without a fence. Asked within
    /// the epoch that it is executed in.
    #[inline(always)]
    pub(super) fn unfenced_link(&self) -> Option<&Link> {
        // SAFETY: the send lock is held.
        let (link, known) = unsafe { (self.link()?, self.known()) };
        (known.mappings == self.own_fences() && !link.is_fenced()).then_some(link)
    }

    /// Sees that what is known of keys holds. The lock was taken with a fence.
    #[inline]
    pub(super) fn renew_known(&self) {
        // SAFETY: the send lock is held.
        unsafe { self.known() }.renew(self.own_fences());
    }

    #[inline(always)]
    fn own_fences(&self) -> u32 {
        // SAFETY: as for `info`.
        unsafe { self.fences.as_ref() }.load(Ordering::Acquire)
    }

    /// This thread has executed a request the long way; it is given the bias when it has done so often enough, or
    /// gives it up where requests must be executed behind a fence. The lock is held.
    #[inline]
    pub(super) fn count_post(&self) {
        // SAFETY: the send lock is held.
        let link = unsafe { self.link() };
        let bias = &self.send_lock.bias;
        let fenced = fencing::is_fenced(self.own_fences()) || link.is_none_or(Link::is_fenced);
        if fenced {
            bias.give_up();
        } else if bias.count() {
            let told = &self.info().sends.0.places;
            bias.grant(|places| {
                // Seen by whoever has the next fence executed.
                told.fetch_max(places as u32, Ordering::Release);
            });
        }
    }
}
