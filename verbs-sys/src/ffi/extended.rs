//! What the extended calls take: ibv_create_cq_ex(3), ibv_create_srq_ex(3), ibv_alloc_parent_domain(3),
//! ibv_alloc_dm(3), ibv_advise_mr(3), ibv_open_xrcd(3), ibv_open_qp(3), ibv_query_rt_values_ex(3),
//! ibv_query_ece(3).

use core::ffi::{c_int, c_uint, c_void};

use super::{ibv_comp_channel, ibv_context, ibv_cq, ibv_pd, ibv_qp_type, ibv_srq_attr};

c_enum! {
    /// What can be read of the completions of an [`ibv_cq_ex`](super::ibv_cq_ex), beside status and word.
    ibv_create_cq_wc_flags: c_uint {
        IBV_WC_EX_WITH_BYTE_LEN = 1,
        IBV_WC_EX_WITH_IMM = 1 << 1,
        IBV_WC_EX_WITH_QP_NUM = 1 << 2,
        IBV_WC_EX_WITH_SRC_QP = 1 << 3,
        IBV_WC_EX_WITH_SLID = 1 << 4,
        IBV_WC_EX_WITH_SL = 1 << 5,
        IBV_WC_EX_WITH_DLID_PATH_BITS = 1 << 6,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP = 1 << 7,
        IBV_WC_EX_WITH_CVLAN = 1 << 8,
        IBV_WC_EX_WITH_FLOW_TAG = 1 << 9,
        IBV_WC_EX_WITH_TM_INFO = 1 << 10,
        IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK = 1 << 11,
    }
}

/// What any device can read of a completion: the fields of [`ibv_wc`](super::ibv_wc).
pub const IBV_WC_STANDARD_FLAGS: ibv_create_cq_wc_flags = (1 << 7) - 1;

c_enum! {
    /// Fields of [`ibv_cq_init_attr_ex`] that count.
    ibv_cq_init_attr_mask: c_uint {
        IBV_CQ_INIT_ATTR_MASK_FLAGS = 1,
        IBV_CQ_INIT_ATTR_MASK_PD = 1 << 1,
    }
}

c_enum! {
    /// Bits of [`ibv_cq_init_attr_ex::flags`].
    ibv_create_cq_attr_flags: c_uint {
        /// One thread at a time uses the queue, by the caller's care.
        IBV_CREATE_CQ_ATTR_SINGLE_THREADED = 1,
        IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN = 1 << 1,
    }
}

/// How to create a completion queue, ibv_create_cq_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_cq_init_attr_ex {
    /// Least entries.
    pub cqe: u32,
    /// The application's word, given back with events.
    pub cq_context: *mut c_void,
    /// The channel its events go to, or null.
    pub channel: *mut ibv_comp_channel,
    /// Less than the context's `num_comp_vectors`.
    pub comp_vector: u32,
    /// [`ibv_create_cq_wc_flags`].
    pub wc_flags: u64,
    /// [`ibv_cq_init_attr_mask`].
    pub comp_mask: u32,
    /// [`ibv_create_cq_attr_flags`].
    pub flags: u32,
    /// The parent domain that it belongs to.
    pub parent_domain: *mut ibv_pd,
}

/// When a completion queue tells of completions.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_moderate_cq {
    /// After so many.
    pub cq_count: u16,
    /// After so long, us.
    pub cq_period: u16,
}

/// The bit of [`ibv_modify_cq_attr::attr_mask`].
pub const IBV_CQ_ATTR_MODERATE: u32 = 1;

/// What ibv_modify_cq(3) changes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_modify_cq_attr {
    /// [`IBV_CQ_ATTR_MODERATE`].
    pub attr_mask: u32,
    /// Moderation of events.
    pub moderate: ibv_moderate_cq,
}

c_enum! {
    /// Operations that an [`ibv_qp_ex`](super::ibv_qp_ex) shall offer.
    ibv_qp_create_send_ops_flags: u64 {
        IBV_QP_EX_WITH_RDMA_WRITE = 1,
        IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM = 1 << 1,
        IBV_QP_EX_WITH_SEND = 1 << 2,
        IBV_QP_EX_WITH_SEND_WITH_IMM = 1 << 3,
        IBV_QP_EX_WITH_RDMA_READ = 1 << 4,
        IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP = 1 << 5,
        IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD = 1 << 6,
        IBV_QP_EX_WITH_LOCAL_INV = 1 << 7,
        IBV_QP_EX_WITH_BIND_MW = 1 << 8,
        IBV_QP_EX_WITH_SEND_WITH_INV = 1 << 9,
        IBV_QP_EX_WITH_TSO = 1 << 10,
        IBV_QP_EX_WITH_ATOMIC_WRITE = 1 << 12,
    }
}

/// How to allocate a thread domain, ibv_alloc_td(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_td_init_attr {
    /// Must be 0.
    pub comp_mask: u32,
}

/// A thread domain: what one thread at a time uses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_td {
    /// The context it belongs to.
    pub context: *mut ibv_context,
}

c_enum! {
    /// Fields of [`ibv_parent_domain_init_attr`] that count.
    ibv_parent_domain_init_attr_mask: c_uint {
        IBV_PARENT_DOMAIN_INIT_ATTR_ALLOCATORS = 1,
        IBV_PARENT_DOMAIN_INIT_ATTR_PD_CONTEXT = 1 << 1,
    }
}

/// How to allocate a parent domain, ibv_alloc_parent_domain(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_parent_domain_init_attr {
    /// The protection domain.
    pub pd: *mut ibv_pd,
    /// The thread domain, or null.
    pub td: *mut ibv_td,
    /// [`ibv_parent_domain_init_attr_mask`].
    pub comp_mask: u32,
    /// Gives the device memory: domain, `pd_context`, bytes, alignment, what for.
    pub alloc:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, usize, usize, u64) -> *mut c_void>,
    /// Takes it back: domain, `pd_context`, the memory, what for.
    pub free: Option<unsafe extern "C" fn(*mut ibv_pd, *mut c_void, *mut c_void, u64)>,
    /// The application's word.
    pub pd_context: *mut c_void,
}

/// How to allocate device memory, ibv_alloc_dm(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_alloc_dm_attr {
    /// Bytes.
    pub length: usize,
    /// Alignment: this power of two, bytes.
    pub log_align_req: u32,
    /// Must be 0.
    pub comp_mask: u32,
}

/// [`ibv_dm::comp_mask`] says that `handle` counts.
pub const IBV_DM_MASK_HANDLE: u32 = 1;

/// Device memory.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_dm {
    /// The context it belongs to.
    pub context: *mut ibv_context,
    /// ibv_memcpy_to_dm(3): offset, source, bytes.
    pub memcpy_to_dm: Option<unsafe extern "C" fn(*mut ibv_dm, u64, *const c_void, usize) -> c_int>,
    /// ibv_memcpy_from_dm(3): target, source, offset, bytes.
    pub memcpy_from_dm: Option<unsafe extern "C" fn(*mut c_void, *mut ibv_dm, u64, usize) -> c_int>,
    /// [`IBV_DM_MASK_HANDLE`].
    pub comp_mask: u32,
    /// Number in the provider.
    pub handle: u32,
}

c_enum! {
    /// What ibv_advise_mr(3) advises.
    ibv_advise_mr_advice: c_uint {
        IBV_ADVISE_MR_ADVICE_PREFETCH = 0,
        IBV_ADVISE_MR_ADVICE_PREFETCH_WRITE = 1,
        IBV_ADVISE_MR_ADVICE_PREFETCH_NO_FAULT = 2,
    }
}

/// The flag of ibv_advise_mr(3): return when it is done.
pub const IBV_ADVISE_MR_FLAG_FLUSH: u32 = 1;

c_enum! {
    /// Types of shared receive queue.
    ibv_srq_type: c_uint {
        IBV_SRQT_BASIC = 0,
        IBV_SRQT_XRC = 1,
        IBV_SRQT_TM = 2,
    }
}

c_enum! {
    /// Fields of [`ibv_srq_init_attr_ex`] that count.
    ibv_srq_init_attr_mask: c_uint {
        IBV_SRQ_INIT_ATTR_TYPE = 1,
        IBV_SRQ_INIT_ATTR_PD = 1 << 1,
        IBV_SRQ_INIT_ATTR_XRCD = 1 << 2,
        IBV_SRQ_INIT_ATTR_CQ = 1 << 3,
        IBV_SRQ_INIT_ATTR_TM = 1 << 4,
    }
}

/// Tag matching of a shared receive queue.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_tm_cap {
    /// Most tags.
    pub max_num_tags: u32,
    /// Most operations under way.
    pub max_ops: u32,
}

/// How to create a shared receive queue, ibv_create_srq_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_srq_init_attr_ex {
    /// The application's word.
    pub srq_context: *mut c_void,
    /// Sizes.
    pub attr: ibv_srq_attr,
    /// [`ibv_srq_init_attr_mask`].
    pub comp_mask: u32,
    /// Its type.
    pub srq_type: ibv_srq_type,
    /// The protection domain.
    pub pd: *mut ibv_pd,
    /// The XRC domain, for [`IBV_SRQT_XRC`].
    pub xrcd: *mut ibv_xrcd,
    /// Where completions go, for [`IBV_SRQT_XRC`] and [`IBV_SRQT_TM`].
    pub cq: *mut ibv_cq,
    /// For [`IBV_SRQT_TM`].
    pub tm_cap: ibv_tm_cap,
}

c_enum! {
    /// Fields of [`ibv_xrcd_init_attr`] that count; both must.
    ibv_xrcd_init_attr_mask: c_uint {
        IBV_XRCD_INIT_ATTR_FD = 1,
        IBV_XRCD_INIT_ATTR_OFLAGS = 1 << 1,
    }
}

/// How to open an XRC domain, ibv_open_xrcd(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_xrcd_init_attr {
    /// [`ibv_xrcd_init_attr_mask`].
    pub comp_mask: u32,
    /// The file that names the domain, or -1.
    pub fd: c_int,
    /// `O_CREAT`, `O_EXCL`.
    pub oflags: c_int,
}

/// An XRC domain.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_xrcd {
    /// The context it belongs to.
    pub context: *mut ibv_context,
}

c_enum! {
    /// Fields of [`ibv_qp_open_attr`] that count.
    ibv_qp_open_attr_mask: c_uint {
        IBV_QP_OPEN_ATTR_NUM = 1,
        IBV_QP_OPEN_ATTR_XRCD = 1 << 1,
        IBV_QP_OPEN_ATTR_CONTEXT = 1 << 2,
        IBV_QP_OPEN_ATTR_TYPE = 1 << 3,
    }
}

/// Which queue pair to open, ibv_open_qp(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_qp_open_attr {
    /// [`ibv_qp_open_attr_mask`].
    pub comp_mask: u32,
    /// Its number.
    pub qp_num: u32,
    /// Its XRC domain.
    pub xrcd: *mut ibv_xrcd,
    /// The application's word.
    pub qp_context: *mut c_void,
    /// Its type.
    pub qp_type: ibv_qp_type,
}

/// The bit of [`ibv_values_ex::comp_mask`].
pub const IBV_VALUES_MASK_RAW_CLOCK: u32 = 1;

/// What a device says now, ibv_query_rt_values_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_values_ex {
    /// Asked for, and on return given: [`IBV_VALUES_MASK_RAW_CLOCK`].
    pub comp_mask: u32,
    /// The device's clock; of the fields only `tv_nsec` counts, in ticks.
    pub raw_clock: libc::timespec,
}

/// Enhanced connection establishment, ibv_query_ece(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_ece {
    /// Who defines the options.
    pub vendor_id: u32,
    /// What is offered.
    pub options: u32,
    /// Must be 0.
    pub comp_mask: u32,
}

c_enum! {
    /// Bits of [`ibv_odp_caps::general_caps`](super::ibv_odp_caps::general_caps).
    ibv_odp_general_caps: u64 {
        IBV_ODP_SUPPORT = 1,
        IBV_ODP_SUPPORT_IMPLICIT = 1 << 1,
    }
}

c_enum! {
    /// What may be done with memory that is paged on demand, by transport.
    ibv_odp_transport_cap_bits: c_uint {
        IBV_ODP_SUPPORT_SEND = 1,
        IBV_ODP_SUPPORT_RECV = 1 << 1,
        IBV_ODP_SUPPORT_WRITE = 1 << 2,
        IBV_ODP_SUPPORT_READ = 1 << 3,
        IBV_ODP_SUPPORT_ATOMIC = 1 << 4,
        IBV_ODP_SUPPORT_SRQ_RECV = 1 << 5,
    }
}

zero_default!(
    ibv_cq_init_attr_ex,
    ibv_td,
    ibv_parent_domain_init_attr,
    ibv_dm,
    ibv_srq_init_attr_ex,
    ibv_xrcd,
    ibv_qp_open_attr,
    ibv_values_ex
);
