//! The requests that a queue has outstanding, and the buffers they use. Nothing is allocated after
//! `new`.

use super::WorkKind;
use crate::WcStatus;

// The word of a request, from the lowest bit: whether it is a receive, whether it is the last of its
// chain, whether that chain is a prepared one, the index of its slot or of that chain, and the number
// of the queue pair (from 1, so no word is 0).
pub(super) const RECEIVE: u64 = 1;
pub(super) const LAST: u64 = 1 << 1;
pub(super) const PREPARED: u64 = 1 << 2;
pub(super) const INDEX_SHIFT: u32 = 3;
pub(super) const INDEX_BITS: u32 = 20;
pub(super) const ID_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;

/// What is known of a request, or of a chain of requests, that the device has not finished.
///
/// Apart from its buffer, and each field read with the width it is written with: it is written just
/// before it may be read, and a wide load of narrow stores waits for all of them.
pub(super) struct Outstanding {
    pub(super) kind: WorkKind,
    /// Places it takes in the device's queue.
    pub(super) requests: u32,
    /// Bytes asked for.
    pub(super) len: u32,
    /// Status of the first request of a chain that failed.
    pub(super) error: Option<WcStatus>,
}

pub(super) struct Slots<B> {
    entries: Box<[Outstanding]>,
    /// None for an empty entry, `Some(None)` for inline data.
    buffers: Box<[Option<Option<B>>]>,
    /// Indices of empty entries; the last freed is the first reused.
    free: Vec<u32>,
}

impl<B> Slots<B> {
    pub(super) fn new(count: u32) -> Self {
        let empty = || Outstanding {
            kind: WorkKind::Recv,
            requests: 0,
            len: 0,
            error: None,
        };
        Self {
            entries: (0..count).map(|_| empty()).collect(),
            buffers: (0..count).map(|_| None).collect(),
            free: (0..count).rev().collect(),
        }
    }

    /// The index that the next [`insert`](Self::insert) will use, or `None` if all are in use.
    #[inline]
    pub(super) fn next(&self) -> Option<u32> {
        self.free.last().copied()
    }

    /// Keeps a request and its buffer at the index that [`next`](Self::next) gave.
    #[inline(always)]
    pub(super) fn insert(&mut self, kind: WorkKind, buffer: Option<B>, requests: u32, len: u32) {
        let Some(index) = self.free.pop() else { return };
        let entry = &mut self.entries[index as usize];
        entry.kind = kind;
        entry.requests = requests;
        entry.len = len;
        entry.error = None;
        self.buffers[index as usize] = Some(buffer);
    }

    /// The request at an index that is in use.
    #[inline]
    pub(super) fn get_mut(&mut self, index: u32) -> Option<&mut Outstanding> {
        self.buffers.get(index as usize)?.as_ref()?;
        self.entries.get_mut(index as usize)
    }

    #[inline(always)]
    pub(super) fn remove(&mut self, index: u32) -> Option<(&Outstanding, Option<B>)> {
        let buffer = self.buffers.get_mut(index as usize)?.take()?;
        self.free.push(index);
        Some((self.entries.get(index as usize)?, buffer))
    }

    pub(super) fn capacity(&self) -> usize {
        self.entries.len()
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len() - self.free.len()
    }
}
