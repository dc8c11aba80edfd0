//! The key table: what each lkey and rkey names.

use std::sync::atomic::{Ordering, fence};

use rustix::io::Errno;

use super::index::IndexPool;
use super::layout::{KeyEntry, MAX_KEYS};
use crate::ffi::ibv_wc_status;

/// Slots freed before one is used again: with eight tag bits in a key, a slot used too soon would
/// give an old key a new meaning.
const RECYCLE_AFTER: usize = 4096;

/// What a key names, read under an epoch.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub access: u32,
    pub pd: u32,
    pub arena: u32,
    pub addr: u64,
    pub len: u64,
    pub offset: u64,
}

/// A range looked up by key.
///
/// The caller holds an epoch lock of a queue pair that the owner's revocation waits for.
#[inline]
pub(super) fn lookup(keys: &[KeyEntry; MAX_KEYS], key: u32) -> Option<Range> {
    let entry = keys.get((key >> 8) as usize)?;
    if key == 0 || entry.live.load(Ordering::SeqCst) != key {
        return None;
    }
    Some(Range {
        access: entry.access.load(Ordering::Relaxed),
        pd: entry.pd.load(Ordering::Relaxed),
        arena: entry.arena.load(Ordering::Relaxed),
        addr: entry.addr.load(Ordering::Relaxed),
        len: entry.len.load(Ordering::Relaxed),
        offset: entry.offset.load(Ordering::Relaxed),
    })
}

impl Range {
    /// Checks one access against the range; `failed` is the status it ends with.
    #[inline]
    pub(super) fn check(
        &self,
        pd: u32,
        addr: u64,
        len: usize,
        access: u32,
        failed: ibv_wc_status,
    ) -> Result<u64, ibv_wc_status> {
        let offset = addr.wrapping_sub(self.addr);
        let fits = offset <= self.len && len as u64 <= self.len - offset;
        if fits && self.pd == pd && self.access & access == access {
            Ok(offset)
        } else {
            Err(failed)
        }
    }
}

/// The owner's side of the table.
#[derive(Debug)]
pub(super) struct Allocator {
    slots: IndexPool,
}

impl Allocator {
    pub(super) fn new() -> Self {
        // Key 0 stays invalid, as applications expect.
        Self {
            slots: IndexPool::new(1, MAX_KEYS, RECYCLE_AFTER),
        }
    }

    /// Publishes a range and returns its key.
    pub(super) fn publish(&self, keys: &[KeyEntry; MAX_KEYS], range: Range) -> Result<u32, Errno> {
        let index = self.slots.take().ok_or(Errno::NOMEM)?;
        let entry = &keys[index as usize];
        // The tag of the last key of this slot is kept where peers do not look.
        let tag = (entry.access.load(Ordering::Relaxed) >> 24).wrapping_add(1) & 0xff;
        let key = index << 8 | tag;
        entry
            .access
            .store(range.access & 0xff_ffff | tag << 24, Ordering::Relaxed);
        entry.pd.store(range.pd, Ordering::Relaxed);
        entry.arena.store(range.arena, Ordering::Relaxed);
        entry.addr.store(range.addr, Ordering::Relaxed);
        entry.len.store(range.len, Ordering::Relaxed);
        entry.offset.store(range.offset, Ordering::Relaxed);
        entry.live.store(key, Ordering::Release);
        Ok(key)
    }

    /// Withdraws a key. The caller then waits for the operations in flight, and only afterwards
    /// calls [`recycle`](Self::recycle).
    pub(super) fn revoke(&self, keys: &[KeyEntry; MAX_KEYS], key: u32) {
        keys[(key >> 8) as usize].live.store(0, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Lets the slot of a revoked key be used again.
    pub(super) fn recycle(&self, key: u32) {
        self.slots.give(key >> 8);
    }
}
