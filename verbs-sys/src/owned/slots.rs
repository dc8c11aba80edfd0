//! The requests that a queue has outstanding, and the buffers they use. Nothing is allocated after
//! `new`.

use super::WorkKind;
use crate::WcStatus;

// The word of a request, from the lowest bit: whether it is a receive, whether it is the last of its
// chain, the index of its slot, and the number of the queue pair (from 1, so no word is 0).
pub(super) const RECEIVE: u64 = 1;
pub(super) const LAST: u64 = 1 << 1;
pub(super) const INDEX_SHIFT: u32 = 2;
pub(super) const INDEX_BITS: u32 = 20;
pub(super) const ID_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;

/// A request, or a chain of requests, that the device has not finished.
pub(super) struct Outstanding<B> {
    pub(super) kind: WorkKind,
    /// None for inline data.
    pub(super) buffer: Option<B>,
    /// Places it takes in the device's queue.
    pub(super) requests: u32,
    /// Bytes asked for.
    pub(super) len: u32,
    /// Status of the first request of a chain that failed.
    pub(super) error: Option<WcStatus>,
}

pub(super) struct Slots<B> {
    entries: Box<[Option<Outstanding<B>>]>,
    /// Indices of empty entries; the last freed is the first reused.
    free: Vec<u32>,
}

impl<B> Slots<B> {
    pub(super) fn new(count: u32) -> Self {
        Self {
            entries: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
        }
    }

    /// The index that the next [`insert`](Self::insert) will use, or `None` if all are in use.
    #[inline]
    pub(super) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Keeps `outstanding` at the index that [`next`](Self::next) gave.
    #[inline]
    pub(super) fn insert(&mut self, outstanding: Outstanding<B>) {
        if let Some(index) = self.free.pop() {
            self.entries[index as usize] = Some(outstanding);
        }
    }

    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Outstanding<B>> {
        self.entries.get_mut(index as usize)?.as_mut()
    }

    #[inline]
    pub(super) fn remove(&mut self, index: u32) -> Option<Outstanding<B>> {
        let outstanding = self.entries.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some(outstanding)
    }

    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}
