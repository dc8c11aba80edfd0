//! Names of numbers.

use core::ffi::{CStr, c_char, c_int};

use super::real::{self, call};
use crate::ffi::*;

fn name(names: &[&'static CStr], number: c_int) -> *const c_char {
    let found = usize::try_from(number).ok().and_then(|at| names.get(at));
    found.copied().unwrap_or(c"unknown").as_ptr()
}

/// ibv_wc_status_str(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wc_status_str(status: c_int) -> *const c_char {
    name(
        &[
            c"success",
            c"local length error",
            c"local QP operation error",
            c"local EE context operation error",
            c"local protection error",
            c"Work Request Flushed Error",
            c"memory management operation error",
            c"bad response error",
            c"local access error",
            c"remote invalid request error",
            c"remote access error",
            c"remote operation error",
            c"transport retry counter exceeded",
            c"RNR retry counter exceeded",
            c"local RDD violation error",
            c"remote invalid RD request",
            c"aborted error",
            c"invalid EE context number",
            c"invalid EE context state",
            c"fatal error",
            c"response timeout error",
            c"general error",
            c"TM error",
            c"TM software rendezvous",
        ],
        status,
    )
}

/// The name of a request's opcode, for drivers of rdma-core 50 and later.
#[unsafe(no_mangle)]
pub extern "C" fn ibv_wr_opcode_str(opcode: c_int) -> *const c_char {
    name(
        &[
            c"rdma-write",
            c"rdma-write-with-imm",
            c"send",
            c"send-with-imm",
            c"rdma-read",
            c"atomic-cmp-and-swp",
            c"atomic-fetch-and-add",
            c"local-inv",
            c"bind-mw",
            c"send-with-inv",
            c"tso",
            c"driver1",
        ],
        opcode,
    )
}

/// ibv_node_type_str(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_node_type_str(node_type: c_int) -> *const c_char {
    name(
        &[
            c"unknown",
            c"InfiniBand channel adapter",
            c"InfiniBand switch",
            c"InfiniBand router",
            c"iWARP NIC",
            c"usNIC",
            c"usNIC UDP",
            c"unspecified",
        ],
        node_type,
    )
}

/// ibv_port_state_str(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_port_state_str(state: c_int) -> *const c_char {
    name(
        &[
            c"no state change (NOP)",
            c"down",
            c"init",
            c"armed",
            c"active",
            c"active defer",
        ],
        state,
    )
}

/// ibv_event_type_str(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_event_type_str(event: ibv_event_type) -> *const c_char {
    let text = match event {
        IBV_EVENT_CQ_ERR => c"CQ error",
        IBV_EVENT_QP_FATAL => c"local work queue catastrophic error",
        IBV_EVENT_QP_REQ_ERR => c"invalid request local work queue error",
        IBV_EVENT_QP_ACCESS_ERR => c"local access violation work queue error",
        IBV_EVENT_COMM_EST => c"communication established",
        IBV_EVENT_SQ_DRAINED => c"send queue drained",
        IBV_EVENT_SRQ_LIMIT_REACHED => c"SRQ limit reached",
        IBV_EVENT_QP_LAST_WQE_REACHED => c"last WQE reached",
        // Ours raises no others.
        _ => {
            let of_real =
                |real| call!(real, ibv_event_type_str(event: ibv_event_type) -> *const c_char);
            return real::loaded().map_or(c"unknown".as_ptr(), of_real);
        }
    };
    text.as_ptr()
}

/// What the system's library makes of a rate that is not among these, or `unknown`.
macro_rules! rate_of_real {
    ($name:ident($number:ident), $unknown:expr) => {
        real::loaded().map_or($unknown, |real| call!(real, $name($number: c_int) -> c_int))
    };
}

/// Static rates: the number, the multiple of 2.5 Gbit/s, and Mbit/s.
const RATES: [(c_int, c_int, c_int); 8] = [
    (2, 1, 2_500),
    (5, 2, 5_000),
    (3, 4, 10_000),
    (6, 8, 20_000),
    (4, 12, 30_000),
    (7, 16, 40_000),
    (8, 24, 60_000),
    (9, 32, 80_000),
];

fn rate(find: impl Fn(&(c_int, c_int, c_int)) -> bool) -> Option<(c_int, c_int, c_int)> {
    RATES.iter().copied().find(find)
}

/// ibv_rate_to_mult(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mult(number: c_int) -> c_int {
    match rate(|rate| rate.0 == number) {
        Some(rate) => rate.1,
        None => rate_of_real!(ibv_rate_to_mult(number), -1),
    }
}

/// mult_to_ibv_rate(3).
#[unsafe(no_mangle)]
pub extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    match rate(|rate| rate.1 == mult) {
        Some(rate) => rate.0,
        None => rate_of_real!(mult_to_ibv_rate(mult), 0),
    }
}

/// ibv_rate_to_mbps(3).
#[unsafe(no_mangle)]
pub extern "C" fn ibv_rate_to_mbps(number: c_int) -> c_int {
    match rate(|rate| rate.0 == number) {
        Some(rate) => rate.2,
        None => rate_of_real!(ibv_rate_to_mbps(number), -1),
    }
}

/// mbps_to_ibv_rate(3).
#[unsafe(no_mangle)]
pub extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    match rate(|rate| rate.2 == mbps) {
        Some(rate) => rate.0,
        None => rate_of_real!(mbps_to_ibv_rate(mbps), 0),
    }
}
