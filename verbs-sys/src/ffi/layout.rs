//! The layout of 64-bit x86, checked at compile time: sizes and offsets as a C compiler gives them for
//! `infiniband/verbs.h` of rdma-core 44.

#![cfg(all(target_arch = "x86_64", target_pointer_width = "64"))]

use core::mem::{offset_of, size_of};

use super::*;

macro_rules! sizes {
    ($($name:ident $size:literal,)+) => {$(
        const _: () = assert!(size_of::<$name>() == $size, stringify!($name));
    )+};
}

macro_rules! offsets {
    ($($name:ident { $($($field:ident).+ $offset:literal,)+ })+) => {$($(
        const _: () = assert!(
            offset_of!($name, $($field).+) == $offset,
            concat!(stringify!($name), ".", stringify!($($field).+)),
        );
    )+)+};
}

sizes! {
    verbs_context 648,
    ibv_context 328,
    ibv_context_ops 256,
    ibv_device 664,
    ibv_qp 160,
    ibv_qp_ex 352,
    ibv_cq 128,
    ibv_cq_ex 288,
    ibv_wc 48,
    ibv_send_wr 128,
    ibv_recv_wr 32,
    ibv_sge 16,
    ibv_mr 48,
    ibv_srq 128,
    ibv_mw 32,
    ibv_ah 24,
    ibv_pd 16,
    ibv_comp_channel 16,
    ibv_qp_attr 144,
    ibv_qp_init_attr 64,
    ibv_qp_init_attr_ex 136,
    ibv_port_attr 52,
    ibv_device_attr 232,
    ibv_device_attr_ex 400,
    ibv_gid 16,
    ibv_gid_entry 32,
    ibv_global_route 24,
    ibv_grh 40,
    ibv_ah_attr 32,
    ibv_mw_bind_info 32,
    ibv_mw_bind 48,
    ibv_async_event 16,
    ibv_qp_cap 20,
    ibv_srq_attr 12,
    ibv_srq_init_attr 24,
    ibv_rx_hash_conf 24,
    ibv_cq_init_attr_ex 56,
    ibv_moderate_cq 4,
    ibv_modify_cq_attr 8,
    ibv_td_init_attr 4,
    ibv_td 8,
    ibv_parent_domain_init_attr 48,
    ibv_alloc_dm_attr 16,
    ibv_dm 32,
    ibv_tm_cap 8,
    ibv_srq_init_attr_ex 64,
    ibv_xrcd_init_attr 12,
    ibv_xrcd 8,
    ibv_qp_open_attr 32,
    ibv_values_ex 24,
    ibv_ece 12,
    ibv_poll_cq_attr 4,
    ibv_wc_tm_info 16,
    ibv_data_buf 16,
    ibv_query_device_ex_input 4,
}

offsets! {
    ibv_send_wr {
        next 8,
        sg_list 16,
        num_sge 24,
        opcode 28,
        send_flags 32,
        imm_data 36,
        wr 40,
        qp_type 72,
        extra 80,
    }
    ibv_wc {
        status 8,
        opcode 12,
        vendor_err 16,
        byte_len 20,
        imm_data 24,
        qp_num 28,
        src_qp 32,
        wc_flags 36,
        pkey_index 40,
        slid 42,
        sl 44,
        dlid_path_bits 45,
    }
    ibv_qp {
        handle 48,
        qp_num 52,
        state 56,
        qp_type 60,
        mutex 64,
        events_completed 152,
    }
    ibv_cq {
        channel 8,
        cq_context 16,
        cqe 28,
        mutex 32,
        cond 72,
        comp_events_completed 120,
        async_events_completed 124,
    }
    ibv_context_ops {
        alloc_mw 56,
        poll_cq 88,
        req_notify_cq 96,
        post_srq_recv 160,
        post_send 200,
        post_recv 208,
    }
    ibv_context {
        ops 8,
        cmd_fd 264,
        async_fd 268,
        num_comp_vectors 272,
        mutex 280,
        abi_compat 320,
    }
    verbs_context {
        query_port 0,
        advise_mr 8,
        alloc_null_mr 16,
        reg_dm_mr 56,
        alloc_dm 64,
        free_dm 72,
        alloc_parent_domain 112,
        dealloc_td 120,
        alloc_td 128,
        modify_cq 136,
        query_rt_values 192,
        create_cq_ex 200,
        priv_ 208,
        query_device_ex 216,
        open_qp 256,
        create_qp_ex 264,
        get_srq_num 272,
        create_srq_ex 280,
        open_xrcd 288,
        close_xrcd 296,
        sz 312,
        context 320,
    }
    ibv_device {
        node_type 16,
        name 24,
        dev_name 88,
        dev_path 152,
        ibdev_path 408,
    }
    ibv_mr {
        addr 16,
        length 24,
        handle 32,
        lkey 36,
        rkey 40,
    }
    ibv_qp_attr {
        qp_access_flags 32,
        cap 36,
        ah_attr 56,
        alt_ah_attr 88,
        pkey_index 120,
        max_rd_atomic 126,
        port_num 129,
        rnr_retry 132,
        alt_timeout 134,
        rate_limit 136,
    }
    ibv_qp_init_attr {
        cap 32,
        qp_type 52,
        sq_sig_all 56,
    }
    ibv_qp_init_attr_ex {
        comp_mask 60,
        rx_hash_conf 96,
        send_ops_flags 128,
    }
    ibv_device_attr {
        max_qp 108,
        atomic_cap 164,
        max_pkeys 224,
        phys_port_cnt 227,
    }
    ibv_device_attr_ex {
        odp_caps 240,
        completion_timestamp_mask 264,
        tso_caps 288,
        max_wq_type_rq 328,
        tm_caps 348,
        max_dm_size 376,
        phys_port_cnt_ex 396,
    }
    ibv_port_attr {
        gid_tbl_len 12,
        pkey_tbl_len 32,
        link_layer 46,
        flags 47,
        port_cap_flags2 48,
    }
    ibv_ah_attr {
        dlid 24,
        is_global 29,
        port_num 30,
    }
    ibv_global_route {
        sgid_index 20,
    }
    ibv_cq_ex {
        comp_mask 128,
        status 132,
        wr_id 136,
        start_poll 144,
        next_poll 152,
        end_poll 160,
        read_opcode 168,
        read_completion_wallclock_ns 280,
    }
    ibv_qp_ex {
        comp_mask 160,
        wr_id 168,
        wr_flags 176,
        wr_atomic_cmp_swp 184,
        wr_send 240,
        wr_set_ud_addr 272,
        wr_set_sge_list 312,
        wr_start 320,
        wr_complete 328,
        wr_abort 336,
        wr_atomic_write 344,
    }
    ibv_cq_init_attr_ex {
        cq_context 8,
        comp_vector 24,
        wc_flags 32,
        comp_mask 40,
        flags 44,
        parent_domain 48,
    }
    ibv_modify_cq_attr {
        moderate 4,
    }
    ibv_parent_domain_init_attr {
        td 8,
        comp_mask 16,
        alloc 24,
        pd_context 40,
    }
    ibv_alloc_dm_attr {
        log_align_req 8,
    }
    ibv_dm {
        memcpy_to_dm 8,
        comp_mask 24,
        handle 28,
    }
    ibv_srq_init_attr_ex {
        attr 8,
        comp_mask 20,
        srq_type 24,
        pd 32,
        xrcd 40,
        cq 48,
        tm_cap 56,
    }
    ibv_xrcd_init_attr {
        fd 4,
        oflags 8,
    }
    ibv_qp_open_attr {
        xrcd 8,
        qp_type 24,
    }
    ibv_values_ex {
        raw_clock 8,
    }
    ibv_recv_wr {
        next 8,
        sg_list 16,
        num_sge 24,
    }
    ibv_sge {
        length 8,
        lkey 12,
    }
    ibv_comp_channel {
        fd 8,
        refcnt 12,
    }
    ibv_srq {
        mutex 32,
        events_completed 120,
    }
    ibv_mw {
        rkey 16,
        type_ 24,
    }
    ibv_async_event {
        event_type 8,
    }
    ibv_gid_entry {
        gid_index 16,
        ndev_ifindex 28,
    }
    ibv_send_wr_rdma {
        rkey 8,
    }
    ibv_send_wr_atomic {
        compare_add 8,
        swap 16,
        rkey 24,
    }
    ibv_send_wr_ud {
        remote_qpn 8,
        remote_qkey 12,
    }
}
