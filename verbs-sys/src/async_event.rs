//! Asynchronous events of a context.

use std::{
    fmt, io,
    os::fd::BorrowedFd,
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    AsyncEventError, CompletionQueue, Context, QueuePair, SharedReceiveQueue,
    error::check,
    ffi::{self, ibv_async_event, ibv_event_type},
};

/// What happened, and to what; ibv_get_async_event(3).
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AsyncEventKind {
    /// The completion queue has overrun, or is broken otherwise: it is unusable, and so are its
    /// queue pairs.
    CqErr(CompletionQueue),
    /// The queue pair of this number is in ERR, and no completion tells why.
    QpFatal(u32),
    /// The queue pair of this number is in ERR: its peer asked for what it does not do.
    QpReqErr(u32),
    /// The queue pair of this number is in ERR: its peer's request had a wrong key, range or right.
    QpAccessErr(u32),
    /// The peer has begun to send to the queue pair of this number, which is still in RTR.
    CommEst(u32),
    /// The queue pair of this number, in SQD, has ended what was under way.
    SqDrained(u32),
    /// The queue pair of this number is in ERR, and takes no more receives from its shared receive
    /// queue.
    QpLastWqeReached(u32),
    /// Fewer receives than asked for are left in the shared receive queue. The event has to be asked
    /// for again.
    SrqLimitReached(SharedReceiveQueue),
    /// The shared receive queue is broken.
    SrqErr(SharedReceiveQueue),
    /// The queue pair of this number has changed to its alternate path.
    PathMig(u32),
    /// The queue pair of this number could not change to its alternate path.
    PathMigErr(u32),
    /// The device is broken.
    DeviceFatal,
    /// This port, counted from 1, is up.
    PortActive(u8),
    /// This port is down.
    PortErr(u8),
    /// The local identifier of this port has changed.
    LidChange(u8),
    /// The partition table of this port has changed.
    PkeyChange(u8),
    /// The subnet manager of this port has changed.
    SmChange(u8),
    /// The subnet manager of this port asks its clients to register anew.
    ClientReregister(u8),
    /// The table of addresses of this port has changed.
    GidChange(u8),
    /// Another `ibv_event_type`.
    Other(ibv_event_type),
}

/// An asynchronous event. Dropping it acknowledges it; ibv_ack_async_event(3).
///
/// The object that it is of cannot be destroyed before: dropping the last handle to it waits until
/// this event is dropped. A thread that holds the event and drops the object waits for itself.
pub struct AsyncEvent {
    raw: ibv_async_event,
    kind: AsyncEventKind,
    context: Context,
}

// SAFETY: the pointer in the event is of an object that may be used from any thread, and that
// cannot go before the event is acknowledged.
unsafe impl Send for AsyncEvent {}
// SAFETY: as above.
unsafe impl Sync for AsyncEvent {}

impl AsyncEvent {
    /// What happened, and to what.
    #[must_use]
    pub fn kind(&self) -> &AsyncEventKind {
        &self.kind
    }

    /// Its number in the verbs ABI.
    #[must_use]
    pub fn event_type(&self) -> ibv_event_type {
        self.raw.event_type
    }

    /// Whether it is of this queue pair.
    #[must_use]
    pub fn is_of(&self, qp: &QueuePair) -> bool {
        // SAFETY: an event of a queue pair holds the address of one.
        is_of_qp(self.raw.event_type) && unsafe { self.raw.element.qp } == qp.as_raw()
    }

    /// The context that it came from.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for AsyncEvent {
    fn drop(&mut self) {
        // SAFETY: the event was delivered by this provider and is acknowledged once.
        unsafe { (self.context.provider().ack_async_event)(&mut self.raw) };
    }
}

impl fmt::Debug for AsyncEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AsyncEvent")
            .field("kind", &self.kind)
            .finish_non_exhaustive()
    }
}

fn is_of_qp(event_type: ibv_event_type) -> bool {
    matches!(
        event_type,
        ffi::IBV_EVENT_QP_FATAL
            | ffi::IBV_EVENT_QP_REQ_ERR
            | ffi::IBV_EVENT_QP_ACCESS_ERR
            | ffi::IBV_EVENT_COMM_EST
            | ffi::IBV_EVENT_SQ_DRAINED
            | ffi::IBV_EVENT_PATH_MIG
            | ffi::IBV_EVENT_PATH_MIG_ERR
            | ffi::IBV_EVENT_QP_LAST_WQE_REACHED
    )
}

impl Context {
    /// Waits for an asynchronous event, for ever.
    ///
    /// # Errors
    /// [`AsyncEventError`]. A signal does not end the wait.
    pub fn next_async_event(&self) -> Result<AsyncEvent, AsyncEventError> {
        loop {
            self.sleep(None)?;
            if let Some(event) = self.try_get_async_event()? {
                return Ok(event);
            }
        }
    }

    /// Waits for an asynchronous event until `timeout` has passed; then gives `None`.
    ///
    /// # Errors
    /// [`AsyncEventError`]. A signal does not end the wait.
    pub fn next_async_event_timeout(
        &self,
        timeout: Duration,
    ) -> Result<Option<AsyncEvent>, AsyncEventError> {
        // A time too far to be reckoned with is for ever.
        let deadline = Instant::now().checked_add(timeout);
        loop {
            let left = deadline.map(|at| at.saturating_duration_since(Instant::now()));
            let ready = self.sleep(left)?;
            let event = if ready {
                self.try_get_async_event()?
            } else {
                None
            };
            let expired = left.is_some_and(|left| left.is_zero());
            if event.is_some() || expired {
                return Ok(event);
            }
        }
    }

    /// Takes an asynchronous event if one is there; ibv_get_async_event(3).
    ///
    /// # Errors
    /// [`AsyncEventError::Get`].
    pub fn try_get_async_event(&self) -> Result<Option<AsyncEvent>, AsyncEventError> {
        loop {
            let mut raw = ibv_async_event::zeroed();
            // SAFETY: the context is open, and the structure is valid for writing.
            let code = unsafe { (self.provider().get_async_event)(self.as_raw(), &mut raw) };
            if let Err(error) = check(code) {
                match error.kind() {
                    io::ErrorKind::WouldBlock => return Ok(None),
                    io::ErrorKind::Interrupted => continue,
                    _ => return Err(AsyncEventError::Get(error)),
                }
            }
            // SAFETY: just delivered.
            match unsafe { kind(&raw) } {
                Some(kind) => {
                    return Ok(Some(AsyncEvent {
                        raw,
                        kind,
                        context: self.clone(),
                    }));
                }
                // Its object is being destroyed and waits for this; nobody wants the event.
                // SAFETY: delivered, and acknowledged once.
                None => unsafe { (self.provider().ack_async_event)(&mut raw) },
            }
        }
    }

    /// Readable while an asynchronous event waits, for an event loop; it is non-blocking.
    #[must_use]
    pub fn async_fd(&self) -> BorrowedFd<'_> {
        // SAFETY: the context is open and keeps its descriptor as long.
        unsafe { BorrowedFd::borrow_raw((*self.as_raw()).async_fd) }
    }

    /// Sleeps until an event waits or the time has passed; tells whether one waits.
    fn sleep(&self, timeout: Option<Duration>) -> Result<bool, AsyncEventError> {
        let timeout = timeout.and_then(|time| Timespec::try_from(time).ok());
        let fd = self.async_fd();
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], timeout.as_ref()) {
            Ok(count) => Ok(count > 0),
            Err(Errno::INTR) => Ok(false),
            Err(error) => Err(AsyncEventError::Wait(error.into())),
        }
    }
}

/// What an event says; `None` if its object is just being destroyed.
///
/// # Safety
/// The event was delivered and is not acknowledged, and its object was made by this crate.
unsafe fn kind(raw: &ibv_async_event) -> Option<AsyncEventKind> {
    use AsyncEventKind as Kind;
    // SAFETY: the type tells that it is of a queue pair, which lives until the event is acknowledged.
    let qp = || unsafe { (*raw.element.qp).qp_num };
    // SAFETY: the type tells that it is of a port, and any number is valid.
    let port = || u8::try_from(unsafe { raw.element.port_num }).unwrap_or(0);
    // SAFETY: as for queue pairs; the word is this crate's.
    let srq = || unsafe { SharedReceiveQueue::from_event((*raw.element.srq).srq_context) };
    Some(match raw.event_type {
        ffi::IBV_EVENT_CQ_ERR => {
            // SAFETY: as for queue pairs; the word is this crate's.
            Kind::CqErr(unsafe { CompletionQueue::from_event((*raw.element.cq).cq_context) }?)
        }
        ffi::IBV_EVENT_SRQ_LIMIT_REACHED => Kind::SrqLimitReached(srq()?),
        ffi::IBV_EVENT_SRQ_ERR => Kind::SrqErr(srq()?),
        ffi::IBV_EVENT_QP_FATAL => Kind::QpFatal(qp()),
        ffi::IBV_EVENT_QP_REQ_ERR => Kind::QpReqErr(qp()),
        ffi::IBV_EVENT_QP_ACCESS_ERR => Kind::QpAccessErr(qp()),
        ffi::IBV_EVENT_COMM_EST => Kind::CommEst(qp()),
        ffi::IBV_EVENT_SQ_DRAINED => Kind::SqDrained(qp()),
        ffi::IBV_EVENT_QP_LAST_WQE_REACHED => Kind::QpLastWqeReached(qp()),
        ffi::IBV_EVENT_PATH_MIG => Kind::PathMig(qp()),
        ffi::IBV_EVENT_PATH_MIG_ERR => Kind::PathMigErr(qp()),
        ffi::IBV_EVENT_DEVICE_FATAL => Kind::DeviceFatal,
        ffi::IBV_EVENT_PORT_ACTIVE => Kind::PortActive(port()),
        ffi::IBV_EVENT_PORT_ERR => Kind::PortErr(port()),
        ffi::IBV_EVENT_LID_CHANGE => Kind::LidChange(port()),
        ffi::IBV_EVENT_PKEY_CHANGE => Kind::PkeyChange(port()),
        ffi::IBV_EVENT_SM_CHANGE => Kind::SmChange(port()),
        ffi::IBV_EVENT_CLIENT_REREGISTER => Kind::ClientReregister(port()),
        ffi::IBV_EVENT_GID_CHANGE => Kind::GidChange(port()),
        other => Kind::Other(other),
    })
}
