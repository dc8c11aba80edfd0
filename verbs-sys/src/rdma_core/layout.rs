//! Our structures against those of `ibverbs-sys`, checked at compile time on every platform.

use core::mem::{align_of, offset_of, size_of};

use ibverbs_sys as sys;

use crate::ffi;

macro_rules! same_size {
    ($($name:ident,)+) => {$(
        const _: () = assert!(size_of::<ffi::$name>() == size_of::<sys::$name>(), stringify!($name));
        const _: () =
            assert!(align_of::<ffi::$name>() == align_of::<sys::$name>(), stringify!($name));
    )+};
}

// These have grown at their end in later versions; ours is a beginning of them, and says how long it
// is wherever the other side would write.
const _: () = assert!(size_of::<ffi::ibv_qp_ex>() <= size_of::<sys::ibv_qp_ex>());
const _: () = assert!(size_of::<ffi::ibv_port_attr>() <= size_of::<sys::ibv_port_attr>());

macro_rules! same_offsets {
    ($($name:ident { $($field:ident,)+ })+) => {$($(
        const _: () = assert!(
            offset_of!(ffi::$name, $field) == offset_of!(sys::$name, $field),
            concat!(stringify!($name), ".", stringify!($field)),
        );
    )+)+};
}

same_size! {
    ibv_context,
    ibv_context_ops,
    ibv_device,
    ibv_qp,
    ibv_cq,
    ibv_cq_ex,
    ibv_wc,
    ibv_send_wr,
    ibv_recv_wr,
    ibv_sge,
    ibv_mr,
    ibv_srq,
    ibv_mw,
    ibv_ah,
    ibv_pd,
    ibv_comp_channel,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_qp_init_attr_ex,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_gid,
    ibv_gid_entry,
    ibv_global_route,
    ibv_ah_attr,
    ibv_mw_bind_info,
    ibv_mw_bind,
    ibv_async_event,
    ibv_qp_cap,
    ibv_srq_attr,
    ibv_srq_init_attr,
    ibv_rx_hash_conf,
}

same_offsets! {
    ibv_send_wr {
        next,
        sg_list,
        num_sge,
        opcode,
        send_flags,
        wr,
        qp_type,
    }
    ibv_wc {
        imm_data,
        qp_num,
        src_qp,
        wc_flags,
        pkey_index,
        slid,
        sl,
        dlid_path_bits,
    }
    ibv_qp {
        handle,
        qp_num,
        state,
        qp_type,
        mutex,
        events_completed,
    }
    ibv_cq {
        channel,
        cq_context,
        cqe,
        mutex,
        cond,
        comp_events_completed,
        async_events_completed,
    }
    ibv_context_ops {
        alloc_mw,
        poll_cq,
        req_notify_cq,
        post_srq_recv,
        post_send,
        post_recv,
    }
    ibv_context {
        ops,
        cmd_fd,
        async_fd,
        num_comp_vectors,
        mutex,
        abi_compat,
    }
    ibv_device {
        node_type,
        name,
        dev_name,
        dev_path,
        ibdev_path,
    }
    ibv_mr {
        addr,
        length,
        handle,
        lkey,
        rkey,
    }
    ibv_qp_attr {
        qp_access_flags,
        cap,
        ah_attr,
        alt_ah_attr,
        pkey_index,
        max_rd_atomic,
        port_num,
        rnr_retry,
        alt_timeout,
        rate_limit,
    }
    ibv_qp_init_attr {
        cap,
        qp_type,
        sq_sig_all,
    }
    ibv_qp_init_attr_ex {
        comp_mask,
        rx_hash_conf,
        send_ops_flags,
    }
    ibv_device_attr {
        max_qp,
        atomic_cap,
        max_pkeys,
        phys_port_cnt,
    }
    ibv_device_attr_ex {
        odp_caps,
        completion_timestamp_mask,
        tso_caps,
        max_wq_type_rq,
        tm_caps,
        max_dm_size,
        phys_port_cnt_ex,
    }
    ibv_port_attr {
        gid_tbl_len,
        pkey_tbl_len,
        link_layer,
        flags,
        port_cap_flags2,
    }
    ibv_ah_attr {
        dlid,
        is_global,
        port_num,
    }
    ibv_global_route {
        sgid_index,
    }
    ibv_cq_ex {
        comp_mask,
        status,
        wr_id,
        start_poll,
    }
    ibv_qp_ex {
        comp_mask,
        wr_flags,
        wr_atomic_cmp_swp,
        wr_start,
        wr_atomic_write,
    }
    ibv_recv_wr {
        next,
        sg_list,
        num_sge,
    }
    ibv_sge {
        length,
        lkey,
    }
    ibv_comp_channel {
        fd,
        refcnt,
    }
    ibv_srq {
        mutex,
        events_completed,
    }
    ibv_mw {
        rkey,
        type_,
    }
    ibv_async_event {
        event_type,
    }
    ibv_gid_entry {
        gid_index,
        ndev_ifindex,
    }
}
