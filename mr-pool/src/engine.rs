//! The pool itself, without types or handles: the fast path, who is in it, and its end.
//!
//! *Life.* A pool is found by its number: a thread has a seat in it ([`crate::local`]), or looks
//! it up in a list of the process that holds it until its last handle and its last buffer are
//! gone. So a buffer is a few words, holds no reference count that threads would fight over, and
//! may outlive every handle. The last handle's end (`close`) raises [`CLOSED`], waits until
//! every thread is outside, and counts the live buffers; from then on each return goes by the lock
//! and the one that leaves none ends the pool.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64 as StdAtomicU64, Ordering as StdOrdering};
use std::sync::{Arc, LazyLock, Mutex as StdMutex, OnceLock, PoisonError};
use std::time::Duration;

use crossbeam_utils::CachePadded;

use crate::barrier::Barrier;
use crate::class::{self, CLASSES};
use crate::dedicated::{self, Dedicated};
use crate::free_list::{Block, FreeLists};
use crate::local;
use crate::segmented::Segmented;
use crate::shard::{Given, Shard};
use crate::source::{Registration, Source};
use crate::space::{Space, SpanKeys};
use crate::stats::{ClassStats, Stats};
use crate::sync::{AtomicU32, AtomicU64, Condvar, Mutex, MutexGuard, Ordering, lock};

/// Flag: every free block is being gathered; keep out of the magazines.
pub(crate) const RECLAIM: u32 = 1;
/// Flag: threads wait at the ceiling; returns go by the lock, which wakes them.
pub(crate) const WAITERS: u32 = 1 << 1;
/// Flag: the last handle is gone; returns go by the lock, which counts them.
pub(crate) const CLOSED: u32 = 1 << 2;
/// Flag: more is registered in regions than the high-water mark allows.
pub(crate) const OVER: u32 = 1 << 3;
/// Flag: everything is deregistered and no buffer is left.
const GONE: u32 = 1 << 4;

/// The pool's limits, as built.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// Most bytes registered.
    pub(crate) ceiling: usize,
    /// Bytes registered in regions above which free ones are given up.
    pub(crate) high_water: usize,
    /// Bytes of the first region.
    pub(crate) region_size: usize,
    /// Whether, and for how long, a take waits at the ceiling.
    pub(crate) wait: Option<Duration>,
    /// Every take registers memory of its own.
    pub(crate) unpooled: bool,
}

/// See the module's description.
#[derive(Debug)]
pub(crate) struct Core {
    /// Unlike every other pool's of this process, ever.
    pub(crate) id: u64,
    pub(crate) limits: Limits,
    pub(crate) barrier: Barrier,
    /// Read on every take and return, written rarely and under the lock.
    pub(crate) flags: CachePadded<AtomicU32>,
    pub(crate) free: FreeLists,
    pub(crate) spans: Segmented<SpanKeys>,
    /// Shards ever made; written under the lock, read without.
    shards: Segmented<OnceLock<Arc<Shard>>>,
    shard_count: AtomicU32,
    /// Bytes taken less bytes returned under the lock; a summand like each shard's.
    slow_live_bytes: AtomicU64,
    /// Bytes registered in regions, written under the lock; and in all.
    in_regions: AtomicU64,
    registered: AtomicU64,
    /// Live bytes at the last attempt to get below the high-water mark that failed.
    pub(crate) fruitless: AtomicU64,
    pub(crate) source: Box<dyn Source>,
    pub(crate) state: Mutex<State>,
    /// Told of every return while threads wait at the ceiling.
    pub(crate) returned: Condvar,
}

/// What the lock guards.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) space: Space,
    pub(crate) dedicated: Dedicated,
    pub(crate) registrations: u64,
    pub(crate) deregistrations: u64,
    /// Takes and returns under the lock.
    pub(crate) slow: [SlowCounts; CLASSES],
    /// Threads waiting at the ceiling.
    pub(crate) waiters: usize,
    /// All returns, as of the last time every free block was gathered.
    pub(crate) returns_at_reclaim: Option<u64>,
    /// Shards whose thread has ended.
    idle_shards: Vec<Arc<Shard>>,
    /// After the last handle's end: buffers still live. 0: the pool is gone.
    remaining: Option<u64>,
}

/// Takes and returns of one class made under the lock.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SlowCounts {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) returned: u64,
}

/// Every pool with a handle or a live buffer, by number.
static POOLS: LazyLock<StdMutex<HashMap<u64, Arc<Core>>>> = LazyLock::new(StdMutex::default);

fn find(id: u64) -> Option<Arc<Core>> {
    POOLS
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .get(&id)
        .cloned()
}

/// Returns a block to the pool numbered `id`.
pub(crate) fn give(id: u64, block: Block) {
    if block.is_dedicated() {
        return dedicated::give(id, block.key());
    }
    let given = local::with(id, || find(id), |core, shard| shard.give(core, block));
    if given != Some(Given::Kept) {
        give_slowly(id, block, given);
    }
}

#[cold]
fn give_slowly(id: u64, block: Block, given: Option<Given>) {
    // A live buffer keeps its pool in the list; and once `block` is back in a magazine, finding
    // nothing means that the pool has ended and needs no look at its high-water mark.
    let Some(core) = find(id) else { return };
    match given {
        Some(Given::Kept) => {}
        Some(Given::KeptOverHighWater) => core.get_below_high_water(),
        Some(Given::Refused) | None => {
            core.give_locked(block);
            let over = core.flags.load(Ordering::Relaxed) & OVER != 0;
            if over && core.may_get_below_high_water() {
                core.get_below_high_water();
            }
        }
    }
}

/// Visits the pool numbered `id`: by the thread's seat, or by the list when the thread is ending.
pub(crate) fn visit<R>(id: u64, visit: impl FnOnce(&Core) -> R) -> Option<R> {
    let mut visit = Some(visit);
    let seated = local::with(
        id,
        || find(id),
        |core, _| visit.take().map(|visit| visit(core)),
    );
    seated
        .flatten()
        .or_else(|| Some(visit.take()?(&*find(id)?)))
}

impl Core {
    /// A pool with one handle, listed.
    pub(crate) fn new(source: Box<dyn Source>, limits: Limits) -> Arc<Self> {
        static NEXT: StdAtomicU64 = StdAtomicU64::new(1);
        let core = Arc::new(Self {
            id: NEXT.fetch_add(1, StdOrdering::Relaxed),
            limits,
            barrier: Barrier::new(),
            flags: CachePadded::new(AtomicU32::new(0)),
            free: FreeLists::new(),
            spans: Segmented::new(),
            shards: Segmented::new(),
            shard_count: AtomicU32::new(0),
            slow_live_bytes: AtomicU64::new(0),
            in_regions: AtomicU64::new(0),
            registered: AtomicU64::new(0),
            fruitless: AtomicU64::new(u64::MAX),
            source,
            state: Mutex::new(State {
                space: Space::new(),
                dedicated: Dedicated::default(),
                registrations: 0,
                deregistrations: 0,
                slow: [SlowCounts::default(); CLASSES],
                waiters: 0,
                returns_at_reclaim: None,
                idle_shards: Vec::new(),
                remaining: None,
            }),
            returned: Condvar::new(),
        });
        let mut pools = POOLS.lock().unwrap_or_else(PoisonError::into_inner);
        pools.insert(core.id, Arc::clone(&core));
        drop(pools);
        core
    }

    /// A free block of `class` from the thread's magazine or the shared list.
    pub(crate) fn take(self: &Arc<Self>, class: usize) -> Option<Block> {
        let this = || Some(Arc::clone(self));
        local::with(self.id, this, |core, shard| shard.take(core, class)).flatten()
    }

    /// Takes a block back under the lock.
    fn give_locked(&self, block: Block) {
        let mut state = lock(&self.state);
        state.slow[block.class()].returned += 1;
        self.add_slow_live(block.class(), false);
        self.free.push(block.class(), std::iter::once(block));
        self.after_return(state);
    }

    /// Wakes those who wait for what has just come back, or ends the pool if it was the last.
    pub(crate) fn after_return(&self, mut state: MutexGuard<'_, State>) {
        self.wake(&state);
        if let Some(remaining) = &mut state.remaining {
            *remaining = remaining.saturating_sub(1);
            if *remaining == 0 {
                self.end(state);
            }
        }
    }

    /// Wakes everyone who waits at the ceiling: what came back may suit any of them.
    pub(crate) fn wake(&self, state: &State) {
        if state.waiters > 0 {
            self.returned.notify_all();
        }
    }

    /// Counts a take (or a return) under the lock. The caller holds the lock, so there is one
    /// writer at a time.
    pub(crate) fn add_slow_live(&self, class: usize, taken: bool) {
        let size = class::size(class) as u64;
        let by = if taken { size } else { size.wrapping_neg() };
        let now = self
            .slow_live_bytes
            .load(Ordering::Relaxed)
            .wrapping_add(by);
        self.slow_live_bytes.store(now, Ordering::Relaxed);
    }

    /// Gives the calling thread a shard.
    pub(crate) fn join(&self) -> Arc<Shard> {
        let mut state = lock(&self.state);
        if let Some(shard) = state.idle_shards.pop() {
            return shard;
        }
        let count = self.shard_count.load(Ordering::Relaxed);
        let shard = self
            .shards
            .get(count)
            .get_or_init(|| Arc::new(Shard::new()));
        self.shard_count.store(count + 1, Ordering::Release);
        Arc::clone(shard)
    }

    /// Takes back the shard of a thread that ends, and what is in its magazines.
    pub(crate) fn leave(&self, shard: &Arc<Shard>) {
        let mut state = lock(&self.state);
        if self.is_gone() {
            return;
        }
        let mut free = Vec::new();
        shard.drain(|block| free.push(block));
        self.list(&free);
        state.idle_shards.push(Arc::clone(shard));
        self.wake(&state);
    }

    /// Puts blocks into the shared lists; those of a class stand together.
    pub(crate) fn list(&self, free: &[Block]) {
        for blocks in free.chunk_by(|one, other| one.class() == other.class()) {
            let class = blocks[0].class();
            for blocks in blocks.chunks(class::batch(class)) {
                self.free.push(class, blocks.iter().copied());
            }
        }
    }

    /// Every shard there is.
    pub(crate) fn shards(&self) -> impl Iterator<Item = &Arc<Shard>> {
        let count = self.shard_count.load(Ordering::Acquire);
        (0..count).filter_map(|index| self.shards.get(index).get())
    }

    /// Has every thread outside its magazines, and those who enter see `flag`. Under the lock.
    pub(crate) fn keep_out(&self, flag: u32) {
        self.flags.fetch_or(flag, Ordering::SeqCst);
        self.barrier.heavy();
        for shard in self.shards() {
            shard.wait_outside();
        }
    }

    /// The last handle is gone: no further takes. Ends the pool now, or leaves that to the last
    /// buffer.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.state);
        self.keep_out(CLOSED);
        let live = self.live_buffers(&state);
        state.remaining = Some(live);
        if live == 0 {
            self.end(state);
        }
    }

    /// Deregisters everything and leaves the list.
    fn end(&self, mut state: MutexGuard<'_, State>) {
        let regions = state.space.remove_all();
        state.idle_shards.clear();
        for region in regions {
            self.drop_region(&mut state, region);
        }
        self.flags.fetch_or(GONE, Ordering::Relaxed);
        drop(state);
        POOLS
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.id);
    }

    /// Whether it has ended.
    pub(crate) fn is_gone(&self) -> bool {
        self.flags.load(Ordering::Relaxed) & GONE != 0
    }

    /// Counts a region whose bytes were reserved and are registered.
    pub(crate) fn add_region_bytes(&self, len: usize) {
        let now = self.in_regions() + len;
        self.in_regions.store(now as u64, Ordering::Relaxed);
        if now > self.limits.high_water {
            self.fruitless.store(u64::MAX, Ordering::Relaxed);
            self.flags.fetch_or(OVER, Ordering::Relaxed);
        }
    }

    /// Deregisters a region. A refusal is for the log only: the device keeps the memory, and the
    /// caller has nothing to undo.
    pub(crate) fn drop_region(&self, state: &mut State, region: Box<dyn Registration>) {
        let len = region.len();
        deregister(region);
        state.deregistrations += 1;
        self.unreserve(len);
        let now = self.in_regions().saturating_sub(len);
        self.in_regions.store(now as u64, Ordering::Relaxed);
        if now <= self.limits.high_water {
            self.flags.fetch_and(!OVER, Ordering::Relaxed);
        }
        self.wake(state);
    }

    /// Counts bytes as registered, before they are; `false` if the ceiling forbids it. So the
    /// ceiling holds while they are being registered, which takes long, and needs no lock.
    pub(crate) fn reserve(&self, len: usize) -> bool {
        let more = |now: u64| now.checked_add(len as u64);
        let fits = |now: &u64| *now <= self.limits.ceiling as u64;
        self.registered
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |now| {
                more(now).filter(fits)
            })
            .is_ok()
    }

    /// Counts bytes as no longer registered, when they are not. Who waits for them is to be woken
    /// under the lock.
    pub(crate) fn unreserve(&self, len: usize) {
        self.registered.fetch_sub(len as u64, Ordering::Relaxed);
    }

    /// Bytes registered now.
    pub(crate) fn registered(&self) -> usize {
        self.registered.load(Ordering::Relaxed) as usize
    }

    /// Bytes registered in regions now.
    pub(crate) fn in_regions(&self) -> usize {
        self.in_regions.load(Ordering::Relaxed) as usize
    }

    /// Bytes of live blocks; dedicated buffers are not among them.
    pub(crate) fn live_bytes(&self) -> usize {
        let slow = self.slow_live_bytes.load(Ordering::Relaxed);
        let sum = self
            .shards()
            .fold(slow, |sum, shard| sum.wrapping_add(shard.live_bytes()));
        // A return seen before its take makes it negative for a moment.
        (sum as i64).max(0) as usize
    }

    fn live_buffers(&self, state: &State) -> u64 {
        let blocks: usize = (0..CLASSES)
            .map(|class| self.class_stats(state, class).live)
            .sum();
        blocks as u64 + state.dedicated.live
    }

    /// All returns of blocks so far.
    pub(crate) fn returns(&self, state: &State) -> u64 {
        let slow: u64 = state.slow.iter().map(|class| class.returned).sum();
        let of = |shard: &Arc<Shard>| (0..CLASSES).map(|class| shard.counts(class).1).sum::<u64>();
        self.shards().map(of).sum::<u64>() + slow
    }

    fn class_stats(&self, state: &State, class: usize) -> ClassStats {
        let slow = state.slow[class];
        let (taken, returned) = self
            .shards()
            .map(|shard| shard.counts(class))
            .fold((slow.hits, slow.returned), |sum, of| {
                (sum.0 + of.0, sum.1 + of.1)
            });
        ClassStats {
            size: class::size(class),
            hits: taken,
            misses: slow.misses,
            live: (taken + slow.misses).saturating_sub(returned) as usize,
        }
    }

    /// The pool's figures.
    pub(crate) fn stats(&self) -> Stats {
        let state = lock(&self.state);
        let mut classes = Vec::new();
        if !self.limits.unpooled {
            classes.extend((0..CLASSES).map(|class| self.class_stats(&state, class)));
        }
        Stats {
            registrations: state.registrations,
            deregistrations: state.deregistrations,
            registered_bytes: self.registered(),
            live_buffers: self.live_buffers(&state) as usize,
            live_bytes: self.live_bytes() + state.dedicated.bytes,
            dedicated: state.dedicated.taken,
            classes,
        }
    }
}

/// Deregisters memory, telling the log of a refusal.
pub(crate) fn deregister(registration: Box<dyn Registration>) {
    let len = registration.len();
    if let Err(error) = registration.deregister() {
        tracing::error!(len, error, "deregistering memory failed");
    }
}
