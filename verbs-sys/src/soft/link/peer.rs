//! Another process of this host, as we see it.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering, fence};
use std::sync::{Mutex, PoisonError, TryLockError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt::Timeout;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::{Pid, PidfdFlags};

use super::rendezvous::{self, Request};
use super::signal;
use crate::soft::epoch::Holder;
use crate::soft::fencing;
use crate::soft::identity;
use crate::soft::layout::{Info, MAGIC, MAX_ARENAS, Mailbox};
use crate::soft::memory;
use crate::soft::process::Process;
use crate::soft::segment::{self, Mapping};

/// How long a peer may take to answer.
const ANSWER_WITHIN: Duration = Duration::from_secs(10);

/// How long to wait for an arena at once. A peer that runs needs some microseconds; for one that does not,
/// nobody who only polls is held up.
const AT_ONCE: Duration = Duration::from_millis(20);

/// The control connection.
#[derive(Debug)]
struct Control {
    socket: OwnedFd,
    /// The number of the last request.
    last: u64,
    arenas: Vec<AskedFor>,
}

/// An arena that was asked for.
#[derive(Debug)]
struct AskedFor {
    id: u32,
    number: u64,
    since: Instant,
}

/// What became of mapping an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) enum Mapped {
    Done,
    /// The peer has not answered yet.
    Later,
}

/// A process we have queue pairs connected to.
#[derive(Debug)]
pub(in crate::soft) struct Peer {
    pub slot: u32,
    pub pid: Option<Pid>,
    pidfd: Option<OwnedFd>,
    control: Mutex<Control>,
    /// A second handle of the control connection, for the upkeep thread to wait on.
    pub hangup: OwnedFd,
    info: Mapping,
    mailbox: Mapping,
    kick: OwnedFd,
    /// Whether `process_vm_readv` and `process_vm_writev` reach the peer. It may be otherwise for the
    /// peer and us.
    pub cma: bool,
    /// Mapped arenas, each at its number modulo the size of the owner's own table: two that live at
    /// once never share a place.
    arenas: Box<[AtomicPtr<MappedArena>]>,
    /// Held while a place in `arenas` changes.
    mapping: Mutex<()>,
    dead: AtomicBool,
}

#[derive(Debug)]
pub(in crate::soft) struct MappedArena {
    id: u32,
    mapping: Mapping,
}

impl Holder for Peer {
    fn has_exited(&self) -> bool {
        self.has_exited()
    }

    /// Whether the kernel says so of one of its threads (proc_pid_stat(5)).
    fn is_stopped(&self) -> bool {
        let Some(pid) = self.pid else { return false };
        let Ok(tasks) = std::fs::read_dir(format!("/proc/{}/task", pid.as_raw_nonzero())) else {
            return false;
        };
        tasks.flatten().any(|task| {
            let stat = std::fs::read(task.path().join("stat")).unwrap_or_default();
            matches!(state_of(&stat), Some(b'T' | b't'))
        })
    }
}

/// The state of a thread, which follows its name in parentheses.
fn state_of(stat: &[u8]) -> Option<u8> {
    let behind_name = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(behind_name + 2).copied()
}

impl Peer {
    /// Connects to the process in a slot.
    pub(in crate::soft) fn connect(process: &Process, slot: u32) -> Result<Self, Errno> {
        let socket = identity::seqpacket()?;
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Recv, Some(ANSWER_WITHIN))?;
        rustix::net::sockopt::set_socket_timeout(&socket, Timeout::Send, Some(ANSWER_WITHIN))?;
        rustix::net::connect(&socket, &identity::slot_address(slot)?)?;
        let credentials = rendezvous::check_user(socket.as_fd())?;
        let hello = rendezvous::ask(socket.as_fd(), Request::Hello { slot: process.slot }, 0)?;
        let [info, mailbox, kick]: [OwnedFd; 3] = hello.fds.try_into().map_err(|_| Errno::PROTO)?;
        for (file, size) in [(&info, size_of::<Info>()), (&mailbox, size_of::<Mailbox>())] {
            if segment::sealed_len(file.as_fd())? < size {
                return Err(Errno::PROTO);
            }
        }
        let info = Mapping::sparse(info.as_fd(), size_of::<Info>(), false)?;
        let mailbox = Mapping::sparse(mailbox.as_fd(), size_of::<Mailbox>(), true)?;
        let pid = Pid::from_raw(credentials.pid);
        let pidfd = pid.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok());
        let hangup = socket.try_clone().map_err(|_| Errno::MFILE)?;
        let mut peer = Self {
            slot,
            pid,
            pidfd,
            control: Mutex::new(Control {
                socket,
                last: 0,
                arenas: Vec::new(),
            }),
            hangup,
            info,
            mailbox,
            kick,
            cma: false,
            arenas: (0..MAX_ARENAS).map(|_| AtomicPtr::default()).collect(),
            mapping: Mutex::new(()),
            dead: AtomicBool::new(false),
        };
        if peer.info().header.magic.load(Ordering::Acquire) != MAGIC {
            return Err(Errno::PROTONOSUPPORT);
        }
        peer.cma = !process.without_cma.load(Ordering::Relaxed) && peer.probe_cma();
        tracing::debug!(
            slot,
            pid = credentials.pid,
            cma = peer.cma,
            "connected to a process of this host"
        );
        Ok(peer)
    }

    pub(in crate::soft) fn info(&self) -> &Info {
        // SAFETY: the file was at least this long and is sealed; `Info` holds atomics only.
        unsafe { self.info.as_struct() }
    }

    pub(in crate::soft) fn mailbox(&self) -> &Mailbox {
        // SAFETY: as in `info`; the rings are reached by raw pointer only.
        unsafe { self.mailbox.as_struct() }
    }

    pub(in crate::soft) fn ask(&self, request: Request) -> Result<rendezvous::Datagram, Errno> {
        let mut control = self.control.lock().unwrap_or_else(PoisonError::into_inner);
        control.last += 1;
        // Answers about arenas that come meanwhile are lost; who needs one asks again.
        control.arenas.clear();
        rendezvous::ask(control.socket.as_fd(), request, control.last)
    }

    pub(in crate::soft) fn kick(&self) {
        signal(&self.kick);
    }

    pub(in crate::soft) fn set_dead(&self) {
        self.dead.store(true, Ordering::Release);
    }

    /// Whether the process is known to have ended. Asks the kernel: `kill(pid, 0)` would take a
    /// zombie for alive.
    pub(in crate::soft) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    /// As [`is_dead`](Self::is_dead), but asks the kernel rather than wait for the upkeep thread.
    pub(in crate::soft) fn has_exited(&self) -> bool {
        if self.is_dead() {
            return true;
        }
        match &self.pidfd {
            Some(pidfd) => is_ready(pidfd, PollFlags::IN),
            None => self.has_left(),
        }
    }

    /// Whether the process answers nobody any more. The kernel closes the sockets of one that it ends
    /// before it says that it has [exited](Self::has_exited).
    pub(in crate::soft) fn has_left(&self) -> bool {
        self.is_dead() || is_ready(&self.hangup, PollFlags::RDHUP)
    }

    fn probe_cma(&self) -> bool {
        let Some(pid) = self.pid else { return false };
        let mut word = 0u64;
        let local = libc::iovec {
            iov_base: (&raw mut word).cast(),
            iov_len: 8,
        };
        let there = self.info().header.probe.load(Ordering::Relaxed) as usize;
        let remote = libc::iovec {
            iov_base: there as *mut _,
            iov_len: 8,
        };
        // SAFETY: the local vector names `word`; the kernel checks the remote one.
        let read =
            unsafe { libc::process_vm_readv(pid.as_raw_nonzero().get(), &local, 1, &remote, 1, 0) };
        read == 8 && word == MAGIC
    }

    /// Where a range of the peer's arena is mapped here, if it is.
    ///
    /// The caller holds an epoch lock of this process, which [`sweep`](Self::sweep) waits for.
    #[inline(always)]
    pub(in crate::soft) fn mapped(&self, id: u32, offset: u64, len: usize) -> Option<*mut u8> {
        let place = &self.arenas[id as usize % MAX_ARENAS];
        // SAFETY: a mapping is freed only after every epoch that could have loaded it has ended.
        let arena = unsafe { place.load(Ordering::Acquire).as_ref() }.filter(|a| a.id == id)?;
        let room = (arena.mapping.len() as u64).checked_sub(offset)?;
        // The peer's word about the offset is not believed: our own mapping bounds the access.
        (len as u64 <= room).then(|| arena.mapping.as_ptr().wrapping_add(offset as usize))
    }

    /// Maps an arena of the peer. Does not wait long for a peer that does not answer, as one that is stopped:
    /// to be called again then. No epoch lock of this process may be held by the caller.
    ///
    /// # Errors
    /// The peer has no such arena, or has gone, or has not answered for too long.
    pub(in crate::soft) fn map_arena(&self, process: &Process, id: u32) -> Result<Mapped, Errno> {
        let mut control = match self.control.try_lock() {
            Ok(control) => control,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Somebody else waits for the peer.
            Err(TryLockError::WouldBlock) => return Ok(Mapped::Later),
        };
        if self.is_mapped_now(id) {
            return Ok(Mapped::Done);
        }
        let mut wait = Duration::ZERO;
        if !control.arenas.iter().any(|asked| asked.id == id) {
            control.last += 1;
            let number = control.last;
            let words = Request::Arena { id }.encode(number);
            match rendezvous::send(control.socket.as_fd(), words, &[], SendFlags::DONTWAIT) {
                Ok(()) => {}
                Err(Errno::AGAIN) => return Ok(Mapped::Later),
                Err(error) => return Err(error),
            }
            let since = Instant::now();
            control.arenas.push(AskedFor { id, number, since });
            wait = AT_ONCE;
        }
        while is_ready_within(&control.socket, PollFlags::IN, wait) {
            let answer = rendezvous::receive(control.socket.as_fd(), RecvFlags::DONTWAIT)?;
            let answer = answer.ok_or(Errno::CONNRESET)?;
            let of = |asked: &AskedFor| asked.number == answer.number();
            let Some(place) = control.arenas.iter().position(of) else {
                continue;
            };
            let asked = control.arenas.swap_remove(place);
            let mapped = rendezvous::answered(answer)
                .and_then(|answer| self.map_answer(process, asked.id, &answer));
            if asked.id == id {
                return mapped.map(|()| Mapped::Done);
            }
        }
        let late = |asked: &AskedFor| asked.id == id && asked.since.elapsed() > ANSWER_WITHIN;
        match control.arenas.iter().position(late) {
            Some(place) => {
                control.arenas.swap_remove(place);
                Err(Errno::TIMEDOUT)
            }
            None => Ok(Mapped::Later),
        }
    }

    /// Maps an arena that was answered for, unless it is mapped: replacing its mapping would take it away
    /// under a long copy, which lets epochs pass.
    fn map_answer(
        &self,
        process: &Process,
        id: u32,
        answer: &rendezvous::Datagram,
    ) -> Result<(), Errno> {
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_mapped(id) {
            return Ok(());
        }
        let file = answer.fds.first().ok_or(Errno::PROTO)?;
        let len = segment::sealed_len(file.as_fd())?;
        let mapping = Mapping::dense(file.as_fd(), len)?;
        let arena = Box::into_raw(Box::new(MappedArena { id, mapping }));
        let place = &self.arenas[id as usize % MAX_ARENAS];
        retire(process, place.swap(arena, Ordering::AcqRel));
        Ok(())
    }

    fn is_mapped_now(&self, id: u32) -> bool {
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_mapped(id)
    }

    /// Whether an arena is mapped. The lock on `mapping` is held, so nobody frees what is looked at.
    fn is_mapped(&self, id: u32) -> bool {
        let arena = self.arenas[id as usize % MAX_ARENAS].load(Ordering::Acquire);
        // SAFETY: mappings are freed under the lock only.
        unsafe { arena.as_ref() }.is_some_and(|arena| arena.id == id)
    }

    /// Unmaps the arenas that the peer no longer has.
    pub(in crate::soft) fn sweep(&self, process: &Process) {
        let _mapping = self.mapping.lock().unwrap_or_else(PoisonError::into_inner);
        for place in &self.arenas {
            let arena = place.load(Ordering::Acquire);
            // SAFETY: mappings are freed under the lock only.
            let gone = unsafe { arena.as_ref() }
                .is_some_and(|arena| self.is_dead() || !memory::is_live(self.info(), arena.id));
            if gone
                && place
                    .compare_exchange(
                        arena,
                        std::ptr::null_mut(),
                        Ordering::AcqRel,
                        Ordering::Relaxed,
                    )
                    .is_ok()
            {
                retire(process, arena);
            }
        }
    }
}

fn is_ready(fd: &OwnedFd, events: PollFlags) -> bool {
    is_ready_within(fd, events, Duration::ZERO)
}

fn is_ready_within(fd: &OwnedFd, events: PollFlags, wait: Duration) -> bool {
    let mut fds = [PollFd::new(fd, events)];
    let wait = rustix::time::Timespec {
        tv_sec: wait.as_secs() as i64,
        tv_nsec: i64::from(wait.subsec_nanos()),
    };
    matches!(rustix::event::poll(&mut fds, Some(&wait)), Ok(n) if n > 0)
}

/// Frees a mapping that was just taken out of its place.
fn retire(process: &Process, arena: *mut MappedArena) {
    if !arena.is_null() {
        fencing::count_unmapping(&process.info().header.fences.0);
        fence(Ordering::SeqCst);
        process.quiesce_own();
        // SAFETY: it was taken out by exactly one caller, and every user's epoch has ended.
        drop(unsafe { Box::from_raw(arena) });
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        for place in &mut self.arenas {
            let arena = std::mem::replace(place.get_mut(), std::ptr::null_mut());
            if !arena.is_null() {
                // SAFETY: nobody else has the peer any more, so nobody uses its mappings.
                drop(unsafe { Box::from_raw(arena) });
            }
        }
    }
}
