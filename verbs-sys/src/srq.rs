//! Shared receive queues.

use std::{
    fmt,
    ptr::{self, NonNull},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicU32, Ordering},
    },
};

use crate::{
    CreateError, ProtectionDomain, RawPostError, SharedReceiveQueueError,
    context::created,
    error::{check, log_destroy},
    ffi::{self, ibv_recv_wr, ibv_srq, ibv_srq_attr, ibv_srq_init_attr},
};

/// A shared receive queue: its receives serve the messages of every queue pair made with it, in the
/// order in which the messages come; ibv_create_srq(3). Cheap to clone; queue pairs keep it alive.
///
/// The completion of a receive goes to the queue pair's completion queue, and names the queue pair.
#[derive(Clone)]
pub struct SharedReceiveQueue {
    // Beside the counted part, to save the data path a load.
    raw: NonNull<ibv_srq>,
    inner: Arc<SrqInner>,
}

pub(crate) struct SrqInner {
    raw: NonNull<ibv_srq>,
    pd: ProtectionDomain,
    /// As the device last told.
    max_wr: AtomicU32,
    max_sge: u32,
    /// Its address is the `srq_context` that comes with events. It is freed after the queue was
    /// destroyed, which waits until every event is acknowledged.
    itself: Box<OnceLock<Weak<SrqInner>>>,
}

// SAFETY: verbs on one shared receive queue may be called from any thread at any time.
unsafe impl Send for SrqInner {}
// SAFETY: as above.
unsafe impl Sync for SrqInner {}
// SAFETY: the pointer is the counted part's, for which the same holds.
unsafe impl Send for SharedReceiveQueue {}
// SAFETY: as above.
unsafe impl Sync for SharedReceiveQueue {}

impl Drop for SrqInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference, and every queue pair and event held one.
        let code = unsafe { (self.pd.context().provider().destroy_srq)(self.raw.as_ptr()) };
        log_destroy("ibv_destroy_srq", check(code));
    }
}

impl SharedReceiveQueue {
    pub(crate) fn new(
        pd: &ProtectionDomain,
        max_wr: u32,
        max_sge: u32,
    ) -> Result<Self, CreateError> {
        let call = || format!("ibv_create_srq(max_wr {max_wr}, max_sge {max_sge})");
        // SAFETY: the context is open, and its table does not change after it was opened.
        if unsafe { (*pd.context().as_raw()).ops.post_srq_recv }.is_none() {
            return Err(CreateError::Refused {
                call: call(),
                source: std::io::Error::from_raw_os_error(libc::EOPNOTSUPP),
            });
        }
        let itself: Box<OnceLock<Weak<SrqInner>>> = Box::default();
        let mut init = ibv_srq_init_attr {
            srq_context: ptr::from_ref(&*itself).cast_mut().cast(),
            attr: ibv_srq_attr {
                max_wr,
                max_sge,
                srq_limit: 0,
            },
        };
        // SAFETY: the protection domain is alive and the structure is valid for reading and writing.
        let raw = unsafe { (pd.context().provider().create_srq)(pd.as_raw(), &mut init) };
        let raw = created(raw, call)?;
        let inner = Arc::new(SrqInner {
            raw,
            pd: pd.clone(),
            max_wr: AtomicU32::new(init.attr.max_wr),
            max_sge: init.attr.max_sge,
            itself,
        });
        // No event can have come yet: none was asked for. A fresh cell takes its first value.
        let _ = inner.itself.set(Arc::downgrade(&inner));
        Ok(Self { raw, inner })
    }

    /// The queue whose event came with the word `word`, or `None` if it is just being destroyed.
    ///
    /// # Safety
    /// `word` came with an event of a queue made by [`SharedReceiveQueue::new`], and the event has
    /// not been acknowledged.
    pub(crate) unsafe fn from_event(word: *mut std::ffi::c_void) -> Option<Self> {
        // SAFETY: the cell is freed only after the event was acknowledged.
        let cell = unsafe { &*word.cast_const().cast::<OnceLock<Weak<SrqInner>>>() };
        let inner = cell.get()?.upgrade()?;
        Some(Self {
            raw: inner.raw,
            inner,
        })
    }

    /// Posts a list of receive requests; ibv_post_srq_recv(3).
    ///
    /// # Safety
    /// `list` is a valid list of requests, and until each has completed or the queue is destroyed
    /// the bytes of its elements stay valid and nobody uses them in a way that conflicts with a
    /// receive.
    ///
    /// # Errors
    /// Tells the first request that was not posted: `ENOMEM` if the queue is full, `EINVAL` if the
    /// request has too many elements.
    #[inline]
    pub unsafe fn post_recv(
        &self,
        list: *mut ibv_recv_wr,
    ) -> Result<(), RawPostError<ibv_recv_wr>> {
        let mut bad_wr = ptr::null_mut();
        // SAFETY: the queue is alive, so its context is; creation made sure that the slot is filled;
        // the caller promises the list.
        let code = unsafe {
            let post_srq_recv = (*(*self.raw.as_ptr()).context)
                .ops
                .post_srq_recv
                .unwrap_unchecked();
            post_srq_recv(self.raw.as_ptr(), list, &mut bad_wr)
        };
        check(code).map_err(|source| RawPostError {
            call: "ibv_post_srq_recv",
            bad_wr,
            source,
        })
    }

    /// Asks for one event ([`SrqLimitReached`](crate::AsyncEventKind::SrqLimitReached)) once fewer
    /// receives than `limit` are left; 0 for none. It has to be asked for again after each event.
    /// ibv_modify_srq(3).
    ///
    /// # Errors
    /// [`SharedReceiveQueueError::Modify`], also for more receives than the queue holds.
    pub fn set_limit(&self, limit: u32) -> Result<(), SharedReceiveQueueError> {
        let attr = ibv_srq_attr {
            srq_limit: limit,
            ..ibv_srq_attr::default()
        };
        self.modify(&attr, ffi::IBV_SRQ_LIMIT)
    }

    /// Changes how many receives it holds, to at least `max_wr`; receives that are posted stay. Not
    /// every device can (`IBV_DEVICE_SRQ_RESIZE`); the software device does. ibv_modify_srq(3).
    ///
    /// # Errors
    /// [`SharedReceiveQueueError::Modify`], also for fewer than are posted, or than the limit.
    pub fn resize(&self, max_wr: u32) -> Result<(), SharedReceiveQueueError> {
        let attr = ibv_srq_attr {
            max_wr,
            ..ibv_srq_attr::default()
        };
        self.modify(&attr, ffi::IBV_SRQ_MAX_WR)
    }

    /// Changes the attributes that `mask`, of `IBV_SRQ_*` bits, names, all or none; ibv_modify_srq(3).
    ///
    /// # Errors
    /// [`SharedReceiveQueueError::Modify`]; nothing has changed then.
    pub fn modify(&self, attr: &ibv_srq_attr, mask: u32) -> Result<(), SharedReceiveQueueError> {
        let mut attr = *attr;
        let bits = mask.cast_signed();
        let provider = self.inner.pd.context().provider();
        // SAFETY: the queue is alive and the structure is valid for reading and writing.
        let code = unsafe { (provider.modify_srq)(self.as_raw(), &mut attr, bits) };
        check(code).map_err(|source| SharedReceiveQueueError::Modify { mask, source })?;
        if mask & ffi::IBV_SRQ_MAX_WR != 0
            && let Ok(now) = self.query()
        {
            self.inner.max_wr.store(now.max_wr, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Its sizes, and the limit of which an event is still due, or 0; ibv_query_srq(3).
    ///
    /// # Errors
    /// [`SharedReceiveQueueError::Query`].
    pub fn query(&self) -> Result<ibv_srq_attr, SharedReceiveQueueError> {
        let mut attr = ibv_srq_attr::default();
        let provider = self.inner.pd.context().provider();
        // SAFETY: the queue is alive and the structure is valid for writing.
        let code = unsafe { (provider.query_srq)(self.as_raw(), &mut attr) };
        check(code)
            .map(|()| attr)
            .map_err(SharedReceiveQueueError::Query)
    }

    /// Receives that it holds, at least as many as were asked for.
    #[must_use]
    pub fn max_wr(&self) -> u32 {
        self.inner.max_wr.load(Ordering::Relaxed)
    }

    /// Elements of a receive that it was made for.
    #[must_use]
    pub fn max_sge(&self) -> u32 {
        self.inner.max_sge
    }

    /// The protection domain it belongs to.
    #[must_use]
    pub fn protection_domain(&self) -> &ProtectionDomain {
        &self.inner.pd
    }

    /// The C object, valid while a handle to it or to a queue pair made with it lives. Its
    /// `srq_context` belongs to this crate.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_srq {
        self.raw.as_ptr()
    }
}

/// Two handles are equal if they are of the same queue.
impl PartialEq for SharedReceiveQueue {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for SharedReceiveQueue {}

impl fmt::Debug for SharedReceiveQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SharedReceiveQueue")
            .field("context", self.inner.pd.context())
            .field("max_wr", &self.max_wr())
            .field("max_sge", &self.max_sge())
            .finish()
    }
}
