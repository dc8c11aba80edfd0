//! What a device and its ports say of themselves: ibv_query_device(3), ibv_query_port(3),
//! ibv_query_gid(3).

use core::ffi::{c_char, c_int, c_uint};

/// A global identifier: 128 bits in network byte order, on RoCE an IPv6 or IPv4-mapped address.
#[repr(C)]
#[derive(Clone, Copy)]
pub union ibv_gid {
    /// The 16 bytes as they travel.
    pub raw: [u8; 16],
    /// The same as two numbers.
    pub global: ibv_gid_global,
}

/// The two halves of an [`ibv_gid`].
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_gid_global {
    /// Upper half, network byte order.
    pub subnet_prefix: u64,
    /// Lower half, network byte order.
    pub interface_id: u64,
}

c_enum! {
    /// Kinds of GID as the kernel reports them in [`ibv_gid_entry::gid_type`].
    ibv_gid_type: c_uint {
        IBV_GID_TYPE_IB = 0,
        IBV_GID_TYPE_ROCE_V1 = 1,
        IBV_GID_TYPE_ROCE_V2 = 2,
    }
}

/// A row of a port's GID table, ibv_query_gid_ex(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_gid_entry {
    /// The identifier.
    pub gid: ibv_gid,
    /// Its index in the port's table.
    pub gid_index: u32,
    /// The port, counted from 1.
    pub port_num: u32,
    /// An [`ibv_gid_type`].
    pub gid_type: u32,
    /// Index of the network interface it belongs to, 0 for none.
    pub ndev_ifindex: u32,
}

c_enum! {
    /// What kind of node a device is. `IBV_NODE_UNKNOWN` is -1, so this one is signed.
    ibv_node_type: c_int {
        IBV_NODE_UNKNOWN = -1,
        IBV_NODE_CA = 1,
        IBV_NODE_SWITCH = 2,
        IBV_NODE_ROUTER = 3,
        IBV_NODE_RNIC = 4,
        IBV_NODE_USNIC = 5,
        IBV_NODE_USNIC_UDP = 6,
        IBV_NODE_UNSPECIFIED = 7,
    }
}

c_enum! {
    /// What a device speaks. `IBV_TRANSPORT_UNKNOWN` is -1, so this one is signed.
    ibv_transport_type: c_int {
        IBV_TRANSPORT_UNKNOWN = -1,
        /// InfiniBand, and RoCE with it.
        IBV_TRANSPORT_IB = 0,
        IBV_TRANSPORT_IWARP = 1,
        IBV_TRANSPORT_USNIC = 2,
        IBV_TRANSPORT_USNIC_UDP = 3,
        IBV_TRANSPORT_UNSPECIFIED = 4,
    }
}

c_enum! {
    /// Bits of [`ibv_device_attr::device_cap_flags`].
    ibv_device_cap_flags: c_uint {
        IBV_DEVICE_RESIZE_MAX_WR = 1,
        IBV_DEVICE_BAD_PKEY_CNTR = 1 << 1,
        IBV_DEVICE_BAD_QKEY_CNTR = 1 << 2,
        IBV_DEVICE_RAW_MULTI = 1 << 3,
        IBV_DEVICE_AUTO_PATH_MIG = 1 << 4,
        IBV_DEVICE_CHANGE_PHY_PORT = 1 << 5,
        IBV_DEVICE_UD_AV_PORT_ENFORCE = 1 << 6,
        IBV_DEVICE_CURR_QP_STATE_MOD = 1 << 7,
        IBV_DEVICE_SHUTDOWN_PORT = 1 << 8,
        IBV_DEVICE_INIT_TYPE = 1 << 9,
        IBV_DEVICE_PORT_ACTIVE_EVENT = 1 << 10,
        IBV_DEVICE_SYS_IMAGE_GUID = 1 << 11,
        IBV_DEVICE_RC_RNR_NAK_GEN = 1 << 12,
        IBV_DEVICE_SRQ_RESIZE = 1 << 13,
        IBV_DEVICE_N_NOTIFY_CQ = 1 << 14,
        IBV_DEVICE_MEM_WINDOW = 1 << 17,
        IBV_DEVICE_UD_IP_CSUM = 1 << 18,
        IBV_DEVICE_XRC = 1 << 20,
        IBV_DEVICE_MEM_MGT_EXTENSIONS = 1 << 21,
        IBV_DEVICE_MEM_WINDOW_TYPE_2A = 1 << 23,
        IBV_DEVICE_MEM_WINDOW_TYPE_2B = 1 << 24,
        IBV_DEVICE_RC_IP_CSUM = 1 << 25,
        IBV_DEVICE_RAW_IP_CSUM = 1 << 26,
        IBV_DEVICE_MANAGED_FLOW_STEERING = 1 << 29,
    }
}

c_enum! {
    /// How far atomics of a device are atomic.
    ibv_atomic_cap: c_uint {
        /// There are none.
        IBV_ATOMIC_NONE = 0,
        /// Among operations of one device.
        IBV_ATOMIC_HCA = 1,
        /// Also against the processor's.
        IBV_ATOMIC_GLOB = 2,
    }
}

/// Capabilities and limits of a device, ibv_query_device(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_device_attr {
    /// Firmware version, text ended by NUL.
    pub fw_ver: [c_char; 64],
    /// GUID of the node, network byte order.
    pub node_guid: u64,
    /// GUID of the system, network byte order.
    pub sys_image_guid: u64,
    /// Largest region, bytes.
    pub max_mr_size: u64,
    /// Supported page sizes, a bit for each power of two.
    pub page_size_cap: u64,
    /// Vendor, IEEE number.
    pub vendor_id: u32,
    /// Vendor's number of the part.
    pub vendor_part_id: u32,
    /// Vendor's number of the version.
    pub hw_ver: u32,
    /// Most queue pairs.
    pub max_qp: c_int,
    /// Most outstanding requests in a queue.
    pub max_qp_wr: c_int,
    /// [`ibv_device_cap_flags`].
    pub device_cap_flags: c_uint,
    /// Most scatter/gather elements of a request.
    pub max_sge: c_int,
    /// Most scatter/gather elements of a READ on an iWARP device.
    pub max_sge_rd: c_int,
    /// Most completion queues.
    pub max_cq: c_int,
    /// Most entries of a completion queue.
    pub max_cqe: c_int,
    /// Most memory regions.
    pub max_mr: c_int,
    /// Most protection domains.
    pub max_pd: c_int,
    /// Most READs and atomics a queue pair can have outstanding as target.
    pub max_qp_rd_atom: c_int,
    /// The same of an end-to-end context.
    pub max_ee_rd_atom: c_int,
    /// Most READs and atomics the device can have outstanding as target.
    pub max_res_rd_atom: c_int,
    /// Most READs and atomics a queue pair can have outstanding as initiator.
    pub max_qp_init_rd_atom: c_int,
    /// The same of an end-to-end context.
    pub max_ee_init_rd_atom: c_int,
    /// How far atomics are atomic.
    pub atomic_cap: ibv_atomic_cap,
    /// Most end-to-end contexts.
    pub max_ee: c_int,
    /// Most reliable datagram domains.
    pub max_rdd: c_int,
    /// Most memory windows.
    pub max_mw: c_int,
    /// Most raw IPv6 datagram queue pairs.
    pub max_raw_ipv6_qp: c_int,
    /// Most raw Ethertype datagram queue pairs.
    pub max_raw_ethy_qp: c_int,
    /// Most multicast groups.
    pub max_mcast_grp: c_int,
    /// Most queue pairs of a multicast group.
    pub max_mcast_qp_attach: c_int,
    /// Most attachments of queue pairs to multicast groups.
    pub max_total_mcast_qp_attach: c_int,
    /// Most address handles.
    pub max_ah: c_int,
    /// Most fast memory regions.
    pub max_fmr: c_int,
    /// Most remappings of a fast memory region.
    pub max_map_per_fmr: c_int,
    /// Most shared receive queues.
    pub max_srq: c_int,
    /// Most outstanding requests of a shared receive queue.
    pub max_srq_wr: c_int,
    /// Most scatter elements of a request to a shared receive queue.
    pub max_srq_sge: c_int,
    /// Most partitions.
    pub max_pkeys: u16,
    /// Delay of acknowledgements, 4.096 us times two to this power.
    pub local_ca_ack_delay: u8,
    /// Number of physical ports.
    pub phys_port_cnt: u8,
}

/// On-demand paging support, a set of bits for each transport.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_odp_caps {
    /// Bit 0: supported; bit 1: implicit regions too.
    pub general_caps: u64,
    /// For reliable connections: bit 0 SEND, 1 RECV, 2 WRITE, 3 READ, 4 atomics, 5 shared RECV.
    pub rc_odp_caps: u32,
    /// For unreliable connections.
    pub uc_odp_caps: u32,
    /// For datagrams.
    pub ud_odp_caps: u32,
}

/// Segmentation offload.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_tso_caps {
    /// Most bytes to segment, 0 for no support.
    pub max_tso: u32,
    /// Bit for each supported queue pair type.
    pub supported_qpts: u32,
}

/// Receive-side scaling.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_rss_caps {
    /// Bit for each supported queue pair type.
    pub supported_qpts: u32,
    /// Most indirection tables.
    pub max_rwq_indirection_tables: u32,
    /// Most entries of an indirection table.
    pub max_rwq_indirection_table_size: u32,
    /// Fields that can be hashed.
    pub rx_hash_fields_mask: u64,
    /// Hash functions.
    pub rx_hash_function: u8,
}

/// Rate limits of a queue pair.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_packet_pacing_caps {
    /// Lowest rate, kbit/s.
    pub qp_rate_limit_min: u32,
    /// Highest rate, kbit/s.
    pub qp_rate_limit_max: u32,
    /// Bit for each supported queue pair type.
    pub supported_qpts: u32,
}

/// Tag matching.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_tm_caps {
    /// Largest header of a rendezvous request, bytes.
    pub max_rndv_hdr_size: u32,
    /// Most tagged buffers in a list.
    pub max_num_tags: u32,
    /// Bit 0: on reliable connections.
    pub flags: u32,
    /// Most outstanding list operations.
    pub max_ops: u32,
    /// Most scatter elements of a tagged buffer.
    pub max_sge: u32,
}

/// Moderation of completion events.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_cq_moderation_caps {
    /// Most completions to wait for.
    pub max_cq_count: u16,
    /// Longest wait, us.
    pub max_cq_period: u16,
}

/// PCI atomics: bit 0 for 4 bytes, bit 1 for 8, bit 2 for 16.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_pci_atomic_caps {
    /// Sizes of fetch-and-add.
    pub fetch_add: u16,
    /// Sizes of swap.
    pub swap: u16,
    /// Sizes of compare-and-swap.
    pub compare_swap: u16,
}

/// Input of ibv_query_device_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct ibv_query_device_ex_input {
    /// Must be 0.
    pub comp_mask: u32,
}

/// Extended capabilities of a device, ibv_query_device_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_device_attr_ex {
    /// What ibv_query_device(3) gives.
    pub orig_attr: ibv_device_attr,
    /// Must be 0.
    pub comp_mask: u32,
    /// On-demand paging.
    pub odp_caps: ibv_odp_caps,
    /// Valid bits of a completion's time stamp, 0 for none.
    pub completion_timestamp_mask: u64,
    /// Frequency of the device's clock, kHz.
    pub hca_core_clock: u64,
    /// [`ibv_device_cap_flags`] and bits above the lowest 32.
    pub device_cap_flags_ex: u64,
    /// Segmentation offload.
    pub tso_caps: ibv_tso_caps,
    /// Receive-side scaling.
    pub rss_caps: ibv_rss_caps,
    /// Most receive work queues.
    pub max_wq_type_rq: u32,
    /// Rate limits.
    pub packet_pacing_caps: ibv_packet_pacing_caps,
    /// Abilities of raw packet queue pairs.
    pub raw_packet_caps: u32,
    /// Tag matching.
    pub tm_caps: ibv_tm_caps,
    /// Event moderation.
    pub cq_mod_caps: ibv_cq_moderation_caps,
    /// Device memory, bytes.
    pub max_dm_size: u64,
    /// PCI atomics.
    pub pci_atomic_caps: ibv_pci_atomic_caps,
    /// On-demand paging of XRC, bits as in [`ibv_odp_caps::rc_odp_caps`].
    pub xrc_odp_caps: u32,
    /// Number of physical ports, when it does not fit 8 bits.
    pub phys_port_cnt_ex: u32,
}

c_enum! {
    /// Size of a packet's payload, as verbs encode it.
    ibv_mtu: c_uint {
        IBV_MTU_256 = 1,
        IBV_MTU_512 = 2,
        IBV_MTU_1024 = 3,
        IBV_MTU_2048 = 4,
        IBV_MTU_4096 = 5,
    }
}

c_enum! {
    /// State of a port.
    ibv_port_state: c_uint {
        IBV_PORT_NOP = 0,
        IBV_PORT_DOWN = 1,
        IBV_PORT_INIT = 2,
        IBV_PORT_ARMED = 3,
        IBV_PORT_ACTIVE = 4,
        IBV_PORT_ACTIVE_DEFER = 5,
    }
}

c_enum! {
    /// What is under the verbs on a port, [`ibv_port_attr::link_layer`].
    ibv_link_layer: u8 {
        IBV_LINK_LAYER_UNSPECIFIED = 0,
        IBV_LINK_LAYER_INFINIBAND = 1,
        IBV_LINK_LAYER_ETHERNET = 2,
    }
}

c_enum! {
    /// Bits of [`ibv_port_attr::port_cap_flags`] that matter above verbs.
    ibv_port_cap_flags: c_uint {
        IBV_PORT_SM = 1 << 1,
        IBV_PORT_CM_SUP = 1 << 16,
        IBV_PORT_IP_BASED_GIDS = 1 << 26,
    }
}

/// Bit of [`ibv_port_attr::flags`]: every address needs a global route (always so on RoCE).
pub const IBV_QPF_GRH_REQUIRED: u8 = 1;

/// Properties of a port, ibv_query_port(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_port_attr {
    /// State of the port.
    pub state: ibv_port_state,
    /// Largest payload the port can do.
    pub max_mtu: ibv_mtu,
    /// Largest payload now.
    pub active_mtu: ibv_mtu,
    /// Length of the GID table.
    pub gid_tbl_len: c_int,
    /// [`ibv_port_cap_flags`].
    pub port_cap_flags: u32,
    /// Largest message, bytes.
    pub max_msg_sz: u32,
    /// Count of bad partition keys.
    pub bad_pkey_cntr: u32,
    /// Count of bad queue keys.
    pub qkey_viol_cntr: u32,
    /// Length of the partition table.
    pub pkey_tbl_len: u16,
    /// Local identifier, 0 on RoCE.
    pub lid: u16,
    /// Local identifier of the subnet manager.
    pub sm_lid: u16,
    /// Mask of the local identifier.
    pub lmc: u8,
    /// Number of virtual lanes, encoded.
    pub max_vl_num: u8,
    /// Service level of the subnet manager.
    pub sm_sl: u8,
    /// Delay of the subnet, encoded.
    pub subnet_timeout: u8,
    /// Kind of initialization done by the subnet manager.
    pub init_type_reply: u8,
    /// Link width: 1, 2, 4, 8 for 1x, 4x, 8x, 12x.
    pub active_width: u8,
    /// Link speed, encoded as a bit.
    pub active_speed: u8,
    /// State of the physical link (5: up).
    pub phys_state: u8,
    /// An [`ibv_link_layer`].
    pub link_layer: ibv_link_layer,
    /// See [`IBV_QPF_GRH_REQUIRED`].
    pub flags: u8,
    /// More capabilities.
    pub port_cap_flags2: u16,
}

zero_default!(
    ibv_gid,
    ibv_gid_entry,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_port_attr
);
