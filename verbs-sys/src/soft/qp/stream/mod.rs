//! A queue pair whose requests go through a socket, or come through one.
//!
//! What goes out belongs to the requester and is guarded by the send lock, what comes in belongs to the
//! responder and is guarded by the receive lock; each is behind a mutex of its own besides, taken inside
//! that lock and never contended.

mod answers;
mod execute;
mod inbound;
mod outbound;
mod place;

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use self::inbound::Inbound;
use self::outbound::Outbound;
pub(super) use self::outbound::is_answered;
pub(super) use self::place::pieces;
use super::{Qp, state};
use crate::ffi::ibv_qp_attr;
use crate::soft::epoch;
use crate::soft::layout::{NOTICE_STREAM, Target};
use crate::soft::link::Link;
use crate::soft::link::stream::Route;
use crate::soft::link::stream::mpa::Hello;

/// The stream side of a queue pair.
#[derive(Debug, Default)]
pub(super) struct Streams {
    outbound: Mutex<Outbound>,
    inbound: Mutex<Option<Inbound>>,
    /// Whether requests have come: another connection for them is of a peer that has begun anew.
    has_begun: AtomicBool,
    /// Whether requests go through a socket.
    active: AtomicBool,
    /// Whether a connection for the peer's requests is there.
    has_inbound: AtomicBool,
    /// Whether the peer is about to make one, and there may be no thread yet that takes it.
    peer_awaited: AtomicBool,
    /// Whether something has come that this side cannot take yet.
    stalled: AtomicBool,
    /// Requests that the peer has executed, as it says through the socket; counted on from the messages
    /// that it has acknowledged before.
    acknowledged: AtomicU32,
    /// READs and atomics that may be under way, and that the peer may have under way.
    max_rd_atomic: AtomicU32,
    max_dest_rd_atomic: AtomicU32,
}

impl Streams {
    #[inline]
    pub(super) fn is_active(&self) -> bool {
        self.active.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn has_inbound(&self) -> bool {
        self.has_inbound.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn is_stalled(&self) -> bool {
        self.stalled.load(Ordering::Relaxed)
    }

    /// Requests go through a socket from now on, or do not. Both locks are held.
    pub(super) fn activate(&self, active: bool) {
        self.active.store(active, Ordering::Relaxed);
    }

    /// The peer is about to connect, for its requests.
    pub(super) fn await_peer(&self) {
        self.peer_awaited.store(true, Ordering::Relaxed);
    }

    #[inline]
    pub(super) fn is_peer_awaited(&self) -> bool {
        self.peer_awaited.load(Ordering::Relaxed)
    }

    #[inline]
    pub(super) fn acknowledged(&self) -> u32 {
        self.acknowledged.load(Ordering::Acquire)
    }

    fn acknowledge(&self, count: u32) {
        self.acknowledged.store(count, Ordering::Release);
    }

    /// Takes over what the attributes say about READs and atomics.
    pub(super) fn adopt(&self, attr: &ibv_qp_attr) {
        let (ours, theirs) = (attr.max_rd_atomic, attr.max_dest_rd_atomic);
        self.max_rd_atomic.store(ours.into(), Ordering::Relaxed);
        self.max_dest_rd_atomic
            .store(theirs.into(), Ordering::Relaxed);
    }

    fn outbound(&self) -> MutexGuard<'_, Outbound> {
        self.outbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inbound(&self) -> MutexGuard<'_, Option<Inbound>> {
        self.inbound.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Cuts both connections. Both locks are held.
    pub(super) fn reset(&self) {
        *self.outbound() = Outbound::default();
        *self.inbound() = None;
        self.has_begun.store(false, Ordering::Relaxed);
        self.active.store(false, Ordering::Relaxed);
        self.has_inbound.store(false, Ordering::Relaxed);
        self.stalled.store(false, Ordering::Relaxed);
        self.peer_awaited.store(false, Ordering::Relaxed);
        self.acknowledge(0);
    }
}

impl Qp {
    fn with_send_lock(&self, act: impl FnOnce()) {
        self.lock_sends();
        act();
        self.unlock_sends();
    }

    fn with_recv_lock(&self, act: impl FnOnce()) {
        epoch::lock(&self.info().rq_epoch.0);
        act();
        epoch::unlock(&self.info().rq_epoch.0);
    }

    /// Our requests go through a socket from the next one on: what it needs is its owner's alone to reach.
    /// The send lock is held, and everything before has ended, so the ring is empty and both sides have
    /// counted the same. A connection is to be [dialled](Self::dial).
    #[cold]
    pub(super) fn go_over(&self) {
        tracing::debug!(qpn = self.qpn, "requests go through a socket from now on");
        let acked = self.requester.acked.load(Ordering::Relaxed);
        self.streams.acknowledge(acked);
        self.requester.waiting_since.store(0, Ordering::Relaxed);
        self.streams.activate(true);
        // SAFETY: the send lock is held.
        if let Some(link) = unsafe { self.link() } {
            let notices = &link.mailbox().notices;
            notices.fetch_or(NOTICE_STREAM, Ordering::Release);
            link.kick();
        }
    }

    /// Sees to it that the peer can connect, for its requests. No lock is held.
    #[cold]
    pub(super) fn open_for_streams(&self) {
        let awaited = self.streams.peer_awaited.swap(false, Ordering::Relaxed);
        if awaited && let Err(error) = self.process.streams() {
            tracing::error!(qpn = self.qpn, %error, "no thread for sockets can be started");
        }
    }

    /// Has a connection made for our requests. No lock is held.
    pub(super) fn dial(&self, link: &Arc<Link>) {
        let requester = &self.requester;
        let patience = requester.patience_ns.load(Ordering::Relaxed) / 1_000_000;
        let own = Target(self.info().responder.0.target.load(Ordering::Relaxed));
        let depth = |depth: &AtomicU32| depth.load(Ordering::Relaxed) as u16;
        let hello = Hello {
            source_qpn: self.qpn,
            dest_qpn: link.dest_qpn,
            psn: requester.sq_psn(),
            generation: own.generation(),
            patience_ms: u32::try_from(patience).unwrap_or(u32::MAX),
            executed: self.streams.acknowledged(),
            ird: depth(&self.streams.max_dest_rd_atomic),
            ord: depth(&self.streams.max_rd_atomic),
            rnr_retry: requester.rnr_retry(),
            xrc: self.is_xrc_sender(),
            // Within a host nothing can change on the way.
            crc: matches!(link.route, Some(Route::Tcp { .. })),
        };
        match self.process.streams() {
            Ok(streams) => streams.dial(self.qpn, Arc::clone(link), hello),
            Err(error) => {
                tracing::error!(qpn = self.qpn, %error, "no thread for sockets can be started");
                self.connected_stream(link, None);
            }
        }
    }

    /// Whether the queue pair still has this connection, and nothing for its requests yet.
    pub(in crate::soft) fn wants_stream(&self, link: &Arc<Link>) -> bool {
        let same = |ours: Arc<Link>| Arc::ptr_eq(&ours, link);
        let has_it = state::is_connected(self.state()) && self.shared_link().is_some_and(same);
        has_it && self.stream_is_awaited()
    }

    /// Something has come on the connection for our requests, or it takes more.
    pub(in crate::soft) fn serve_outbound(&self) {
        self.progress_send();
        // Whoever polls finds the rest.
        let has_backlog = !self.sq.is_begun();
        if self.waits() && (has_backlog || self.send_cq.is_armed()) {
            self.watch_stream();
        }
    }
}
