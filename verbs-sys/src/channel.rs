//! Completion channels: sleeping until work completes.

use std::{
    fmt, io,
    os::fd::{AsFd, BorrowedFd},
    ptr::{self, NonNull},
    sync::Arc,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    CompletionQueue, Context, CreateError, EventError,
    context::created,
    error::{check, log_destroy},
    ffi::{ibv_comp_channel, ibv_cq},
};

/// A completion channel; ibv_create_comp_channel(3), ibv_get_cq_event(3). Cheap to clone.
///
/// Its file descriptor is non-blocking: a waiting thread sleeps in poll(2), so that several
/// threads, or an event loop of yours through [`AsFd`], can share the channel.
#[derive(Clone)]
pub struct CompletionChannel {
    inner: Arc<ChannelInner>,
}

struct ChannelInner {
    raw: NonNull<ibv_comp_channel>,
    context: Context,
}

// SAFETY: verbs on one channel may be called from any thread at any time.
unsafe impl Send for ChannelInner {}
// SAFETY: as above.
unsafe impl Sync for ChannelInner {}

impl Drop for ChannelInner {
    fn drop(&mut self) {
        // SAFETY: this is the last reference, and every completion queue on it held one.
        let code = unsafe { (self.context.provider().destroy_comp_channel)(self.raw.as_ptr()) };
        log_destroy("ibv_destroy_comp_channel", check(code));
    }
}

impl CompletionChannel {
    pub(crate) fn new(context: &Context) -> Result<Self, CreateError> {
        const CALL: &str = "ibv_create_comp_channel";
        // SAFETY: the context is open.
        let raw = unsafe { (context.provider().create_comp_channel)(context.as_raw()) };
        let raw = created(raw, || CALL.to_owned())?;
        let channel = Self {
            inner: Arc::new(ChannelInner {
                raw,
                context: context.clone(),
            }),
        };
        rustix::io::ioctl_fionbio(&channel, true).map_err(|error| CreateError::Refused {
            call: CALL.to_owned(),
            source: error.into(),
        })?;
        Ok(channel)
    }

    /// Waits for an event, for ever.
    ///
    /// # Errors
    /// [`EventError`]. A signal does not end the wait.
    pub fn wait(&self) -> Result<CompletionEvent, EventError> {
        loop {
            self.sleep(None)?;
            if let Some(event) = self.try_get_event()? {
                return Ok(event);
            }
        }
    }

    /// Waits for an event until `timeout` has passed; then gives `None`.
    ///
    /// # Errors
    /// [`EventError`]. A signal does not end the wait.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<Option<CompletionEvent>, EventError> {
        // A time too far to be reckoned with is for ever.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let ready = self.sleep(left)?;
            let event = if ready { self.try_get_event()? } else { None };
            let expired = left.is_some_and(|left| left.is_zero());
            if event.is_some() || expired {
                return Ok(event);
            }
        }
    }

    /// Takes an event if one is there; ibv_get_cq_event(3).
    ///
    /// # Errors
    /// [`EventError::Get`].
    pub fn try_get_event(&self) -> Result<Option<CompletionEvent>, EventError> {
        loop {
            let mut cq: *mut ibv_cq = ptr::null_mut();
            let mut word = ptr::null_mut();
            // SAFETY: the channel is alive, and both pointers are valid for one write.
            let code = unsafe {
                (self.inner.context.provider().get_cq_event)(
                    self.inner.raw.as_ptr(),
                    &mut cq,
                    &mut word,
                )
            };
            if let Err(error) = check(code) {
                match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(EventError::Get(error)),
                }
            }
            // SAFETY: the event is of a queue of this crate, because only those are on the channel,
            // and it has not been acknowledged.
            match unsafe { CompletionQueue::from_event(word) } {
                Some(queue) => return Ok(Some(CompletionEvent { queue })),
                // The queue is being destroyed and waits for this; nobody wants the event.
                // SAFETY: the queue cannot go before this one event is acknowledged.
                None => unsafe { (self.inner.context.provider().ack_cq_events)(cq, 1) },
            }
        }
    }

    /// Sleeps until the channel is readable or the time has passed; tells whether it is readable.
    fn sleep(&self, timeout: Option<Duration>) -> Result<bool, EventError> {
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let mut fds = [PollFd::new(self, PollFlags::IN)];
        match poll(&mut fds, timeout.as_ref()) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(EventError::Wait(error.into())),
        }
    }

    /// The context it belongs to.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// The C object, valid while a handle to it or to a completion queue on it lives.
    #[must_use]
    pub fn as_raw(&self) -> *mut ibv_comp_channel {
        self.inner.raw.as_ptr()
    }
}

/// The file descriptor is readable while an event waits.
impl AsFd for CompletionChannel {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the channel is alive and keeps its descriptor open as long.
        unsafe { BorrowedFd::borrow_raw((*self.inner.raw.as_ptr()).fd) }
    }
}

impl fmt::Debug for CompletionChannel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompletionChannel")
            .field("context", self.context())
            .finish()
    }
}

/// One event: a completion queue that had asked for it has a completion. Dropping it acknowledges
/// it; ibv_ack_cq_events(3).
#[derive(Debug)]
pub struct CompletionEvent {
    queue: CompletionQueue,
}

impl CompletionEvent {
    /// The queue that the event is of. Ask for the next event and poll it.
    #[must_use]
    pub fn queue(&self) -> &CompletionQueue {
        &self.queue
    }

    /// Whether the event is of this queue.
    #[must_use]
    pub fn is_of(&self, queue: &CompletionQueue) -> bool {
        self.queue == *queue
    }
}

impl Drop for CompletionEvent {
    fn drop(&mut self) {
        let provider = self.queue.context().provider();
        // SAFETY: the queue is alive, and this one event of it has not been acknowledged.
        unsafe { (provider.ack_cq_events)(self.queue.as_raw(), 1) };
    }
}
