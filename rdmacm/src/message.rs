//! What two connection managers say to each other, and its bytes.
//!
//! The messages are those of the InfiniBand communication manager (IBTA volume 1, chapter 12), less
//! what a stream makes needless: identifiers, repetition, and the paths. A message is a header of eight
//! bytes (magic, version, kind, length of the rest) and a body whose length follows from what it says.
//! Numbers are big-endian. The header is the same in every version, so that one can tell another.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use thiserror::Error;

use crate::abi::ibv_ece;

/// What every message begins with.
const MAGIC: [u8; 4] = *b"RdCM";
/// Of what follows the header.
pub const VERSION: u8 = 1;
/// Bytes of a header.
pub const HEADER: usize = 8;
/// No body is longer.
const MAX_BODY: usize = 256;
/// Numbers of queue pairs and packets have 24 bits.
const BITS_24: u32 = 0xff_ffff;

/// Most bytes of private data of a request for a connection, rdma_connect(3).
pub const REQ_PRIVATE: usize = 56;
/// Most bytes of private data of its acceptance, rdma_accept(3).
pub const REP_PRIVATE: usize = 196;
/// Most bytes of private data of a rejection.
pub const REJ_PRIVATE: usize = 148;
/// Most bytes of private data of a lookup of a datagram service.
pub const SIDR_REQ_PRIVATE: usize = 180;
/// Most bytes of private data of its answer.
pub const SIDR_REP_PRIVATE: usize = 136;

/// Reason of a rejection: nobody came to an answer.
pub const REJ_TIMEOUT: u16 = 4;
/// Reason of a rejection: nobody listens there.
pub const REJ_INVALID_SERVICE_ID: u16 = 8;
/// Reason of a rejection: the application did not want it.
pub const REJ_CONSUMER_DEFINED: u16 = 28;
/// Reason of a rejection: another version of the protocol.
pub const REJ_CLASS_VERSION: u16 = 31;
/// Reason of a rejection: the vendor's options do not fit, rdma_reject_ece(3).
pub const REJ_VENDOR_OPTION: u16 = 35;

/// Answer to a lookup: here it is.
pub const SIDR_SUCCESS: u8 = 0;
/// Answer to a lookup: there is no such service.
pub const SIDR_UNSUPPORTED: u8 = 1;
/// Answer to a lookup: the application did not want it.
pub const SIDR_REJECT: u8 = 2;

/// Which service is meant, and who asks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Service {
    /// An `RDMA_PS_*`.
    pub port_space: u16,
    /// Who asks.
    pub from: SocketAddr,
    /// Who is asked.
    pub to: SocketAddr,
}

/// What a side says of its queue pair.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Side {
    /// Number of the queue pair, 24 bits.
    pub qp_num: u32,
    /// Sequence number of its first packet, 24 bits.
    pub psn: u32,
    /// READs and atomics that it takes at a time.
    pub responder_resources: u8,
    /// READs and atomics that it sends at a time.
    pub initiator_depth: u8,
    /// How often the other side repeats a message for which there is no receive; 7 for ever.
    pub rnr_retry: u8,
    /// Whether it has a shared receive queue.
    pub srq: bool,
    /// Whether it has flow control.
    pub flow_control: bool,
    /// Options of its vendor.
    pub ece: ibv_ece,
}

/// A request for a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// Where to.
    pub service: Service,
    /// Type of queue pair.
    pub qp_type: u8,
    /// The requester's queue pair.
    pub side: Side,
    /// How often either side repeats what is not acknowledged, up to 7.
    pub retry: u8,
    /// Encoded path MTU.
    pub mtu: u8,
    /// For the application.
    pub private: Vec<u8>,
}

/// A message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// REQ: asks for a connection.
    Request(Request),
    /// REP: accepts it.
    Reply {
        /// The accepting queue pair.
        side: Side,
        /// For the application.
        private: Vec<u8>,
    },
    /// RTU: the connection is there.
    ReadyToUse,
    /// REJ: there is none.
    Reject {
        /// Why.
        reason: u16,
        /// For the application.
        private: Vec<u8>,
    },
    /// DREQ: ends the connection.
    Disconnect,
    /// DREP: it has ended.
    Disconnected,
    /// SIDR_REQ: asks for a queue pair that takes datagrams.
    Lookup {
        /// Which.
        service: Service,
        /// For the application.
        private: Vec<u8>,
    },
    /// SIDR_REP: says which it is.
    Found {
        /// A `SIDR_*`.
        status: u8,
        /// Number of the queue pair, 24 bits.
        qp_num: u32,
        /// Its queue key.
        qkey: u32,
        /// For the application.
        private: Vec<u8>,
    },
}

/// Why bytes are no message.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum MessageError {
    /// Whoever is there is no connection manager of this kind.
    #[error("a message begins with {MAGIC:x?}, not with {0:x?}")]
    Magic([u8; 4]),
    /// A newer or older one is there.
    #[error("version {0} of the protocol is spoken there, and {VERSION} here")]
    Version(u8),
    /// No message of this kind.
    #[error("no message has the kind {0}")]
    Kind(u8),
    /// A length that no message of this kind has.
    #[error("a message of kind {kind} cannot have {len} bytes")]
    Length {
        /// Its kind.
        kind: u8,
        /// What its header says, bytes.
        len: usize,
    },
    /// A field has a value that it cannot have.
    #[error("{0} is out of range in a message")]
    Field(&'static str),
}

const REQUEST: u8 = 1;
const REPLY: u8 = 2;
const READY_TO_USE: u8 = 3;
const REJECT: u8 = 4;
const DISCONNECT: u8 = 5;
const DISCONNECTED: u8 = 6;
const LOOKUP: u8 = 7;
const FOUND: u8 = 8;

const FLAG_SRQ: u8 = 1;
const FLAG_FLOW_CONTROL: u8 = 2;

impl Message {
    /// The bytes that travel. Private data beyond what the kind of message can hold is cut off.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer(Vec::with_capacity(HEADER + MAX_BODY));
        out.bytes(&MAGIC);
        out.bytes(&[VERSION, self.kind(), 0, 0]);
        match self {
            Self::Request(request) => {
                out.service(&request.service);
                out.bytes(&[request.qp_type, request.retry, request.mtu]);
                out.side(&request.side);
                out.private(&request.private, REQ_PRIVATE);
            }
            Self::Reply { side, private } => {
                out.side(side);
                out.private(private, REP_PRIVATE);
            }
            Self::ReadyToUse | Self::Disconnect | Self::Disconnected => {}
            Self::Reject { reason, private } => {
                out.bytes(&reason.to_be_bytes());
                out.private(private, REJ_PRIVATE);
            }
            Self::Lookup { service, private } => {
                out.service(service);
                out.private(private, SIDR_REQ_PRIVATE);
            }
            Self::Found {
                status,
                qp_num,
                qkey,
                private,
            } => {
                out.bytes(&[*status]);
                out.bytes(&qp_num.to_be_bytes());
                out.bytes(&qkey.to_be_bytes());
                out.private(private, SIDR_REP_PRIVATE);
            }
        }
        let mut bytes = out.0;
        let len = (bytes.len() - HEADER) as u16;
        bytes[6..8].copy_from_slice(&len.to_be_bytes());
        bytes
    }

    fn kind(&self) -> u8 {
        match self {
            Self::Request(_) => REQUEST,
            Self::Reply { .. } => REPLY,
            Self::ReadyToUse => READY_TO_USE,
            Self::Reject { .. } => REJECT,
            Self::Disconnect => DISCONNECT,
            Self::Disconnected => DISCONNECTED,
            Self::Lookup { .. } => LOOKUP,
            Self::Found { .. } => FOUND,
        }
    }

    /// The message at the front of what a stream has brought, and how many bytes it takes; `None` if
    /// more must come.
    ///
    /// # Errors
    ///
    /// What is there can be no message, whatever follows.
    pub fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, MessageError> {
        let start = &bytes[..bytes.len().min(MAGIC.len())];
        if !MAGIC.starts_with(start) {
            let mut found = [0; 4];
            found[..start.len()].copy_from_slice(start);
            return Err(MessageError::Magic(found));
        }
        if let Some(version) = bytes.get(4).filter(|version| **version != VERSION) {
            return Err(MessageError::Version(*version));
        }
        let Some(header) = bytes.get(..HEADER) else {
            return Ok(None);
        };
        let kind = header[5];
        let len = usize::from(u16::from_be_bytes([header[6], header[7]]));
        if !(REQUEST..=FOUND).contains(&kind) {
            return Err(MessageError::Kind(kind));
        }
        if len > MAX_BODY {
            return Err(MessageError::Length { kind, len });
        }
        let Some(body) = bytes.get(HEADER..HEADER + len) else {
            return Ok(None);
        };
        let mut body = Reader {
            kind,
            len,
            rest: body,
        };
        let message = body.message()?;
        if !body.rest.is_empty() {
            return Err(MessageError::Length { kind, len });
        }
        Ok(Some((message, HEADER + len)))
    }
}

struct Writer(Vec<u8>);

impl Writer {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn address(&mut self, address: &SocketAddr) {
        let ip = match address.ip() {
            IpAddr::V4(v4) => v4.to_ipv6_mapped(),
            IpAddr::V6(v6) => v6,
        };
        self.bytes(&ip.octets());
        self.bytes(&address.port().to_be_bytes());
    }

    fn service(&mut self, service: &Service) {
        self.bytes(&service.port_space.to_be_bytes());
        self.address(&service.from);
        self.address(&service.to);
    }

    fn side(&mut self, side: &Side) {
        self.bytes(&side.qp_num.to_be_bytes());
        self.bytes(&side.psn.to_be_bytes());
        let srq = if side.srq { FLAG_SRQ } else { 0 };
        let flow_control = if side.flow_control {
            FLAG_FLOW_CONTROL
        } else {
            0
        };
        self.bytes(&[
            side.responder_resources,
            side.initiator_depth,
            side.rnr_retry,
            srq | flow_control,
        ]);
        self.bytes(&side.ece.vendor_id.to_be_bytes());
        self.bytes(&side.ece.options.to_be_bytes());
    }

    fn private(&mut self, bytes: &[u8], most: usize) {
        let bytes = &bytes[..bytes.len().min(most)];
        self.bytes(&[bytes.len() as u8]);
        self.bytes(bytes);
    }
}

/// What is left of a body.
struct Reader<'a> {
    kind: u8,
    len: usize,
    rest: &'a [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], MessageError> {
        let Some((taken, rest)) = self.rest.split_first_chunk() else {
            return Err(self.length());
        };
        self.rest = rest;
        Ok(*taken)
    }

    fn length(&self) -> MessageError {
        MessageError::Length {
            kind: self.kind,
            len: self.len,
        }
    }

    fn number_of_24_bits(&mut self, field: &'static str) -> Result<u32, MessageError> {
        let number = u32::from_be_bytes(self.take()?);
        if number > BITS_24 {
            return Err(MessageError::Field(field));
        }
        Ok(number)
    }

    fn up_to(&mut self, most: u8, field: &'static str) -> Result<u8, MessageError> {
        let [number] = self.take()?;
        if number > most {
            return Err(MessageError::Field(field));
        }
        Ok(number)
    }

    fn address(&mut self) -> Result<SocketAddr, MessageError> {
        let ip = IpAddr::V6(Ipv6Addr::from(self.take::<16>()?)).to_canonical();
        let port = u16::from_be_bytes(self.take()?);
        Ok(SocketAddr::new(ip, port))
    }

    fn service(&mut self) -> Result<Service, MessageError> {
        let service = Service {
            port_space: u16::from_be_bytes(self.take()?),
            from: self.address()?,
            to: self.address()?,
        };
        if service.from.is_ipv4() != service.to.is_ipv4() {
            return Err(MessageError::Field("an address"));
        }
        Ok(service)
    }

    fn side(&mut self) -> Result<Side, MessageError> {
        let qp_num = self.number_of_24_bits("the number of the queue pair")?;
        let psn = self.number_of_24_bits("the packet sequence number")?;
        let [responder_resources, initiator_depth] = self.take()?;
        let rnr_retry = self.up_to(7, "the RNR retry count")?;
        let flags = self.up_to(FLAG_SRQ | FLAG_FLOW_CONTROL, "a flag")?;
        let ece = ibv_ece {
            vendor_id: u32::from_be_bytes(self.take()?),
            options: u32::from_be_bytes(self.take()?),
            comp_mask: 0,
        };
        Ok(Side {
            qp_num,
            psn,
            responder_resources,
            initiator_depth,
            rnr_retry,
            srq: flags & FLAG_SRQ != 0,
            flow_control: flags & FLAG_FLOW_CONTROL != 0,
            ece,
        })
    }

    fn private(&mut self, most: usize) -> Result<Vec<u8>, MessageError> {
        let len = usize::from(self.take::<1>()?[0]);
        if len > most || len != self.rest.len() {
            return Err(self.length());
        }
        Ok(std::mem::take(&mut self.rest).to_vec())
    }

    fn message(&mut self) -> Result<Message, MessageError> {
        Ok(match self.kind {
            REQUEST => Message::Request(Request {
                service: self.service()?,
                qp_type: self.up_to(u8::MAX, "the type of queue pair")?,
                retry: self.up_to(7, "the retry count")?,
                mtu: self.mtu()?,
                side: self.side()?,
                private: self.private(REQ_PRIVATE)?,
            }),
            REPLY => Message::Reply {
                side: self.side()?,
                private: self.private(REP_PRIVATE)?,
            },
            READY_TO_USE => Message::ReadyToUse,
            REJECT => Message::Reject {
                reason: u16::from_be_bytes(self.take()?),
                private: self.private(REJ_PRIVATE)?,
            },
            DISCONNECT => Message::Disconnect,
            DISCONNECTED => Message::Disconnected,
            LOOKUP => Message::Lookup {
                service: self.service()?,
                private: self.private(SIDR_REQ_PRIVATE)?,
            },
            FOUND => Message::Found {
                status: self.up_to(u8::MAX, "the status")?,
                qp_num: self.number_of_24_bits("the number of the queue pair")?,
                qkey: u32::from_be_bytes(self.take()?),
                private: self.private(SIDR_REP_PRIVATE)?,
            },
            other => return Err(MessageError::Kind(other)),
        })
    }

    fn mtu(&mut self) -> Result<u8, MessageError> {
        match self.up_to(5, "the path MTU")? {
            0 => Err(MessageError::Field("the path MTU")),
            mtu => Ok(mtu),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_message_survives_the_way() {
        for message in crate::fuzzing::messages() {
            let bytes = message.encode();
            assert_eq!(
                Message::decode(&bytes),
                Ok(Some((message.clone(), bytes.len())))
            );
            // What follows belongs to the next one.
            let two = [&bytes[..], &bytes[..]].concat();
            assert_eq!(Message::decode(&two), Ok(Some((message, bytes.len()))));
        }
    }

    #[test]
    fn a_part_of_a_message_is_waited_for() {
        for message in crate::fuzzing::messages() {
            let bytes = message.encode();
            for len in 0..bytes.len() {
                assert_eq!(Message::decode(&bytes[..len]), Ok(None), "{message:?}");
            }
        }
    }

    #[test]
    fn strangers_and_other_versions_are_told_apart() {
        assert_eq!(
            Message::decode(b"GET /"),
            Err(MessageError::Magic(*b"GET "))
        );
        let mut bytes = Message::Disconnect.encode();
        bytes[4] = 2;
        assert_eq!(Message::decode(&bytes), Err(MessageError::Version(2)));
        bytes[4] = VERSION;
        bytes[6] = 0xff;
        assert_eq!(
            Message::decode(&bytes),
            Err(MessageError::Length {
                kind: DISCONNECT,
                len: 0xff00
            })
        );
        bytes[5] = 77;
        assert_eq!(Message::decode(&bytes), Err(MessageError::Kind(77)));
    }

    #[test]
    fn private_data_is_no_longer_than_the_message_holds() {
        let message = Message::Reject {
            reason: REJ_CONSUMER_DEFINED,
            private: vec![7; 200],
        };
        let Ok(Some((Message::Reject { private, .. }, _))) = Message::decode(&message.encode())
        else {
            panic!("a rejection");
        };
        assert_eq!(private, vec![7; REJ_PRIVATE]);
    }
}
