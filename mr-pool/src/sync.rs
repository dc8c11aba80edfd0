//! The one place that chooses between the standard primitives and loom's.
//!
//! Reference counts stay the standard library's in both: loom has no `Weak`, and none of the
//! protocols below rests on the count's ordering.

#[cfg(not(loom))]
mod chosen {
    pub(crate) use std::sync::atomic::{
        AtomicPtr, AtomicU32, AtomicU64, Ordering, compiler_fence, fence,
    };
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use std::thread::yield_now;
}

#[cfg(loom)]
mod chosen {
    pub(crate) use loom::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, Ordering, fence};
    pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
    pub(crate) use loom::thread::yield_now;
}

use std::sync::PoisonError;
use std::time::Instant;

pub(crate) use chosen::*;

/// Locks, whatever a panicking holder left: every critical section here leaves the state whole at
/// each step that can panic.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for a notification, or until `deadline` (`None`: for ever).
///
/// Under loom the deadline never comes, so that a lost wake-up shows as a deadlock.
pub(crate) fn wait<'a, T>(
    condvar: &Condvar,
    guard: MutexGuard<'a, T>,
    deadline: Option<Instant>,
) -> MutexGuard<'a, T> {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    match left {
        #[cfg(not(loom))]
        Some(left) => {
            condvar
                .wait_timeout(guard, left)
                .unwrap_or_else(PoisonError::into_inner)
                .0
        }
        _ => condvar.wait(guard).unwrap_or_else(PoisonError::into_inner),
    }
}
