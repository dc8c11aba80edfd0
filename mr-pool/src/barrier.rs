//! A pair of barriers of unequal price.
//!
//! A thread that takes and returns buffers orders "I am inside" before "is anyone asking me to
//! stay out" with [`Barrier::light`], which costs nothing; the rare thread on the other side pays
//! for both with [`Barrier::heavy`] (`membarrier(2)`, a full fence on every running thread of the
//! process). Where the kernel refuses, both are plain full fences.

use crate::sync::{Ordering, fence};

#[cfg(not(loom))]
use crate::sync::{AtomicU32, compiler_fence};
#[cfg(not(loom))]
use rustix::thread::{MembarrierCommand, MembarrierQuery, membarrier, membarrier_query};

/// Both sides of one pool's barrier.
#[derive(Debug)]
pub(crate) struct Barrier {
    /// 1 while `heavy` can fence other threads.
    #[cfg(not(loom))]
    asymmetric: AtomicU32,
}

#[cfg(not(loom))]
impl Barrier {
    /// Asks the kernel once; later pools of the process find it already registered.
    pub(crate) fn new() -> Self {
        let wanted =
            MembarrierQuery::PRIVATE_EXPEDITED | MembarrierQuery::REGISTER_PRIVATE_EXPEDITED;
        let asymmetric = membarrier_query().contains(wanted)
            && membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok();
        Self {
            asymmetric: AtomicU32::new(asymmetric.into()),
        }
    }

    /// What it is where the kernel refuses.
    #[cfg(test)]
    pub(crate) fn make_symmetric(&self) {
        self.asymmetric.store(0, Ordering::SeqCst);
    }

    /// Orders this thread's earlier stores before its later loads, as seen by a thread that runs
    /// [`heavy`](Self::heavy).
    #[inline]
    pub(crate) fn light(&self) {
        if self.asymmetric.load(Ordering::Relaxed) == 1 {
            compiler_fence(Ordering::SeqCst);
        } else {
            fence(Ordering::SeqCst);
        }
    }

    /// The other side of [`light`](Self::light).
    pub(crate) fn heavy(&self) {
        fence(Ordering::SeqCst);
        if self.asymmetric.load(Ordering::Relaxed) == 0 {
            return;
        }
        if let Err(error) = membarrier(MembarrierCommand::PrivateExpedited) {
            // A sandbox entered after the pool was built. From here on `light` is a full fence;
            // a thread that has just passed the cheap one has its store out of the store buffer
            // within microseconds, and is given far longer.
            self.asymmetric.store(0, Ordering::SeqCst);
            tracing::warn!(%error, "membarrier is refused now; falling back to full fences");
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

/// Loom knows no `membarrier`: two full fences give the same guarantee.
#[cfg(loom)]
impl Barrier {
    pub(crate) fn new() -> Self {
        Self {}
    }

    pub(crate) fn light(&self) {
        fence(Ordering::SeqCst);
    }

    pub(crate) fn heavy(&self) {
        fence(Ordering::SeqCst);
    }
}
