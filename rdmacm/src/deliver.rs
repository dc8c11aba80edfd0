//! From a channel to the application: rdma_get_cm_event(3).
//!
//! Queue pairs change their state here and in the calls, in a thread of the application, which alone
//! knows when it destroys them.

use core::ptr;
use std::sync::Arc;

use rustix::io::Errno;
use verbs_sys::ffi::{IBV_QPS_ERR, IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS, ibv_qp_state};

use crate::abi::{
    RDMA_CM_EVENT_ADDR_RESOLVED, RDMA_CM_EVENT_CONNECT_ERROR, RDMA_CM_EVENT_CONNECT_REQUEST,
    RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_ESTABLISHED, RDMA_CM_EVENT_ROUTE_RESOLVED,
    rdma_cm_event, rdma_cm_event_type, rdma_cm_id, rdma_event_channel,
};
use crate::channel::Ends;
use crate::device::check;
use crate::endpoint::{IdPointer, Phase};
use crate::event::{Event, Queued};
use crate::id::{Channel, Id};
use crate::message::Message;
use crate::shared::{Key, Shared, State};
use crate::verbs;

/// With these an identifier gets its addresses.
const SHOWN: [rdma_cm_event_type; 3] = [
    RDMA_CM_EVENT_ADDR_RESOLVED,
    RDMA_CM_EVENT_ROUTE_RESOLVED,
    RDMA_CM_EVENT_CONNECT_REQUEST,
];

/// Waits for an event.
///
/// # Errors
///
/// `EINVAL` for a channel of another process, or one that has ended, `EAGAIN` if there is none and the channel shall not block,
/// `EINTR` after a signal.
///
/// # Safety
///
/// The channel is null, or made by this library and not destroyed before this call begins.
pub unsafe fn next(channel: *mut rdma_event_channel) -> Result<*mut rdma_cm_event, Errno> {
    loop {
        // SAFETY: by the caller's promise; a channel that ends while this waits has no event for it.
        match unsafe { look(channel)? } {
            Next::Event(event) => return Ok(event),
            Next::Later(ends) => ends.wait()?,
            Next::Never => return Err(Errno::INVAL),
        }
    }
}

/// What a look into a channel finds.
#[derive(Debug)]
pub enum Next {
    /// An event.
    Event(*mut rdma_cm_event),
    /// None; by this it can be waited for.
    Later(Arc<Ends>),
    /// None, and there never will be: it has ended. Who was in the call before sleeps on, and so does who comes too late.
    Never,
}

/// Takes an event, if there is one.
///
/// # Errors
///
/// `EINVAL` for a channel of another process.
///
/// # Safety
///
/// As for [`next`].
pub unsafe fn look(channel: *mut rdma_event_channel) -> Result<Next, Errno> {
    let shared = Shared::get();
    loop {
        let mut state = shared.lock();
        let Ok(key) = state.channel(channel) else {
            let has_ended = state.ended.contains(&channel.addr());
            return has_ended.then_some(Next::Never).ok_or(Errno::INVAL);
        };
        let queue = state.channels.get_mut(&key).ok_or(Errno::INVAL)?;
        let Some(queued) = queue.pop() else {
            return Ok(Next::Later(queue.ends()));
        };
        let delivered = state.deliver(&queued);
        drop(state);
        if let Some(event) = delivered {
            // SAFETY: the identifier waits for this event's acknowledgement before it goes.
            if unsafe { act(event, queued.target) } {
                return Ok(Next::Event(event));
            }
            // SAFETY: nobody else has seen it.
            unsafe { acknowledge(event) };
        }
    }
}

impl State {
    /// Makes the application's form of an event; `None` if it has become meaningless.
    fn deliver(&mut self, queued: &Queued) -> Option<*mut rdma_cm_event> {
        let mut listener = ptr::null_mut();
        if queued.kind == RDMA_CM_EVENT_CONNECT_REQUEST {
            let listening = self.endpoints.get_mut(&queued.counted)?;
            listening.waiting = listening.waiting.saturating_sub(1);
            listener = listening.id.0.cast();
            if self.introduce(queued.target, queued.counted).is_err() {
                self.discard(queued.target);
                return None;
            }
        }
        let endpoint = self.endpoints.get(&queued.target)?;
        if queued.kind == RDMA_CM_EVENT_CONNECT_RESPONSE && endpoint.phase != Phase::Answered {
            return None;
        }
        let id = endpoint.id.0;
        if SHOWN.contains(&queued.kind) {
            // SAFETY: the identifier is alive, as its other half is; no other call changes it before the
            // application has this event.
            unsafe { Id::show(id, endpoint) };
        }
        self.endpoints.get_mut(&queued.counted)?.reported += 1;
        Some(Event::deliver(queued, id.cast(), listener))
    }

    /// Makes the application's half of an identifier that a request has made.
    fn introduce(&mut self, key: Key, listener: Key) -> Result<(), Errno> {
        let listening = self.endpoint(listener)?;
        let synchronous = listening.synchronous;
        let from: *mut rdma_cm_id = listening.id.0.cast();
        // SAFETY: who listens is alive, as its other half is.
        let (mut channel, context) = unsafe { ((*from).channel, (*from).context) };
        if synchronous {
            channel = Channel::create(self)?;
            let to = self.channel(channel)?;
            self.move_events(key, to)?;
        }
        let endpoint = self.endpoint(key)?;
        endpoint.synchronous = synchronous;
        let id = Id::allocate(key, channel, context, endpoint.space, endpoint.qp_type);
        endpoint.id = IdPointer(id);
        Ok(())
    }

    /// Moves an identifier, and those that were requested of it, to another channel.
    ///
    /// # Errors
    ///
    /// `EINVAL` for an identifier of another process.
    pub fn move_events(&mut self, key: Key, to: Key) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        let from = std::mem::replace(&mut endpoint.channel, to);
        let queue = self.channels.get_mut(&from);
        for event in queue.map(|queue| queue.take_of(key)).unwrap_or_default() {
            let target = event.target;
            if let Some(queue) = self.channels.get_mut(&to) {
                queue.push(event);
            }
            if target != key {
                self.move_events(target, to)?;
            }
        }
        Ok(())
    }

    /// Drops an identifier of which the application does not know.
    pub fn discard(&mut self, key: Key) {
        self.hang_up(key);
        let channel = self.endpoints.remove(&key).map(|endpoint| endpoint.channel);
        if let Some(queue) = channel.and_then(|channel| self.channels.get_mut(&channel)) {
            queue.take_of(key);
        }
    }
}

/// Does what an event asks for. Whether it still means something: while a queue pair is being connected its peer may go,
/// and then another event says so.
///
/// # Safety
///
/// The event and its identifier are alive, and no other call uses them.
unsafe fn act(event: *mut rdma_cm_event, key: Key) -> bool {
    // SAFETY: by the caller's promise.
    let event = unsafe { &mut *event };
    // SAFETY: as above.
    let has_qp = unsafe { !(*event.id).qp.is_null() };
    if event.event != RDMA_CM_EVENT_CONNECT_RESPONSE || !has_qp {
        return true;
    }
    // SAFETY: as above.
    let connected = unsafe { connect_qp(event.id, key) };
    let Err(error) = connected.and_then(|()| Shared::get().lock().ready_to_use(key)) else {
        event.event = RDMA_CM_EVENT_ESTABLISHED;
        return true;
    };
    event.event = RDMA_CM_EVENT_CONNECT_ERROR;
    event.status = -error.raw_os_error();
    // SAFETY: as above.
    let _ = unsafe { fail_qp(event.id) };
    Shared::get().lock().give_up(key)
}

impl State {
    /// Tells the peer that the connection is there.
    ///
    /// # Errors
    ///
    /// `EINVAL` unless the peer has just accepted it.
    pub fn ready_to_use(&mut self, key: Key) -> Result<(), Errno> {
        let endpoint = self.endpoint(key)?;
        let (Phase::Answered, Some(socket)) = (endpoint.phase, endpoint.socket) else {
            return Err(Errno::INVAL);
        };
        endpoint.phase = Phase::Established;
        self.send(socket, &Message::ReadyToUse);
        Ok(())
    }

    /// Ends the attempt to connect to a peer that has accepted. Whether it had not ended, or been ended, before.
    fn give_up(&mut self, key: Key) -> bool {
        let phase = self.endpoints.get(&key).map(|endpoint| endpoint.phase);
        if phase != Some(Phase::Answered) {
            return false;
        }
        self.hang_up(key);
        if let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.phase = Phase::Failed;
        }
        true
    }
}

/// Brings an identifier's queue pair to a state.
///
/// # Errors
///
/// What the device says.
///
/// # Safety
///
/// The identifier is alive, and so is its queue pair.
pub unsafe fn move_qp(id: *mut rdma_cm_id, key: Key, state: ibv_qp_state) -> Result<(), Errno> {
    let (mut attr, mask) = Shared::get().lock().endpoint(key)?.qp_attr(state)?;
    // SAFETY: by the caller's promise.
    check(unsafe { verbs::ibv_modify_qp((*id).qp, &raw mut attr, mask as i32) })
}

/// Connects an identifier's queue pair to the peer's.
///
/// # Errors
///
/// What the device says.
///
/// # Safety
///
/// As for [`move_qp`].
pub unsafe fn connect_qp(id: *mut rdma_cm_id, key: Key) -> Result<(), Errno> {
    // Once more INIT: what the peer may do is known by now.
    for state in [IBV_QPS_INIT, IBV_QPS_RTR, IBV_QPS_RTS] {
        // SAFETY: by the caller's promise.
        unsafe { move_qp(id, key, state)? };
    }
    Ok(())
}

/// Ends whatever an identifier's queue pair does, if it has one.
///
/// # Errors
///
/// What the device says.
///
/// # Safety
///
/// As for [`move_qp`].
pub unsafe fn fail_qp(id: *mut rdma_cm_id) -> Result<(), Errno> {
    // SAFETY: by the caller's promise.
    let qp = unsafe { (*id).qp };
    if qp.is_null() {
        return Ok(());
    }
    let mut attr = verbs_sys::ffi::ibv_qp_attr::zeroed();
    attr.qp_state = IBV_QPS_ERR;
    let mask = verbs_sys::ffi::IBV_QP_STATE as i32;
    // SAFETY: by the caller's promise.
    check(unsafe { verbs::ibv_modify_qp(qp, &raw mut attr, mask) })
}

/// Gives an event back.
///
/// # Safety
///
/// It came from [`next`] and is not used any more.
pub unsafe fn acknowledge(event: *mut rdma_cm_event) {
    // SAFETY: by the caller's promise.
    let key = unsafe { Event::release(event) };
    let shared = Shared::get();
    if let Ok(endpoint) = shared.lock().endpoint(key) {
        endpoint.acknowledged += 1;
        shared.tell_acknowledged();
    }
}

/// Gives back the event that a synchronous identifier shows.
///
/// # Safety
///
/// The identifier is alive.
pub unsafe fn drop_event(id: *mut rdma_cm_id) {
    // SAFETY: by the caller's promise.
    let event = unsafe { std::mem::replace(&mut (*id).event, ptr::null_mut()) };
    if !event.is_null() {
        // SAFETY: it was shown to the application until now.
        unsafe { acknowledge(event) };
    }
}

/// Of a synchronous identifier, waits for the event of what was begun. Another may be gone already: once it was begun, any
/// thread may have got its event.
///
/// # Errors
///
/// What the event says; `ECONNREFUSED` for a rejection.
///
/// # Safety
///
/// The identifier is alive, if it is a synchronous one.
pub unsafe fn complete(id: *mut rdma_cm_id, key: Key) -> Result<(), Errno> {
    let begun = Shared::get().lock();
    if !begun
        .endpoints
        .get(&key)
        .is_some_and(|endpoint| endpoint.synchronous)
    {
        return Ok(());
    }
    drop(begun);
    // SAFETY: by the caller's promise, and the channel is the identifier's own.
    let event = unsafe {
        drop_event(id);
        next((*id).channel)?
    };
    // SAFETY: as above; the event was just made.
    let status = unsafe {
        (*id).event = event;
        (*event).status
    };
    match status {
        0 => Ok(()),
        ..0 => Err(Errno::from_raw_os_error(-status)),
        // The peer's reason.
        _ => Err(Errno::CONNREFUSED),
    }
}
