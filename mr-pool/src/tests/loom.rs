//! Every interleaving of small scenes: `RUSTFLAGS="--cfg loom" cargo test -p mr-pool --release
//! --lib`. Under loom a page holds two blocks of 64 bytes or one of 128, there are only these two
//! classes, and a magazine holds two blocks, so that the slow paths are near.

use std::sync::Mutex as StdMutex;

use loom::model::Builder;
use loom::sync::Arc;
use loom::thread;

use super::fake::Fake;
use super::{FOREVER, ROOMY, pool};
use crate::Pool;
use crate::engine::Limits;
use crate::free_list::{Block, FreeLists};
use crate::space::PAGE;

/// Explores with at most this many involuntary switches of threads.
fn explore(preemptions: usize, scene: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scene);
}

/// One page in all, so that everyone waits for everyone.
const TIGHT: Limits = Limits {
    ceiling: PAGE,
    region_size: PAGE,
    wait: Some(FOREVER),
    ..ROOMY
};

#[test]
fn free_lists_lose_and_double_nothing() {
    explore(3, || {
        let lists = Arc::new(FreeLists::new());
        for place in 0..2 {
            lists.push(0, std::iter::once(Block::new(0, 0, place)));
        }
        let seen = std::sync::Arc::new(StdMutex::new(0));
        let threads: Vec<_> = (0..2)
            .map(|_| {
                let (lists, seen) = (Arc::clone(&lists), std::sync::Arc::clone(&seen));
                thread::spawn(move || {
                    // Out, in and out again: the second removal meets a node that has been reused.
                    let mut held = Vec::new();
                    lists.pop(0, |_, block| held.push(block));
                    if let Some(block) = held.pop() {
                        lists.push(0, std::iter::once(block));
                        lists.pop(0, |_, block| held.push(block));
                    }
                    for block in held {
                        let mut seen = seen.lock().unwrap();
                        assert_eq!(*seen & 1 << block.place(), 0, "doubled");
                        *seen |= 1 << block.place();
                    }
                })
            })
            .collect();
        for thread in threads {
            thread.join().unwrap();
        }
        let mut seen = seen.lock().unwrap();
        while lists.pop(0, |_, block| *seen += 1 << block.place()) > 0 {}
        assert_eq!(*seen, 0b11);
    });
}

/// The return goes to another thread's magazine or by the lock; either way the waiting thread
/// gets it. A lost wake-up is a deadlock, which loom reports.
#[test]
fn a_return_wakes_the_one_who_waits() {
    explore(3, || {
        let fake = Fake::new();
        let pool = pool(&fake, TIGHT);
        let buffer = pool.take(128).unwrap();
        let other = thread::spawn(move || drop(buffer));
        // Needs the page that the other thread's block is made of.
        drop(pool.take(64).unwrap());
        other.join().unwrap();
        drop(pool);
        assert_eq!(fake.book().bytes(), 0);
    });
}

#[test]
fn two_who_wait_are_both_served() {
    explore(2, || {
        let fake = Fake::new();
        let pool = pool(&fake, TIGHT);
        let buffer = pool.take(128).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || drop(pool.take(64).unwrap()))
        };
        let third = thread::spawn(move || drop(buffer));
        drop(pool.take(128).unwrap());
        other.join().unwrap();
        third.join().unwrap();
    });
}

/// Registrations of one buffer take their bytes from the ceiling without the lock.
#[test]
fn a_registration_that_ends_wakes_those_who_wait_for_its_bytes() {
    explore(2, || {
        let fake = Fake::new();
        let limits = Limits {
            ceiling: 4096,
            ..TIGHT
        };
        let pool = pool(&fake, limits);
        let buffer = pool.take(4096).unwrap();
        let other = {
            let pool = pool.clone();
            thread::spawn(move || drop(pool.take(4096).unwrap()))
        };
        let third = thread::spawn(move || drop(buffer));
        drop(pool.take(64).unwrap());
        other.join().unwrap();
        third.join().unwrap();
        drop(pool);
        assert_eq!(fake.book().bytes(), 0);
    });
}

#[test]
fn gathering_and_taking_keep_apart() {
    explore(3, || {
        let fake = Fake::new();
        let pool = pool(
            &fake,
            Limits {
                ceiling: 4 * PAGE,
                ..TIGHT
            },
        );
        drop(pool.take(64).unwrap());
        let other = {
            let pool = pool.clone();
            thread::spawn(move || {
                let mut first = pool.take(64).unwrap();
                first.as_mut_slice().fill(1);
                let mut second = pool.take(64).unwrap();
                second.as_mut_slice().fill(2);
                drop(first);
                assert_eq!(second.as_slice(), [2; 64]);
            })
        };
        pool.trim();
        let mut mine = pool.take(64).unwrap();
        mine.as_mut_slice().fill(3);
        pool.trim();
        assert_eq!(mine.as_slice(), [3; 64]);
        drop(mine);
        other.join().unwrap();
        assert_eq!(pool.stats().live_buffers, 0);
        pool.trim();
        assert_eq!(fake.book().bytes(), 0);
    });
}

#[test]
fn the_last_handle_or_the_last_buffer_ends_the_pool() {
    explore(3, || {
        let fake = Fake::new();
        let pool: Pool = pool(
            &fake,
            Limits {
                ceiling: 4 * PAGE,
                ..TIGHT
            },
        );
        let (first, second) = (pool.take(64).unwrap(), pool.take(64).unwrap());
        let threads = [first, second].map(|buffer| thread::spawn(move || drop(buffer)));
        drop(pool);
        for thread in threads {
            thread.join().unwrap();
        }
        assert_eq!(fake.book().bytes(), 0);
    });
}

#[test]
fn the_last_returns_bring_it_below_the_high_water_mark() {
    explore(3, || {
        let fake = Fake::new();
        let pool = pool(
            &fake,
            Limits {
                high_water: 0,
                ceiling: 4 * PAGE,
                ..TIGHT
            },
        );
        let (first, second) = (pool.take(64).unwrap(), pool.take(64).unwrap());
        let other = thread::spawn(move || drop(first));
        drop(second);
        other.join().unwrap();
        assert_eq!(fake.book().bytes(), 0);
    });
}
