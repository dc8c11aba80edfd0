//! Extended reliable connections (XRC): requests name the shared receive queue that they are for.
//!
//! A queue pair that takes such requests has an XRC domain in the place of a protection domain and of queues. It may use
//! each shared receive queue of that domain: the keys of a request are checked in the protection domain of the queue
//! that it names, and its receive is one of that queue's and completes at the queue's [`Port`]. Polls of the completion
//! queue behind a port look at all queue pairs of the domain.

mod domain;
mod port;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock, Weak};

pub(super) use self::domain::{Domain, Handle, Membership};
pub(super) use self::port::{Port, Unready};
use super::srq::Srq;

/// What a process has of XRC.
#[derive(Debug, Default)]
pub(super) struct Registry {
    /// Those that have a file, by its device and inode.
    domains: Mutex<HashMap<(u64, u64), Weak<Domain>>>,
    /// By number.
    srqs: RwLock<HashMap<u32, Arc<Srq>>>,
}

impl Registry {
    /// The shared receive queue of this number, whatever its domain.
    pub(super) fn srq(&self, number: u32) -> Option<Arc<Srq>> {
        let srqs = self.srqs.read().unwrap_or_else(PoisonError::into_inner);
        srqs.get(&number).map(Arc::clone)
    }

    pub(super) fn add(&self, number: u32, srq: Arc<Srq>) {
        let mut srqs = self.srqs.write().unwrap_or_else(PoisonError::into_inner);
        srqs.insert(number, srq);
    }

    pub(super) fn remove(&self, number: u32) {
        let mut srqs = self.srqs.write().unwrap_or_else(PoisonError::into_inner);
        // What is left of it is dropped without the lock.
        let gone = srqs.remove(&number);
        drop(srqs);
        drop(gone);
    }

    /// What the upkeep thread does: counts completions that no poll has come for.
    pub(super) fn count_if_due(&self) {
        let srqs = self.srqs.read().unwrap_or_else(PoisonError::into_inner);
        let queues: Vec<_> = srqs
            .values()
            .filter_map(|srq| Some(Arc::clone(srq.port()?.cq())))
            .collect();
        drop(srqs);
        for cq in queues {
            cq.count_if_due();
        }
    }
}
