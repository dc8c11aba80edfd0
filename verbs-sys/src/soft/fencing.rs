//! Posts without a fence, and how they are had to have one.
//!
//! A posting thread that has the bias of its send lock (`bias.rs`) makes its epoch odd by an ordinary store,
//! which those who take something away might not see when it already reads what they take. While a
//! process takes things away it therefore says so in a word that every such thread looks at within its
//! epoch, and has the kernel execute a fence in all of them, by membarrier(2), after the word is set:
//!
//! ```text
//! poster:  epoch odd; (compiler fence) fenced? key live?                     execute; epoch even
//! owner:   key dead;  fenced = 1;      membarrier();  until epoch even
//! ```
//!
//! Whoever entered before the fence is seen afterwards; whoever enters behind it finds the word set, and takes the
//! lock by a locked instruction. So only the first of many deregistrations costs a system call; the others find
//! the word set, until the upkeep thread takes it back when nobody has needed it for a while.
//!
//! Posters are fenced only if the kernel knows their process, so a process that it does not know says that its own
//! posts are to be fenced, always.

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::thread::{MembarrierCommand, membarrier};

use super::asymmetric::outwait;
use super::qp::now_ns;

/// For how long posts stay fenced after the last time that it was needed.
pub(super) const HOLD_NS: u64 = 10_000_000;

/// In the shared word: requests are executed behind fences.
pub(super) const FENCED: u32 = 1;

/// Whether the word says so.
#[inline(always)]
pub(super) fn is_fenced(word: u32) -> bool {
    word & FENCED != 0
}

/// What the word says of mappings of peers' memory: another number after one was taken away.
#[inline(always)]
pub(super) fn mappings(word: u32) -> u32 {
    word & !FENCED
}

/// A mapping was taken away, which its users are about to be waited for.
pub(super) fn count_unmapping(word: &AtomicU32) {
    word.fetch_add(FENCED << 1, Ordering::SeqCst);
}

/// Whether requests on this process's memory, and its own, are executed behind fences. The word that says so is
/// shared.
#[derive(Debug)]
pub(super) struct Fencing {
    /// Every poster has been fenced since the word was set.
    in_force: AtomicBool,
    /// It was relied on since the last look.
    used: AtomicBool,
    /// When it was last seen to be used, in nanoseconds.
    used_at: AtomicU64,
    /// Held by those who change it: whether the kernel knows the process.
    registered: Mutex<bool>,
}

impl Default for Fencing {
    fn default() -> Self {
        Self {
            in_force: AtomicBool::new(true),
            used: AtomicBool::new(true),
            used_at: AtomicU64::new(0),
            registered: Mutex::new(false),
        }
    }
}

impl Fencing {
    /// Tells the kernel of the process, which may take it a while where there are other threads already. Posts
    /// stay fenced if it does not know how.
    pub(super) fn register(&self) {
        let known = membarrier(MembarrierCommand::RegisterGlobalExpedited)
            .and_then(|()| membarrier(MembarrierCommand::GlobalExpedited));
        match known {
            Ok(()) => {
                *self
                    .registered
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner) = true
            }
            Err(error) => {
                tracing::debug!(%error, "membarrier: every post needs a locked instruction")
            }
        }
    }

    /// Whether it is in force; if so, it stays so until an epoch that is odd now has been waited for. What is
    /// taken away was unpublished before, and a fence executed since.
    #[inline]
    pub(super) fn is_in_force(&self) -> bool {
        let in_force = self.in_force.load(Ordering::SeqCst);
        if in_force {
            self.used.store(true, Ordering::Relaxed);
        }
        in_force
    }

    /// Puts it in force.
    #[cold]
    pub(super) fn begin(&self, word: &AtomicU32) {
        let mut registered = self
            .registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        self.used.store(true, Ordering::Relaxed);
        if self.in_force.load(Ordering::Acquire) {
            return;
        }
        word.fetch_or(FENCED, Ordering::SeqCst);
        if let Err(error) = membarrier(MembarrierCommand::GlobalExpedited) {
            // It worked before, so a filter of system calls was put in place since.
            tracing::warn!(%error, "membarrier(2) has stopped working; waiting instead");
            *registered = false;
            outwait();
        }
        self.in_force.store(true, Ordering::SeqCst);
    }

    /// Ends it when nobody has needed it for a while; returns whether it is to be looked at again.
    pub(super) fn lasts(&self, word: &AtomicU32) -> bool {
        let registered = self
            .registered
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if !*registered || !self.in_force.load(Ordering::Relaxed) {
            return false;
        }
        let now = now_ns();
        if self.used.swap(false, Ordering::Relaxed) {
            self.used_at.store(now, Ordering::Relaxed);
        }
        if now.saturating_sub(self.used_at.load(Ordering::Relaxed)) < HOLD_NS {
            return true;
        }
        self.end(word);
        false
    }

    /// The lock is held. Who still finds it in force has unpublished what it takes away before the word says that
    /// fences are not needed, so nobody who reads that finds it.
    fn end(&self, word: &AtomicU32) {
        self.in_force.store(false, Ordering::SeqCst);
        word.fetch_and(!FENCED, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::fence;

    use super::super::bias::{Bias, Epochs};
    use super::super::epoch;
    use super::*;

    /// Something is there, or was taken away; whoever found it under an epoch may rely on it until the epoch ends.
    #[test]
    fn nothing_is_in_use_any_more_once_it_was_taken_away() {
        const ROUNDS: usize = 100_000;
        let (fencing, word) = (Fencing::default(), AtomicU32::new(FENCED));
        fencing.register();
        if !*fencing.registered.lock().unwrap() {
            return;
        }
        let (bias, epochs) = (Bias::default(), Epochs::default());
        let (live, gone) = (AtomicBool::new(true), AtomicBool::new(false));
        let (ends, uses, fenced) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
        std::thread::scope(|scope| {
            scope.spawn(|| {
                bias.grant(|_| ());
                // Stores that miss the cache, which the epoch waits behind.
                let far: Vec<AtomicU64> = (0..1 << 23).map(|_| AtomicU64::new(0)).collect();
                let mut at = 0;
                while !ends.load(Ordering::Relaxed) {
                    for _ in 0..48 {
                        at = (at + 70_001) % far.len();
                        far[at].store(1, Ordering::Relaxed);
                    }
                    let inside = bias.enter(&epochs).expect("nobody takes it away");
                    if is_fenced(word.load(Ordering::Acquire)) {
                        fenced.fetch_add(1, Ordering::Relaxed);
                    } else if live.load(Ordering::SeqCst) {
                        for _ in 0..500 {
                            assert!(
                                !gone.load(Ordering::Relaxed),
                                "used after it was taken away"
                            );
                        }
                        uses.store(uses.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    }
                    bias.leave(&epochs, inside);
                }
            });
            for round in 0..ROUNDS {
                live.store(false, Ordering::SeqCst);
                fence(Ordering::SeqCst);
                if !fencing.is_in_force() {
                    fencing.begin(&word);
                }
                for epoch in &epochs {
                    epoch::quiesce_own_word(epoch);
                }
                gone.store(true, Ordering::SeqCst);
                for _ in 0..100 {
                    std::hint::spin_loop();
                }
                gone.store(false, Ordering::SeqCst);
                live.store(true, Ordering::SeqCst);
                if round % 2 == 0 {
                    // Every other one finds it in force.
                    let before = uses.load(Ordering::Relaxed);
                    fencing.end(&word);
                    while uses.load(Ordering::Relaxed) == before {
                        std::hint::spin_loop();
                    }
                    // The next comes at any moment of a use.
                    for _ in 0..round % 101 {
                        std::hint::spin_loop();
                    }
                }
            }
            ends.store(true, Ordering::Relaxed);
        });
        assert!(uses.load(Ordering::Relaxed) as usize >= ROUNDS / 2);
        assert!(fenced.load(Ordering::Relaxed) > 0);
    }

    #[test]
    fn it_lasts_while_it_is_needed_and_for_a_while_after() {
        let (fencing, word) = (Fencing::default(), AtomicU32::new(FENCED));
        assert!(
            !fencing.lasts(&word),
            "the kernel does not know the process"
        );
        assert!(is_fenced(word.load(Ordering::Relaxed)));
        fencing.register();
        if !*fencing.registered.lock().unwrap() {
            return;
        }
        assert!(fencing.is_in_force());
        assert!(fencing.lasts(&word));
        // Long ago.
        fencing.used_at.store(1, Ordering::Relaxed);
        assert!(!fencing.lasts(&word), "nobody has needed it since");
        assert!(!fencing.is_in_force() && !is_fenced(word.load(Ordering::Relaxed)));
        fencing.begin(&word);
        assert!(fencing.is_in_force() && is_fenced(word.load(Ordering::Relaxed)));
    }

    #[test]
    fn mappings_are_counted_beside_it() {
        let word = AtomicU32::new(FENCED);
        let before = mappings(word.load(Ordering::Relaxed));
        count_unmapping(&word);
        let after = word.load(Ordering::Relaxed);
        assert!(is_fenced(after));
        assert_ne!(mappings(after), before);
    }
}
