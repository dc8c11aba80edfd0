//! Where to look for what is executing: the epoch words of this process's queue pairs, and of those of
//! peers that are connected to them. Whoever takes something away waits for all of them.
//!
//! A deregistration looks at every word, so they are found without following the queue pairs, and
//! under one lock.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rustix::io::Errno;

use super::epoch;
use super::layout::Info;
use super::link::Link;

/// The queue pairs that there are, with their connections.
#[derive(Debug, Default)]
pub(super) struct Executing {
    places: RwLock<Vec<Place>>,
}

#[derive(Debug)]
struct Place {
    /// The queue pair's place in this process's tables.
    index: usize,
    link: Option<Arc<Link>>,
}

impl Executing {
    fn read(&self) -> RwLockReadGuard<'_, Vec<Place>> {
        self.places.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Not to be called under an epoch lock: who waits for that holds this one.
    fn write(&self) -> RwLockWriteGuard<'_, Vec<Place>> {
        self.places.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A queue pair is there.
    pub(super) fn add(&self, index: usize) {
        self.write().push(Place { index, link: None });
    }

    /// It is gone.
    pub(super) fn remove(&self, index: usize) {
        self.write().retain(|place| place.index != index);
    }

    /// It is about to take requests of a peer, or takes none any more and the peer has left.
    pub(super) fn connect(&self, index: usize, link: Option<Arc<Link>>) {
        // What was there is dropped without the lock.
        let mut link = link;
        let mut places = self.write();
        if let Some(place) = places.iter_mut().find(|place| place.index == index) {
            std::mem::swap(&mut place.link, &mut link);
        }
        drop(places);
    }

    /// Waits until no queue pair, ours or a peer's connected to ours, executes a request that began
    /// before the call. Posts are [fenced](super::fencing).
    ///
    /// # Errors
    /// `EBUSY` if a peer's process is stopped in the middle of one.
    pub(super) fn quiesce(&self, info: &Info) -> Result<(), Errno> {
        for place in &*self.read() {
            epoch::quiesce_own(&info.qps[place.index]);
            if let Some(link) = &place.link {
                link.quiesce_peer()?;
            }
        }
        Ok(())
    }

    /// As [`quiesce`](Self::quiesce), for this process's own queue pairs only.
    pub(super) fn quiesce_own(&self, info: &Info) {
        for place in &*self.read() {
            epoch::quiesce_own(&info.qps[place.index]);
        }
    }
}
