//! One connection's state.

mod receive;

use std::collections::VecDeque;

use mr_pool::{Buffer, Pool};
use verbs_sys::owned::{OwnedQueuePair, Rejected, WorkKind};
use verbs_sys::{SendFlags, WcStatus, WorkCompletion};

use super::socket::Socket;
use crate::bring_up::EXTRA_SENDS;
use crate::config::Config;
use crate::credits::Credits;
use crate::event::{DisconnectCause, OperationErrorKind, SendErrorKind};
use crate::header::{HEADER_LEN, KIND_CREDIT};
use crate::message::{OutgoingMessage, Received};
use crate::shared::{Established, Share};

/// A connection that an endpoint owns.
#[derive(Debug)]
pub(crate) struct Connection {
    // Before the share: the queue pair is gone when another may take its place in the completion
    // queue.
    qp: OwnedQueuePair<Buffer>,
    pub(crate) socket: Socket,
    credits: Credits,
    /// Messages that wait for a credit or for room in the send queue, in order.
    waiting: VecDeque<OutgoingMessage>,
    queue_limit: usize,
    /// What the caller gave with the READs and WRITEs that are on their way. One queue pair's
    /// complete in order.
    tokens: VecDeque<u64>,
    /// Receives that were used and not posted again yet.
    unposted: u32,
    /// The pool has no memory for them.
    starved: bool,
    /// Credits were due at the last look already.
    return_was_due: bool,
    /// Longest frame that may be sent.
    message_size: u32,
    /// Size of the receive buffers.
    receive_size: usize,
    max_inline: usize,
    state: State,
    /// What went wrong, until the endpoint ends the connection for it.
    trouble: Option<DisconnectCause>,
    /// A request is stuck in the queue pair until that is destroyed.
    stuck: bool,
    /// Whether the endpoint has to look after it.
    care: bool,
    /// Whether it is on the endpoint's list of those.
    pub(crate) listed: bool,
    _share: Share,
}

/// How a connection is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Up,
    /// Its socket says that the peer has gone; what the peer sent before is still taken.
    Leaving(DisconnectCause),
    /// Its work requests are being flushed. `None` where it was closed here, and nobody wants to
    /// hear of it.
    Ending(Option<DisconnectCause>),
}

/// What [`Connection::look_after`] found.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Care {
    /// Nothing more for now.
    Done,
    /// The connection goes on. `starved`: it waits for memory; `again`: it has to be looked after
    /// before anybody sleeps; `returned`: a message about credits was sent.
    GoesOn {
        starved: bool,
        again: bool,
        returned: bool,
    },
    /// The connection is to be ended.
    End(DisconnectCause),
    /// The connection has ended; its owner is to be told the cause, if any.
    Finish(Option<DisconnectCause>),
}

/// What a completion means to the endpoint's owner.
pub(crate) enum Outcome {
    Nothing,
    Message(Received),
    Read(u64, Result<(), WcStatus>, Buffer),
    Written(u64, Result<(), WcStatus>, Buffer),
}

impl Connection {
    pub(crate) fn new(established: Established, config: &Config) -> Self {
        let Established {
            qp,
            stream,
            peer,
            depth,
            message_size,
            owes_ready: _,
            share,
        } = established;
        Self {
            max_inline: (config.max_inline).min(qp.queue_pair().cap().max_inline_data) as usize,
            qp,
            socket: Socket::new(stream, peer),
            credits: Credits::new(depth),
            waiting: VecDeque::with_capacity(config.queue_limit),
            queue_limit: config.queue_limit,
            tokens: VecDeque::with_capacity(config.send_depth as usize),
            unposted: 0,
            starved: false,
            return_was_due: false,
            message_size,
            receive_size: config.message_size as usize,
            state: State::Up,
            trouble: None,
            stuck: false,
            care: false,
            listed: false,
            _share: share,
        }
    }

    #[inline]
    pub(crate) fn qp_num(&self) -> u32 {
        self.qp.qp_num()
    }

    pub(crate) fn message_size(&self) -> u32 {
        self.message_size
    }

    pub(crate) fn state(&self) -> State {
        self.state
    }

    /// Whether the endpoint has to look after it.
    #[inline]
    pub(crate) fn needs_care(&self) -> bool {
        self.care
    }

    fn is_ending(&self) -> bool {
        matches!(self.state, State::Ending(_))
    }

    /// Whether every work request has come back, so that the queue pair can be destroyed with
    /// nothing of it left in the completion queue.
    pub(crate) fn is_drained(&self) -> bool {
        self.stuck || (self.qp.outstanding_sends() == 0 && self.qp.outstanding_receives() == 0)
    }

    /// Room for messages, READs and WRITEs in the send queue; what is kept for returning credits
    /// does not count.
    #[inline]
    fn room(&self) -> usize {
        self.qp.send_room().saturating_sub(EXTRA_SENDS as usize)
    }

    /// Whether a message would go out at once.
    pub(crate) fn is_clear(&self) -> bool {
        !self.is_ending() && self.waiting.is_empty() && self.credits.has_credit() && self.room() > 0
    }

    fn in_trouble(&mut self, cause: DisconnectCause) {
        let flushed = DisconnectCause::WorkRequest {
            status: WcStatus::WrFlushErr,
        };
        // That a request was flushed says that another one failed, whose completion may come later.
        let known = match self.state {
            State::Ending(known) => known,
            _ => self.trouble,
        };
        if known.is_none_or(|known| known == flushed) {
            match &mut self.state {
                State::Ending(None) => {}
                State::Ending(known) => *known = Some(cause),
                _ => self.trouble = Some(cause),
            }
        }
        self.care = true;
    }

    /// Sends a message, or lets it wait.
    #[inline]
    pub(crate) fn send(
        &mut self,
        message: OutgoingMessage,
    ) -> Result<(), (SendErrorKind, OutgoingMessage)> {
        let len = message.frame_len();
        if len > self.message_size as usize {
            return Err((
                SendErrorKind::TooLong {
                    len,
                    limit: self.message_size,
                },
                message,
            ));
        }
        if len < HEADER_LEN {
            return Err((SendErrorKind::Empty, message));
        }
        if self.is_ending() {
            return Err((SendErrorKind::UnknownConnection, message));
        }
        if self.waiting.is_empty() && self.room() > 0 && self.credits.spend() {
            self.post(message);
            return Ok(());
        }
        if self.waiting.len() >= self.queue_limit {
            return Err((SendErrorKind::WouldBlock, message));
        }
        self.waiting.push_back(message);
        Ok(())
    }

    /// Sends what waits, as far as credits and the send queue go.
    #[inline]
    fn flush(&mut self) {
        while !self.waiting.is_empty() && self.room() > 0 && self.credits.spend() {
            if let Some(message) = self.waiting.pop_front() {
                self.post(message);
            }
        }
    }

    /// Posts a message whose credit is spent. Where the device refuses, the connection ends: a
    /// message that is lost is no message of a connection in order.
    #[inline]
    fn post(&mut self, mut message: OutgoingMessage) {
        let credits = self.credits.take_owed();
        message.set_credits(credits);
        let len = message.frame_len();
        let buffer = message.into_buffer();
        let posted = match buffer.as_slice().get(..len) {
            Some(bytes) if len <= self.max_inline => {
                self.qp.send_inline(bytes, SendFlags::empty(), None)
            }
            _ => self
                .qp
                .send(buffer, 0..len, SendFlags::empty(), None)
                .map_err(|rejected| rejected.error),
        };
        if let Err(error) = posted {
            tracing::warn!(%error, peer = %self.socket.peer(), "cannot post a message");
            self.in_trouble(DisconnectCause::Refused);
        }
    }

    #[inline]
    fn check_room(&self, requests: usize) -> Result<(), OperationErrorKind> {
        if self.is_ending() {
            Err(OperationErrorKind::UnknownConnection)
        } else if requests > self.room() {
            Err(OperationErrorKind::WouldBlock)
        } else {
            Ok(())
        }
    }

    /// Posts READs or WRITEs, so many of them, of which the last is announced.
    #[inline]
    pub(crate) fn operate(
        &mut self,
        requests: usize,
        buffer: Buffer,
        token: u64,
        post: impl FnOnce(&mut OwnedQueuePair<Buffer>, Buffer) -> Result<u64, Rejected<Buffer>>,
    ) -> Result<(), (OperationErrorKind, Option<Buffer>)> {
        use verbs_sys::owned::PostError;
        if let Err(kind) = self.check_room(requests) {
            return Err((kind, Some(buffer)));
        }
        let posted = post(&mut self.qp, buffer);
        let Err(rejected) = posted else {
            self.tokens.push_back(token);
            return Ok(());
        };
        let kind = match rejected.error {
            PostError::Range { .. } => OperationErrorKind::OutOfRange,
            PostError::ChainLength { .. } => OperationErrorKind::ChainLength,
            PostError::Full { .. } => OperationErrorKind::WouldBlock,
            error => {
                tracing::warn!(%error, peer = %self.socket.peer(), "cannot post an operation");
                // Half of a chain keeps its place in the queue pair, and its end never comes.
                self.stuck |= rejected.buffer.is_none();
                self.in_trouble(DisconnectCause::Refused);
                OperationErrorKind::Refused
            }
        };
        Err((kind, rejected.buffer))
    }

    /// Deals with a completion of this connection.
    #[inline]
    pub(crate) fn complete(&mut self, completion: &mut WorkCompletion) -> Outcome {
        // None for a part of a chain, and for what is left of an earlier queue pair of the same
        // number.
        let Some(done) = self.qp.complete(completion) else {
            return Outcome::Nothing;
        };
        let result = if done.status == WcStatus::Success {
            Ok(())
        } else {
            self.in_trouble(DisconnectCause::WorkRequest {
                status: done.status,
            });
            Err(done.status)
        };
        let outcome = match done.kind {
            WorkKind::Recv => self.received(done),
            WorkKind::Read | WorkKind::Write => {
                let token = self.tokens.pop_front();
                match (token, done.buffer) {
                    (Some(token), Some(buffer)) if done.kind == WorkKind::Read => {
                        Outcome::Read(token, result, buffer)
                    }
                    (Some(token), Some(buffer)) => Outcome::Written(token, result, buffer),
                    _ => Outcome::Nothing,
                }
            }
            _ => Outcome::Nothing,
        };
        if !self.waiting.is_empty() {
            self.flush();
        }
        match self.state {
            State::Up | State::Leaving(_) => outcome,
            State::Ending(cause) => {
                self.care |= self.is_drained();
                if cause.is_some() {
                    outcome
                } else {
                    Outcome::Nothing
                }
            }
        }
    }

    /// Does what could not be done at once. Tells whether to come back.
    #[inline]
    pub(crate) fn look_after(&mut self, pool: &Pool) -> Care {
        self.care = false;
        if let State::Ending(cause) = self.state {
            return if self.is_drained() {
                Care::Finish(cause)
            } else {
                Care::Done
            };
        }
        if let Some(cause) = self.trouble.take() {
            return Care::End(cause);
        }
        while self.unposted > 0 {
            match pool.try_take(self.receive_size) {
                Ok(fresh) => {
                    self.starved = false;
                    self.unposted -= 1;
                    self.post_receive(fresh);
                }
                Err(error) => {
                    if !self.starved {
                        tracing::warn!(%error, peer = %self.socket.peer(), "no memory to receive into; the peer waits");
                    }
                    self.starved = true;
                    break;
                }
            }
        }
        let mut returned = false;
        let due = self.credits.return_is_due();
        // Only where nothing was sent since they became due: an answer may be about to take them.
        if due
            && self.return_was_due
            && self.qp.send_room() > 0
            && let Ok(buffer) = pool.try_take(HEADER_LEN)
            && self.credits.spend_for_return()
        {
            self.post(OutgoingMessage::internal(buffer, KIND_CREDIT));
            returned = true;
        }
        let again = due && !self.return_was_due;
        self.return_was_due = due && !returned;
        self.care |= self.starved || self.credits.return_is_due();
        Care::GoesOn {
            starved: self.starved,
            again,
            returned,
        }
    }

    /// Starts to end: nothing more is posted, and everything comes back. `false` where there is
    /// nothing to wait for.
    pub(crate) fn end(&mut self, cause: Option<DisconnectCause>) -> bool {
        self.state = State::Ending(cause);
        self.waiting.clear();
        match self.qp.queue_pair().to_err() {
            Ok(()) => !self.is_drained(),
            Err(error) => {
                tracing::warn!(%error, peer = %self.socket.peer(), "cannot flush a queue pair; it is destroyed as it is");
                false
            }
        }
    }

    /// Marks it as one whose peer has gone.
    pub(crate) fn leave(&mut self, cause: DisconnectCause) {
        if self.state == State::Up {
            self.state = State::Leaving(cause);
        }
    }
}
