//! What messages, ends of connections and deadlines mean for an identifier.

use core::ffi::c_int;
use std::time::Instant;

use rustix::io::Errno;

use crate::abi::{
    RDMA_CM_EVENT_CONNECT_RESPONSE, RDMA_CM_EVENT_DISCONNECTED, RDMA_CM_EVENT_ESTABLISHED,
    RDMA_CM_EVENT_REJECTED, RDMA_CM_EVENT_TIMEWAIT_EXIT, RDMA_CM_EVENT_UNREACHABLE,
    rdma_cm_event_type,
};
use crate::endpoint::{Endpoint, PATIENCE, Phase, TIMEWAIT};
use crate::event::{Param, Queued};
use crate::message::{
    Message, MessageError, REJ_CLASS_VERSION, REJ_CONSUMER_DEFINED, REJ_INVALID_SERVICE_ID,
    REJ_PRIVATE, REJ_TIMEOUT, REP_PRIVATE, SIDR_REJECT, SIDR_REP_PRIVATE, SIDR_SUCCESS,
    SIDR_UNSUPPORTED, Side,
};
use crate::shared::{Key, State};
use crate::socket::Role;

/// How a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The other side has closed it, or died.
    Closed,
    /// What it says makes no sense.
    Nonsense(MessageError),
    /// It says what it must not say now.
    Unexpected,
}

/// Private data as it comes out of a datagram of a fixed size: zeros follow what was sent.
pub fn padded(mut private: Vec<u8>, len: usize) -> Vec<u8> {
    private.resize(len, 0);
    private
}

impl State {
    /// A message has come.
    pub fn received(&mut self, socket: Key, message: Message) {
        match self.stream(socket).map(|stream| stream.role) {
            Some(Role::Greeting(listener)) => self.greeted(listener, socket, message),
            Some(Role::Talking(key)) => {
                if !self.told(key, socket, message) {
                    self.ended(socket, Ending::Unexpected);
                }
            }
            Some(Role::Dialing(_) | Role::Leaving) | None => {}
        }
    }

    /// A message for an identifier has come. Whether it may say that.
    fn told(&mut self, key: Key, socket: Key, message: Message) -> bool {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return false;
        };
        match (endpoint.phase, message) {
            (Phase::Connecting, Message::Reply { side, private }) if !endpoint.is_datagram() => {
                self.answered(key, side, private);
            }
            (
                Phase::Connecting,
                Message::Found {
                    status,
                    qp_num,
                    qkey,
                    private,
                },
            ) if endpoint.is_datagram() => {
                self.close(socket);
                self.found(key, status, qp_num, qkey, private);
            }
            (
                Phase::Connecting | Phase::Answered | Phase::Requested | Phase::Accepted,
                Message::Reject { reason, private },
            ) if !endpoint.is_datagram() => {
                self.close(socket);
                let private = padded(private, REJ_PRIVATE);
                self.fail(key, RDMA_CM_EVENT_REJECTED, reason.into(), private);
            }
            (Phase::Accepted, Message::ReadyToUse) => self.establish(key),
            (Phase::Established | Phase::Disconnecting | Phase::Accepted, Message::Disconnect) => {
                self.send_last(socket, &Message::Disconnected);
                self.disconnected(key);
            }
            (Phase::Answered, Message::Disconnect) => {
                self.close(socket);
                let reason = REJ_CONSUMER_DEFINED.into();
                self.fail(key, RDMA_CM_EVENT_REJECTED, reason, Vec::new());
            }
            (Phase::Disconnecting, Message::Disconnected) => {
                self.close(socket);
                self.disconnected(key);
            }
            // It was not waited for: the application has said that the connection is there, or that it shall end.
            (Phase::Established | Phase::Disconnecting, Message::ReadyToUse) => {}
            _ => return false,
        }
        true
    }

    /// A stream has ended.
    pub fn ended(&mut self, socket: Key, ending: Ending) {
        let role = self.stream(socket).map(|stream| stream.role);
        if let (Some(Role::Greeting(_)), Ending::Nonsense(MessageError::Version(_))) =
            (role, ending)
        {
            let reason = REJ_CLASS_VERSION;
            let private = Vec::new();
            self.send_last(socket, &Message::Reject { reason, private });
        } else {
            self.close(socket);
        }
        match role {
            Some(Role::Greeting(listener)) => self.no_stranger(listener, socket),
            Some(Role::Talking(key)) => self.cut_off(key, ending),
            Some(Role::Dialing(_) | Role::Leaving) | None => {}
        }
    }

    /// An identifier's connection to its peer's connection manager has ended.
    fn cut_off(&mut self, key: Key, ending: Ending) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.socket = None;
        match endpoint.phase {
            Phase::Connecting if ending != Ending::Closed => self.unreachable(key, Errno::PROTO),
            Phase::Connecting if endpoint.is_datagram() => {
                self.fail(
                    key,
                    RDMA_CM_EVENT_UNREACHABLE,
                    SIDR_REJECT.into(),
                    Vec::new(),
                );
            }
            // The kernel of one that dies says so on its behalf.
            Phase::Connecting | Phase::Answered => {
                let reason = REJ_CONSUMER_DEFINED.into();
                self.fail(key, RDMA_CM_EVENT_REJECTED, reason, Vec::new());
            }
            // Nobody will read the answer.
            Phase::Requested if endpoint.is_datagram() => {}
            Phase::Requested | Phase::Accepted => {
                self.fail(key, RDMA_CM_EVENT_REJECTED, REJ_TIMEOUT.into(), Vec::new());
            }
            Phase::Established | Phase::Disconnecting => self.disconnected(key),
            _ => {}
        }
    }

    /// An identifier's time has come.
    pub fn endpoint_timed_out(&mut self, key: Key) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        let socket = endpoint.socket.take();
        match endpoint.phase {
            Phase::Connecting | Phase::Accepted => {
                if let Some(socket) = socket {
                    self.send_last(socket, &rejection(REJ_TIMEOUT));
                }
                self.unreachable(key, Errno::TIMEDOUT);
            }
            Phase::Disconnecting => {
                if let Some(socket) = socket {
                    self.close(socket);
                }
                self.disconnected(key);
            }
            Phase::Disconnected => self.tell(key, RDMA_CM_EVENT_TIMEWAIT_EXIT),
            _ => endpoint.socket = socket,
        }
    }

    /// The peer accepts.
    fn answered(&mut self, key: Key, side: Side, private: Vec<u8>) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.phase = Phase::Answered;
        endpoint.peer = side;
        // What the other side takes bounds what this one sends, and the other way round.
        endpoint.own.initiator_depth = side.responder_resources;
        endpoint.own.responder_resources = side.initiator_depth;
        if let Some(place) = endpoint.place {
            let (own, device) = (&mut endpoint.own, place.device);
            own.initiator_depth = own.initiator_depth.min(device.max_initiator_depth);
            own.responder_resources = own.responder_resources.min(device.max_responder_resources);
        }
        self.clear_timer(key);
        let mut event = Queued::new(key, key, RDMA_CM_EVENT_CONNECT_RESPONSE);
        event.param = Param::Connection(side, 0);
        event.private = padded(private, REP_PRIVATE);
        self.push(event);
    }

    /// The datagram service is there, or not.
    fn found(&mut self, key: Key, status: u8, qp_num: u32, qkey: u32, private: Vec<u8>) {
        let private = padded(private, SIDR_REP_PRIVATE);
        let way = self.endpoint(key).and_then(|endpoint| endpoint.ah_attr());
        let (SIDR_SUCCESS, Ok(ah_attr)) = (status, way) else {
            self.fail(key, RDMA_CM_EVENT_UNREACHABLE, status.into(), private);
            return;
        };
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        endpoint.phase = Phase::Resolved;
        endpoint.socket = None;
        self.clear_timer(key);
        let mut event = Queued::new(key, key, RDMA_CM_EVENT_ESTABLISHED);
        event.param = Param::Datagrams {
            ah_attr,
            qp_num,
            qkey,
        };
        event.private = private;
        self.push(event);
    }

    /// The connection is there for whoever has accepted it.
    pub fn establish(&mut self, key: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.phase = Phase::Established;
            self.clear_timer(key);
            self.tell(key, RDMA_CM_EVENT_ESTABLISHED);
        }
    }

    fn disconnected(&mut self, key: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.phase = Phase::Disconnected;
            endpoint.socket = None;
            self.set_timer(key, Instant::now() + TIMEWAIT);
            self.tell(key, RDMA_CM_EVENT_DISCONNECTED);
        }
    }

    /// Nobody is where an identifier wants to connect to.
    pub fn nobody_listens(&mut self, key: Key) {
        let datagram = self.endpoints.get(&key).is_some_and(Endpoint::is_datagram);
        if datagram {
            let status = SIDR_UNSUPPORTED.into();
            self.fail(key, RDMA_CM_EVENT_UNREACHABLE, status, Vec::new());
        } else {
            let reason = REJ_INVALID_SERVICE_ID.into();
            self.fail(key, RDMA_CM_EVENT_REJECTED, reason, Vec::new());
        }
    }

    /// The peer of an identifier cannot be reached.
    pub fn unreachable(&mut self, key: Key, error: Errno) {
        let status = -error.raw_os_error();
        self.fail(key, RDMA_CM_EVENT_UNREACHABLE, status, Vec::new());
    }

    /// There will be no connection.
    fn fail(&mut self, key: Key, kind: rdma_cm_event_type, status: c_int, private: Vec<u8>) {
        if let Some(endpoint) = self.endpoints.get_mut(&key) {
            endpoint.phase = Phase::Failed;
            endpoint.socket = None;
            endpoint.dial = None;
            self.clear_timer(key);
            let mut event = Queued::new(key, key, kind);
            event.status = status;
            event.private = private;
            self.push(event);
        }
    }

    /// An event without parameters.
    fn tell(&mut self, key: Key, kind: rdma_cm_event_type) {
        self.push(Queued::new(key, key, kind));
    }

    /// Begins to disconnect: rdma_disconnect(3). What has no connection has none to end.
    pub fn disconnect(&mut self, key: Key) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        if let (Phase::Established | Phase::Accepted | Phase::Answered, Some(socket)) =
            (endpoint.phase, endpoint.socket)
        {
            endpoint.phase = Phase::Disconnecting;
            self.set_timer(key, Instant::now() + PATIENCE);
            self.send(socket, &Message::Disconnect);
        }
    }

    /// Takes an identifier's last leave from its peer.
    pub fn hang_up(&mut self, key: Key) {
        let Some(endpoint) = self.endpoints.get_mut(&key) else {
            return;
        };
        let datagram = endpoint.is_datagram();
        let (phase, socket) = (endpoint.phase, endpoint.socket.take());
        self.clear_timer(key);
        let Some(socket) = socket else { return };
        match phase {
            Phase::Requested if datagram => self.send_last(socket, &not_found()),
            Phase::Requested | Phase::Accepted | Phase::Answered => {
                self.send_last(socket, &rejection(REJ_CONSUMER_DEFINED));
            }
            Phase::Connecting if !datagram => self.send_last(socket, &rejection(REJ_TIMEOUT)),
            Phase::Established => self.send_last(socket, &Message::Disconnect),
            _ => self.close(socket),
        }
    }
}

/// A rejection without private data.
fn rejection(reason: u16) -> Message {
    let private = Vec::new();
    Message::Reject { reason, private }
}

/// The answer to a lookup that the application does not want.
fn not_found() -> Message {
    Message::Found {
        status: SIDR_REJECT,
        qp_num: 0,
        qkey: 0,
        private: Vec::new(),
    }
}
