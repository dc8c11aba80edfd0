//! Completion queues, channels and work completions, asynchronous events: ibv_create_cq(3),
//! ibv_poll_cq(3), ibv_get_cq_event(3), ibv_get_async_event(3).

use core::ffi::{c_int, c_uint, c_void};

use super::{ibv_context, ibv_qp, ibv_srq};

/// A channel that announces completions, ibv_create_comp_channel(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_comp_channel {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// Readable while an event waits.
    pub fd: c_int,
    /// Completion queues attached to it.
    pub refcnt: c_int,
}

/// A completion queue.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// The channel its events go to, or null.
    pub channel: *mut ibv_comp_channel,
    /// The application's word, given back with events.
    pub cq_context: *mut c_void,
    /// Number in the provider.
    pub handle: u32,
    /// Entries it can hold.
    pub cqe: c_int,
    /// Guards the event counters.
    pub mutex: libc::pthread_mutex_t,
    /// Signaled when an event counter changes.
    pub cond: libc::pthread_cond_t,
    /// Completion events acknowledged.
    pub comp_events_completed: u32,
    /// Asynchronous events acknowledged.
    pub async_events_completed: u32,
}

c_enum! {
    /// How a work request ended.
    ibv_wc_status: c_uint {
        IBV_WC_SUCCESS = 0,
        IBV_WC_LOC_LEN_ERR = 1,
        IBV_WC_LOC_QP_OP_ERR = 2,
        IBV_WC_LOC_EEC_OP_ERR = 3,
        IBV_WC_LOC_PROT_ERR = 4,
        IBV_WC_WR_FLUSH_ERR = 5,
        IBV_WC_MW_BIND_ERR = 6,
        IBV_WC_BAD_RESP_ERR = 7,
        IBV_WC_LOC_ACCESS_ERR = 8,
        IBV_WC_REM_INV_REQ_ERR = 9,
        IBV_WC_REM_ACCESS_ERR = 10,
        IBV_WC_REM_OP_ERR = 11,
        IBV_WC_RETRY_EXC_ERR = 12,
        IBV_WC_RNR_RETRY_EXC_ERR = 13,
        IBV_WC_LOC_RDD_VIOL_ERR = 14,
        IBV_WC_REM_INV_RD_REQ_ERR = 15,
        IBV_WC_REM_ABORT_ERR = 16,
        IBV_WC_INV_EECN_ERR = 17,
        IBV_WC_INV_EEC_STATE_ERR = 18,
        IBV_WC_FATAL_ERR = 19,
        IBV_WC_RESP_TIMEOUT_ERR = 20,
        IBV_WC_GENERAL_ERR = 21,
        IBV_WC_TM_ERR = 22,
        IBV_WC_TM_RNDV_INCOMPLETE = 23,
    }
}

c_enum! {
    /// What kind of work completed.
    ibv_wc_opcode: c_uint {
        IBV_WC_SEND = 0,
        IBV_WC_RDMA_WRITE = 1,
        IBV_WC_RDMA_READ = 2,
        IBV_WC_COMP_SWAP = 3,
        IBV_WC_FETCH_ADD = 4,
        IBV_WC_BIND_MW = 5,
        IBV_WC_LOCAL_INV = 6,
        IBV_WC_TSO = 7,
        IBV_WC_ATOMIC_WRITE = 9,
        /// A receive; this bit is set in every opcode of the receive side.
        IBV_WC_RECV = 1 << 7,
        IBV_WC_RECV_RDMA_WITH_IMM = (1 << 7) + 1,
        IBV_WC_TM_ADD = (1 << 7) + 2,
        IBV_WC_TM_DEL = (1 << 7) + 3,
        IBV_WC_TM_SYNC = (1 << 7) + 4,
        IBV_WC_TM_RECV = (1 << 7) + 5,
        IBV_WC_TM_NO_TAG = (1 << 7) + 6,
        IBV_WC_DRIVER1 = (1 << 7) + 7,
        IBV_WC_DRIVER2 = (1 << 7) + 8,
        IBV_WC_DRIVER3 = (1 << 7) + 9,
    }
}

c_enum! {
    /// Bits of [`ibv_wc::wc_flags`].
    ibv_wc_flags: c_uint {
        /// A global route header stands before the datagram.
        IBV_WC_GRH = 1,
        /// `imm_data` is an immediate.
        IBV_WC_WITH_IMM = 1 << 1,
        IBV_WC_IP_CSUM_OK = 1 << 2,
        /// `imm_data` is the key that was invalidated.
        IBV_WC_WITH_INV = 1 << 3,
        IBV_WC_TM_SYNC_REQ = 1 << 4,
        IBV_WC_TM_MATCH = 1 << 5,
        IBV_WC_TM_DATA_VALID = 1 << 6,
    }
}

/// A work completion. After an error only `wr_id`, `status`, `qp_num` and `vendor_err` count.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_wc {
    /// The word of the work request.
    pub wr_id: u64,
    /// How it ended.
    pub status: ibv_wc_status,
    /// What it was.
    pub opcode: ibv_wc_opcode,
    /// The device's own word on an error.
    pub vendor_err: u32,
    /// Bytes transferred, valid for receives, READs and atomics.
    pub byte_len: u32,
    /// Immediate in network byte order with [`IBV_WC_WITH_IMM`]; `invalidated_rkey` of C with
    /// [`IBV_WC_WITH_INV`].
    pub imm_data: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// The sender's queue pair, valid for datagrams.
    pub src_qp: u32,
    /// [`ibv_wc_flags`].
    pub wc_flags: c_uint,
    /// Index of the partition key, special queue pairs only.
    pub pkey_index: u16,
    /// The sender's local identifier, datagrams only.
    pub slid: u16,
    /// Service level, datagrams only.
    pub sl: u8,
    /// Path bits of the destination, datagrams only.
    pub dlid_path_bits: u8,
}

/// Argument of [`ibv_cq_ex::start_poll`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_poll_cq_attr {
    /// Must be 0.
    pub comp_mask: u32,
}

/// Tag matching information of a completion.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_wc_tm_info {
    /// Tag of the message.
    pub tag: u64,
    /// The sender's word.
    pub priv_: u32,
}

/// A completion queue read field by field, ibv_create_cq_ex(3). Starts like [`ibv_cq`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_cq_ex {
    /// The classic completion queue.
    pub base: ibv_cq,
    /// Must be 0.
    pub comp_mask: u32,
    /// Status of the current completion.
    pub status: ibv_wc_status,
    /// Word of the current completion's request.
    pub wr_id: u64,
    /// Starts reading: 0, ENOENT for an empty queue, or an error.
    pub start_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_poll_cq_attr) -> c_int>,
    /// Moves to the next completion.
    pub next_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_int>,
    /// Ends reading.
    pub end_poll: Option<unsafe extern "C" fn(*mut ibv_cq_ex)>,
    /// Reads [`ibv_wc::opcode`].
    pub read_opcode: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> ibv_wc_opcode>,
    /// Reads [`ibv_wc::vendor_err`].
    pub read_vendor_err: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::byte_len`].
    pub read_byte_len: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::imm_data`].
    pub read_imm_data: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::qp_num`].
    pub read_qp_num: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::src_qp`].
    pub read_src_qp: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::wc_flags`].
    pub read_wc_flags: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> c_uint>,
    /// Reads [`ibv_wc::slid`].
    pub read_slid: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads [`ibv_wc::sl`].
    pub read_sl: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
    /// Reads [`ibv_wc::dlid_path_bits`].
    pub read_dlid_path_bits: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u8>,
    /// Reads the time stamp, ticks of the device's clock.
    pub read_completion_ts: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u64>,
    /// Reads the VLAN.
    pub read_cvlan: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u16>,
    /// Reads the flow tag.
    pub read_flow_tag: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u32>,
    /// Reads the tag matching information.
    pub read_tm_info: Option<unsafe extern "C" fn(*mut ibv_cq_ex, *mut ibv_wc_tm_info)>,
    /// Reads the time stamp, nanoseconds.
    pub read_completion_wallclock_ns: Option<unsafe extern "C" fn(*mut ibv_cq_ex) -> u64>,
}

c_enum! {
    /// Kinds of asynchronous event.
    ibv_event_type: c_uint {
        IBV_EVENT_CQ_ERR = 0,
        IBV_EVENT_QP_FATAL = 1,
        IBV_EVENT_QP_REQ_ERR = 2,
        IBV_EVENT_QP_ACCESS_ERR = 3,
        IBV_EVENT_COMM_EST = 4,
        IBV_EVENT_SQ_DRAINED = 5,
        IBV_EVENT_PATH_MIG = 6,
        IBV_EVENT_PATH_MIG_ERR = 7,
        IBV_EVENT_DEVICE_FATAL = 8,
        IBV_EVENT_PORT_ACTIVE = 9,
        IBV_EVENT_PORT_ERR = 10,
        IBV_EVENT_LID_CHANGE = 11,
        IBV_EVENT_PKEY_CHANGE = 12,
        IBV_EVENT_SM_CHANGE = 13,
        IBV_EVENT_SRQ_ERR = 14,
        IBV_EVENT_SRQ_LIMIT_REACHED = 15,
        IBV_EVENT_QP_LAST_WQE_REACHED = 16,
        IBV_EVENT_CLIENT_REREGISTER = 17,
        IBV_EVENT_GID_CHANGE = 18,
        IBV_EVENT_WQ_FATAL = 19,
    }
}

/// What an asynchronous event is about.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_async_event_element {
    /// A completion queue.
    pub cq: *mut ibv_cq,
    /// A queue pair.
    pub qp: *mut ibv_qp,
    /// A shared receive queue.
    pub srq: *mut ibv_srq,
    /// A work queue.
    pub wq: *mut c_void,
    /// A port, counted from 1.
    pub port_num: c_int,
}

/// An asynchronous event.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_async_event {
    /// What it is about.
    pub element: ibv_async_event_element,
    /// What happened.
    pub event_type: ibv_event_type,
}

zero_default!(ibv_comp_channel, ibv_cq, ibv_cq_ex, ibv_wc, ibv_async_event);
