//! Listening: connections of strangers, and the first message of each.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::SocketFlags;
use verbs_sys::ffi::{IBV_QPT_RC, IBV_QPT_UC, IBV_QPT_UD};

use crate::abi::{RDMA_CM_EVENT_CONNECT_REQUEST, RDMA_PS_IB};
use crate::address::gid_of;
use crate::device::Place;
use crate::endpoint::{Endpoint, Phase};
use crate::event::{Param, Queued};
use crate::fork::Mine;
use crate::message::{
    Message, REJ_CONSUMER_DEFINED, REJ_INVALID_SERVICE_ID, REQ_PRIVATE, Request, SIDR_REJECT,
    SIDR_REQ_PRIVATE, SIDR_UNSUPPORTED, Service,
};
use crate::network;
use crate::protocol::padded;
use crate::shared::{Key, Shared, State, new_key};
use crate::socket::{Origin, Role, Socket, origin_of};

/// Connections that are taken under one lock.
const AT_A_TIME: usize = 32;
/// Until connections are taken again, when there are too many files.
const PAUSE: Duration = Duration::from_millis(100);
/// How long a stranger may take to say what it wants.
const GREETING: Duration = Duration::from_secs(10);
/// Strangers of a listener that have not said it; when there is one more, the first has to go.
const MOST_STRANGERS: usize = 64;
/// Most requests that wait for the application, rdma_listen(3).
const MOST_WAITING: usize = 1024;

impl State {
    /// Listens at the address that an identifier is bound to.
    ///
    /// # Errors
    ///
    /// `EINVAL` where it is not bound, `EADDRINUSE` where others share the address, and what the kernel says.
    pub fn listen(&mut self, key: Key, backlog: i32) -> Result<(), Errno> {
        self.engine()?;
        let endpoint = self.endpoint(key)?;
        let (Phase::Bound, Some(local)) = (endpoint.phase, endpoint.local) else {
            return Err(Errno::INVAL);
        };
        let (space, v6_only) = (endpoint.space, endpoint.options.v6_only);
        let claim = endpoint.claim.take();
        let claim = match self.ports.own(space, local, key, claim) {
            Ok(claim) => claim,
            Err((error, claim)) => {
                self.endpoint(key)?.claim = claim;
                return Err(error);
            }
        };
        let remote = network::listen_address(local, network::reach());
        let remote = match remote.map(|at| network::listen(at, v6_only)).transpose() {
            Ok(remote) => remote,
            Err(error) => {
                self.endpoint(key)?.claim = Some(claim);
                return Err(error);
            }
        };
        rustix::net::listen(&claim, network::QUEUE)?;
        let mut add = |fd: Mine| {
            let listener = Socket::Listener { fd, endpoint: key };
            self.add_socket(listener, EventFlags::IN)
        };
        let host = add(claim)?;
        let remote = remote.map(add).transpose();
        let endpoint = self.endpoint(key)?;
        endpoint.socket = Some(host);
        endpoint.remote_listener = remote?;
        endpoint.phase = Phase::Listening;
        let backlog = usize::try_from(backlog).unwrap_or_default();
        endpoint.backlog = if backlog == 0 {
            MOST_WAITING
        } else {
            backlog.min(MOST_WAITING)
        };
        Ok(())
    }

    /// Takes connections.
    pub fn accept(&mut self, key: Key) {
        for _ in 0..AT_A_TIME {
            let Some(Socket::Listener { fd, endpoint }) = self.sockets.get(&key) else {
                return;
            };
            let endpoint = *endpoint;
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            match rustix::net::accept_with(fd, flags) {
                Ok(socket) => self.welcome(endpoint, key, Mine::new(socket)),
                Err(Errno::AGAIN) => return,
                Err(Errno::MFILE | Errno::NFILE | Errno::NOBUFS | Errno::NOMEM) => {
                    // It stays readable, and asking again at once would be asking for ever.
                    self.watch_for(key, EventFlags::empty());
                    self.set_timer(key, Instant::now() + PAUSE);
                    return;
                }
                // That connection has ended, and there may be more.
                Err(_) => {}
            }
        }
    }

    fn welcome(&mut self, listener: Key, through: Key, socket: Mine) {
        let Some(endpoint) = self.endpoints.get(&listener) else {
            return;
        };
        let origin = if endpoint.remote_listener == Some(through) {
            match network::adjust(&socket).and_then(|()| origin_of(&socket)) {
                Ok(origin) => origin,
                Err(_) => return,
            }
        } else if network::is_same_user(&socket) {
            Origin::Host
        } else {
            return;
        };
        let Ok(stream) = self.add_stream(socket, Role::Greeting(listener), origin) else {
            return;
        };
        self.set_timer(stream, Instant::now() + GREETING);
        let Some(endpoint) = self.endpoints.get_mut(&listener) else {
            return;
        };
        endpoint.strangers.push_back(stream);
        if endpoint.strangers.len() > MOST_STRANGERS
            && let Some(first) = endpoint.strangers.pop_front()
        {
            self.close(first);
        }
    }

    /// A stranger has gone, or is none any more.
    pub fn no_stranger(&mut self, listener: Key, socket: Key) {
        if let Some(endpoint) = self.endpoints.get_mut(&listener) {
            endpoint.strangers.retain(|stranger| *stranger != socket);
        }
    }

    /// A stranger has said what it wants.
    pub fn greeted(&mut self, listener: Key, socket: Key, message: Message) {
        self.no_stranger(listener, socket);
        self.clear_timer(socket);
        let (service, refusal) = match &message {
            Message::Request(request) => (request.service, reject as fn(Refusal) -> Message),
            Message::Lookup { service, .. } => (*service, not_found as fn(Refusal) -> Message),
            _ => {
                self.close(socket);
                return;
            }
        };
        match self.admit(listener, socket, &service, &message) {
            Ok(endpoint) => self.announce(listener, socket, endpoint, message),
            Err(why) => self.send_last(socket, &refusal(why)),
        }
    }

    /// The identifier of a request, if it is a good one.
    fn admit(
        &mut self,
        listener: Key,
        socket: Key,
        service: &Service,
        message: &Message,
    ) -> Result<Endpoint, Refusal> {
        let origin = self.stream(socket).ok_or(Refusal::Unwanted)?.origin;
        let listening = self.endpoints.get(&listener).ok_or(Refusal::NoService)?;
        let local = listening.local.ok_or(Refusal::NoService)?;
        let qp_type = match message {
            Message::Request(request) => u32::from(request.qp_type),
            _ => IBV_QPT_UD,
        };
        let fits = u32::from(service.port_space) == listening.space
            && service.to.port() == local.port()
            && stands_for(local, listening.options.v6_only, service.to)
            && is_honest(origin, service)
            && match qp_type {
                IBV_QPT_UD => listening.is_datagram(),
                IBV_QPT_RC => !listening.is_datagram(),
                IBV_QPT_UC => !listening.is_datagram() && listening.space == RDMA_PS_IB,
                _ => false,
            };
        if !fits {
            return Err(Refusal::NoService);
        }
        if listening.waiting >= listening.backlog {
            return Err(Refusal::Unwanted);
        }
        let shared = Shared::get();
        let place = shared.place_of(service.to.ip());
        let place = place.map_err(|_| Refusal::NoService)?;
        let mut endpoint = Endpoint::new(listening.channel, listening.space, qp_type);
        endpoint.phase = Phase::Requested;
        endpoint.listener = Some(listener);
        endpoint.options = listening.options;
        endpoint.local = Some(service.to);
        endpoint.remote = Some(service.from);
        endpoint.dgid = gid_at(shared, origin, service.from, place);
        endpoint.place = Some(place);
        Ok(endpoint)
    }

    fn announce(&mut self, listener: Key, socket: Key, mut endpoint: Endpoint, message: Message) {
        let key = new_key();
        let mut event = Queued::new(key, listener, RDMA_CM_EVENT_CONNECT_REQUEST);
        match message {
            Message::Request(request) => {
                event.param = Param::Connection(request.side, request.retry);
                endpoint.adopt(&request);
                event.private = padded(request.private, REQ_PRIVATE);
            }
            Message::Lookup { private, .. } => event.private = padded(private, SIDR_REQ_PRIVATE),
            _ => {}
        }
        endpoint.socket = Some(socket);
        if let Some(stream) = self.stream(socket) {
            stream.role = Role::Talking(key);
        }
        self.endpoints.insert(key, endpoint);
        if let Some(listening) = self.endpoints.get_mut(&listener) {
            listening.waiting += 1;
        }
        self.push(event);
    }
}

impl Endpoint {
    /// Takes what a requester says of the connection.
    fn adopt(&mut self, request: &Request) {
        self.peer = request.side;
        self.retry = request.retry;
        self.mtu = request.mtu;
        let Some(place) = self.place else { return };
        if let Ok(mtu) = place.device.mtu(place.port) {
            self.mtu = self.mtu.min(mtu as u8);
        }
        // What the other side sends is what this one has to take, as far as the device can.
        let device = place.device;
        let (takes, sends) = (self.peer.responder_resources, self.peer.initiator_depth);
        self.own.responder_resources = sends.min(device.max_responder_resources);
        self.own.initiator_depth = takes.min(device.max_initiator_depth);
    }
}

/// Why a request is refused.
#[derive(Clone, Copy, Debug)]
enum Refusal {
    /// It asks for what is not here.
    NoService,
    /// It could be served, but is not.
    Unwanted,
}

fn reject(why: Refusal) -> Message {
    Message::Reject {
        reason: match why {
            Refusal::NoService => REJ_INVALID_SERVICE_ID,
            Refusal::Unwanted => REJ_CONSUMER_DEFINED,
        },
        private: Vec::new(),
    }
}

fn not_found(why: Refusal) -> Message {
    Message::Found {
        status: match why {
            Refusal::NoService => SIDR_UNSUPPORTED,
            Refusal::Unwanted => SIDR_REJECT,
        },
        qp_num: 0,
        qkey: 0,
        private: Vec::new(),
    }
}

/// Whether who listens at an address is to be found at another.
fn stands_for(local: SocketAddr, v6_only: bool, asked: SocketAddr) -> bool {
    let (local, asked) = (local.ip().to_canonical(), asked.ip().to_canonical());
    if !local.is_unspecified() {
        return local == asked;
    }
    local.is_ipv4() == asked.is_ipv4() || (local.is_ipv6() && !v6_only)
}

/// A peer of another host has the addresses that its connection has. One of this host is the same user's.
fn is_honest(origin: Origin, service: &Service) -> bool {
    match origin {
        Origin::Host => true,
        Origin::Network { local, peer } => {
            local.ip().to_canonical() == service.to.ip().to_canonical()
                && peer.ip().to_canonical() == service.from.ip().to_canonical()
        }
    }
}

/// The GID of a peer.
pub fn gid_at(shared: &Shared, origin: Origin, peer: SocketAddr, own: Place) -> [u8; 16] {
    match origin {
        Origin::Host => shared
            .place_of(peer.ip())
            .map_or(own.gid, |place| place.gid),
        Origin::Network { peer, .. } => gid_of(peer.ip().to_canonical()),
    }
}
