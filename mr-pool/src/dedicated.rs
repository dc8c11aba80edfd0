//! Buffers with a registration of their own: above the largest class, and in unpooled pools.
//!
//! Little stands beside the registration itself: unpooled pools are there to show its price.

use std::ptr::NonNull;

use slab::Slab;

use crate::class;
use crate::engine::{Core, deregister, visit};
use crate::error::PoolError;
use crate::free_list::Block;
use crate::source::Registration;
use crate::sync::lock;

/// Dedicated registrations are whole pages of memory, but for those from the heap.
const SMALL_PAGE: usize = 4096;

/// The dedicated registrations of a pool.
#[derive(Debug, Default)]
pub(crate) struct Dedicated {
    registrations: Slab<Box<dyn Registration>>,
    /// How many there ever were.
    pub(crate) taken: u64,
    /// Buffers that are not yet wholly gone: their bytes may no longer be registered, but are
    /// counted so.
    pub(crate) live: u64,
    /// Their bytes.
    pub(crate) bytes: usize,
}

impl Core {
    /// Registers `requested` bytes for one buffer.
    pub(crate) fn take_dedicated(
        &self,
        requested: usize,
        may_wait: bool,
    ) -> Result<(Block, NonNull<u8>, u64), PoolError> {
        let ceiling = self.limits.ceiling;
        let unit = match self.limits.unpooled {
            true => class::ALIGN,
            false => SMALL_PAGE,
        };
        let len = requested
            .max(1)
            .checked_next_multiple_of(unit)
            .unwrap_or(usize::MAX);
        if len > ceiling {
            return Err(PoolError::TooLong { requested, ceiling });
        }
        if !self.reserve(len) {
            self.at_ceiling(requested, may_wait, |state, gather| {
                // Regions may be free since an earlier gathering.
                if !self.make_room(state, len) && self.reclaim(state, gather) {
                    self.make_room(state, len);
                }
                Ok(self.reserve(len).then_some(()))
            })?;
        }

        let registered = self.source.register(len);
        let registration = registered.map_err(|source| {
            self.unreserve(len);
            self.wake(&lock(&self.state));
            PoolError::Register { len, source }
        })?;
        let (addr, lkey, rkey) = (
            registration.addr(),
            registration.lkey(),
            registration.rkey(),
        );

        let mut state = lock(&self.state);
        state.registrations += 1;
        state.dedicated.taken += 1;
        state.dedicated.live += 1;
        state.dedicated.bytes += len;
        let key = state.dedicated.registrations.insert(registration) as u32;
        Ok((
            Block::dedicated(key),
            addr,
            u64::from(rkey) << 32 | u64::from(lkey),
        ))
    }
}

/// Takes back the dedicated registration kept under `key` by the pool numbered `id`.
#[cold]
pub(crate) fn give(id: u64, key: u32) {
    let removed = visit(id, |core| {
        lock(&core.state)
            .dedicated
            .registrations
            .try_remove(key as usize)
    });
    let Some(registration) = removed.flatten() else {
        return;
    };
    let bytes = registration.len();
    deregister(registration);
    visit(id, |core| {
        core.unreserve(bytes);
        let mut state = lock(&core.state);
        state.deregistrations += 1;
        state.dedicated.live -= 1;
        state.dedicated.bytes -= bytes;
        core.after_return(state);
    });
}

/// Bytes of a live dedicated registration of the pool numbered `id`.
pub(crate) fn len(id: u64, key: u32) -> usize {
    let len = visit(id, |core| {
        let state = lock(&core.state);
        state
            .dedicated
            .registrations
            .get(key as usize)
            .map(|registration| registration.len())
    });
    len.flatten().unwrap_or(0)
}
