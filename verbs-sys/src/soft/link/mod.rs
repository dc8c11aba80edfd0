//! How a queue pair reaches its peer.

pub(super) mod peer;
pub(super) mod rendezvous;
pub(super) mod ring;
pub(super) mod stream;

use std::net::{IpAddr, SocketAddr};
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use rustix::io::Errno;

use super::layout::{
    ARMED_ANY, ARMED_NOT, ARMED_SOLICITED, CqBell, Info, KeyEntry, LOST, MAX_KEYS, MAX_SRQ,
    NO_CONNECTION, QpInfo, QpMailbox, Readiness, SharedTarget, Target, qpn_slot,
};
use super::process::Process;
use super::{epoch, fencing};
use peer::{Mapped, Peer};
use stream::Route;

/// Whose memory the other end lives in.
#[derive(Debug)]
pub(super) enum Via {
    /// This process: its addresses are ours.
    Local,
    /// Another process of this host, through shared memory.
    Shm(Arc<Peer>),
    /// Another host, or a process of another user: its memory is not ours to reach.
    Remote,
    /// Nobody: the peer was gone before we connected.
    Nobody,
}

/// A completion queue of the peer that can be woken.
#[derive(Debug)]
pub(super) struct Bell {
    cq: NonNull<CqBell>,
    fd: OwnedFd,
}

/// The connection of one queue pair, from its move to RTR until it is reset.
#[derive(Debug)]
pub(super) struct Link {
    pub via: Via,
    pub dest_qpn: u32,
    info: NonNull<QpInfo>,
    mailbox: NonNull<QpMailbox>,
    keys: NonNull<[KeyEntry; MAX_KEYS]>,
    srqs: NonNull<[AtomicU64; MAX_SRQ]>,
    fences: NonNull<AtomicU32>,
    /// Rings the queue that receives what we send.
    pub recv_bell: Option<Bell>,
    /// Rings the queue that waits for our acknowledgements.
    pub send_bell: Option<Bell>,
    /// The [`Target::connection`] of the peer's that ours was made with; [`NO_CONNECTION`] until it is ready,
    /// [`LOST`] once its process is known to be dead.
    connection: AtomicU64,
    /// The [`Target`] of the peer's that was last found to be in that connection, or [`NO_CONNECTION`].
    accepted: AtomicU64,
    /// Which of the queue pairs that have had this place it leads to.
    incarnation: u32,
    /// Where a connection for our requests goes, if there is to be one.
    pub route: Option<Route>,
    /// The owner of the memory at the other end executes every request in it: they go through such a
    /// connection from the first on.
    pub by_owner: bool,
}

// SAFETY: the pointers lead into mappings that `via` keeps alive; behind them are atomics only.
unsafe impl Send for Link {}
// SAFETY: as for Send.
unsafe impl Sync for Link {}
// SAFETY: a bell's pointer leads into the mapping of the peer that its link keeps alive.
unsafe impl Send for Bell {}
// SAFETY: as for Send.
unsafe impl Sync for Bell {}

impl Link {
    /// A link within this process.
    pub(super) fn local(process: &Arc<Process>, dest_qpn: u32) -> Self {
        let index = super::layout::qpn_index(dest_qpn);
        Self {
            dest_qpn,
            info: NonNull::from(&process.info().qps[index]),
            mailbox: NonNull::from(&process.mailbox().qps[index]),
            keys: NonNull::from(&process.info().keys),
            srqs: NonNull::from(&process.info().srqs),
            fences: NonNull::from(&process.info().header.fences.0),
            recv_bell: None,
            send_bell: None,
            connection: AtomicU64::new(NO_CONNECTION),
            accepted: AtomicU64::new(NO_CONNECTION),
            incarnation: incarnation(process.info(), index),
            route: None,
            by_owner: false,
            via: Via::Local,
        }
    }

    /// A link to a queue pair of another process.
    pub(super) fn shm(peer: Arc<Peer>, dest_qpn: u32, bells: rendezvous::Bells) -> Self {
        let index = super::layout::qpn_index(dest_qpn);
        let bell = |bell: Option<(u32, OwnedFd)>| {
            let (cq, fd) = bell?;
            Some(Bell {
                cq: NonNull::from(peer.mailbox().cqs.get(cq as usize)?),
                fd,
            })
        };
        Self {
            dest_qpn,
            info: NonNull::from(&peer.info().qps[index]),
            mailbox: NonNull::from(&peer.mailbox().qps[index]),
            keys: NonNull::from(&peer.info().keys),
            srqs: NonNull::from(&peer.info().srqs),
            fences: NonNull::from(&peer.info().header.fences.0),
            recv_bell: bell(bells.recv),
            send_bell: bell(bells.send),
            connection: AtomicU64::new(NO_CONNECTION),
            accepted: AtomicU64::new(NO_CONNECTION),
            incarnation: incarnation(peer.info(), index),
            route: Some(Route::Host(peer.slot)),
            by_owner: false,
            via: Via::Shm(peer),
        }
    }

    /// A link to nobody: it points at the tables of the queue pair itself, which is never its own
    /// peer.
    pub(super) fn nobody(process: &Arc<Process>, own_qpn: u32, dest_qpn: u32) -> Self {
        Self {
            via: Via::Nobody,
            dest_qpn,
            connection: AtomicU64::new(LOST),
            ..Self::local(process, own_qpn)
        }
    }

    /// A link over TCP, from one of our addresses.
    pub(super) fn remote(
        process: &Arc<Process>,
        (own_qpn, dest_qpn): (u32, u32),
        from: SocketAddr,
        to: SocketAddr,
    ) -> Self {
        Self {
            via: Via::Remote,
            connection: AtomicU64::new(NO_CONNECTION),
            route: Some(Route::Tcp { from, to }),
            by_owner: true,
            ..Self::nobody(process, own_qpn, dest_qpn)
        }
    }

    /// Whether the process at the other end runs every copy in its memory itself.
    pub(super) fn peer_is_strict(&self) -> bool {
        match &self.via {
            Via::Shm(peer) => peer.info().header.strict.load(Ordering::Relaxed) != 0,
            _ => false,
        }
    }

    /// Whether we can fetch a message from any memory of the peer.
    pub(super) fn can_fetch(&self) -> bool {
        match &self.via {
            Via::Local => true,
            Via::Shm(peer) => peer.cma,
            Via::Remote | Via::Nobody => false,
        }
    }

    /// Whether the peer's requests may come on a connection from there; `None` is a process of this
    /// host, of our own user.
    pub(super) fn takes_streams_from(&self, from: Option<IpAddr>) -> bool {
        match (&self.via, self.route, from) {
            (Via::Shm(_), _, None) => true,
            (_, Some(Route::Tcp { to, .. }), Some(from)) => to.ip().to_canonical() == from,
            _ => false,
        }
    }

    #[inline]
    pub(super) fn info(&self) -> &QpInfo {
        // SAFETY: the mapping lives as long as `via`, and holds atomics.
        unsafe { self.info.as_ref() }
    }

    /// Waits until the peer's queue pair has left what it was in. Posts are [fenced](super::fencing).
    ///
    /// # Errors
    /// `EBUSY` if its process is stopped in the middle of it.
    #[inline(always)]
    pub(super) fn quiesce_peer(&self) -> Result<(), Errno> {
        let Via::Shm(peer) = &self.via else {
            return Ok(());
        };
        if !epoch::quiesce_qp(self.info(), &**peer) {
            tracing::error!(slot = peer.slot, pid = ?peer.pid, "a peer process is stopped in the middle of an operation");
            return Err(Errno::BUSY);
        }
        Ok(())
    }

    #[inline]
    pub(super) fn mailbox(&self) -> &QpMailbox {
        // SAFETY: as in `info`.
        unsafe { self.mailbox.as_ref() }
    }

    /// Whether requests on the peer's memory must be executed behind a fence.
    #[inline(always)]
    pub(super) fn is_fenced(&self) -> bool {
        // SAFETY: as in `info`.
        fencing::is_fenced(unsafe { self.fences.as_ref() }.load(Ordering::Acquire))
    }

    #[inline]
    pub(super) fn keys(&self) -> &[KeyEntry; MAX_KEYS] {
        // SAFETY: as in `info`.
        unsafe { self.keys.as_ref() }
    }

    /// The peer's shared receive queue of this number, if it is one that its queue pair, which accepts this, may use.
    pub(super) fn shared_target(&self, target: Target, number: u32) -> Option<SharedTarget> {
        if qpn_slot(number) != qpn_slot(self.dest_qpn) {
            return None;
        }
        // SAFETY: as in `info`.
        let word = &unsafe { self.srqs.as_ref() }[number as usize % MAX_SRQ];
        let shared = SharedTarget(word.load(Ordering::Acquire));
        shared.is_in(target.pd()).then_some(shared)
    }

    /// A message for this shared receive queue was left in the peer's mailbox: if its program may sleep for that, its
    /// process shall look.
    pub(super) fn wake(&self, shared: SharedTarget, solicited: bool) {
        if let Via::Shm(peer) = &self.via
            && let Some(cq) = shared.sleeps_at()
            && let Some(bell) = peer.mailbox().cqs.get(cq)
            && is_due(bell, solicited).is_some()
        {
            peer.kick();
        }
    }

    /// What the peer's queue pair accepts, if it is ready for ours and still in the connection that
    /// we know.
    #[inline(always)]
    pub(super) fn connected_target(&self) -> Option<Target> {
        self.unchanged_target().or_else(|| self.accepts_anew())
    }

    /// The same, if it was asked for before, and is still what it was then.
    #[inline(always)]
    pub(super) fn unchanged_target(&self) -> Option<Target> {
        let target = self.target();
        (target.0 == self.accepted.load(Ordering::Relaxed)).then_some(target)
    }

    /// The target, which was not seen before, if it is in the connection.
    #[cold]
    fn accepts_anew(&self) -> Option<Target> {
        let target = self.target();
        let accepts = || target.connection() == self.connection.load(Ordering::SeqCst);
        if !accepts() {
            return None;
        }
        self.accepted.store(target.0, Ordering::SeqCst);
        // Either `lose` comes behind this store, or it is seen here.
        let still = accepts();
        if !still {
            self.accepted.store(NO_CONNECTION, Ordering::SeqCst);
        }
        still.then_some(target)
    }

    /// What the peer's queue pair accepts, and from whom.
    #[inline(always)]
    pub(super) fn target(&self) -> Target {
        Target(self.info().responder.0.target.load(Ordering::SeqCst))
    }

    /// The peer is ready for ours. `false`: its process has died meanwhile.
    pub(super) fn know(&self, target: Target) -> bool {
        let (set, fail) = (Ordering::SeqCst, Ordering::Relaxed);
        self.connection
            .compare_exchange(NO_CONNECTION, target.connection(), set, fail)
            .is_ok()
    }

    /// The process at the other end is dead: nothing is in a connection with us any more, whatever its memory
    /// says, which stays as it was.
    pub(super) fn lose(&self) {
        self.connection.store(LOST, Ordering::SeqCst);
        self.accepted.store(NO_CONNECTION, Ordering::SeqCst);
    }

    /// Whether the peer was ready for ours once, or its process is dead.
    pub(super) fn is_known(&self) -> bool {
        self.connection.load(Ordering::Relaxed) != NO_CONNECTION
    }

    /// Whether the peer has left the connection that we know, or its process is dead: it will never answer.
    pub(super) fn is_lost(&self) -> bool {
        self.is_known() && self.connected_target().is_none()
    }

    /// Whether the peer is still in the connection of this number, and it is with us: only then is
    /// its mailbox the place for our answers. The caller holds a lock that a peer waits for before
    /// it leaves a connection.
    #[inline]
    pub(super) fn takes_answers(&self, own_qpn: u32, generation: u32) -> bool {
        let target = self.target();
        !matches!(self.via, Via::Remote)
            && target.readiness() == Readiness::Ready
            && target.dest_qpn() == own_qpn
            && target.generation() == generation
    }

    /// Whether it still leads to the queue pair it was made for.
    pub(super) fn is_current(&self) -> bool {
        let now = &self.info().responder.0.incarnation;
        !self.is_dead() && now.load(Ordering::Acquire) == self.incarnation
    }

    /// Whether the process at the other end is known to have died.
    pub(super) fn is_dead(&self) -> bool {
        match &self.via {
            Via::Local | Via::Remote => false,
            Via::Shm(peer) => peer.is_dead(),
            Via::Nobody => true,
        }
    }

    /// As [`is_dead`](Self::is_dead), but asks the kernel, which knows it first, and true already of a
    /// process that is on its way out.
    pub(super) fn has_left(&self) -> bool {
        match &self.via {
            Via::Shm(peer) => peer.has_left(),
            _ => self.is_dead(),
        }
    }

    /// Maps an arena of the peer. No lock is held. `None`: it cannot be had.
    pub(super) fn map_arena(&self, process: &Process, arena: u32) -> Option<Mapped> {
        let Via::Shm(peer) = &self.via else {
            return None;
        };
        match peer.map_arena(process, arena) {
            Ok(mapped) => Some(mapped),
            Err(error) if peer.is_dead() => {
                tracing::debug!(arena, %error, "a peer ended before its memory was mapped");
                None
            }
            Err(error) => {
                tracing::warn!(arena, %error, "cannot map memory of a peer");
                None
            }
        }
    }

    /// Something was left in the peer's mailbox: its polls shall look, if they would not do so unasked.
    #[inline]
    pub(super) fn call(&self) {
        let resting = self.info().responder.0.resting.load(Ordering::Relaxed);
        if resting != 0 {
            self.call_resting(resting);
        }
    }

    #[cold]
    fn call_resting(&self, resting: u32) {
        // What is left within this process is taken by whoever leaves it.
        if let Via::Shm(peer) = &self.via
            && let Some(calls) = peer.mailbox().calls.get(resting as usize - 1)
        {
            calls.call(super::layout::qpn_index(self.dest_qpn));
        }
    }

    /// Asks the peer's process to look at its queue pairs, although none of its threads polls.
    pub(super) fn kick(&self) {
        if let Via::Shm(peer) = &self.via {
            peer.kick();
        }
    }
}

fn incarnation(info: &Info, index: usize) -> u32 {
    let responder = &info.qps[index].responder.0;
    responder.incarnation.load(Ordering::Acquire)
}

impl Bell {
    /// Whether the queue's owner has asked to be woken, and may sleep.
    #[inline]
    pub(super) fn is_armed(&self) -> bool {
        // SAFETY: the link that holds this bell keeps the mapping alive.
        let armed = &unsafe { self.cq.as_ref() }.armed;
        armed.load(Ordering::Relaxed) != ARMED_NOT
    }

    /// Wakes the queue's owner if it asked for it. What it shall find was published before.
    #[inline]
    pub(super) fn ring(&self, solicited: bool) {
        // SAFETY: the link that holds this bell keeps the mapping alive.
        ring(unsafe { self.cq.as_ref() }, &self.fd, solicited);
    }
}

/// How the queue is armed, if what was published is to be told of.
#[inline]
fn is_due(cq: &CqBell, solicited: bool) -> Option<u32> {
    // The other half of this fence is in `Cq::arm`: either we see the arming, or what looks behind it
    // sees what we published.
    fence(Ordering::SeqCst);
    let armed = cq.armed.load(Ordering::Relaxed);
    (armed == ARMED_ANY || (armed == ARMED_SOLICITED && solicited)).then_some(armed)
}

/// Fires one event if the queue is armed for it.
#[inline]
pub(super) fn ring(cq: &CqBell, fd: &OwnedFd, solicited: bool) {
    if let Some(armed) = is_due(cq, solicited)
        && cq
            .armed
            .compare_exchange(armed, ARMED_NOT, Ordering::SeqCst, Ordering::Relaxed)
            .is_ok()
    {
        fire(cq, fd);
    }
}

/// Counts an event, and wakes who waits for it. Whoever does has disarmed the queue.
pub(super) fn fire(cq: &CqBell, fd: &OwnedFd) {
    cq.fired.fetch_add(1, Ordering::Release);
    signal(fd);
}

/// Adds one to an eventfd. Cannot fail but by overflow, when the reader is awake anyway.
pub(super) fn signal(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}
