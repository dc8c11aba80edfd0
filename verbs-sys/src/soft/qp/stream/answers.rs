//! What the peer answers to requests that went through a socket.

use std::sync::atomic::Ordering;

use super::super::requester::spoil_bytes;
use super::super::{Qp, now_ns};
use super::outbound::{Awaited, Outbound, State};
use super::place::scatter;
use crate::ffi::{IBV_WC_REM_OP_ERR, IBV_WC_RETRY_EXC_ERR, ibv_wc_status};
use crate::soft::link::stream::frame::{Header, Opcode};
use crate::soft::link::stream::payload::AtomicResponse;
use crate::soft::link::stream::socket::{Filled, Socket};
use crate::soft::link::stream::terminate::Terminate;

/// How often the socket is read under one hold of the lock.
const BURST: usize = 16;

/// Why nothing more is taken.
enum End {
    /// It closed the connection without a word, or what came was spoilt on its way.
    Silence,
    /// The peer refused a request, or this side cannot take its answer.
    Status(ibv_wc_status),
    /// No peer of ours says this.
    Nonsense(&'static str),
}

impl Qp {
    /// Takes what the peer has answered. The send lock is held.
    ///
    /// # Errors
    /// Nobody answers any more: with what the oldest request ends.
    pub(in crate::soft::qp) fn hear_stream(&self) -> Result<(), ibv_wc_status> {
        let mut out = self.streams.outbound();
        let mut socket = match std::mem::take(&mut out.state) {
            State::Ready(socket) => socket,
            other => {
                out.state = other;
                return match out.state {
                    State::Lost(status) => Err(status),
                    _ => Ok(()),
                };
            }
        };
        let status = match self.hear(&mut out, &mut socket) {
            None => {
                out.state = State::Ready(socket);
                return Ok(());
            }
            Some(End::Silence) => IBV_WC_RETRY_EXC_ERR,
            Some(End::Status(status)) => status,
            Some(End::Nonsense(why)) => {
                tracing::warn!(qpn = self.qpn, why, "closing a stream");
                IBV_WC_REM_OP_ERR
            }
        };
        out.state = State::Lost(status);
        Err(status)
    }

    /// `None`: the connection goes on.
    fn hear(&self, out: &mut Outbound, socket: &mut Socket) -> Option<End> {
        let (mut all, mut reads) = (false, 0);
        loop {
            // Frames that were read are all taken: the socket makes no event for them.
            let (header, payload, taken) = match socket.input.next(socket.crc) {
                Ok(Some(frame)) => frame,
                // Of a frame that has begun the rest is on its way.
                Ok(None) if all && socket.input.is_empty() => return None,
                Ok(None) if reads == BURST => return None,
                Ok(None) => match socket.input.fill(&socket.fd) {
                    filled @ (Filled::Some | Filled::All) => {
                        out.heard_ns = now_ns();
                        all = filled == Filled::All;
                        reads += 1;
                        continue;
                    }
                    Filled::Nothing => return None,
                    Filled::Ended => return Some(End::Silence),
                },
                Err(error) => {
                    tracing::warn!(qpn = self.qpn, %error, "closing a stream");
                    return Some(End::Silence);
                }
            };
            if let Err(end) = self.take_answer(out, &header, payload) {
                return Some(end);
            }
            socket.input.consume(taken);
        }
    }

    fn take_answer(&self, out: &mut Outbound, header: &Header, payload: &[u8]) -> Result<(), End> {
        match *header {
            Header::Untagged {
                opcode: Opcode::Acknowledge,
                field,
                ..
            } => self.take_count(out, field),
            Header::Untagged {
                opcode: Opcode::Terminate,
                ..
            } => {
                let terminate = Terminate::decode(payload)
                    .map_err(|_| End::Nonsense("a malformed TERMINATE"))?;
                tracing::debug!(qpn = self.qpn, ?terminate, "the peer refused a request");
                Err(End::Status(terminate.status()))
            }
            Header::Tagged {
                opcode: Opcode::ReadResponse,
                last,
                stag,
                offset,
            } => self.take_read(out, (stag, offset, last), payload),
            Header::Untagged {
                opcode: Opcode::AtomicResponse,
                ..
            } => {
                let answer = AtomicResponse::decode(payload)
                    .map_err(|_| End::Nonsense("a malformed atomic response"))?;
                self.take_atomic_answer(out, &answer)
            }
            _ => Err(End::Nonsense("a request instead of an answer")),
        }
    }

    /// Messages that the peer has executed, beyond those that we know of; ahead of what was sent, or of
    /// an answer that has not come, no responder of ours counts.
    fn take_count(&self, out: &Outbound, count: u32) -> Result<(), End> {
        let known = self.streams.acknowledged();
        if (count.wrapping_sub(known) as i32) < 0 {
            return Err(End::Nonsense("a count that goes back"));
        }
        let ends = self.position_of(count);
        let done = self.sq.done.load(Ordering::Relaxed);
        let ahead = ends.wrapping_sub(done);
        let limit = match out.awaited.front() {
            Some(awaited) => awaited.position,
            None => self.sq.exec.load(Ordering::Relaxed),
        };
        if ahead > limit.wrapping_sub(done) {
            return Err(End::Nonsense("a count ahead of the requests"));
        }
        self.streams.acknowledge(count);
        Ok(())
    }

    /// Behind which request so many messages end.
    fn position_of(&self, count: u32) -> u32 {
        let acked = self.requester.acked.load(Ordering::Relaxed);
        let done = self.sq.done.load(Ordering::Relaxed);
        done.wrapping_add(count.wrapping_sub(acked))
    }

    /// The message count that ends the request at a position.
    fn count_through(&self, position: u32) -> u32 {
        let acked = self.requester.acked.load(Ordering::Relaxed);
        let done = self.sq.done.load(Ordering::Relaxed);
        acked.wrapping_add(position.wrapping_sub(done).wrapping_add(1))
    }

    fn take_read(
        &self,
        out: &mut Outbound,
        (stag, offset, last): (u32, u64, bool),
        payload: &[u8],
    ) -> Result<(), End> {
        let Some(awaited) = out.awaited.front_mut().filter(|one| !one.is_atomic) else {
            return Err(End::Nonsense("a READ response that nobody asked for"));
        };
        let end = offset.saturating_add(payload.len() as u64);
        let fits = stag == awaited.position && offset == awaited.came && end <= awaited.len;
        if !fits || last != (end == awaited.len) {
            return Err(End::Nonsense("a READ response that does not fit"));
        }
        awaited.came = end;
        let awaited = *awaited;
        if awaited.is_corrupted && offset == 0 {
            let mut bytes = payload.to_vec();
            spoil_bytes(&mut bytes);
            self.deliver_answer(&awaited, offset, &bytes)?;
        } else {
            self.deliver_answer(&awaited, offset, payload)?;
        }
        if last {
            out.awaited.pop_front();
            let count = self.count_through(awaited.position);
            self.streams.acknowledge(count);
        }
        Ok(())
    }

    fn take_atomic_answer(&self, out: &mut Outbound, answer: &AtomicResponse) -> Result<(), End> {
        let fits = |one: &Awaited| one.is_atomic && one.position == answer.request_id;
        let Some(awaited) = out.awaited.front().copied().filter(fits) else {
            return Err(End::Nonsense("an atomic response that nobody asked for"));
        };
        out.awaited.pop_front();
        self.deliver_answer(&awaited, 0, &answer.original.to_ne_bytes())?;
        let count = self.count_through(awaited.position);
        self.streams.acknowledge(count);
        Ok(())
    }

    /// Writes data of an answer to the request's buffers, if they are still registered.
    fn deliver_answer(&self, awaited: &Awaited, offset: u64, bytes: &[u8]) -> Result<(), End> {
        let delivered = self.answered(awaited.position, |sges| {
            // SAFETY: checked under the send lock, which is held.
            unsafe { scatter(sges.iter().copied(), offset, bytes) };
        });
        delivered.map_err(|status| {
            // It is this request that fails: those before it were executed.
            let before = self.count_through(awaited.position).wrapping_sub(1);
            self.streams.acknowledge(before);
            End::Status(status)
        })
    }
}
