//! The index: which block holds the current version of each key.
//!
//! # What a get may see
//!
//! A client that has learned a location reads the block itself and asks nobody. Three rules make such a get
//! linearizable with every put, delete and other get of the key.
//!
//! 1. *A published block does not change.* An overwrite goes to a new block, under a version that was never used. A
//!    client that wrote the value to a reserved block itself has ended that WRITE before it asks to publish.
//! 2. *Retire, publish, acknowledge.* Under the key's lock the old block's state word becomes `retired`, then the
//!    index names the new block, then (after the lock) the writer is answered.
//! 3. *Reuse comes last.* A block's memory returns to the pool only after it has left the index and every request
//!    that holds it has ended.
//!
//! Let a reader know version `v` at an address and READ there. What arrives is one of these:
//!
//! * **`v`, live, intact.** The state word was read whole (it is one aligned word) while it said live, so at that
//!   moment `v` was not retired. The get takes effect at that moment. By rule 2 no newer version had been published
//!   then, let alone acknowledged or seen: whoever sees version `w > v` sees it after `w` was published, hence after
//!   `v` was retired, and every READ that starts later finds `v` retired. (Publishing first would break this: one
//!   reader could get `w` from the index and a later one `v` from its cache.)
//! * **`v`, retired.** The value was replaced or deleted, maybe while we read. Not used: the reader asks the server.
//! * **Another version, or bytes that are no header.** The memory was reused. Not used.
//! * **A mixture.** The READ overlapped the reuse: its header may still be that of `v`, live, and its bytes those of a
//!   later tenant. A value up to [`CHECKSUMMED`](crate::block::CHECKSUMMED) bytes is covered by a checksum that also
//!   binds the version, so a mixture passes with probability 2⁻⁶⁴. For a longer one the header is read again behind
//!   the value, in the same chain; READs of one queue pair are executed in order, so the second header was read after
//!   the last byte of the value. If it says `v` is live, then by rules 2 and 3 the block had not been reused before that,
//!   and by rule 1 all bytes are those of `v`. Here the get takes effect when the second header was read.
//! * **An error.** Only of a dead connection: pooled memory stays registered while the server lives, and a block with a
//!   registration of its own, which ends with it, is never named in a cacheable location.
//!
//! A request sees the index itself, under the same lock. For a large value it holds the block for the reader
//! (a *pin*), who then READs it whether retired or not: rule 3 keeps it intact, and the get takes effect at the
//! look-up. So a get ends after at most one failed READ and one request, however busy the writers are.
//!
//! A block that a client has reserved is nobody's until it is published. It returns to the pool when the client commits
//! it, reserves another (its WRITEs come before its requests), or has lost its connection, and with that its access.
//!
//! A writer that stores the bytes of an old block inside a value could deceive a reader whose cached address falls on
//! them once the memory was carved anew. It could as well have put that value under the key: there is no access control
//! within a store.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::DashMap;
use dashmap::Entry;

use crate::block::{Checksummed, Expected, Header, State, value_offset};
use crate::hash::{SeededHash, key_hash};
use crate::protocol::Location;

/// Registered memory of one block, which peers may be reading.
pub trait BlockMemory: Send + Sync {
    /// Address by which peers name the first byte.
    fn address(&self) -> u64;
    /// Remote key by which peers reach it.
    fn rkey(&self) -> u32;
    /// Whether it can be reached (if not for long with the same content) as long as the server lives.
    fn is_lasting(&self) -> bool;
    /// Writes bytes; each aligned word of 8 becomes visible whole. The range lies within the memory.
    fn write_at(&self, offset: usize, bytes: &[u8]);
    /// Reads bytes. The range lies within the memory.
    fn read_at(&self, offset: usize, bytes: &mut [u8]);
}

/// A published block: one version of one value. Its memory is given back when the last holder lets go.
#[derive(Debug)]
pub struct Block<M> {
    memory: M,
    expected: Expected,
}

impl<M: BlockMemory> Block<M> {
    /// Where peers find it.
    pub fn location(&self) -> Location {
        Location {
            address: self.memory.address(),
            version: self.expected.version,
            rkey: self.memory.rkey(),
            // Lengths are limited far below 4 GiB when the request is taken.
            length: self.expected.length as u32,
        }
    }

    /// Whether a reader may keep the location: what it finds there later it must verify, but it will find something.
    pub fn is_cacheable(&self) -> bool {
        self.memory.is_lasting()
    }

    /// Version of the value.
    pub fn version(&self) -> u64 {
        self.expected.version
    }

    /// Bytes of the value.
    pub fn length(&self) -> usize {
        self.expected.length
    }

    /// Copies the value out; `out` is as long as the value.
    pub fn read_value(&self, out: &mut [u8]) {
        self.memory.read_at(value_offset(self.length()), out);
    }

    fn retire(&self) {
        self.memory
            .write_at(0, &State::Retired.word(self.expected.version));
    }
}

/// The map from keys to blocks, and the order of versions. Shared by all workers.
#[derive(Debug)]
pub struct Index<M> {
    // A shard's lock is held for a few stores, never across a call that posts, polls or allocates registered memory.
    blocks: DashMap<Box<[u8]>, Arc<Block<M>>, SeededHash>,
    next_version: AtomicU64,
    value_bytes: AtomicU64,
}

impl<M: BlockMemory> Index<M> {
    /// An empty index.
    pub fn new() -> Self {
        Self {
            blocks: DashMap::with_hasher(SeededHash::random()),
            // 0 is no version.
            next_version: AtomicU64::new(1),
            value_bytes: AtomicU64::new(0),
        }
    }

    /// Puts a value that is at hand: copies it behind a header into `memory`, then publishes it.
    pub fn put(&self, key: &[u8], memory: M, value: &[u8]) -> Arc<Block<M>> {
        memory.write_at(value_offset(value.len()), value);
        self.publish(key, memory, value.len(), Checksummed::of(value))
    }

    /// Publishes a value of `length` bytes that was already placed at its [`value_offset`] in `memory`.
    pub fn publish_placed(&self, key: &[u8], memory: M, length: usize) -> Arc<Block<M>> {
        if Checksummed::covers(length) {
            let mut value = vec![0; length];
            memory.read_at(value_offset(length), &mut value);
            self.publish(key, memory, length, Checksummed::Value(&value))
        } else {
            self.publish(key, memory, length, Checksummed::HeaderOnly)
        }
    }

    fn publish(
        &self,
        key: &[u8],
        memory: M,
        length: usize,
        value: Checksummed<'_>,
    ) -> Arc<Block<M>> {
        let expected = Expected {
            version: self.next_version.fetch_add(1, Ordering::Relaxed),
            key_hash: key_hash(key),
            length,
        };
        memory.write_at(0, Header::live(expected, value).bytes());
        let block = Arc::new(Block { memory, expected });

        // Retire first, publish second, both under the lock of the key's shard.
        let old = if let Some(mut slot) = self.blocks.get_mut(key) {
            slot.retire();
            Some(std::mem::replace(&mut *slot, block.clone()))
        } else {
            match self.blocks.entry(key.into()) {
                Entry::Occupied(mut slot) => {
                    slot.get().retire();
                    Some(slot.insert(block.clone()))
                }
                Entry::Vacant(slot) => {
                    slot.insert(block.clone());
                    None
                }
            }
        };
        // The lock is free: giving memory back may take a while.
        let freed = old.map_or(0, |old| old.length());
        self.value_bytes.fetch_add(length as u64, Ordering::Relaxed);
        self.value_bytes.fetch_sub(freed as u64, Ordering::Relaxed);
        block
    }

    /// The current block of a key. It stays intact while the caller holds it.
    pub fn get(&self, key: &[u8]) -> Option<Arc<Block<M>>> {
        self.blocks.get(key).map(|block| block.clone())
    }

    /// Removes a key; whether it was there.
    pub fn delete(&self, key: &[u8]) -> bool {
        let removed = self.blocks.remove_if(key, |_, block| {
            block.retire();
            true
        });
        match removed {
            Some((_, block)) => {
                self.value_bytes
                    .fetch_sub(block.length() as u64, Ordering::Relaxed);
                true
            }
            None => false,
        }
    }

    /// Number of keys.
    pub fn keys(&self) -> usize {
        self.blocks.len()
    }

    /// Bytes of all current values.
    pub fn value_bytes(&self) -> u64 {
        self.value_bytes.load(Ordering::Relaxed)
    }
}

impl<M: BlockMemory> Default for Index<M> {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::Mutex;

    use proptest::prelude::*;

    use super::*;

    /// Heap memory that a test can look into after the index has let go of it.
    #[derive(Clone, Debug)]
    struct Memory {
        address: u64,
        bytes: Arc<Mutex<Vec<u8>>>,
    }

    impl Memory {
        fn new(address: u64, length: usize) -> Self {
            Self {
                address,
                bytes: Arc::new(Mutex::new(vec![0xee; value_offset(length) + length])),
            }
        }

        fn state(&self) -> (State, u64) {
            Header::parse(&self.bytes.lock().unwrap()).unwrap().state()
        }

        fn holders(&self) -> usize {
            Arc::strong_count(&self.bytes) - 1
        }
    }

    impl BlockMemory for Memory {
        fn address(&self) -> u64 {
            self.address
        }
        fn rkey(&self) -> u32 {
            77
        }
        fn is_lasting(&self) -> bool {
            true
        }
        fn write_at(&self, offset: usize, bytes: &[u8]) {
            self.bytes.lock().unwrap()[offset..offset + bytes.len()].copy_from_slice(bytes);
        }
        fn read_at(&self, offset: usize, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.bytes.lock().unwrap()[offset..offset + bytes.len()]);
        }
    }

    /// What a one-sided get does with the bytes at a location.
    fn verify(memory: &Memory, key: &[u8], location: Location) -> Option<Vec<u8>> {
        let image = memory.bytes.lock().unwrap().clone();
        let length = location.length as usize;
        let value = &image[value_offset(length)..][..length];
        let expected = Expected {
            version: location.version,
            key_hash: key_hash(key),
            length,
        };
        expected
            .matches(&Header::parse(&image).unwrap(), Checksummed::of(value))
            .then(|| value.to_vec())
    }

    #[test]
    fn an_overwrite_retires_the_old_block_and_frees_it_when_unheld() {
        let index = Index::new();
        let (first, second) = (Memory::new(0x1000, 3), Memory::new(0x2000, 5));
        let one = index.put(b"k", first.clone(), b"one").location();
        assert_eq!(verify(&first, b"k", one), Some(b"one".to_vec()));
        let pin = index.get(b"k").unwrap();

        let two = index
            .put(b"k", second.clone(), b"second"[..5].as_ref())
            .location();
        assert!(two.version > one.version);
        assert_eq!(first.state(), (State::Retired, one.version));
        assert_eq!(verify(&first, b"k", one), None);
        assert_eq!(verify(&second, b"k", two), Some(b"secon".to_vec()));
        assert_eq!(first.holders(), 1, "a pinned block is not reused");
        let mut value = [0; 3];
        pin.read_value(&mut value);
        assert_eq!(&value, b"one");
        drop(pin);
        assert_eq!(first.holders(), 0);
        assert_eq!((index.keys(), index.value_bytes()), (1, 5));
    }

    #[test]
    fn a_deleted_key_is_retired_and_can_be_put_again() {
        let index = Index::new();
        let memory = Memory::new(0x1000, 1);
        let location = index.put(b"k", memory.clone(), b"x").location();
        assert!(index.delete(b"k"));
        assert!(!index.delete(b"k"));
        assert_eq!(memory.state(), (State::Retired, location.version));
        assert_eq!(memory.holders(), 0);
        assert!(index.get(b"k").is_none());
        let again = index.put(b"k", memory.clone(), b"y").location();
        assert!(again.version > location.version);
        assert_eq!(verify(&memory, b"k", location), None);
        assert_eq!(verify(&memory, b"k", again), Some(b"y".to_vec()));
    }

    #[test]
    fn a_placed_value_is_published_with_the_right_check() {
        for length in [
            0,
            1,
            crate::block::CHECKSUMMED,
            crate::block::CHECKSUMMED + 1,
        ] {
            let index = Index::new();
            let memory = Memory::new(0x1000, length);
            let value = vec![0x5a; length];
            memory.write_at(value_offset(length), &value);
            let location = index
                .publish_placed(b"k", memory.clone(), length)
                .location();
            assert_eq!(verify(&memory, b"k", location), Some(value));
        }
    }

    #[test]
    fn concurrent_writers_leave_one_live_block() {
        let index = Index::new();
        let memories: Vec<Memory> = (0..64).map(|i| Memory::new(i << 12, 8)).collect();
        std::thread::scope(|scope| {
            for chunk in memories.chunks(16) {
                let index = &index;
                scope.spawn(move || {
                    for memory in chunk {
                        index.put(b"k", memory.clone(), &memory.address.to_le_bytes());
                    }
                });
            }
        });
        let current = index.get(b"k").unwrap().location();
        for memory in &memories {
            let is_current = memory.address == current.address;
            assert_eq!(memory.state().0 == State::Live, is_current);
            assert_eq!(memory.holders(), usize::from(is_current));
        }
        assert_eq!((index.keys(), index.value_bytes()), (1, 8));
    }

    #[derive(Clone, Debug)]
    enum Step {
        Put(u8, Vec<u8>),
        Delete(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => (0u8..4, prop::collection::vec(any::<u8>(), 0..40)).prop_map(|(k, v)| Step::Put(k, v)),
            1 => (0u8..4).prop_map(Step::Delete),
        ]
    }

    proptest! {
        /// Against a plain map: every location ever handed out verifies exactly while it is current.
        #[test]
        fn locations_verify_exactly_while_current(steps in prop::collection::vec(step(), 1..60)) {
            let index = Index::new();
            let mut model: HashMap<u8, (Vec<u8>, u64)> = HashMap::new();
            let mut handed_out: Vec<(u8, Memory, Location)> = Vec::new();
            for (i, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Put(k, value) => {
                        let memory = Memory::new((i as u64 + 1) << 12, value.len());
                        let location = index.put(&[k], memory.clone(), &value).location();
                        model.insert(k, (value, location.version));
                        handed_out.push((k, memory, location));
                    }
                    Step::Delete(k) => {
                        prop_assert_eq!(index.delete(&[k]), model.remove(&k).is_some());
                    }
                }
                for (k, memory, location) in &handed_out {
                    let want = model.get(k).filter(|(_, version)| *version == location.version);
                    prop_assert_eq!(verify(memory, &[*k], *location), want.map(|(value, _)| value.clone()));
                }
                prop_assert_eq!(index.keys(), model.len());
                let bytes: usize = model.values().map(|(value, _)| value.len()).sum();
                prop_assert_eq!(index.value_bytes(), bytes as u64);
            }
        }
    }
}
