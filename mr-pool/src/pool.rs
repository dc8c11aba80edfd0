//! Pools and how they are built.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use verbs_sys::{AccessFlags, ProtectionDomain};

use crate::buffer::{Buffer, Kind, Private, Shared};
use crate::class::{self, LARGEST};
use crate::device::DeviceSource;
#[cfg(all(test, not(loom)))]
use crate::engine::WAITERS;
use crate::engine::{Core, Limits};
use crate::error::{BuildError, PoolError};
use crate::grow::HUGE_PAGE;
use crate::raw::HeapSource;
use crate::source::Source;
use crate::space::PAGE;
use crate::stats::Stats;

/// The ceiling of a pool that sets none, in bytes.
const CEILING: usize = 1 << 30;
/// The first region of a pool that sets none, in bytes, and the longest first region.
const REGION_SIZE: (usize, usize) = (HUGE_PAGE, 1 << 40);

/// Registered memory of one protection domain, in buffers of any length.
///
/// A handle: clones share the pool, from any thread. When the last is dropped the pool's memory is
/// deregistered, at once or with the last of its buffers.
pub struct Pool<K: Kind = Private> {
    handle: Arc<Handle>,
    kind: PhantomData<K>,
}

/// What all clones share; its end closes the pool.
struct Handle {
    core: Arc<Core>,
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.core.close();
    }
}

impl Pool<Private> {
    /// Starts to build a pool of memory in `pd`.
    pub fn builder(pd: &ProtectionDomain) -> PoolBuilder<Private> {
        PoolBuilder {
            pd: pd.clone(),
            access: AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ,
            limits: Limits {
                ceiling: CEILING,
                high_water: usize::MAX,
                region_size: REGION_SIZE.0,
                wait: None,
                unpooled: false,
            },
            kind: PhantomData,
        }
    }
}

impl<K: Kind> Pool<K> {
    /// A buffer of `len` bytes, in a block of the smallest class that holds it. At the ceiling it
    /// does what [`PoolBuilder::at_ceiling`] says.
    ///
    /// # Errors
    /// [`PoolError`]; nothing is taken or registered then.
    #[inline]
    pub fn take(&self, len: usize) -> Result<Buffer<K>, PoolError> {
        self.take_or_wait(len, true)
    }

    /// As [`take`](Self::take), but never waits at the ceiling.
    ///
    /// # Errors
    /// [`PoolError`]; nothing is taken or registered then.
    #[inline]
    pub fn try_take(&self, len: usize) -> Result<Buffer<K>, PoolError> {
        self.take_or_wait(len, false)
    }

    #[inline]
    fn take_or_wait(&self, len: usize, may_wait: bool) -> Result<Buffer<K>, PoolError> {
        let core = &self.handle.core;
        if len <= LARGEST && !core.limits.unpooled {
            let class = class::class_of(len);
            if let Some(block) = core.take(class) {
                let (addr, keys) = core.spans.get(block.span()).block(class, block.place());
                return Ok(Buffer::new(core.id, block, addr, keys, len));
            }
        }
        self.take_slowly(len, may_wait)
    }

    #[cold]
    fn take_slowly(&self, len: usize, may_wait: bool) -> Result<Buffer<K>, PoolError> {
        let core = &self.handle.core;
        let (block, addr, keys) = if len <= LARGEST && !core.limits.unpooled {
            let class = class::class_of(len);
            let block = core.take_slowly(class, len, may_wait)?;
            let (addr, keys) = core.spans.get(block.span()).block(class, block.place());
            (block, addr, keys)
        } else {
            core.take_dedicated(len, may_wait)?
        };
        Ok(Buffer::new(core.id, block, addr, keys, len))
    }

    /// Deregisters every region of which no buffer is live, whatever the high-water mark; free
    /// blocks in the hands of other threads are gathered first. Returns the bytes deregistered.
    pub fn trim(&self) -> usize {
        self.handle.core.trim()
    }

    /// The pool's figures.
    pub fn stats(&self) -> Stats {
        self.handle.core.stats()
    }

    /// Whether a thread waits at the ceiling.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn is_waited_for(&self) -> bool {
        self.handle
            .core
            .flags
            .load(std::sync::atomic::Ordering::Relaxed)
            & WAITERS
            != 0
    }

    /// Goes on as if the kernel had no `membarrier`.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn make_symmetric(&self) {
        self.handle.core.barrier.make_symmetric();
    }

    pub(crate) fn from_source(source: Box<dyn Source>, limits: Limits) -> Self {
        Self {
            handle: Arc::new(Handle {
                core: Core::new(source, limits),
            }),
            kind: PhantomData,
        }
    }
}

impl<K: Kind> Clone for Pool<K> {
    fn clone(&self) -> Self {
        Self {
            handle: Arc::clone(&self.handle),
            kind: PhantomData,
        }
    }
}

impl<K: Kind> fmt::Debug for Pool<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pool")
            .field("limits", &self.handle.core.limits)
            .field("registered_bytes", &self.handle.core.registered())
            .finish_non_exhaustive()
    }
}

/// What a take does when it would have to register more than the ceiling allows.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
#[non_exhaustive]
pub enum AtCeiling {
    /// Fails at once.
    #[default]
    Error,
    /// Waits for buffers to be dropped, this long at most ([`Duration::MAX`]: for ever). Those who
    /// wait are not served in order.
    Wait(Duration),
}

/// Sets up a [`Pool`].
#[derive(Clone, Debug)]
#[must_use]
pub struct PoolBuilder<K: Kind = Private> {
    pd: ProtectionDomain,
    access: AccessFlags,
    limits: Limits,
    kind: PhantomData<K>,
}

impl<K: Kind> PoolBuilder<K> {
    /// What peers may do with the memory. Unless set, a private pool is registered for local write
    /// and remote read, a shared one for remote write and atomics besides.
    pub fn access(mut self, access: AccessFlags) -> Self {
        self.access = access;
        self
    }

    /// Most bytes ever registered at once; 1 GiB unless set.
    pub fn ceiling(mut self, bytes: usize) -> Self {
        self.limits.ceiling = bytes;
        self
    }

    /// Bytes of regions above which those that fall wholly free are deregistered, on the return
    /// of buffers; never, unless set. Registrations of single buffers do not count: they end with
    /// their buffer.
    pub fn high_water(mut self, bytes: usize) -> Self {
        self.limits.high_water = bytes;
        self
    }

    /// Bytes of the first region, 2 MiB unless set and never less; each further one is as large as
    /// all before it together, up to 32 times this.
    pub fn region_size(mut self, bytes: usize) -> Self {
        self.limits.region_size = bytes.clamp(REGION_SIZE.0, REGION_SIZE.1);
        self
    }

    /// What a take does at the ceiling; it fails unless set.
    pub fn at_ceiling(mut self, what: AtCeiling) -> Self {
        self.limits.wait = match what {
            AtCeiling::Error => None,
            AtCeiling::Wait(timeout) => Some(timeout),
        };
        self
    }

    /// No pool at all: each take allocates from the heap and registers, each drop deregisters and
    /// frees. For comparison; everything but the price is the same.
    pub fn unpooled(mut self) -> Self {
        self.limits.unpooled = true;
        self
    }

    /// Lets peers write the memory: buffers then copy bytes in and out instead of showing them.
    pub fn shared(self) -> PoolBuilder<Shared> {
        let more = AccessFlags::REMOTE_WRITE | AccessFlags::REMOTE_ATOMIC;
        PoolBuilder {
            pd: self.pd,
            access: self.access | AccessFlags::LOCAL_WRITE | more,
            limits: self.limits,
            kind: PhantomData,
        }
    }

    fn build_kind(self) -> Result<Pool<K>, BuildError> {
        let Self {
            pd, access, limits, ..
        } = self;
        if limits.ceiling < PAGE && !limits.unpooled {
            return Err(BuildError::CeilingTooLow {
                ceiling: limits.ceiling,
                least: PAGE,
            });
        }
        let source: Box<dyn Source> = if limits.unpooled {
            Box::new(HeapSource { pd, access })
        } else {
            Box::new(DeviceSource { pd, access })
        };
        Ok(Pool::from_source(source, limits))
    }
}

impl PoolBuilder<Private> {
    /// Builds the pool. Nothing is registered yet.
    ///
    /// # Errors
    /// [`BuildError`], for access flags that let peers write and for a ceiling below 64 KiB.
    pub fn build(self) -> Result<Pool<Private>, BuildError> {
        let private = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ;
        if !private.contains(self.access) {
            return Err(BuildError::PeersMayWrite {
                access: self.access,
            });
        }
        self.build_kind()
    }
}

impl PoolBuilder<Shared> {
    /// Builds the pool. Nothing is registered yet.
    ///
    /// # Errors
    /// [`BuildError`], for a ceiling below 64 KiB.
    pub fn build(self) -> Result<Pool<Shared>, BuildError> {
        self.build_kind()
    }
}
