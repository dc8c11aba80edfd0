//! Executing one frame of the peer's requests.

use super::super::Qp;
use super::super::access;
use super::super::queues::{Outcome, received};
use super::super::responder::Step;
use super::inbound::{Begun, Inbound, Message, Reading};
use super::place::scatter;
use crate::copy;
use crate::ffi::{
    IBV_ACCESS_LOCAL_WRITE, IBV_ACCESS_REMOTE_ATOMIC, IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE, IBV_EVENT_QP_ACCESS_ERR, IBV_EVENT_QP_REQ_ERR, IBV_WC_LOC_LEN_ERR,
    IBV_WC_RECV_RDMA_WITH_IMM, IBV_WC_REM_INV_REQ_ERR, IBV_WC_REM_OP_ERR, IBV_WC_SUCCESS,
    ibv_wc_status,
};
use crate::soft::link::stream::frame::{Header, Opcode};
use crate::soft::link::stream::payload::{
    Announce, AtomicRequest, AtomicResponse, Immediate, ReadRequest,
};

const DENIED: Step = Step::Refused(IBV_WC_REM_INV_REQ_ERR, Some(IBV_EVENT_QP_REQ_ERR));
const NONSENSE: Step = Step::Refused(IBV_WC_REM_OP_ERR, Some(IBV_EVENT_QP_REQ_ERR));

fn refused(status: ibv_wc_status) -> Step {
    Step::Refused(status, Some(IBV_EVENT_QP_ACCESS_ERR))
}

/// What a SEND's last frame says.
#[derive(Clone, Copy)]
struct Send {
    invalidates: Option<u32>,
    imm: Option<u32>,
    solicited: bool,
}

impl Send {
    fn of(opcode: Opcode, field: u32) -> Option<Self> {
        let plain = Self {
            invalidates: None,
            imm: None,
            solicited: false,
        };
        let solicited = Self {
            solicited: true,
            ..plain
        };
        Some(match opcode {
            Opcode::Send => plain,
            Opcode::SendSolicited => solicited,
            Opcode::SendInvalidate => Self {
                invalidates: Some(field),
                ..plain
            },
            Opcode::SendSolicitedInvalidate => Self {
                invalidates: Some(field),
                ..solicited
            },
            Opcode::SendImmediate => Self {
                imm: Some(field.to_be()),
                ..plain
            },
            Opcode::SendSolicitedImmediate => Self {
                imm: Some(field.to_be()),
                ..solicited
            },
            _ => return None,
        })
    }
}

/// Whether a frame can come now: a message whose first frame has come is not interrupted by another.
fn continues(begun: Begun, header: &Header) -> bool {
    let (Header::Tagged { opcode, .. } | Header::Untagged { opcode, .. }) = *header;
    match begun {
        Begun::Nothing => true,
        Begun::Send => Send::of(opcode, 0).is_some(),
        Begun::Write => matches!(
            opcode,
            Opcode::Write | Opcode::Immediate | Opcode::ImmediateSolicited
        ),
    }
}

/// Whether a frame says which shared receive queue those behind it are for.
fn is_selection(header: &Header, payload: &[u8]) -> bool {
    let (Header::Tagged { opcode, .. } | Header::Untagged { opcode, .. }) = *header;
    opcode == Opcode::Announce && payload.is_empty()
}

impl Qp {
    /// The receive lock is held.
    pub(super) fn take_frame(
        &self,
        inbound: &mut Inbound,
        header: &Header,
        payload: &[u8],
        solicited: &mut bool,
    ) -> Step {
        let step = self.try_frame(inbound, header, payload, solicited);
        match step {
            // Nobody is told of what is lost, but a receive that has failed.
            Step::NotReady | Step::Refused(..) if self.is_unreliable() => {
                self.lose(inbound, header, &step)
            }
            step => step,
        }
    }

    fn lose(&self, inbound: &mut Inbound, header: &Header, step: &Step) -> Step {
        if let Step::Refused(status, None) = step {
            // A receive has failed with it.
            return Step::Refused(*status, None);
        }
        let (Header::Tagged { opcode, last, .. } | Header::Untagged { opcode, last, .. }) = *header;
        if let Header::Untagged {
            queue, last: true, ..
        } = *header
        {
            inbound.took_msn(queue as usize & 1);
        }
        // What is announced follows, and is the end of the message.
        let last = last && opcode != Opcode::Announce;
        if last {
            self.executed_one(inbound);
        } else {
            inbound.message.is_lost = true;
        }
        Step::Done
    }

    fn try_frame(
        &self,
        inbound: &mut Inbound,
        header: &Header,
        payload: &[u8],
        solicited: &mut bool,
    ) -> Step {
        if inbound.message.is_lost {
            return DENIED;
        }
        if !continues(inbound.message.begun, header) {
            return NONSENSE;
        }
        if let Some(receiver) = &self.receiver
            && !is_selection(header, payload)
            && let Err(step) = self.check_selected(receiver)
        {
            return step;
        }
        match *header {
            Header::Tagged {
                opcode: Opcode::Write,
                last,
                stag,
                offset,
            } => self.take_write(inbound, (offset, stag, last), payload),
            Header::Untagged {
                opcode,
                last,
                field,
                queue,
                msn,
                offset,
            } => {
                if let Err(error) = inbound.check_msn(queue, msn) {
                    tracing::warn!(qpn = self.qpn, %error, "closing a stream");
                    return NONSENSE;
                }
                if let Some(send) = Send::of(opcode, field) {
                    return self.take_send_frame(inbound, send, (offset, last), payload, solicited);
                }
                match opcode {
                    Opcode::Immediate | Opcode::ImmediateSolicited => {
                        let step = self.take_immediate(inbound, payload);
                        if let Step::Done = step {
                            *solicited |= opcode == Opcode::ImmediateSolicited;
                        }
                        step
                    }
                    Opcode::Announce if payload.is_empty() => self.take_selection(inbound, field),
                    Opcode::Announce => self.take_announcement(inbound, payload),
                    Opcode::ReadRequest => self.take_read_request(inbound, payload),
                    Opcode::AtomicRequest => self.take_atomic_request(inbound, payload),
                    _ => NONSENSE,
                }
            }
            Header::Tagged { .. } => NONSENSE,
        }
    }

    /// From now on requests are for the shared receive queue of this number.
    fn take_selection(&self, inbound: &mut Inbound, number: u32) -> Step {
        let Some(receiver) = &self.receiver else {
            return NONSENSE;
        };
        if let Err(step) = self.select(receiver, number) {
            return step;
        }
        inbound.took_msn(1);
        Step::Done
    }

    fn take_announcement(&self, inbound: &mut Inbound, payload: &[u8]) -> Step {
        let Ok(announce) = Announce::decode(payload) else {
            return NONSENSE;
        };
        if !self.allows(IBV_ACCESS_REMOTE_WRITE) {
            return DENIED;
        }
        let (addr, rkey, len) = (announce.offset, announce.stag, announce.len);
        if let Err(status) = self.grants(rkey, addr, len as usize, IBV_ACCESS_REMOTE_WRITE) {
            return refused(status);
        }
        inbound.took_msn(1);
        inbound.message = Message {
            begun: Begun::Write,
            announced: Some((addr, rkey, len)),
            ..Message::default()
        };
        Step::Done
    }

    fn take_write(
        &self,
        inbound: &mut Inbound,
        (addr, rkey, last): (u64, u32, bool),
        payload: &[u8],
    ) -> Step {
        if !self.allows(IBV_ACCESS_REMOTE_WRITE) {
            return DENIED;
        }
        let came = inbound.message.came;
        if let Some((start, key, len)) = inbound.message.announced {
            let end = came + payload.len() as u64;
            let follows = addr == start.wrapping_add(came) && rkey == key;
            if !follows || end > u64::from(len) || (last && end != u64::from(len)) {
                return NONSENSE;
            }
        } else if came > 0 {
            // Only what was announced comes in parts.
            return NONSENSE;
        }
        if !payload.is_empty() {
            let to = match self.grants(rkey, addr, payload.len(), IBV_ACCESS_REMOTE_WRITE) {
                Ok(addr) => addr as usize as *mut u8,
                Err(status) => return refused(status),
            };
            // SAFETY: checked under the receive lock, which is held, and which the end of the key's
            // registration waits for.
            unsafe { copy::write_shared(to, payload.as_ptr(), payload.len()) };
        }
        inbound.message.came += payload.len() as u64;
        inbound.message.begun = Begun::Write;
        if last {
            self.executed_one(inbound);
        }
        Step::Done
    }

    fn take_immediate(&self, inbound: &mut Inbound, payload: &[u8]) -> Step {
        let Ok(immediate) = Immediate::decode(payload) else {
            return NONSENSE;
        };
        let position = match self.next_receive() {
            Ok(position) => position,
            Err(step) => return step,
        };
        let outcome = Outcome {
            status: IBV_WC_SUCCESS,
            opcode: IBV_WC_RECV_RDMA_WITH_IMM,
            byte_len: inbound.message.came as u32,
            imm: Some(immediate.data.to_be()),
            source: None,
        };
        self.rq.complete(position, outcome);
        inbound.took_msn(0);
        self.executed_one(inbound);
        Step::Done
    }

    fn take_send_frame(
        &self,
        inbound: &mut Inbound,
        send: Send,
        (offset, last): (u32, bool),
        payload: &[u8],
        solicited: &mut bool,
    ) -> Step {
        if u64::from(offset) != inbound.message.came {
            return NONSENSE;
        }
        let position = match self.next_receive() {
            Ok(position) => position,
            Err(step) => return step,
        };
        let buffers = self.rq.buffers(position);
        let room: u64 = buffers.clone().map(|sge| u64::from(sge.length)).sum();
        let end = u64::from(offset) + payload.len() as u64;
        if end > room {
            self.rq
                .complete(position, Outcome::failed(IBV_WC_LOC_LEN_ERR));
            return Step::Refused(IBV_WC_REM_INV_REQ_ERR, None);
        }
        let (pd, keys) = (self.recv_pd(), &self.process.info().keys);
        let mut before = 0;
        let checked = buffers.clone().try_for_each(|sge| {
            let begins = before;
            before += u64::from(sge.length);
            // Only what the message reaches is looked at.
            let is_reached = begins < end && before > u64::from(offset);
            if is_reached {
                access::check_here(keys, pd, &sge, IBV_ACCESS_LOCAL_WRITE)
            } else {
                Ok(())
            }
        });
        if let Err(local) = checked {
            self.rq.complete(position, Outcome::failed(local));
            return Step::Refused(IBV_WC_REM_OP_ERR, None);
        }
        // SAFETY: checked under the receive lock, which is held.
        unsafe { scatter(buffers, offset.into(), payload) };
        if !last {
            inbound.message.came = end;
            inbound.message.begun = Begun::Send;
            return Step::Done;
        }
        let step = match send.invalidates {
            Some(key) => self.take_invalidation(position, key, end as u32),
            None => {
                self.rq.complete(position, received(end as u32, send.imm));
                Step::Done
            }
        };
        if let Step::Done = step {
            *solicited |= send.solicited;
            inbound.took_msn(0);
            self.executed_one(inbound);
        }
        step
    }

    fn take_read_request(&self, inbound: &mut Inbound, payload: &[u8]) -> Step {
        let Ok(read) = ReadRequest::decode(payload) else {
            return NONSENSE;
        };
        if !self.allows(IBV_ACCESS_REMOTE_READ) {
            return DENIED;
        }
        let (addr, rkey, len) = (read.source_offset, read.source_stag, read.len);
        if len > 0
            && let Err(status) = self.grants(rkey, addr, len as usize, IBV_ACCESS_REMOTE_READ)
        {
            return refused(status);
        }
        inbound.took_msn(1);
        inbound.reading = Some(Reading {
            sink: read.sink_stag,
            rkey,
            addr,
            len: len.into(),
            done: 0,
        });
        Step::Done
    }

    fn take_atomic_request(&self, inbound: &mut Inbound, payload: &[u8]) -> Step {
        let Ok(atomic) = AtomicRequest::decode(payload) else {
            return NONSENSE;
        };
        let addr = atomic.offset;
        if !self.allows(IBV_ACCESS_REMOTE_ATOMIC) || !addr.is_multiple_of(8) {
            return DENIED;
        }
        let word = match self.grants(atomic.stag, addr, 8, IBV_ACCESS_REMOTE_ATOMIC) {
            Ok(addr) if addr.is_multiple_of(8) => addr as usize as *mut u64,
            Ok(_) => return DENIED,
            Err(status) => return refused(status),
        };
        // SAFETY: eight aligned bytes, checked under the receive lock, which is held.
        let original = unsafe {
            if atomic.swaps {
                copy::compare_swap_u64(word, atomic.compare, atomic.add_or_swap)
            } else {
                copy::fetch_add_u64(word, atomic.add_or_swap)
            }
        };
        let answer = AtomicResponse {
            request_id: atomic.request_id,
            original,
        };
        let header = Header::Untagged {
            opcode: Opcode::AtomicResponse,
            last: true,
            field: 0,
            queue: 3,
            msn: inbound.msn[1].wrapping_add(1),
            offset: 0,
        };
        inbound.took_msn(1);
        let socket = &mut inbound.socket;
        socket.output.frame(&header, &answer.encode(), socket.crc);
        self.executed_one(inbound);
        inbound.tell_with_answer(self.executed());
        Step::Done
    }
}
