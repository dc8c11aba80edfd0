//! Making and destroying queue pairs.

use std::cell::UnsafeCell;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use rustix::io::Errno;

use super::queues::{RecvQueue, SendQueue};
use super::{
    Control, MAX_INLINE, MAX_SGE, MAX_WR, Qp, Receiver, datagram, extended, requester, responder,
    rest, send_lock, stream,
};
use crate::ffi::*;
use crate::soft::cq::Cq;
use crate::soft::events::{AsyncEvents, Source};
use crate::soft::layout::{Readiness, qpn, qpn_index};
use crate::soft::process::Process;
use crate::soft::srq::Srq;
use crate::soft::xrc::Membership;

/// Where the receives of a queue pair come from.
pub(in crate::soft) enum Receives {
    /// They are posted to it.
    Own,
    Shared(Arc<Srq>),
    /// Each request names a shared queue of an XRC domain.
    Named(Membership),
    /// It only sends.
    Nothing,
}

/// How far the connection numbers of queue pairs are apart that follow each other in a place; odd.
const CONNECTIONS_APART: u32 = 67;

impl Qp {
    pub(in crate::soft) fn create(
        process: &Arc<Process>,
        async_events: &Arc<AsyncEvents>,
        pd: u32,
        mut fields: ibv_qp_ex,
        queues: (Arc<Cq>, Arc<Cq>),
        receives: Receives,
        init: &ibv_qp_init_attr,
    ) -> Result<Arc<Self>, Errno> {
        let mut cap = init.cap;
        // Sizes of a queue that it does not have count for nothing.
        if !matches!(receives, Receives::Own) {
            (cap.max_recv_wr, cap.max_recv_sge) = (0, 0);
        }
        if let Receives::Named(_) = receives {
            (cap.max_send_wr, cap.max_send_sge, cap.max_inline_data) = (0, 0, 0);
        }
        let is_xrc = matches!(init.qp_type, IBV_QPT_XRC_SEND | IBV_QPT_XRC_RECV);
        let too_much = cap.max_send_wr > MAX_WR
            || cap.max_recv_wr > MAX_WR
            || cap.max_send_sge > MAX_SGE
            || cap.max_recv_sge > MAX_SGE
            || cap.max_inline_data > MAX_INLINE;
        if too_much {
            return Err(Errno::INVAL);
        }
        // Inline bytes have the room of the elements, too, as where both lie in the same place of a request; programs
        // count on it.
        let room = cap.max_send_sge * size_of::<ibv_sge>() as u32;
        cap.max_inline_data = cap.max_inline_data.max(room);
        let index = process.qp_indices.take().ok_or(Errno::NOMEM)?;
        let qpn = qpn(process.slot, index as usize);
        let datagrams = if init.qp_type == IBV_QPT_UD {
            let endpoint = datagram::Endpoint::new(qpn);
            Some(endpoint.inspect_err(|_| process.qp_indices.give(index))?)
        } else {
            None
        };
        let (send_cq, recv_cq) = queues;
        let injector = process.injector.get().map(Arc::clone);
        let (rq, srq, receiver) = match receives {
            Receives::Own | Receives::Nothing => {
                let rq = RecvQueue::new(cap.max_recv_wr, cap.max_recv_sge);
                (rq, None, None)
            }
            Receives::Shared(srq) => {
                let rq = RecvQueue::fed_one_by_one(recv_cq.cqe().min(MAX_WR), srq.max_sge());
                (rq, Some(srq), None)
            }
            // What has ended goes on to a port at once.
            Receives::Named(member) => {
                let rq = RecvQueue::fed_one_by_one(1, MAX_SGE);
                (rq, None, Some(Receiver::new(member)))
            }
        };
        (fields.qp_base.handle, fields.qp_base.qp_num) = (index, qpn);
        let qp = Arc::new(Self {
            builder: fields.wr_start.map(|_| extended::Builder::new()),
            qp: UnsafeCell::new(fields),
            qpn,
            process: Arc::clone(process),
            info: NonNull::from(&process.info().qps[index as usize]),
            fences: NonNull::from(&process.info().header.fences.0),
            mailbox: NonNull::from(&process.mailbox().qps[index as usize]),
            pd,
            cap,
            always: match init.sq_sig_all {
                0 => 0,
                _ => IBV_SEND_SIGNALED,
            },
            one_sge: if cap.max_send_sge == 0 || injector.is_some() || is_xrc {
                i64::MAX
            } else {
                1
            },
            injector,
            qp_type: init.qp_type,
            datagrams,
            state: AtomicU32::new(IBV_QPS_RESET),
            resting: rest::Resting::default(),
            receives_first: AtomicBool::new(false),
            send_lock: send_lock::SendLock::default(),
            sq: SendQueue::new(cap.max_send_wr, cap.max_send_sge, cap.max_inline_data),
            rq,
            srq,
            receiver,
            known: UnsafeCell::default(),
            link: UnsafeCell::new(None),
            shared_link: Mutex::new(None),
            is_local: AtomicBool::new(false),
            streams: stream::Streams::default(),
            requester: requester::State::default(),
            responder: responder::State::default(),
            control: Mutex::new(Control {
                attr: ibv_qp_attr::zeroed(),
                generation: 0,
            }),
            async_events: Source::new(async_events),
            send_cq,
            recv_cq,
        });
        if let Some(srq) = &qp.srq {
            srq.attach();
        }
        let info = qp.info();
        // A process that died holding a lock took its file along; this only repairs our own leaks.
        info.sends.0.reset();
        info.rq_epoch.0.store(0, Ordering::Relaxed);
        let same = Arc::ptr_eq(&qp.send_cq, &qp.recv_cq) && !is_xrc;
        let before = info.responder.0.incarnation.fetch_add(1, Ordering::AcqRel);
        // Connections of queue pairs that follow each other in a place are told apart, too.
        qp.control().generation = before.wrapping_mul(CONNECTIONS_APART);
        info.responder.0.hears.store(same.into(), Ordering::Relaxed);
        info.responder.0.resting.store(0, Ordering::Relaxed);
        qp.publish(Readiness::NotYet, &ibv_qp_attr::zeroed(), 0);
        if let Some(receiver) = &qp.receiver {
            receiver.member.domain.add(Arc::clone(&qp));
        } else {
            qp.send_cq.attach(&qp, true, same);
        }
        if !same && !is_xrc {
            qp.recv_cq.attach(&qp, false, true);
        }
        process.executing.add(index as usize);
        process.add_qp(Arc::clone(&qp));
        Ok(qp)
    }

    /// ibv_destroy_qp(3): returns when no peer executes a request on it any more, and every event
    /// that was delivered is acknowledged.
    ///
    /// # Errors
    /// `EBUSY` if a stopped peer does; the queue pair is then in RESET.
    pub(in crate::soft) fn destroy(&self) -> Result<(), Errno> {
        self.reset(Readiness::Gone)?;
        self.send_cq.detach(self);
        self.recv_cq.detach(self);
        self.process.remove_qp(self.qpn);
        self.process.executing.remove(qpn_index(self.qpn));
        // Its number will name another queue pair. Nobody is in it any more since it was reset.
        self.process.windows.release_qp(&self.process, self.qpn);
        if let Some(srq) = &self.srq {
            srq.detach(self.qpn);
        }
        if let Some(receiver) = &self.receiver {
            receiver.member.domain.remove(self.qpn);
            receiver.member.leave();
        }
        self.async_events.retire();
        self.process.qp_indices.give(qpn_index(self.qpn) as u32);
        Ok(())
    }
}
