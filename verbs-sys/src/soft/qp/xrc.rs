//! Queue pairs of extended reliable connections: `IBV_QPT_XRC_SEND` and `IBV_QPT_XRC_RECV`.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::Qp;
use super::requester::Request;
use super::responder::Step;
use crate::ffi::{
    IBV_EVENT_QP_FATAL, IBV_EVENT_QP_REQ_ERR, IBV_QPT_XRC_RECV, IBV_QPT_XRC_SEND,
    IBV_SEND_SOLICITED, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_SUCCESS, ibv_wc,
    ibv_wc_status,
};
use crate::soft::layout::{Service, Target};
use crate::soft::link::Link;
use crate::soft::srq::Srq;
use crate::soft::xrc::{Membership, Port, Unready};

/// What a queue pair has that takes requests which name a shared receive queue.
#[derive(Debug)]
pub(in crate::soft) struct Receiver {
    pub member: Membership,
    /// The queue that the request at the front is for. Written under the receive lock.
    current: Mutex<Option<Arc<Srq>>>,
    /// Its protection domain; 0 is no domain.
    pd: AtomicU32,
}

const REFUSED: Step = Step::Refused(IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR));

impl Receiver {
    pub(in crate::soft) fn new(member: Membership) -> Self {
        Self {
            member,
            current: Mutex::default(),
            pd: AtomicU32::new(0),
        }
    }

    pub(super) fn current(&self) -> Option<Arc<Srq>> {
        self.current
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    fn with_port<T>(&self, act: impl FnOnce(&Port) -> T) -> Option<T> {
        let current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        current.as_ref()?.port().map(|port| act(port))
    }

    fn set_current(&self, srq: Option<Arc<Srq>>) {
        let pd = srq.as_ref().map_or(0, |srq| srq.pd);
        self.pd.store(pd, Ordering::Relaxed);
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = srq;
    }

    /// The protection domain of the request at the front.
    pub(super) fn pd(&self) -> u32 {
        self.pd.load(Ordering::Relaxed)
    }

    /// The receive that was taken will not be used.
    pub(super) fn release(&self) {
        self.with_port(Port::release);
    }

    /// No request has named a queue.
    pub(super) fn forget(&self) {
        self.set_current(None);
    }
}

impl Qp {
    /// Whether its requests name the peer's shared receive queues.
    #[inline]
    pub(super) fn is_xrc_sender(&self) -> bool {
        self.qp_type == IBV_QPT_XRC_SEND
    }

    /// Whether it sends requests.
    pub(super) fn sends_requests(&self) -> bool {
        self.qp_type != IBV_QPT_XRC_RECV
    }

    /// Which requests it sends, and takes.
    pub(super) fn service(&self) -> Service {
        match self.qp_type {
            IBV_QPT_XRC_SEND => Service::XrcInitiator,
            IBV_QPT_XRC_RECV => Service::XrcTarget,
            _ => Service::Plain,
        }
    }

    /// Which requests the peer must take.
    pub(super) fn service_of_peer(&self) -> Service {
        match self.service() {
            Service::XrcInitiator => Service::XrcTarget,
            Service::XrcTarget => Service::XrcInitiator,
            Service::Plain => Service::Plain,
        }
    }

    /// The protection domain in which the peer checks a request of ours on its memory, as far as can be told here.
    #[inline]
    pub(super) fn pd_at_peer(
        &self,
        link: &Link,
        target: Target,
        request: &Request<'_>,
    ) -> Result<u32, ibv_wc_status> {
        if !self.is_xrc_sender() {
            return Ok(target.pd());
        }
        pd_of_shared(link, target, request.srqn)
    }

    /// A message of ours is in the peer's ring: its program may sleep for it.
    #[cold]
    pub(super) fn wake_shared(&self, link: &Link, request: &Request<'_>) {
        if let Some(shared) = link.shared_target(link.target(), request.srqn) {
            link.wake(shared, request.is(IBV_SEND_SOLICITED));
        }
    }

    /// The request at the front is for this shared receive queue. The receive lock is held.
    #[cold]
    pub(super) fn select(&self, receiver: &Receiver, number: u32) -> Result<(), Step> {
        let same = receiver.with_port(|port| port.number == number);
        if same != Some(true) {
            if self.rq.posted() != 0 {
                // The rest of a message is for the queue that its beginning was for.
                return Err(REFUSED);
            }
            let found = self.process.xrc.srq(number).filter(|srq| {
                let domain = srq.port().map(|port| &port.member.domain);
                domain.is_some_and(|domain| Arc::ptr_eq(domain, &receiver.member.domain))
            });
            receiver.set_current(found);
        }
        self.check_selected(receiver)
    }

    /// Whether the request at the front names a queue that is there. The receive lock is held.
    pub(super) fn check_selected(&self, receiver: &Receiver) -> Result<(), Step> {
        match receiver.with_port(Port::shut) {
            Some(None) => Ok(()),
            Some(Some(Unready::Broken)) => Err(BROKEN),
            _ => Err(REFUSED),
        }
    }

    /// Moves a receive of the queue that the message at the front is for to this position of our own, where
    /// nothing is posted. The receive lock is held.
    #[cold]
    pub(super) fn take_selected(&self, receiver: &Receiver, position: u32) -> Result<u32, Step> {
        let current = receiver.current().ok_or(REFUSED)?;
        let port = current.port().ok_or(REFUSED)?;
        port.reserve().map_err(|why| match why {
            Unready::Full => Step::Full,
            Unready::Gone => REFUSED,
            Unready::Broken => BROKEN,
        })?;
        if current.take(&self.rq) || current.take_later_of_several(&self.rq, self.qpn) {
            return Ok(position);
        }
        port.release();
        Err(Step::NotReady)
    }

    /// Hands what has ended of the receives taken from shared queues over to them. The receive lock is held.
    #[inline]
    pub(super) fn deliver_selected(&self, solicited: bool) {
        if let Some(receiver) = &self.receiver {
            self.hand_over(receiver, solicited);
        }
    }

    #[cold]
    fn hand_over(&self, receiver: &Receiver, solicited: bool) {
        let mut wc = ibv_wc::zeroed();
        let src_qp = self.responder.src_qp.load(Ordering::Relaxed);
        while self
            .rq
            .harvest(std::slice::from_mut(&mut wc), self.qpn, src_qp)
            > 0
        {
            let solicited = solicited || wc.status != IBV_WC_SUCCESS;
            receiver.with_port(|port| port.deliver(wc, solicited));
        }
    }
}

// What is only of XRC is kept out of the way of everybody else's requests.

#[cold]
fn pd_of_shared(link: &Link, target: Target, number: u32) -> Result<u32, ibv_wc_status> {
    let shared = link.shared_target(target, number);
    shared
        .map(|shared| shared.pd())
        .ok_or(IBV_WC_REM_INV_REQ_ERR)
}

const BROKEN: Step = Step::Refused(IBV_WC_REM_OP_ERR, Some(IBV_EVENT_QP_FATAL));
