//! What was looked up last for a key of either side, so that the next request with the same key need not.
//!
//! It holds for as long as the key does, which one word tells: a key that was taken away and given again has another
//! generation in it. The mapping of a peer's memory that it leads to may be taken away for other reasons, so
//! those who do so have everything looked up anew (`fencing.rs`).

use std::ptr;
use std::sync::atomic::Ordering;

use super::super::Qp;
use crate::soft::fencing;
use crate::soft::keys::{self, Live};
use crate::soft::layout::{KeyEntry, Target};
use crate::soft::link::{Link, Via};

/// A range that a key names.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    /// The key's entry, and what its `live` is while the key holds.
    entry: *const KeyEntry,
    live: u64,
    access: u32,
    /// The process whose address space it is in, if it cannot be mapped.
    pid: i32,
    /// Where it starts, and its bytes.
    range: (u64, u64),
    /// Where its start is mapped here, or null.
    base: *mut u8,
}

/// Beside the rights of a range that is mapped here; a right that there is not.
const MAPPED: u32 = 1 << 31;

/// The entry of no key: it holds, as nobody takes it away, for a range of no bytes.
static NOBODYS: KeyEntry = KeyEntry::new(0);

impl Known {
    const NOTHING: Self = Self {
        entry: &raw const NOBODYS,
        live: 0,
        access: 0,
        pid: 0,
        range: (0, 0),
        base: ptr::null_mut(),
    };

    /// The range is told apart from the key: what a peer says of it is read once, as it could say something
    /// else the second time.
    fn new(live: Live<'_>, range: (u64, u64), base: *mut u8, pid: i32) -> Self {
        let mapped = if base.is_null() { 0 } else { MAPPED };
        Self {
            entry: live.entry(),
            live: live.word(),
            access: live.access() & !MAPPED | mapped,
            pid,
            range,
            base,
        }
    }

    /// Whether it is this key's, and the key still holds.
    #[inline(always)]
    fn is_of(&self, key: u32) -> bool {
        self.was_of(key) && self.holds()
    }

    /// Whether it is this key's, if it holds.
    #[inline(always)]
    fn was_of(&self, key: u32) -> bool {
        self.live as u32 == key
    }

    #[inline(always)]
    fn holds(&self) -> bool {
        // SAFETY: of our own process, or of the peer's mapping that the link keeps: it is forgotten first.
        let entry = unsafe { &*self.entry };
        entry.live.load(Ordering::SeqCst) == self.live
    }

    /// The offset of these bytes, if they lie in the range and the key gives the right.
    #[inline(always)]
    pub(super) fn offset(&self, addr: u64, len: usize, access: u32) -> Option<u64> {
        keys::offset_in(self.range, self.access, addr, len, access)
    }

    /// Where these bytes are mapped here, if they are, lie in the range, and the key gives the right.
    #[inline(always)]
    pub(super) fn place(&self, addr: u64, len: usize, access: u32) -> Option<*mut u8> {
        let offset = self.offset(addr, len, access | MAPPED)?;
        Some(self.base.wrapping_add(offset as usize))
    }

    /// Where bytes at an offset are mapped here, if they are.
    #[inline(always)]
    pub(super) fn at(&self, offset: u64) -> Option<*mut u8> {
        (!self.base.is_null()).then(|| self.base.wrapping_add(offset as usize))
    }

    /// The process whose own they are, if it may be reached.
    pub(super) fn pid(&self) -> Option<i32> {
        (self.pid != 0).then_some(self.pid)
    }
}

/// A range of either side; guarded by the send lock.
#[derive(Debug)]
pub(in crate::soft::qp) struct Ranges {
    local: Known,
    remote: Known,
    /// What [`fencing`] says of the mappings since when this holds.
    pub(in crate::soft::qp) mappings: u32,
}

impl Default for Ranges {
    fn default() -> Self {
        Self {
            local: Known::NOTHING,
            remote: Known::NOTHING,
            mappings: 0,
        }
    }
}

impl Ranges {
    /// The connection is another one.
    pub(in crate::soft::qp) fn forget_peer(&mut self) {
        self.remote = Known::NOTHING;
    }

    /// Forgets what may have been unmapped since it was looked up. `word` is what the process says of fences
    /// and mappings.
    #[inline]
    pub(in crate::soft::qp) fn renew(&mut self, word: u32) {
        let mappings = fencing::mappings(word);
        if mappings != self.mappings {
            self.forget_peer();
            self.mappings = mappings;
        }
    }

    /// Whether everything holds. It does so until the send lock is let go: whoever takes a key away waits for that.
    #[inline(always)]
    pub(super) fn is_confirmed(&self) -> bool {
        self.local.holds() && self.remote.holds()
    }

    /// Forgets what does not hold any more.
    pub(super) fn forget_lost(&mut self) {
        for known in [&mut self.local, &mut self.remote] {
            if !known.holds() {
                *known = Known::NOTHING;
            }
        }
    }

    /// What a key of ours names. It is looked up if it is another than the last, unless `CONFIRMED`.
    #[inline(always)]
    pub(super) fn local<const CONFIRMED: bool>(&mut self, qp: &Qp, lkey: u32) -> Option<&Known> {
        if CONFIRMED {
            return self.local.was_of(lkey).then_some(&self.local);
        }
        if !self.local.is_of(lkey) {
            self.local = known_here(qp, lkey)?;
        }
        Some(&self.local)
    }

    /// What a key of the peer's names, in the same way.
    #[inline(always)]
    pub(super) fn remote<const CONFIRMED: bool>(
        &mut self,
        link: &Link,
        target: Target,
        rkey: u32,
    ) -> Option<&Known> {
        if CONFIRMED {
            return self.remote.was_of(rkey).then_some(&self.remote);
        }
        if !self.remote.is_of(rkey) {
            self.remote = known_there(link, target, rkey)?;
        }
        Some(&self.remote)
    }
}

#[cold]
#[inline(never)]
fn known_here(qp: &Qp, lkey: u32) -> Option<Known> {
    let live = keys::lookup(&qp.process.info().keys, lkey)?;
    let range = live.range();
    let base = range.0 as usize as *mut u8;
    live.is_of(qp.pd).then(|| Known::new(live, range, base, 0))
}

#[cold]
#[inline(never)]
fn known_there(link: &Link, target: Target, rkey: u32) -> Option<Known> {
    let live = keys::lookup(link.keys(), rkey)?;
    if !live.serves(target.pd(), link.dest_qpn) {
        return None;
    }
    let range = live.range();
    let (base, pid) = match &link.via {
        Via::Local => (range.0 as usize as *mut u8, 0),
        Via::Shm(peer) if live.arena() != 0 => {
            let len = usize::try_from(range.1).unwrap_or(usize::MAX);
            (peer.mapped(live.arena(), live.offset(), len)?, 0)
        }
        Via::Shm(peer) => {
            let pid = peer.pid.filter(|_| peer.cma)?;
            (ptr::null_mut(), pid.as_raw_nonzero().get())
        }
        Via::Remote | Via::Nobody => return None,
    };
    Some(Known::new(live, range, base, pid))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::soft::layout::MAX_KEYS;

    fn table() -> Vec<KeyEntry> {
        (0..MAX_KEYS).map(|_| KeyEntry::new(0)).collect()
    }

    /// A peer's own table is its own to write, whenever it likes.
    #[test]
    fn a_range_is_no_longer_than_what_was_mapped_for_it() {
        let keys = table();
        let keys: &[KeyEntry; MAX_KEYS] = keys[..].try_into().unwrap();
        let (key, entry) = (1 << 8, &keys[1]);
        entry.addr.store(0x1000, Ordering::Relaxed);
        entry.len.store(64, Ordering::Relaxed);
        entry.live.store(key.into(), Ordering::Release);
        let live = keys::lookup(keys, key).unwrap();
        let range = live.range();
        entry.len.store(u64::MAX, Ordering::Relaxed);
        let known = Known::new(live, range, ptr::null_mut(), 0);
        assert_eq!(known.offset(0x1030, 16, 0), Some(0x30));
        assert_eq!(known.offset(0x1030, 17, 0), None);
        assert_eq!(known.offset(0xfff, 1, 0), None);
    }

    #[test]
    fn a_key_that_was_given_again_is_another() {
        let keys = table();
        let keys: &[KeyEntry; MAX_KEYS] = keys[..].try_into().unwrap();
        let allocator = keys::Allocator::new();
        let range = |addr| keys::Range {
            access: 0,
            pd: 1,
            arena: 0,
            addr,
            len: 64,
            offset: 0,
            iova: None,
        };
        let key = allocator.publish(keys, range(0x1000)).unwrap();
        let live = keys::lookup(keys, key).unwrap();
        let known = Known::new(live, live.range(), ptr::null_mut(), 0);
        assert!(known.is_of(key));
        assert!(!known.is_of(key + 1));
        allocator.revoke(keys, key);
        assert!(!known.is_of(key), "taken away");
        allocator.restore(keys, key);
        assert!(known.is_of(key), "taken back: nothing has changed");
        allocator.revoke(keys, key);
        allocator.publish_as(keys, key, range(0x2000));
        assert!(!known.is_of(key), "given again");
        assert!(!Known::NOTHING.is_of(u32::MAX));
        assert!(Known::NOTHING.holds() && Known::NOTHING.place(0, 1, 0).is_none());
    }
}
