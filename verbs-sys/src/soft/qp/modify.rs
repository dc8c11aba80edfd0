//! ibv_modify_qp(3) and ibv_query_qp(3): the control path of a queue pair.

use std::sync::PoisonError;
use std::sync::atomic::Ordering;

use rustix::io::Errno;

use super::datagram::Endpoint;
use super::{Control, MAX_RD_ATOMIC, Qp, state};
use crate::ffi::{
    IBV_MTU_4096, IBV_QP_ACCESS_FLAGS, IBV_QP_ALT_PATH, IBV_QP_AV, IBV_QP_CAP, IBV_QP_DEST_QPN,
    IBV_QP_EN_SQD_ASYNC_NOTIFY, IBV_QP_MAX_DEST_RD_ATOMIC, IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER, IBV_QP_PATH_MTU, IBV_QP_PKEY_INDEX, IBV_QP_PORT, IBV_QP_QKEY,
    IBV_QP_RETRY_CNT, IBV_QP_RNR_RETRY, IBV_QP_RQ_PSN, IBV_QP_SQ_PSN, IBV_QP_STATE, IBV_QP_TIMEOUT,
    IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RESET, IBV_QPS_RTR, IBV_QPS_RTS, IBV_QPS_SQD, ibv_qp_attr,
    ibv_qp_init_attr, ibv_qp_state,
};
use crate::soft::Options;
use crate::soft::epoch;
use crate::soft::layout::{Readiness, qpn_index};
use crate::soft::link::Via;
use crate::soft::link::ring::Ring;

impl Qp {
    /// Changes state and attributes together, or nothing.
    pub(in crate::soft) fn modify(&self, wanted: &ibv_qp_attr, mask: u32) -> Result<(), Errno> {
        if mask & IBV_QP_STATE != 0 && wanted.qp_state == IBV_QPS_ERR {
            // A port would have put it into its receives by now, whether or not a program polls.
            self.take_in_and_tell();
        }
        let mask = state::that_count(self.qp_type, mask);
        let mut control = self.control();
        let current = self.state();
        let limits = state::Limits {
            ports: 1,
            gids: u8::try_from(self.process.gids.len()).unwrap_or(u8::MAX),
            pkeys: 1,
            mtu: IBV_MTU_4096,
            max_rd_atomic: MAX_RD_ATOMIC,
            max_dest_rd_atomic: MAX_RD_ATOMIC,
        };
        let next =
            state::check_modify(self.qp_type, current, wanted, mask, &limits).map_err(|why| {
                tracing::debug!(qpn = self.qpn, current, mask, %why, "ibv_modify_qp refused");
                Errno::INVAL
            })?;
        if mask & IBV_QP_CAP != 0 {
            return Err(Errno::OPNOTSUPP);
        }
        if mask & IBV_QP_AV != 0 {
            self.check_address(wanted)?;
        }
        let attr = merge(control.attr, wanted, mask);
        match (current, next) {
            (_, IBV_QPS_RESET) => {
                control.attr = ibv_qp_attr::zeroed();
                self.reset(Readiness::NotYet)?;
            }
            (_, IBV_QPS_ERR) => {
                control.attr = attr;
                self.fail_all()?;
            }
            (IBV_QPS_INIT, IBV_QPS_RTR) => {
                control.attr = attr;
                match &self.datagrams {
                    Some(endpoint) => {
                        self.open(endpoint, &attr);
                        self.publish(Readiness::Ready, &attr, control.generation);
                    }
                    None => self.connect(&mut control),
                }
            }
            _ => {
                control.attr = attr;
                self.requester.adopt(&attr);
                self.responder.adopt(&attr);
                if let Some(endpoint) = &self.datagrams {
                    endpoint.set_qkey(attr.qkey);
                }
                if (current, next) == (IBV_QPS_RTS, IBV_QPS_SQD) {
                    self.stop_sends();
                }
                self.state.store(next, Ordering::Release);
                let ready = if state::is_connected(next) {
                    Readiness::Ready
                } else {
                    Readiness::NotYet
                };
                self.publish(ready, &attr, control.generation);
                if (current, next) == (IBV_QPS_RTR, IBV_QPS_RTS) {
                    self.streams.adopt(&attr);
                    if let Some(link) = self.shared_link().filter(|link| link.by_owner)
                        && self.sends_requests()
                    {
                        self.dial(&link);
                    }
                }
                let notify = mask & IBV_QP_EN_SQD_ASYNC_NOTIFY != 0;
                if notify && next == IBV_QPS_SQD {
                    self.announce_drained(wanted.en_sqd_async_notify != 0);
                }
                if mask & IBV_QP_ACCESS_FLAGS != 0 {
                    // What began under the old flags ends before this returns.
                    self.quiesce_own();
                    self.quiesce_peer()?;
                }
            }
        }
        self.show_state(next);
        Ok(())
    }

    /// Writes the state where C programs look for it.
    fn show_state(&self, state: ibv_qp_state) {
        // SAFETY: the handle is ours, and the control lock, which every caller holds, orders writers.
        unsafe { (&raw mut (*self.qp.get()).qp_base.state).write_volatile(state) };
    }

    fn check_address(&self, attr: &ibv_qp_attr) -> Result<(), Errno> {
        let address = &attr.ah_attr;
        // As on every RoCE port, a destination is a GID.
        if address.is_global == 0 {
            return Err(Errno::INVAL);
        }
        // SAFETY: both members of the union are plain bytes.
        let dgid = unsafe { address.grh.dgid.raw };
        if self.process.gids.contains(&dgid) || self.process.reaches_other_hosts() {
            Ok(())
        } else {
            let variable = Options::LISTEN_VARIABLE;
            tracing::warn!(
                qpn = self.qpn,
                "the queue pair is of another host, and these are reached over TCP only: set {variable}"
            );
            Err(Errno::HOSTUNREACH)
        }
    }

    /// INIT to RTR of a datagram queue pair: what comes from now on is taken.
    fn open(&self, endpoint: &Endpoint, attr: &ibv_qp_attr) {
        endpoint.drain(self.mailbox().datagrams.load(Ordering::Acquire));
        endpoint.set_qkey(attr.qkey);
        self.state.store(IBV_QPS_RTR, Ordering::Release);
    }

    /// INIT to RTR: finds the peer and opens the receive ring for it.
    fn connect(&self, control: &mut Control) {
        let attr = control.attr;
        let dest = attr.dest_qp_num & 0xff_ffff;
        let link = std::sync::Arc::new(self.process.link(self.qpn, &attr));
        self.exclusively(|| {
            self.forget_connection();
            self.requester.adopt(&attr);
            self.responder.adopt(&attr);
            self.responder.src_qp.store(dest, Ordering::Relaxed);
            self.streams
                .activate(link.by_owner && self.sends_requests());
            let is_local = matches!(link.via, Via::Local);
            self.is_local.store(is_local, Ordering::Relaxed);
            let fetches = &self.info().responder.0.fetches;
            fetches.store(link.can_fetch().into(), Ordering::Relaxed);
            // SAFETY: `exclusively` holds both locks.
            unsafe { *self.link.get() = Some(std::sync::Arc::clone(&link)) };
        });
        *self
            .shared_link
            .lock()
            .unwrap_or_else(PoisonError::into_inner) = Some(std::sync::Arc::clone(&link));
        // Its process may have died before the upkeep thread could see this connection.
        if link.is_dead() {
            link.lose();
        }
        // Before the peer may do anything.
        let index = qpn_index(self.qpn);
        self.process.executing.connect(index, Some(link));
        control.generation = control.generation.wrapping_add(1);
        self.state.store(IBV_QPS_RTR, Ordering::Release);
        self.publish(Readiness::Ready, &attr, control.generation);
    }

    /// Back to RESET: both queues empty, their completions gone, the connection cut.
    ///
    /// # Errors
    /// `EBUSY` if a stopped peer is in the middle of a request; it can be tried again.
    pub(super) fn reset(&self, readiness: Readiness) -> Result<(), Errno> {
        self.acknowledge_at_the_end();
        self.state.store(IBV_QPS_RESET, Ordering::Release);
        self.publish(readiness, &ibv_qp_attr::zeroed(), 0);
        self.quiesce_peer()?;
        let mut link = None;
        self.send_cq.while_empties(&self.recv_cq, self, || {
            self.exclusively(|| {
                // Again: whoever was inside may have met an error, and said so.
                self.state.store(IBV_QPS_RESET, Ordering::Release);
                self.publish(readiness, &ibv_qp_attr::zeroed(), 0);
                self.sq.reset();
                if let Some(receiver) = self.receiver.as_ref().filter(|_| self.rq.posted() != 0) {
                    receiver.release();
                }
                self.rq.reset();
                self.forget_connection();
                // SAFETY: `exclusively` holds both locks.
                link = unsafe { (*self.link.get()).take() };
            });
        });
        self.shared_link
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        self.process.executing.connect(qpn_index(self.qpn), None);
        if let Some(link) = link {
            // Whoever waits for our answer shall learn that there will be none.
            link.kick();
            self.process.nudge_later();
        }
        Ok(())
    }

    /// To ERR: what is queued on either side is flushed.
    fn fail_all(&self) -> Result<(), Errno> {
        self.acknowledge_at_the_end();
        self.enter_error();
        self.flush_sends_now();
        self.flush_recvs();
        if let Some(link) = self.shared_link() {
            link.kick();
            self.process.nudge_later();
        }
        self.quiesce_peer()
    }

    fn exclusively(&self, act: impl FnOnce()) {
        let info = self.info();
        self.lock_sends();
        epoch::lock(&info.rq_epoch.0);
        act();
        epoch::unlock(&info.rq_epoch.0);
        self.unlock_sends();
    }

    /// Both locks are held.
    fn forget_connection(&self) {
        self.requester.reset();
        // SAFETY: the send lock is held.
        unsafe { self.known() }.forget_peer();
        self.responder.reset();
        if let Some(receiver) = &self.receiver {
            receiver.forget();
        }
        self.streams.reset();
        let mailbox = self.mailbox();
        for word in [&mailbox.ack, &mailbox.nak, &mailbox.result] {
            word.store(0, Ordering::Relaxed);
        }
        mailbox.notices.store(0, Ordering::Relaxed);
        Ring::of(mailbox).reset();
    }

    /// ibv_query_qp(3). Everything is reported, whatever the mask asks for.
    pub(in crate::soft) fn query(&self, attr: &mut ibv_qp_attr, init: &mut ibv_qp_init_attr) {
        if self.recv_can_progress() {
            // The peer may have broken this queue pair without a poll since.
            self.receive(true);
        }
        let control = self.control();
        *attr = control.attr;
        attr.qp_state = self.state();
        attr.cur_qp_state = attr.qp_state;
        attr.sq_draining = (attr.qp_state == IBV_QPS_SQD && !self.is_drained()).into();
        attr.cap = self.cap;
        *init = ibv_qp_init_attr::zeroed();
        // SAFETY: the handle is ours; the fields are written at creation only.
        unsafe {
            init.send_cq = (*self.qp.get()).qp_base.send_cq;
            init.recv_cq = (*self.qp.get()).qp_base.recv_cq;
        }
        if let Some(srq) = &self.srq {
            init.srq = srq.handle();
        }
        init.cap = self.cap;
        init.qp_type = self.qp_type;
        init.sq_sig_all = self.signals(0).into();
        // SAFETY: the handle is ours; the field is written at creation only.
        init.qp_context = unsafe { (*self.qp.get()).qp_base.qp_context };
    }
}

/// The attributes with those that the mask names replaced.
fn merge(mut attr: ibv_qp_attr, wanted: &ibv_qp_attr, mask: u32) -> ibv_qp_attr {
    macro_rules! take {
        ($($bit:ident: $($field:ident),+;)+) => {$(
            if mask & $bit != 0 {
                $(attr.$field = wanted.$field;)+
            }
        )+};
    }
    take! {
        IBV_QP_ACCESS_FLAGS: qp_access_flags;
        IBV_QP_PKEY_INDEX: pkey_index;
        IBV_QP_PORT: port_num;
        IBV_QP_QKEY: qkey;
        IBV_QP_AV: ah_attr;
        IBV_QP_PATH_MTU: path_mtu;
        IBV_QP_TIMEOUT: timeout;
        IBV_QP_RETRY_CNT: retry_cnt;
        IBV_QP_RNR_RETRY: rnr_retry;
        IBV_QP_RQ_PSN: rq_psn;
        IBV_QP_SQ_PSN: sq_psn;
        IBV_QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        IBV_QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        IBV_QP_ALT_PATH: alt_ah_attr, alt_pkey_index, alt_port_num, alt_timeout;
        IBV_QP_MIN_RNR_TIMER: min_rnr_timer;
        IBV_QP_DEST_QPN: dest_qp_num;
    }
    attr
}
