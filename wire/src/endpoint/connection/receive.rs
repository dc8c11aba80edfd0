//! Taking messages in.

use mr_pool::Buffer;
use verbs_sys::WcStatus;
use verbs_sys::owned::Completed;

use super::{Connection, Outcome};
use crate::event::DisconnectCause;
use crate::header::{FIRST_RESERVED_KIND, KIND_CREDIT};
use crate::message::Received;

impl Connection {
    /// Looks at a message that has come.
    #[inline]
    pub(super) fn received(&mut self, done: Completed<Buffer>) -> Outcome {
        let Some(buffer) = done.buffer else {
            return Outcome::Nothing;
        };
        if done.status != WcStatus::Success {
            return Outcome::Nothing;
        }
        let message = match Received::parse(buffer, done.byte_len as usize) {
            Ok(message) => message,
            Err(error) => {
                self.in_trouble(DisconnectCause::Frame(error));
                return Outcome::Nothing;
            }
        };
        if !self.credits.returned(message.header().credits) {
            self.in_trouble(DisconnectCause::Credits);
            return Outcome::Nothing;
        }
        let kind = message.kind();
        if kind == KIND_CREDIT {
            self.post_receive(message.into_buffer());
            return Outcome::Nothing;
        }
        if kind >= FIRST_RESERVED_KIND {
            self.in_trouble(DisconnectCause::Kind { kind });
            return Outcome::Nothing;
        }
        // Posted again at the next look at the completion queue: the owner's answer comes first.
        self.unposted += 1;
        self.care = true;
        Outcome::Message(message)
    }

    /// Posts a receive in the place of one that was used.
    #[inline]
    pub(super) fn post_receive(&mut self, buffer: Buffer) {
        if self.is_ending() {
            return;
        }
        match self.qp.post_recv(buffer) {
            Ok(_) => {
                self.credits.posted_again();
                self.care |= self.credits.return_is_due();
            }
            Err(rejected) => {
                tracing::warn!(error = %rejected.error, peer = %self.socket.peer(), "cannot post a receive");
                self.in_trouble(DisconnectCause::Refused);
            }
        }
    }
}
