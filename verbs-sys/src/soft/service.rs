//! The service thread: asleep unless a peer connects, asks or dies, or something waits that no
//! application thread polls for.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use super::link::peer::Peer;
use super::link::rendezvous::{self, Request};
use super::process::Process;

/// The service thread's timer runs from a millisecond up to this, while something waits.
const MAX_TICK_NS: u64 = 50_000_000;
const MIN_TICK_NS: u64 = 1_000_000;

const LISTENER: u64 = u64::MAX;
const KICK: u64 = u64::MAX - 1;
const TIMER: u64 = u64::MAX - 2;
/// Added to the descriptor of a connection we made; those we accepted have the plain descriptor.
const OUTGOING: u64 = 1 << 32;

pub(super) fn spawn(process: Arc<Process>) -> Result<JoinHandle<()>, Errno> {
    let add = |fd: &OwnedFd, data| {
        epoll::add(&process.epoll, fd, EventData::new_u64(data), EventFlags::IN)
    };
    add(&process.listener, LISTENER)?;
    add(&process.kick, KICK)?;
    add(&process.timer, TIMER)?;
    // Signals are the application's business; a thread of ours must not take them.
    let mut all = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    let mut old = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: both sets are places for a result, and `all` is filled before it is used.
    unsafe {
        libc::sigfillset(all.as_mut_ptr());
        libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
    }
    let thread = std::thread::Builder::new()
        .name("verbs-soft0".into())
        .spawn(move || {
            Service {
                process,
                accepted: HashMap::new(),
                tick: MIN_TICK_NS,
            }
            .run()
        })
        .map_err(|_| Errno::AGAIN);
    // SAFETY: `old` was filled by the call above.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut()) };
    thread
}

/// Waits for the end of a peer's process too.
pub(super) fn watch(process: &Process, peer: &Arc<Peer>) -> Result<(), Errno> {
    let fd = peer.hangup.as_raw_fd();
    // No EventFlags::IN: answers are read by whoever asked.
    epoll::add(
        &process.epoll,
        &peer.hangup,
        EventData::new_u64(OUTGOING + fd as u64),
        EventFlags::RDHUP,
    )
}

struct Service {
    process: Arc<Process>,
    accepted: HashMap<RawFd, OwnedFd>,
    tick: u64,
}

impl Service {
    fn run(mut self) {
        let mut events = Vec::with_capacity(32);
        while !self.process.stop.load(Ordering::Acquire) {
            events.clear();
            match epoll::wait(
                &self.process.epoll,
                rustix::buffer::spare_capacity(&mut events),
                None,
            ) {
                Ok(_) | Err(Errno::INTR) => {}
                Err(error) => {
                    tracing::error!(%error, "the service thread cannot wait");
                    return;
                }
            }
            for event in &events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    KICK => {
                        drain(&self.process.kick);
                        self.tick = MIN_TICK_NS;
                        for peer in self.process.peers() {
                            peer.sweep(&self.process);
                        }
                        self.progress();
                    }
                    TIMER => {
                        drain(&self.process.timer);
                        self.process.timer_fired();
                        self.progress();
                    }
                    data if data >= OUTGOING => self.hung_up((data - OUTGOING) as RawFd),
                    data => self.answer(data as RawFd),
                }
            }
        }
    }

    /// Does for every queue pair what its application's polls would do, and comes back later if
    /// something still waits.
    fn progress(&mut self) {
        let mut waiting = false;
        for qp in self.process.qps() {
            waiting |= qp.serve();
        }
        if waiting {
            self.process.set_timer(self.tick);
            self.tick = (self.tick * 2).min(MAX_TICK_NS);
        } else {
            self.tick = MIN_TICK_NS;
        }
    }

    fn accept(&mut self) {
        let socket = match rustix::net::accept_with(
            &self.process.listener,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
        ) {
            Ok(socket) => socket,
            Err(Errno::INTR | Errno::AGAIN | Errno::CONNABORTED) => return,
            Err(error) => {
                tracing::error!(%error, "cannot accept a peer process");
                return;
            }
        };
        if let Err(error) = rendezvous::check_user(socket.as_fd()) {
            tracing::warn!(%error, "refused a process of another user");
            return;
        }
        let fd = socket.as_raw_fd();
        let data = EventData::new_u64(fd as u64);
        match epoll::add(
            &self.process.epoll,
            &socket,
            data,
            EventFlags::IN | EventFlags::RDHUP,
        ) {
            Ok(()) => {
                self.accepted.insert(fd, socket);
            }
            Err(error) => tracing::error!(%error, "cannot wait for a peer process"),
        }
    }

    fn answer(&mut self, fd: RawFd) {
        let Some(socket) = self.accepted.get(&fd) else {
            return;
        };
        match self.answer_one(socket) {
            Ok(true) => {}
            Ok(false) => {
                self.accepted.remove(&fd);
            }
            Err(error) => {
                tracing::warn!(%error, "closing the connection of a peer process");
                self.accepted.remove(&fd);
            }
        }
    }

    /// Answers one request; `false` at the end of the connection.
    fn answer_one(&self, socket: &OwnedFd) -> Result<bool, Errno> {
        let socket = socket.as_fd();
        let asked = match rendezvous::receive(socket, RecvFlags::DONTWAIT) {
            Ok(Some(asked)) => asked,
            Ok(None) | Err(Errno::CONNRESET) => return Ok(false),
            Err(Errno::AGAIN) => return Ok(true),
            Err(error) => return Err(error),
        };
        let process = &self.process;
        let refuse = |code: Errno| {
            let words = [code.raw_os_error() as u64, 0, 0, 0];
            rendezvous::send(socket, words, &[], SendFlags::DONTWAIT)
        };
        match Request::decode(asked.words) {
            Ok(Request::Hello { slot }) => {
                tracing::debug!(slot, "a process of this host connects");
                allow_cma();
                let fds = [
                    process.info_file.as_fd(),
                    process.mailbox_file.as_fd(),
                    process.kick.as_fd(),
                ];
                rendezvous::send(socket, [0; 4], &fds, SendFlags::DONTWAIT)?;
            }
            Ok(Request::Pair { qpn }) => match process.qp(qpn) {
                Some(qp) => {
                    let (words, fds) =
                        rendezvous::encode_bells(qp.send_cq.bell(), qp.recv_cq.bell());
                    rendezvous::send(socket, words, &fds, SendFlags::DONTWAIT)?;
                }
                None => refuse(Errno::NXIO)?,
            },
            Ok(Request::Arena { id }) => match process.arenas.by_id(id) {
                Some(arena) => {
                    rendezvous::send(socket, [0; 4], &[arena.file.as_fd()], SendFlags::DONTWAIT)?;
                }
                None => refuse(Errno::NXIO)?,
            },
            Err(code) => refuse(code)?,
        }
        Ok(true)
    }

    fn hung_up(&mut self, fd: RawFd) {
        let peer = self.process.peer_by_hangup(fd);
        let Some(peer) = peer else { return };
        tracing::debug!(slot = peer.slot, "a peer process has gone");
        let _ = epoll::delete(&self.process.epoll, &peer.hangup);
        self.process.forget(&peer);
        for qp in self.process.qps() {
            qp.serve();
        }
        peer.sweep(&self.process);
    }
}

/// Where Yama restricts `process_vm_readv` to parents, lets our peers in: they are of our own user,
/// whom the kernel's own rule would let in.
fn allow_cma() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: the call takes no pointers. It fails harmlessly where there is no Yama.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}

fn drain(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}
