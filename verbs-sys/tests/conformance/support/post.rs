//! Lists of requests in the form that C wants.

use std::ptr;

use verbs_sys::{AddressHandle, QueuePair, RawPostError, ffi};

use super::command::{Recv, Refused, Request, Target};

pub fn post_send(qp: &QueuePair, ahs: &[AddressHandle], list: &[Request]) -> Result<(), Refused> {
    let mut elements: Vec<Vec<ffi::ibv_sge>> = list
        .iter()
        .map(|request| request.elements.iter().map(|e| (*e).into()).collect())
        .collect();
    let mut requests: Vec<ffi::ibv_send_wr> = list
        .iter()
        .zip(&mut elements)
        .map(|(request, elements)| raw_send(request, ahs, elements))
        .collect();
    let first = requests.as_mut_ptr();
    for index in 1..requests.len() {
        // SAFETY: inside the vector, as is the one before it.
        unsafe { (*first.add(index - 1)).next = first.add(index) };
    }
    // SAFETY: a valid list; elements with good keys lie in memories, which outlive their queue
    // pairs, and of which no reference exists.
    let result = unsafe { qp.post_send(first) };
    result.map_err(|error| Refused {
        errno: error.source.raw_os_error().unwrap_or(0),
        index: error.bad_wr.addr().wrapping_sub(first.addr()) / size_of::<ffi::ibv_send_wr>(),
    })
}

fn raw_send(
    request: &Request,
    ahs: &[AddressHandle],
    elements: &mut [ffi::ibv_sge],
) -> ffi::ibv_send_wr {
    let Target { addr, rkey } = request.target;
    let mut raw = ffi::ibv_send_wr {
        wr_id: request.wr_id,
        sg_list: elements.as_mut_ptr(),
        num_sge: elements.len() as i32,
        opcode: request.opcode,
        send_flags: request.flags,
        imm_data: match request.opcode {
            ffi::IBV_WR_SEND_WITH_INV | ffi::IBV_WR_LOCAL_INV => request.imm,
            _ => request.imm.to_be(),
        },
        ..ffi::ibv_send_wr::zeroed()
    };
    if let Some(to) = request.to {
        raw.wr.ud = ffi::ibv_send_wr_ud {
            ah: ahs[to.ah].as_raw(),
            remote_qpn: to.qp_num,
            remote_qkey: to.qkey,
        };
        return raw;
    }
    match request.opcode {
        ffi::IBV_WR_ATOMIC_CMP_AND_SWP | ffi::IBV_WR_ATOMIC_FETCH_AND_ADD => {
            raw.wr.atomic = ffi::ibv_send_wr_atomic {
                remote_addr: addr,
                compare_add: request.compare_add,
                swap: request.swap,
                rkey,
            };
        }
        _ => {
            raw.wr.rdma = ffi::ibv_send_wr_rdma {
                remote_addr: addr,
                rkey,
            };
        }
    }
    raw
}

pub fn post_recv(qp: &QueuePair, list: &[Recv]) -> Result<(), Refused> {
    // SAFETY: `with_recvs` gives a valid list; elements with good keys lie in memories, which outlive
    // their queue pairs, and of which no reference exists.
    with_recvs(list, |first| unsafe { qp.post_recv(first) })
}

/// Posts a list of receives.
pub fn with_recvs(
    list: &[Recv],
    post: impl FnOnce(*mut ffi::ibv_recv_wr) -> Result<(), RawPostError<ffi::ibv_recv_wr>>,
) -> Result<(), Refused> {
    let mut elements: Vec<Vec<ffi::ibv_sge>> = list
        .iter()
        .map(|request| request.elements.iter().map(|e| (*e).into()).collect())
        .collect();
    let mut requests: Vec<ffi::ibv_recv_wr> = list
        .iter()
        .zip(&mut elements)
        .map(|(request, elements)| ffi::ibv_recv_wr {
            wr_id: request.wr_id,
            next: ptr::null_mut(),
            sg_list: elements.as_mut_ptr(),
            num_sge: elements.len() as i32,
        })
        .collect();
    let first = requests.as_mut_ptr();
    for index in 1..requests.len() {
        // SAFETY: inside the vector, as is the one before it.
        unsafe { (*first.add(index - 1)).next = first.add(index) };
    }
    post(first).map_err(|error| Refused {
        errno: error.source.raw_os_error().unwrap_or(0),
        index: error.bad_wr.addr().wrapping_sub(first.addr()) / size_of::<ffi::ibv_recv_wr>(),
    })
}
