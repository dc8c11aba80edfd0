//! Copies between private memory and memory that peers read and write at the same time.
//!
//! The `memcpy` of a C library will not do for bytes that another process is using: with a
//! misaligned source it splits aligned words over two stores, it stores some words twice (so it
//! undoes a peer's successful compare-and-swap), and it is many times slower when source and
//! destination differ by a few bytes modulo the page size. The routines here promise, for the
//! *shared* side:
//!
//! - every byte is accessed exactly once;
//! - a naturally aligned 8-byte word that lies wholly inside the range is accessed by one
//!   instruction at least 8 bytes wide, whatever the alignment of the private side: a racing
//!   reader or writer of such a word never sees half of it;
//! - accesses go in ascending order of address. Racing observers see that order where the
//!   hardware keeps stores in order (x86-64); elsewhere order comes from the fence or the release
//!   store that publishes the copy.
//!
//! No copy is an acquire or a release: publish with a release store after writing, and read after
//! an acquire load.
//!
//! On x86-64 every access is written in assembly, so that the compiler neither knows of the race
//! nor splits, merges or repeats an access. Elsewhere (and under Miri) the shared side is accessed
//! by relaxed atomics.
//!
//! # Cost
//!
//! Times relative to `ptr::copy_nonoverlapping` in the same run, on an x86-64 server core with AVX:
//!
//! | bytes | both aligned, cached | private side off by 1, write / read | shared side not cached, write / read |
//! |---|---|---|---|
//! | 8 | 0.6 | 0.7 / 1.0 | 1.0–1.3 / 1.0 |
//! | 32 | 1.0 | 1.1 / 1.2 | 0.9 / 1.2 |
//! | 128 | 1.6–2.4 (2.3 ns against 3.7–5.7) | 1.7 / 2.5 | 0.7 / 1.5 |
//! | 1 KiB | 1.3 | 1.3 / 2.1 | 1.0 / 1.3 |
//! | 4 KiB | 1.0 | 1.2 / 2.1 | 1.2 / 1.1 |
//! | 64 KiB | 1.0 | 1.0 / 1.2 | 1.1 / 1.1 |
//! | 1 MiB | 1.0 | 1.0 / 1.0 | 1.0–1.1 / 1.0 |
//! | 4 MiB | 1.0 | 1.0 / 1.0 | 1.1 / 1.0 |
//!
//! There is no distance between the two sides, modulo the page size, at which it is slow. Fetching
//! ahead for writing is what brings long writes to memory out of the cache down from 1.4 to 1.1.
//! Non-temporal stores would halve those, but cost 1.5 times where the target is cached, leave it
//! out of the cache for the reader, and are not in order; so they are not used.

mod atomic;
mod in_place;
#[cfg(any(test, miri, not(target_arch = "x86_64")))]
mod portable;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod x86_64;

#[cfg(test)]
mod tests;

#[cfg(any(miri, not(target_arch = "x86_64")))]
use portable as imp;
#[cfg(all(target_arch = "x86_64", not(miri)))]
use x86_64 as imp;

pub use atomic::{compare_swap_u64, fetch_add_u64, load_u64, store_u64};
pub(crate) use in_place::{copy_in_place, look_at_processor};

/// Copies `len` bytes from private memory at `src` to shared memory at `dst`.
///
/// Peers may read and write the bytes at `dst` meanwhile: each aligned word of theirs is stored
/// once and whole, in ascending order.
///
/// # Safety
///
/// `src` must be valid for reads of `len` bytes that nobody writes meanwhile, `dst` valid for
/// writes of `len` bytes that no Rust reference covers; the two must not overlap. Either may have
/// any alignment, and with a `len` of 0 any value.
#[inline]
pub unsafe fn write_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract is the same.
    unsafe { imp::copy_to_shared(dst, src, len) }
}

/// Copies `len` bytes from shared memory at `src` to private memory at `dst`.
///
/// Peers may read and write the bytes at `src` meanwhile: each aligned word of theirs is loaded
/// once and whole, in ascending order.
///
/// # Safety
///
/// `src` must be valid for reads of `len` bytes that no Rust `&mut` covers, `dst` valid for writes
/// of `len` bytes that nobody else accesses meanwhile; the two must not overlap. Either may have
/// any alignment, and with a `len` of 0 any value.
#[inline]
pub unsafe fn read_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract is the same.
    unsafe { imp::copy_from_shared(dst, src, len) }
}

/// Copies `len` bytes between two ranges that peers may both be using.
///
/// The promises hold for the destination; they hold for the source too where both addresses are
/// equal modulo 8. The ranges may overlap, even be the same: what then stands in the overlap is
/// some mixture of the old bytes, as verbs leave it.
///
/// # Safety
///
/// `src` must be valid for reads and `dst` for writes of `len` bytes, and no Rust reference may
/// cover bytes of either that are written. Either may have any alignment, and with a `len` of 0
/// any value.
#[inline]
pub unsafe fn copy_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract is the same.
    unsafe { imp::copy_both_shared(dst, src, len) }
}
