//! Arenas: memory that the device hands out and peers can map.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::io::Errno;

use super::layout::{Info, MAX_ARENAS};
use super::segment::{self, HUGE_PAGE, Mapping};

/// One sealed memory file and its mapping here.
#[derive(Debug)]
pub(super) struct Arena {
    pub id: u32,
    pub file: OwnedFd,
    pub mapping: Mapping,
}

/// The live arenas of this process, by start address.
#[derive(Debug, Default)]
pub(super) struct Arenas {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    by_start: BTreeMap<u64, Arc<Arena>>,
    last_id: u32,
}

impl Arenas {
    /// New zeroed memory of at least `len` bytes.
    pub(super) fn alloc(&self, info: &Info, len: usize) -> Result<*mut u8, Errno> {
        if len == 0 {
            return Err(Errno::INVAL);
        }
        let align = if len >= HUGE_PAGE {
            HUGE_PAGE
        } else {
            rustix::param::page_size()
        };
        let len = len.checked_next_multiple_of(align).ok_or(Errno::NOMEM)?;
        let file = segment::create("verbs-soft0-memory", len)?;
        let mapping = Mapping::dense(file.as_fd(), len)?;
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // The table of live numbers is direct-mapped: take the next number whose place is free.
        let id = (1..=MAX_ARENAS as u32)
            .map(|step| state.last_id.wrapping_add(step))
            .find(|&id| id != 0 && place(info, id).load(Ordering::Relaxed) == 0)
            .ok_or(Errno::NOMEM)?;
        state.last_id = id;
        place(info, id).store(id, Ordering::Release);
        let start = mapping.as_ptr();
        state
            .by_start
            .insert(start as u64, Arc::new(Arena { id, file, mapping }));
        Ok(start)
    }

    /// Takes the arena at `start` out of use. Peers drop their mappings when they next look.
    pub(super) fn free(&self, info: &Info, start: u64) -> Result<(), Errno> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let arena = state.by_start.remove(&start).ok_or(Errno::INVAL)?;
        place(info, arena.id).store(0, Ordering::Release);
        Ok(())
    }

    /// The arena that wholly contains a range.
    pub(super) fn containing(&self, addr: u64, len: usize) -> Option<Arc<Arena>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (start, arena) = state.by_start.range(..=addr).next_back()?;
        let offset = (addr - start) as usize;
        let room = arena.mapping.len().checked_sub(offset)?;
        (len <= room).then(|| Arc::clone(arena))
    }

    /// The arena of a number, for the peer that asks for it.
    pub(super) fn by_id(&self, id: u32) -> Option<Arc<Arena>> {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state
            .by_start
            .values()
            .find(|arena| arena.id == id)
            .map(Arc::clone)
    }
}

fn place(info: &Info, id: u32) -> &std::sync::atomic::AtomicU32 {
    &info.arenas[id as usize % MAX_ARENAS]
}

/// Whether the owner still has the arena.
pub(super) fn is_live(info: &Info, id: u32) -> bool {
    place(info, id).load(Ordering::Acquire) == id
}
