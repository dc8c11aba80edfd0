//! The calling thread's seats: its shard of each pool it uses.
//!
//! The other corner with `unsafe` in it, for a few nanoseconds: the seats used last are found by
//! plain pointers, with no borrow to count and no destructor to ask for.

#![allow(unsafe_code)]

use std::cell::{Cell, RefCell};
use std::ptr;
use std::sync::Arc;

use crate::engine::Core;
use crate::shard::Shard;

/// A thread's place in a pool; leaving it returns the magazines' blocks to the shared list.
struct Seat {
    core: Arc<Core>,
    shard: Arc<Shard>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        // First of all, so that the pointers are gone before what they point to.
        hot(self.core.id, Hot::clear);
        self.core.leave(&self.shard);
    }
}

#[cfg(not(loom))]
thread_local! {
    static SEATS: RefCell<Vec<Seat>> = const { RefCell::new(Vec::new()) };
    static HOT: [Hot; HOTS] = const { [const { Hot::new() }; HOTS] };
}
#[cfg(loom)]
loom::thread_local! {
    static SEATS: RefCell<Vec<Seat>> = RefCell::new(Vec::new());
    static HOT: [Hot; HOTS] = [const { Hot::new() }; HOTS];
}

/// Pools a thread uses in turn without looking through its seats.
const HOTS: usize = 4;

/// Pointers into one of this thread's [`SEATS`], or the pool number 0, which no pool has.
struct Hot {
    pool: Cell<u64>,
    core: Cell<*const Core>,
    shard: Cell<*const Shard>,
}

impl Hot {
    const fn new() -> Self {
        Self {
            pool: Cell::new(0),
            core: Cell::new(ptr::null()),
            shard: Cell::new(ptr::null()),
        }
    }

    fn set(&self, seat: &Seat) {
        self.pool.set(seat.core.id);
        self.core.set(Arc::as_ptr(&seat.core));
        self.shard.set(Arc::as_ptr(&seat.shard));
    }

    fn clear(&self) {
        self.pool.set(0);
    }
}

/// Visits the place of a pool's pointers. Having no destructor it is there as long as the thread;
/// loom alone takes it away, before or after the seats.
#[inline]
fn hot<R>(id: u64, visit: impl FnOnce(&Hot) -> R) -> Option<R> {
    HOT.try_with(|hot| visit(&hot[id as usize % HOTS])).ok()
}

/// Runs `visit` with the pool numbered `id` and the calling thread's shard of it. `find` gives the
/// pool when the thread has no seat there yet. `None`: the thread is ending, or `find` found
/// nothing.
///
/// The pool has a handle or a live buffer when `visit` begins, and `visit` calls nothing that
/// could give up this thread's seat in it.
#[inline]
pub(crate) fn with<R>(
    id: u64,
    find: impl FnOnce() -> Option<Arc<Core>>,
    visit: impl FnOnce(&Core, &Shard) -> R,
) -> Option<R> {
    let (core, shard) = hot(id, |hot| {
        (hot.pool.get() == id).then(|| (hot.core.get(), hot.shard.get()))
    })
    .flatten()
    .or_else(|| seat(id, find))?;
    // SAFETY: the pointers are of a seat of this thread: `Hot` is set from one and cleared when
    // that one is dropped. The seat stays until `visit` returns: seats are dropped when the thread
    // ends, or by `seat` when their pool is gone; this one's is not when `visit` begins, and
    // `visit` does not come here again.
    let (core, shard) = unsafe { (&*core, &*shard) };
    Some(visit(core, shard))
}

/// Finds the thread's seat, or adds one, and makes it hot. Gives up seats in pools that are gone.
#[cold]
fn seat(id: u64, find: impl FnOnce() -> Option<Arc<Core>>) -> Option<(*const Core, *const Shard)> {
    let place = |seats: &[Seat]| seats.iter().position(|seat| seat.core.id == id);
    let found = SEATS.try_with(|seats| {
        let found = place(&seats.borrow());
        let place = match found {
            Some(place) => place,
            None => {
                let core = find()?;
                let shard = core.join();
                let gone: Vec<Seat> = seats
                    .borrow_mut()
                    .extract_if(.., |seat| seat.core.is_gone())
                    .collect();
                drop(gone);
                let mut seats = seats.borrow_mut();
                seats.push(Seat { core, shard });
                seats.len() - 1
            }
        };
        let seats = seats.borrow();
        let seat = &seats[place];
        hot(id, |hot| hot.set(seat));
        Some((Arc::as_ptr(&seat.core), Arc::as_ptr(&seat.shard)))
    });
    found.ok().flatten()
}
