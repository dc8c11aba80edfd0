//! Completion queues.
//!
//! A completion lives where its request does: in the slot of its work queue. Polling a queue visits
//! the work queues attached to it, which keeps each completion a single-producer affair and needs
//! no locked instruction between a copy and its completion. Where they are many, polls visit those
//! that may have something (`crowd`).

mod calls;
mod crowd;
mod extended;
mod notify;
mod ports;
mod room;
#[cfg(test)]
mod tests;

use std::cell::UnsafeCell;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock};

use rustix::io::Errno;

use self::crowd::Crowd;
pub(super) use self::extended::READABLE;
use self::extended::Reader;
use self::notify::Asked;
use self::room::{Room, Watch};
use super::biased::Biased;
use super::channel::Channel;
use super::events::{AsyncEvents, Source};
use super::layout::{Calls, CqBell};
use super::process::Process;
use super::qp::Qp;
use super::xrc::Port;
use crate::ffi::{ibv_context, ibv_cq, ibv_cq_ex, ibv_wc};

/// Fruitless polls after which a waiting request is taken for stuck: its peer may not be polling.
const PATIENCE: u32 = 4096;
/// So many fruitless polls come between two looks at the clock, behind the first few: who sleeps between them makes few.
const UNTIMED: u32 = 4;
/// Fruitless polls for so long are enough, too, however few they are: there are programs that sleep between them.
const PATIENCE_NS: u64 = 5_000_000;
/// Completions of one queue pair that may be handed out before another has its turn.
const MOST_QUICK: u32 = 15;

/// A completion queue. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Cq {
    cq: UnsafeCell<ibv_cq_ex>,
    process: Arc<Process>,
    index: u32,
    channel: Option<Arc<Channel>>,
    /// Whether anybody wants to know that completions became visible: a channel, the `watch`, or polls
    /// that do not visit everybody.
    notes: AtomicBool,
    watch: Watch,
    /// What this process has to tell polls that do not visit everybody; peers have their own.
    calls: OnceLock<Box<Calls>>,
    polled: Biased<Polled>,
    events: Mutex<Events>,
    acknowledged: Condvar,
    async_events: Source,
    /// Of a queue that is read field by field.
    reader: Option<Reader>,
    /// Its user sees to it that it does not overrun.
    is_ample: bool,
}

/// How a completion queue is used.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Usage {
    /// Completions can be read field by field.
    pub is_extended: bool,
    /// Threads take turns by their own care.
    pub is_single_threaded: bool,
    /// Nobody looks whether it has overrun.
    pub ignores_overrun: bool,
}

/// Events that were delivered.
#[derive(Default)]
struct Events {
    unacknowledged: u32,
    /// The queue is being destroyed and waits for them: only then is waking a thread of use.
    awaited: bool,
}

/// What one poll at a time works on.
struct Polled {
    room: Room,
    members: Vec<Member>,
    /// Whom polls visit, where they do not visit everybody.
    crowd: Option<Box<Crowd>>,
    ports: Vec<Arc<Port>>,
    ports_first: bool,
    /// Completions that all members and ports could have waiting.
    places: u64,
    asked: Asked,
    next: usize,
    /// The member that last gave something, if it is still there.
    recent: usize,
    fruitless: u32,
    /// When the first of them had been made.
    fruitless_since: u64,
    /// Completions handed out since a poll has looked at everything.
    quick: u32,
}

struct Member {
    qp: Arc<Qp>,
    sends: bool,
    receives: bool,
}

// SAFETY: the C structure is written only at creation, but for one field that is used as an atomic, and
// two that belong to whoever has the turn to read.
unsafe impl Send for Cq {}
// SAFETY: as for Send.
unsafe impl Sync for Cq {}

impl std::fmt::Debug for Cq {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Cq")
            .field("index", &self.index)
            .finish_non_exhaustive()
    }
}

impl Cq {
    pub(super) fn new(
        process: &Arc<Process>,
        async_events: &Arc<AsyncEvents>,
        fields: ibv_cq,
        channel: Option<Arc<Channel>>,
        usage: Usage,
    ) -> Result<Arc<Self>, Errno> {
        let index = process.cq_indices.take().ok_or(Errno::NOMEM)?;
        let mut extended = ibv_cq_ex::zeroed();
        extended.base = ibv_cq {
            handle: index,
            ..fields
        };
        if usage.is_extended {
            extended::offer(&mut extended);
        }
        let cq = Arc::new(Self {
            cq: UnsafeCell::new(extended),
            process: Arc::clone(process),
            index,
            notes: AtomicBool::new(channel.is_some()),
            channel,
            watch: Watch::default(),
            calls: OnceLock::new(),
            polled: Biased::new(Polled {
                room: Room::Ample,
                members: Vec::new(),
                crowd: None,
                ports: Vec::new(),
                ports_first: false,
                places: 0,
                asked: Asked::default(),
                next: 0,
                recent: 0,
                fruitless: 0,
                fruitless_since: 0,
                quick: 0,
            }),
            events: Mutex::default(),
            acknowledged: Condvar::new(),
            async_events: Source::new(async_events),
            reader: usage
                .is_extended
                .then(|| Reader::new(usage.is_single_threaded)),
            is_ample: usage.ignores_overrun,
        });
        let bell = cq.cq_bell();
        bell.armed.store(0, Ordering::Relaxed);
        bell.fired.store(0, Ordering::Relaxed);
        if let Some(channel) = &cq.channel {
            channel.attach(&cq);
        }
        Ok(cq)
    }

    pub(super) fn handle(&self) -> *mut ibv_cq {
        self.cq.get().cast()
    }

    pub(super) fn context(&self) -> *mut ibv_context {
        // SAFETY: written at creation only.
        unsafe { (*self.cq.get()).base.context }
    }

    pub(super) fn cq_bell(&self) -> &CqBell {
        &self.process.mailbox().cqs[self.index as usize]
    }

    /// What a peer needs to wake this queue, if it can sleep at all.
    pub(super) fn bell(&self) -> Option<(u32, &OwnedFd)> {
        Some((self.index, &self.channel.as_ref()?.fd))
    }

    pub(super) fn async_events(&self) -> &Source {
        &self.async_events
    }

    pub(super) fn attach(&self, qp: &Arc<Qp>, sends: bool, receives: bool) {
        let mut polled = self.polled.lock();
        let member = Member {
            qp: Arc::clone(qp),
            sends,
            receives,
        };
        polled.places += member.places();
        polled.members.push(member);
        polled.asked.joined(qp);
        self.joined(&mut polled);
        self.reckon(&mut polled);
    }

    pub(super) fn detach(&self, qp: &Qp) {
        let is_it = |member: &Member| std::ptr::eq(&raw const *member.qp, qp);
        let mut polled = self.polled.lock();
        if let Some(at) = polled.members.iter().position(is_it) {
            let gone = polled.members.swap_remove(at);
            polled.asked.left(at);
            polled.places -= gone.places();
            polled.left(at, &gone);
            self.reckon(&mut polled);
        }
    }

    /// Fails with `EBUSY` while a queue pair or a shared receive queue uses the queue; waits for events to be acknowledged, as
    /// the man page says.
    pub(super) fn retire(&self) -> Result<(), Errno> {
        let polled = self.polled.lock();
        if !polled.members.is_empty() || !polled.ports.is_empty() {
            return Err(Errno::BUSY);
        }
        drop(polled);
        if let Some(channel) = &self.channel {
            channel.detach(self);
        }
        let mut events = self.events();
        events.awaited = true;
        drop(
            self.acknowledged
                .wait_while(events, |events| events.unacknowledged > 0),
        );
        self.async_events.retire();
        self.process.cq_indices.give(self.index);
        Ok(())
    }

    /// Most polls for one completion come for that of a request which has ended at once, of the queue pair
    /// that the poll before was about: [`poll`](Self::poll) has the rest. A few of them go there all the same, or what
    /// else has come would wait for as long as they do. Few instructions, as they are a good
    /// part of such a request's time.
    #[inline(always)]
    pub(super) fn take_one(&self, wc: &mut ibv_wc) -> bool {
        let Some(mut polled) = self.polled.try_own() else {
            return false;
        };
        let state = &mut *polled;
        if state.quick >= MOST_QUICK || state.room != Room::Ample {
            return false;
        }
        let found = match state.members.get(state.recent) {
            Some(member) if member.sends => member.qp.take_one(wc),
            _ => false,
        };
        state.quick += u32::from(found);
        found
    }

    /// ibv_poll_cq(3): fills from the front, and returns how many.
    ///
    /// # Errors
    /// `EIO` if the queue has overrun.
    #[inline(never)]
    pub(super) fn poll(&self, wcs: &mut [ibv_wc]) -> Result<usize, Errno> {
        let mut polled = self.polled.lock();
        let state = &mut *polled;
        state.quick = 0;
        if state.room != Room::Ample {
            self.admit(state)?;
        }
        if !state.ports.is_empty() {
            return Ok(self.poll_with_ports(state, wcs));
        }
        Ok(self.poll_members(state, wcs))
    }

    /// Hands out completions of queue pairs.
    #[inline(always)]
    fn poll_members(&self, state: &mut Polled, wcs: &mut [ibv_wc]) -> usize {
        if state.crowd.is_some() {
            return self.poll_crowd(state, wcs);
        }
        let members = state.members.len();
        let mut filled = 0;
        // Members may have left since.
        let mut at = state.next;
        for _ in 0..members {
            if at >= members {
                at = 0;
            }
            let member = &state.members[at];
            let found = member
                .qp
                .poll(&mut wcs[filled..], member.sends, member.receives);
            if found > 0 {
                state.recent = at;
            }
            filled += found;
            at += 1;
            if filled == wcs.len() {
                // One that always has something must not keep the others waiting.
                state.next = at;
                break;
            }
        }
        if filled > 0 {
            state.fruitless = 0;
        } else {
            self.found_nothing(state);
        }
        filled
    }

    /// Counts a poll that had nothing to hand out.
    #[inline]
    fn found_nothing(&self, state: &mut Polled) {
        state.fruitless += 1;
        let looks = state.fruitless < UNTIMED || state.fruitless.is_multiple_of(UNTIMED);
        if looks && state.is_out_of_patience() {
            state.fruitless = 0;
            if state.is_waiting() {
                self.process.nudge_later();
            }
        }
    }

    /// Empties the queues of a queue pair that completes on this queue and the other, while neither is polled.
    pub(super) fn while_empties(&self, other: &Self, qp: &Qp, empty: impl FnOnce()) {
        if self.index == other.index {
            return self.polled.lock().while_empties(qp, empty);
        }
        // Always in the same order, whichever role each queue has.
        let (first, second) = if self.index < other.index {
            (self, other)
        } else {
            (other, self)
        };
        let mut first = first.polled.lock();
        let mut second = second.polled.lock();
        first.while_empties(qp, || second.while_empties(qp, empty));
    }
}

impl Polled {
    /// Whether there were many fruitless polls, or a few that took long.
    #[inline]
    fn is_out_of_patience(&mut self) -> bool {
        let now = coarse_ns();
        if self.fruitless == 1 {
            self.fruitless_since = now;
        }
        self.fruitless >= PATIENCE || now.saturating_sub(self.fruitless_since) >= PATIENCE_NS
    }

    /// Whether a request waits for something other than a poll.
    fn is_waiting(&self) -> bool {
        let waits = |member: &Member| member.sends && member.qp.waits();
        self.members.iter().any(waits)
    }
}

/// The monotonic clock in nanoseconds, some milliseconds late at most, and read without a look at any hardware.
#[inline]
fn coarse_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64
}
