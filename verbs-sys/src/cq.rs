//! Completion queues.

use std::{
    ffi::c_int,
    fmt, io,
    ptr::{self, NonNull},
    sync::{
        Arc, OnceLock, Weak,
        atomic::{AtomicI32, Ordering},
    },
};

use crate::{
    CompletionChannel, Context, CreateError, EventError, PollError, ResizeError, WorkCompletion,
    context::created,
    error::{check, log_destroy},
    ffi::ibv_cq,
};

/// A completion queue. Cheap to clone.
#[derive(Clone)]
pub struct CompletionQueue {
    // Beside the counted part, to save the data path a load.
    raw: NonNull<ibv_cq>,
    inner: Arc<CqInner>,
}

pub(crate) struct CqInner {
    raw: NonNull<ibv_cq>,
    context: Context,
    channel: Option<CompletionChannel>,
    /// Its address is the `cq_context` that comes with events. It is freed after the queue was
    /// destroyed, which waits until every event is acknowledged.
    itself: Box<OnceLock<Weak<CqInner>>>,
}

// SAFETY: verbs on one completion queue may be called from any thread at any time.
unsafe impl Send for CqInner {}
// SAFETY: as above.
unsafe impl Sync for CqInner {}
// SAFETY: the pointer is the counted part's, for which the same holds.
unsafe impl Send for CompletionQueue {}
// SAFETY: as above.
unsafe impl Sync for CompletionQueue {}

impl Drop for CqInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference; every queue pair and every event held one, so all
        // events were acknowledged.
        let code = unsafe { (self.context.provider().destroy_cq)(self.raw.as_ptr()) };
        log_destroy("ibv_destroy_cq", check(code));
    }
}

impl CompletionQueue {
    pub(crate) fn new(
        context: &Context,
        cqe: u32,
        channel: Option<&CompletionChannel>,
    ) -> Result<Self, CreateError> {
        if channel.is_some_and(|channel| !channel.context().is_same(context)) {
            return Err(CreateError::OtherContext {
                call: "ibv_create_cq",
                other: "completion channel",
            });
        }
        let itself: Box<OnceLock<Weak<CqInner>>> = Box::default();
        let entries = c_int::try_from(cqe).unwrap_or(c_int::MAX);
        let word = ptr::from_ref(&*itself).cast_mut().cast();
        let raw_channel = channel.map_or(ptr::null_mut(), CompletionChannel::as_raw);
        // SAFETY: the context is open and the channel is alive and belongs to it.
        let raw = unsafe {
            (context.provider().create_cq)(context.as_raw(), entries, word, raw_channel, 0)
        };
        let raw = created(raw, || format!("ibv_create_cq({cqe})"))?;
        let inner = Arc::new(CqInner {
            raw,
            context: context.clone(),
            channel: channel.cloned(),
            itself,
        });
        // No event can have come yet: none was asked for. A fresh cell takes its first value.
        let _ = inner.itself.set(Arc::downgrade(&inner));
        Ok(Self { raw, inner })
    }

    /// The queue whose event came with the word `word`, or `None` if it is just being destroyed.
    ///
    /// # Safety
    /// `word` came with an event of a queue made by [`CompletionQueue::new`], and the event has not
    /// been acknowledged.
    pub(crate) unsafe fn from_event(word: *mut std::ffi::c_void) -> Option<Self> {
        // SAFETY: the cell is freed only after the event was acknowledged.
        let cell = unsafe { &*word.cast_const().cast::<OnceLock<Weak<CqInner>>>() };
        let inner = cell.get()?.upgrade()?;
        Some(Self {
            raw: inner.raw,
            inner,
        })
    }

    /// Takes up to `completions.len()` completions, writes them to the front of `completions`, and
    /// returns how many; ibv_poll_cq(3). Does not wait.
    ///
    /// # Errors
    /// [`PollError`]: the queue is unusable, since more completions waited than it has room for. An
    /// event ([`CqErr`](crate::AsyncEventKind::CqErr)) tells, too, and its queue pairs are in ERR. A
    /// queue with room for every request of its queue pairs never overruns.
    #[inline]
    pub fn poll(&self, completions: &mut [WorkCompletion]) -> Result<usize, PollError> {
        let room = completions.len().min(c_int::MAX as usize) as c_int;
        // SAFETY: the queue is alive, so its context is; opening made sure that the slot is filled;
        // `WorkCompletion` is a transparent `ibv_wc`, and there is room for as many.
        let count = unsafe {
            let poll_cq = (*(*self.raw.as_ptr()).context)
                .ops
                .poll_cq
                .unwrap_unchecked();
            poll_cq(self.raw.as_ptr(), room, completions.as_mut_ptr().cast())
        };
        usize::try_from(count).map_err(|_| PollError {
            source: io::Error::last_os_error(),
        })
    }

    /// Asks for one event on the channel at the next completion, or with `solicited_only` at the
    /// next solicited receive or error; ibv_req_notify_cq(3). Completions that are already there
    /// make no event: poll again after this call and before waiting.
    ///
    /// # Errors
    /// [`EventError::Notify`].
    #[inline]
    pub fn req_notify(&self, solicited_only: bool) -> Result<(), EventError> {
        // SAFETY: the queue is alive, so its context is; opening made sure that the slot is filled.
        let code = unsafe {
            let req_notify_cq = (*(*self.raw.as_ptr()).context)
                .ops
                .req_notify_cq
                .unwrap_unchecked();
            req_notify_cq(self.raw.as_ptr(), solicited_only.into())
        };
        check(code).map_err(EventError::Notify)
    }

    /// Changes how many entries it can hold, to at least `cqe`; ibv_resize_cq(3). Completions that
    /// wait stay.
    ///
    /// # Errors
    /// [`ResizeError`]; nothing has changed then. `EINVAL` for fewer entries than completions wait, or
    /// more than the device has.
    pub fn resize(&self, cqe: u32) -> Result<(), ResizeError> {
        let entries = c_int::try_from(cqe).unwrap_or(c_int::MAX);
        let provider = self.inner.context.provider();
        // SAFETY: the queue is alive.
        let code = unsafe { (provider.resize_cq)(self.raw.as_ptr(), entries) };
        check(code).map_err(|source| ResizeError { cqe, source })
    }

    /// Entries it can hold, at least as many as were asked for.
    #[must_use]
    pub fn capacity(&self) -> usize {
        // SAFETY: the queue is alive, and the field aligned; another thread may be resizing it.
        let cqe = unsafe { AtomicI32::from_ptr(&raw mut (*self.raw.as_ptr()).cqe) };
        usize::try_from(cqe.load(Ordering::Relaxed)).unwrap_or(0)
    }

    /// The channel its events go to.
    #[must_use]
    pub fn channel(&self) -> Option<&CompletionChannel> {
        self.inner.channel.as_ref()
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while a handle to it or to a queue pair on it lives. Its `cq_context`
    /// belongs to this crate.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_cq {
        self.raw.as_ptr()
    }
}

/// Two handles are equal if they are of the same queue.
impl PartialEq for CompletionQueue {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}

impl Eq for CompletionQueue {}

impl fmt::Debug for CompletionQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionQueue")
            .field("context", self.context())
            .field("capacity", &self.capacity())
            .finish()
    }
}
