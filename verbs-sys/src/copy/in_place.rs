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
pub(super) mod imp {
    use std::arch::asm;
    use std::hint::cold_path;
    use std::sync::atomic::{AtomicU8, Ordering};

    use super::super::x86_64::{
        AHEAD, FETCH_AHEAD, FETCH_LINES_AHEAD, LINES, blocks_avx, blocks_avx_ahead, blocks_avx512,
        blocks_sse,
    };

    /// Up to this length, words are copied one by one.
    const WORDS: usize = 64;
    /// Copies are shorter than this: what a call costs is nothing beside longer ones.
    const LIMIT: usize = FETCH_LINES_AHEAD;

    /// What the processor can access at once: 16 bytes, 32, or a line.
    pub(in super::super) const NARROW: u8 = 0;
    pub(in super::super) const WIDE: u8 = 1;
    pub(in super::super) const WHOLE_LINES: u8 = 2;

    static WIDTH: AtomicU8 = AtomicU8::new(NARROW);

    pub(in super::super) fn width() -> u8 {
        if std::is_x86_feature_detected!("avx512f") {
            WHOLE_LINES
        } else if std::is_x86_feature_detected!("avx") {
            WIDE
        } else {
            NARROW
        }
    }

    pub(super) fn look_at_processor() {
        WIDTH.store(width(), Ordering::Relaxed);
    }

    /// # Safety
    ///
    /// As for [`super::copy_in_place`].
    #[inline(always)]
    pub(super) unsafe fn copy_in_place<const TO_SHARED: bool>(
        dst: *mut u8,
        src: *const u8,
        len: usize,
    ) -> bool {
        // SAFETY: same contract; so wide is what the processor was found to be.
        unsafe { copy::<TO_SHARED>(|| WIDTH.load(Ordering::Relaxed), dst, src, len) }
    }

    /// # Safety
    ///
    /// As for [`super::copy_in_place`]; the processor is as wide as it is said to be.
    #[inline(always)]
    pub(in super::super) unsafe fn copy<const TO_SHARED: bool>(
        width: impl Fn() -> u8,
        dst: *mut u8,
        src: *const u8,
        len: usize,
    ) -> bool {
        let shared = if TO_SHARED { dst.addr() } else { src.addr() };
        if len < WORDS {
            let goes = (shared | len).is_multiple_of(8);
            if goes {
                // SAFETY: same contract; words, and not none.
                unsafe { words(dst, src, len) };
            }
            return goes;
        }
        if !len.is_multiple_of(64) || len >= LIMIT {
            cold_path();
            return false;
        }
        if !shared.is_multiple_of(64) {
            cold_path();
            let goes = len <= LINES && shared.is_multiple_of(16);
            if goes {
                // SAFETY: same contract; as many bytes as whole lines.
                unsafe { blocks_sse(dst, src, len) };
            }
            return goes;
        }
        match width() {
            WHOLE_LINES if len == 64 => {
                // SAFETY: same contract; a line, and the processor can.
                unsafe { line_avx512(dst, src) };
            }
            WHOLE_LINES if len <= LINES || !len.is_multiple_of(256) => {
                // SAFETY: same contract; lines, and the processor can.
                unsafe { lines_avx512(dst, src, len) };
            }
            WHOLE_LINES => {
                // SAFETY: as above; blocks.
                unsafe { blocks_avx512(dst, src, len) };
            }
            WIDE if len.is_multiple_of(128) => {
                let ahead = if len > FETCH_AHEAD { len - AHEAD } else { 0 };
                if ahead != 0 {
                    // SAFETY: as above; `AHEAD` bytes are left behind these blocks.
                    unsafe { blocks_avx_ahead(dst, src, ahead) };
                }
                // SAFETY: as above; what is left.
                unsafe { blocks_avx(dst.add(ahead), src.add(ahead), len - ahead) };
            }
            _ => {
                // SAFETY: same contract; whole lines.
                unsafe { blocks_sse(dst, src, len) };
            }
        }
        true
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

    /// Copies a line in one access.
    ///
    /// # Safety
    ///
    /// `src` must be valid for reads and `dst` for writes of 64 bytes; the processor has AVX-512F.
    #[inline(always)]
    unsafe fn line_avx512(dst: *mut u8, src: *const u8) {
        // SAFETY: as for this function.
        unsafe {
            asm!(
                "prefetchw byte ptr [{dst}]",
                "vmovdqu64 zmm16, zmmword ptr [{src}]",
                "vmovdqu64 zmmword ptr [{dst}], zmm16",
                src = in(reg) src,
                dst = in(reg) dst,
                out("xmm16") _,
                options(nostack, preserves_flags),
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
