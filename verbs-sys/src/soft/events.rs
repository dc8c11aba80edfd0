//! Asynchronous events: what happens to an object and has no completion to tell of it;
//! ibv_get_async_event(3).
//!
//! A context has one queue of events. An object's undelivered events die with it, and its
//! destruction waits until the delivered ones are acknowledged, so that nobody is left with a handle
//! to nothing.

use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::link::signal;
use crate::ffi::ibv_async_event;

/// The events of a context that nobody has fetched.
#[derive(Debug)]
pub(super) struct AsyncEvents {
    /// Readable exactly while an event waits: written and read under the lock of `waiting` only.
    fd: OwnedFd,
    waiting: Mutex<VecDeque<Waiting>>,
}

struct Waiting {
    event: ibv_async_event,
    counts: Arc<Counts>,
}

// SAFETY: the pointer in the event is an object's address, which is never followed here.
unsafe impl Send for Waiting {}

impl std::fmt::Debug for Waiting {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Waiting")
            .field("event_type", &self.event.event_type)
            .finish_non_exhaustive()
    }
}

/// What an object's destruction has to know of its events.
#[derive(Debug, Default)]
struct Counts {
    /// Locked after the queue of its context.
    state: Mutex<State>,
    acknowledged: Condvar,
}

#[derive(Debug, Default)]
struct State {
    unacknowledged: u32,
    /// The object is being destroyed: it has no more events.
    gone: bool,
}

impl Counts {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl AsyncEvents {
    pub(super) fn new() -> Result<Self, Errno> {
        Ok(Self {
            fd: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            waiting: Mutex::default(),
        })
    }

    pub(super) fn fd(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// The next event; blocks unless the descriptor was made non-blocking.
    pub(super) fn next(&self) -> Result<ibv_async_event, Errno> {
        loop {
            if let Some(event) = self.take() {
                return Ok(event);
            }
            if rustix::fs::fcntl_getfl(&self.fd)?.contains(OFlags::NONBLOCK) {
                return Err(Errno::AGAIN);
            }
            rustix::event::poll(&mut [PollFd::new(&self.fd, PollFlags::IN)], None)?;
        }
    }

    /// The next event, if there is one.
    pub(super) fn take(&self) -> Option<ibv_async_event> {
        let mut waiting = self.lock();
        let Waiting { event, counts } = waiting.pop_front()?;
        // Under both locks: a destruction that comes now sees the event delivered.
        counts.state().unacknowledged += 1;
        self.settle(&waiting);
        Some(event)
    }

    /// After something was taken from the queue, which was not empty.
    fn settle(&self, waiting: &VecDeque<Waiting>) {
        if waiting.is_empty() {
            // Does not block: it was written when the queue stopped being empty.
            let _ = rustix::io::read(&self.fd, &mut [0; 8]);
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Waiting>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An object as a source of events.
#[derive(Debug)]
pub(super) struct Source {
    queue: Arc<AsyncEvents>,
    counts: Arc<Counts>,
}

impl Source {
    pub(super) fn new(queue: &Arc<AsyncEvents>) -> Self {
        Self {
            queue: Arc::clone(queue),
            counts: Arc::default(),
        }
    }

    /// Queues an event, unless the object is going.
    #[cold]
    pub(super) fn raise(&self, event: ibv_async_event) {
        let mut waiting = self.queue.lock();
        if self.counts.state().gone {
            return;
        }
        waiting.push_back(Waiting {
            event,
            counts: Arc::clone(&self.counts),
        });
        if waiting.len() == 1 {
            signal(&self.queue.fd);
        }
    }

    /// ibv_ack_async_event(3).
    pub(super) fn acknowledge(&self) {
        // Whoever waits may free the object before this call is over.
        let counts = Arc::clone(&self.counts);
        let mut state = counts.state();
        state.unacknowledged = state.unacknowledged.saturating_sub(1);
        if state.unacknowledged == 0 {
            counts.acknowledged.notify_all();
        }
    }

    /// The object goes: drops its undelivered events and waits for the others to be acknowledged.
    pub(super) fn retire(&self) {
        let mut waiting = self.queue.lock();
        self.counts.state().gone = true;
        if !waiting.is_empty() {
            waiting.retain(|other| !Arc::ptr_eq(&other.counts, &self.counts));
            self.queue.settle(&waiting);
        }
        drop(waiting);
        let state = self.counts.state();
        drop(
            self.counts
                .acknowledged
                .wait_while(state, |state| state.unacknowledged > 0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ffi::{IBV_EVENT_COMM_EST, IBV_EVENT_QP_FATAL};

    fn event(event_type: u32) -> ibv_async_event {
        ibv_async_event {
            event_type,
            ..ibv_async_event::zeroed()
        }
    }

    fn queue() -> Arc<AsyncEvents> {
        let queue = Arc::new(AsyncEvents::new().unwrap());
        rustix::io::ioctl_fionbio(&queue.fd, true).unwrap();
        queue
    }

    fn is_readable(queue: &AsyncEvents) -> bool {
        let mut fds = [PollFd::new(&queue.fd, PollFlags::IN)];
        let now = rustix::time::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        rustix::event::poll(&mut fds, Some(&now)).unwrap() > 0
    }

    #[test]
    fn the_descriptor_is_readable_while_an_event_waits() {
        let queue = queue();
        let (one, other) = (Source::new(&queue), Source::new(&queue));
        assert!(!is_readable(&queue));
        one.raise(event(IBV_EVENT_COMM_EST));
        other.raise(event(IBV_EVENT_QP_FATAL));
        one.raise(event(IBV_EVENT_QP_FATAL));
        assert_eq!(queue.next().unwrap().event_type, IBV_EVENT_COMM_EST);
        assert!(is_readable(&queue));
        one.acknowledge();
        one.retire();
        assert!(is_readable(&queue));
        assert_eq!(queue.next().unwrap().event_type, IBV_EVENT_QP_FATAL);
        assert!(!is_readable(&queue));
        assert_eq!(queue.next().err(), Some(Errno::AGAIN));
    }

    #[test]
    fn the_last_event_may_die_with_its_object() {
        let queue = queue();
        let source = Source::new(&queue);
        source.raise(event(IBV_EVENT_COMM_EST));
        source.retire();
        source.raise(event(IBV_EVENT_QP_FATAL));
        assert!(!is_readable(&queue));
        assert_eq!(queue.next().err(), Some(Errno::AGAIN));
    }

    #[test]
    fn a_blocking_descriptor_waits_for_an_event() {
        let queue = Arc::new(AsyncEvents::new().unwrap());
        let source = Source::new(&queue);
        std::thread::scope(|scope| {
            let waiter = scope.spawn(|| queue.next().unwrap().event_type);
            source.raise(event(IBV_EVENT_COMM_EST));
            assert_eq!(waiter.join().unwrap(), IBV_EVENT_COMM_EST);
        });
    }

    #[test]
    fn going_waits_for_what_was_delivered() {
        let queue = queue();
        let source = Source::new(&queue);
        source.raise(event(IBV_EVENT_COMM_EST));
        queue.next().unwrap();
        std::thread::scope(|scope| {
            let going = scope.spawn(|| source.retire());
            while !source.counts.state().gone {
                std::thread::yield_now();
            }
            assert!(!going.is_finished());
            source.acknowledge();
        });
    }
}
