//! Spinning with manners.

/// Turns without result before the processor is offered to others: tens of microseconds, far longer than a peer that has
/// a core of its own takes to answer.
const ALONE: u32 = 1 << 9;

/// A loop that waits for something to change in memory.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spin {
    turns: u32,
}

impl Spin {
    /// At the start, or after something has happened.
    pub fn new() -> Self {
        Self::default()
    }

    /// One more turn without result. Where more threads spin than there are cores, the one that is waited for would
    /// not run before our time slice ends; so from some turn on, each offers it the core.
    #[inline]
    pub fn turn(&mut self) {
        self.turns = self.turns.saturating_add(1);
        if self.turns < ALONE {
            std::hint::spin_loop();
        } else {
            std::thread::yield_now();
        }
    }

    /// Whether so many turns have passed that looking at the clock costs nothing beside them.
    #[inline]
    pub fn is_long(&self) -> bool {
        self.turns >= ALONE
    }
}
