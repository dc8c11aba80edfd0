//! The key table: what each lkey and rkey names.
//!
//! An *indirect* key is one whose users' addresses are not those of the memory, or whose memory may be
//! missing when it is used. It has a bit that leads out of the table, so the straight ways do not find it
//! and pay nothing for there being such keys. The general ways translate addresses: those of a list when
//! it is posted, those of a peer's memory when they are checked. From there on they are memory's own.

use std::sync::atomic::{AtomicU64, Ordering, fence};

use rustix::io::Errno;

use super::index::IndexPool;
use super::layout::{KeyEntry, MAX_KEYS};
use super::nothing::Nothing;
use crate::ffi::{IBV_ACCESS_ON_DEMAND, IBV_WC_REM_ACCESS_ERR, ibv_sge, ibv_wc_status};

/// Slots freed before one is used again: with eight tag bits in a key, a slot used too soon would
/// give an old key a new meaning.
const RECYCLE_AFTER: usize = 4096;

/// Set in [`Range::pd`] of a window of type 1, beside its protection domain. Such a number equals no
/// domain's, so that a window's key is no lkey, and regions pay nothing for there being windows.
const WINDOW_IN_PD: u32 = 1 << 30;
/// Set in [`Range::pd`] of a window of type 2, beside the queue pair that it is bound to, which was
/// of its domain when it was bound.
const WINDOW_OF_QP: u32 = 1 << 31;

/// Set in indirect keys, beyond the numbers of slots.
const INDIRECT: u32 = 1 << 31;
const _: () = assert!((MAX_KEYS << 8) <= INDIRECT as usize);

/// Beside the rights of a region that takes everything and has nothing, see [`Nothing`].
pub(super) const IS_NOTHING: u32 = 1 << 23;

/// What a key shall name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Range {
    pub access: u32,
    /// The protection domain, or what a window has in its place.
    pub pd: u32,
    pub arena: u32,
    pub addr: u64,
    pub len: u64,
    pub offset: u64,
    /// Of an indirect key: the address that its users have for `addr`.
    pub iova: Option<u64>,
}

/// What stands for the protection domain of a window that every queue pair of a domain serves.
pub(super) fn window_in_pd(pd: u32) -> u32 {
    WINDOW_IN_PD | pd
}

/// What stands for the protection domain of a window that one queue pair serves.
pub(super) fn window_of_qp(qpn: u32) -> u32 {
    WINDOW_OF_QP | qpn
}

/// A live key, whose fields do not change under the epoch that it was looked up in. They are read when they
/// are asked for: most accesses want few of them.
#[derive(Clone, Copy)]
pub(super) struct Live<'a> {
    entry: &'a KeyEntry,
    word: u64,
}

/// Looks up a key.
///
/// The caller holds an epoch lock of a queue pair that the owner's revocation waits for.
#[inline(always)]
pub(super) fn lookup(keys: &[KeyEntry; MAX_KEYS], key: u32) -> Option<Live<'_>> {
    let entry = keys.get((key >> 8) as usize)?;
    let word = entry.live.load(Ordering::SeqCst);
    let is_live = word as u32 == key && key != 0;
    is_live.then_some(Live { entry, word })
}

/// As [`lookup`], in the general ways: finds indirect keys, too.
#[inline(always)]
pub(super) fn find(keys: &[KeyEntry; MAX_KEYS], key: u32) -> Option<Live<'_>> {
    let entry = keys.get(slot(key) as usize)?;
    let word = entry.live.load(Ordering::SeqCst);
    let is_live = word as u32 == key && key != 0;
    is_live.then_some(Live { entry, word })
}

/// The live key of a slot.
#[cfg(any(feature = "drop-in", test))]
pub(super) fn in_slot(keys: &[KeyEntry; MAX_KEYS], slot: u32) -> Option<(u32, Live<'_>)> {
    let key = keys.get(slot as usize)?.live.load(Ordering::SeqCst) as u32;
    Some((key, find(keys, key)?))
}

/// Whether addresses that come with the key have to be translated.
#[inline(always)]
pub(super) fn is_indirect(key: u32) -> bool {
    key & INDIRECT != 0
}

/// The slot of a key.
#[inline(always)]
pub(super) fn slot(key: u32) -> u32 {
    (key & !INDIRECT) >> 8
}

/// The address in memory for one that was given with an indirect key. A key that names nothing gives
/// the same address: it will be found out when it is used.
pub(super) fn translate(keys: &[KeyEntry; MAX_KEYS], key: u32, addr: u64) -> u64 {
    find(keys, key).map_or(addr, |live| live.translate(addr))
}

/// An element of a list as it is posted, and written to if it `is_target`. The list's lock is held.
#[inline(always)]
pub(super) fn posted(keys: &[KeyEntry; MAX_KEYS], sge: ibv_sge, is_target: bool) -> ibv_sge {
    if is_indirect(sge.lkey) {
        translated(keys, sge, is_target)
    } else {
        sge
    }
}

#[cold]
fn translated(keys: &[KeyEntry; MAX_KEYS], mut sge: ibv_sge, is_target: bool) -> ibv_sge {
    if let Some(live) = find(keys, sge.lkey) {
        sge.addr = if live.access() & IS_NOTHING == 0 {
            live.translate(sge.addr)
        } else {
            // Any address will do.
            let start = live.range().0;
            if is_target {
                start + Nothing::HALF
            } else {
                start
            }
        };
    }
    sge
}

impl<'a> Live<'a> {
    pub(super) fn entry(self) -> &'a KeyEntry {
        self.entry
    }

    /// What [`KeyEntry::live`] is for as long as the key, with its fields, holds.
    pub(super) fn word(self) -> u64 {
        self.word
    }

    /// The address in memory for one that was given with this indirect key.
    pub(super) fn translate(self, addr: u64) -> u64 {
        let offset = addr.wrapping_sub(self.entry.iova.load(Ordering::Relaxed));
        offset.wrapping_add(self.entry.addr.load(Ordering::Relaxed))
    }

    /// Whether the memory may be missing.
    #[inline(always)]
    pub(super) fn is_on_demand(self) -> bool {
        self.access() & IBV_ACCESS_ON_DEMAND != 0
    }

    /// Where the range begins, and its bytes.
    #[inline(always)]
    pub(super) fn range(self) -> (u64, u64) {
        let (addr, len) = (&self.entry.addr, &self.entry.len);
        (addr.load(Ordering::Relaxed), len.load(Ordering::Relaxed))
    }

    /// The rights that it gives.
    #[inline(always)]
    pub(super) fn access(self) -> u32 {
        self.entry.access.load(Ordering::Relaxed)
    }

    /// Whether it is of this protection domain, and a region's.
    #[inline(always)]
    pub(super) fn is_of(self, pd: u32) -> bool {
        self.entry.pd.load(Ordering::Relaxed) == pd
    }

    /// Whether it serves the queue pair `qpn` of this protection domain.
    #[inline(always)]
    pub(super) fn serves(self, pd: u32, qpn: u32) -> bool {
        let named = self.entry.pd.load(Ordering::Relaxed);
        named == pd || is_window_for(named, pd, qpn)
    }

    /// The number of the arena that the range lies in, or 0.
    #[inline(always)]
    pub(super) fn arena(self) -> u32 {
        self.entry.arena.load(Ordering::Relaxed)
    }

    /// Where the range begins in its arena.
    #[inline(always)]
    pub(super) fn offset(self) -> u64 {
        self.entry.offset.load(Ordering::Relaxed)
    }

    /// Checks an access of local work; `failed` is the status it ends with. Gives the offset in the range.
    #[inline(always)]
    pub(super) fn check(
        self,
        pd: u32,
        addr: u64,
        len: usize,
        access: u32,
        failed: ibv_wc_status,
    ) -> Result<u64, ibv_wc_status> {
        let offset = self.grants(addr, len, access).ok_or(failed)?;
        self.is_of(pd).then_some(offset).ok_or(failed)
    }

    /// Checks an access that comes through the queue pair `qpn`, of the domain `pd`.
    #[inline(always)]
    pub(super) fn check_remote(
        self,
        (pd, qpn): (u32, u32),
        addr: u64,
        len: usize,
        access: u32,
    ) -> Result<u64, ibv_wc_status> {
        let offset = self
            .grants(addr, len, access)
            .ok_or(IBV_WC_REM_ACCESS_ERR)?;
        let granted = self.serves(pd, qpn).then_some(offset);
        granted.ok_or(IBV_WC_REM_ACCESS_ERR)
    }

    /// The offset of bytes that lie in the range, if the key gives these rights.
    #[inline(always)]
    fn grants(self, addr: u64, len: usize, access: u32) -> Option<u64> {
        offset_in(self.range(), self.access(), addr, len, access)
    }
}

/// The offset of bytes that lie in a range of so many bytes from an address on, if the rights that are given
/// have these among them.
#[inline(always)]
pub(super) fn offset_in(
    (start, size): (u64, u64),
    given: u32,
    addr: u64,
    len: usize,
    access: u32,
) -> Option<u64> {
    let offset = addr.wrapping_sub(start);
    let fits = offset <= size && len as u64 <= size - offset;
    let granted = given & access == access;
    (fits && granted).then_some(offset)
}

/// What [`KeyEntry::live`] is with this key in its low half.
fn same_generation(live: &AtomicU64, key: u32) -> u64 {
    live.load(Ordering::Relaxed) & !u64::from(u32::MAX) | u64::from(key)
}

#[cold]
fn is_window_for(named: u32, pd: u32, qpn: u32) -> bool {
    named == window_in_pd(pd) || named == window_of_qp(qpn)
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
        let mut key = self.reserve(keys)?;
        if range.iova.is_some() {
            key |= INDIRECT;
        }
        self.publish_as(keys, key, range);
        Ok(key)
    }

    /// Takes a key that names nothing yet.
    pub(super) fn reserve(&self, keys: &[KeyEntry; MAX_KEYS]) -> Result<u32, Errno> {
        let index = self.slots.take().ok_or(Errno::NOMEM)?;
        let access = &keys[index as usize].access;
        // The tag of the last key of this slot is kept where peers do not look.
        let tag = (access.load(Ordering::Relaxed) >> 24).wrapping_add(1) & 0xff;
        access.store(tag << 24, Ordering::Relaxed);
        Ok(index << 8 | tag)
    }

    /// Publishes a range under a key whose slot the caller has, and that no operation in flight has
    /// seen under another key.
    pub(super) fn publish_as(&self, keys: &[KeyEntry; MAX_KEYS], key: u32, range: Range) {
        let entry = &keys[slot(key) as usize];
        entry
            .access
            .store(range.access & 0xff_ffff | key << 24, Ordering::Relaxed);
        entry.pd.store(range.pd, Ordering::Relaxed);
        entry.arena.store(range.arena, Ordering::Relaxed);
        entry.addr.store(range.addr, Ordering::Relaxed);
        entry.len.store(range.len, Ordering::Relaxed);
        entry.offset.store(range.offset, Ordering::Relaxed);
        let iova = range.iova.unwrap_or(range.addr);
        entry.iova.store(iova, Ordering::Relaxed);
        let before = entry.live.load(Ordering::Relaxed) >> 32;
        let generation = before.wrapping_add(1) << 32;
        entry
            .live
            .store(generation | u64::from(key), Ordering::Release);
    }

    /// Withdraws a key. The caller then waits for the operations in flight, and only afterwards
    /// calls [`recycle`](Self::recycle).
    pub(super) fn revoke(&self, keys: &[KeyEntry; MAX_KEYS], key: u32) {
        let live = &keys[slot(key) as usize].live;
        live.store(same_generation(live, 0), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// Takes a revocation back: the fields are still those of the key.
    pub(super) fn restore(&self, keys: &[KeyEntry; MAX_KEYS], key: u32) {
        let live = &keys[slot(key) as usize].live;
        live.store(same_generation(live, key), Ordering::Release);
    }

    /// Lets the slot of a revoked key be used again.
    pub(super) fn recycle(&self, key: u32) {
        self.slots.give(slot(key));
    }
}
