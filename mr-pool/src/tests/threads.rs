//! Many threads: nobody gets what another has, nothing is lost when a thread ends.

use std::sync::mpsc;
use std::thread;

use super::fake::Fake;
use super::{FOREVER, ROOMY, pool};
use crate::Buffer;
use crate::engine::Limits;

/// A small generator of numbers (xorshift), so that threads differ and runs repeat.
struct Random(u64);

impl Random {
    fn below(&mut self, end: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % end as u64) as usize
    }
}

fn stamp(buffer: &mut Buffer, stamp: u64) {
    let bytes = buffer.as_mut_slice();
    let end = bytes.len() - 8;
    bytes[..8].copy_from_slice(&stamp.to_le_bytes());
    bytes[end..].copy_from_slice(&stamp.to_le_bytes());
}

fn check(buffer: &Buffer, stamp: u64) {
    let bytes = buffer.as_slice();
    assert_eq!(bytes[..8], stamp.to_le_bytes());
    assert_eq!(bytes[bytes.len() - 8..], stamp.to_le_bytes());
}

/// Takes, writes, checks, drops, and hands every third buffer to the next thread.
fn stress(limits: Limits) {
    let fake = Fake::new();
    stress_pool(&fake, &pool(&fake, limits));
}

fn stress_pool(fake: &Fake, pool: &crate::Pool) {
    const THREADS: usize = 4;
    thread::scope(|scope| {
        let (senders, receivers): (Vec<_>, Vec<_>) = (0..THREADS)
            .map(|_| mpsc::channel::<(Buffer, u64)>())
            .unzip();
        for (index, receiver) in receivers.into_iter().enumerate() {
            let next = senders[(index + 1) % THREADS].clone();
            scope.spawn(move || {
                let mut random = Random(index as u64 + 1);
                let mut held = Vec::new();
                for turn in 0..6_000 {
                    // Half the turns free something, so at a ceiling all threads make progress.
                    if held.len() > random.below(40) {
                        let (buffer, stamp) = held.swap_remove(random.below(held.len()));
                        check(&buffer, stamp);
                    }
                    while let Ok((buffer, stamp)) = receiver.try_recv() {
                        check(&buffer, stamp);
                    }
                    let end = [100, 3000, 40_000, 600_000][random.below(4)];
                    let len = 16 + random.below(end);
                    let Ok(mut buffer) = pool.try_take(len) else {
                        held.clear();
                        continue;
                    };
                    let mark = (index as u64) << 32 | turn;
                    stamp(&mut buffer, mark);
                    match turn % 3 {
                        0 => next.send((buffer, mark)).unwrap_or_default(),
                        _ => held.push((buffer, mark)),
                    }
                    if turn % 1000 == 0 {
                        pool.trim();
                    }
                }
            });
        }
    });
    let stats = pool.stats();
    assert_eq!((stats.live_buffers, stats.live_bytes), (0, 0));
    assert_eq!(stats.registered_bytes, fake.book().bytes());
    pool.trim();
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn stress_with_room() {
    stress(ROOMY);
}

#[test]
fn stress_without_membarrier() {
    let fake = Fake::new();
    let pool = pool(
        &fake,
        Limits {
            ceiling: 6 << 20,
            ..ROOMY
        },
    );
    pool.make_symmetric();
    stress_pool(&fake, &pool);
}

#[test]
fn stress_at_the_ceiling() {
    stress(Limits {
        ceiling: 6 << 20,
        ..ROOMY
    });
}

#[test]
fn stress_above_the_high_water_mark() {
    stress(Limits {
        high_water: 4 << 20,
        ..ROOMY
    });
}

/// Runs it in a thread and waits for the thread's very end, which a scope alone does not.
fn in_thread<T: Send>(run: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| scope.spawn(run).join().unwrap())
}

#[test]
fn a_thread_that_ends_leaves_its_blocks_to_the_others() {
    let pool = pool(&Fake::new(), ROOMY);
    let ends = |pool: &crate::Pool| {
        let held: Vec<_> = (0..20).map(|_| pool.take(4096).unwrap()).collect();
        held.iter()
            .map(Buffer::addr)
            .collect::<std::collections::BTreeSet<_>>()
    };
    let first = in_thread(|| ends(&pool));
    let misses = pool.stats().misses();
    let second = ends(&pool);
    assert!(second.is_subset(&first) || pool.stats().misses() == misses);
    assert_eq!(
        pool.stats().misses(),
        misses,
        "the second thread carved anew"
    );
    assert_eq!(pool.stats().live_buffers, 0);
}

#[test]
fn threads_that_come_and_go_add_nothing() {
    let pool = pool(&Fake::new(), ROOMY);
    for _ in 0..200 {
        in_thread(|| drop([0; 40].map(|_| pool.take(64).unwrap())));
    }
    let stats = pool.stats();
    assert_eq!((stats.registrations, stats.live_buffers), (1, 0));
    assert!(stats.misses() <= 4, "{} misses", stats.misses());
}

#[test]
fn a_buffer_dropped_while_its_thread_ends_returns() {
    thread_local! {
        static LAST: std::cell::RefCell<Vec<Buffer>> = const { std::cell::RefCell::new(Vec::new()) };
    }
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    // Its place among the thread's values is before the pool's own, and after it: whichever way
    // they are destroyed, both must do.
    in_thread(|| LAST.with_borrow_mut(|last| last.push(pool.take(100).unwrap())));
    in_thread(|| {
        LAST.with_borrow_mut(Vec::clear);
        drop(pool.take(100).unwrap());
        LAST.with_borrow_mut(|last| last.push(pool.take(100).unwrap()));
    });
    assert_eq!(pool.stats().live_buffers, 0);
    drop(pool);
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn the_last_handle_and_the_last_buffers_end_the_pool_in_any_order() {
    for turn in 0..300 {
        let fake = Fake::new();
        let pool = pool(&fake, ROOMY);
        let mut buffers: Vec<_> = (0..6).map(|_| pool.take(200).unwrap()).collect();
        buffers.push(pool.take(9 << 20).unwrap());
        thread::scope(|scope| {
            let rest = buffers.split_off(turn % 7);
            scope.spawn(move || drop(buffers));
            scope.spawn(move || drop(rest));
            scope.spawn(move || drop(pool));
        });
        assert_eq!(fake.book().bytes(), 0);
    }
}

#[test]
fn a_thread_uses_many_pools() {
    let fakes: Vec<_> = (0..10).map(|_| Fake::new()).collect();
    let pools: Vec<_> = fakes.iter().map(|fake| pool(fake, ROOMY)).collect();
    for _ in 0..3 {
        let held: Vec<_> = pools.iter().map(|pool| pool.take(64).unwrap()).collect();
        for (buffer, fake) in held.iter().zip(&fakes) {
            assert_eq!(
                fake.book().lkey(buffer.addr() as usize, 64),
                Some(buffer.lkey())
            );
        }
    }
    for fake in fakes {
        assert_eq!(fake.book().made, 1);
    }
}

#[test]
fn waiting_threads_do_not_stop_the_others() {
    let pool = pool(
        &Fake::new(),
        Limits {
            ceiling: 2 << 20,
            wait: Some(FOREVER),
            ..ROOMY
        },
    );
    let small = pool.take(64).unwrap();
    thread::scope(|scope| {
        let big = scope.spawn(|| pool.take(2 << 20).unwrap().len());
        while !pool.is_waited_for() {
            thread::yield_now();
        }
        for _ in 0..1000 {
            drop(pool.take(64).unwrap());
        }
        drop(small);
        assert_eq!(big.join().unwrap(), 2 << 20);
    });
}
