//! Atomic operations on aligned 8-byte words of shared memory.

use std::sync::atomic::{AtomicU64, Ordering};

/// Loads the word at `word` with acquire ordering.
///
/// # Safety
///
/// `word` must be aligned to 8 and valid for reads of 8 bytes, which everybody else accesses by
/// atomics or by the copies of this module.
#[inline]
pub unsafe fn load_u64(word: *const u64) -> u64 {
    // SAFETY: aligned and valid by the contract; a load does not write, so `*const` will do.
    unsafe { AtomicU64::from_ptr(word.cast_mut()) }.load(Ordering::Acquire)
}

/// Stores `value` at `word` with release ordering, whole.
///
/// # Safety
///
/// As for [`compare_swap_u64`].
#[inline]
pub unsafe fn store_u64(word: *mut u64, value: u64) {
    // SAFETY: aligned and valid by the contract.
    unsafe { AtomicU64::from_ptr(word) }.store(value, Ordering::Release);
}

/// Stores `swap` at `word` if `compare` stands there, in one step; gives the value found.
///
/// # Safety
///
/// `word` must be aligned to 8 and valid for reads and writes of 8 bytes, which everybody else
/// accesses by atomics or by the copies of this module.
#[inline]
pub unsafe fn compare_swap_u64(word: *mut u64, compare: u64, swap: u64) -> u64 {
    // SAFETY: aligned and valid by the contract.
    let word = unsafe { AtomicU64::from_ptr(word) };
    match word.compare_exchange(compare, swap, Ordering::SeqCst, Ordering::SeqCst) {
        Ok(found) | Err(found) => found,
    }
}

/// Adds `add` to the word at `word`, wrapping, in one step; gives the value found.
///
/// # Safety
///
/// As for [`compare_swap_u64`].
#[inline]
pub unsafe fn fetch_add_u64(word: *mut u64, add: u64) -> u64 {
    // SAFETY: aligned and valid by the contract.
    unsafe { AtomicU64::from_ptr(word) }.fetch_add(add, Ordering::SeqCst)
}
