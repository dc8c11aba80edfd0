//! Completion channels: an eventfd that counts the events due.

use std::cell::UnsafeCell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::EventfdFlags;
use rustix::io::Errno;

use super::cq::Cq;
use crate::ffi::{ibv_comp_channel, ibv_context};

/// A completion channel. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Channel {
    channel: UnsafeCell<ibv_comp_channel>,
    /// In semaphore mode: each read takes one event.
    pub fd: OwnedFd,
    cqs: Mutex<Vec<Arc<Cq>>>,
}

// SAFETY: the C structure is written only at creation; the rest is Send.
unsafe impl Send for Channel {}
// SAFETY: as for Send; the list is behind a mutex.
unsafe impl Sync for Channel {}

impl Channel {
    pub(super) fn new(context: *mut ibv_context) -> Result<Arc<Self>, Errno> {
        let fd = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        let channel = ibv_comp_channel {
            context,
            fd: fd.as_raw_fd(),
            refcnt: 0,
        };
        Ok(Arc::new(Self {
            channel: UnsafeCell::new(channel),
            fd,
            cqs: Mutex::default(),
        }))
    }

    pub(super) fn attach(&self, cq: &Arc<Cq>) {
        self.lock().push(Arc::clone(cq));
    }

    pub(super) fn detach(&self, cq: &Cq) {
        let mut cqs = self.lock();
        cqs.retain(|other| !std::ptr::eq(&raw const **other, cq));
        // Events that nobody fetched die with their queue.
        for _ in 0..cq.cq_bell().fired.swap(0, Ordering::AcqRel) {
            let mut fds = [rustix::event::PollFd::new(
                &self.fd,
                rustix::event::PollFlags::IN,
            )];
            let now = rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            };
            if matches!(rustix::event::poll(&mut fds, Some(&now)), Ok(n) if n > 0) {
                let _ = rustix::io::read(&self.fd, &mut [0; 8]);
            }
        }
    }

    pub(super) fn has_cqs(&self) -> bool {
        !self.lock().is_empty()
    }

    /// The next event; blocks unless the descriptor was made non-blocking.
    pub(super) fn next_event(&self) -> Result<Arc<Cq>, Errno> {
        loop {
            rustix::io::read(&self.fd, &mut [0; 8])?;
            if let Some(cq) = self.take_event() {
                return Ok(cq);
            }
        }
    }

    /// The queue of an event, once the descriptor has been read. `None`: the event was of a queue destroyed meanwhile, of
    /// nothing that came since that was armed, or a peer's nonsense.
    pub(super) fn take_event(&self) -> Option<Arc<Cq>> {
        let cqs = self.lock();
        let due = |cq: &&Arc<Cq>| {
            let fired = &cq.cq_bell().fired;
            fired
                .try_update(Ordering::AcqRel, Ordering::Relaxed, |n| n.checked_sub(1))
                .is_ok()
        };
        // The list stays locked, so no queue is destroyed meanwhile. What a peer counted that was killed before it wrote
        // the descriptor must not be taken for another queue's.
        let cq = cqs.iter().filter(due).find(|cq| cq.owes_event())?;
        cq.event_delivered();
        Some(Arc::clone(cq))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Arc<Cq>>> {
        self.cqs.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
