//! What stands for the library's module of this name: both fences are full ones, as membarrier(2) makes them for
//! whoever meets the other side.

pub(super) use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize};

use std::sync::atomic::Ordering;

/// Soon, so that few steps lead to it.
pub(super) const STREAK: u32 = 1;

loom::thread_local!(static OWN: usize = next());

fn next() -> usize {
    // Not loom's: numbers differ, and are of no schedule.
    static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

pub(super) fn thread() -> usize {
    OWN.with(|own| *own)
}

pub(super) fn can_fence_everywhere() -> bool {
    true
}

pub(super) fn fence_here() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}

pub(super) fn fence_everywhere() {
    loom::sync::atomic::fence(Ordering::SeqCst);
}
