//! Requests that come through a socket: executed here, in our own memory, each key checked when it is
//! used.

use std::net::IpAddr;
use std::sync::atomic::Ordering;

use super::super::responder::Step;
use super::super::{Qp, now_ns, state};
use crate::ffi::{
    IBV_ACCESS_REMOTE_READ, IBV_EVENT_QP_ACCESS_ERR, IBV_QPS_ERR, IBV_WC_RNR_RETRY_EXC_ERR,
    ibv_event_type, ibv_wc_status,
};
use crate::soft::layout::{Readiness, Service, Target};
use crate::soft::link::stream::FrameError;
use crate::soft::link::stream::frame::{Header, Opcode};
use crate::soft::link::stream::mpa::{Hello, Outcome};
use crate::soft::link::stream::socket::{Filled, SEGMENT, Socket, segment_of};
use crate::soft::link::stream::terminate::Terminate;

/// Frames taken under one hold of the lock: 64 short ones, or as many long ones as make a megabyte.
const BURST: usize = 64;
const BURST_BYTES: usize = 1 << 20;
/// Answers that may wait for the kernel before the next request must.
const ENOUGH: usize = 2 * SEGMENT;
/// How often a requester is told that its message waits for a receive, and was not lost.
const REASSURE_NS: u64 = 50_000_000;

/// The responder's connection.
#[derive(Debug)]
pub(in crate::soft) struct Inbound {
    pub(super) socket: Socket,
    hello: Hello,
    /// The message that is coming in.
    pub(super) message: Message,
    /// The READ that is being answered.
    pub(super) reading: Option<Reading>,
    /// Of the next message of queues 0 and 1; the first is 1.
    pub(super) msn: [u32; 2],
    /// Of our next acknowledgement.
    answers: u32,
    /// Messages that the peer knows to be executed.
    told: u32,
    told_ns: u64,
}

/// What a message of several frames is, once its first has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Begun {
    #[default]
    Nothing,
    Send,
    Write,
}

/// A message of several frames.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Message {
    /// Frames of another kind cannot come in the middle of it.
    pub begun: Begun,
    /// Bytes that have come.
    pub came: u64,
    /// The announced target of a WRITE: address, key and length.
    pub announced: Option<(u64, u32, u32)>,
    /// Nothing more of it is wanted: it fails on a queue pair that tells nobody.
    pub is_lost: bool,
}

/// A READ whose answer is under way.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reading {
    pub sink: u32,
    pub rkey: u32,
    pub addr: u64,
    pub len: u64,
    pub done: u64,
}

/// How a burst ended.
#[derive(Clone, Copy)]
enum Pause {
    /// Nothing more is there.
    Quiet,
    /// The answers must go out first.
    Blocked,
    /// The application must do something first.
    Stalled,
    /// There may be more.
    More,
    Ended,
    Refused(Terminate, Option<ibv_event_type>),
    /// Out of receives for as long as its requester repeats.
    NotReady,
}

/// What brings the responder back to a connection that stays; always something does.
#[derive(Debug, PartialEq, Eq)]
struct Next {
    /// There may be more already: nothing is waited for.
    goes_on: bool,
    /// More comes.
    reads: bool,
    /// The kernel takes more.
    sends: bool,
    /// The application does something.
    stalls: bool,
}

impl Next {
    /// After a burst that ended so, and left so many bytes that the kernel has not taken.
    fn after(pause: Pause, unsent: usize) -> Self {
        let sends = unsent > 0;
        Self {
            // What it was blocked by may have gone out after all, and what came with it is here already.
            goes_on: matches!(pause, Pause::More) || matches!(pause, Pause::Blocked) && !sends,
            reads: matches!(pause, Pause::Quiet) && !sends,
            sends,
            stalls: matches!(pause, Pause::Stalled),
        }
    }
}

impl Inbound {
    /// The sequence number must be the next one of its queue: TCP loses nothing.
    pub(super) fn check_msn(&self, queue: u32, msn: u32) -> Result<(), FrameError> {
        let last = self.msn.get(queue as usize).copied().unwrap_or(0);
        let expected = last.wrapping_add(1);
        if expected == msn {
            Ok(())
        } else {
            Err(FrameError::Sequence {
                queue,
                found: msn,
                expected,
            })
        }
    }

    pub(super) fn took_msn(&mut self, queue: usize) {
        self.msn[queue] = self.msn[queue].wrapping_add(1);
    }

    /// An answer on its way tells the peer that so many messages were executed.
    pub(super) fn tell_with_answer(&mut self, executed: u32) {
        self.told = executed;
    }
}

impl Qp {
    /// What becomes of a connection for a peer's requests, which comes from another host's address or
    /// from a process of this one: this queue pair must be in the state for it, and expect that peer
    /// and its PSN. With the number of our own connection.
    pub(in crate::soft) fn judge(&self, hello: &Hello, from: Option<IpAddr>) -> (Outcome, u32) {
        let responder = &self.info().responder.0;
        let target = Target(responder.target.load(Ordering::SeqCst));
        let takes = match self.service() {
            Service::Plain => !hello.xrc,
            Service::XrcTarget => hello.xrc,
            Service::XrcInitiator => false,
        };
        let expected = takes
            && target.readiness() == Readiness::Ready
            && target.dest_qpn() == hello.source_qpn
            && responder.rq_psn.load(Ordering::Relaxed) & state::MASK_24 == hello.psn
            && !self.streams.has_inbound()
            // A peer that has begun anew must wait until this side has, too.
            && !self.streams.has_begun.load(Ordering::Relaxed)
            && self.counts_agree(hello)
            && self
                .shared_link()
                .is_some_and(|link| link.takes_streams_from(from));
        let outcome = match target.readiness() {
            Readiness::Gone => Outcome::Gone,
            _ if expected => Outcome::Accepted,
            _ => Outcome::NotYet,
        };
        (outcome, target.generation())
    }

    /// Whether the peer has not been refused, and both sides have counted the same messages that came
    /// through the ring: so it is of the same connection, and the ring is empty.
    fn counts_agree(&self, hello: &Hello) -> bool {
        self.executed() == hello.executed && !self.responder.is_closed()
    }

    /// Takes a connection that was found to be expected, and the bytes that have come on it.
    pub(in crate::soft) fn accept_stream(
        &self,
        generation: u32,
        hello: Hello,
        socket: Socket,
    ) -> bool {
        let mut taken = false;
        self.with_recv_lock(|| {
            let target = Target(self.info().responder.0.target.load(Ordering::SeqCst));
            let mut inbound = self.streams.inbound();
            if target.readiness() == Readiness::Ready
                && target.generation() == generation
                && inbound.is_none()
                && self.counts_agree(&hello)
            {
                if let Some(receiver) = &self.receiver {
                    receiver.forget();
                }
                *inbound = Some(Inbound {
                    socket,
                    hello,
                    message: Message::default(),
                    reading: None,
                    msn: [0; 2],
                    answers: 0,
                    told: self.executed(),
                    told_ns: now_ns(),
                });
                self.streams.has_inbound.store(true, Ordering::Relaxed);
                taken = true;
            }
        });
        taken
    }

    /// Takes what has come through the socket. The receive lock is held. `true`: there may be more, once
    /// the lock was let go.
    pub(in crate::soft::qp) fn take_stream(&self, solicited: &mut bool) -> bool {
        let mut place = self.streams.inbound();
        let Some(inbound) = place.as_mut() else {
            return false;
        };
        if !state::is_connected(self.state()) {
            return false;
        }
        self.streams.stalled.store(false, Ordering::Relaxed);
        let pause = self.take_frames(inbound, solicited);
        let is_last = matches!(pause, Pause::Refused(..) | Pause::Ended | Pause::NotReady);
        self.tell_executed(inbound, matches!(pause, Pause::Stalled));
        let refused = match pause {
            Pause::Refused(terminate, event) => Some((terminate, event)),
            // The requester fails; this side stays as it is, and takes no more of it.
            Pause::NotReady => Some((Terminate::of(IBV_WC_RNR_RETRY_EXC_ERR), None)),
            _ => None,
        };
        if let Some((terminate, _)) = &refused {
            inbound.terminate(terminate);
        }
        let broken = !inbound.socket.flush();
        if let Pause::Refused(_, event) = pause {
            self.enter_error();
            if let Some(event) = event {
                self.raise(event);
            }
        }
        if is_last || broken {
            let inbound = place.take();
            self.streams.has_inbound.store(false, Ordering::Relaxed);
            if let Some(inbound) = inbound.filter(|_| refused.is_some()) {
                // What it was told must reach it.
                self.process.running_streams().linger(inbound.socket);
            }
            return false;
        }
        let next = Next::after(pause, inbound.socket.output.pending());
        self.streams.stalled.store(next.stalls, Ordering::Relaxed);
        if next.reads || next.sends {
            self.process.running_streams().watch_inbound(
                self.qpn,
                &inbound.socket.fd,
                next.reads,
                next.sends,
            );
        }
        next.goes_on
    }

    fn take_frames(&self, inbound: &mut Inbound, solicited: &mut bool) -> Pause {
        let mut bytes = 0;
        let mut all = false;
        for _ in 0..BURST {
            if bytes > BURST_BYTES {
                return Pause::More;
            }
            if inbound.socket.output.pending() > ENOUGH && !inbound.socket.flush() {
                return Pause::Ended;
            }
            if inbound.socket.output.pending() > ENOUGH {
                return Pause::Blocked;
            }
            if inbound.reading.is_some() {
                bytes += SEGMENT;
                if let Err(status) = self.answer_read(inbound) {
                    return Pause::Refused(Terminate::of(status), Some(IBV_EVENT_QP_ACCESS_ERR));
                }
                // The peer takes one part while the next is made.
                if inbound.reading.is_some() && !inbound.socket.flush() {
                    return Pause::Ended;
                }
                continue;
            }
            // The frame is looked at in place, while what it belongs to changes.
            let input = std::mem::take(&mut inbound.socket.input);
            let next = input.next(inbound.socket.crc);
            let (step, taken) = match next {
                Ok(Some((header, payload, taken))) => {
                    self.begin();
                    let mut asks = false;
                    let step = self.take_frame(inbound, &header, payload, &mut asks);
                    self.deliver_selected(asks);
                    *solicited |= asks;
                    (Ok(step), taken)
                }
                Ok(None) => {
                    inbound.socket.input = input;
                    // Of a frame that has begun the rest is on its way.
                    if all && inbound.socket.input.is_empty() {
                        return Pause::Quiet;
                    }
                    match inbound.socket.input.fill(&inbound.socket.fd) {
                        Filled::Some => continue,
                        Filled::All => {
                            all = true;
                            continue;
                        }
                        Filled::Nothing => return Pause::Quiet,
                        Filled::Ended => return Pause::Ended,
                    }
                }
                Err(error) => (Err(error), 0),
            };
            inbound.socket.input = input;
            match step {
                Ok(Step::Done) => {
                    bytes += taken;
                    inbound.socket.input.consume(taken);
                }
                Ok(Step::NotReady) => {
                    let out = self.out_of_patience(inbound.hello.rnr_retry);
                    return if out { Pause::NotReady } else { Pause::Stalled };
                }
                // Whole frames are never lost, and need no mapping.
                Ok(Step::Full | Step::Later | Step::Map(_) | Step::Lost(_)) => {
                    self.process.nudge_later();
                    return Pause::Stalled;
                }
                Ok(Step::Refused(status, event)) => {
                    return Pause::Refused(Terminate::of(status), event);
                }
                Err(error) => {
                    tracing::warn!(qpn = self.qpn, %error, "closing a stream: no peer of ours sends this");
                    return Pause::Refused(Terminate::of_error(&error), None);
                }
            }
        }
        Pause::More
    }

    /// A message has come, perhaps the first. The receive lock is held.
    #[inline]
    fn begin(&self) {
        let begun = self.streams.has_begun.load(Ordering::Relaxed);
        self.streams.has_begun.store(true, Ordering::Relaxed);
        if !begun {
            self.tell_established();
        }
    }

    /// A message was executed.
    pub(super) fn executed_one(&self, inbound: &mut Inbound) {
        inbound.message = Message::default();
        self.count_executed();
    }

    /// Acknowledges what was executed since the last time; a requester whose message waits is told
    /// that this side is alive.
    fn tell_executed(&self, inbound: &mut Inbound, waits: bool) {
        let executed = self.executed();
        let now = now_ns();
        let reassure = waits && now.saturating_sub(inbound.told_ns) > REASSURE_NS;
        if executed == inbound.told && !reassure {
            return;
        }
        inbound.told = executed;
        inbound.told_ns = now;
        inbound.answers = inbound.answers.wrapping_add(1);
        let header = Header::Untagged {
            opcode: Opcode::Acknowledge,
            last: true,
            field: executed,
            queue: 4,
            msn: inbound.answers,
            offset: 0,
        };
        let socket = &mut inbound.socket;
        socket.output.frame(&header, &[], socket.crc);
    }

    /// Adds the next part of a READ's answer.
    fn answer_read(&self, inbound: &mut Inbound) -> Result<(), ibv_wc_status> {
        let Some(mut reading) = inbound.reading else {
            return Ok(());
        };
        let piece = (reading.len - reading.done).min(segment_of(reading.len)) as usize;
        let mut from = reading.addr.wrapping_add(reading.done);
        if reading.len > 0 {
            from = self.grants(reading.rkey, from, piece, IBV_ACCESS_REMOTE_READ)?;
        }
        let last = reading.done + piece as u64 == reading.len;
        let header = Header::Tagged {
            opcode: Opcode::ReadResponse,
            last,
            stag: reading.sink,
            offset: reading.done,
        };
        let socket = &mut inbound.socket;
        let bytes = std::iter::once((from as usize as *const u8, piece));
        // SAFETY: checked under the receive lock, which is held, and which the end of the key's
        // registration waits for.
        unsafe { socket.output.frame_of(&header, socket.crc, bytes) };
        reading.done += piece as u64;
        inbound.reading = (!last).then_some(reading);
        if last {
            self.executed_one(inbound);
            inbound.tell_with_answer(self.executed());
        }
        Ok(())
    }

    /// The queue pair has failed: its peer's requests end, and it learns of it. The receive lock is held.
    pub(in crate::soft::qp) fn close_inbound(&self) {
        if self.state() == IBV_QPS_ERR
            && let Some(mut inbound) = self.streams.inbound().take()
        {
            self.tell_executed(&mut inbound, false);
            let _ = inbound.socket.flush();
            self.streams.has_inbound.store(false, Ordering::Relaxed);
            self.process.running_streams().linger(inbound.socket);
        }
    }
}

impl Inbound {
    fn terminate(&mut self, terminate: &Terminate) {
        let header = Header::Untagged {
            opcode: Opcode::Terminate,
            last: true,
            field: 0,
            queue: 2,
            msn: 1,
            offset: 0,
        };
        let socket = &mut self.socket;
        socket
            .output
            .frame(&header, &terminate.encode(), socket.crc);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_is_never_left_alone() {
        let pauses = [Pause::Quiet, Pause::Blocked, Pause::Stalled, Pause::More];
        for (pause, unsent) in pauses
            .into_iter()
            .flat_map(|pause| [(pause, 0), (pause, 1)])
        {
            let next = Next::after(pause, unsent);
            assert!(next.goes_on || next.reads || next.sends || next.stalls);
            assert_eq!(next.sends, unsent > 0, "what is left must go out");
            // Bytes that were read already bring no event of the socket.
            assert_eq!(next.reads, matches!(pause, Pause::Quiet) && unsent == 0);
        }
    }

    #[test]
    fn answers_that_went_out_late_block_nobody() {
        assert!(Next::after(Pause::Blocked, 0).goes_on);
        assert!(!Next::after(Pause::Blocked, 1).goes_on);
    }
}
