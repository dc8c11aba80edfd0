//! The ceiling, the wait at it, the high-water mark and trimming.

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::fake::Fake;
use super::{FOREVER, ROOMY, pool};
use crate::class::LARGEST;
use crate::engine::Limits;
use crate::{Buffer, Pool, PoolError};

const MIB: usize = 1 << 20;

fn ceiling(bytes: usize, wait: Option<Duration>) -> Limits {
    Limits {
        ceiling: bytes,
        wait,
        ..ROOMY
    }
}

/// Takes buffers of `len` bytes until the pool has no more.
fn fill(pool: &Pool, len: usize) -> Vec<Buffer> {
    std::iter::from_fn(|| pool.try_take(len).ok()).collect()
}

#[test]
fn the_error_names_the_ceiling_and_what_to_raise() {
    let pool = pool(&Fake::new(), ceiling(4 * MIB, None));
    let held = fill(&pool, MIB);
    assert_eq!(held.len(), 4);
    let error = pool.take(MIB).unwrap_err();
    assert!(
        matches!(error, PoolError::CeilingReached { requested: MIB, live, .. } if live == 4 * MIB)
    );
    let text = error.to_string();
    assert!(
        text.contains("4194304") && text.contains("PoolBuilder::ceiling"),
        "{text}"
    );

    let error = pool.take(5 * MIB).unwrap_err();
    assert!(matches!(error, PoolError::TooLong { .. }), "{error}");
    let error = pool.take(usize::MAX).unwrap_err();
    assert!(matches!(error, PoolError::TooLong { .. }), "{error}");
}

#[test]
fn memory_of_one_class_serves_another_when_it_is_free() {
    let fake = Fake::new();
    let pool = pool(&fake, ceiling(16 * MIB, None));
    for len in [64, 8 * MIB, 5000, LARGEST + 1, 64, 3 * MIB] {
        assert!(!fill(&pool, len).is_empty(), "length {len}");
    }
}

#[test]
fn a_ceiling_that_is_no_whole_region_is_used_to_its_last_page() {
    let fake = Fake::new();
    let pool = pool(&fake, ceiling(3 * MIB + 70_000, None));
    assert_eq!(fill(&pool, 64 << 10).len(), 49);
    assert_eq!(fake.book().bytes(), 3 * MIB + (64 << 10));
}

#[test]
fn free_memory_in_another_threads_magazine_is_found() {
    let pool = pool(&Fake::new(), ceiling(2 * MIB, None));
    let (done, wait) = mpsc::channel::<()>();
    let (sent, ready) = mpsc::channel();
    thread::scope(|scope| {
        let pool = &pool;
        scope.spawn(move || {
            fill(pool, 64 << 10).into_iter().for_each(drop);
            sent.send(()).unwrap();
            wait.recv().unwrap_err();
        });
        ready.recv().unwrap();
        assert_eq!(fill(pool, 2 * MIB).len(), 1);
        drop(done);
    });
}

#[test]
fn a_wait_ends_by_its_timeout() {
    let pool = pool(
        &Fake::new(),
        ceiling(2 * MIB, Some(Duration::from_millis(5))),
    );
    let held = fill(&pool, MIB);
    let error = pool.take(MIB).unwrap_err();
    assert!(matches!(error, PoolError::CeilingTimeout { .. }), "{error}");
    assert!(
        error.to_string().contains("PoolBuilder::at_ceiling"),
        "{error}"
    );
    assert!(matches!(
        pool.try_take(MIB),
        Err(PoolError::CeilingReached { .. })
    ));
    drop(held);
    pool.take(MIB).unwrap();
}

/// Each thread needs all of the memory now and then; every return must be noticed.
#[test]
fn every_return_wakes_those_who_wait() {
    let fake = Fake::new();
    let pool = pool(&fake, ceiling(10 * MIB, Some(FOREVER)));
    let lens = [2 * MIB, 64, LARGEST, 300_000, LARGEST + 1];
    thread::scope(|scope| {
        for first in 0..4 {
            let pool = &pool;
            scope.spawn(move || {
                for turn in 0..400 {
                    let mut buffer = pool.take(lens[(first + turn) % lens.len()]).unwrap();
                    buffer.as_mut_slice()[0] = 1;
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.live_buffers, stats.live_bytes), (0, 0));
    drop(pool);
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn a_failed_registration_wakes_those_who_wait_for_its_bytes() {
    let fake = Fake::new();
    let pool = pool(&fake, ceiling(20 * MIB, Some(FOREVER)));
    fake.book().longest = Some(9 * MIB);
    thread::scope(|scope| {
        for len in [12 * MIB, 9 * MIB] {
            let pool = &pool;
            scope.spawn(move || {
                for _ in 0..300 {
                    let taken = pool.take(len);
                    assert_eq!(taken.is_ok(), len == 9 * MIB);
                }
            });
        }
    });
    assert_eq!(pool.stats().registered_bytes, 0);
}

#[test]
fn trim_gives_up_what_is_wholly_free() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    let mut held: Vec<_> = (0..16).map(|_| pool.take(MIB).unwrap()).collect();
    assert_eq!(fake.book().bytes(), 16 * MIB);
    assert_eq!(pool.trim(), 0);
    // One buffer, of the first region, stays.
    held.truncate(1);
    assert_eq!(pool.trim(), 14 * MIB);
    assert_eq!(fake.book().bytes(), 2 * MIB);
    held.clear();
    assert_eq!(pool.trim(), 2 * MIB);
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn above_the_high_water_mark_free_regions_go_with_the_last_return() {
    let fake = Fake::new();
    let pool = pool(
        &fake,
        Limits {
            high_water: 4 * MIB,
            ..ROOMY
        },
    );
    for len in [64, 3000, MIB] {
        let held: Vec<_> = (0..16 * MIB / len)
            .map(|_| pool.take(len).unwrap())
            .collect();
        assert!(fake.book().bytes() >= 16 * MIB);
        drop(held);
        assert!(
            fake.book().bytes() <= 4 * MIB,
            "length {len}: {}",
            fake.book().bytes()
        );
    }
}

#[test]
fn below_the_high_water_mark_nothing_is_given_up() {
    let fake = Fake::new();
    let pool = pool(
        &fake,
        Limits {
            high_water: 16 * MIB,
            ..ROOMY
        },
    );
    drop((0..16).map(|_| pool.take(MIB).unwrap()).collect::<Vec<_>>());
    // Single registrations do not count.
    drop(pool.take(64 * MIB).unwrap());
    assert_eq!(fake.book().bytes(), 16 * MIB);
    assert_eq!(pool.stats().deregistrations, 1);
}

#[test]
fn the_last_returns_of_several_threads_bring_it_below_the_high_water_mark() {
    for _ in 0..50 {
        let fake = Fake::new();
        let pool = pool(
            &fake,
            Limits {
                high_water: 0,
                ..ROOMY
            },
        );
        let halves = [0, 1].map(|_| (0..4).map(|_| pool.take(MIB).unwrap()).collect::<Vec<_>>());
        thread::scope(|scope| {
            for half in halves {
                scope.spawn(move || drop(half));
            }
        });
        assert_eq!(fake.book().bytes(), 0);
    }
}
