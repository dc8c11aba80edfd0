//! A steady state allocates nothing and registers nothing.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::mpsc;
use std::thread;

use super::fake::Fake;
use super::{ROOMY, pool};
use crate::class::MAX_BATCH;

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[allow(unsafe_code)]
// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(ptr, layout) }
    }
}

fn allocations(run: impl FnOnce()) -> u64 {
    let before = ALLOCATIONS.get();
    run();
    ALLOCATIONS.get() - before
}

#[test]
fn one_thread() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    let mut held = Vec::with_capacity(200);
    let mut turn = |len| {
        for count in [1, 7, 100, 200] {
            held.extend((0..count).map(|_| pool.take(len).unwrap()));
            held.clear();
        }
    };
    let lens = [0, 64, 128, 1000, 4096, 50 << 10, 1 << 20];
    lens.into_iter().for_each(&mut turn);
    let (before, made) = (pool.stats(), fake.book().made);

    let counted = allocations(|| {
        for _ in 0..100 {
            lens.into_iter().for_each(&mut turn);
        }
    });
    assert_eq!(counted, 0);
    let after = pool.stats();
    assert_eq!(fake.book().made, made);
    assert_eq!(after.registrations, before.registrations);
    assert_eq!(after.misses(), before.misses());
    assert_eq!(after.hits() - before.hits(), 100 * 308 * lens.len() as u64);
}

/// One thread takes, another drops: blocks travel in batches and come back.
#[test]
fn across_threads() {
    const ON_THE_WAY: usize = 64;
    let pool = pool(&Fake::new(), ROOMY);
    // As many blocks as can be out of the taker's reach at once, however the threads are
    // scheduled: on the way, in either hand, in the other's magazine. And a batch to take from.
    let most = ON_THE_WAY + 2 + 2 * MAX_BATCH + MAX_BATCH;
    let held: Vec<_> = (0..most).map(|_| pool.take(128).unwrap()).collect();
    drop(held);

    let (to, from) = mpsc::sync_channel(ON_THE_WAY);
    thread::scope(|scope| {
        let consumer = scope.spawn(move || {
            let mut counted = 0;
            for (turn, buffer) in from.into_iter().enumerate() {
                let drops = allocations(|| drop::<crate::Buffer>(buffer));
                counted += if turn < 5000 { 0 } else { drops };
            }
            counted
        });
        let mut counted = 0;
        for turn in 0..50_000 {
            let mut taken = None;
            let takes = allocations(|| taken = Some(pool.take(128).unwrap()));
            counted += if turn < 5000 { 0 } else { takes };
            to.send(taken.unwrap()).unwrap();
        }
        drop(to);
        assert_eq!((counted, consumer.join().unwrap()), (0, 0));
    });
    let stats = pool.stats();
    assert_eq!((stats.registrations, stats.live_buffers), (1, 0));
}
