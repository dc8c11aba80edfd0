//! The copies that take few instructions and no call: a function that calls nothing else needs no stack, and the ways
//! that most requests go are made of such.

/// Looks what the processor has: until then it has the least.
pub(crate) fn look_at_processor() {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    imp::look_at_processor();
}

/// As [`copy_shared`](super::copy_shared) (`TO_SHARED`) or [`read_shared`](super::read_shared), if it is of words or
/// whole lines, not many, on their boundaries. `false`: nothing was copied.
///
/// # Safety
///
/// As for those, and `len` is not 0.
#[inline(always)]
pub(crate) unsafe fn copy_in_place<const TO_SHARED: bool>(
    dst: *mut u8,
    src: *const u8,
    len: usize,
) -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: the caller's contract is the same.
        unsafe { imp::copy_in_place::<TO_SHARED>(dst, src, len) }
    }
    #[cfg(any(miri, not(target_arch = "x86_64")))]
    {
        let _ = (dst, src, len);
        false
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod imp {
    use std::arch::asm;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::x86_64::{FETCH_LINES_AHEAD, LINES, SMALL, blocks_avx512, blocks_sse};

    /// Whether the processor can access a line at once.
    static HAS_WHOLE_LINES: AtomicBool = AtomicBool::new(false);

    pub(super) fn look_at_processor() {
        let has = std::is_x86_feature_detected!("avx512f");
        HAS_WHOLE_LINES.store(has, Ordering::Relaxed);
    }

    /// Copies what needs few instructions and no call.
    ///
    /// # Safety
    ///
    /// As for [`super::copy_in_place`].
    #[inline(always)]
    pub(super) unsafe fn copy_in_place<const TO_SHARED: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
    ) -> bool {
        let shared = if TO_SHARED { dst.addr() } else { src.addr() };
        if len <= SMALL {
            if !(shared | len).is_multiple_of(8) {
                return false;
            }
            // SAFETY: same contract; words, and not none.
            unsafe { words(dst, src, len) };
            return true;
        }
        if (shared | len).is_multiple_of(64)
            && len < FETCH_LINES_AHEAD
            && HAS_WHOLE_LINES.load(Ordering::Relaxed)
        {
            if len <= LINES {
                // SAFETY: same contract; lines, and the processor was looked at.
                unsafe { lines_avx512(dst, src, len) };
                return true;
            }
            if len.is_multiple_of(256) {
                // SAFETY: as above; blocks.
                unsafe { blocks_avx512(dst, src, len) };
                return true;
            }
        }
        if len <= LINES && len.is_multiple_of(64) && shared.is_multiple_of(16) {
            // SAFETY: same contract; the length was just checked.
            unsafe { blocks_sse(dst, src, len) };
            return true;
        }
        false
    }

    /// Copies words of 8 bytes, each in one access.
    ///
    /// # Safety
    ///
    /// `src` must be valid for reads and `dst` for writes of `len` bytes, a multiple of 8 above 0.
    #[inline(always)]
    unsafe fn words(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: each turn reads and writes the next word of the two ranges, and the last turn ends at `len`.
        unsafe {
            asm!(
                "2:",
                "mov {word}, qword ptr [{src} + {at}]",
                "mov qword ptr [{dst} + {at}], {word}",
                "add {at}, 8",
                "cmp {at}, {len}",
                "jb 2b",
                word = out(reg) _,
                src = in(reg) src,
                dst = in(reg) dst,
                len = in(reg) len,
                at = inout(reg) 0_usize => _,
                options(nostack),
            );
        }
    }

    /// Copies lines, each in one access, and fetches them for writing before the stores that need them are at the front of
    /// the store buffer.
    ///
    /// # Safety
    ///
    /// `src` must be valid for reads and `dst` for writes of `len` bytes, a multiple of 64 above 0; the processor has
    /// AVX-512F.
    #[inline(always)]
    unsafe fn lines_avx512(dst: *mut u8, src: *const u8, len: usize) {
        // SAFETY: each turn reads and writes the next line of the two ranges, and the last turn ends at `len`; a prefetch
        // accesses nothing. The register has no lower part that other instructions know.
        unsafe {
            asm!(
                "2:",
                "prefetchw byte ptr [{dst} + {at}]",
                "vmovdqu64 zmm16, zmmword ptr [{src} + {at}]",
                "vmovdqu64 zmmword ptr [{dst} + {at}], zmm16",
                "add {at}, 64",
                "cmp {at}, {len}",
                "jb 2b",
                src = in(reg) src,
                dst = in(reg) dst,
                len = in(reg) len,
                at = inout(reg) 0_usize => _,
                out("xmm16") _,
                options(nostack),
            );
        }
    }
}
