//! The room of a completion queue: whether its queue pairs could fill it, whether they have, and
//! changing it.
//!
//! A queue with a place for every request of its queue pairs cannot overrun, and is not watched. In
//! any other, completions are counted: by each poll before it hands out any, and by the upkeep thread
//! when some became visible and no poll has come since.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use rustix::io::Errno;

use super::{Cq, Member, Polled};
use crate::ffi::{IBV_EVENT_CQ_ERR, ibv_async_event, ibv_async_event_element};
use crate::soft::xrc::Unready;

/// Whether a queue can overrun; guarded by the polling lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Room {
    /// A place for every request.
    Ample,
    /// Less: completions are counted.
    Scarce,
    /// It has overrun; nothing is handed out any more.
    Overrun,
}

/// What those look at who make completions visible.
#[derive(Debug, Default)]
pub(super) struct Watch {
    is_scarce: AtomicBool,
    /// Completions became visible, and nobody has counted since.
    is_due: AtomicBool,
}

impl Member {
    /// Completions that it could have waiting.
    pub(super) fn places(&self) -> u64 {
        u64::from(self.qp.places(self.sends, self.receives))
    }

    pub(super) fn waiting(&self) -> u64 {
        u64::from(self.qp.waiting(self.sends, self.receives))
    }
}

impl Polled {
    /// Completions that wait to be polled.
    fn waiting(&self) -> u64 {
        let at_members: u64 = self.members.iter().map(Member::waiting).sum();
        at_members + self.waiting_at_ports()
    }

    fn waiting_at_ports(&self) -> u64 {
        self.ports.iter().map(|port| port.waiting()).sum()
    }
}

impl Cq {
    /// Entries it has room for.
    pub(in crate::soft) fn cqe(&self) -> u32 {
        self.entries().load(Ordering::Relaxed).unsigned_abs()
    }

    /// The field where C programs look for it, too.
    fn entries(&self) -> &AtomicI32 {
        // SAFETY: the field is valid and aligned as long as `self` is, and after creation everybody
        // in this crate reaches it as an atomic.
        unsafe { AtomicI32::from_ptr(&raw mut (*self.cq.get()).base.cqe) }
    }

    /// Whether it has overrun, and cannot be used any more.
    pub(in crate::soft) fn is_broken(&self) -> bool {
        self.polled.lock().room == Room::Overrun
    }

    /// After the queue pairs or the size have changed.
    pub(super) fn reckon(&self, polled: &mut Polled) {
        if polled.room == Room::Overrun {
            return;
        }
        let is_scarce = !self.is_ample && polled.places > u64::from(self.cqe());
        polled.room = if is_scarce { Room::Scarce } else { Room::Ample };
        self.watch.is_scarce.store(is_scarce, Ordering::SeqCst);
        if is_scarce {
            // Some may have become visible before anybody knew that they count.
            self.count_later();
        }
        let notes = is_scarce || self.channel.is_some() || polled.crowd.is_some();
        self.notes.store(notes, Ordering::Relaxed);
    }

    /// Completions became visible.
    #[inline]
    pub(super) fn note_completions(&self) {
        if self.watch.is_scarce.load(Ordering::Relaxed) {
            self.count_later();
        }
    }

    #[cold]
    fn count_later(&self) {
        // A poll that has cleared the mark sees what was published before this.
        self.watch.is_due.swap(true, Ordering::AcqRel);
        self.process.nudge_later();
    }

    /// What the upkeep thread does: counts, if nobody has since completions became visible.
    pub(in crate::soft) fn count_if_due(&self) {
        if self.watch.is_due.load(Ordering::Relaxed) {
            let mut polled = self.polled.lock();
            if polled.room == Room::Scarce {
                self.count(&mut polled);
            } else {
                self.watch.is_due.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Makes completions of what has come.
    pub(super) fn take_in(&self, polled: &mut Polled) {
        self.answer_calls(polled);
        for member in polled.visited() {
            member.qp.take_in(member.sends, member.receives);
        }
        for port in &polled.ports {
            port.domain().take_in();
        }
    }

    /// Before a poll of a queue that is not ample. An error if the queue cannot be used.
    #[cold]
    pub(super) fn admit(&self, polled: &mut Polled) -> Result<(), Errno> {
        if polled.room == Room::Scarce {
            // What is under way arrives before it is counted, as it would on a wire.
            self.take_in(polled);
            self.watch.is_due.swap(false, Ordering::AcqRel);
            // Whoever has something that is not due any more has called before.
            self.answer_calls(polled);
            let waiting = polled.visited().map(Member::waiting).sum::<u64>();
            let at_ports = polled.waiting_at_ports();
            self.judge(polled, waiting + at_ports);
        }
        if polled.room == Room::Overrun {
            return Err(Errno::IO);
        }
        Ok(())
    }

    /// Counts what waits, and if that is too much, gives the queue up and its queue pairs with it.
    /// Nothing is taken from the queue meanwhile, so this is never more than has waited at once.
    fn count(&self, polled: &mut Polled) {
        self.watch.is_due.swap(false, Ordering::AcqRel);
        let waiting = polled.waiting();
        self.judge(polled, waiting);
    }

    /// Gives the queue up if more wait than it has room for.
    fn judge(&self, polled: &mut Polled, waiting: u64) {
        if waiting > u64::from(self.cqe()) {
            self.give_up(polled);
        }
    }

    #[cold]
    fn give_up(&self, polled: &mut Polled) {
        tracing::error!(index = self.index, "a completion queue has overrun");
        polled.room = Room::Overrun;
        self.watch.is_scarce.store(false, Ordering::Relaxed);
        self.async_events.raise(ibv_async_event {
            element: ibv_async_event_element { cq: self.handle() },
            event_type: IBV_EVENT_CQ_ERR,
        });
        for member in &polled.members {
            member.qp.fail_untold();
        }
        for port in &polled.ports {
            port.shut_down(Unready::Broken);
        }
        // Whoever sleeps shall find out.
        self.wake(true);
    }

    /// ibv_resize_cq(3).
    ///
    /// # Errors
    /// `EINVAL` for fewer entries than completions wait; `EIO` if the queue has overrun.
    pub(in crate::soft) fn resize(&self, cqe: i32) -> Result<(), Errno> {
        let mut polled = self.polled.lock();
        if polled.room == Room::Scarce {
            self.count(&mut polled);
        }
        if polled.room == Room::Overrun {
            return Err(Errno::IO);
        }
        let waiting = polled.waiting();
        if u64::from(cqe.unsigned_abs()) < waiting {
            return Err(Errno::INVAL);
        }
        self.entries().store(cqe, Ordering::Relaxed);
        self.reckon(&mut polled);
        Ok(())
    }
}
