//! What is there because programs, or the drivers that they load, name it: it does nothing, and says so.

use core::ffi::{c_int, c_void};
use core::ptr;

use super::calls::set_errno;

/// Calls that give an `int`: what they ask for is not supported.
macro_rules! not_supported {
    ($($name:ident,)+) => {$(
        /// Not supported: `EOPNOTSUPP`.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            libc::EOPNOTSUPP
        }
    )+};
}

/// Calls that give a pointer.
macro_rules! none {
    ($($name:ident,)+) => {$(
        /// Not supported: null and `EOPNOTSUPP`.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> *mut c_void {
            set_errno(libc::EOPNOTSUPP);
            ptr::null_mut()
        }
    )+};
}

/// Calls that have nothing to do.
macro_rules! nothing {
    ($($name:ident,)+) => {$(
        /// Does nothing.
        #[unsafe(no_mangle)]
        pub extern "C" fn $name() -> c_int {
            0
        }
    )+};
}

// Of applications and of the connection manager.
nothing! {
    ibv_copy_ah_attr_from_kern,
    ibv_copy_path_rec_from_kern,
    ibv_copy_path_rec_to_kern,
    ibv_copy_qp_attr_from_kern,
    ibv_dofork_range,
    ibv_dontfork_range,
}

// Of drivers for real devices: none finds its device through this library.
not_supported! {
    __ioctl_final_num_attrs,
    execute_ioctl,
    ibv_cmd_advise_mr,
    ibv_cmd_alloc_dm,
    ibv_cmd_alloc_mw,
    ibv_cmd_alloc_pd,
    ibv_cmd_attach_mcast,
    ibv_cmd_close_xrcd,
    ibv_cmd_create_ah,
    ibv_cmd_create_counters,
    ibv_cmd_create_cq,
    ibv_cmd_create_cq_ex,
    ibv_cmd_create_cq_ex2,
    ibv_cmd_create_flow,
    ibv_cmd_create_flow_action_esp,
    ibv_cmd_create_qp,
    ibv_cmd_create_qp_ex,
    ibv_cmd_create_qp_ex2,
    ibv_cmd_create_rwq_ind_table,
    ibv_cmd_create_srq,
    ibv_cmd_create_srq_ex,
    ibv_cmd_create_wq,
    ibv_cmd_dealloc_mw,
    ibv_cmd_dealloc_pd,
    ibv_cmd_dereg_mr,
    ibv_cmd_destroy_ah,
    ibv_cmd_destroy_counters,
    ibv_cmd_destroy_cq,
    ibv_cmd_destroy_flow,
    ibv_cmd_destroy_flow_action,
    ibv_cmd_destroy_qp,
    ibv_cmd_destroy_rwq_ind_table,
    ibv_cmd_destroy_srq,
    ibv_cmd_destroy_wq,
    ibv_cmd_detach_mcast,
    ibv_cmd_free_dm,
    ibv_cmd_get_context,
    ibv_cmd_modify_cq,
    ibv_cmd_modify_flow_action_esp,
    ibv_cmd_modify_qp,
    ibv_cmd_modify_qp_ex,
    ibv_cmd_modify_srq,
    ibv_cmd_modify_wq,
    ibv_cmd_open_qp,
    ibv_cmd_open_xrcd,
    ibv_cmd_poll_cq,
    ibv_cmd_post_recv,
    ibv_cmd_post_send,
    ibv_cmd_post_srq_recv,
    ibv_cmd_query_context,
    ibv_cmd_query_device_any,
    ibv_cmd_query_mr,
    ibv_cmd_query_port,
    ibv_cmd_query_qp,
    ibv_cmd_query_srq,
    ibv_cmd_read_counters,
    ibv_cmd_reg_dm_mr,
    ibv_cmd_reg_dmabuf_mr,
    ibv_cmd_reg_mr,
    ibv_cmd_req_notify_cq,
    ibv_cmd_rereg_mr,
    ibv_cmd_resize_cq,
    ibv_read_ibdev_sysfs_file,
}

none! {
    _verbs_init_and_alloc_context,
    verbs_open_device,
}

nothing! {
    __verbs_log,
    verbs_allow_disassociate_destroy,
    verbs_init_cq,
    verbs_register_driver_34,
    verbs_set_ops,
    verbs_uninit_context,
}
