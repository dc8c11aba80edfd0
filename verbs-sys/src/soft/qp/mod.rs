//! Queue pairs.

mod access;
mod backlog;
pub(super) mod datagram;
mod extended;
mod lifetime;
mod marks;
mod modify;
mod poll;
mod queues;
mod requester;
mod responder;
mod rest;
mod send_lock;
mod state;
mod stream;
mod xrc;

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

pub(super) use self::datagram::MAX_DATAGRAM;
pub(super) use self::extended::offer as offer_builders;
pub(super) use self::lifetime::Receives;
pub(super) use self::marks::Marks;
pub(super) use self::queues::RecvQueue;
use self::queues::SendQueue;
pub(super) use self::requester::Bind;
pub(super) use self::xrc::Receiver;
use super::cq::Cq;
use super::epoch;
use super::events::Source;
use super::injection::Injector;
use super::layout::{QpInfo, QpMailbox, Readiness, Target, qpn_index};
use super::link::{Link, Via};
use super::mw::{Binder, Execution, Place};
use super::process::Process;
use super::srq::Srq;
use crate::ffi::{
    IBV_EVENT_QP_FATAL, IBV_QPS_ERR, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPT_UC, IBV_QPT_UD,
    IBV_SEND_SIGNALED, ibv_async_event, ibv_async_event_element, ibv_event_type, ibv_qp_attr,
    ibv_qp_cap, ibv_qp_ex, ibv_qp_type, ibv_send_flags, ibv_wc,
};

/// Work requests a queue can hold.
pub(super) const MAX_WR: u32 = 1 << 14;
/// Elements of a scatter/gather list.
pub(super) const MAX_SGE: u32 = 32;
/// Bytes of inline data.
pub(super) const MAX_INLINE: u32 = 1024;
/// Bytes of a message.
pub(super) const MAX_MESSAGE: u64 = 1 << 31;

/// READs and atomics in flight, either way. They are executed as they are posted, so there is never
/// more than one; the number is what applications compute with.
pub(super) const MAX_RD_ATOMIC: u8 = 128;

/// A queue pair. The C structure comes first: its address is the handle.
#[repr(C)]
pub(super) struct Qp {
    qp: UnsafeCell<ibv_qp_ex>,
    pub qpn: u32,
    process: Arc<Process>,
    /// Our own places in the files that `process` keeps mapped.
    info: NonNull<QpInfo>,
    fences: NonNull<AtomicU32>,
    mailbox: NonNull<QpMailbox>,
    pd: u32,
    pub send_cq: Arc<Cq>,
    pub recv_cq: Arc<Cq>,
    srq: Option<Arc<Srq>>,
    /// Of one that takes requests of XRC.
    receiver: Option<Receiver>,
    cap: ibv_qp_cap,
    /// Flags that every request has: whether all of them are signaled.
    always: ibv_send_flags,
    /// 1; or a number that no `num_sge` is, not even a wrong one, if requests have none, or none goes the
    /// straight way.
    one_sge: i64,
    /// Where faults are wanted.
    injector: Option<Arc<Injector>>,
    qp_type: ibv_qp_type,
    /// Of a datagram queue pair.
    datagrams: Option<datagram::Endpoint>,
    state: AtomicU32,
    resting: rest::Resting,
    /// Completions of requests have taken all the room of the last poll. For whoever polls the receives.
    receives_first: AtomicBool,
    send_lock: send_lock::SendLock,
    sq: SendQueue,
    rq: RecvQueue,
    /// Guarded by the send lock.
    known: UnsafeCell<requester::Ranges>,
    /// Written under both locks, read under either.
    link: UnsafeCell<Option<Arc<Link>>>,
    /// The same for those who hold neither.
    shared_link: Mutex<Option<Arc<Link>>>,
    /// Whether the peer is a queue pair of this process.
    is_local: AtomicBool,
    streams: stream::Streams,
    requester: requester::State,
    responder: responder::State,
    control: Mutex<Control>,
    async_events: Source,
    /// Of a queue pair that is posted to call by call.
    builder: Option<extended::Builder>,
}

/// What only the control path touches.
struct Control {
    attr: ibv_qp_attr,
    generation: u32,
}

// SAFETY: of `qp` the state is written under `control`, and two fields belong to whoever builds requests; `link` under both epoch locks, `known` used under the send lock; the
// raw pointers in the attributes are never followed, `info` and `mailbox` lead to atomics.
unsafe impl Send for Qp {}
// SAFETY: as for Send.
unsafe impl Sync for Qp {}

impl std::fmt::Debug for Qp {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Qp")
            .field("qpn", &self.qpn)
            .finish_non_exhaustive()
    }
}

impl Qp {
    /// The sizes it has.
    pub(super) fn cap(&self) -> ibv_qp_cap {
        self.cap
    }

    pub(super) fn async_events(&self) -> &Source {
        &self.async_events
    }

    /// Queues an asynchronous event of this queue pair.
    fn raise(&self, event_type: ibv_event_type) {
        tracing::debug!(qpn = self.qpn, event_type, "an asynchronous event");
        self.async_events.raise(ibv_async_event {
            element: ibv_async_event_element {
                qp: self.qp.get().cast(),
            },
            event_type,
        });
    }

    #[inline]
    fn info(&self) -> &QpInfo {
        // SAFETY: `process` keeps the mapping, which holds atomics.
        unsafe { self.info.as_ref() }
    }

    #[inline]
    fn mailbox(&self) -> &QpMailbox {
        // SAFETY: as in `info`.
        unsafe { self.mailbox.as_ref() }
    }

    /// Whether it is connected without acknowledgements: what goes wrong at the peer is lost, and
    /// nobody is told.
    #[inline]
    fn is_unreliable(&self) -> bool {
        self.qp_type == IBV_QPT_UC
    }

    /// Whether its requests are acknowledged.
    fn is_reliable(&self) -> bool {
        !matches!(self.qp_type, IBV_QPT_UC | IBV_QPT_UD)
    }

    /// Whether a request with these flags makes a completion when it succeeds.
    #[inline(always)]
    fn signals(&self, flags: ibv_send_flags) -> bool {
        (flags | self.always) & IBV_SEND_SIGNALED != 0
    }

    #[inline]
    fn state(&self) -> u32 {
        self.state.load(Ordering::Acquire)
    }

    /// The connection.
    ///
    /// # Safety
    ///
    /// The caller holds the send lock or the receive lock for as long as it uses the result.
    #[inline]
    unsafe fn link(&self) -> Option<&Link> {
        // SAFETY: written under both locks only.
        unsafe { (*self.link.get()).as_deref() }
    }

    /// What was looked up of keys.
    ///
    /// # Safety
    ///
    /// The caller holds the send lock for as long as it uses the result, and has no other.
    #[inline(always)]
    #[allow(clippy::mut_from_ref)]
    unsafe fn known(&self) -> &mut requester::Ranges {
        // SAFETY: by the caller's promise.
        unsafe { &mut *self.known.get() }
    }

    fn shared_link(&self) -> Option<Arc<Link>> {
        self.shared_link
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn control(&self) -> MutexGuard<'_, Control> {
        self.control.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells peers what this queue pair accepts.
    fn publish(&self, ready: Readiness, attr: &ibv_qp_attr, generation: u32) {
        let target = Target::new(
            ready,
            attr.qp_access_flags,
            generation,
            attr.dest_qp_num,
            self.pd,
        );
        let target = target.serving(self.service());
        let responder = &self.info().responder.0;
        responder.rq_psn.store(attr.rq_psn, Ordering::Relaxed);
        let awaits_first = self.state() == IBV_QPS_RTR;
        responder
            .awaits_first
            .store(awaits_first.into(), Ordering::Relaxed);
        responder.target.store(target.0, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
    }

    /// Enters the error state: no peer gets in any more, and what is queued will be flushed.
    fn enter_error(&self) {
        self.state.store(IBV_QPS_ERR, Ordering::Release);
        let target = &self.info().responder.0.target;
        let gone = target.load(Ordering::Relaxed) & !3 | Readiness::Gone as u64;
        target.store(gone, Ordering::SeqCst);
    }

    /// Waits until our own requester and responder have left what they were in.
    pub(super) fn quiesce_own(&self) {
        self.process.fence_posts();
        epoch::quiesce_own(self.info());
    }

    /// Waits until the peer connected to this queue pair has left what it was in.
    ///
    /// # Errors
    /// `EBUSY` if its process is stopped in the middle of it.
    pub(super) fn quiesce_peer(&self) -> Result<(), Errno> {
        self.process.fence_posts();
        let Some(link) = self.shared_link() else {
            return Ok(());
        };
        if matches!(link.via, Via::Local) {
            // Whoever waits for the whole process has it among the process's own.
            epoch::quiesce_own(link.info());
        }
        link.quiesce_peer()
    }

    /// This queue pair as the one that binds or invalidates a window, holding `held`.
    fn window_user<'a>(&'a self, held: &'a AtomicU64) -> Binder<'a> {
        Binder {
            process: &self.process,
            qp: self,
            qpn: self.qpn,
            pd: self.pd,
            held,
        }
    }

    /// Notes what is executing now and may use windows through this queue pair: the peer's requester,
    /// and our responder. The caller holds `held`, and is at nothing that could.
    pub(super) fn note_window_users(&self, held: &AtomicU64, executions: &mut Vec<Execution>) {
        let index = qpn_index(self.qpn);
        let peer = self.shared_link().map(Place::Requester);
        for place in peer.into_iter().chain([Place::Responder(index)]) {
            executions.extend(Execution::now(&self.process, &place, held));
        }
    }

    /// Whether requests wait for something other than a poll of ours.
    #[inline]
    pub(super) fn waits(&self) -> bool {
        self.sq.done.load(Ordering::Relaxed) != self.sq.tail.load(Ordering::Relaxed)
    }

    /// A completion of a send, where that is all that a poll for one has to look for.
    #[inline(always)]
    pub(super) fn take_one(&self, wc: &mut ibv_wc) -> bool {
        self.sq.take_one(wc, self.qpn)
    }

    /// Waits for another thread that is making completions, until it has told of them. One whose completion was seen is
    /// seen, too, fence or not: it entered before.
    pub(super) fn let_others_tell(&self) {
        let info = self.info();
        for word in info.sends.0.epochs().chain([&info.rq_epoch.0]) {
            epoch::quiesce_own_word(word);
        }
    }

    /// Completions that its queues can have waiting.
    pub(super) fn places(&self, sends: bool, receives: bool) -> u32 {
        let sends = if sends { self.sq.places() } else { 0 };
        sends + if receives { self.rq.places() } else { 0 }
    }

    /// Completions that wait to be polled. No poll is under way.
    pub(super) fn waiting(&self, sends: bool, receives: bool) -> u32 {
        let sends = if sends { self.sq.waiting() } else { 0 };
        sends + if receives { self.rq.waiting() } else { 0 }
    }

    /// To ERR because a completion queue is broken, so that no completion can tell why.
    pub(super) fn fail_untold(&self) {
        self.acknowledge_at_the_end();
        self.lock_sends();
        let fails = !matches!(self.state(), IBV_QPS_RESET | IBV_QPS_ERR);
        if fails {
            self.enter_error();
        }
        self.unlock_sends();
        if !fails {
            return;
        }
        self.flush_sends_now();
        self.flush_recvs();
        self.raise(IBV_EVENT_QP_FATAL);
        if let Some(link) = self.shared_link() {
            link.kick();
        }
        self.process.nudge_later();
    }

    /// What the upkeep thread does for a queue pair: progress, and a look for a peer that has gone
    /// or sleeps. Returns whether something still waits.
    pub(super) fn serve(&self) -> bool {
        self.send_cq.count_if_due();
        self.recv_cq.count_if_due();
        if self.datagrams.is_some() && self.recv_can_progress() {
            self.receive(true);
        }
        let Some(link) = self.shared_link() else {
            return false;
        };
        if link.is_dead() {
            link.lose();
        }
        if self.recv_can_progress() {
            self.receive(true);
        }
        if self.send_can_progress() {
            self.progress_send();
        }
        // Last, since what it left behind counts.
        if self.peer_is_gone(&link) {
            self.abandon(&link);
        }
        let waits = self.waits();
        if waits
            && self
                .requester
                .is_stalled(self.sq.done.load(Ordering::Relaxed))
        {
            link.kick();
        }
        waits || self.responder.is_not_ready()
    }
}

/// The monotonic clock in nanoseconds; never 0.
pub(super) fn now_ns() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    (now.tv_sec as u64 * 1_000_000_000 + now.tv_nsec as u64).max(1)
}

/// A cell for state that is guarded by one of the epoch locks and read loosely elsewhere.
type Guarded32 = AtomicU32;
type Guarded64 = AtomicU64;
