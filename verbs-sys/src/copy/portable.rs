//! The copies by relaxed atomics, for machines without their own routine.

use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

/// The number of bytes of the next access: the widest power of two up to 8 that both the
/// alignment of the shared address and the bytes left allow.
fn step(shared: usize, left: usize) -> usize {
    let aligned = 1 << shared.trailing_zeros().min(3);
    let fits = 1 << left.ilog2().min(3);
    aligned.min(fits)
}

/// Copies to shared memory.
///
/// # Safety
///
/// As for [`super::write_shared`].
pub(super) unsafe fn copy_to_shared(dst: *mut u8, src: *const u8, len: usize) {
    let mut done = 0;
    while done < len {
        let step = step(dst.addr() + done, len - done);
        let mut bytes = [0; 8];
        // SAFETY: `done + step <= len`, and the contract gives `len` readable private bytes at
        // `src`; `step <= 8`, the length of `bytes`.
        unsafe {
            src.add(done)
                .copy_to_nonoverlapping(bytes.as_mut_ptr(), step)
        };
        // SAFETY: as above for `dst`, whose address `step` divides.
        unsafe { store(dst.add(done), step, bytes) };
        done += step;
    }
}

/// Copies from shared memory.
///
/// # Safety
///
/// As for [`super::read_shared`].
pub(super) unsafe fn copy_from_shared(dst: *mut u8, src: *const u8, len: usize) {
    let mut done = 0;
    while done < len {
        let step = step(src.addr() + done, len - done);
        // SAFETY: `done + step <= len`, the contract gives `len` readable bytes at `src`, and
        // `step` divides the address.
        let bytes = unsafe { load(src.add(done), step) };
        // SAFETY: as above for the private `dst`; `step <= 8`, the length of `bytes`.
        unsafe { bytes.as_ptr().copy_to_nonoverlapping(dst.add(done), step) };
        done += step;
    }
}

/// Copies between two shared ranges.
///
/// # Safety
///
/// As for [`super::copy_shared`].
pub(super) unsafe fn copy_both_shared(dst: *mut u8, src: *const u8, len: usize) {
    let mut done = 0;
    while done < len {
        let step = step(dst.addr() + done, len - done);
        let mut bytes = [0; 8];
        let mut got = 0;
        while got < step {
            let part = self::step(src.addr() + done + got, step - got);
            // SAFETY: `done + got + part <= len`, the contract gives `len` readable bytes at
            // `src`, and `part` divides the address.
            let read = unsafe { load(src.add(done + got), part) };
            bytes[got..got + part].copy_from_slice(&read[..part]);
            got += part;
        }
        // SAFETY: `done + step <= len`, the contract gives `len` writable bytes at `dst`, and
        // `step` divides the address.
        unsafe { store(dst.add(done), step, bytes) };
        done += step;
    }
}

/// Loads `step` bytes (1, 2, 4 or 8) in one access.
///
/// # Safety
///
/// `src` must be valid for reads of `step` bytes and `step` must divide its address.
unsafe fn load(src: *const u8, step: usize) -> [u8; 8] {
    let src = src.cast_mut();
    let mut bytes = [0; 8];
    match step {
        // SAFETY: valid and aligned by the contract, here and below.
        1 => bytes[0] = unsafe { AtomicU8::from_ptr(src) }.load(Relaxed),
        2 => {
            // SAFETY: see above.
            let word = unsafe { AtomicU16::from_ptr(src.cast()) }.load(Relaxed);
            bytes[..2].copy_from_slice(&word.to_ne_bytes());
        }
        4 => {
            // SAFETY: see above.
            let word = unsafe { AtomicU32::from_ptr(src.cast()) }.load(Relaxed);
            bytes[..4].copy_from_slice(&word.to_ne_bytes());
        }
        _ => {
            // SAFETY: see above.
            bytes = unsafe { AtomicU64::from_ptr(src.cast()) }
                .load(Relaxed)
                .to_ne_bytes();
        }
    }
    bytes
}

/// Stores the first `step` bytes (1, 2, 4 or 8) of `bytes` in one access.
///
/// # Safety
///
/// `dst` must be valid for writes of `step` bytes and `step` must divide its address.
unsafe fn store(dst: *mut u8, step: usize, bytes: [u8; 8]) {
    let [a, b, c, d, ..] = bytes;
    match step {
        // SAFETY: valid and aligned by the contract, here and below.
        1 => unsafe { AtomicU8::from_ptr(dst) }.store(a, Relaxed),
        2 => {
            // SAFETY: see above.
            unsafe { AtomicU16::from_ptr(dst.cast()) }.store(u16::from_ne_bytes([a, b]), Relaxed);
        }
        4 => {
            let word = u32::from_ne_bytes([a, b, c, d]);
            // SAFETY: see above.
            unsafe { AtomicU32::from_ptr(dst.cast()) }.store(word, Relaxed);
        }
        _ => {
            // SAFETY: see above.
            unsafe { AtomicU64::from_ptr(dst.cast()) }.store(u64::from_ne_bytes(bytes), Relaxed);
        }
    }
}
