//! Unreliable datagrams.
//!
//! A datagram goes through the kernel, by the abstract Unix socket of its destination's queue pair:
//! it has no connection whose ring it could use, and it may be lost. The socket's queue bounds what
//! waits, the kernel says which user sent it, and a sender that dies leaves nothing behind. A word
//! in the destination's mailbox counts what was sent to it, so that polling looks at the socket only
//! when there is something.
//!
//! The kernel lets few wait there, fewer than a program posts receives. A sender that finds the queue full
//! therefore has the peer's upkeep thread take what is there, and sleeps until there is room.
//!
//! Between hosts it goes by UDP, from one process to the other, which passes it on in the same way.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::IpAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendFlags, SocketAddrUnix, SocketFlags, SocketType, sockopt,
};

use super::access::{self, Cursor, Direction, Place};
use super::backlog;
use super::queues::{Outcome, received};
use super::requester::{CORRUPTED, Request, Step, spoil_bytes, success, total};
use super::responder::BURST;
use super::{Qp, state};
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_SEND_SOLICITED, IBV_WC_LOC_LEN_ERR, IBV_WC_SEND,
    IBV_WR_SEND_WITH_IMM, ibv_send_wr, ibv_sge, ibv_wc_status,
};
use crate::soft::ah::Route;
use crate::soft::identity::gid_of;
use crate::soft::link::{Link, Via, signal};

/// Bytes of a datagram's payload: the port's MTU.
pub(super) const MAX_PAYLOAD: usize = 4096;
/// Bytes that stand before the payload in a receive buffer; ibv_post_recv(3).
const GRH: usize = 40;

/// Bytes of a datagram with its header.
pub(in crate::soft) const MAX_DATAGRAM: usize = HEADER + MAX_PAYLOAD;

const MAGIC: u32 = u32::from_le_bytes(*b"udg1");
const WITH_IMM: u32 = 1;
const SOLICITED: u32 = 2;
/// A queue key with this bit is replaced by the sender's own; ibv_post_send(3).
const PRIVILEGED: u32 = 1 << 31;

/// What travels before the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::soft) struct Header {
    pub qkey: u32,
    pub src_qpn: u32,
    pub flags: u32,
    pub imm: u32,
    pub route: Route,
}

const HEADER: usize = 56;

impl Header {
    pub(in crate::soft) fn encode(&self) -> [u8; HEADER] {
        let words = [MAGIC, self.qkey, self.src_qpn, self.flags, self.imm];
        let mut bytes = [0; HEADER];
        for (chunk, word) in bytes.chunks_exact_mut(4).zip(words) {
            chunk.copy_from_slice(&word.to_le_bytes());
        }
        bytes[20] = self.route.traffic_class;
        bytes[21] = self.route.hop_limit;
        bytes[24..40].copy_from_slice(&self.route.sgid);
        bytes[40..56].copy_from_slice(&self.route.dgid);
        bytes
    }

    /// `None` for what no sender of ours writes.
    pub(in crate::soft) fn decode(bytes: &[u8]) -> Option<Self> {
        let bytes = bytes.get(..HEADER)?;
        let word = |at: usize| {
            let word = bytes[at..at + 4].try_into();
            u32::from_le_bytes(word.unwrap_or_default())
        };
        let gid = |at: usize| bytes[at..at + 16].try_into().unwrap_or_default();
        (word(0) == MAGIC).then(|| Self {
            qkey: word(4),
            src_qpn: word(8),
            flags: word(12),
            imm: word(16),
            route: Route {
                traffic_class: bytes[20],
                hop_limit: bytes[21],
                sgid: gid(24),
                dgid: gid(40),
            },
        })
    }
}

/// What a datagram queue pair has beside its queues.
#[derive(Debug)]
pub(super) struct Endpoint {
    socket: OwnedFd,
    /// Queue pairs that were sent to.
    destinations: Mutex<HashMap<u32, Arc<Destination>>>,
    /// The count of the mailbox when the socket was last seen empty.
    seen: AtomicU32,
    /// The queue key that datagrams to us must carry, and that privileged ones of ours do.
    qkey: AtomicU32,
}

/// A queue pair that was sent to.
#[derive(Debug)]
struct Destination {
    link: Link,
    /// When it was looked for.
    since: Instant,
    /// It was waited for in vain, as where its process is stopped: what it has no room for is lost.
    is_deaf: AtomicBool,
}

/// How long a sender waits for room at once. The peer's thread needs microseconds, where it gets to run.
const PATIENCE: Duration = Duration::from_millis(500);
/// Destinations that are remembered; beyond, all are looked up anew.
const MOST_LINKS: usize = 4096;
/// A destination that was not there is not looked for again for so long.
const ABSENCE: Duration = Duration::from_millis(100);

fn address(qpn: u32) -> Result<SocketAddrUnix, Errno> {
    SocketAddrUnix::new_abstract_name(format!("verbs-soft0/ud/{qpn}").as_bytes())
}

impl Endpoint {
    pub(super) fn new(qpn: u32) -> Result<Self, Errno> {
        let flags = SocketFlags::CLOEXEC;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
        sockopt::set_socket_passcred(&socket, true)?;
        sockopt::set_socket_timeout(&socket, sockopt::Timeout::Send, Some(PATIENCE))?;
        rustix::net::bind(&socket, &address(qpn)?)?;
        Ok(Self {
            socket,
            destinations: Mutex::default(),
            seen: AtomicU32::new(0),
            qkey: AtomicU32::new(0),
        })
    }

    pub(super) fn set_qkey(&self, qkey: u32) {
        self.qkey.store(qkey, Ordering::Relaxed);
    }

    /// Drops what has come so far, which nobody was ready for.
    pub(super) fn drain(&self, sent: u32) {
        let mut bytes = [0];
        let flags = RecvFlags::TRUNC | RecvFlags::DONTWAIT;
        while rustix::net::recv(&self.socket, &mut bytes, flags).is_ok() {}
        self.seen.store(sent, Ordering::Relaxed);
    }

    /// The next datagram of a process of our user, and its length.
    fn receive(&self, bytes: &mut [u8]) -> Option<usize> {
        let own = rustix::process::geteuid();
        loop {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmCredentials(1))];
            let mut ancillary = RecvAncillaryBuffer::new(&mut space);
            let mut parts = [IoSliceMut::new(bytes)];
            let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
            match rustix::net::recvmsg(&self.socket, &mut parts, &mut ancillary, flags) {
                Ok(message) => {
                    let is_own = ancillary.drain().any(|message| {
                        matches!(message, RecvAncillaryMessage::ScmCredentials(who) if who.uid == own)
                    });
                    if is_own {
                        return Some(message.bytes);
                    }
                }
                Err(Errno::INTR) => {}
                Err(_) => return None,
            }
        }
    }

    fn known(&self, qpn: u32) -> Option<Arc<Destination>> {
        let destinations = self.destinations();
        let known = destinations.get(&qpn)?;
        let is_absent = matches!(known.link.via, Via::Nobody) && known.since.elapsed() < ABSENCE;
        (is_absent || known.link.is_current()).then(|| Arc::clone(known))
    }

    fn remember(&self, link: Link) {
        let mut destinations = self.destinations();
        if destinations.len() >= MOST_LINKS {
            destinations.clear();
        }
        let qpn = link.dest_qpn;
        let destination = Destination {
            link,
            since: Instant::now(),
            is_deaf: AtomicBool::new(false),
        };
        destinations.insert(qpn, Arc::new(destination));
    }

    fn destinations(&self) -> MutexGuard<'_, HashMap<u32, Arc<Destination>>> {
        self.destinations
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends to a queue pair of this host. Where that has no room, `wake` shall have its process make some.
    fn send(&self, to: &Destination, parts: [&[u8]; 2], wake: impl Fn()) -> Result<(), Errno> {
        let address = address(to.link.dest_qpn)?;
        let parts = parts.map(IoSlice::new);
        let send = |flags: SendFlags| {
            let mut none = SendAncillaryBuffer::default();
            let flags = flags | SendFlags::NOSIGNAL;
            rustix::net::sendmsg_addr(&self.socket, &address, &parts, &mut none, flags).map(drop)
        };
        let mut sent = send(SendFlags::DONTWAIT);
        if sent == Err(Errno::AGAIN) && !to.is_deaf.load(Ordering::Relaxed) {
            let wait = || rustix::io::retry_on_intr(|| send(SendFlags::empty()));
            let is_late = || backlog::takes_datagrams(&to.link);
            sent = backlog::send_when_there_is_room(wait, wake, is_late);
        }
        to.is_deaf
            .store(sent == Err(Errno::AGAIN), Ordering::Relaxed);
        sent
    }
}

impl Qp {
    /// Finds the destinations of a chain that are not known yet. No lock is held: a peer may have to
    /// be asked, and whoever deregisters memory waits for the send lock.
    ///
    /// # Safety
    ///
    /// As for `post_send`.
    #[cold]
    pub(super) unsafe fn meet(&self, endpoint: &Endpoint, mut wr: *mut ibv_send_wr) {
        // SAFETY: the chain is valid by the caller's promise.
        while let Some(request) = unsafe { wr.as_ref() } {
            // SAFETY: a datagram's request means this member; all are plain integers.
            let qpn = unsafe { request.wr.ud }.remote_qpn & state::MASK_24;
            if endpoint.known(qpn).is_none() {
                endpoint.remember(self.process.link_for_datagrams(self.qpn, qpn));
            }
            wr = request.next;
        }
    }

    /// Executes a send request. The send lock is held. What cannot be delivered is lost, and the
    /// request succeeds all the same.
    pub(super) fn send_datagram(&self, endpoint: &Endpoint, request: &Request<'_>) -> Step {
        let len = total(request.sges) as usize;
        if len > MAX_PAYLOAD {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let with_imm = request.opcode == IBV_WR_SEND_WITH_IMM;
        let mut flags = if with_imm { WITH_IMM } else { 0 };
        if request.is(IBV_SEND_SOLICITED) {
            flags |= SOLICITED;
        }
        let qkey = if request.remote_qkey() & PRIVILEGED == 0 {
            request.remote_qkey()
        } else {
            endpoint.qkey.load(Ordering::Relaxed)
        };
        // SAFETY: the address handle of a request lives until it has completed; ibv_destroy_ah(3).
        let route = unsafe { request.route() };
        let header = Header {
            qkey,
            src_qpn: self.qpn,
            flags,
            imm: request.imm,
            route,
        };
        let mut payload = [0; MAX_PAYLOAD];
        let mut at = 0;
        for sge in request.sges {
            let (from, piece) = (sge.addr as usize as *const u8, sge.length as usize);
            // SAFETY: the element was checked under the send lock, or is inline data that is
            // readable by the contract of post_send; `total` says that all fit.
            unsafe { copy::read_shared(payload.as_mut_ptr().wrapping_add(at), from, piece) };
            at += piece;
        }
        if request.is(CORRUPTED) {
            spoil_bytes(&mut payload[..len]);
        }
        self.deliver(endpoint, request.remote_qpn(), &header, &payload[..len]);
        Step::Done(success(IBV_WC_SEND, len as u32))
    }

    fn deliver(&self, endpoint: &Endpoint, qpn: u32, header: &Header, payload: &[u8]) {
        if !self.process.gids.contains(&header.route.dgid) {
            self.process
                .send_datagram(header.route.dgid, qpn, &[&header.encode(), payload]);
            return;
        }
        let Some(to) = endpoint.known(qpn) else {
            return;
        };
        let link = &to.link;
        if matches!(link.via, Via::Nobody) {
            return;
        }
        let wake = || match link.via {
            Via::Local => signal(&self.process.kick),
            _ => link.kick(),
        };
        if let Err(error) = endpoint.send(&to, [&header.encode(), payload], wake) {
            // A full queue, or nobody there: that is what unreliable means.
            tracing::debug!(qpn, %error, "a datagram is lost");
            return;
        }
        link.mailbox().datagrams.fetch_add(1, Ordering::Release);
        link.call();
        if let Some(bell) = &link.recv_bell {
            bell.ring(header.flags & SOLICITED != 0);
        } else if matches!(link.via, Via::Local)
            && let Some(peer) = self.process.qp(qpn)
        {
            // Its own poll takes it; whoever sleeps must be told.
            peer.recv_cq.notify(&peer, header.flags & SOLICITED != 0);
        }
    }

    /// Passes on a datagram that another host has sent.
    pub(in crate::soft) fn pass_datagram(&self, from: IpAddr, bytes: &mut [u8]) {
        let Some(endpoint) = &self.datagrams else {
            return;
        };
        let (Some(mut header), Ok(address)) = (Header::decode(bytes), address(self.qpn)) else {
            tracing::debug!(qpn = self.qpn, %from, "dropped what is no datagram of ours");
            return;
        };
        // Another host may say anything; whose address it has is for the kernel to say.
        header.route.sgid = gid_of(from);
        bytes[..HEADER].copy_from_slice(&header.encode());
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        let send = || rustix::net::sendto(&endpoint.socket, bytes, flags, &address);
        let mut sent = send();
        if sent == Err(Errno::AGAIN) {
            self.receive(true);
            sent = send();
        }
        if sent.is_ok() {
            let sent = &self.mailbox().datagrams;
            sent.fetch_add(1, Ordering::Release);
            self.recv_cq.notify(self, header.flags & SOLICITED != 0);
        }
    }

    /// Whether datagrams have been sent to us since the socket was seen empty.
    #[inline]
    pub(super) fn datagrams_wait(&self, endpoint: &Endpoint) -> bool {
        let sent = self.mailbox().datagrams.load(Ordering::Acquire);
        sent != endpoint.seen.load(Ordering::Relaxed) && state::is_connected(self.state())
    }

    /// Takes what has come. The receive lock is held.
    pub(super) fn take_datagrams(&self, endpoint: &Endpoint, solicited: &mut bool) {
        if !state::is_connected(self.state()) {
            return;
        }
        let sent = self.mailbox().datagrams.load(Ordering::Acquire);
        let mut bytes = [0; GRH + HEADER + MAX_PAYLOAD];
        for _ in 0..BURST {
            // The payload lies where it can be preceded by the GRH.
            let Some(len) = endpoint.receive(&mut bytes[GRH..]) else {
                endpoint.seen.store(sent, Ordering::Relaxed);
                return;
            };
            self.count_executed();
            let Some(header) = Header::decode(&bytes[GRH..GRH + len]) else {
                continue;
            };
            if header.qkey != endpoint.qkey.load(Ordering::Relaxed) {
                tracing::debug!(
                    qpn = self.qpn,
                    "a datagram with another queue key is dropped"
                );
                continue;
            }
            let payload = len - HEADER;
            let start = HEADER;
            bytes[start..start + GRH].copy_from_slice(&header.route.grh(payload));
            if !self.take_datagram(&header, &mut bytes[start..start + GRH + payload]) {
                continue;
            }
            *solicited |= header.flags & SOLICITED != 0;
        }
    }

    /// `false`: nobody was ready for it.
    fn take_datagram(&self, header: &Header, message: &mut [u8]) -> bool {
        let Ok(position) = self.next_receive() else {
            tracing::debug!(qpn = self.qpn, "a datagram without a receive is dropped");
            return false;
        };
        let outcome = match self.scatter(message, self.rq.buffers(position)) {
            Ok(()) => {
                let imm = (header.flags & WITH_IMM != 0).then_some(header.imm);
                Outcome {
                    source: Some(header.src_qpn & state::MASK_24 | header.route.kind() << 24),
                    ..received(message.len() as u32, imm)
                }
            }
            Err(status) => {
                self.enter_error();
                Outcome::failed(status)
            }
        };
        self.rq.complete(position, outcome);
        true
    }

    /// Copies bytes of this process into posted buffers.
    fn scatter(
        &self,
        message: &mut [u8],
        buffers: impl Iterator<Item = ibv_sge> + Clone,
    ) -> Result<(), ibv_wc_status> {
        let room: u64 = buffers.clone().map(|sge| u64::from(sge.length)).sum();
        if message.len() as u64 > room {
            return Err(IBV_WC_LOC_LEN_ERR);
        }
        let keys = &self.process.info().keys;
        let pd = self.recv_pd();
        for sge in buffers.clone() {
            access::check_here(keys, pd, &sge, IBV_ACCESS_LOCAL_WRITE)?;
        }
        let from = Place::Here(message.as_mut_ptr());
        let mut list = Cursor::new(buffers);
        let len = message.len();
        // SAFETY: the buffers were checked under the receive lock, which is held; the other side is
        // a slice of as many bytes.
        let copied =
            unsafe { access::transfer(Direction::FromPeer, from, &mut list, len, || Ok(from)) };
        debug_assert!(copied.is_ok(), "a local copy of less than a chunk");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn headers_round_trip(
            words: [u32; 4], traffic_class: u8, hop_limit: u8, sgid: [u8; 16], dgid: [u8; 16],
        ) {
            let [qkey, src_qpn, flags, imm] = words;
            let route = Route { traffic_class, hop_limit, sgid, dgid };
            let header = Header { qkey, src_qpn, flags, imm, route };
            prop_assert_eq!(Header::decode(&header.encode()), Some(header));
        }

        #[test]
        fn any_other_bytes_are_no_header(bytes in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Some(header) = Header::decode(&bytes) {
                prop_assert_eq!(&bytes[..4], &MAGIC.to_le_bytes()[..]);
                prop_assert!(bytes.len() >= HEADER);
                let _ = header;
            }
        }
    }
}
