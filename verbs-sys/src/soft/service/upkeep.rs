//! Looking after queue pairs: a peer asks for it or has died, or something waits that no application
//! thread polls for.

use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

use rustix::event::epoll::{self, EventFlags};
use rustix::io::Errno;

use super::{HALT, add};
use crate::soft::link::peer::Peer;
use crate::soft::link::signal;
use crate::soft::process::Process;
use crate::soft::qp::Qp;

/// The timer runs from a millisecond up to this, while something waits.
const MAX_TICK_NS: u64 = 50_000_000;
const MIN_TICK_NS: u64 = 1_000_000;

const KICK: u64 = u64::MAX - 1;
const TIMER: u64 = u64::MAX - 2;

/// No longer waits for the end of a peer's process, which another one has taken the place of.
pub(in crate::soft) fn unwatch(process: &Process, peer: &Arc<Peer>) {
    let _ = epoll::delete(&process.epoll, &peer.hangup);
    // Its queue pairs shall learn of it.
    signal(&process.kick);
}

/// Waits for the end of a peer's process too.
pub(in crate::soft) fn watch(process: &Process, peer: &Arc<Peer>) -> Result<(), Errno> {
    // No EventFlags::IN: answers are read by whoever asked.
    add(
        &process.epoll,
        &peer.hangup,
        peer.hangup.as_raw_fd() as u64,
        EventFlags::RDHUP,
    )
}

/// Queue pairs that are looked after without an allocation from the beginning.
const USUAL: usize = 64;

pub(super) struct Upkeep {
    process: Arc<Process>,
    tick: u64,
    /// Those that are being looked after, kept for its room: a program that allocates nothing in a steady state
    /// may be looked after in it.
    qps: Vec<Arc<Qp>>,
}

impl Upkeep {
    pub(super) fn new(process: &Arc<Process>) -> Result<Self, Errno> {
        add(&process.epoll, &process.halt, HALT, EventFlags::IN)?;
        add(&process.epoll, &process.kick, KICK, EventFlags::IN)?;
        add(&process.epoll, &process.timer, TIMER, EventFlags::IN)?;
        Ok(Self {
            process: Arc::clone(process),
            tick: MIN_TICK_NS,
            qps: Vec::with_capacity(USUAL),
        })
    }

    pub(super) fn run(mut self) {
        let mut events = Vec::with_capacity(32);
        let process = Arc::clone(&self.process);
        process.fencing.register();
        self.progress();
        while let Some(events) = super::next(&process.epoll, &mut events) {
            for event in events {
                match event.data.u64() {
                    KICK => {
                        drain(&process.kick);
                        self.tick = MIN_TICK_NS;
                        for peer in process.peers() {
                            peer.sweep(&process);
                        }
                        self.progress();
                    }
                    TIMER => {
                        drain(&process.timer);
                        process.timer_fired();
                        self.progress();
                    }
                    fd => self.hung_up(fd as RawFd),
                }
            }
        }
    }

    /// Does for every queue pair what its application's polls would do, and comes back later if
    /// something still waits.
    fn progress(&mut self) {
        let mut waiting = false;
        self.process.copy_qps(&mut self.qps);
        for qp in self.qps.drain(..) {
            waiting |= qp.serve();
        }
        self.process.xrc.count_if_due();
        if waiting {
            self.process.set_timer(self.tick);
            self.tick = (self.tick * 2).min(MAX_TICK_NS);
        } else {
            self.tick = MIN_TICK_NS;
        }
        let fenced = &self.process.info().header.fences.0;
        if self.process.fencing.lasts(fenced) && !waiting {
            // Not later than somebody has asked for meanwhile.
            self.process.look_later();
        }
    }

    fn hung_up(&mut self, fd: RawFd) {
        let peer = self.process.peer_by_hangup(fd);
        let Some(peer) = peer else { return };
        tracing::debug!(slot = peer.slot, "a peer process has gone");
        let _ = epoll::delete(&self.process.epoll, &peer.hangup);
        self.process.forget(&peer);
        self.tick = MIN_TICK_NS;
        self.progress();
        peer.sweep(&self.process);
    }
}

fn drain(fd: &OwnedFd) {
    let mut count = [0; 8];
    let _ = rustix::io::read(fd, &mut count);
}
