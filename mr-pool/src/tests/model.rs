//! Random operations against a plain account of what must be so.

use proptest::prelude::*;

use super::fake::Fake;
use super::{ROOMY, pool};
use crate::class::{self, CLASSES, LARGEST};
use crate::engine::Limits;
use crate::{Buffer, PoolError};

#[derive(Clone, Debug)]
enum Op {
    Take(usize),
    /// Drops the buffer of this index, modulo their number.
    Drop(usize),
    /// Drops all but this many of the newest.
    DropMany(usize),
    Trim,
    /// Registrations longer than this fail from now on.
    Fail(Option<usize>),
}

fn op() -> impl Strategy<Value = Op> {
    let near_a_class = (0..CLASSES, -1isize..=1)
        .prop_map(|(class, by)| class::size(class).saturating_add_signed(by));
    prop_oneof![
        8 => (0..5000usize).prop_map(Op::Take),
        6 => near_a_class.prop_map(Op::Take),
        1 => (LARGEST..LARGEST + (4 << 20)).prop_map(Op::Take),
        8 => any::<usize>().prop_map(Op::Drop),
        1 => (0..4usize).prop_map(Op::DropMany),
        1 => Just(Op::Trim),
        1 => prop_oneof![Just(None), Just(Some(0)), Just(Some(2 << 20))].prop_map(Op::Fail),
    ]
}

fn limits() -> impl Strategy<Value = Limits> {
    let mib = |range: std::ops::Range<usize>| range.prop_map(|kib| kib << 10);
    let high_water = prop_oneof![Just(usize::MAX), mib(0..20_000)];
    (mib(64..40_000), high_water).prop_map(|(ceiling, high_water)| Limits {
        ceiling,
        high_water,
        ..ROOMY
    })
}

/// A live buffer and the byte its ends are filled with.
struct Held {
    buffer: Buffer,
    mark: u8,
}

impl Held {
    /// Fills all of a short buffer, the ends of a long one.
    fn mark(mut buffer: Buffer, mark: u8) -> Self {
        let bytes = buffer.as_mut_slice();
        let end = bytes.len().min(4096);
        bytes[..end].fill(mark);
        let start = bytes.len() - end;
        bytes[start..].fill(mark);
        Self { buffer, mark }
    }

    fn is_intact(&self) -> bool {
        let bytes = self.buffer.as_slice();
        let end = bytes.len().min(4096);
        let (head, tail) = (&bytes[..end], &bytes[bytes.len() - end..]);
        head.iter().chain(tail).all(|&byte| byte == self.mark)
    }
}

fn check(fake: &Fake, pool: &crate::Pool, limits: Limits, held: &[Held]) {
    let (book, stats) = (fake.book(), pool.stats());
    assert_eq!(stats.registered_bytes, book.bytes());
    assert!(
        book.bytes() <= limits.ceiling,
        "{} registered",
        book.bytes()
    );
    assert_eq!(
        stats.registrations - stats.deregistrations,
        book.ranges.len() as u64
    );
    assert_eq!(stats.live_buffers, held.len());
    assert_eq!(
        stats.live_bytes,
        held.iter()
            .map(|held| held.buffer.capacity())
            .sum::<usize>()
    );

    let mut ranges: Vec<_> = held
        .iter()
        .map(|held| {
            (
                held.buffer.addr() as usize,
                held.buffer.capacity(),
                held.buffer.lkey(),
            )
        })
        .collect();
    ranges.sort_unstable();
    for &(addr, len, lkey) in &ranges {
        assert_eq!(addr % 64, 0);
        assert_eq!(book.lkey(addr, len), Some(lkey), "not in its registration");
    }
    for pair in ranges.windows(2) {
        assert!(pair[0].0 + pair[0].1 <= pair[1].0, "{pair:x?} overlap");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 100, ..ProptestConfig::default() })]

    #[test]
    fn any_sequence_keeps_the_books(limits in limits(), ops in prop::collection::vec(op(), 1..120)) {
        let fake = Fake::new();
        let pool = pool(&fake, limits);
        let (mut held, mut failing, mut mark) = (Vec::<Held>::new(), false, 0u8);
        for op in ops {
            match op {
                Op::Take(len) => match pool.take(len) {
                    Ok(buffer) => {
                        prop_assert_eq!(buffer.len(), len);
                        prop_assert!(buffer.capacity() >= len);
                        prop_assert_eq!(buffer.rkey(), !buffer.lkey());
                        mark = mark.wrapping_add(1);
                        held.push(Held::mark(buffer, mark));
                    }
                    Err(PoolError::TooLong { requested, ceiling }) => {
                        prop_assert_eq!((requested, ceiling), (len, limits.ceiling));
                        let (block, unit) = match len > LARGEST {
                            true => (len, 4096),
                            false => (class::size(class::class_of(len)), 64 << 10),
                        };
                        prop_assert!(block.next_multiple_of(unit) > ceiling);
                    }
                    Err(PoolError::CeilingReached { requested, .. }) => {
                        prop_assert_eq!(requested, len);
                        prop_assert!(!held.is_empty(), "an empty pool serves anything below its ceiling");
                    }
                    Err(PoolError::Register { .. }) => prop_assert!(failing),
                    Err(other) => prop_assert!(false, "{}", other),
                },
                Op::Drop(index) if !held.is_empty() => {
                    let index = index % held.len();
                    let gone = held.swap_remove(index);
                    prop_assert!(gone.is_intact());
                }
                Op::Drop(_) => {}
                Op::DropMany(keep) => {
                    let gone = held.len().saturating_sub(keep);
                    prop_assert!(held.drain(..gone).all(|held| held.is_intact()));
                }
                Op::Trim => {
                    let before = pool.stats().registered_bytes;
                    let freed = pool.trim();
                    prop_assert_eq!(before - freed, pool.stats().registered_bytes);
                    if held.is_empty() {
                        prop_assert_eq!(pool.stats().registered_bytes, 0);
                    }
                }
                Op::Fail(longest) => {
                    failing = longest.is_some();
                    fake.book().longest = longest;
                }
            }
            check(&fake, &pool, limits, &held);
        }

        prop_assert!(held.iter().all(Held::is_intact));
        // Half of the buffers outlive the pool.
        held.truncate(held.len() / 2);
        drop(pool);
        prop_assert!(held.iter().all(Held::is_intact));
        drop(held);
        prop_assert_eq!(fake.book().bytes(), 0);
    }
}
