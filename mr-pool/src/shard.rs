//! One thread's share of a pool: magazines of free blocks and counters, written by that thread
//! alone.
//!
//! The thread is *inside* while it touches its magazines. A thread that needs every free block of
//! the pool (to find wholly free memory, or to wait for some) raises a flag in [`Core::flags`],
//! runs the heavy barrier, waits until it has seen each shard's thread outside, and then has the
//! magazines to itself until it lowers the flag: whoever enters after the barrier sees the flag
//! and turns away. So the owner pays neither lock nor fence, and no block is out of reach.

use crossbeam_utils::CachePadded;

use crate::class::{self, CLASSES, batch};
use crate::engine::{CLOSED, Core, OVER, RECLAIM, WAITERS};
use crate::free_list::Block;
use crate::sync::{AtomicU32, AtomicU64, Ordering, yield_now};

/// Where each class's magazine begins in [`Own::blocks`], and where the last one ends.
const STARTS: [usize; CLASSES + 1] = {
    let mut starts = [0; CLASSES + 1];
    let mut class = 0;
    while class < CLASSES {
        // Two batches: a full magazine passes one on and keeps one, so that no sequence of takes
        // and returns exchanges with the shared list more often than once a batch.
        starts[class + 1] = starts[class] + 2 * batch(class);
        class += 1;
    }
    starts
};

/// A class's magazine and counters. All are written by the owner only (or by whoever keeps it
/// outside), so plain loads and stores do.
#[derive(Debug, Default)]
struct Magazine {
    /// Blocks in it.
    len: AtomicU32,
    taken: AtomicU64,
    returned: AtomicU64,
}

/// What became of a returned block.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Given {
    /// In the magazine; nothing more to do.
    Kept,
    /// In the magazine; the pool is above its high-water mark, and could get below it.
    KeptOverHighWater,
    /// Not taken: the pool wants returns to go by its lock.
    Refused,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Shard {
    own: CachePadded<Own>,
}

#[derive(Debug)]
struct Own {
    /// 1 while the owner touches the magazines.
    inside: AtomicU32,
    /// Bytes taken less bytes returned, by this thread; wraps when it returns others' blocks.
    live_bytes: AtomicU64,
    magazines: [Magazine; CLASSES],
    blocks: Box<[AtomicU64]>,
}

impl Shard {
    pub(crate) fn new() -> Self {
        Self {
            own: CachePadded::new(Own {
                inside: AtomicU32::new(0),
                live_bytes: AtomicU64::new(0),
                magazines: std::array::from_fn(|_| Magazine::default()),
                blocks: (0..STARTS[CLASSES]).map(|_| AtomicU64::new(0)).collect(),
            }),
        }
    }

    /// A free block of `class`; `None` sends the caller to the lock.
    #[inline]
    pub(crate) fn take(&self, core: &Core, class: usize) -> Option<Block> {
        let inside = Inside::enter(&self.own, core);
        if inside.flags & RECLAIM != 0 {
            return None;
        }
        let (magazine, blocks) = self.magazine(class);
        let mut len = magazine.len.load(Ordering::Relaxed) as usize;
        if len == 0 {
            len = core.free.pop(class, |place, block| {
                blocks[place].store(block.bits(), Ordering::Relaxed);
            });
        }
        let top = len.checked_sub(1)?;
        let block = Block::from_bits(blocks[top].load(Ordering::Relaxed));
        magazine.len.store(top as u32, Ordering::Relaxed);
        add(&magazine.taken, 1);
        add(&self.own.live_bytes, class::size(class) as u64);
        Some(block)
    }

    /// Takes a block back.
    #[inline]
    pub(crate) fn give(&self, core: &Core, block: Block) -> Given {
        let inside = Inside::enter(&self.own, core);
        if inside.flags & (RECLAIM | WAITERS | CLOSED) != 0 {
            return Given::Refused;
        }
        let class = block.class();
        let (magazine, blocks) = self.magazine(class);
        let mut len = magazine.len.load(Ordering::Relaxed) as usize;
        if len == blocks.len() {
            len = pass_on_half(core, class, blocks);
        }
        blocks[len].store(block.bits(), Ordering::Relaxed);
        magazine.len.store(len as u32 + 1, Ordering::Relaxed);
        add(&magazine.returned, 1);
        add(
            &self.own.live_bytes,
            (class::size(class) as u64).wrapping_neg(),
        );
        let over = inside.flags & OVER != 0;
        drop(inside);
        if over && core.may_get_below_high_water() {
            return Given::KeptOverHighWater;
        }
        Given::Kept
    }

    /// Waits until the owner is outside. The caller has raised a flag and run the heavy barrier.
    pub(crate) fn wait_outside(&self) {
        // Acquire pairs with the owner's Release on leaving: what it did inside is visible.
        while self.own.inside.load(Ordering::Acquire) != 0 {
            yield_now();
        }
    }

    /// Empties the magazines, class by class. The owner is outside and kept there, or it is the caller.
    pub(crate) fn drain(&self, mut sink: impl FnMut(Block)) {
        for class in 0..CLASSES {
            let (magazine, blocks) = self.magazine(class);
            let len = magazine.len.load(Ordering::Relaxed) as usize;
            for slot in &blocks[..len] {
                sink(Block::from_bits(slot.load(Ordering::Relaxed)));
            }
            if len > 0 {
                magazine.len.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Blocks of `class` this shard's threads took, and returned.
    pub(crate) fn counts(&self, class: usize) -> (u64, u64) {
        let magazine = &self.own.magazines[class];
        (
            magazine.taken.load(Ordering::Relaxed),
            magazine.returned.load(Ordering::Relaxed),
        )
    }

    /// Bytes taken less bytes returned; a summand, wrapping.
    pub(crate) fn live_bytes(&self) -> u64 {
        self.own.live_bytes.load(Ordering::Relaxed)
    }

    #[inline]
    fn magazine(&self, class: usize) -> (&Magazine, &[AtomicU64]) {
        let blocks = &self.own.blocks[STARTS[class]..STARTS[class + 1]];
        (&self.own.magazines[class], blocks)
    }
}

/// Passes the older half of a full magazine to the shared list and moves the rest down.
#[cold]
fn pass_on_half(core: &Core, class: usize, blocks: &[AtomicU64]) -> usize {
    let (older, newer) = blocks.split_at(batch(class));
    let load = |slot: &AtomicU64| Block::from_bits(slot.load(Ordering::Relaxed));
    core.free.push(class, older.iter().map(load));
    for (to, from) in older.iter().zip(newer) {
        to.store(from.load(Ordering::Relaxed), Ordering::Relaxed);
    }
    newer.len()
}

/// Adds to a counter that has one writer.
#[inline]
fn add(counter: &AtomicU64, by: u64) {
    counter.store(
        counter.load(Ordering::Relaxed).wrapping_add(by),
        Ordering::Relaxed,
    );
}

/// The owner's presence; leaves on drop.
struct Inside<'a> {
    own: &'a Own,
    flags: u32,
}

impl<'a> Inside<'a> {
    #[inline]
    fn enter(own: &'a Own, core: &Core) -> Self {
        own.inside.store(1, Ordering::Relaxed);
        core.barrier.light();
        // Acquire pairs with the Release that lowers RECLAIM: the drained magazines are visible.
        let flags = core.flags.load(Ordering::Acquire);
        Self { own, flags }
    }
}

impl Drop for Inside<'_> {
    #[inline]
    fn drop(&mut self) {
        self.own.inside.store(0, Ordering::Release);
    }
}
