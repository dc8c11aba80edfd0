//! A table that grows and never moves: readers index it without a lock while it grows.

use std::sync::OnceLock;

/// Elements of the first segment; each further one is twice as long.
const FIRST: usize = if cfg!(loom) { 2 } else { 64 };
/// Segments: the last index is above 2^32 in the real thing.
const SEGMENTS: usize = 27;

/// Elements are made by `Default` and live as long as the table.
#[derive(Debug)]
pub(crate) struct Segmented<T> {
    segments: [OnceLock<Box<[T]>>; SEGMENTS],
}

impl<T: Default> Segmented<T> {
    pub(crate) fn new() -> Self {
        Self {
            segments: [const { OnceLock::new() }; SEGMENTS],
        }
    }

    /// The element at `index`; its segment is made on first use.
    #[inline]
    pub(crate) fn get(&self, index: u32) -> &T {
        let (segment, offset) = locate(index);
        let made = || (0..FIRST << segment).map(|_| T::default()).collect();
        &self.segments[segment].get_or_init(made)[offset]
    }
}

#[inline]
fn locate(index: u32) -> (usize, usize) {
    let shifted = index as usize + FIRST;
    let segment = (shifted / FIRST).ilog2() as usize;
    (segment, shifted - (FIRST << segment))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_index_has_its_own_place() {
        assert_eq!(locate(0), (0, 0));
        assert_eq!(locate(63), (0, 63));
        assert_eq!(locate(64), (1, 0));
        assert_eq!(locate(191), (1, 127));
        assert_eq!(locate(192), (2, 0));
        let last = locate(u32::MAX);
        assert!(last.0 < SEGMENTS && last.1 < FIRST << last.0);
    }

    #[test]
    fn elements_stay_where_they_are() {
        let table = Segmented::<std::sync::atomic::AtomicU32>::new();
        let fifth: *const _ = table.get(5);
        table.get(10_000);
        assert!(std::ptr::eq(fifth, table.get(5)));
    }
}
