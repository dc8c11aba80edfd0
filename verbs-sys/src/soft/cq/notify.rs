//! Events: what a queue that was armed owes its channel.
//!
//! Whoever makes a completion rings behind it, and may be kept from that for as long as its processor is taken away.
//! The completion may be polled meanwhile, and the queue armed anew: that late ring is for nothing that came behind the
//! arming. So the event of a ring is judged when it is fetched. One of nothing is swallowed, and the queue armed again
//! as if nobody had rung.
//!
//! No wake-up is lost by that. A swallowed event leaves the queue armed, and *then* everybody was looked at, in vain.
//! Whatever is published later is followed by a ring, which finds the queue armed, or another ring has come first:
//! either way there is one more event, which is judged in its turn and finds what was published.

#[cfg(test)]
mod tests;

use std::sync::atomic::{Ordering, fence};
use std::sync::{MutexGuard, PoisonError};

use super::room::Room;
use super::{Cq, Events, Member, Polled};
use crate::soft::layout::{ARMED_ANY, ARMED_NOT, ARMED_SOLICITED};
use crate::soft::link;
use crate::soft::qp::{Marks, Qp};
use crate::soft::xrc::Port;

/// What the program has asked for by ibv_req_notify_cq(3), and has not got yet.
#[derive(Debug, Default)]
pub(super) struct Asked {
    /// The queue was armed, and no event was handed out for it.
    is_open: bool,
    /// What for: one of the `ARMED_*` values.
    kind: u32,
    /// Where each member was then.
    marks: Vec<Marks>,
    /// Something has come since that the marks do not tell of.
    came: bool,
    /// Events due by armings before the last one. They are handed out as they are.
    earlier: u32,
}

impl Asked {
    /// A member is new.
    pub(super) fn joined(&mut self, qp: &Qp) {
        self.marks.push(qp.marks());
    }

    /// The member at this place has gone, and the last one has its place.
    pub(super) fn left(&mut self, at: usize) {
        self.marks.swap_remove(at);
    }

    /// A port has gone.
    pub(super) fn port_left(&mut self, port: &Port) {
        self.came |= port.mark();
    }
}

impl Polled {
    /// Marks where every member is. Whether completions have come since it was done last.
    fn mark(&mut self) -> bool {
        let mut came = self.asked.came;
        for (member, mark) in self.members.iter().zip(&mut self.asked.marks) {
            let now = member.qp.marks();
            let before = std::mem::replace(mark, now);
            let (sends, receives) = (member.sends, member.receives);
            came |= member.qp.completed_between((before, now), sends, receives);
        }
        for port in &self.ports {
            came |= port.mark();
        }
        self.asked.came = false;
        came
    }

    /// Whether the member at this place has had completions since the arming, polled by now or not.
    fn has_come(&self, at: usize) -> bool {
        let (member, before) = (&self.members[at], self.asked.marks[at]);
        let between = (before, member.qp.marks());
        let (sends, receives) = (member.sends, member.receives);
        member.qp.completed_between(between, sends, receives)
    }

    /// Whether an event has something to tell. What has waited since before the arming is enough: nobody shall sleep
    /// over a completion.
    fn has_something(&self) -> bool {
        let has = |at: usize| self.has_come(at) || self.members[at].waiting() > 0;
        let has_been_told = self.room == Room::Overrun || self.asked.came;
        has_been_told
            || (0..self.members.len()).any(has)
            || self.ports.iter().any(|port| port.has_something())
    }

    /// Empties the queues of a queue pair. What had come before counts all the same.
    pub(super) fn while_empties(&mut self, qp: &Qp, empty: impl FnOnce()) {
        let is_it = |member: &Member| std::ptr::eq(&raw const *member.qp, qp);
        let at = self.members.iter().position(is_it);
        self.asked.came |= at.is_some_and(|at| self.has_come(at));
        empty();
        if let Some(at) = at {
            self.asked.marks[at] = qp.marks();
        }
    }
}

impl Cq {
    /// Whether the application has asked for an event, and may be about to sleep.
    #[inline]
    pub(in crate::soft) fn is_armed(&self) -> bool {
        self.channel.is_some() && self.cq_bell().armed.load(Ordering::Relaxed) != ARMED_NOT
    }

    /// Whether anybody has to be told of completions.
    #[inline(always)]
    pub(in crate::soft) fn has_notes(&self) -> bool {
        self.notes.load(Ordering::Relaxed)
    }

    /// Completions of a queue pair became visible, or are about to: fires an event if one was asked
    /// for.
    #[inline(always)]
    pub(in crate::soft) fn notify(&self, by: &Qp, solicited: bool) {
        if self.has_notes() {
            if by.is_resting() {
                by.call_if_resting(self);
            }
            self.note_completions();
            self.wake(solicited);
        }
    }

    /// Fires an event if one was asked for.
    #[inline(always)]
    pub(super) fn wake(&self, solicited: bool) {
        if let Some(channel) = &self.channel {
            link::ring(self.cq_bell(), &channel.fd, solicited);
        }
    }

    /// Rings for a peer that has died: it may have disarmed the queue, and been killed before it rang. If it had not,
    /// this is an event of nothing.
    pub(in crate::soft) fn ring_for_the_dead(&self) {
        if let Some(channel) = &self.channel {
            link::fire(self.cq_bell(), &channel.fd);
        }
    }

    /// ibv_req_notify_cq(3).
    pub(in crate::soft) fn req_notify(&self, solicited_only: bool) {
        let Some(channel) = &self.channel else {
            // Nobody can be told.
            return;
        };
        let mut polled = self.polled.lock();
        // What has come before makes no event, whoever takes it first.
        self.take_in(&mut polled);
        for member in polled.visited() {
            member.qp.let_others_tell();
        }
        for port in &polled.ports {
            port.domain().let_others_tell();
        }
        let bell = self.cq_bell();
        let kind = if solicited_only {
            ARMED_SOLICITED
        } else {
            ARMED_ANY
        };
        let came = polled.mark();
        let asked = &mut polled.asked;
        let before = (asked.is_open && came).then_some(asked.kind);
        if before == Some(ARMED_ANY) {
            // The arming before has its event, whether or not anybody has rung yet. Who still does is late.
            asked.earlier += 1;
            if bell.armed.swap(ARMED_NOT, Ordering::SeqCst) != ARMED_NOT {
                link::fire(bell, &channel.fd);
            }
            asked.kind = kind;
        } else {
            // The wider of two requests holds.
            asked.kind = if asked.is_open {
                asked.kind.max(kind)
            } else {
                kind
            };
        }
        asked.is_open = true;
        let was_armed = self.arm(&mut polled) != ARMED_NOT;
        if before == Some(ARMED_SOLICITED) {
            // Only who rang knew whether it was solicited. If nobody has, an event may be due by both armings.
            let asked = &mut polled.asked;
            asked.came = was_armed;
            asked.earlier += u32::from(!was_armed);
        }
    }

    /// Arms the queue for what was asked, and gives what it was armed for. Whoever publishes a completion looks at the
    /// armed word behind a fence: either it rings, or what looks for completions behind this finds it.
    fn arm(&self, polled: &mut Polled) -> u32 {
        let armed = &self.cq_bell().armed;
        let before = armed.fetch_max(polled.asked.kind, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        polled.visit_everybody();
        if polled.is_waiting() {
            self.process.nudge_later();
            for member in &polled.members {
                member.qp.watch_stream();
                member.qp.hurry();
            }
        }
        before
    }

    /// Whether an event that was fetched is one that the program is due.
    pub(in crate::soft) fn owes_event(&self) -> bool {
        let mut polled = self.polled.lock();
        let asked = &mut polled.asked;
        if asked.earlier > 0 {
            asked.earlier -= 1;
            return true;
        }
        if !asked.is_open {
            return false;
        }
        self.take_in(&mut polled);
        if !polled.has_something() && !self.finds_something(&mut polled) {
            return false;
        }
        polled.asked.is_open = false;
        let armed = &self.cq_bell().armed;
        if armed.load(Ordering::Relaxed) != ARMED_NOT {
            // One event for one arming. If somebody rings just now, that is one of nothing.
            armed.store(ARMED_NOT, Ordering::SeqCst);
        }
        true
    }

    /// Arms the queue again for what was asked, and then looks at everybody. Whether there is something after all.
    #[cold]
    fn finds_something(&self, polled: &mut Polled) -> bool {
        self.arm(polled);
        // Who rests may have been called by nobody.
        let mut more = false;
        for member in &polled.members {
            more |= member.qp.take_in_and_look(member.sends, member.receives);
        }
        for port in &polled.ports {
            port.domain().take_in();
        }
        more || polled.has_something()
    }

    pub(in crate::soft) fn event_delivered(&self) {
        self.events().unacknowledged += 1;
    }

    /// ibv_ack_cq_events(3).
    pub(in crate::soft) fn acknowledge(&self, count: u32) {
        let mut events = self.events();
        events.unacknowledged = events.unacknowledged.saturating_sub(count);
        if events.awaited && events.unacknowledged == 0 {
            self.acknowledged.notify_all();
        }
    }

    pub(super) fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
