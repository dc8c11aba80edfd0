//! Identifiers: their beginning and end, their options, and their channel.

use core::ffi::{c_int, c_void};

use rustix::io::Errno;
use verbs_sys::ffi::{IBV_QPT_RC, IBV_QPT_UD, ibv_qp_type};

use super::code;
use crate::abi::*;
use crate::deliver::drop_event;
use crate::endpoint::{Endpoint, IdPointer, Phase};
use crate::id::{Channel, Id};
use crate::shared::{Key, Shared, State, new_key};

/// Makes an identifier; without a channel, a synchronous one.
///
/// # Safety
///
/// The channel is null, or made by this library and not destroyed.
pub unsafe fn create(
    channel: *mut rdma_event_channel,
    context: *mut c_void,
    space: rdma_port_space,
    qp_type: ibv_qp_type,
) -> Result<*mut rdma_cm_id, Errno> {
    let shared = Shared::get();
    shared.devices()?;
    let mut state = shared.lock();
    let synchronous = channel.is_null();
    let channel = if synchronous {
        Channel::create(&mut state)?
    } else {
        channel
    };
    let queue = state.channel(channel)?;
    let key = new_key();
    let id = Id::allocate(key, channel, context, space, qp_type);
    let mut endpoint = Endpoint::new(queue, space, qp_type);
    endpoint.id = IdPointer(id);
    endpoint.synchronous = synchronous;
    state.endpoints.insert(key, endpoint);
    Ok(id.cast())
}

/// rdma_create_id(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_create_id(
    channel: *mut rdma_event_channel,
    id: *mut *mut rdma_cm_id,
    context: *mut c_void,
    space: rdma_port_space,
) -> c_int {
    let qp_type = match space {
        RDMA_PS_UDP | RDMA_PS_IPOIB => IBV_QPT_UD,
        RDMA_PS_TCP | RDMA_PS_IB => IBV_QPT_RC,
        _ => return code(Err(Errno::INVAL)),
    };
    // SAFETY: by the caller's promise.
    code(
        unsafe { create(channel, context, space, qp_type) }.map(|made| {
            // SAFETY: a place for the result.
            unsafe { id.write(made) };
        }),
    )
}

/// rdma_destroy_id(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_destroy_id(id: *mut rdma_cm_id) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { destroy(id) })
}

unsafe fn destroy(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    // SAFETY: as above.
    unsafe { drop_event(id) };
    let shared = Shared::get();
    let mut state = shared.lock();
    state.retire(key);
    let mut state = shared.until_acknowledged(state, key);
    let endpoint = state.endpoints.remove(&key);
    // One that a forked child has inherited has no other half, and its channel is the parent's.
    if endpoint.is_some_and(|endpoint| endpoint.synchronous) {
        // SAFETY: the channel is the identifier's own.
        unsafe { Channel::destroy(&mut state, (*id).channel) };
    }
    drop(state);
    // SAFETY: by the caller's promise nobody uses it any more.
    drop(unsafe { Box::from_raw(id.cast::<Id>()) });
    Ok(())
}

impl State {
    /// Ends what an identifier does: from now on nothing happens to it.
    fn retire(&mut self, key: Key) {
        self.hang_up(key);
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.phase = Phase::Failed;
        endpoint.dial = None;
        endpoint.claim = None;
        let (space, channel) = (endpoint.space, endpoint.channel);
        let port = endpoint.local.map_or(0, |local| local.port());
        let others = std::mem::take(&mut endpoint.strangers).into_iter();
        for socket in others.chain(endpoint.remote_listener.take()) {
            self.close(socket);
        }
        self.ports.release(space, port, key);
        let queue = self.channels.get_mut(&channel);
        for event in queue.map(|queue| queue.take_of(key)).unwrap_or_default() {
            if event.target != key {
                // A request that the application has not seen.
                self.discard(event.target);
            }
        }
    }
}

/// rdma_migrate_id(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_migrate_id(
    id: *mut rdma_cm_id,
    channel: *mut rdma_event_channel,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { migrate(id, channel) })
}

unsafe fn migrate(id: *mut rdma_cm_id, channel: *mut rdma_event_channel) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    // SAFETY: as above.
    unsafe { drop_event(id) };
    let shared = Shared::get();
    let mut state = shared.until_acknowledged(shared.lock(), key);
    let synchronous = channel.is_null();
    let channel = if synchronous {
        Channel::create(&mut state)?
    } else {
        channel
    };
    let to = state.channel(channel)?;
    state.move_events(key, to)?;
    let endpoint = state.endpoint(key)?;
    if std::mem::replace(&mut endpoint.synchronous, synchronous) {
        // SAFETY: the channel was the identifier's own.
        unsafe { Channel::destroy(&mut state, (*id).channel) };
    }
    // SAFETY: by the caller's promise.
    unsafe { (*id).channel = channel };
    Ok(())
}

/// rdma_set_option(3). `RDMA_OPTION_ID_REUSEADDR` is for identifiers of one process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: usize,
) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { set_option(id, level, option, value, len) })
}

unsafe fn set_option(
    id: *mut rdma_cm_id,
    level: c_int,
    option: c_int,
    value: *mut c_void,
    len: usize,
) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    let mut state = Shared::get().lock();
    let endpoint = state.endpoint(key)?;
    match (level, option, len) {
        // Paths are the device's.
        (RDMA_OPTION_IB, ..) => return Err(Errno::OPNOTSUPP),
        _ if value.is_null() => return Err(Errno::INVAL),
        (RDMA_OPTION_ID, RDMA_OPTION_ID_TOS, 1) => {
            // SAFETY: so many bytes, by the caller's promise.
            endpoint.options.tos = unsafe { value.cast::<u8>().read() };
        }
        (RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, 1) => {
            // SAFETY: as above.
            let timeout = unsafe { value.cast::<u8>().read() };
            // Five bits.
            if timeout > 31 {
                return Err(Errno::INVAL);
            }
            endpoint.options.ack_timeout = Some(timeout);
        }
        (RDMA_OPTION_ID, RDMA_OPTION_ID_REUSEADDR, 4) => {
            // SAFETY: as above; it need not be aligned.
            let shares = unsafe { value.cast::<c_int>().read_unaligned() } != 0;
            endpoint.options.shares_address = shares;
        }
        (RDMA_OPTION_ID, RDMA_OPTION_ID_AFONLY, 4) => {
            // SAFETY: as above; it need not be aligned.
            endpoint.options.v6_only = unsafe { value.cast::<c_int>().read_unaligned() } != 0;
        }
        (RDMA_OPTION_ID, ..) => return Err(Errno::INVAL),
        _ => return Err(Errno::NOSYS),
    }
    Ok(())
}

unsafe fn port(id: *mut rdma_cm_id, which: fn(&Endpoint) -> Option<std::net::SocketAddr>) -> u16 {
    // SAFETY: by the caller's promise.
    let Ok(key) = (unsafe { Id::key(id) }) else {
        return 0;
    };
    let mut state = Shared::get().lock();
    let address = state
        .endpoint(key)
        .ok()
        .and_then(|endpoint| which(endpoint));
    address.map_or(0, |address| address.port()).to_be()
}

/// rdma_get_src_port(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_src_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by the caller's promise.
    unsafe { port(id, |endpoint| endpoint.local) }
}

/// rdma_get_dst_port(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_dst_port(id: *mut rdma_cm_id) -> u16 {
    // SAFETY: by the caller's promise.
    unsafe { port(id, |endpoint| endpoint.remote) }
}

/// rdma_set_local_ece(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_set_local_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { without_qp(id) }.and_then(|key| {
        // SAFETY: null, or a readable structure.
        let ece = unsafe { ece.as_ref() }.ok_or(Errno::INVAL)?;
        if ece.comp_mask != 0 {
            return Err(Errno::INVAL);
        }
        Shared::get().lock().endpoint(key)?.own.ece = *ece;
        Ok(())
    }))
}

/// rdma_get_remote_ece(3).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn rdma_get_remote_ece(id: *mut rdma_cm_id, ece: *mut ibv_ece) -> c_int {
    // SAFETY: by the caller's promise.
    code(unsafe { without_qp(id) }.and_then(|key| {
        if ece.is_null() {
            return Err(Errno::INVAL);
        }
        let found = Shared::get().lock().endpoint(key)?.peer.ece;
        // SAFETY: a place for the result.
        unsafe { ece.write(found) };
        Ok(())
    }))
}

/// Extensions of vendors are for queue pairs that the application makes itself.
unsafe fn without_qp(id: *mut rdma_cm_id) -> Result<Key, Errno> {
    // SAFETY: by the caller's promise.
    let key = unsafe { Id::key(id)? };
    // SAFETY: as above.
    if unsafe { !(*id).qp.is_null() } {
        return Err(Errno::INVAL);
    }
    Ok(key)
}
