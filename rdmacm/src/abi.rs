//! The structures and constants of `rdma/rdma_cma.h`, by their C names, and the one of
//! `infiniband/sa.h` that an identifier refers to.
//!
//! Sizes and offsets are those that a C compiler gives for rdma-core 44, checked below at compile time.

#![allow(non_camel_case_types)] // C names are kept

use core::ffi::{c_char, c_int, c_uint, c_void};

use libc::{sockaddr, sockaddr_storage, socklen_t};
use verbs_sys::ffi::{
    ibv_ah_attr, ibv_comp_channel, ibv_context, ibv_cq, ibv_gid, ibv_pd, ibv_qp, ibv_qp_type,
    ibv_srq, ibv_srq_attr,
};

/// Kinds of event, rdma_get_cm_event(3).
pub type rdma_cm_event_type = c_uint;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_ADDR_RESOLVED: rdma_cm_event_type = 0;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_ADDR_ERROR: rdma_cm_event_type = 1;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_ROUTE_RESOLVED: rdma_cm_event_type = 2;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_CONNECT_REQUEST: rdma_cm_event_type = 4;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_CONNECT_RESPONSE: rdma_cm_event_type = 5;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_CONNECT_ERROR: rdma_cm_event_type = 6;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_UNREACHABLE: rdma_cm_event_type = 7;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_REJECTED: rdma_cm_event_type = 8;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_ESTABLISHED: rdma_cm_event_type = 9;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_DISCONNECTED: rdma_cm_event_type = 10;
/// (a value of [`rdma_cm_event_type`])
pub const RDMA_CM_EVENT_TIMEWAIT_EXIT: rdma_cm_event_type = 15;

/// Port spaces, rdma_create_id(3).
pub type rdma_port_space = c_uint;
/// (a value of [`rdma_port_space`])
pub const RDMA_PS_IPOIB: rdma_port_space = 0x0002;
/// (a value of [`rdma_port_space`])
pub const RDMA_PS_TCP: rdma_port_space = 0x0106;
/// (a value of [`rdma_port_space`])
pub const RDMA_PS_UDP: rdma_port_space = 0x0111;
/// (a value of [`rdma_port_space`])
pub const RDMA_PS_IB: rdma_port_space = 0x013f;

/// The queue key of datagram queue pairs that the connection manager makes.
pub const RDMA_UDP_QKEY: u32 = 0x0123_4567;
/// As many as the device can, in [`rdma_conn_param::responder_resources`] and
/// [`rdma_conn_param::initiator_depth`].
pub const RDMA_MAX_RESOURCES: u8 = 0xff;

/// Result for listening, rdma_getaddrinfo(3).
pub const RAI_PASSIVE: c_int = 1;
/// The node is a number, no name.
pub const RAI_NUMERICHOST: c_int = 2;
/// No resolution of routes.
pub const RAI_NOROUTE: c_int = 4;
/// The family of the hints counts.
pub const RAI_FAMILY: c_int = 8;

/// Level of options of an identifier, rdma_set_option(3).
pub const RDMA_OPTION_ID: c_int = 0;
/// Level of options of InfiniBand.
pub const RDMA_OPTION_IB: c_int = 1;
/// Type of service, one byte.
pub const RDMA_OPTION_ID_TOS: c_int = 0;
/// Share the address, an `int`.
pub const RDMA_OPTION_ID_REUSEADDR: c_int = 1;
/// IPv6 only, an `int`.
pub const RDMA_OPTION_ID_AFONLY: c_int = 2;
/// Encoded timeout of queue pairs, one byte.
pub const RDMA_OPTION_ID_ACK_TIMEOUT: c_int = 3;

/// Addresses as the device knows them.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_ib_addr {
    /// Own GID.
    pub sgid: ibv_gid,
    /// The peer's GID.
    pub dgid: ibv_gid,
    /// Partition key, network byte order.
    pub pkey: u16,
}

/// Both addresses of an identifier.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_addr {
    /// Own, an IPv4 or IPv6 address.
    pub src_addr: sockaddr_storage,
    /// The peer's.
    pub dst_addr: sockaddr_storage,
    /// Both as GIDs.
    pub addr: rdma_ib_addr,
}

/// Addresses and paths of an identifier.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_route {
    /// Addresses.
    pub addr: rdma_addr,
    /// Paths, or null.
    pub path_rec: *mut ibv_sa_path_rec,
    /// How many.
    pub num_paths: c_int,
}

/// What delivers events.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rdma_event_channel {
    /// Readable while an event waits.
    pub fd: c_int,
}

/// An identifier, the connection manager's kind of socket.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_cm_id {
    /// The open device, once bound to one.
    pub verbs: *mut ibv_context,
    /// Where events go.
    pub channel: *mut rdma_event_channel,
    /// The application's word.
    pub context: *mut c_void,
    /// Queue pair of rdma_create_qp(3).
    pub qp: *mut ibv_qp,
    /// Addresses and paths.
    pub route: rdma_route,
    /// Port space.
    pub ps: rdma_port_space,
    /// Port of the device, once bound.
    pub port_num: u8,
    /// Of a synchronous identifier, the event of the last call.
    pub event: *mut rdma_cm_event,
    /// Made by rdma_create_qp(3) where the application gave none.
    pub send_cq_channel: *mut ibv_comp_channel,
    /// As above.
    pub send_cq: *mut ibv_cq,
    /// As above.
    pub recv_cq_channel: *mut ibv_comp_channel,
    /// As above.
    pub recv_cq: *mut ibv_cq,
    /// Shared receive queue of rdma_create_srq(3).
    pub srq: *mut ibv_srq,
    /// Default protection domain, or that of the queue pair.
    pub pd: *mut ibv_pd,
    /// Type of its queue pairs.
    pub qp_type: ibv_qp_type,
}

/// Parameters of a connection, rdma_connect(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rdma_conn_param {
    /// Bytes for the peer's application, or null.
    pub private_data: *const c_void,
    /// How many bytes.
    pub private_data_len: u8,
    /// READs and atomics of the peer at a time.
    pub responder_resources: u8,
    /// Own READs and atomics at a time.
    pub initiator_depth: u8,
    /// Whether the hardware has flow control.
    pub flow_control: u8,
    /// Repetitions after a timeout, up to 7.
    pub retry_count: u8,
    /// Repetitions after receiver-not-ready, up to 7.
    pub rnr_retry_count: u8,
    /// Whether the queue pair has a shared receive queue.
    pub srq: u8,
    /// Number of the queue pair.
    pub qp_num: u32,
}

/// Where datagrams go.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_ud_param {
    /// Bytes of the peer's application, or null.
    pub private_data: *const c_void,
    /// How many bytes.
    pub private_data_len: u8,
    /// For an address handle.
    pub ah_attr: ibv_ah_attr,
    /// Number of the queue pair.
    pub qp_num: u32,
    /// Queue key.
    pub qkey: u32,
}

/// Parameters of an event.
#[repr(C)]
#[derive(Clone, Copy)]
pub union rdma_cm_event_param {
    /// Of connected identifiers.
    pub conn: rdma_conn_param,
    /// Of datagram identifiers.
    pub ud: rdma_ud_param,
}

/// An event, rdma_get_cm_event(3).
#[repr(C)]
#[derive(Clone, Copy)]
pub struct rdma_cm_event {
    /// The identifier; of a request for a connection, a new one.
    pub id: *mut rdma_cm_id,
    /// Of a request for a connection, who listens.
    pub listen_id: *mut rdma_cm_id,
    /// Kind.
    pub event: rdma_cm_event_type,
    /// 0, a negative errno value, or a reason of the peer.
    pub status: c_int,
    /// Parameters.
    pub param: rdma_cm_event_param,
}

/// A result of rdma_getaddrinfo(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct rdma_addrinfo {
    /// `RAI_*`.
    pub ai_flags: c_int,
    /// `AF_INET` or `AF_INET6`.
    pub ai_family: c_int,
    /// Type of queue pair.
    pub ai_qp_type: c_int,
    /// Port space.
    pub ai_port_space: c_int,
    /// Bytes of `ai_src_addr`.
    pub ai_src_len: socklen_t,
    /// Bytes of `ai_dst_addr`.
    pub ai_dst_len: socklen_t,
    /// Own address, or null.
    pub ai_src_addr: *mut sockaddr,
    /// The peer's address, or null.
    pub ai_dst_addr: *mut sockaddr,
    /// Canonical name of the source, or null.
    pub ai_src_canonname: *mut c_char,
    /// Canonical name of the destination, or null.
    pub ai_dst_canonname: *mut c_char,
    /// Bytes of `ai_route`.
    pub ai_route_len: usize,
    /// Routing data, or null.
    pub ai_route: *mut c_void,
    /// Bytes of `ai_connect`.
    pub ai_connect_len: usize,
    /// Private data in front of the application's, or null.
    pub ai_connect: *mut c_void,
    /// The next result, or null.
    pub ai_next: *mut rdma_addrinfo,
}

/// A path between two ports, `struct ibv_sa_path_rec`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ibv_sa_path_rec {
    /// The peer's GID.
    pub dgid: ibv_gid,
    /// Own GID.
    pub sgid: ibv_gid,
    /// Unused on RoCE.
    pub dlid: u16,
    /// Unused on RoCE.
    pub slid: u16,
    /// Not 0: no transport headers.
    pub raw_traffic: c_int,
    /// Network byte order.
    pub flow_label: u32,
    /// Hops left.
    pub hop_limit: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Not 0: the way back is the same.
    pub reversible: c_int,
    /// How many paths were asked for.
    pub numb_path: u8,
    /// Partition key, network byte order.
    pub pkey: u16,
    /// Service level.
    pub sl: u8,
    /// How `mtu` is meant; 2: exactly.
    pub mtu_selector: u8,
    /// Encoded.
    pub mtu: u8,
    /// How `rate` is meant.
    pub rate_selector: u8,
    /// Encoded.
    pub rate: u8,
    /// How `packet_life_time` is meant.
    pub packet_life_time_selector: u8,
    /// Encoded.
    pub packet_life_time: u8,
    /// Order among paths.
    pub preference: u8,
}

/// Extensions of vendors, ibv_query_ece(3).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ibv_ece {
    /// Whose they are.
    pub vendor_id: u32,
    /// Which are wanted.
    pub options: u32,
    /// Must be 0.
    pub comp_mask: u32,
}

/// How to create a shared receive queue, ibv_create_srq_ex(3).
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct ibv_srq_init_attr_ex {
    /// As in the classic structure.
    pub srq_context: *mut c_void,
    /// As in the classic structure.
    pub attr: ibv_srq_attr,
    /// Which of the fields below count.
    pub comp_mask: u32,
    /// Type.
    pub srq_type: c_uint,
    /// Protection domain.
    pub pd: *mut ibv_pd,
    /// XRC domain.
    pub xrcd: *mut c_void,
    /// Completion queue of an XRC queue.
    pub cq: *mut ibv_cq,
    /// Tag matching: most outstanding receives, and operations.
    pub tm_cap: [u32; 2],
}

/// A structure all of whose bytes are zero, as C programs start them.
///
/// # Safety
///
/// All bytes zero is a value of the type.
pub const unsafe fn zeroed<T>() -> T {
    // SAFETY: by the caller's promise.
    unsafe { core::mem::MaybeUninit::zeroed().assume_init() }
}

#[cfg(all(target_arch = "x86_64", target_pointer_width = "64"))]
mod layout {
    use core::mem::offset_of;

    use super::*;

    macro_rules! layout {
        ($($name:ident $size:literal { $($field:ident $offset:literal),* $(,)? })+) => {$(
            const _: () = assert!(size_of::<$name>() == $size, stringify!($name));
            $(const _: () = assert!(
                offset_of!($name, $field) == $offset,
                concat!(stringify!($name), ".", stringify!($field)),
            );)*
        )+};
    }

    layout! {
        rdma_cm_id 416 {
            verbs 0, channel 8, context 16, qp 24, route 32, ps 344, port_num 348, event 352,
            send_cq_channel 360, send_cq 368, recv_cq_channel 376, recv_cq 384, srq 392, pd 400,
            qp_type 408,
        }
        rdma_route 312 { addr 0, path_rec 296, num_paths 304 }
        rdma_addr 296 { src_addr 0, dst_addr 128, addr 256 }
        rdma_ib_addr 40 { sgid 0, dgid 16, pkey 32 }
        rdma_event_channel 4 { fd 0 }
        rdma_conn_param 24 {
            private_data 0, private_data_len 8, responder_resources 9, initiator_depth 10,
            flow_control 11, retry_count 12, rnr_retry_count 13, srq 14, qp_num 16,
        }
        rdma_ud_param 56 { private_data 0, private_data_len 8, ah_attr 16, qp_num 48, qkey 52 }
        rdma_cm_event 80 { id 0, listen_id 8, event 16, status 20, param 24 }
        rdma_addrinfo 96 {
            ai_flags 0, ai_family 4, ai_qp_type 8, ai_port_space 12, ai_src_len 16, ai_dst_len 20,
            ai_src_addr 24, ai_dst_addr 32, ai_src_canonname 40, ai_dst_canonname 48,
            ai_route_len 56, ai_route 64, ai_connect_len 72, ai_connect 80, ai_next 88,
        }
        ibv_sa_path_rec 64 {
            dgid 0, sgid 16, dlid 32, slid 34, raw_traffic 36, flow_label 40, hop_limit 44,
            traffic_class 45, reversible 48, numb_path 52, pkey 54, sl 56, mtu_selector 57, mtu 58,
            rate_selector 59, rate 60, packet_life_time_selector 61, packet_life_time 62,
            preference 63,
        }
        ibv_srq_init_attr_ex 64 {
            srq_context 0, attr 8, comp_mask 20, srq_type 24, pd 32, xrcd 40, cq 48, tm_cap 56,
        }
        ibv_ece 12 { vendor_id 0, options 4, comp_mask 8 }
    }
}
