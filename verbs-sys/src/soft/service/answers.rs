//! Answering peers. This thread never asks a peer, and takes no lock that is held while one is asked.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketFlags};

use super::{HALT, add};
use crate::soft::link::rendezvous::{self, Request};
use crate::soft::process::Process;

const LISTENER: u64 = u64::MAX - 1;

pub(super) struct Answers {
    process: Arc<Process>,
    epoll: OwnedFd,
    accepted: HashMap<RawFd, OwnedFd>,
}

impl Answers {
    pub(super) fn new(process: &Arc<Process>) -> Result<Self, Errno> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        add(&epoll, &process.halt, HALT, EventFlags::IN)?;
        add(&epoll, &process.listener, LISTENER, EventFlags::IN)?;
        Ok(Self {
            process: Arc::clone(process),
            epoll,
            accepted: HashMap::new(),
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(32);
        while let Some(events) = super::next(&self.epoll, &mut events) {
            for event in events {
                match event.data.u64() {
                    LISTENER => self.accept(),
                    fd => self.answer(fd as RawFd),
                }
            }
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
        match add(
            &self.epoll,
            &socket,
            fd as u64,
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
        let number = asked.number();
        let answer = |[result, first, second, _]: [u64; 4], fds: &[BorrowedFd<'_>]| {
            let words = [result, first, second, number];
            rendezvous::send(socket, words, fds, SendFlags::DONTWAIT)
        };
        let refuse = |code: Errno| answer([code.raw_os_error() as u64, 0, 0, 0], &[]);
        match Request::decode(asked.words) {
            Ok(Request::Hello { slot }) => {
                tracing::debug!(slot, "a process of this host connects");
                allow_cma();
                let fds = [
                    process.info_file.as_fd(),
                    process.mailbox_file.as_fd(),
                    process.kick.as_fd(),
                ];
                answer([0; 4], &fds)?;
            }
            Ok(Request::Pair { qpn }) => match process.qp(qpn) {
                Some(qp) => {
                    let (words, fds) =
                        rendezvous::encode_bells(qp.send_cq.bell(), qp.recv_cq.bell());
                    answer(words, &fds)?;
                }
                None => refuse(Errno::NXIO)?,
            },
            Ok(Request::Arena { id }) => match process.arenas.by_id(id) {
                Some(arena) => {
                    answer([0; 4], &[arena.file.as_fd()])?;
                }
                None => refuse(Errno::NXIO)?,
            },
            Err(code) => refuse(code)?,
        }
        Ok(true)
    }
}

/// Where Yama restricts `process_vm_readv` to parents, lets our peers in: they are of our own user,
/// whom the kernel's own rule would let in.
fn allow_cma() {
    const PR_SET_PTRACER: libc::c_int = 0x5961_6d61;
    // SAFETY: the call takes no pointers. It fails harmlessly where there is no Yama.
    unsafe { libc::prctl(PR_SET_PTRACER, libc::c_ulong::MAX, 0, 0, 0) };
}
