//! What the peer's requester says beside its messages.

use std::sync::atomic::Ordering;

use super::super::Qp;
use crate::ffi::{IBV_EVENT_COMM_EST, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_REQ_ERR, IBV_QPS_RTR};
use crate::soft::layout::{NOTICE_ACCESS, NOTICE_FIRST, NOTICE_INVALID, NOTICE_STREAM};

impl Qp {
    /// Takes the notices. The receive lock is held.
    #[cold]
    pub(super) fn take_notices(&self) {
        let notices = self.mailbox().notices.swap(0, Ordering::Acquire);
        if notices & NOTICE_FIRST != 0 {
            self.tell_established();
        }
        if notices & NOTICE_STREAM != 0 {
            self.streams.await_peer();
        }
        if notices & (NOTICE_ACCESS | NOTICE_INVALID) != 0 {
            tracing::debug!(qpn = self.qpn, "the peer's request broke this queue pair");
            self.enter_error();
            self.raise(if notices & NOTICE_ACCESS != 0 {
                IBV_EVENT_QP_ACCESS_ERR
            } else {
                IBV_EVENT_QP_REQ_ERR
            });
        }
    }

    /// The peer has begun to send. The receive lock is held.
    pub(in crate::soft::qp) fn tell_established(&self) {
        let established = &self.responder.established;
        if self.state() == IBV_QPS_RTR && established.swap(1, Ordering::Relaxed) == 0 {
            self.raise(IBV_EVENT_COMM_EST);
        }
    }
}
