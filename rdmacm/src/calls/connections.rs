//! Connections: to listen, connect, accept, reject and disconnect.

use core::ffi::{c_int, c_void};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Instant;

use rustix::io::Errno;
use verbs_sys::ffi::{IBV_EVENT_COMM_EST, ibv_event_type, ibv_qp_attr};

use super::addresses::bind;
use super::code;
use crate::abi::{RDMA_MAX_RESOURCES, RDMA_UDP_QKEY, rdma_cm_id, rdma_conn_param};
use crate::address::is_local;
use crate::deliver::{complete, connect_qp, drop_event, fail_qp};
use crate::dial::Dial;
use crate::endpoint::{Endpoint, PATIENCE, Phase};
use crate::id::Id;
use crate::message::{
    Message, REJ_CONSUMER_DEFINED, REJ_PRIVATE, REJ_VENDOR_OPTION, REP_PRIVATE, REQ_PRIVATE,
    Request, SIDR_REJECT, SIDR_REP_PRIVATE, SIDR_REQ_PRIVATE, SIDR_SUCCESS, Service, Side,
};
use crate::shared::{Key, Shared, State};

/// rdma_listen(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_listen(id: *mut rdma_cm_id, backlog: c_int) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { listen(id, backlog) })
}

unsafe fn listen(id: *mut rdma_cm_id, backlog: c_int) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let shared = Shared::get();
    if shared.lock().endpoint(key)?.phase == Phase::Idle {
        let any = SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0));
        // SAFETY: by the caller's promise.
        unsafe { bind(id, any)? };
    }
    shared.lock().listen(key, backlog)
}

/// What an application says of a connection, or what holds where it says nothing.
struct Parameters {
    private: Vec<u8>,
    retry: u8,
    side: Side,
}

/// Reads an application's parameters. Queue pair and shared receive queue are the identifier's, if it has
/// a queue pair.
///
/// # Safety
///
/// `id` is alive, `param` is null or readable, and so is the private data that it names.
unsafe fn parameters(
    id: *mut rdma_cm_id,
    param: *const rdma_conn_param,
    endpoint: &Endpoint,
) -> Result<Parameters, Errno> {
    let mut side = endpoint.own;
    // SAFETY: by the caller's promise.
    let qp = unsafe { (*id).qp };
    // SAFETY: as above.
    let given = unsafe { param.as_ref() };
    if qp.is_null() && given.is_none() {
        return Err(Errno::INVAL);
    }
    let mut private = Vec::new();
    let mut retry = 7;
    side.rnr_retry = 7;
    if let Some(given) = given {
        if !given.private_data.is_null() {
            let len = usize::from(given.private_data_len);
            // SAFETY: as above.
            private = unsafe { bytes(given.private_data, len) };
        }
        if !endpoint.is_datagram() {
            let device = endpoint.place.ok_or(Errno::INVAL)?.device;
            let most = device.max_responder_resources;
            side.responder_resources =
                resources(given.responder_resources, side.responder_resources, most)?;
            let most = device.max_initiator_depth;
            side.initiator_depth = resources(given.initiator_depth, side.initiator_depth, most)?;
        }
        retry = given.retry_count.min(7);
        side.rnr_retry = given.rnr_retry_count.min(7);
        side.flow_control = given.flow_control != 0;
        side.srq = given.srq != 0;
        side.qp_num = given.qp_num & 0xff_ffff;
    }
    if !qp.is_null() {
        // SAFETY: a live queue pair.
        side.qp_num = unsafe { (*qp).qp_num };
        // SAFETY: as above.
        side.srq = unsafe { !(*qp).srq.is_null() };
    }
    Ok(Parameters {
        private,
        retry,
        side,
    })
}

/// How many READs and atomics at a time: what is asked for, or as many as there can be.
fn resources(asked: u8, usual: u8, most: u8) -> Result<u8, Errno> {
    match asked {
        RDMA_MAX_RESOURCES => Ok(usual.min(most)),
        asked if asked > most => Err(Errno::INVAL),
        asked => Ok(asked),
    }
}

/// Copies bytes of the application.
///
/// # Safety
///
/// There are so many at the address.
unsafe fn bytes(start: *const c_void, len: usize) -> Vec<u8> {
    // SAFETY: by the caller's promise; nobody changes them while this call takes.
    unsafe { std::slice::from_raw_parts(start.cast::<u8>(), len) }.to_vec()
}

/// Private data, if it is not too long for the message.
fn limited(private: Vec<u8>, most: usize) -> Result<Vec<u8>, Errno> {
    if private.len() > most {
        return Err(Errno::INVAL);
    }
    Ok(private)
}

/// rdma_connect(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_connect(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { connect(id, param) })
}

unsafe fn connect(id: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    // SAFETY: as above.
    let prefix = unsafe { (*id.cast::<Id>()).prefix.clone() };
    let shared = Shared::get();
    let remote = shared.lock().endpoint(key)?.remote.ok_or(Errno::INVAL)?;
    let on_this_host = is_local(remote);
    let mut state = shared.lock();
    let endpoint = state.endpoint(key)?;
    let (Phase::RouteResolved, Some(local), Some(place)) =
        (endpoint.phase, endpoint.local, endpoint.place)
    else {
        return Err(Errno::INVAL);
    };
    let service = Service {
        port_space: endpoint.space as u16,
        from: local,
        to: remote,
    };
    // Where the application does not say: as many as the device can.
    endpoint.own.responder_resources = place.device.max_responder_resources;
    endpoint.own.initiator_depth = place.device.max_initiator_depth;
    let opening = if endpoint.is_datagram() {
        let mut private = prefix;
        // SAFETY: by the caller's promise.
        if let Some(given) = unsafe { param.as_ref() }
            && !given.private_data.is_null()
        {
            let len = usize::from(given.private_data_len);
            // SAFETY: as above.
            private.extend(unsafe { bytes(given.private_data, len) });
        }
        let private = limited(private, SIDR_REQ_PRIVATE)?;
        Message::Lookup { service, private }
    } else {
        // SAFETY: by the caller's promise.
        let parameters = unsafe { parameters(id, param, endpoint)? };
        let private = limited([prefix, parameters.private].concat(), REQ_PRIVATE)?;
        endpoint.own = parameters.side;
        endpoint.retry = parameters.retry;
        Message::Request(Request {
            service,
            qp_type: endpoint.qp_type as u8,
            side: endpoint.own,
            retry: endpoint.retry,
            mtu: endpoint.mtu,
            private,
        })
    };
    endpoint.phase = Phase::Connecting;
    let dial = if on_this_host {
        Dial::host(remote, opening)
    } else {
        Dial::network(remote, opening)
    };
    state.start_dial(key, dial);
    drop(state);
    // SAFETY: by the caller's promise.
    unsafe { complete(id, key) }
}

/// rdma_accept(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_accept(id: *mut rdma_cm_id, param: *mut rdma_conn_param) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { accept(id, param) })
}

unsafe fn accept(id: *mut rdma_cm_id, param: *const rdma_conn_param) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let shared = Shared::get();
    let mut state = shared.lock();
    let endpoint = state.endpoint(key)?;
    if endpoint.phase != Phase::Requested {
        return Err(Errno::INVAL);
    }
    // SAFETY: by the caller's promise.
    let Parameters { private, side, .. } = unsafe { parameters(id, param, endpoint)? };
    if endpoint.is_datagram() {
        let private = limited(private, SIDR_REP_PRIVATE)?;
        endpoint.phase = Phase::Resolved;
        if let Some(socket) = endpoint.socket.take() {
            let answer = Message::Found {
                status: SIDR_SUCCESS,
                qp_num: side.qp_num,
                qkey: RDMA_UDP_QKEY,
                private,
            };
            state.send_last(socket, &answer);
        }
        drop(state);
        // SAFETY: by the caller's promise.
        unsafe { drop_event(id) };
        return Ok(());
    }
    let private = limited(private, REP_PRIVATE)?;
    endpoint.own = side;
    drop(state);
    // SAFETY: by the caller's promise.
    let connected = if unsafe { (*id).qp.is_null() } {
        Ok(())
    } else {
        // Before the peer knows, as it may send at once.
        // SAFETY: as above.
        unsafe { connect_qp(id, key) }
    };
    let accepted = connected.and_then(|()| shared.lock().accepted(key, side, private));
    accepted.inspect_err(|_| {
        // SAFETY: as above.
        let _ = unsafe { fail_qp(id) };
    })?;
    // SAFETY: by the caller's promise.
    unsafe { complete(id, key) }
}

impl State {
    fn accepted(&mut self, key: Key, side: Side, private: Vec<u8>) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        // The requester may have gone meanwhile.
        let (Phase::Requested, Some(socket)) = (endpoint.phase, endpoint.socket) else {
            return Err(Errno::INVAL);
        };
        endpoint.phase = Phase::Accepted;
        self.set_timer(key, Instant::now() + PATIENCE);
        self.send(socket, &Message::Reply { side, private });
        Ok(())
    }

    fn reject(&mut self, key: Key, reason: u16, private: Vec<u8>) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        if !matches!(endpoint.phase, Phase::Requested | Phase::Answered) {
            return Err(Errno::INVAL);
        }
        let answer = if endpoint.is_datagram() {
            Message::Found {
                status: SIDR_REJECT,
                qp_num: 0,
                qkey: 0,
                private: limited(private, SIDR_REP_PRIVATE)?,
            }
        } else {
            let private = limited(private, REJ_PRIVATE)?;
            Message::Reject { reason, private }
        };
        endpoint.phase = Phase::Failed;
        if let Some(socket) = endpoint.socket.take() {
            self.send_last(socket, &answer);
        }
        Ok(())
    }
}

unsafe fn reject(id: *mut rdma_cm_id, reason: u16, start: *const c_void, len: u8) -> c_int {
    let private = if start.is_null() {
        Vec::new()
    } else {
        // SAFETY: by the caller's promise.
        unsafe { bytes(start, len.into()) }
    };
    // SAFETY: as above.
    code(unsafe { Id::key(id) }.and_then(|key| Shared::get().lock().reject(key, reason, private)))
}

/// rdma_reject(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_reject(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { reject(id, REJ_CONSUMER_DEFINED, private_data, private_data_len) }
}

/// rdma_reject_ece(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_reject_ece(
    id: *mut rdma_cm_id,
    private_data: *const c_void,
    private_data_len: u8,
) -> c_int {
    // SAFETY: by the caller's promise.
    unsafe { reject(id, REJ_VENDOR_OPTION, private_data, private_data_len) }
}

/// rdma_establish(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_establish(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { Id::key(id) }.and_then(|key| {
        // SAFETY: as above.
        if unsafe { !(*id).qp.is_null() } {
            // That is done with the event.
            return Err(Errno::INVAL);
        }
        Shared::get().lock().ready_to_use(key)
    }))
}

/// rdma_notify(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_notify(id: *mut rdma_cm_id, event: ibv_event_type) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { Id::key(id) }.and_then(|key| {
        let mut state = Shared::get().lock();
        match (event, state.endpoint(key)?.phase) {
            (IBV_EVENT_COMM_EST, Phase::Accepted) => {
                state.establish(key);
                Ok(())
            }
            (IBV_EVENT_COMM_EST, Phase::Established) => Err(Errno::ISCONN),
            _ => Err(Errno::INVAL),
        }
    }))
}

/// rdma_disconnect(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_disconnect(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { disconnect(id) })
}

unsafe fn disconnect(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let shared = Shared::get();
    let never = [
        Phase::Idle,
        Phase::Bound,
        Phase::AddressResolved,
        Phase::RouteResolved,
        Phase::Listening,
    ];
    if never.contains(&shared.lock().endpoint(key)?.phase) {
        return Err(Errno::INVAL);
    }
    // SAFETY: by the caller's promise.
    unsafe { fail_qp(id)? };
    let mut state = shared.lock();
    state.disconnect(key);
    // One that the peer has disconnected has its event already.
    let endpoint = state.endpoint(key)?;
    let (phase, channel) = (endpoint.phase, endpoint.channel);
    let waits = state
        .channels
        .get(&channel)
        .is_some_and(|queue| queue.has_events());
    drop(state);
    if phase == Phase::Disconnecting || waits {
        // SAFETY: by the caller's promise.
        unsafe { complete(id, key)? };
    }
    Ok(())
}

/// rdma_init_qp_attr(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_init_qp_attr(
    id: *mut rdma_cm_id,
    attr: *mut ibv_qp_attr,
    mask: *mut c_int,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { Id::key(id) }.and_then(|key| {
        if attr.is_null() || mask.is_null() {
            return Err(Errno::INVAL);
        }
        // SAFETY: a readable structure; only this field counts.
        let state = unsafe { (*attr).qp_state };
        let (found, which) = Shared::get().lock().endpoint(key)?.qp_attr(state)?;
        // SAFETY: places for the results.
        unsafe { attr.write(found) };
        // SAFETY: as above.
        unsafe { mask.write(which as c_int) };
        Ok(())
    }))
}
