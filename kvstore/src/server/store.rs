//! The store itself: the index, the memory of its blocks, and what is counted. Shared by all workers; does no I/O.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use mr_pool::{Buffer, Pool, PoolError, Shared};

use super::index::{Block, BlockMemory, Index};
use crate::block::value_offset;
use crate::protocol::{Location, Reply, Statistics, Status};

/// A block in the server's memory.
pub type Stored = Block<Buffer<Shared>>;

/// All keys and values of a server.
#[derive(Debug)]
pub struct Store {
    index: Index<Buffer<Shared>>,
    memory: Pool<Shared>,
    puts: AtomicU64,
    gets: AtomicU64,
    deletes: AtomicU64,
}

/// Blocks are read by peers while they are retired and reused, so their bytes are only ever copied, in whole words.
impl BlockMemory for Buffer<Shared> {
    fn address(&self) -> u64 {
        self.addr()
    }

    fn rkey(&self) -> u32 {
        Buffer::<Shared>::rkey(self)
    }

    fn is_lasting(&self) -> bool {
        !self.is_dedicated()
    }

    fn write_at(&self, offset: usize, bytes: &[u8]) {
        let written = Buffer::<Shared>::write_at(self, offset, bytes);
        debug_assert!(written.is_ok(), "blocks are taken as long as they are used");
    }

    fn read_at(&self, offset: usize, bytes: &mut [u8]) {
        let read = Buffer::<Shared>::read_at(self, offset, bytes);
        debug_assert!(read.is_ok(), "blocks are taken as long as they are used");
    }
}

impl Store {
    /// An empty store whose blocks come from `memory`: read and written by peers, never deregistered in use.
    pub fn new(memory: Pool<Shared>) -> Self {
        Self {
            index: Index::new(),
            memory,
            puts: AtomicU64::new(0),
            gets: AtomicU64::new(0),
            deletes: AtomicU64::new(0),
        }
    }

    /// Memory for a block that holds `length` bytes, its value to be placed at its [`value_offset`].
    ///
    /// # Errors
    /// The status to answer with; nothing was done.
    pub fn room(&self, length: usize) -> Result<Buffer<Shared>, Status> {
        self.memory
            .take(value_offset(length) + length)
            .map_err(|error| {
                tracing::debug!(%error, length, "no memory for a value");
                match error {
                    PoolError::Register { .. } => Status::Registration,
                    _ => Status::OutOfMemory,
                }
            })
    }

    /// Stores a value that is at hand.
    pub fn put(&self, key: &[u8], value: &[u8]) -> Reply {
        match self.room(value.len()) {
            Ok(room) => self.stored(&self.index.put(key, room, value)),
            Err(status) => bare(status),
        }
    }

    /// Stores a value of `length` bytes that was placed in its [`room`](Self::room).
    pub fn put_placed(&self, key: &[u8], room: Buffer<Shared>, length: usize) -> Reply {
        self.stored(&self.index.publish_placed(key, room, length))
    }

    fn stored(&self, block: &Stored) -> Reply {
        self.puts.fetch_add(1, Ordering::Relaxed);
        if block.is_cacheable() {
            located(block)
        } else {
            bare(Status::Ok)
        }
    }

    /// The current block of a key; it stays intact while it is held.
    pub fn get(&self, key: &[u8]) -> Option<Arc<Stored>> {
        self.gets.fetch_add(1, Ordering::Relaxed);
        self.index.get(key)
    }

    /// Removes a key.
    pub fn delete(&self, key: &[u8]) -> Reply {
        if self.index.delete(key) {
            self.deletes.fetch_add(1, Ordering::Relaxed);
            bare(Status::Ok)
        } else {
            bare(Status::NotFound)
        }
    }

    /// What is counted here; messages and connections are left 0.
    pub fn statistics(&self) -> Statistics {
        let memory = self.memory.stats();
        Statistics {
            keys: self.index.keys() as u64,
            value_bytes: self.index.value_bytes(),
            live_blocks: memory.live_buffers as u64,
            live_bytes: memory.live_bytes as u64,
            registered_bytes: memory.registered_bytes as u64,
            registrations: memory.registrations,
            connections: 0,
            puts: self.puts.load(Ordering::Relaxed),
            gets: self.gets.load(Ordering::Relaxed),
            deletes: self.deletes.load(Ordering::Relaxed),
        }
    }
}

/// The reply that names no location.
pub fn bare(status: Status) -> Reply {
    Reply {
        location: Location::NONE,
        reserved: Location::NONE,
        status,
        cacheable: false,
    }
}

/// The reply that says where a block is.
pub fn located(block: &Stored) -> Reply {
    Reply {
        location: block.location(),
        reserved: Location::NONE,
        status: Status::Ok,
        cacheable: block.is_cacheable(),
    }
}
