//! One thread, step by step.

use std::error::Error;

use super::fake::Fake;
use super::{ROOMY, pool, pool_of};
use crate::class::LARGEST;
use crate::engine::Limits;
use crate::grow::HUGE_PAGE;
use crate::{Buffer, Pool, PoolError, RangeError, Shared};

#[test]
fn nothing_is_registered_before_the_first_take_nor_after_the_end() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    assert_eq!(fake.book().made, 0);
    let buffer = pool.take(100).unwrap();
    assert_eq!(fake.book().bytes(), HUGE_PAGE);
    drop(buffer);
    assert_eq!(fake.book().bytes(), HUGE_PAGE);
    drop(pool);
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn the_block_handed_out_next_is_the_one_returned_last() {
    let pool = pool(&Fake::new(), ROOMY);
    let buffers: Vec<_> = (0..10).map(|_| pool.take(4096).unwrap()).collect();
    let mut addrs: Vec<_> = buffers.iter().map(Buffer::addr).collect();
    buffers.into_iter().for_each(drop);
    let again: Vec<_> = (0..10).map(|_| pool.take(4096).unwrap()).collect();
    addrs.reverse();
    assert_eq!(again.iter().map(Buffer::addr).collect::<Vec<_>>(), addrs);
}

#[test]
fn a_buffer_and_its_bytes_outlive_the_pool() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    let (mut short, mut long) = (pool.take(10).unwrap(), pool.take(LARGEST + 1).unwrap());
    drop(pool.clone());
    drop(pool);
    short.as_mut_slice().fill(7);
    long.as_mut_slice().fill(8);
    assert_eq!(fake.book().ranges.len(), 2);
    drop(long);
    assert_eq!(short.as_slice(), [7; 10]);
    drop(short);
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn above_the_largest_class_each_buffer_is_a_registration() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    let buffer = pool.take(LARGEST + 1).unwrap();
    assert_eq!(
        (buffer.len(), buffer.capacity()),
        (LARGEST + 1, LARGEST + 4096)
    );
    let stats = pool.stats();
    assert_eq!((stats.dedicated, stats.live_buffers), (1, 1));
    assert_eq!(stats.live_bytes, LARGEST + 4096);
    drop(buffer);
    let stats = pool.stats();
    assert_eq!((stats.registrations, stats.deregistrations), (1, 1));
    assert_eq!((stats.registered_bytes, stats.live_bytes), (0, 0));
    assert_eq!(fake.book().bytes(), 0);
}

#[test]
fn regions_double_until_32_times_the_first() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    let _held: Vec<_> = (0..40).map(|_| pool.take(8 << 20).unwrap()).collect();
    let mut regions: Vec<_> = fake
        .book()
        .ranges
        .values()
        .map(|&(len, key)| (key, len))
        .collect();
    regions.sort_unstable();
    let mib: Vec<_> = regions.iter().map(|(_, len)| len >> 20).collect();
    assert_eq!(mib, [8, 8, 16, 32, 64, 64, 64, 64]);
}

#[test]
fn unpooled_registers_and_frees_each_time() {
    let fake = Fake::new();
    let pool = pool(
        &fake,
        Limits {
            unpooled: true,
            ..ROOMY
        },
    );
    for turn in 1..=3 {
        let mut buffer = pool.take(128).unwrap();
        buffer.as_mut_slice().fill(1);
        assert_eq!(fake.book().bytes(), 128);
        drop(buffer);
        assert_eq!(fake.book().bytes(), 0);
        let stats = pool.stats();
        assert_eq!((stats.registrations, stats.deregistrations), (turn, turn));
    }
}

#[test]
fn hits_and_misses_are_told_by_class() {
    let pool = pool(&Fake::new(), ROOMY);
    for _ in 0..5 {
        drop(pool.take(1000).unwrap());
    }
    let stats = pool.stats();
    let class = stats
        .classes
        .iter()
        .find(|class| class.size == 1024)
        .unwrap();
    assert_eq!((class.hits, class.misses, class.live), (4, 1, 0));
    assert_eq!((stats.hits(), stats.misses()), (4, 1));
}

#[test]
fn a_failed_registration_is_an_error_and_leaves_nothing() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    fake.book().longest = Some(0);
    for len in [0, 64, 1 << 20, LARGEST, LARGEST + 1] {
        let error = pool.take(len).unwrap_err();
        assert!(matches!(error, PoolError::Register { .. }), "{error}");
        assert!(error.source().unwrap().to_string().contains("told to fail"));
    }
    let stats = pool.stats();
    assert_eq!(
        (
            stats.registrations,
            stats.registered_bytes,
            stats.live_buffers
        ),
        (0, 0, 0)
    );
    fake.book().longest = None;
    drop(pool.take(64).unwrap());
}

#[test]
fn a_machine_that_locks_little_gets_short_regions() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    fake.book().longest = Some(HUGE_PAGE);
    let _held: Vec<_> = (0..8).map(|_| pool.take(1 << 20).unwrap()).collect();
    assert_eq!(fake.book().ranges.len(), 4);
}

#[test]
fn a_refusal_to_deregister_breaks_nothing() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    fake.book().keep = true;
    drop(pool.take(LARGEST + 1).unwrap());
    drop(pool.take(1).unwrap());
    pool.trim();
    assert_eq!(pool.stats().registered_bytes, 0);
    drop(pool.take(1).unwrap());
}

#[test]
fn lengths_change_within_the_block() {
    let pool = pool(&Fake::new(), ROOMY);
    let mut buffer = pool.take(100).unwrap();
    assert_eq!((buffer.len(), buffer.capacity()), (100, 128));
    buffer.truncate(40);
    buffer.truncate(60);
    assert_eq!(buffer.len(), 40);
    buffer.resize(128).unwrap();
    assert_eq!(buffer.as_slice().len(), 128);
    assert_eq!(
        buffer.resize(129),
        Err(RangeError {
            offset: 0,
            len: 129,
            buffer: 128
        })
    );
    assert_eq!(buffer.len(), 128);
    assert!(pool.take(0).unwrap().is_empty());
}

#[test]
fn copies_stay_inside_the_buffer() {
    let pool: Pool<Shared> = pool_of(&Fake::new(), ROOMY);
    let buffer = pool.take(100).unwrap();
    buffer.write_at(90, b"0123456789").unwrap();
    let mut back = [0; 9];
    buffer.read_at(91, &mut back).unwrap();
    assert_eq!(&back, b"123456789");
    for (offset, len) in [(91, 10), (101, 0), (usize::MAX, 2)] {
        let error = RangeError {
            offset,
            len,
            buffer: 100,
        };
        assert_eq!(buffer.write_at(offset, &vec![0; len]), Err(error));
        assert_eq!(buffer.read_at(offset, &mut vec![0; len]), Err(error));
    }
    buffer.read_at(100, &mut []).unwrap();
}

#[test]
fn private_buffers_copy_too() {
    let pool = pool(&Fake::new(), ROOMY);
    let mut buffer = pool.take(4).unwrap();
    buffer.write_at(1, b"abc").unwrap();
    assert!(buffer.write_at(2, b"abc").is_err());
    let mut back = [0; 3];
    buffer.read_at(1, &mut back).unwrap();
    assert_eq!(&back, b"abc");
    assert!(buffer.read_at(usize::MAX, &mut back).is_err());
}

#[test]
fn a_private_buffer_can_become_a_shared_one_and_goes_back_where_it_came_from() {
    let fake = Fake::new();
    let pool = pool(&fake, ROOMY);
    for (len, dedicated) in [(100, false), (LARGEST + 1, true)] {
        let mut buffer = pool.take(len).unwrap();
        assert_eq!(buffer.is_dedicated(), dedicated);
        buffer.as_mut_slice().fill(7);
        let before = (
            buffer.addr(),
            buffer.lkey(),
            buffer.rkey(),
            buffer.capacity(),
        );
        let shared = buffer.into_shared();
        assert_eq!(shared.len(), len);
        let after = (
            shared.addr(),
            shared.lkey(),
            shared.rkey(),
            shared.capacity(),
        );
        assert_eq!(after, before);
        assert_eq!(shared.is_dedicated(), dedicated);
        shared.write_at(8, &[1; 8]).unwrap();
        let mut bytes = [0; 24];
        shared.read_at(0, &mut bytes).unwrap();
        assert_eq!(bytes[..8], [7; 8]);
        assert_eq!(bytes[8..16], [1; 8]);
        assert_eq!(bytes[16..], [7; 8]);
        assert_eq!(pool.stats().live_buffers, 1);
        drop(shared);
        assert_eq!(pool.stats().live_buffers, 0);
    }
}
