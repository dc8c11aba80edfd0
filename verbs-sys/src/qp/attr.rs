//! States and attributes of queue pairs.

use crate::{
    CompletionQueue, SharedReceiveQueue,
    ffi::{self, ibv_qp_state, ibv_qp_type},
};

/// How to make a queue pair. All sizes are the least that are needed; a device may give more.
#[derive(Clone, Debug)]
pub struct QueuePairInit<'a> {
    /// Where completions of sends go.
    pub send_cq: &'a CompletionQueue,
    /// Where completions of receives go.
    pub recv_cq: &'a CompletionQueue,
    /// Where receives come from, if not from a receive queue of its own: then that has no sizes, and
    /// cannot be posted to.
    pub srq: Option<&'a SharedReceiveQueue>,
    /// Outstanding send requests.
    pub max_send_wr: u32,
    /// Outstanding receive requests.
    pub max_recv_wr: u32,
    /// Elements of a send request.
    pub max_send_sge: u32,
    /// Elements of a receive request.
    pub max_recv_sge: u32,
    /// Bytes of inline data.
    pub max_inline_data: u32,
    /// Whether every send request is signaled.
    pub sq_sig_all: bool,
    /// The kind of service.
    pub qp_type: QpType,
}

impl<'a> QueuePairInit<'a> {
    /// A reliable connection with 16 requests of one element each way, no inline data.
    #[must_use]
    pub fn new(send_cq: &'a CompletionQueue, recv_cq: &'a CompletionQueue) -> Self {
        Self {
            send_cq,
            recv_cq,
            srq: None,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            sq_sig_all: false,
            qp_type: QpType::Rc,
        }
    }
}

/// The kind of service of a queue pair; ibv_create_qp(3). The table in ibv_post_send(3) says which
/// operations each has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpType {
    /// Reliable connection.
    #[default]
    Rc,
    /// Unreliable connection: nothing is acknowledged, and nobody learns of what is lost.
    Uc,
    /// Unreliable datagrams, each with an address of its own.
    Ud,
}

impl From<QpType> for ibv_qp_type {
    fn from(qp_type: QpType) -> Self {
        match qp_type {
            QpType::Rc => ffi::IBV_QPT_RC,
            QpType::Uc => ffi::IBV_QPT_UC,
            QpType::Ud => ffi::IBV_QPT_UD,
        }
    }
}

/// State of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum QpState {
    /// Fresh.
    Reset,
    /// Takes receive requests.
    Init,
    /// Receives.
    Rtr,
    /// Receives and sends.
    Rts,
    /// Has stopped sending, in good order.
    Sqd,
    /// Has stopped sending after an error.
    Sqe,
    /// Broken; every request comes back flushed.
    Err,
    /// A number that this list does not have.
    Unknown,
}

impl From<ibv_qp_state> for QpState {
    fn from(state: ibv_qp_state) -> Self {
        match state {
            ffi::IBV_QPS_RESET => Self::Reset,
            ffi::IBV_QPS_INIT => Self::Init,
            ffi::IBV_QPS_RTR => Self::Rtr,
            ffi::IBV_QPS_RTS => Self::Rts,
            ffi::IBV_QPS_SQD => Self::Sqd,
            ffi::IBV_QPS_SQE => Self::Sqe,
            ffi::IBV_QPS_ERR => Self::Err,
            _ => Self::Unknown,
        }
    }
}

bitflags::bitflags! {
    /// Which attributes of an [`ibv_qp_attr`](ffi::ibv_qp_attr) count; ibv_modify_qp(3).
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    pub struct QpAttrMask: u32 {
        /// `qp_state`.
        const STATE = ffi::IBV_QP_STATE;
        /// `cur_qp_state`.
        const CUR_STATE = ffi::IBV_QP_CUR_STATE;
        /// `en_sqd_async_notify`.
        const EN_SQD_ASYNC_NOTIFY = ffi::IBV_QP_EN_SQD_ASYNC_NOTIFY;
        /// `qp_access_flags`.
        const ACCESS_FLAGS = ffi::IBV_QP_ACCESS_FLAGS;
        /// `pkey_index`.
        const PKEY_INDEX = ffi::IBV_QP_PKEY_INDEX;
        /// `port_num`.
        const PORT = ffi::IBV_QP_PORT;
        /// `qkey`.
        const QKEY = ffi::IBV_QP_QKEY;
        /// `ah_attr`.
        const AV = ffi::IBV_QP_AV;
        /// `path_mtu`.
        const PATH_MTU = ffi::IBV_QP_PATH_MTU;
        /// `timeout`.
        const TIMEOUT = ffi::IBV_QP_TIMEOUT;
        /// `retry_cnt`.
        const RETRY_CNT = ffi::IBV_QP_RETRY_CNT;
        /// `rnr_retry`.
        const RNR_RETRY = ffi::IBV_QP_RNR_RETRY;
        /// `rq_psn`.
        const RQ_PSN = ffi::IBV_QP_RQ_PSN;
        /// `max_rd_atomic`.
        const MAX_QP_RD_ATOMIC = ffi::IBV_QP_MAX_QP_RD_ATOMIC;
        /// `alt_ah_attr` and its companions.
        const ALT_PATH = ffi::IBV_QP_ALT_PATH;
        /// `min_rnr_timer`.
        const MIN_RNR_TIMER = ffi::IBV_QP_MIN_RNR_TIMER;
        /// `sq_psn`.
        const SQ_PSN = ffi::IBV_QP_SQ_PSN;
        /// `max_dest_rd_atomic`.
        const MAX_DEST_RD_ATOMIC = ffi::IBV_QP_MAX_DEST_RD_ATOMIC;
        /// `path_mig_state`.
        const PATH_MIG_STATE = ffi::IBV_QP_PATH_MIG_STATE;
        /// `cap`.
        const CAP = ffi::IBV_QP_CAP;
        /// `dest_qp_num`.
        const DEST_QPN = ffi::IBV_QP_DEST_QPN;
        /// `rate_limit`.
        const RATE_LIMIT = ffi::IBV_QP_RATE_LIMIT;
    }
}

/// The local side of a path: what [`QueuePair::to_rtr`](crate::QueuePair::to_rtr) and [`QueuePair::to_rts`](crate::QueuePair::to_rts) need beside the
/// peer's endpoint.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathOptions {
    /// Local port, counted from 1.
    pub port: u8,
    /// Index of the local address in the port's GID table.
    pub gid_index: u8,
    /// Hops a packet may take.
    pub hop_limit: u8,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// READs and atomics outstanding each way; lowered to the device's limit.
    pub max_rd_atomic: u8,
    /// How long a peer waits when no receive is posted, encoded (12: 0.64 ms).
    pub min_rnr_timer: u8,
    /// Wait for an acknowledgement: 4.096 us times two to this power.
    pub timeout: u8,
    /// Repetitions after a timeout, up to 7.
    pub retry_cnt: u8,
    /// Repetitions when the peer has no receive posted; 7 for ever.
    pub rnr_retry: u8,
}

impl Default for PathOptions {
    /// Port 1, GID index 0, 16 READs, about 67 ms between 6 repetitions, waiting for receives for
    /// ever.
    fn default() -> Self {
        Self {
            port: 1,
            gid_index: 0,
            hop_limit: 64,
            service_level: 0,
            traffic_class: 0,
            max_rd_atomic: 16,
            min_rnr_timer: 12,
            timeout: 14,
            // rdma_rxe takes 7 for ever, and would never notice that a peer is gone.
            retry_cnt: 6,
            rnr_retry: 7,
        }
    }
}
