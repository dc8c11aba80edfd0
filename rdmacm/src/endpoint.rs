//! What stands behind an identifier.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use rustix::io::Errno;
use verbs_sys::ffi::*;

use crate::abi::{RDMA_PS_IPOIB, RDMA_PS_UDP, RDMA_UDP_QKEY, rdma_port_space};
use crate::device::Place;
use crate::dial::Dial;
use crate::fork::Mine;
use crate::id::Id;
use crate::message::Side;
use crate::shared::{Key, random};

/// How long either side waits for the other's answer. The kernel's connection manager repeats a message
/// 16 times in about as long.
pub const PATIENCE: Duration = Duration::from_secs(60);
/// From the end of a connection to the event that says that nothing of it is under way any more: twice the
/// time that a packet may live.
pub const TIMEWAIT: Duration = Duration::from_secs(1);
/// Timeout of queue pairs where none is set: 4.096 us times two to this power, about a second.
const ACK_TIMEOUT: u8 = 18;
/// Hops of what queue pairs send.
const HOP_LIMIT: u8 = 64;

/// How far an identifier has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Phase {
    /// New.
    Idle,
    /// Has a local address, at least a port.
    Bound,
    /// Has the peer's address, too.
    AddressResolved,
    /// Can connect.
    RouteResolved,
    /// Waits for requests.
    Listening,
    /// Has asked, and waits for the answer.
    Connecting,
    /// Has been asked.
    Requested,
    /// Has accepted, and waits for the last message.
    Accepted,
    /// Has been accepted; the application does not know it yet, or has to establish the connection.
    Answered,
    /// Connected.
    Established,
    /// Has ended the connection, and waits for the other side to say that it knows.
    Disconnecting,
    /// Was connected.
    Disconnected,
    /// Knows the datagram service that it asked for, or has answered the one who asked.
    Resolved,
    /// Will not be connected.
    Failed,
}

/// An identifier's address in memory. Only the application's threads follow it.
#[derive(Clone, Copy, Debug)]
pub struct IdPointer(pub *mut Id);

// SAFETY: it is followed only by calls with that identifier, or with an event of it.
unsafe impl Send for IdPointer {}

/// What rdma_set_option(3) sets.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    /// Traffic class.
    pub tos: u8,
    /// Encoded timeout, where set.
    pub ack_timeout: Option<u8>,
    /// The address can be another's, too, who says so.
    pub shares_address: bool,
    /// An unspecified IPv6 address does not stand for IPv4 addresses.
    pub v6_only: bool,
}

/// The other half of an identifier.
#[derive(Debug)]
pub struct Endpoint {
    /// The application's half; null until the application gets the request that has made it.
    pub id: IdPointer,
    /// Where its events go.
    pub channel: Key,
    /// Whether the channel is its own, and calls wait for their events.
    pub synchronous: bool,
    /// Port space.
    pub space: rdma_port_space,
    /// Type of its queue pairs.
    pub qp_type: ibv_qp_type,
    /// How far it has come.
    pub phase: Phase,
    /// Of one that a request has made, who listened.
    pub listener: Option<Key>,
    /// Events that the application has got.
    pub reported: u64,
    /// Events that it has acknowledged.
    pub acknowledged: u64,
    /// Own address.
    pub local: Option<SocketAddr>,
    /// The peer's address.
    pub remote: Option<SocketAddr>,
    /// Where on a device the own address is.
    pub place: Option<Place>,
    /// The peer's GID.
    pub dgid: [u8; 16],
    /// The name that stands for the own address, unless another has it who shares that.
    pub claim: Option<Mine>,
    /// Connection to the peer's connection manager; where it listens, the socket of this host.
    pub socket: Option<Key>,
    /// Where it listens to other hosts.
    pub remote_listener: Option<Key>,
    /// Requests that may wait for the application.
    pub backlog: usize,
    /// Those that do.
    pub waiting: usize,
    /// Connections of which nobody knows yet what they want.
    pub strangers: VecDeque<Key>,
    /// The attempt to reach the peer.
    pub dial: Option<Dial>,
    /// Options.
    pub options: Options,
    /// What this side says of its queue pair.
    pub own: Side,
    /// What the other says.
    pub peer: Side,
    /// How often what is not acknowledged is repeated.
    pub retry: u8,
    /// Encoded path MTU.
    pub mtu: u8,
}

impl Endpoint {
    /// A new one.
    #[must_use]
    pub fn new(channel: Key, space: rdma_port_space, qp_type: ibv_qp_type) -> Self {
        Self {
            id: IdPointer(std::ptr::null_mut()),
            channel,
            synchronous: false,
            space,
            qp_type,
            phase: Phase::Idle,
            listener: None,
            reported: 0,
            acknowledged: 0,
            local: None,
            remote: None,
            place: None,
            dgid: [0; 16],
            claim: None,
            socket: None,
            remote_listener: None,
            backlog: 0,
            waiting: 0,
            strangers: VecDeque::new(),
            dial: None,
            options: Options::default(),
            own: Side {
                psn: random() as u32 & 0xff_ffff,
                ..Side::default()
            },
            peer: Side::default(),
            retry: 7,
            mtu: IBV_MTU_1024 as u8,
        }
    }

    /// Whether it is for datagrams.
    #[must_use]
    pub fn is_datagram(&self) -> bool {
        self.qp_type == IBV_QPT_UD || matches!(self.space, RDMA_PS_UDP | RDMA_PS_IPOIB)
    }

    /// The way to the peer.
    ///
    /// # Errors
    ///
    /// `EINVAL` before the addresses are known.
    pub fn ah_attr(&self) -> Result<ibv_ah_attr, Errno> {
        let place = self.place.ok_or(Errno::INVAL)?;
        self.remote.ok_or(Errno::INVAL)?;
        let mut attr = ibv_ah_attr::zeroed();
        attr.is_global = 1;
        attr.port_num = place.port;
        attr.grh.dgid = ibv_gid { raw: self.dgid };
        attr.grh.sgid_index = place.gid_index;
        attr.grh.hop_limit = HOP_LIMIT;
        attr.grh.traffic_class = self.options.tos;
        Ok(attr)
    }

    /// What its queue pair needs to go to a state, and the mask: rdma_init_qp_attr(3).
    ///
    /// # Errors
    ///
    /// `EINVAL` for another state than INIT, RTR and RTS, and where not enough is known.
    pub fn qp_attr(&self, state: ibv_qp_state) -> Result<(ibv_qp_attr, ibv_qp_attr_mask), Errno> {
        let place = self.place.ok_or(Errno::INVAL)?;
        let mut attr = ibv_qp_attr::zeroed();
        attr.qp_state = state;
        let mut mask = IBV_QP_STATE;
        match state {
            IBV_QPS_INIT => {
                mask |= IBV_QP_PKEY_INDEX | IBV_QP_PORT;
                attr.port_num = place.port;
                if self.is_datagram() {
                    mask |= IBV_QP_QKEY;
                    attr.qkey = RDMA_UDP_QKEY;
                } else {
                    mask |= IBV_QP_ACCESS_FLAGS;
                    attr.qp_access_flags = self.access();
                }
            }
            IBV_QPS_RTR if self.is_datagram() => {}
            IBV_QPS_RTR => {
                self.know_peer()?;
                mask |= IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN;
                attr.ah_attr = self.ah_attr()?;
                attr.path_mtu = self.mtu.into();
                attr.dest_qp_num = self.peer.qp_num;
                attr.rq_psn = self.peer.psn;
                if self.qp_type != IBV_QPT_UC {
                    mask |= IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER;
                    attr.max_dest_rd_atomic = self.own.responder_resources;
                }
            }
            IBV_QPS_RTS => {
                mask |= IBV_QP_SQ_PSN;
                if !self.is_datagram() {
                    self.know_peer()?;
                    attr.sq_psn = self.own.psn;
                }
                if !self.is_datagram() && self.qp_type != IBV_QPT_UC {
                    mask |= IBV_QP_TIMEOUT
                        | IBV_QP_RETRY_CNT
                        | IBV_QP_RNR_RETRY
                        | IBV_QP_MAX_QP_RD_ATOMIC;
                    attr.timeout = self.options.ack_timeout.unwrap_or(ACK_TIMEOUT);
                    attr.retry_cnt = self.retry;
                    attr.rnr_retry = self.peer.rnr_retry;
                    attr.max_rd_atomic = self.own.initiator_depth;
                }
            }
            _ => return Err(Errno::INVAL),
        }
        Ok((attr, mask))
    }

    fn know_peer(&self) -> Result<(), Errno> {
        let known = matches!(
            self.phase,
            Phase::Requested | Phase::Accepted | Phase::Answered | Phase::Established
        );
        known.then_some(()).ok_or(Errno::INVAL)
    }

    /// What the peer may do with the memory of this side: nothing before it is known.
    fn access(&self) -> u32 {
        if self.know_peer().is_err() {
            0
        } else if self.own.responder_resources == 0 {
            IBV_ACCESS_REMOTE_WRITE
        } else {
            IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC
        }
    }
}
