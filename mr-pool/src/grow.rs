//! What a pool does when its free lists are empty: carve, register, gather what is free, wait.
//! All of it under the lock, none of it in a steady state.

use std::time::Instant;

use crate::class::{CLASSES, batch};
use crate::engine::{Core, RECLAIM, State, WAITERS};
use crate::error::PoolError;
use crate::free_list::Block;
use crate::source::Registration;
use crate::space::{PAGE, span_pages};
use crate::sync::{Ordering, fence, lock, wait};

/// Regions are whole huge pages, except the last under a ceiling that is not.
pub(crate) const HUGE_PAGE: usize = if cfg!(loom) { PAGE } else { 2 << 20 };
/// A region is as large as all before it together, up to this many times the first.
const GROWTH: usize = 32;

/// Whether what is free must be gathered again even if nothing was returned since the last time.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum Gather {
    Always,
    IfReturned,
}

impl Core {
    /// A block of `class` for `requested` bytes, when the free lists had none.
    #[cold]
    pub(crate) fn take_slowly(
        &self,
        class: usize,
        requested: usize,
        may_wait: bool,
    ) -> Result<Block, PoolError> {
        let ceiling = self.limits.ceiling;
        if span_pages(class).1 * PAGE > ceiling {
            return Err(PoolError::TooLong { requested, ceiling });
        }
        self.at_ceiling(requested, may_wait, |state, gather| {
            self.obtain(state, class, gather)
        })
    }

    /// Gathers what is free and deregisters every region that is wholly so. Returns the bytes
    /// deregistered.
    pub(crate) fn trim(&self) -> usize {
        let mut state = lock(&self.state);
        let before = self.registered();
        self.reclaim(&mut state, Gather::Always);
        while self.drop_free_region(&mut state) {}
        before - self.registered()
    }

    /// Asked after each return while regions hold more than the high-water mark allows: whether so
    /// much is free that one may be wholly so, and more than when that was last tried in vain.
    pub(crate) fn may_get_below_high_water(&self) -> bool {
        // Of two threads that return the last buffers at once, one sees both returns.
        fence(Ordering::SeqCst);
        let live = self.live_bytes();
        let step = self.limits.region_size / 8;
        let fruitless = self.fruitless.load(Ordering::Relaxed) as usize;
        let slack = self.in_regions().saturating_sub(live);
        live == 0 || (live <= fruitless.saturating_sub(step) && slack >= self.limits.region_size)
    }

    /// Gives up free regions until the high-water mark allows what is left.
    pub(crate) fn get_below_high_water(&self) {
        let mut state = lock(&self.state);
        if !self.is_over() {
            return;
        }
        let live = self.live_bytes();
        self.reclaim(&mut state, Gather::Always);
        while self.is_over() && self.drop_free_region(&mut state) {}
        self.fruitless.store(live as u64, Ordering::Relaxed);
    }

    /// Whether regions hold more than the high-water mark allows.
    fn is_over(&self) -> bool {
        self.in_regions() > self.limits.high_water
    }

    /// Bytes that may still be registered.
    fn room(&self) -> usize {
        self.limits.ceiling.saturating_sub(self.registered())
    }

    /// Runs `attempt` until it gives something, waiting for returns in between if the pool does.
    pub(crate) fn at_ceiling<T>(
        &self,
        requested: usize,
        may_wait: bool,
        mut attempt: impl FnMut(&mut State, Gather) -> Result<Option<T>, PoolError>,
    ) -> Result<T, PoolError> {
        let mut state = lock(&self.state);
        if let Some(got) = attempt(&mut state, Gather::IfReturned)? {
            return Ok(got);
        }
        let ceiling = self.limits.ceiling;
        let registered = self.registered();
        let Some(timeout) = self.limits.wait.filter(|_| may_wait) else {
            let live = self.live_bytes() + state.dedicated.bytes;
            return Err(PoolError::CeilingReached {
                requested,
                registered,
                live,
                ceiling,
            });
        };

        // From here on a return either was seen by the gathering below, or sees the flag and comes
        // by the lock, which this thread holds until it sleeps: no return goes unnoticed.
        state.waiters += 1;
        self.flags.fetch_or(WAITERS, Ordering::SeqCst);
        let start = Instant::now();
        let deadline = start.checked_add(timeout);
        let outcome = loop {
            match attempt(&mut state, Gather::Always) {
                Ok(Some(got)) => break Ok(got),
                Err(error) => break Err(error),
                Ok(None) => {}
            }
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let live = self.live_bytes() + state.dedicated.bytes;
                let (registered, waited) = (self.registered(), start.elapsed());
                break Err(PoolError::CeilingTimeout {
                    requested,
                    registered,
                    live,
                    ceiling,
                    waited,
                });
            }
            state = wait(&self.returned, state, deadline);
        };
        state.waiters -= 1;
        if state.waiters == 0 {
            self.flags.fetch_and(!WAITERS, Ordering::Relaxed);
        }
        outcome
    }

    /// A block of `class` by the cheapest means that works.
    fn obtain(
        &self,
        state: &mut State,
        class: usize,
        gather: Gather,
    ) -> Result<Option<Block>, PoolError> {
        if let Some(block) = self
            .listed(state, class)
            .or_else(|| self.carve(state, class))
        {
            return Ok(Some(block));
        }
        let (pages, least) = span_pages(class);
        if state.space.place(&self.spans, class, pages) {
            return Ok(self.carve(state, class));
        }
        // Growing beyond the high-water mark, look first for what is free elsewhere.
        let grown = self.in_regions() + least * PAGE;
        if grown <= self.limits.high_water && self.add_region(state, class)? {
            return Ok(self.carve(state, class));
        }
        if self.reclaim(state, gather) {
            if let Some(block) = self.listed(state, class) {
                return Ok(Some(block));
            }
            if state.space.place(&self.spans, class, pages) {
                return Ok(self.carve(state, class));
            }
        }
        if state.space.place(&self.spans, class, least) || self.add_region(state, class)? {
            return Ok(self.carve(state, class));
        }
        // Free regions that are too small make room for one that is not.
        if self.make_room(state, least * PAGE) && self.add_region(state, class)? {
            return Ok(self.carve(state, class));
        }
        Ok(None)
    }

    /// A block of `class` from the shared list, which may have been filled before the lock was
    /// had.
    fn listed(&self, state: &mut State, class: usize) -> Option<Block> {
        let mut blocks = Vec::with_capacity(batch(class));
        self.free.pop(class, |_, block| blocks.push(block));
        let block = blocks.pop()?;
        if !blocks.is_empty() {
            self.free.push(class, blocks.into_iter());
        }
        state.slow[class].hits += 1;
        self.add_slow_live(class, true);
        Some(block)
    }

    /// A fresh block of `class`; its neighbours go to the shared list.
    fn carve(&self, state: &mut State, class: usize) -> Option<Block> {
        let mut blocks = state.space.carve(class);
        let block = blocks.next()?;
        if blocks.len() > 0 {
            // The lowest address comes out first.
            self.free.push(class, blocks.rev());
        }
        state.slow[class].misses += 1;
        self.add_slow_live(class, true);
        Some(block)
    }

    /// Registers a region and gives `class` a span of it; `false` if the ceiling forbids it.
    fn add_region(&self, state: &mut State, class: usize) -> Result<bool, PoolError> {
        let (pages, least) = span_pages(class);
        let (grown, first) = (self.in_regions(), self.limits.region_size);
        let shortest = first.max(pages * PAGE).next_multiple_of(HUGE_PAGE);
        let wanted = grown.clamp(shortest, shortest.max(first * GROWTH));
        let wanted = if grown + wanted > self.limits.high_water {
            shortest
        } else {
            wanted
        };
        let room = self.room() / PAGE * PAGE;
        if room < least * PAGE {
            return Ok(false);
        }
        let region = match self.register(state, wanted.min(room)) {
            // A limit of the machine's may still allow a little.
            Err(_) if shortest < wanted.min(room) => self.register(state, shortest),
            result => result,
        };
        let Some(region) = region? else {
            return Ok(false);
        };
        state.registrations += 1;
        self.add_region_bytes(region.len());
        state.space.add(region);
        Ok(state.space.place(&self.spans, class, pages)
            || state.space.place(&self.spans, class, least))
    }

    /// Registers `len` bytes, if the ceiling allows it.
    fn register(
        &self,
        state: &State,
        len: usize,
    ) -> Result<Option<Box<dyn Registration>>, PoolError> {
        if !self.reserve(len) {
            return Ok(None);
        }
        let registered = self.source.register(len).map_err(|source| {
            self.unreserve(len);
            self.wake(state);
            PoolError::Register { len, source }
        });
        registered.map(Some)
    }

    /// Deregisters free regions until `len` bytes more may be registered; whether they may.
    pub(crate) fn make_room(&self, state: &mut State, len: usize) -> bool {
        while self.room() < len {
            if !self.drop_free_region(state) {
                return false;
            }
        }
        true
    }

    /// Deregisters one region that is wholly free, if there is one.
    fn drop_free_region(&self, state: &mut State) -> bool {
        let region = state.space.remove_free();
        region
            .map(|region| self.drop_region(state, region))
            .is_some()
    }

    /// Gathers every free block of the pool, from every thread's magazines too, and gives spans
    /// that are wholly free back to their regions. `false` if it saw no use in that.
    pub(crate) fn reclaim(&self, state: &mut State, gather: Gather) -> bool {
        let returns = Some(self.returns(state));
        if gather == Gather::IfReturned && returns == state.returns_at_reclaim {
            return false;
        }
        state.returns_at_reclaim = returns;

        let mut free = Vec::new();
        self.keep_out(RECLAIM);
        for shard in self.shards() {
            shard.drain(|block| free.push(block));
        }
        // Release: whoever enters now sees the magazines empty.
        self.flags.fetch_and(!RECLAIM, Ordering::Release);
        for class in 0..CLASSES {
            while self.free.pop(class, |_, block| free.push(block)) > 0 {}
        }
        state.space.release_whole(&mut free);

        // Lowest addresses come out first, so that the later regions fall free.
        free.sort_unstable_by_key(|block| (block.class(), std::cmp::Reverse(block.bits())));
        self.list(&free);
        true
    }
}
