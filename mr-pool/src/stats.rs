//! What a pool has done and what it holds.

/// A pool's figures at one moment. Threads at work make the moments of its parts differ a little;
/// at rest it is exact.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct Stats {
    /// Memory registrations made so far.
    pub registrations: u64,
    /// Of those, undone again.
    pub deregistrations: u64,
    /// Bytes registered now.
    pub registered_bytes: usize,
    /// Buffers taken and not yet dropped.
    pub live_buffers: usize,
    /// Bytes of their blocks: their classes' sizes, not the lengths asked for.
    pub live_bytes: usize,
    /// Takes that were given a registration of their own, being above the largest class or in an
    /// unpooled pool.
    pub dedicated: u64,
    /// Each class, by size. Empty in an unpooled pool.
    pub classes: Vec<ClassStats>,
}

impl Stats {
    /// Takes of all classes served by a free list.
    pub fn hits(&self) -> u64 {
        self.classes.iter().map(|class| class.hits).sum()
    }

    /// Takes of all classes that had to carve a block, and perhaps to register memory.
    pub fn misses(&self) -> u64 {
        self.classes.iter().map(|class| class.misses).sum()
    }
}

/// One size class's share of [`Stats`].
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub struct ClassStats {
    /// Bytes of a block.
    pub size: usize,
    /// Takes served by a free list.
    pub hits: u64,
    /// Takes that had to carve a block.
    pub misses: u64,
    /// Buffers taken and not yet dropped.
    pub live: usize,
}
