//! Devices, contexts and their tables of functions: ibv_get_device_list(3), ibv_open_device(3).

use core::ffi::{c_char, c_int, c_uint, c_void};

use super::{
    ibv_advise_mr_advice, ibv_alloc_dm_attr, ibv_cq, ibv_cq_ex, ibv_cq_init_attr_ex,
    ibv_device_attr_ex, ibv_dm, ibv_modify_cq_attr, ibv_mr, ibv_mw, ibv_mw_bind, ibv_mw_type,
    ibv_node_type, ibv_parent_domain_init_attr, ibv_pd, ibv_port_attr, ibv_qp, ibv_qp_init_attr_ex,
    ibv_qp_open_attr, ibv_query_device_ex_input, ibv_recv_wr, ibv_send_wr, ibv_sge, ibv_srq,
    ibv_srq_init_attr_ex, ibv_td, ibv_td_init_attr, ibv_transport_type, ibv_values_ex, ibv_wc,
    ibv_xrcd, ibv_xrcd_init_attr,
};

/// Bytes of [`ibv_device::name`].
pub const IBV_SYSFS_NAME_MAX: usize = 64;
/// Bytes of [`ibv_device::dev_path`].
pub const IBV_SYSFS_PATH_MAX: usize = 256;

/// Obsolete slots at the start of [`ibv_device`].
#[repr(C)]
#[derive(Clone, Copy)]
pub struct _ibv_device_ops {
    /// Unused.
    pub _dummy1: ibv_unused_fn,
    /// Unused.
    pub _dummy2: ibv_unused_fn,
}

/// A device that can be opened.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_device {
    /// Obsolete.
    pub _ops: _ibv_device_ops,
    /// Kind of node.
    pub node_type: ibv_node_type,
    /// What it speaks.
    pub transport_type: ibv_transport_type,
    /// Name, e.g. `mlx5_0`, ended by NUL.
    pub name: [c_char; IBV_SYSFS_NAME_MAX],
    /// Name of the character device, e.g. `uverbs0`.
    pub dev_name: [c_char; IBV_SYSFS_NAME_MAX],
    /// Path of the character device in sysfs.
    pub dev_path: [c_char; IBV_SYSFS_PATH_MAX],
    /// Path of the device in sysfs.
    pub ibdev_path: [c_char; IBV_SYSFS_PATH_MAX],
}

/// A slot whose signature nobody here needs.
pub type ibv_unused_fn = Option<unsafe extern "C" fn()>;

/// The functions of a context that libibverbs calls inline; `_compat_` slots are never called.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context_ops {
    /// Unused.
    pub _compat_query_device: ibv_unused_fn,
    /// Unused.
    pub _compat_query_port: ibv_unused_fn,
    /// Unused.
    pub _compat_alloc_pd: ibv_unused_fn,
    /// Unused.
    pub _compat_dealloc_pd: ibv_unused_fn,
    /// Unused.
    pub _compat_reg_mr: ibv_unused_fn,
    /// Unused.
    pub _compat_rereg_mr: ibv_unused_fn,
    /// Unused.
    pub _compat_dereg_mr: ibv_unused_fn,
    /// ibv_alloc_mw(3).
    pub alloc_mw: Option<unsafe extern "C" fn(*mut ibv_pd, ibv_mw_type) -> *mut ibv_mw>,
    /// ibv_bind_mw(3).
    pub bind_mw: Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_mw, *mut ibv_mw_bind) -> c_int>,
    /// ibv_dealloc_mw(3).
    pub dealloc_mw: Option<unsafe extern "C" fn(*mut ibv_mw) -> c_int>,
    /// Unused.
    pub _compat_create_cq: ibv_unused_fn,
    /// ibv_poll_cq(3): how many completions were written, negative on failure.
    pub poll_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int, *mut ibv_wc) -> c_int>,
    /// ibv_req_notify_cq(3).
    pub req_notify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, c_int) -> c_int>,
    /// Unused.
    pub _compat_cq_event: ibv_unused_fn,
    /// Unused.
    pub _compat_resize_cq: ibv_unused_fn,
    /// Unused.
    pub _compat_destroy_cq: ibv_unused_fn,
    /// Unused.
    pub _compat_create_srq: ibv_unused_fn,
    /// Unused.
    pub _compat_modify_srq: ibv_unused_fn,
    /// Unused.
    pub _compat_query_srq: ibv_unused_fn,
    /// Unused.
    pub _compat_destroy_srq: ibv_unused_fn,
    /// ibv_post_srq_recv(3).
    pub post_srq_recv: Option<
        unsafe extern "C" fn(*mut ibv_srq, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int,
    >,
    /// Unused.
    pub _compat_create_qp: ibv_unused_fn,
    /// Unused.
    pub _compat_query_qp: ibv_unused_fn,
    /// Unused.
    pub _compat_modify_qp: ibv_unused_fn,
    /// Unused.
    pub _compat_destroy_qp: ibv_unused_fn,
    /// ibv_post_send(3).
    pub post_send:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_send_wr, *mut *mut ibv_send_wr) -> c_int>,
    /// ibv_post_recv(3).
    pub post_recv:
        Option<unsafe extern "C" fn(*mut ibv_qp, *mut ibv_recv_wr, *mut *mut ibv_recv_wr) -> c_int>,
    /// Unused.
    pub _compat_create_ah: ibv_unused_fn,
    /// Unused.
    pub _compat_destroy_ah: ibv_unused_fn,
    /// Unused.
    pub _compat_attach_mcast: ibv_unused_fn,
    /// Unused.
    pub _compat_detach_mcast: ibv_unused_fn,
    /// Unused.
    pub _compat_async_event: ibv_unused_fn,
}

/// An open device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_context {
    /// The device.
    pub device: *mut ibv_device,
    /// The functions called inline.
    pub ops: ibv_context_ops,
    /// The kernel's file, or -1.
    pub cmd_fd: c_int,
    /// Readable while an asynchronous event waits.
    pub async_fd: c_int,
    /// Number of completion vectors.
    pub num_comp_vectors: c_int,
    /// The library's.
    pub mutex: libc::pthread_mutex_t,
    /// All ones if the context is inside a [`verbs_context`].
    pub abi_compat: *mut c_void,
}

/// An open device with the newer functions. It grows at the front; `context` is always last.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct verbs_context {
    /// ibv_query_port(3); the last argument is the size of the structure in bytes.
    pub query_port:
        Option<unsafe extern "C" fn(*mut ibv_context, u8, *mut ibv_port_attr, usize) -> c_int>,
    /// ibv_advise_mr(3).
    pub advise_mr: Option<
        unsafe extern "C" fn(*mut ibv_pd, ibv_advise_mr_advice, u32, *mut ibv_sge, u32) -> c_int,
    >,
    /// ibv_alloc_null_mr(3).
    pub alloc_null_mr: Option<unsafe extern "C" fn(*mut ibv_pd) -> *mut ibv_mr>,
    /// ibv_read_counters(3).
    pub read_counters: ibv_unused_fn,
    /// ibv_attach_counters_point_flow(3).
    pub attach_counters_point_flow: ibv_unused_fn,
    /// ibv_create_counters(3).
    pub create_counters: ibv_unused_fn,
    /// ibv_destroy_counters(3).
    pub destroy_counters: ibv_unused_fn,
    /// ibv_reg_dm_mr(3).
    pub reg_dm_mr:
        Option<unsafe extern "C" fn(*mut ibv_pd, *mut ibv_dm, u64, usize, c_uint) -> *mut ibv_mr>,
    /// ibv_alloc_dm(3).
    pub alloc_dm:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_alloc_dm_attr) -> *mut ibv_dm>,
    /// ibv_free_dm(3).
    pub free_dm: Option<unsafe extern "C" fn(*mut ibv_dm) -> c_int>,
    /// ibv_modify_flow_action_esp(3).
    pub modify_flow_action_esp: ibv_unused_fn,
    /// ibv_destroy_flow_action(3).
    pub destroy_flow_action: ibv_unused_fn,
    /// ibv_create_flow_action_esp(3).
    pub create_flow_action_esp: ibv_unused_fn,
    /// ibv_modify_qp_rate_limit(3).
    pub modify_qp_rate_limit: ibv_unused_fn,
    /// ibv_alloc_parent_domain(3).
    pub alloc_parent_domain: Option<
        unsafe extern "C" fn(*mut ibv_context, *mut ibv_parent_domain_init_attr) -> *mut ibv_pd,
    >,
    /// ibv_dealloc_td(3).
    pub dealloc_td: Option<unsafe extern "C" fn(*mut ibv_td) -> c_int>,
    /// ibv_alloc_td(3).
    pub alloc_td:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_td_init_attr) -> *mut ibv_td>,
    /// ibv_modify_cq(3).
    pub modify_cq: Option<unsafe extern "C" fn(*mut ibv_cq, *mut ibv_modify_cq_attr) -> c_int>,
    /// ibv_post_srq_ops(3).
    pub post_srq_ops: ibv_unused_fn,
    /// ibv_destroy_rwq_ind_table(3).
    pub destroy_rwq_ind_table: ibv_unused_fn,
    /// ibv_create_rwq_ind_table(3).
    pub create_rwq_ind_table: ibv_unused_fn,
    /// ibv_destroy_wq(3).
    pub destroy_wq: ibv_unused_fn,
    /// ibv_modify_wq(3).
    pub modify_wq: ibv_unused_fn,
    /// ibv_create_wq(3).
    pub create_wq: ibv_unused_fn,
    /// ibv_query_rt_values_ex(3).
    pub query_rt_values:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_values_ex) -> c_int>,
    /// ibv_create_cq_ex(3).
    pub create_cq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_cq_init_attr_ex) -> *mut ibv_cq_ex>,
    /// The library's.
    pub priv_: *mut c_void,
    /// ibv_query_device_ex(3); the last argument is the size of the structure in bytes.
    pub query_device_ex: Option<
        unsafe extern "C" fn(
            *mut ibv_context,
            *const ibv_query_device_ex_input,
            *mut ibv_device_attr_ex,
            usize,
        ) -> c_int,
    >,
    /// ibv_destroy_flow(3).
    pub ibv_destroy_flow: ibv_unused_fn,
    /// Place of an older slot.
    pub ABI_placeholder2: ibv_unused_fn,
    /// ibv_create_flow(3).
    pub ibv_create_flow: ibv_unused_fn,
    /// Place of an older slot.
    pub ABI_placeholder1: ibv_unused_fn,
    /// ibv_open_qp(3).
    pub open_qp:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_open_attr) -> *mut ibv_qp>,
    /// ibv_create_qp_ex(3).
    pub create_qp_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_qp_init_attr_ex) -> *mut ibv_qp>,
    /// ibv_get_srq_num(3).
    pub get_srq_num: Option<unsafe extern "C" fn(*mut ibv_srq, *mut u32) -> c_int>,
    /// ibv_create_srq_ex(3).
    pub create_srq_ex:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_srq_init_attr_ex) -> *mut ibv_srq>,
    /// ibv_open_xrcd(3).
    pub open_xrcd:
        Option<unsafe extern "C" fn(*mut ibv_context, *mut ibv_xrcd_init_attr) -> *mut ibv_xrcd>,
    /// ibv_close_xrcd(3).
    pub close_xrcd: Option<unsafe extern "C" fn(*mut ibv_xrcd) -> c_int>,
    /// Place of an older field.
    pub _ABI_placeholder3: u64,
    /// Bytes of this structure as the provider knows it; must stand right before `context`.
    pub sz: usize,
    /// The classic context.
    pub context: ibv_context,
}

/// Value of [`ibv_context::abi_compat`] in a context that is inside a [`verbs_context`].
pub const __VERBS_ABI_IS_EXTENDED: *mut c_void = usize::MAX as *mut c_void;

zero_default!(ibv_device, ibv_context_ops, ibv_context, verbs_context);
