//! The copies in x86-64 assembly.
//!
//! Peers race on these bytes, some of them from other processes, so no access of them may be one
//! that the compiler knows of: it could split, merge, widen or repeat it, and a race on it would
//! be undefined. Each assembly block here does a fixed list of loads and stores of its own.
//!
//! What the processor promises: naturally aligned accesses of up to 8 bytes are single. Wider
//! ones may be made of several, but those are never smaller than an aligned quadword, also where
//! an unaligned access crosses a cache line (lines begin at multiples of 8). Stores become visible
//! in program order.

use std::arch::asm;

/// Up to this length, copies go by general registers alone.
const SMALL: usize = 32;

/// Up to this length, aligned copies of whole lines are not worth a call.
pub(super) const LINES: usize = 128;

/// From this length on, 32-byte accesses pay for themselves where the processor has them.
const WIDE: usize = 256;

/// From this length on, the lines to be stored are fetched ahead, so that a store that misses the
/// cache does not hold up those behind it.
pub(super) const FETCH_AHEAD: usize = 2 << 10;

/// From this length on, accesses of a cache line each pay for themselves where the processor has them.
const WHOLE_LINES: usize = 2 << 10;

/// What [`FETCH_AHEAD`] is for those: they fill fewer buffers, and where a copy of a page is in the first
/// cache, fetching is a tenth of its time.
pub(super) const FETCH_LINES_AHEAD: usize = 8 << 10;

/// How far ahead, bytes. Never beyond the end of the copy: the lines there may be a peer's.
pub(super) const AHEAD: usize = 1024;

/// Copies to shared memory.
///
/// # Safety
///
/// As for [`super::write_shared`].
#[inline(always)]
pub(super) unsafe fn copy_to_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract includes this one.
    unsafe { copy::<true>(dst, src, len) }
}

/// Copies from shared memory.
///
/// # Safety
///
/// As for [`super::read_shared`].
#[inline(always)]
pub(super) unsafe fn copy_from_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract includes this one.
    unsafe { copy::<false>(dst, src, len) }
}

/// Copies between two shared ranges.
///
/// # Safety
///
/// As for [`super::copy_shared`].
#[inline(always)]
pub(super) unsafe fn copy_both_shared(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: the caller's contract includes this one. Equal residues modulo 8 make the source's
    // words aligned wherever the destination's are.
    unsafe { copy::<true>(dst, src, len) }
}

/// Both addresses of a copy under way and what is left of it: `left` bytes readable at `src` and
/// writable at `dst`, always.
struct Cursor<const TO_SHARED: bool> {
    dst: *mut u8,
    src: *const u8,
    left: usize,
}

/// Moves one unit between the cursor's addresses through a register and steps over it.
macro_rules! unit {
    ($name:ident, $bytes:literal, $class:ident, $load:literal, $store:literal) => {
        #[doc = concat!("Copies ", $bytes, " bytes in one load and one store.")]
        ///
        /// # Safety
        ///
        /// That many bytes must be left.
        #[inline(always)]
        unsafe fn $name(&mut self) {
            // SAFETY: the range left is readable at `src` and writable at `dst` by the contract
            // of `copy`. The block touches nothing else and leaves flags and stack alone.
            unsafe {
                asm!(
                    $load,
                    $store,
                    unit = out($class) _,
                    src = in(reg) self.src,
                    dst = in(reg) self.dst,
                    options(nostack, preserves_flags),
                );
            }
            // SAFETY: still inside the range, or one past its end.
            self.src = unsafe { self.src.add($bytes) };
            // SAFETY: as above.
            self.dst = unsafe { self.dst.add($bytes) };
            self.left -= $bytes;
        }
    };
}

impl<const TO_SHARED: bool> Cursor<TO_SHARED> {
    unit!(
        copy_1,
        1,
        reg_byte,
        "mov {unit}, byte ptr [{src}]",
        "mov byte ptr [{dst}], {unit}"
    );
    unit!(
        copy_2,
        2,
        reg,
        "movzx {unit:e}, word ptr [{src}]",
        "mov word ptr [{dst}], {unit:x}"
    );
    unit!(
        copy_4,
        4,
        reg,
        "mov {unit:e}, dword ptr [{src}]",
        "mov dword ptr [{dst}], {unit:e}"
    );
    unit!(
        copy_8,
        8,
        reg,
        "mov {unit:r}, qword ptr [{src}]",
        "mov qword ptr [{dst}], {unit:r}"
    );
    unit!(
        copy_16,
        16,
        xmm_reg,
        "movdqu {unit}, xmmword ptr [{src}]",
        "movdqu xmmword ptr [{dst}], {unit}"
    );

    /// Whether the shared address has this bit.
    #[inline(always)]
    fn shared_has(&self, bit: usize) -> bool {
        let shared = if TO_SHARED {
            self.dst.addr()
        } else {
            self.src.addr()
        };
        shared & bit != 0
    }

    /// Copies up to the next multiple of 8 of the shared address, or to the end.
    #[inline(always)]
    fn align_8(&mut self) {
        if self.shared_has(1) && self.left >= 1 {
            // SAFETY: just checked, here and below.
            unsafe { self.copy_1() };
        }
        if self.shared_has(2) && self.left >= 2 {
            // SAFETY: see above.
            unsafe { self.copy_2() };
        }
        if self.shared_has(4) && self.left >= 4 {
            // SAFETY: see above.
            unsafe { self.copy_4() };
        }
    }

    /// Copies the bytes left beyond the last multiple of 8.
    #[inline(always)]
    fn finish(&mut self) {
        if self.left & 4 != 0 {
            // SAFETY: just checked, here and below.
            unsafe { self.copy_4() };
        }
        if self.left & 2 != 0 {
            // SAFETY: see above.
            unsafe { self.copy_2() };
        }
        if self.left & 1 != 0 {
            // SAFETY: see above.
            unsafe { self.copy_1() };
        }
    }

    /// Copies what is left behind the last block.
    #[inline(always)]
    fn finish_blocks(&mut self) {
        while self.left >= 16 {
            // SAFETY: just checked.
            unsafe { self.copy_16() };
        }
        if self.left & 8 != 0 {
            // SAFETY: just checked.
            unsafe { self.copy_8() };
        }
        self.finish();
    }

    /// Runs one of the loops over as many whole blocks of `BLOCK` bytes as are left.
    #[inline(always)]
    fn blocks<const BLOCK: usize>(&mut self, run: unsafe fn(*mut u8, *const u8, usize)) {
        let bytes = self.left - self.left % BLOCK;
        if bytes != 0 {
            // SAFETY: so many bytes are left, more than none, in whole blocks.
            unsafe { run(self.dst, self.src, bytes) };
            // SAFETY: still inside the range, or one past its end.
            self.src = unsafe { self.src.add(bytes) };
            // SAFETY: as above.
            self.dst = unsafe { self.dst.add(bytes) };
            self.left -= bytes;
        }
    }
}

/// Copies `len` bytes with the accesses aligned on the destination (`TO_SHARED`) or the source.
///
/// Every unit is aligned to its size on that side: the head climbs to the alignment in ascending
/// sizes, the tail descends.
///
/// # Safety
///
/// `src` must be valid for reads and `dst` for writes of `len` bytes.
#[inline(always)]
unsafe fn copy<const TO_SHARED: bool>(dst: *mut u8, src: *const u8, len: usize) {
    if len > SMALL {
        let shared = if TO_SHARED { dst.addr() } else { src.addr() };
        if len <= LINES && len.is_multiple_of(64) && shared.is_multiple_of(16) {
            // SAFETY: same contract; the length was just checked.
            return unsafe { blocks_sse(dst, src, len) };
        }
        if len >= WHOLE_LINES && std::is_x86_feature_detected!("avx512f") {
            // SAFETY: same contract; length and processor were just checked.
            return unsafe { copy_lines::<TO_SHARED>(dst, src, len) };
        }
        // SAFETY: same contract; the length was just checked.
        return unsafe { copy_large::<TO_SHARED>(dst, src, len) };
    }
    let mut cursor = Cursor::<TO_SHARED> {
        dst,
        src,
        left: len,
    };
    if cursor.shared_has(7) {
        cursor.align_8();
    }
    while cursor.left >= 8 {
        // SAFETY: just checked.
        unsafe { cursor.copy_8() };
    }
    if cursor.left != 0 {
        cursor.finish();
    }
}

/// The same for lengths above [`SMALL`], kept out of line.
///
/// # Safety
///
/// As for [`copy`], and `len > SMALL`.
#[inline(never)]
unsafe fn copy_large<const TO_SHARED: bool>(dst: *mut u8, src: *const u8, len: usize) {
    let mut cursor = Cursor::<TO_SHARED> {
        dst,
        src,
        left: len,
    };
    if cursor.shared_has(15) {
        cursor.align_8();
        if cursor.shared_has(8) {
            // SAFETY: more than 32 bytes, of which at most 7 are gone.
            unsafe { cursor.copy_8() };
        }
    }
    if len >= WIDE && std::is_x86_feature_detected!("avx") {
        if cursor.shared_has(16) {
            // SAFETY: `WIDE` bytes and more, of which at most 15 are gone.
            unsafe { cursor.copy_16() };
        }
        if len >= FETCH_AHEAD {
            let kept = cursor.left.min(AHEAD);
            cursor.left -= kept;
            cursor.blocks::<128>(blocks_avx_ahead);
            cursor.left += kept;
        }
        cursor.blocks::<128>(blocks_avx);
    } else {
        cursor.blocks::<64>(blocks_sse);
    }
    cursor.finish_blocks();
}

/// The same for lengths from [`WHOLE_LINES`] on, with a cache line in each access.
///
/// # Safety
///
/// As for [`copy`], and `len >= WHOLE_LINES`; the processor has AVX-512F.
#[inline(never)]
unsafe fn copy_lines<const TO_SHARED: bool>(dst: *mut u8, src: *const u8, len: usize) {
    let mut cursor = Cursor::<TO_SHARED> {
        dst,
        src,
        left: len,
    };
    if cursor.shared_has(63) {
        cursor.align_8();
        while cursor.shared_has(63) {
            // SAFETY: at most 64 of far more bytes are copied here.
            unsafe { cursor.copy_8() };
        }
    }
    if len >= FETCH_LINES_AHEAD {
        cursor.left -= AHEAD;
        cursor.blocks::<256>(blocks_avx512_ahead);
        cursor.left += AHEAD;
    }
    cursor.blocks::<256>(blocks_avx512);
    cursor.finish_blocks();
}

/// Copies blocks of 64 bytes by 16-byte accesses.
///
/// # Safety
///
/// `src` must be valid for reads and `dst` for writes of `len` bytes, a multiple of 64 above 0.
#[inline(always)]
pub(super) unsafe fn blocks_sse(dst: *mut u8, src: *const u8, len: usize) {
    // SAFETY: each turn reads and writes the next 64 bytes of the two ranges, and the last turn
    // ends at `len`. All registers written are declared.
    unsafe {
        asm!(
            "2:",
            "movdqu {a}, xmmword ptr [{src}]",
            "movdqu {b}, xmmword ptr [{src} + 16]",
            "movdqu {c}, xmmword ptr [{src} + 32]",
            "movdqu {d}, xmmword ptr [{src} + 48]",
            "movdqu xmmword ptr [{dst}], {a}",
            "movdqu xmmword ptr [{dst} + 16], {b}",
            "movdqu xmmword ptr [{dst} + 32], {c}",
            "movdqu xmmword ptr [{dst} + 48], {d}",
            "add {src}, 64",
            "add {dst}, 64",
            "sub {left}, 64",
            "jnz 2b",
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            src = inout(reg) src => _,
            dst = inout(reg) dst => _,
            left = inout(reg) len => _,
            options(nostack),
        );
    }
}

/// Defines a routine that copies blocks of four accesses of so many bytes, by an instruction and registers of
/// that width, after other instructions of its own.
macro_rules! blocks_wide {
    (
        $(#[$doc:meta])*
        $name:ident, $move:literal $register:literal $bytes:literal, $second:literal $third:literal $fourth:literal
        $block:literal $(, $first:literal)*
    ) => {
        $(#[$doc])*
        ///
        /// # Safety
        ///
        /// As for [`blocks_sse`] with the block's size in place of 64, and the processor must have the
        /// instruction.
        #[inline(always)]
        pub(super) unsafe fn $name(dst: *mut u8, src: *const u8, len: usize) {
            // SAFETY: each turn reads and writes the next block of the two ranges, and the last turn
            // ends at `len`; a prefetch accesses nothing. `vzeroupper` changes the upper part of the
            // first sixteen vector registers, so all of them are declared.
            unsafe {
                asm!(
                    "2:",
                    $($first,)*
                    concat!($move, " ", $register, "0, ", $bytes, " ptr [{src}]"),
                    concat!($move, " ", $register, "1, ", $bytes, " ptr [{src} + ", $second, "]"),
                    concat!($move, " ", $register, "2, ", $bytes, " ptr [{src} + ", $third, "]"),
                    concat!($move, " ", $register, "3, ", $bytes, " ptr [{src} + ", $fourth, "]"),
                    concat!($move, " ", $bytes, " ptr [{dst}], ", $register, "0"),
                    concat!($move, " ", $bytes, " ptr [{dst} + ", $second, "], ", $register, "1"),
                    concat!($move, " ", $bytes, " ptr [{dst} + ", $third, "], ", $register, "2"),
                    concat!($move, " ", $bytes, " ptr [{dst} + ", $fourth, "], ", $register, "3"),
                    concat!("add {src}, ", $block),
                    concat!("add {dst}, ", $block),
                    concat!("sub {left}, ", $block),
                    "jnz 2b",
                    "vzeroupper",
                    src = inout(reg) src => _,
                    dst = inout(reg) dst => _,
                    left = inout(reg) len => _,
                    out("xmm0") _, out("xmm1") _, out("xmm2") _, out("xmm3") _,
                    out("xmm4") _, out("xmm5") _, out("xmm6") _, out("xmm7") _,
                    out("xmm8") _, out("xmm9") _, out("xmm10") _, out("xmm11") _,
                    out("xmm12") _, out("xmm13") _, out("xmm14") _, out("xmm15") _,
                    options(nostack),
                );
            }
        }
    };
}

blocks_wide!(
    /// Copies blocks of 128 bytes by 32-byte accesses; with AVX.
    blocks_avx, "vmovdqu" "ymm" "ymmword", 32 64 96 128
);

blocks_wide!(
    /// The same with `AHEAD` more bytes behind the destination, which it prefetches for writing.
    ///
    /// `prefetchw` does nothing on processors older than itself.
    blocks_avx_ahead, "vmovdqu" "ymm" "ymmword", 32 64 96 128,
    "prefetchw byte ptr [{dst} + 1024]",
    "prefetchw byte ptr [{dst} + 1088]"
);

blocks_wide!(
    /// Copies blocks of 256 bytes by 64-byte accesses; with AVX-512F.
    blocks_avx512, "vmovdqu64" "zmm" "zmmword", 64 128 192 256
);

blocks_wide!(
    /// The same with `AHEAD` more bytes behind the destination, which it prefetches for writing.
    blocks_avx512_ahead, "vmovdqu64" "zmm" "zmmword", 64 128 192 256,
    "prefetchw byte ptr [{dst} + 1024]",
    "prefetchw byte ptr [{dst} + 1088]",
    "prefetchw byte ptr [{dst} + 1152]",
    "prefetchw byte ptr [{dst} + 1216]"
);
