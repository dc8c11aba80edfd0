//! Where the receives of a shared receive queue complete that has a completion queue of its own.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Domain, Membership};
use crate::ffi::ibv_wc;
use crate::soft::cq::Cq;
use crate::soft::process::Process;
use crate::soft::qp::MAX_WR;

/// The port of a shared receive queue. Several queue pairs complete there, each under its receive lock.
#[derive(Debug)]
pub(in crate::soft) struct Port {
    process: Arc<Process>,
    pub member: Membership,
    /// By which requests name the queue.
    pub number: u32,
    cq: Arc<Cq>,
    /// Completions that can wait, those of receives that are in use among them.
    places: u32,
    outlet: Mutex<Outlet>,
}

/// Guarded for as long as it takes to move a completion.
#[derive(Debug)]
struct Outlet {
    waiting: VecDeque<ibv_wc>,
    /// Receives in use.
    in_use: u32,
    /// Completions came since the completion queue was armed, polled by now or not.
    came: bool,
    /// Why no receive is to be used any more.
    shut: Option<Unready>,
}

/// Why no receive can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Unready {
    /// No place for its completion: polls are behind.
    Full,
    /// The shared receive queue is gone.
    Gone,
    /// Its completion queue has overrun.
    Broken,
}

impl Port {
    pub(in crate::soft) fn new(
        process: &Arc<Process>,
        member: Membership,
        number: u32,
        cq: Arc<Cq>,
    ) -> Arc<Self> {
        let places = cq.cqe().min(MAX_WR);
        Arc::new(Self {
            process: Arc::clone(process),
            member,
            number,
            cq,
            places,
            outlet: Mutex::new(Outlet {
                waiting: VecDeque::with_capacity(places as usize),
                in_use: 0,
                came: false,
                shut: None,
            }),
        })
    }

    fn outlet(&self) -> MutexGuard<'_, Outlet> {
        self.outlet.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(in crate::soft) fn domain(&self) -> &Domain {
        &self.member.domain
    }

    pub(in crate::soft) fn cq(&self) -> &Arc<Cq> {
        &self.cq
    }

    /// A receive is about to be used.
    pub(in crate::soft) fn reserve(&self) -> Result<(), Unready> {
        let mut outlet = self.outlet();
        if let Some(why) = outlet.shut {
            return Err(why);
        }
        if outlet.waiting.len() + outlet.in_use as usize >= self.places as usize {
            return Err(Unready::Full);
        }
        outlet.in_use += 1;
        Ok(())
    }

    /// It will not be used after all.
    pub(in crate::soft) fn release(&self) {
        let mut outlet = self.outlet();
        outlet.in_use = outlet.in_use.saturating_sub(1);
    }

    /// Whether receives can be used, if there is a place.
    pub(in crate::soft) fn shut(&self) -> Option<Unready> {
        self.outlet().shut
    }

    /// The receive of a queue pair has ended.
    pub(in crate::soft) fn deliver(&self, wc: ibv_wc, solicited: bool) {
        let mut outlet = self.outlet();
        outlet.in_use = outlet.in_use.saturating_sub(1);
        if outlet.shut.is_some() {
            return;
        }
        outlet.waiting.push_back(wc);
        outlet.came = true;
        // Under the lock: a queue that was retired is not told.
        self.cq.notify_of_port(solicited);
    }

    /// Hands out completions, in a poll.
    pub(in crate::soft) fn poll(&self, wcs: &mut [ibv_wc]) -> usize {
        self.domain().take_in();
        let mut outlet = self.outlet();
        let was_full = outlet.waiting.len() == self.places as usize;
        let mut filled = 0;
        while let Some(wc) = wcs.get_mut(filled)
            && let Some(next) = outlet.waiting.pop_front()
        {
            *wc = next;
            filled += 1;
        }
        drop(outlet);
        if was_full && filled > 0 {
            // A message may wait for the place, and this may be the last poll for long.
            self.process.nudge_later();
        }
        filled
    }

    /// Completions that it could have waiting.
    pub(in crate::soft) fn places(&self) -> u64 {
        self.places.into()
    }

    /// Completions that wait to be polled.
    pub(in crate::soft) fn waiting(&self) -> u64 {
        self.outlet().waiting.len() as u64
    }

    /// The completion queue is armed. Whether completions have come since it was before.
    pub(in crate::soft) fn mark(&self) -> bool {
        std::mem::take(&mut self.outlet().came)
    }

    /// Whether an event has something to tell: completions that came since, or any that wait.
    pub(in crate::soft) fn has_something(&self) -> bool {
        let outlet = self.outlet();
        outlet.came || !outlet.waiting.is_empty()
    }

    /// Nothing is taken any more, for this reason, and what waits is gone.
    pub(in crate::soft) fn shut_down(&self, why: Unready) {
        let mut outlet = self.outlet();
        outlet.shut = Some(why);
        outlet.waiting.clear();
    }
}
