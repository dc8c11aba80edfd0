//! Polling a completion queue of many queue pairs: only those are visited that may have something.
//!
//! A member is *active*, and visited by every poll, or *resting*. It comes to rest when many visits in
//! a row found nothing and nothing is under way that would end without a word. Then whoever has
//! something for it *calls*: this process's own threads when they post or complete, and peers when
//! they have left a message.
//!
//! Whoever calls looks at whether the member rests after it has published what it calls for, without a
//! fence between: that would be one in every operation. Therefore a member that is said to rest is
//! visited for a while longer, by when such a store has long left its processor; and resting members
//! are visited in turn, one by every few polls, so that what was missed in spite of that is found late,
//! not never. What must be found at once, at the arming of the queue, is looked for everywhere.

#[cfg(test)]
mod tests;

use super::{Cq, Member, Polled};
use crate::ffi::ibv_wc;
use crate::soft::layout::Calls;

/// As many members as are all visited by every poll.
pub(super) const FEW: usize = 4;
/// Visits that find nothing before a member is said to rest, and again until it does, times active
/// members; so idle members cost a poll less than a few microseconds.
const PATIENCE: usize = 2048;
const LEAST_PATIENCE: usize = 16;
const MOST_PATIENCE: usize = 512;
/// Polls after which one more resting member is visited, which costs as much as some ten visits of
/// active ones: its lines are in no cache any more. One that has found nothing counts as several.
const SELDOM: u32 = 256;
const FRUITLESS: u32 = 16;
/// In place of visits that are left: the last of them, just now, has found nothing.
const SPENT: u32 = u32::MAX;
/// No member.
const NOBODY: u32 = u32::MAX;

/// What a crowd is made of.
pub(super) trait Visit {
    /// A number that no other member has, and by which it is called.
    fn index(&self) -> usize;
    /// Hands out completions.
    fn visit(&self, wcs: &mut [ibv_wc]) -> usize;
    /// Whether it has nothing to do, and will call when it has.
    fn is_quiet(&self) -> bool;
    /// From now on it must call, or need not.
    fn rest(&self, rests: bool);
}

/// An active member.
#[derive(Debug)]
struct Active {
    member: u32,
    /// Visits that may find nothing until something becomes of it.
    left: u32,
    /// It is said to rest, and will soon.
    tires: bool,
}

impl Active {
    /// A visit has found so many completions. Whether enough visits have found nothing.
    #[inline(always)]
    fn gave<M: Visit>(&mut self, member: &M, found: usize, patience: u32) -> bool {
        if found > 0 {
            self.left = patience;
            if self.tires {
                self.tires = false;
                member.rest(false);
            }
        } else if self.left > 0 {
            self.left -= 1;
        } else {
            self.left = SPENT;
            return true;
        }
        false
    }
}

/// Whom polls visit. Members are known by their places in a list that is kept elsewhere.
#[derive(Debug)]
pub(super) struct Crowd {
    active: Vec<Active>,
    /// Of each member.
    is_active: Vec<bool>,
    /// The member of each index.
    members: Vec<u32>,
    patience: u32,
    /// Where the next visit of active members begins.
    next: usize,
    /// The next resting member to be visited.
    turn: usize,
    /// Members that shall all have been visited before a poll says that there is nothing.
    owed: usize,
    /// Polls until the next of those is due.
    until_turn: u32,
    /// The member that last gave something.
    pub(super) recent: usize,
}

impl Crowd {
    /// All are active.
    pub(super) fn new<M: Visit>(members: &[M]) -> Self {
        let mut crowd = Self {
            active: Vec::new(),
            is_active: Vec::new(),
            members: Vec::new(),
            patience: 0,
            next: 0,
            turn: 0,
            owed: 0,
            until_turn: SELDOM,
            recent: 0,
        };
        for member in members {
            crowd.enter(member);
            crowd.activate(members, crowd.is_active.len() - 1);
        }
        crowd
    }

    /// The newest member, which nobody knows yet, begins to rest.
    pub(super) fn join<M: Visit>(&mut self, member: &M) {
        member.rest(true);
        self.enter(member);
    }

    fn enter<M: Visit>(&mut self, member: &M) {
        let index = member.index();
        if self.members.len() <= index {
            self.members.resize(index + 1, NOBODY);
        }
        self.members[index] = self.is_active.len() as u32;
        self.is_active.push(false);
    }

    /// A member has gone, and the last one of `members` has its place if it was not the last.
    pub(super) fn leave<M: Visit>(&mut self, members: &[M], place: usize, gone: &M) {
        self.members[gone.index()] = NOBODY;
        let last = members.len();
        self.active.retain(|active| active.member as usize != place);
        self.is_active.swap_remove(place);
        if self.owed > 0 {
            // The one that moves may not have had its turn, and its new place may have.
            self.owed = last;
        }
        if let Some(moved) = members.get(place) {
            self.members[moved.index()] = place as u32;
            let is_it = |active: &&mut Active| active.member as usize == last;
            if let Some(active) = self.active.iter_mut().find(is_it) {
                active.member = place as u32;
            }
        }
        self.reckon();
    }

    /// After the number of active members has changed.
    fn reckon(&mut self) {
        let patience = PATIENCE / self.active.len().max(1);
        self.patience = patience.clamp(LEAST_PATIENCE, MOST_PATIENCE) as u32;
    }

    fn activate<M: Visit>(&mut self, members: &[M], member: usize) {
        if !std::mem::replace(&mut self.is_active[member], true) {
            members[member].rest(false);
            self.active.push(Active {
                member: member as u32,
                left: 0,
                tires: false,
            });
            self.reckon();
            if let Some(active) = self.active.last_mut() {
                active.left = self.patience;
            }
        }
    }

    /// The members that a poll visits.
    pub(super) fn active(&self) -> impl Iterator<Item = usize> {
        self.active.iter().map(|active| active.member as usize)
    }

    /// The next polls find everything that can be found now.
    pub(super) fn visit_everybody(&mut self) {
        self.owed = self.is_active.len();
        self.until_turn = 0;
    }

    /// Those who have called become active.
    #[inline(always)]
    pub(super) fn answer<M: Visit>(&mut self, members: &[M], calls: &Calls) {
        if calls.are_there() {
            self.take(members, calls);
        }
    }

    #[cold]
    fn take<M: Visit>(&mut self, members: &[M], calls: &Calls) {
        calls.take(|index| match self.members.get(index) {
            // Peers may say anything, and some have called a member that has gone.
            None | Some(&NOBODY) => {}
            Some(&member) => self.activate(members, member as usize),
        });
    }

    /// Hands out completions.
    #[inline(always)]
    pub(super) fn poll<M: Visit>(
        &mut self,
        members: &[M],
        calls: [&Calls; 2],
        wcs: &mut [ibv_wc],
    ) -> usize {
        for calls in calls {
            self.answer(members, calls);
        }
        let mut filled = 0;
        if self.until_turn == 0 {
            // First, as active members may have something for every poll.
            filled = self.visit_resting(members, wcs);
        }
        filled += self.visit_active(members, &mut wcs[filled..]);
        let counts = if filled > 0 { 1 } else { FRUITLESS };
        if self.owed == 0 {
            self.until_turn = self.until_turn.saturating_sub(counts);
        }
        filled
    }

    /// Gives a member that rests its turn, or all, if they are owed one.
    #[cold]
    fn visit_resting<M: Visit>(&mut self, members: &[M], wcs: &mut [ibv_wc]) -> usize {
        let mut filled = 0;
        for _ in 0..self.owed.max(1) {
            if filled == wcs.len() {
                break;
            }
            self.owed = self.owed.saturating_sub(1);
            if self.turn >= members.len() {
                self.turn = 0;
            }
            let member = self.turn;
            self.turn += 1;
            if !self.is_active[member] {
                let found = members[member].visit(&mut wcs[filled..]);
                if found > 0 || !members[member].is_quiet() {
                    self.activate(members, member);
                }
                filled += found;
            }
        }
        if self.owed == 0 {
            self.until_turn = SELDOM;
        }
        filled
    }

    #[inline(always)]
    fn visit_active<M: Visit>(&mut self, members: &[M], wcs: &mut [ibv_wc]) -> usize {
        let [active] = &mut self.active[..] else {
            return self.visit_several(members, wcs);
        };
        if wcs.is_empty() {
            return 0;
        }
        let member = &members[active.member as usize];
        let found = member.visit(wcs);
        if found > 0 {
            self.recent = active.member as usize;
        }
        if active.gave(member, found, self.patience) {
            self.tire(members);
        }
        found
    }

    fn visit_several<M: Visit>(&mut self, members: &[M], wcs: &mut [ibv_wc]) -> usize {
        let mut filled = 0;
        let mut at = self.next;
        let mut impatient = false;
        for _ in 0..self.active.len() {
            if filled == wcs.len() {
                // One that always has something must not keep the others waiting.
                self.next = at;
                break;
            }
            // Some may have come to rest since.
            if at >= self.active.len() {
                at = 0;
            }
            let active = &mut self.active[at];
            let member = &members[active.member as usize];
            let found = member.visit(&mut wcs[filled..]);
            filled += found;
            if found > 0 {
                self.recent = active.member as usize;
            }
            impatient |= active.gave(member, found, self.patience);
            at += 1;
        }
        if impatient {
            // After the round, in which nobody's place may change.
            self.tire(members);
        }
        filled
    }

    /// What becomes of those of whom enough visits have found nothing, the last one just now: so a call
    /// that was taken before it was heard.
    #[cold]
    fn tire<M: Visit>(&mut self, members: &[M]) {
        for at in (0..self.active.len()).rev() {
            let active = &mut self.active[at];
            if active.left != SPENT {
                continue;
            }
            let member = active.member as usize;
            active.left = self.patience;
            let is_quiet = members[member].is_quiet();
            if is_quiet != active.tires {
                active.tires = is_quiet;
                members[member].rest(is_quiet);
            } else if is_quiet {
                // The last, which takes this place, was looked at before.
                self.active.swap_remove(at);
                self.is_active[member] = false;
            }
        }
        self.reckon();
    }
}

impl Visit for Member {
    fn index(&self) -> usize {
        self.qp.index()
    }

    #[inline(always)]
    fn visit(&self, wcs: &mut [ibv_wc]) -> usize {
        self.qp.poll(wcs, self.sends, self.receives)
    }

    fn is_quiet(&self) -> bool {
        self.qp.is_quiet(self.sends, self.receives)
    }

    fn rest(&self, rests: bool) {
        if rests {
            let cq = if self.receives {
                &self.qp.recv_cq
            } else {
                &self.qp.send_cq
            };
            self.qp.rest(cq.index, self.sends, self.receives);
        } else {
            self.qp.end_rest(self.sends, self.receives);
        }
    }
}

impl Polled {
    /// The members that a poll visits.
    pub(super) fn visited(&self) -> impl Iterator<Item = &Member> {
        let all = match self.crowd {
            None => &self.members[..],
            Some(_) => &[],
        };
        let active = self.crowd.iter().flat_map(|crowd| crowd.active());
        all.iter().chain(active.map(|member| &self.members[member]))
    }

    /// The next polls find everything that can be found now.
    pub(super) fn visit_everybody(&mut self) {
        if let Some(crowd) = &mut self.crowd {
            crowd.visit_everybody();
        }
    }

    /// A member has gone, and the last one has taken its place.
    pub(super) fn left(&mut self, place: usize, gone: &Member) {
        if let Some(crowd) = &mut self.crowd {
            crowd.leave(&self.members, place, gone);
            if self.members.len() <= FEW {
                self.crowd = None;
                for member in &self.members {
                    member.rest(false);
                }
            }
        }
    }
}

impl Cq {
    /// A member is new.
    pub(super) fn joined(&self, polled: &mut Polled) {
        match (&mut polled.crowd, polled.members.last()) {
            (Some(crowd), Some(newest)) => crowd.join(newest),
            (None, Some(_)) if polled.members.len() > FEW => {
                self.calls();
                polled.crowd = Some(Box::new(Crowd::new(&polled.members)));
            }
            _ => {}
        }
    }

    #[inline]
    fn calls(&self) -> &Calls {
        self.calls.get_or_init(|| Box::new(Calls::new()))
    }

    /// The calls of peers.
    #[inline]
    fn peers_calls(&self) -> &Calls {
        &self.process.mailbox().calls[self.index as usize]
    }

    /// The next poll shall visit the queue pair of this index.
    pub(in crate::soft) fn call(&self, index: usize) {
        self.calls().call(index);
    }

    /// Those who have called become members that a poll visits.
    pub(super) fn answer_calls(&self, polled: &mut Polled) {
        if let Some(crowd) = &mut polled.crowd {
            crowd.answer(&polled.members, self.calls());
            crowd.answer(&polled.members, self.peers_calls());
        }
    }

    /// Polls where not everybody is visited.
    #[inline(never)]
    pub(super) fn poll_crowd(&self, polled: &mut Polled, wcs: &mut [ibv_wc]) -> usize {
        let Some(crowd) = &mut polled.crowd else {
            return 0;
        };
        let calls = [self.calls(), self.peers_calls()];
        let filled = crowd.poll(&polled.members, calls, wcs);
        polled.recent = crowd.recent;
        if filled > 0 {
            polled.fruitless = 0;
        } else {
            self.found_nothing(polled);
        }
        filled
    }
}
