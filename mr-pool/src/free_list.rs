//! The shared free lists: per class, a stack of batches of free blocks.
//!
//! A batch is a node of a table that never shrinks, linked by index (Treiber's stack, "Systems
//! Programming: Coping with Parallelism", 1986). Links and blocks stand beside the registered
//! memory, never in it: a peer may write there. Whole batches move, so the one contended word is
//! touched once per [`batch`] operations of a thread; last in is first out,
//! so the block handed out next is the one most likely still in cache.
//!
//! *ABA.* The head carries a tag that every removal advances, so a removal that was overtaken
//! fails even if the same node is on top again. The tag has 36 bits: it repeats only after 2^36
//! removals from one class while a single removal stands between its load and its exchange.

use crossbeam_utils::CachePadded;

use crate::class::{CLASSES, MAX_BATCH, batch};
use crate::segmented::Segmented;
use crate::sync::{AtomicU32, AtomicU64, Ordering};

/// A block, free or out: class, span and place in the span, in one word. Or a registration of one
/// buffer.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(crate) struct Block(u64);

impl Block {
    /// `place` is below 2^24: the smallest block is 64 bytes and a span at most 8 MiB.
    pub(crate) fn new(class: usize, span: u32, place: u32) -> Self {
        Self(u64::from(span) << 32 | u64::from(place) << 8 | class as u64)
    }

    /// The dedicated registration kept under `key`; it is never in a free list.
    pub(crate) fn dedicated(key: u32) -> Self {
        Self(u64::from(key) << 32 | DEDICATED)
    }

    #[inline]
    pub(crate) fn is_dedicated(self) -> bool {
        self.0 & 0xff == DEDICATED
    }

    /// The key of a dedicated registration.
    pub(crate) fn key(self) -> u32 {
        self.span()
    }

    pub(crate) fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub(crate) fn bits(self) -> u64 {
        self.0
    }

    pub(crate) fn class(self) -> usize {
        (self.0 & 0xff) as usize
    }

    pub(crate) fn place(self) -> u32 {
        (self.0 >> 8) as u32 & 0xff_ffff
    }

    pub(crate) fn span(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

/// Stands in the place of a class.
const DEDICATED: u64 = 0xff;

/// Bits of a node's index (plus one) in a head; the rest is the tag.
const INDEX_BITS: u32 = 28;
const INDEX_MASK: u64 = (1 << INDEX_BITS) - 1;

/// A batch on its way. Owned by whoever removed it from a stack; the stack's release and acquire
/// order its fields, which are atomics only so that an overtaken removal may look at `next`.
#[derive(Debug, Default)]
struct Node {
    next: AtomicU32,
    len: AtomicU32,
    blocks: [AtomicU64; MAX_BATCH],
}

/// A stack of nodes: tag and index plus one of the top node (0: empty).
#[derive(Debug, Default)]
struct Stack(AtomicU64);

impl Stack {
    fn push(&self, nodes: &Segmented<Node>, index: u32) {
        let node = nodes.get(index);
        let mut head = self.0.load(Ordering::Relaxed);
        loop {
            node.next
                .store((head & INDEX_MASK) as u32, Ordering::Relaxed);
            let new = head & !INDEX_MASK | u64::from(index + 1);
            // Release: the node's fields are visible to whoever removes it. Every change of a head
            // is a read-modify-write, so a removal synchronizes with all pushes below the top too.
            match self
                .0
                .compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(now) => head = now,
            }
        }
    }

    fn pop(&self, nodes: &Segmented<Node>) -> Option<u32> {
        let mut head = self.0.load(Ordering::Acquire);
        loop {
            let index = ((head & INDEX_MASK) as u32).checked_sub(1)?;
            // Perhaps removed and changed meanwhile; then the tag has moved and the exchange fails.
            let next = u64::from(nodes.get(index).next.load(Ordering::Relaxed));
            let new = (head & !INDEX_MASK).wrapping_add(1 << INDEX_BITS) | next;
            match self
                .0
                .compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => return Some(index),
                Err(now) => head = now,
            }
        }
    }
}

/// The shared free lists of a pool.
#[derive(Debug)]
pub(crate) struct FreeLists {
    nodes: Segmented<Node>,
    /// Nodes ever made.
    made: AtomicU32,
    /// Nodes that carry nothing now.
    empty: CachePadded<Stack>,
    full: [CachePadded<Stack>; CLASSES],
}

impl FreeLists {
    pub(crate) fn new() -> Self {
        Self {
            nodes: Segmented::new(),
            made: AtomicU32::new(0),
            empty: CachePadded::new(Stack::default()),
            full: std::array::from_fn(|_| CachePadded::new(Stack::default())),
        }
    }

    /// Hands over at most [`batch`] blocks of `class`; the last of `blocks` comes out first.
    pub(crate) fn push(&self, class: usize, blocks: impl ExactSizeIterator<Item = Block>) {
        debug_assert!((1..=batch(class)).contains(&blocks.len()));
        let index = self.empty.pop(&self.nodes).unwrap_or_else(|| self.make());
        let node = self.nodes.get(index);
        let mut len = 0;
        for (slot, block) in node.blocks.iter().zip(blocks) {
            slot.store(block.bits(), Ordering::Relaxed);
            len += 1;
        }
        node.len.store(len, Ordering::Relaxed);
        self.full[class].push(&self.nodes, index);
    }

    /// Removes the batch of `class` that came last and passes its blocks on, in their order.
    /// Returns how many there were.
    pub(crate) fn pop(&self, class: usize, mut sink: impl FnMut(usize, Block)) -> usize {
        let Some(index) = self.full[class].pop(&self.nodes) else {
            return 0;
        };
        let node = self.nodes.get(index);
        let len = node.len.load(Ordering::Relaxed) as usize;
        for (place, slot) in node.blocks.iter().take(len).enumerate() {
            sink(place, Block::from_bits(slot.load(Ordering::Relaxed)));
        }
        self.empty.push(&self.nodes, index);
        len
    }

    /// A node nobody has had yet. There are as many as free batches at most; 2^28 of them would
    /// weigh 70 GB, so the index cannot run out before memory does.
    fn make(&self) -> u32 {
        let index = self.made.fetch_add(1, Ordering::Relaxed);
        assert!(
            u64::from(index) < INDEX_MASK,
            "more than 2^28 batches of free blocks"
        );
        self.nodes.get(index);
        index
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use std::collections::HashSet;
    use std::sync::Barrier;

    use super::*;

    fn block(place: u32) -> Block {
        Block::new(3, 7, place)
    }

    fn pop(lists: &FreeLists) -> Vec<u32> {
        let mut blocks = Vec::new();
        lists.pop(3, |_, block| blocks.push(block.place()));
        blocks
    }

    #[test]
    fn a_block_keeps_its_parts() {
        let block = Block::new(63, u32::MAX, 0xff_ffff);
        assert_eq!(
            (block.class(), block.span(), block.place()),
            (63, u32::MAX, 0xff_ffff)
        );
        let block = Block::from_bits(Block::new(1, 2, 3).bits());
        assert_eq!((block.class(), block.span(), block.place()), (1, 2, 3));
    }

    #[test]
    fn batches_come_back_last_first_and_nodes_are_reused() {
        let lists = FreeLists::new();
        for round in 0..3 {
            lists.push(3, [1, 2].map(block).into_iter());
            lists.push(3, [3].map(block).into_iter());
            assert_eq!(pop(&lists), [3]);
            assert_eq!(pop(&lists), [1, 2]);
            assert_eq!(pop(&lists), [0; 0]);
            assert_eq!(lists.made.load(Ordering::Relaxed), 2, "round {round}");
        }
    }

    #[test]
    fn threads_lose_and_double_nothing() {
        let (lists, start) = (FreeLists::new(), Barrier::new(4));
        for first in (0..64).step_by(4) {
            lists.push(3, (first..first + 4).map(block));
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    start.wait();
                    for _ in 0..20_000 {
                        let mut held = Vec::new();
                        lists.pop(3, |_, block| held.push(block));
                        if !held.is_empty() {
                            lists.push(3, held.into_iter());
                        }
                    }
                });
            }
        });
        let mut seen = HashSet::new();
        while lists.pop(3, |_, block| {
            assert!(seen.insert(block.place()), "doubled {block:?}")
        }) > 0
        {}
        assert_eq!(seen.len(), 64);
    }
}
