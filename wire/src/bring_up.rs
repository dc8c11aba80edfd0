//! Making a queue pair and connecting it to a peer's, from the greeting to both sides ready.

use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use mr_pool::Buffer;
use verbs_sys::owned::OwnedQueuePair;
use verbs_sys::{
    AccessFlags, Context, Gid, PathOptions, QueuePair, QueuePairEndpoint, QueuePairInit,
};

use crate::config::Config;
use crate::error::{ConnectError, DeviceFailure, EndpointError};
use crate::greeting::{Greeting, Hello, RejectReason};
use crate::shared::{Established, Share, Shared};
use crate::talk::Talk;

/// [`PathOptions::timeout`]: about a second. The end of a peer's process is seen sooner, by the
/// greeting's socket, so this only decides how soon a slow answer is asked for again; and rdma_rxe of
/// Linux 6.1 now and then stops for ever after a READ that it asked for again.
const ACK_TIMEOUT: u8 = 18;

/// Work requests per connection beyond [`Config::send_depth`]: one message about credits.
pub(crate) const EXTRA_SENDS: u32 = 1;

/// How long a refused server may take to read why.
const LINGER: Duration = Duration::from_millis(200);

/// An endpoint's port: what a hello says about it.
#[derive(Clone, Debug)]
pub(crate) struct Port {
    pub(crate) gid: [u8; 16],
    pub(crate) gid_index: u8,
    pub(crate) lid: u16,
    pub(crate) mtu: u8,
    pub(crate) max_rd_atomic: u8,
    pub(crate) max_dest_rd_atomic: u8,
    pub(crate) software: bool,
}

impl Port {
    pub(crate) fn query(context: &Context, config: &Config) -> Result<Self, EndpointError> {
        let failed = |doing, source: DeviceFailure| EndpointError::Device {
            device: context.device_name(),
            doing,
            source,
        };
        let limits = context
            .query_device()
            .map_err(|error| failed("query the device", error.into()))?;
        let port = context
            .query_port(config.port)
            .map_err(|error| failed("query the port", error.into()))?;
        let (gid_index, gid) = match config.gid_index {
            Some(index) => context
                .query_gid(config.port, u32::from(index))
                .map(|gid| (index, gid)),
            None => context.choose_gid(config.port),
        }
        .map_err(|error| failed("find a GID", error.into()))?;
        let at_most = |limit: i32| {
            config
                .max_rd_atomic
                .min(u8::try_from(limit.max(0)).unwrap_or(u8::MAX))
        };
        Ok(Self {
            gid: gid.0,
            gid_index,
            lid: port.lid,
            mtu: u8::try_from(port.active_mtu).unwrap_or(1),
            max_rd_atomic: at_most(limits.max_qp_init_rd_atom),
            max_dest_rd_atomic: at_most(limits.max_qp_rd_atom),
            software: context.device().is_software(),
        })
    }

    pub(crate) fn introduction(&self, config: &Config) -> Hello {
        Hello {
            qp_num: 0,
            psn: 0,
            gid: self.gid,
            lid: self.lid,
            mtu: self.mtu,
            max_rd_atomic: self.max_rd_atomic,
            max_dest_rd_atomic: self.max_dest_rd_atomic,
            recv_depth: config.recv_depth,
            message_size: config.message_size,
            application: config.application,
            application_version: config.application_version,
            software: self.software,
        }
    }
}

/// Whether two sides can talk to each other; if not, why.
pub(crate) fn agree(ours: &Hello, theirs: &Hello) -> Result<(), (RejectReason, String)> {
    if ours.application != theirs.application {
        let text = format!(
            "wrong protocol: application {:#x} is spoken here, not {:#x}",
            ours.application, theirs.application
        );
        return Err((RejectReason::Application, text));
    }
    if ours.application_version != theirs.application_version {
        let text = format!(
            "wrong protocol version: version {} of the application is spoken here, not {}",
            ours.application_version, theirs.application_version
        );
        return Err((RejectReason::Application, text));
    }
    if ours.software != theirs.software {
        let name = |software| {
            if software {
                "the software device"
            } else {
                "a real device"
            }
        };
        let text = format!(
            "{} is used here and {} there; they cannot connect",
            name(ours.software),
            name(theirs.software)
        );
        return Err((RejectReason::Device, text));
    }
    Ok(())
}

/// This side's queue pair while its connection is being made.
#[derive(Debug)]
pub(crate) struct Local {
    // Before the share: the queue pair is gone when another may take its place in the completion
    // queue.
    qp: Side,
    hello: Hello,
    depth: u32,
    peer: SocketAddr,
    share: Share,
}

#[derive(Debug)]
enum Side {
    Unconnected(QueuePair),
    Connected(OwnedQueuePair<Buffer>),
    Taken,
}

impl Local {
    /// Makes a queue pair that can be introduced to `peer`.
    pub(crate) fn new(shared: &Arc<Shared>, peer: SocketAddr) -> Result<Self, ConnectError> {
        let share = Share::take(shared)?;
        let failed = |doing, source: DeviceFailure| ConnectError::Device {
            peer,
            doing,
            source,
        };
        let config = &shared.config;
        let qp = shared
            .pd
            .create_qp(&QueuePairInit {
                max_send_wr: config.send_depth + EXTRA_SENDS,
                max_recv_wr: config.recv_depth,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: config.max_inline,
                sq_sig_all: false,
                ..QueuePairInit::new(&shared.cq, &shared.cq)
            })
            .map_err(|error| failed("create a queue pair", error.into()))?;
        let mut access = AccessFlags::REMOTE_READ;
        if config.allow_remote_write {
            access |= AccessFlags::REMOTE_WRITE | AccessFlags::LOCAL_WRITE;
        }
        qp.to_init(access, config.port)
            .map_err(|error| failed("initialize the queue pair", error.into()))?;
        let hello = Hello {
            qp_num: qp.qp_num(),
            psn: random_24_bits(),
            ..shared.port.introduction(config)
        };
        Ok(Self {
            qp: Side::Unconnected(qp),
            hello,
            depth: 0,
            peer,
            share,
        })
    }

    /// What the peer is told about it.
    pub(crate) fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Posts the receives and connects the queue pair: afterwards it can receive and send.
    pub(crate) fn connect(&mut self, theirs: &Hello) -> Result<(), ConnectError> {
        let peer = self.peer;
        let failed = |doing, source: DeviceFailure| ConnectError::Device {
            peer,
            doing,
            source,
        };
        let shared = self.share.shared();
        let config = &shared.config;
        let Side::Unconnected(qp) = std::mem::replace(&mut self.qp, Side::Taken) else {
            return Err(ConnectError::WrongEndpoint);
        };
        self.depth = self.hello.recv_depth.min(theirs.recv_depth);
        let mut qp = OwnedQueuePair::new(qp, config.send_depth + EXTRA_SENDS, config.recv_depth);
        for _ in 0..self.depth {
            let buffer = shared
                .pool
                .take(config.message_size as usize)
                .map_err(|error| failed("take memory to receive into", error.into()))?;
            qp.post_recv(buffer)
                .map_err(|refused| failed("post a receive", refused.error.into()))?;
        }
        let remote = QueuePairEndpoint {
            qp_num: theirs.qp_num,
            psn: theirs.psn,
            gid: Gid(theirs.gid),
            lid: theirs.lid,
            mtu: theirs.mtu.into(),
        };
        let path = |max_rd_atomic| PathOptions {
            port: config.port,
            gid_index: shared.port.gid_index,
            max_rd_atomic,
            timeout: ACK_TIMEOUT,
            ..PathOptions::default()
        };
        qp.queue_pair()
            .to_rtr(
                &remote,
                &path(self.hello.max_dest_rd_atomic.min(theirs.max_rd_atomic)),
            )
            .map_err(|error| failed("make the queue pair ready to receive", error.into()))?;
        qp.queue_pair()
            .to_rts(
                self.hello.psn,
                &path(self.hello.max_rd_atomic.min(theirs.max_dest_rd_atomic)),
            )
            .map_err(|error| failed("make the queue pair ready to send", error.into()))?;
        self.qp = Side::Connected(qp);
        Ok(())
    }

    /// The connection, once the greeting is over.
    pub(crate) fn finish(
        self,
        talk: Talk,
        theirs: &Hello,
        owes_ready: bool,
    ) -> Result<Established, ConnectError> {
        let Side::Connected(qp) = self.qp else {
            return Err(ConnectError::WrongEndpoint);
        };
        Ok(Established {
            qp,
            peer: talk.peer(),
            stream: talk.into_stream(),
            depth: self.depth,
            message_size: self.hello.message_size.min(theirs.message_size),
            owes_ready,
            share: self.share,
        })
    }
}

/// Greets the listener at `address` and connects to it.
pub(crate) fn connect(
    shared: &Arc<Shared>,
    address: impl ToSocketAddrs + ToString,
) -> Result<Established, ConnectError> {
    let after = shared.config.greeting_timeout;
    let deadline = Instant::now() + after;
    let mut talk = reach(address, deadline)?;
    let peer = talk.peer();
    let mut local = match Local::new(shared, peer) {
        Ok(local) => local,
        Err(error) => {
            talk.reject(
                RejectReason::Failed,
                "the client cannot make a connection now",
            );
            return Err(error);
        }
    };
    talk.say(&Greeting::Hello(*local.hello()))?;
    match greet(&mut talk, &mut local, deadline, after) {
        Ok(theirs) => local.finish(talk, &theirs, false),
        Err(error) => {
            let spoken = match &error {
                ConnectError::Device { .. } => {
                    talk.reject(
                        RejectReason::Failed,
                        "the client cannot make a connection now",
                    );
                    true
                }
                ConnectError::Malformed { .. }
                | ConnectError::Version { .. }
                | ConnectError::Refused { .. } => true,
                _ => false,
            };
            if spoken {
                talk.linger(LINGER);
            }
            Err(error)
        }
    }
}

/// The client's side of the greeting behind its hello.
fn greet(
    talk: &mut Talk,
    local: &mut Local,
    deadline: Instant,
    after: Duration,
) -> Result<Hello, ConnectError> {
    let theirs = match talk.hear_until("hello", deadline, after)? {
        Greeting::Hello(hello) => hello,
        other => return Err(talk.out_of_place(&other, "hello")),
    };
    if let Err((reason, text)) = agree(local.hello(), &theirs) {
        talk.reject(reason, &text);
        return Err(ConnectError::Refused {
            peer: talk.peer(),
            reason,
            text,
        });
    }
    local.connect(&theirs)?;
    talk.say(&Greeting::Ready)?;
    match talk.hear_until("ready", deadline, after)? {
        Greeting::Ready => Ok(theirs),
        other => Err(talk.out_of_place(&other, "ready")),
    }
}

/// A socket connected to the first address that answers.
fn reach(address: impl ToSocketAddrs + ToString, deadline: Instant) -> Result<Talk, ConnectError> {
    let resolve = |source| ConnectError::Resolve {
        address: address.to_string(),
        source,
    };
    let mut last = None;
    for peer in address.to_socket_addrs().map_err(resolve)? {
        // Zero is not a timeout that there can be.
        let left = deadline
            .saturating_duration_since(Instant::now())
            .max(Duration::from_millis(1));
        match TcpStream::connect_timeout(&peer, left) {
            Ok(stream) => return Talk::new(stream, peer),
            Err(source) => last = Some(ConnectError::Unreachable { peer, source }),
        }
    }
    Err(last.unwrap_or_else(|| resolve(std::io::ErrorKind::NotFound.into())))
}

/// A first packet number that differs from connection to connection, so that a late packet of one
/// is not taken for the next one's.
fn random_24_bits() -> u32 {
    RandomState::new().build_hasher().finish() as u32 & 0xff_ffff
}
