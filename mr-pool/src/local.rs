//! The calling thread's seats: its shard of each pool it uses.

use std::cell::RefCell;
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
        self.core.leave(&self.shard);
    }
}

#[cfg(not(loom))]
thread_local! {
    static SEATS: RefCell<Vec<Seat>> = const { RefCell::new(Vec::new()) };
}
#[cfg(loom)]
loom::thread_local! {
    static SEATS: RefCell<Vec<Seat>> = RefCell::new(Vec::new());
}

/// Runs `visit` with the pool numbered `id` and the calling thread's shard of it. `find` gives the
/// pool when the thread has no seat there yet. `None`: the thread is ending, or `find` found
/// nothing.
#[inline]
pub(crate) fn with<R>(
    id: u64,
    find: impl FnOnce() -> Option<Arc<Core>>,
    visit: impl FnOnce(&Core, &Shard) -> R,
) -> Option<R> {
    SEATS
        .try_with(|seats| {
            if let Some(seat) = seats.borrow().iter().find(|seat| seat.core.id == id) {
                return Some(visit(&seat.core, &seat.shard));
            }
            sit_down(seats, find()?);
            let seats = seats.borrow();
            seats.last().map(|seat| visit(&seat.core, &seat.shard))
        })
        .ok()
        .flatten()
}

/// Adds a seat, and gives up those in pools that are gone.
#[cold]
fn sit_down(seats: &RefCell<Vec<Seat>>, core: Arc<Core>) {
    let shard = core.join();
    let mut seats = seats.borrow_mut();
    seats.retain(|seat| !seat.core.is_gone());
    seats.push(Seat { core, shard });
}
