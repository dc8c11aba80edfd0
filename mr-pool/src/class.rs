//! Size classes: 64, 128, 192, 256 bytes, then four to each power of two up to 8 MiB.
//!
//! Four to a power of two keep the waste of any length above 256 bytes under a fifth of its block;
//! it is 8 % of the bytes over lengths spread evenly, or evenly over their logarithms. Two would
//! allow a third. Every size is a multiple of 64, so blocks laid end to end from an aligned base
//! are aligned to 64 bytes.

/// Number of classes. Loom explores every access, so it is given a pool of two.
pub(crate) const CLASSES: usize = if cfg!(loom) { 2 } else { 64 };

/// Alignment of every block, in bytes: a cache line.
pub(crate) const ALIGN: usize = 64;

/// Bytes of the largest class.
pub(crate) const LARGEST: usize = size_of_class(CLASSES - 1);

/// Classes of linear spacing, before the four to a power of two begin.
const LINEAR: usize = 4;
/// Logarithm of the largest linear class.
const LINEAR_LOG: usize = 8;

/// Bytes of each class.
const SIZES: [u32; CLASSES] = {
    let mut sizes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        sizes[class] = size_of_class(class) as u32;
        class += 1;
    }
    sizes
};

const fn size_of_class(class: usize) -> usize {
    if class < LINEAR {
        (class + 1) * ALIGN
    } else {
        let (octave, step) = ((class - LINEAR) / 4 + LINEAR_LOG, (class - LINEAR) % 4 + 1);
        (1 << octave) + (step << (octave - 2))
    }
}

/// Bytes of a block of `class`.
#[inline]
pub(crate) fn size(class: usize) -> usize {
    SIZES[class] as usize
}

/// The smallest class whose blocks hold `len` bytes, `len` at most [`LARGEST`].
#[inline]
pub(crate) fn class_of(len: usize) -> usize {
    debug_assert!(len <= LARGEST, "{len} bytes are above the largest class");
    let last = len.saturating_sub(1);
    if last < 1 << LINEAR_LOG {
        last / ALIGN
    } else {
        let octave = last.ilog2() as usize;
        LINEAR + (octave - LINEAR_LOG) * 4 + ((last >> (octave - 2)) & 3)
    }
}

/// Blocks that travel together between a thread and the shared list: enough to make the exchange
/// rare, few enough that a thread holds back at most 256 KiB of a class (or two blocks).
pub(crate) const fn batch(class: usize) -> usize {
    if cfg!(loom) {
        return 1;
    }
    let blocks = (256 << 10) / size_of_class(class);
    if blocks > MAX_BATCH {
        MAX_BATCH
    } else if blocks == 0 {
        1
    } else {
        blocks
    }
}

/// The largest [`batch`].
pub(crate) const MAX_BATCH: usize = if cfg!(loom) { 1 } else { 32 };

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The reference that the fast function must equal.
    fn class_of_slow(len: usize) -> usize {
        (0..CLASSES)
            .find(|&class| size(class) >= len)
            .expect("a class that holds the length")
    }

    #[test]
    fn fast_and_slow_agree() {
        for class in 0..CLASSES {
            let size = size(class);
            for len in size.saturating_sub(70)..=(size + 70).min(LARGEST) {
                assert_eq!(class_of(len), class_of_slow(len), "length {len}");
            }
        }
        for len in 0..100_000 {
            assert_eq!(class_of(len), class_of_slow(len), "length {len}");
        }
    }

    #[test]
    fn sizes_grow_in_aligned_steps_to_8_mib() {
        assert_eq!(size(0), 64);
        assert_eq!(LARGEST, 8 << 20);
        for class in 1..CLASSES {
            assert!(size(class) > size(class - 1));
            assert_eq!(size(class) % ALIGN, 0);
        }
    }

    #[test]
    fn waste_is_under_a_fifth() {
        for class in LINEAR..CLASSES {
            let (block, shortest) = (size(class), size(class - 1) + 1);
            assert!((block - shortest) * 5 < block, "class of {block}");
        }
    }

    #[test]
    fn a_thread_holds_back_little() {
        for class in 0..CLASSES {
            assert!((1..=MAX_BATCH).contains(&batch(class)));
            assert!(batch(class) == 1 || batch(class) * size(class) <= 256 << 10);
        }
    }
}
