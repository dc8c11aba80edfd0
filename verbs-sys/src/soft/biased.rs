//! A lock that costs no locked instruction to the thread that takes it again and again.
//!
//! A completion queue is nearly always polled by one thread, some 10 million times a second, and a locked
//! instruction behind a copy waits for that copy's stores. So the lock is *biased*: its owner enters by
//! an ordinary store and a look at whether it still owns it. Whoever else wants in first takes the
//! bias away, by membarrier(2): the kernel makes every running thread of the process execute a full
//! fence, after which either the owner has seen that it lost the bias, or we see that it is inside.
//!
//! ```text
//! owner:   inside = 1; (compiler fence) owner == me?        enter
//! other:   owner = 0;  membarrier();    wait until inside == 0
//! ```
//!
//! That is Dekker's algorithm with both of its fences on the rare side. Where the kernel has no
//! membarrier(2), or threads take turns, it stays an ordinary spin lock.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering, compiler_fence};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier};

use super::epoch::relax;

/// Times in a row that one thread must have come the slow way before it gets the bias. Doubled with
/// every time that the bias is taken away again.
const STREAK: u32 = 64;

/// The lock, and what it guards.
#[derive(Debug, Default)]
pub(super) struct Biased<T> {
    /// The thread that may enter by the short way, or 0. Set by the holder of `lock` only.
    owner: AtomicUsize,
    /// The owner is inside. Written by the owner only.
    inside: AtomicBool,
    /// For all others.
    lock: AtomicBool,
    /// The thread that came last by the long way, and how often in a row. Guarded by `lock`.
    last: AtomicUsize,
    streak: AtomicU32,
    /// Times the bias was taken away. Guarded by `lock`.
    revoked: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard, of which there is one at a time.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    pub(super) fn new(value: T) -> Self {
        Self {
            owner: AtomicUsize::new(0),
            inside: AtomicBool::new(false),
            lock: AtomicBool::new(false),
            last: AtomicUsize::new(0),
            streak: AtomicU32::new(0),
            revoked: AtomicU32::new(0),
            value: UnsafeCell::new(value),
        }
    }

    /// Takes the lock, spinning. Not to be taken again by its holder.
    #[inline(always)]
    pub(super) fn lock(&self) -> Guard<'_, T> {
        // A thread that is inside already waits for itself below, as with any lock, and does no harm.
        match self.try_own() {
            Some(guard) => guard,
            None => self.lock_slowly(thread()),
        }
    }

    /// Takes the lock if the bias is this thread's.
    #[inline(always)]
    pub(super) fn try_own(&self) -> Option<Guard<'_, T>> {
        let me = thread();
        if self.owner.load(Ordering::Relaxed) != me || self.inside.load(Ordering::Relaxed) {
            return None;
        }
        self.inside.store(true, Ordering::Relaxed);
        // The processor's fence is in the other's membarrier.
        compiler_fence(Ordering::SeqCst);
        if self.owner.load(Ordering::Relaxed) == me {
            return Some(Guard {
                lock: self,
                is_owner: true,
            });
        }
        self.inside.store(false, Ordering::Release);
        None
    }

    #[cold]
    fn lock_slowly(&self, me: usize) -> Guard<'_, T> {
        let mut spins = 0;
        while self
            .lock
            .compare_exchange_weak(false, true, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            relax(&mut spins);
        }
        let guard = Guard {
            lock: self,
            is_owner: false,
        };
        if self.owner.load(Ordering::Relaxed) != 0 {
            self.revoke();
        }
        let streak = if self.last.swap(me, Ordering::Relaxed) == me {
            self.streak.load(Ordering::Relaxed).saturating_add(1)
        } else {
            0
        };
        self.streak.store(streak, Ordering::Relaxed);
        let wanted = STREAK << self.revoked.load(Ordering::Relaxed).min(16);
        if streak >= wanted && can_bias() {
            self.streak.store(0, Ordering::Relaxed);
            self.owner.store(me, Ordering::Relaxed);
        }
        guard
    }

    /// Takes the bias away, and waits for its owner to come out. `lock` is held.
    fn revoke(&self) {
        self.owner.store(0, Ordering::SeqCst);
        fence_everywhere();
        let mut spins = 0;
        while self.inside.load(Ordering::Acquire) {
            relax(&mut spins);
        }
        let revoked = self.revoked.load(Ordering::Relaxed).saturating_add(1);
        self.revoked.store(revoked, Ordering::Relaxed);
    }
}

/// Holds the lock.
#[derive(Debug)]
pub(super) struct Guard<'a, T> {
    lock: &'a Biased<T>,
    is_owner: bool,
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
        if self.is_owner {
            self.lock.inside.store(false, Ordering::Release);
        } else {
            self.lock.lock.store(false, Ordering::Release);
        }
    }
}

/// A number of this thread that no other thread of the process has while this one lives; never 0.
#[inline(always)]
fn thread() -> usize {
    #[cfg(target_arch = "x86_64")]
    {
        let block: usize;
        // SAFETY: the thread pointer of the x86-64 ABI points at a block of the thread's own whose
        // first word is its address ("ELF Handling For Thread-Local Storage", variant II).
        unsafe {
            core::arch::asm!("mov {}, fs:[0]", out(reg) block, options(nostack, preserves_flags, readonly, pure));
        }
        block
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        thread_local!(static OWN: u8 = const { 0 });
        OWN.with(|own| core::ptr::from_ref(own).addr())
    }
}

/// Whether [`fence_everywhere`] works here.
fn can_bias() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// A full fence in every thread of this process that is running.
fn fence_everywhere() {
    let fenced = || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    // A forked child has to register anew.
    if fenced() || (membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() && fenced()) {
        return;
    }
    // It worked before, so a filter of system calls was put in place since. A store leaves a
    // processor within microseconds, whatever it does next.
    tracing::warn!("membarrier(2) has stopped working; waiting instead");
    let since = Instant::now();
    while since.elapsed() < Duration::from_millis(20) {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_thread_gets_the_bias_and_another_takes_it_away() {
        let lock = Biased::new(0u64);
        for _ in 0..=STREAK {
            *lock.lock() += 1;
        }
        assert_eq!(lock.owner.load(Ordering::Relaxed) == thread(), can_bias());
        *lock.lock() += 1;
        std::thread::scope(|scope| {
            scope.spawn(|| *lock.lock() += 1);
        });
        assert_eq!(lock.owner.load(Ordering::Relaxed), 0);
        assert_eq!(*lock.lock(), u64::from(STREAK) + 3);
    }

    #[test]
    fn threads_have_numbers_of_their_own() {
        let mine = thread();
        assert_ne!(mine, 0);
        assert_eq!(mine, thread());
        let other = std::thread::spawn(thread).join().unwrap();
        assert_ne!(mine, other);
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
