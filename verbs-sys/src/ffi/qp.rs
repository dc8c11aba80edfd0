//! Queue pairs and shared receive queues: ibv_create_qp(3), ibv_modify_qp(3), ibv_create_srq(3).

use core::ffi::{c_int, c_uint, c_void};

use super::{
    ibv_ah, ibv_ah_attr, ibv_context, ibv_cq, ibv_data_buf, ibv_mtu, ibv_mw, ibv_mw_bind_info,
    ibv_pd, ibv_sge,
};

c_enum! {
    /// Types of queue pair.
    ibv_qp_type: c_uint {
        /// Reliable connection.
        IBV_QPT_RC = 2,
        /// Unreliable connection.
        IBV_QPT_UC = 3,
        /// Datagrams.
        IBV_QPT_UD = 4,
        IBV_QPT_RAW_PACKET = 8,
        IBV_QPT_XRC_SEND = 9,
        IBV_QPT_XRC_RECV = 10,
        IBV_QPT_DRIVER = 0xff,
    }
}

/// Sizes of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_qp_cap {
    /// Most outstanding send requests.
    pub max_send_wr: u32,
    /// Most outstanding receive requests.
    pub max_recv_wr: u32,
    /// Most elements of a send request.
    pub max_send_sge: u32,
    /// Most elements of a receive request.
    pub max_recv_sge: u32,
    /// Most bytes of inline data.
    pub max_inline_data: u32,
}

/// How to create a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_qp_init_attr {
    /// The application's word.
    pub qp_context: *mut c_void,
    /// Where send completions go.
    pub send_cq: *mut ibv_cq,
    /// Where receive completions go.
    pub recv_cq: *mut ibv_cq,
    /// Shared receive queue, or null.
    pub srq: *mut ibv_srq,
    /// Sizes asked for; on return the sizes given.
    pub cap: ibv_qp_cap,
    /// Type.
    pub qp_type: ibv_qp_type,
    /// Not 0: every send request is signaled.
    pub sq_sig_all: c_int,
}

/// Hashing of received packets.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_rx_hash_conf {
    /// Hash function.
    pub rx_hash_function: u8,
    /// Bytes of the key.
    pub rx_hash_key_len: u8,
    /// Key.
    pub rx_hash_key: *mut u8,
    /// Fields to hash.
    pub rx_hash_fields_mask: u64,
}

c_enum! {
    /// Fields of [`ibv_qp_init_attr_ex`] that count.
    ibv_qp_init_attr_mask: c_uint {
        IBV_QP_INIT_ATTR_PD = 1,
        IBV_QP_INIT_ATTR_XRCD = 1 << 1,
        IBV_QP_INIT_ATTR_CREATE_FLAGS = 1 << 2,
        IBV_QP_INIT_ATTR_MAX_TSO_HEADER = 1 << 3,
        IBV_QP_INIT_ATTR_IND_TABLE = 1 << 4,
        IBV_QP_INIT_ATTR_RX_HASH = 1 << 5,
        IBV_QP_INIT_ATTR_SEND_OPS_FLAGS = 1 << 6,
    }
}

/// How to create a queue pair, ibv_create_qp_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_qp_init_attr_ex {
    /// As in [`ibv_qp_init_attr`].
    pub qp_context: *mut c_void,
    /// As in [`ibv_qp_init_attr`].
    pub send_cq: *mut ibv_cq,
    /// As in [`ibv_qp_init_attr`].
    pub recv_cq: *mut ibv_cq,
    /// As in [`ibv_qp_init_attr`].
    pub srq: *mut ibv_srq,
    /// As in [`ibv_qp_init_attr`].
    pub cap: ibv_qp_cap,
    /// As in [`ibv_qp_init_attr`].
    pub qp_type: ibv_qp_type,
    /// As in [`ibv_qp_init_attr`].
    pub sq_sig_all: c_int,
    /// [`ibv_qp_init_attr_mask`].
    pub comp_mask: u32,
    /// Protection domain.
    pub pd: *mut ibv_pd,
    /// XRC domain.
    pub xrcd: *mut c_void,
    /// Creation flags.
    pub create_flags: u32,
    /// Largest header of a segmentation request, bytes.
    pub max_tso_header: u16,
    /// Indirection table.
    pub rwq_ind_tbl: *mut c_void,
    /// Hashing.
    pub rx_hash_conf: ibv_rx_hash_conf,
    /// Number the sent packets shall carry.
    pub source_qpn: u32,
    /// Operations that [`ibv_qp_ex`] shall offer.
    pub send_ops_flags: u64,
}

c_enum! {
    /// Fields of [`ibv_qp_attr`] that count.
    ibv_qp_attr_mask: c_uint {
        IBV_QP_STATE = 1,
        IBV_QP_CUR_STATE = 1 << 1,
        IBV_QP_EN_SQD_ASYNC_NOTIFY = 1 << 2,
        IBV_QP_ACCESS_FLAGS = 1 << 3,
        IBV_QP_PKEY_INDEX = 1 << 4,
        IBV_QP_PORT = 1 << 5,
        IBV_QP_QKEY = 1 << 6,
        IBV_QP_AV = 1 << 7,
        IBV_QP_PATH_MTU = 1 << 8,
        IBV_QP_TIMEOUT = 1 << 9,
        IBV_QP_RETRY_CNT = 1 << 10,
        IBV_QP_RNR_RETRY = 1 << 11,
        IBV_QP_RQ_PSN = 1 << 12,
        IBV_QP_MAX_QP_RD_ATOMIC = 1 << 13,
        IBV_QP_ALT_PATH = 1 << 14,
        IBV_QP_MIN_RNR_TIMER = 1 << 15,
        IBV_QP_SQ_PSN = 1 << 16,
        IBV_QP_MAX_DEST_RD_ATOMIC = 1 << 17,
        IBV_QP_PATH_MIG_STATE = 1 << 18,
        IBV_QP_CAP = 1 << 19,
        IBV_QP_DEST_QPN = 1 << 20,
        IBV_QP_RATE_LIMIT = 1 << 25,
    }
}

c_enum! {
    /// States of a queue pair.
    ibv_qp_state: c_uint {
        IBV_QPS_RESET = 0,
        IBV_QPS_INIT = 1,
        /// Ready to receive.
        IBV_QPS_RTR = 2,
        /// Ready to send.
        IBV_QPS_RTS = 3,
        /// Send queue drained.
        IBV_QPS_SQD = 4,
        /// Send queue error.
        IBV_QPS_SQE = 5,
        IBV_QPS_ERR = 6,
        IBV_QPS_UNKNOWN = 7,
    }
}

c_enum! {
    /// State of path migration.
    ibv_mig_state: c_uint {
        IBV_MIG_MIGRATED = 0,
        IBV_MIG_REARM = 1,
        IBV_MIG_ARMED = 2,
    }
}

/// Attributes of a queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_attr {
    /// State to move to.
    pub qp_state: ibv_qp_state,
    /// State it is in.
    pub cur_qp_state: ibv_qp_state,
    /// Packet payload on the path.
    pub path_mtu: ibv_mtu,
    /// Path migration.
    pub path_mig_state: ibv_mig_state,
    /// Queue key, datagrams only.
    pub qkey: u32,
    /// First packet sequence number to receive, 24 bits.
    pub rq_psn: u32,
    /// First packet sequence number to send, 24 bits.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// What the peer may do, [`ibv_access_flags`](super::ibv_access_flags).
    pub qp_access_flags: c_uint,
    /// Sizes.
    pub cap: ibv_qp_cap,
    /// The peer's address.
    pub ah_attr: ibv_ah_attr,
    /// The peer's other address.
    pub alt_ah_attr: ibv_ah_attr,
    /// Index of the partition key.
    pub pkey_index: u16,
    /// The same for the other path.
    pub alt_pkey_index: u16,
    /// Ask for an event when drained.
    pub en_sqd_async_notify: u8,
    /// Whether it is draining.
    pub sq_draining: u8,
    /// Most outstanding READs and atomics as initiator.
    pub max_rd_atomic: u8,
    /// Most outstanding READs and atomics as target.
    pub max_dest_rd_atomic: u8,
    /// How long a peer waits after a receiver-not-ready answer, encoded.
    pub min_rnr_timer: u8,
    /// Local port, counted from 1.
    pub port_num: u8,
    /// Wait for an acknowledgement, 4.096 us times two to this power; 0 for ever.
    pub timeout: u8,
    /// Repetitions after a timeout, up to 7.
    pub retry_cnt: u8,
    /// Repetitions after receiver-not-ready; 7 for ever.
    pub rnr_retry: u8,
    /// Local port of the other path.
    pub alt_port_num: u8,
    /// Timeout of the other path.
    pub alt_timeout: u8,
    /// Rate limit, kbit/s.
    pub rate_limit: u32,
}

/// A queue pair.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The application's word.
    pub qp_context: *mut c_void,
    /// The protection domain it belongs to.
    pub pd: *mut ibv_pd,
    /// Where send completions go.
    pub send_cq: *mut ibv_cq,
    /// Where receive completions go.
    pub recv_cq: *mut ibv_cq,
    /// Shared receive queue, or null.
    pub srq: *mut ibv_srq,
    /// Number in the provider.
    pub handle: u32,
    /// Number on the wire, 24 bits.
    pub qp_num: u32,
    /// State after the last successful ibv_modify_qp or ibv_query_qp.
    pub state: ibv_qp_state,
    /// Type.
    pub qp_type: ibv_qp_type,
    /// Guards the event counter.
    pub mutex: libc::pthread_mutex_t,
    /// Signaled when the event counter changes.
    pub cond: libc::pthread_cond_t,
    /// Asynchronous events acknowledged.
    pub events_completed: u32,
}

/// A queue pair posted to call by call, ibv_wr_post(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_qp_ex {
    /// The classic queue pair.
    pub qp_base: ibv_qp,
    /// Must be 0.
    pub comp_mask: u64,
    /// `wr_id` of the next request.
    pub wr_id: u64,
    /// [`ibv_send_flags`](super::ibv_send_flags) of the next request.
    pub wr_flags: c_uint,
    /// Compare and swap.
    pub wr_atomic_cmp_swp: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64, u64)>,
    /// Fetch and add.
    pub wr_atomic_fetch_add: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u64)>,
    /// Binds a window.
    pub wr_bind_mw:
        Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_mw, u32, *const ibv_mw_bind_info)>,
    /// Invalidates a key.
    pub wr_local_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
    /// READ.
    pub wr_rdma_read: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
    /// WRITE.
    pub wr_rdma_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64)>,
    /// WRITE with immediate.
    pub wr_rdma_write_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
    /// SEND.
    pub wr_send: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
    /// SEND with immediate.
    pub wr_send_imm: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
    /// SEND that invalidates a key of the peer.
    pub wr_send_inv: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
    /// Segmentation.
    pub wr_send_tso: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, u16, u16)>,
    /// Destination of a datagram.
    pub wr_set_ud_addr: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut ibv_ah, u32, u32)>,
    /// Destination of an XRC request.
    pub wr_set_xrc_srqn: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32)>,
    /// Inline bytes.
    pub wr_set_inline_data: Option<unsafe extern "C" fn(*mut ibv_qp_ex, *mut c_void, usize)>,
    /// Inline bytes from several places.
    pub wr_set_inline_data_list:
        Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_data_buf)>,
    /// One element.
    pub wr_set_sge: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, u32)>,
    /// Several elements.
    pub wr_set_sge_list: Option<unsafe extern "C" fn(*mut ibv_qp_ex, usize, *const ibv_sge)>,
    /// Starts a batch.
    pub wr_start: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
    /// Posts the batch.
    pub wr_complete: Option<unsafe extern "C" fn(*mut ibv_qp_ex) -> c_int>,
    /// Drops the batch.
    pub wr_abort: Option<unsafe extern "C" fn(*mut ibv_qp_ex)>,
    /// Atomic WRITE of 8 bytes.
    pub wr_atomic_write: Option<unsafe extern "C" fn(*mut ibv_qp_ex, u32, u64, *const c_void)>,
}

c_enum! {
    /// Fields of [`ibv_srq_attr`] that count.
    ibv_srq_attr_mask: c_uint {
        IBV_SRQ_MAX_WR = 1,
        IBV_SRQ_LIMIT = 1 << 1,
    }
}

/// Attributes of a shared receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_srq_attr {
    /// Most outstanding requests.
    pub max_wr: u32,
    /// Most elements of a request.
    pub max_sge: u32,
    /// Event when fewer requests than this are left; 0 for none.
    pub srq_limit: u32,
}

/// How to create a shared receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_srq_init_attr {
    /// The application's word.
    pub srq_context: *mut c_void,
    /// Sizes.
    pub attr: ibv_srq_attr,
}

/// A shared receive queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_srq {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The application's word.
    pub srq_context: *mut c_void,
    /// The protection domain it belongs to.
    pub pd: *mut ibv_pd,
    /// Number in the provider.
    pub handle: u32,
    /// Guards the event counter.
    pub mutex: libc::pthread_mutex_t,
    /// Signaled when the event counter changes.
    pub cond: libc::pthread_cond_t,
    /// Asynchronous events acknowledged.
    pub events_completed: u32,
}

zero_default!(
    ibv_qp_init_attr,
    ibv_rx_hash_conf,
    ibv_qp_init_attr_ex,
    ibv_qp_attr,
    ibv_qp,
    ibv_qp_ex,
    ibv_srq_init_attr,
    ibv_srq
);
