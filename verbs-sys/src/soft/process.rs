//! This process as a participant: its slot, its shared files, its objects, its peers.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, TryLockError,
};
use std::thread::JoinHandle;

use rustix::event::EventfdFlags;
use rustix::io::Errno;
use rustix::time::{TimerfdClockId, TimerfdFlags, TimerfdTimerFlags};

use super::executing::Executing;
use super::fencing::Fencing;
use super::index::IndexPool;
use super::injection::Injector;
use super::layout::{Info, MAGIC, MAX_CQ, MAX_PD, MAX_QP, MAX_SRQ, Mailbox, qpn_slot};
use super::link::peer::Peer;
use super::link::rendezvous::{self, Request};
use super::link::{Link, signal};
use super::memory::Arenas;
use super::mw::{Execution, Windows};
use super::nothing::Nothing;
use super::objects::{Domains, Memories};
use super::options::{Listen, Options};
use super::qp::Qp;
use super::segment::{self, Mapping};
use super::xrc;
use super::{exit, fencing, fork, identity, keys, service};
use crate::copy;
use crate::ffi::ibv_qp_attr;

/// How long after a request for it the upkeep thread looks at the queue pairs.
const NUDGE_AFTER_NS: u64 = 1_000_000;

/// Everything the contexts of this process share.
#[derive(Debug)]
pub(super) struct Process {
    /// Its number in the system; a forked child that has inherited this has another.
    pid: u32,
    pub slot: u32,
    pub gids: Vec<[u8; 16]>,
    pub keys: keys::Allocator,
    pub windows: Windows,
    pub arenas: Arenas,
    pub qp_indices: IndexPool,
    pub cq_indices: IndexPool,
    pub pd_ids: IndexPool,
    pub srq_indices: IndexPool,
    pub domains: Domains,
    pub xrc: xrc::Registry,
    pub device_memory: Memories,
    /// For regions without memory, once there is one.
    pub nothing: OnceLock<Nothing>,
    pub(super) info_file: OwnedFd,
    pub(super) mailbox_file: OwnedFd,
    info: Mapping,
    mailbox: Mapping,
    qps: RwLock<HashMap<u32, Arc<Qp>>>,
    pub executing: Executing,
    pub fencing: Fencing,
    peers: Mutex<HashMap<u32, Arc<Peer>>>,
    /// Held while a peer is connected to, unlike `peers`, which never is.
    connecting: Mutex<()>,
    pub(super) listener: OwnedFd,
    pub(super) kick: OwnedFd,
    pub(super) timer: OwnedFd,
    pub(super) epoll: OwnedFd,
    /// Nanoseconds the upkeep thread's timer was last set to, 0 when it is not set.
    timer_ns: AtomicU64,
    /// The way to the thread of streams; it runs once there is one.
    streams: Arc<service::Streams>,
    streaming: Mutex<Option<JoinHandle<()>>>,
    /// `process_vm_readv` and `process_vm_writev` are not to be used.
    pub without_cma: AtomicBool,
    /// The faults that are wanted.
    pub injector: OnceLock<Arc<Injector>>,
    /// Where other hosts reach this process.
    listen: OnceLock<(Listen, OwnedFd)>,
    /// Readable once the other threads shall end.
    pub(super) halt: OwnedFd,
    /// What peers read to learn whether they may read our memory.
    _probe: Box<u64>,
}

static OPEN: Mutex<Option<Open>> = Mutex::new(None);

struct Open {
    pid: u32,
    process: Arc<Process>,
    contexts: usize,
    threads: Vec<JoinHandle<()>>,
}

impl Process {
    /// The one of this process, made at its first use. Each call is undone by one
    /// [`release`](Self::release).
    pub(super) fn acquire() -> Result<Arc<Self>, Errno> {
        let mut open = lock(&OPEN);
        if let Some(parents) = open.take_if(|open| open.pid != std::process::id()) {
            // After a fork the memory is shared with the parent, and the threads are not here.
            std::mem::forget(parents);
        }
        if let Some(open) = open.as_mut() {
            open.contexts += 1;
            return Ok(Arc::clone(&open.process));
        }
        let process = Arc::new(Self::new()?);
        let threads = service::spawn(&process).inspect_err(|_| signal(&process.halt))?;
        *open = Some(Open {
            pid: std::process::id(),
            process: Arc::clone(&process),
            contexts: 1,
            threads,
        });
        Ok(process)
    }

    pub(super) fn release(process: Arc<Self>) {
        if process.is_inherited() {
            std::mem::forget(process);
            return;
        }
        let mut open = lock(&OPEN);
        let Some(state) = open.as_mut() else { return };
        state.contexts -= 1;
        if state.contexts == 0 {
            signal(&process.halt);
            process.streams.halt();
            let streaming = lock(&process.streaming).take();
            for thread in state.threads.drain(..).chain(streaming) {
                let _ = thread.join();
            }
            lock(&process.peers).clear();
            *open = None;
        }
    }

    /// The one of this process, if there is one and nobody is making or ending it.
    pub(super) fn current() -> Option<Arc<Self>> {
        let open = OPEN.try_lock().ok()?;
        let process = &open.as_ref()?.process;
        (!process.is_inherited()).then(|| Arc::clone(process))
    }

    /// Whether it is the parent's, and this is a forked child: then what is shared with the parent is
    /// not to be touched.
    pub(super) fn is_inherited(&self) -> bool {
        self.pid != std::process::id()
    }

    fn new() -> Result<Self, Errno> {
        fork::watch();
        exit::watch();
        copy::look_at_processor();
        let (slot, listener) = identity::claim_slot()?;
        let info_file = segment::create("verbs-soft0-info", size_of::<Info>())?;
        let mailbox_file = segment::create("verbs-soft0-mailbox", size_of::<Mailbox>())?;
        let info = Mapping::sparse(info_file.as_fd(), size_of::<Info>(), true)?;
        let mailbox = Mapping::sparse(mailbox_file.as_fd(), size_of::<Mailbox>(), true)?;
        if let Err(error) = segment::seal_writes(info_file.as_fd()) {
            // Linux before 5.1: peers are then only asked to map it read-only.
            tracing::debug!(%error, "cannot seal the info file against writes");
        }
        let probe = Box::new(MAGIC);
        let process = Self {
            pid: std::process::id(),
            slot,
            gids: identity::gids(),
            keys: keys::Allocator::new(),
            windows: Windows::default(),
            arenas: Arenas::default(),
            qp_indices: IndexPool::new(0, MAX_QP, 256),
            cq_indices: IndexPool::new(0, MAX_CQ, 256),
            pd_ids: IndexPool::new(1, MAX_PD, 256),
            srq_indices: IndexPool::new(0, MAX_SRQ, 256),
            domains: Domains::default(),
            xrc: xrc::Registry::default(),
            device_memory: Memories::default(),
            nothing: OnceLock::new(),
            info_file,
            mailbox_file,
            info,
            mailbox,
            qps: RwLock::default(),
            executing: Executing::default(),
            fencing: Fencing::default(),
            peers: Mutex::default(),
            connecting: Mutex::default(),
            listener,
            kick: rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            timer: rustix::time::timerfd_create(
                TimerfdClockId::Monotonic,
                TimerfdFlags::CLOEXEC | TimerfdFlags::NONBLOCK,
            )?,
            epoll: rustix::event::epoll::create(rustix::event::epoll::CreateFlags::CLOEXEC)?,
            timer_ns: AtomicU64::new(0),
            streams: Arc::new(service::Streams::new()?),
            streaming: Mutex::default(),
            without_cma: AtomicBool::new(false),
            injector: OnceLock::new(),
            listen: OnceLock::new(),
            halt: rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?,
            _probe: probe,
        };
        let header = &process.info().header;
        header.pid.store(std::process::id(), Ordering::Relaxed);
        header.slot.store(slot, Ordering::Relaxed);
        header
            .probe
            .store(&raw const *process._probe as u64, Ordering::Relaxed);
        // Until the kernel knows the process.
        header.fences.0.store(1, Ordering::Relaxed);
        header.magic.store(MAGIC, Ordering::Release);
        Ok(process)
    }

    #[inline]
    pub(super) fn info(&self) -> &Info {
        // SAFETY: the file was made with the size of `Info` and is sealed; it holds atomics only.
        unsafe { self.info.as_struct() }
    }

    #[inline]
    pub(super) fn mailbox(&self) -> &Mailbox {
        // SAFETY: as in `info`; the rings are reached by raw pointer only.
        unsafe { self.mailbox.as_struct() }
    }

    pub(super) fn add_qp(&self, qp: Arc<Qp>) {
        self.qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(qp.qpn, qp);
    }

    pub(super) fn remove_qp(&self, qpn: u32) -> Option<Arc<Qp>> {
        self.qps
            .write()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&qpn)
    }

    pub(super) fn qp(&self, qpn: u32) -> Option<Arc<Qp>> {
        self.qps
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .get(&qpn)
            .map(Arc::clone)
    }

    /// Copies the queue pairs as they are now: what is done with them may take other locks.
    pub(super) fn copy_qps(&self, to: &mut Vec<Arc<Qp>>) {
        let qps = self.qps.read().unwrap_or_else(PoisonError::into_inner);
        to.extend(qps.values().map(Arc::clone));
    }

    /// The queue pairs, unless some are being added or removed.
    pub(super) fn try_qps(&self) -> Option<RwLockReadGuard<'_, HashMap<u32, Arc<Qp>>>> {
        match self.qps.try_read() {
            Ok(qps) => Some(qps),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }

    /// Waits until no queue pair, ours or a peer's connected to ours, executes a request that began
    /// before the call.
    ///
    /// # Errors
    /// `EBUSY` if a peer's process is stopped in the middle of one.
    pub(super) fn quiesce(&self) -> Result<(), Errno> {
        self.fence_posts();
        self.executing.quiesce(self.info())
    }

    /// As [`quiesce`](Self::quiesce), for this process's own queue pairs only.
    pub(super) fn quiesce_own(&self) {
        self.fence_posts();
        self.executing.quiesce_own(self.info());
    }

    /// From now on whoever executes requests on this process's memory, or its own requests, shows it by an
    /// epoch that is seen here: what was unpublished before is not found any more under one that is even
    /// afterwards. It may be called under an epoch lock.
    #[inline]
    pub(super) fn fence_posts(&self) {
        if !self.fencing.is_in_force() {
            self.fencing.begin(&self.info().header.fences.0);
            self.look_later();
        }
    }

    /// Notes everything that is executing now and may use windows of this process, but for what
    /// `held` guards. `None`: queue pairs are being added or removed, ask again. Waiting for that here
    /// would be waiting for threads that wait for the caller's epoch.
    pub(super) fn window_users(&self, held: &AtomicU64) -> Option<Vec<Execution>> {
        let mut executions = Vec::new();
        for qp in self.try_qps()?.values() {
            qp.note_window_users(held, &mut executions);
        }
        Some(executions)
    }

    /// Takes over what the options say of the whole process.
    ///
    /// # Errors
    /// That of `bind` or `listen`, where a socket cannot listen.
    pub(super) fn adopt(self: &Arc<Self>, options: &Options) -> Result<(), Errno> {
        if !options.cma {
            self.without_cma.store(true, Ordering::Relaxed);
        }
        if options.strict {
            self.info().header.strict.store(1, Ordering::SeqCst);
        }
        if let Some(faults) = &options.faults {
            let _ = self.injector.set(Arc::new(Injector::new(faults)));
        }
        let Some(listen) = options.listen else {
            return Ok(());
        };
        let streaming = self.streams()?;
        // One at a time: the lock is that of the thread which gets the socket.
        let _one = lock(&self.streaming);
        match self.listen.get() {
            Some((already, _)) if *already == listen => return Ok(()),
            Some(_) => return Err(Errno::ALREADY),
            None => {}
        }
        fork::set_base_port(listen.base_port);
        let at = SocketAddr::new(listen.address, listen.port(self.slot));
        let bound = service::bind_tcp(at).and_then(|tcp| Ok((tcp, service::bind_udp(at)?)));
        let (tcp, udp) = bound
            .inspect_err(|error| tracing::error!(%at, %error, "cannot listen for other hosts"))?;
        streaming.listen(tcp, udp.try_clone().map_err(|_| Errno::MFILE)?);
        let _ = self.listen.set((listen, udp));
        tracing::info!(%at, "listening for queue pairs of other hosts");
        Ok(())
    }

    pub(super) fn is_strict(&self) -> bool {
        self.info().header.strict.load(Ordering::Relaxed) != 0
    }

    /// Whether queue pairs of other hosts can be reached, and reach us.
    pub(super) fn reaches_other_hosts(&self) -> bool {
        self.listen.get().is_some()
    }

    /// The way to the thread of streams, which is started if it does not run; peers of this host can
    /// connect then.
    pub(super) fn streams(self: &Arc<Self>) -> Result<&service::Streams, Errno> {
        let mut streaming = lock(&self.streaming);
        if streaming.is_none() {
            let listener = identity::listen_for_streams(self.slot)?;
            *streaming = Some(service::spawn_streams(self, &self.streams)?);
            self.streams.listen_on_host(listener);
        }
        Ok(&self.streams)
    }

    /// Sends a datagram to a queue pair of another host. It may be lost.
    pub(super) fn send_datagram(&self, dgid: [u8; 16], qpn: u32, parts: &[&[u8]; 2]) {
        let Some((listen, socket)) = self.listen.get() else {
            return;
        };
        let to = SocketAddr::new(identity::ip_of(dgid), listen.port(qpn_slot(qpn)));
        let sent = service::send_udp(socket, to, qpn, parts);
        if let Err(error) = sent {
            tracing::debug!(qpn, %to, %error, "a datagram is lost");
        }
    }

    /// The way to the thread of streams, for those who got a stream from it.
    pub(super) fn running_streams(&self) -> &service::Streams {
        &self.streams
    }

    /// The link to a queue pair. A peer that cannot be reached is one whose requests will time out, as
    /// on a real fabric; it does not fail the connection's set-up.
    pub(super) fn link(self: &Arc<Self>, own_qpn: u32, attr: &ibv_qp_attr) -> Link {
        let dest_qpn = attr.dest_qp_num & 0xff_ffff;
        let slot = qpn_slot(dest_qpn);
        // SAFETY: both members of the union are plain bytes.
        let dgid = unsafe { attr.ah_attr.grh.dgid.raw };
        if !self.gids.contains(&dgid) {
            return self.link_by_tcp(own_qpn, attr);
        }
        if slot == self.slot {
            return Link::local(self, dest_qpn);
        }
        let connected = self.neighbour(dest_qpn).and_then(|mut link| {
            if self.is_strict() || link.peer_is_strict() {
                self.streams()?;
                link.by_owner = true;
            }
            Ok(link)
        });
        connected.unwrap_or_else(|error| match error {
            Errno::PERM if self.reaches_other_hosts() => self.link_by_tcp(own_qpn, attr),
            Errno::PERM => {
                let variable = Options::LISTEN_VARIABLE;
                tracing::warn!(
                    dest_qpn,
                    slot,
                    "the queue pair belongs to another user, who is reached over TCP only: set {variable}"
                );
                Link::nobody(self, own_qpn, dest_qpn)
            }
            _ => {
                tracing::warn!(dest_qpn, slot, %error, "no such queue pair on this host");
                Link::nobody(self, own_qpn, dest_qpn)
            }
        })
    }

    /// The link to a queue pair of another process of this host.
    fn neighbour(&self, dest_qpn: u32) -> Result<Link, Errno> {
        let peer = self.peer(qpn_slot(dest_qpn))?;
        let bells = rendezvous::decode_bells(peer.ask(Request::Pair { qpn: dest_qpn })?)?;
        Ok(Link::shm(peer, dest_qpn, bells))
    }

    /// The link for datagrams to a queue pair of this host.
    pub(super) fn link_for_datagrams(self: &Arc<Self>, own_qpn: u32, dest_qpn: u32) -> Link {
        if qpn_slot(dest_qpn) == self.slot {
            return Link::local(self, dest_qpn);
        }
        self.neighbour(dest_qpn).unwrap_or_else(|error| {
            tracing::debug!(dest_qpn, %error, "no such queue pair on this host");
            Link::nobody(self, own_qpn, dest_qpn)
        })
    }

    fn link_by_tcp(self: &Arc<Self>, own_qpn: u32, attr: &ibv_qp_attr) -> Link {
        let dest_qpn = attr.dest_qp_num & 0xff_ffff;
        let Some((listen, _)) = self.listen.get() else {
            return Link::nobody(self, own_qpn, dest_qpn);
        };
        let grh = &attr.ah_attr.grh;
        // SAFETY: both members of the union are plain bytes.
        let to = identity::ip_of(unsafe { grh.dgid.raw });
        let own = self.gids.get(usize::from(grh.sgid_index));
        let from = own.map_or(listen.address, |gid| identity::ip_of(*gid));
        let to = SocketAddr::new(to, listen.port(qpn_slot(dest_qpn)));
        Link::remote(self, (own_qpn, dest_qpn), SocketAddr::new(from, 0), to)
    }

    fn peer(&self, slot: u32) -> Result<Arc<Peer>, Errno> {
        let _connecting = lock(&self.connecting);
        let known = lock(&self.peers).get(&slot).map(Arc::clone);
        if let Some(peer) = known.filter(|peer| !peer.has_exited()) {
            return Ok(peer);
        }
        let peer = Arc::new(Peer::connect(self, slot)?);
        if let Some(old) = lock(&self.peers).insert(slot, Arc::clone(&peer)) {
            old.set_dead();
            service::unwatch(self, &old);
        }
        service::watch(self, &peer)?;
        Ok(peer)
    }

    /// The peer whose control connection has this descriptor.
    pub(super) fn peer_by_hangup(&self, fd: RawFd) -> Option<Arc<Peer>> {
        let peers = lock(&self.peers);
        peers
            .values()
            .find(|peer| peer.hangup.as_raw_fd() == fd)
            .map(Arc::clone)
    }

    pub(super) fn peers(&self) -> Vec<Arc<Peer>> {
        lock(&self.peers).values().map(Arc::clone).collect()
    }

    /// Forgets a peer that has died.
    pub(super) fn forget(&self, dead: &Arc<Peer>) {
        dead.set_dead();
        let mut peers = lock(&self.peers);
        if peers
            .get(&dead.slot)
            .is_some_and(|peer| Arc::ptr_eq(peer, dead))
        {
            peers.remove(&dead.slot);
        }
    }

    /// Has the upkeep thread look at the queue pairs soon: something waits that no poll may come
    /// for. Cheap when it was asked already.
    pub(super) fn nudge_later(&self) {
        if !(1..=NUDGE_AFTER_NS).contains(&self.timer_ns.load(Ordering::Acquire)) {
            self.set_timer(NUDGE_AFTER_NS);
        }
    }

    /// Has the upkeep thread look whether posts may go without fences again.
    pub(super) fn look_later(&self) {
        if self.timer_ns.load(Ordering::Acquire) == 0 {
            self.set_timer(fencing::HOLD_NS);
        }
    }

    /// Sets the upkeep thread's timer, once, in `ns` from now.
    pub(super) fn set_timer(&self, ns: u64) {
        self.timer_ns.store(ns, Ordering::Release);
        let spec = rustix::time::Itimerspec {
            it_interval: rustix::time::Timespec {
                tv_sec: 0,
                tv_nsec: 0,
            },
            it_value: rustix::time::Timespec {
                tv_sec: (ns / 1_000_000_000) as i64,
                tv_nsec: (ns % 1_000_000_000) as i64,
            },
        };
        if let Err(error) =
            rustix::time::timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &spec)
        {
            tracing::error!(%error, "timerfd_settime");
        }
    }

    /// The timer has fired.
    pub(super) fn timer_fired(&self) {
        self.timer_ns.store(0, Ordering::Release);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
