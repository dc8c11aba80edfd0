//! Fences of which one thread pays for all: the other side's is an order to the compiler alone.
//!
//! What is here, and nothing else of the locks that are built on it, has another form where every schedule of theirs
//! is tried (`tests/schedules`).

pub(super) use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

use std::sync::OnceLock;
use std::sync::atomic::{Ordering, compiler_fence};
use std::time::{Duration, Instant};

use rustix::thread::{MembarrierCommand, membarrier};

/// Times in a row that one thread must have come the slow way before a lock is biased to it. Doubled with
/// every time that the bias is taken away again.
pub(super) const STREAK: u32 = 64;

/// A number of this thread that no other thread of the process has while this one lives; never 0.
#[inline(always)]
pub(super) fn thread() -> usize {
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

/// A full fence, if another thread calls [`fence_everywhere`].
#[inline(always)]
pub(super) fn fence_here() {
    compiler_fence(Ordering::SeqCst);
}

/// Whether [`fence_everywhere`] works here.
pub(super) fn can_fence_everywhere() -> bool {
    static CAN: OnceLock<bool> = OnceLock::new();
    *CAN.get_or_init(|| {
        membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok()
            && membarrier(MembarrierCommand::PrivateExpedited).is_ok()
    })
}

/// A full fence in every thread of this process that is running.
pub(super) fn fence_everywhere() {
    let fenced = || membarrier(MembarrierCommand::PrivateExpedited).is_ok();
    // A forked child has to register anew.
    if fenced() || (membarrier(MembarrierCommand::RegisterPrivateExpedited).is_ok() && fenced()) {
        return;
    }
    // It worked before, so a filter of system calls was put in place since.
    tracing::warn!("membarrier(2) has stopped working; waiting instead");
    outwait();
}

/// In place of a fence elsewhere: a store leaves a processor within microseconds, whatever it does next.
pub(super) fn outwait() {
    let since = Instant::now();
    while since.elapsed() < Duration::from_millis(20) {
        std::thread::yield_now();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn threads_have_numbers_of_their_own() {
        let mine = thread();
        assert_ne!(mine, 0);
        assert_eq!(mine, thread());
        let other = std::thread::spawn(thread).join().unwrap();
        assert_ne!(mine, other);
    }
}
