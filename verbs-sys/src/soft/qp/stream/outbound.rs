//! Requests that go through a socket: framing them, as far as the kernel takes them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::super::requester::{CORRUPTED, Request, Step, spoil_bytes, success};
use super::super::{Qp, now_ns};
use super::place::pieces;
use crate::copy;
use crate::ffi::{
    IBV_SEND_SOLICITED, IBV_WC_ATOMIC_WRITE, IBV_WC_COMP_SWAP, IBV_WC_FETCH_ADD,
    IBV_WC_LOC_LEN_ERR, IBV_WC_RDMA_READ, IBV_WC_RDMA_WRITE, IBV_WC_RETRY_EXC_ERR, IBV_WC_SEND,
    IBV_WR_ATOMIC_CMP_AND_SWP, IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_WR_ATOMIC_WRITE, IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE, IBV_WR_RDMA_WRITE_WITH_IMM, IBV_WR_SEND_WITH_IMM, IBV_WR_SEND_WITH_INV,
    ibv_sge, ibv_wc_status,
};
use crate::soft::link::Link;
use crate::soft::link::stream::frame::{Header, Opcode};
use crate::soft::link::stream::payload::{Announce, AtomicRequest, Immediate, ReadRequest};
use crate::soft::link::stream::socket::{SEGMENT, Socket, segment_of};

/// Bytes that may wait for the kernel before a request must.
const ENOUGH: usize = SEGMENT;
/// A peer that says nothing for less than this is busy, not gone.
const MIN_PATIENCE_NS: u64 = 1_000_000_000;

/// How far the connection for our requests is.
#[derive(Debug, Default)]
pub(super) enum State {
    #[default]
    Unconnected,
    Ready(Box<Socket>),
    /// It was there, or can never be; what then becomes of the oldest request.
    Lost(ibv_wc_status),
}

/// The requester's connection.
#[derive(Debug, Default)]
pub(super) struct Outbound {
    pub state: State,
    /// Bytes of the request at `exec` that are framed already.
    framed: Option<u64>,
    /// Of the next message of queues 0 and 1; the first is 1.
    msn: [u32; 2],
    /// The shared receive queue that the peer was told of last.
    selected: Option<u32>,
    /// READs and atomics without their answer, oldest first.
    pub awaited: VecDeque<Awaited>,
    /// When the peer last said something, took something, or had nothing to say.
    pub heard_ns: u64,
    /// Bytes that the kernel still had to send when nobody had been heard for long.
    unsent: usize,
}

/// A request whose answer brings data.
#[derive(Clone, Copy, Debug)]
pub(super) struct Awaited {
    pub position: u32,
    pub len: u64,
    /// Bytes of it that have come.
    pub came: u64,
    pub is_atomic: bool,
    /// A bit of it is to be changed.
    pub is_corrupted: bool,
}

impl Outbound {
    fn next_msn(&mut self, queue: usize) -> u32 {
        self.msn[queue] = self.msn[queue].wrapping_add(1);
        self.msn[queue]
    }
}

/// Whether the answer to a request brings data, for which it must be kept.
pub(in crate::soft::qp) fn is_answered(opcode: u32) -> bool {
    matches!(
        opcode,
        IBV_WR_RDMA_READ | IBV_WR_ATOMIC_CMP_AND_SWP | IBV_WR_ATOMIC_FETCH_AND_ADD
    )
}

impl Qp {
    /// Sends a request as far as it goes. The send lock is held, and the local side is checked.
    pub(in crate::soft::qp) fn send_on_stream(
        &self,
        request: &Request<'_>,
        position: u32,
        len: u64,
    ) -> Step {
        self.let_others_acknowledge();
        let mut out = self.streams.outbound();
        let out = &mut *out;
        match &out.state {
            State::Ready(_) => {}
            State::Unconnected => return self.not_connected(),
            State::Lost(IBV_WC_RETRY_EXC_ERR) => return self.unanswered(true),
            State::Lost(status) => return Step::Failed(*status),
        }
        let is_atomic = is_answered(request.opcode) && request.opcode != IBV_WR_RDMA_READ;
        if is_atomic && len != 8 {
            return Step::Failed(IBV_WC_LOC_LEN_ERR);
        }
        let most = self.streams.max_rd_atomic.load(Ordering::Relaxed).max(1);
        if is_answered(request.opcode) && out.awaited.len() >= most as usize {
            return Step::Wait;
        }
        if self.is_drained() {
            out.heard_ns = now_ns();
        }
        if self.is_xrc_sender() && out.framed.is_none() && out.selected != Some(request.srqn) {
            out.selected = Some(request.srqn);
            let header = untagged(Opcode::Announce, request.srqn, 1, out.next_msn(1), 0);
            frame(out, &header, &[]);
        }
        let opcode = match request.opcode {
            IBV_WR_RDMA_WRITE | IBV_WR_RDMA_WRITE_WITH_IMM => {
                if !self.frame_write(out, request, len) {
                    return Step::Wait;
                }
                IBV_WC_RDMA_WRITE
            }
            IBV_WR_ATOMIC_WRITE => {
                // Its owner stores aligned words whole.
                if !self.frame_write(out, request, len) {
                    return Step::Wait;
                }
                IBV_WC_ATOMIC_WRITE
            }
            IBV_WR_RDMA_READ => {
                frame_read(out, request, position, len);
                IBV_WC_RDMA_READ
            }
            IBV_WR_ATOMIC_CMP_AND_SWP => {
                frame_atomic(out, request, position);
                IBV_WC_COMP_SWAP
            }
            IBV_WR_ATOMIC_FETCH_AND_ADD => {
                frame_atomic(out, request, position);
                IBV_WC_FETCH_ADD
            }
            _ => {
                if !self.frame_send(out, request, len) {
                    return Step::Wait;
                }
                IBV_WC_SEND
            }
        };
        if is_answered(request.opcode) {
            out.awaited.push_back(Awaited {
                position,
                len,
                came: 0,
                is_atomic,
                is_corrupted: request.is(CORRUPTED),
            });
        }
        Step::Sent(success(opcode, len as u32))
    }

    /// The connection is still being made: as long as a requester repeats what nobody answers.
    fn not_connected(&self) -> Step {
        // SAFETY: the send lock is held.
        if unsafe { self.link() }.is_some_and(Link::is_lost) {
            return self.unanswered(true);
        }
        let since = &self.requester.waiting_since;
        let now = now_ns();
        let patience = self.patience();
        match since.load(Ordering::Relaxed) {
            0 => since.store(now, Ordering::Relaxed),
            began if patience != 0 && now.saturating_sub(began) > patience => {
                return Step::Failed(IBV_WC_RETRY_EXC_ERR);
            }
            _ => {}
        }
        Step::Wait
    }

    /// How long a peer may be silent; 0 is for ever.
    fn patience(&self) -> u64 {
        match self.requester.patience_ns.load(Ordering::Relaxed) {
            // Without acknowledgements there is no such attribute, and nothing to wait for long.
            0 if self.is_unreliable() => MIN_PATIENCE_NS,
            0 => 0,
            patience => patience.max(MIN_PATIENCE_NS),
        }
    }

    /// A WRITE, and what follows one with immediate data. `false`: not all of it yet.
    fn frame_write(&self, out: &mut Outbound, request: &Request<'_>, len: u64) -> bool {
        let with_imm = request.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
        if len > SEGMENT as u64 && out.framed.is_none() {
            let header = untagged(Opcode::Announce, 0, 1, out.next_msn(1), 0);
            let announce = Announce {
                stag: request.rkey,
                offset: request.remote_addr,
                len: len as u32,
            };
            frame(out, &header, &announce.encode());
        }
        let remote = request.remote_addr;
        // With immediate data behind it, that is its end.
        let done = self.segments(out, request, len, |offset, last| Header::Tagged {
            opcode: Opcode::Write,
            last: last && !with_imm,
            stag: request.rkey,
            offset: remote.wrapping_add(offset),
        });
        if done && with_imm {
            let opcode = if request.is(IBV_SEND_SOLICITED) {
                Opcode::ImmediateSolicited
            } else {
                Opcode::Immediate
            };
            let header = untagged(opcode, 0, 0, out.next_msn(0), 0);
            let immediate = Immediate {
                data: u32::from_be(request.imm),
            };
            frame(out, &header, &immediate.encode());
        }
        done
    }

    fn frame_send(&self, out: &mut Outbound, request: &Request<'_>, len: u64) -> bool {
        let opcode = match (request.opcode, request.is(IBV_SEND_SOLICITED)) {
            (IBV_WR_SEND_WITH_INV, false) => Opcode::SendInvalidate,
            (IBV_WR_SEND_WITH_INV, true) => Opcode::SendSolicitedInvalidate,
            (IBV_WR_SEND_WITH_IMM, false) => Opcode::SendImmediate,
            (IBV_WR_SEND_WITH_IMM, true) => Opcode::SendSolicitedImmediate,
            (_, false) => Opcode::Send,
            (_, true) => Opcode::SendSolicited,
        };
        let field = match request.opcode {
            // The application's bytes, whatever they say here.
            IBV_WR_SEND_WITH_IMM => u32::from_be(request.imm),
            IBV_WR_SEND_WITH_INV => request.imm,
            _ => 0,
        };
        let msn = match out.framed {
            None => out.next_msn(0),
            Some(_) => out.msn[0],
        };
        self.segments(out, request, len, |offset, last| Header::Untagged {
            opcode,
            last,
            field,
            queue: 0,
            msn,
            offset: offset as u32,
        })
    }

    /// Frames the payload of a request in segments, as far as the kernel takes it.
    fn segments(
        &self,
        out: &mut Outbound,
        request: &Request<'_>,
        len: u64,
        header: impl Fn(u64, bool) -> Header,
    ) -> bool {
        let State::Ready(socket) = &mut out.state else {
            return false;
        };
        let mut offset = out.framed.unwrap_or(0);
        loop {
            if socket.output.pending() >= ENOUGH {
                // A broken connection is found by reading it.
                let _ = socket.flush();
                if socket.output.pending() >= ENOUGH {
                    out.framed = Some(offset);
                    return false;
                }
            }
            let piece = (len - offset).min(segment_of(len));
            let last = offset + piece == len;
            let (spoilt, element);
            let sges = if offset == 0 && request.is(CORRUPTED) {
                // SAFETY: as below.
                spoilt = unsafe { spoilt_copy(request, piece as usize) };
                element = [ibv_sge {
                    addr: spoilt.as_ptr() as u64,
                    length: piece as u32,
                    lkey: 0,
                }];
                &element[..]
            } else {
                request.sges
            };
            let parts = pieces(sges.iter().copied(), offset, piece as usize);
            // SAFETY: the list was checked under the send lock, which is held, or is inline data that
            // is readable by the contract of post_send.
            unsafe {
                socket.output.frame_of(
                    &header(offset, last),
                    socket.crc,
                    parts.map(|(at, len)| (at.cast_const(), len)),
                );
            }
            offset += piece;
            if last {
                out.framed = None;
                return true;
            }
        }
    }

    /// The connection for our requests is there, or can never be; nothing happens if the link is of an
    /// earlier connection of the queue pair.
    pub(in crate::soft) fn connected_stream(&self, link: &Arc<Link>, socket: Option<Socket>) {
        self.with_send_lock(|| {
            // SAFETY: the send lock is held.
            let ours = unsafe { self.link() };
            if ours.is_some_and(|ours| std::ptr::eq(ours, Arc::as_ptr(link))) {
                let mut out = self.streams.outbound();
                out.heard_ns = now_ns();
                out.state = match socket {
                    Some(socket) => State::Ready(Box::new(socket)),
                    None => State::Lost(IBV_WC_RETRY_EXC_ERR),
                };
            }
        });
        self.requester.waiting_since.store(0, Ordering::Relaxed);
        self.watch_stream();
        self.progress_send();
        self.abandon(link);
    }

    /// Whether nobody is there, or will be, for our requests. The send lock is held.
    pub(in crate::soft::qp) fn stream_has_nobody(&self) -> bool {
        matches!(self.streams.outbound().state, State::Lost(_))
    }

    /// Whether the connection for our requests is still being made.
    pub(in crate::soft::qp) fn stream_is_awaited(&self) -> bool {
        self.streams.is_active() && matches!(self.streams.outbound().state, State::Unconnected)
    }

    /// Whether the peer of our requests has gone, or has said nothing for too long.
    pub(in crate::soft::qp) fn stream_is_lost(&self) -> bool {
        let mut out = self.streams.outbound();
        let patience = self.patience();
        let silent = now_ns().saturating_sub(out.heard_ns);
        if let State::Ready(socket) = &out.state
            && patience != 0
            && silent > patience
            && !self.is_drained()
        {
            // A long message over a slow way: the answer comes at its end.
            let unsent = socket.unsent() + socket.output.pending();
            if std::mem::replace(&mut out.unsent, unsent) == unsent {
                tracing::debug!(qpn = self.qpn, silent, "the peer does not answer");
                out.state = State::Lost(IBV_WC_RETRY_EXC_ERR);
                // It was waited for already.
                let since = &self.requester.waiting_since;
                since.store(out.heard_ns, Ordering::Relaxed);
            } else {
                out.heard_ns = now_ns();
            }
        }
        matches!(out.state, State::Lost(_))
    }

    /// Sends what waits. The send lock is held.
    pub(in crate::soft::qp) fn flush_stream(&self) {
        let mut out = self.streams.outbound();
        if let State::Ready(socket) = &mut out.state
            && socket.output.pending() > 0
        {
            // A broken connection is found by reading it.
            let _ = socket.flush();
            if socket.output.pending() > 0 {
                self.watch(socket);
            }
        }
    }

    /// The queue pair has failed. The send lock is held.
    pub(in crate::soft::qp) fn close_outbound(&self) {
        if self.streams.is_active() {
            self.streams.outbound().state = State::Lost(IBV_WC_RETRY_EXC_ERR);
        }
    }

    /// Has the service look at the connection for our requests as soon as something comes: nobody may
    /// poll for it.
    pub(in crate::soft) fn watch_stream(&self) {
        if !self.streams.is_active() {
            return;
        }
        let out = self.streams.outbound();
        if let State::Ready(socket) = &out.state {
            self.watch(socket);
        }
    }

    fn watch(&self, socket: &Socket) {
        self.process.running_streams().watch_outbound(
            self.qpn,
            &socket.fd,
            socket.output.pending() > 0,
        );
    }
}

/// The first bytes of a request's data, a bit of them changed.
///
/// # Safety
///
/// The elements are readable, and have so many bytes.
#[cold]
unsafe fn spoilt_copy(request: &Request<'_>, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut filled = 0;
    for (from, len) in pieces(request.sges.iter().copied(), 0, len) {
        // SAFETY: readable by the caller's promise; the pieces have as many bytes in all as there is room for.
        unsafe { copy::read_shared(bytes[filled..].as_mut_ptr(), from, len) };
        filled += len;
    }
    spoil_bytes(&mut bytes);
    bytes
}

fn untagged(opcode: Opcode, field: u32, queue: u32, msn: u32, offset: u32) -> Header {
    Header::Untagged {
        opcode,
        last: true,
        field,
        queue,
        msn,
        offset,
    }
}

fn frame(out: &mut Outbound, header: &Header, payload: &[u8]) {
    if let State::Ready(socket) = &mut out.state {
        socket.output.frame(header, payload, socket.crc);
    }
}

fn frame_read(out: &mut Outbound, request: &Request<'_>, position: u32, len: u64) {
    let header = untagged(Opcode::ReadRequest, 0, 1, out.next_msn(1), 0);
    let read = ReadRequest {
        // What names the place of the answer is only ever looked up by ourselves.
        sink_stag: position,
        sink_offset: 0,
        len: len as u32,
        source_stag: request.rkey,
        source_offset: request.remote_addr,
    };
    frame(out, &header, &read.encode());
}

fn frame_atomic(out: &mut Outbound, request: &Request<'_>, position: u32) {
    let header = untagged(Opcode::AtomicRequest, 0, 1, out.next_msn(1), 0);
    let swaps = request.opcode == IBV_WR_ATOMIC_CMP_AND_SWP;
    let atomic = AtomicRequest {
        swaps,
        request_id: position,
        stag: request.rkey,
        offset: request.remote_addr,
        add_or_swap: if swaps {
            request.swap
        } else {
            request.compare_add
        },
        compare: if swaps { request.compare_add } else { 0 },
    };
    frame(out, &header, &atomic.encode());
}
