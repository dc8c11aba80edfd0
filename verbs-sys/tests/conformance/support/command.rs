//! What an end can be told to do, in a form that goes to another process.

use serde::{Deserialize, Serialize};
use verbs_sys::{PathOptions, SendFlags, Sge, WcOpcode, WcStatus, ffi};

use super::windows::Bind;

/// Where the memory of an end comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum MemoryKind {
    /// `Context::alloc_memory`.
    Device,
    /// The process's heap.
    Heap,
}

/// One of the two completion queues of a queue pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Queue {
    Send,
    Recv,
}

/// Bytes that travel as hexadecimal text.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(into = "String", from = "String")]
pub struct Bytes(pub Vec<u8>);

const DIGITS: &[u8; 16] = b"0123456789abcdef";

impl From<Bytes> for String {
    fn from(bytes: Bytes) -> Self {
        let digits = |byte: u8| [byte >> 4, byte & 15].map(|d| char::from(DIGITS[usize::from(d)]));
        bytes.0.into_iter().flat_map(digits).collect()
    }
}

impl From<String> for Bytes {
    fn from(text: String) -> Self {
        let value = |digit: u8| char::from(digit).to_digit(16).expect("not hexadecimal") as u8;
        let byte = |pair: &[u8]| value(pair[0]) << 4 | value(pair[1]);
        Self(text.as_bytes().chunks_exact(2).map(byte).collect())
    }
}

/// A queue pair of an end: an index there, and its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Qp {
    pub id: usize,
    pub num: u32,
    pub max_send_wr: usize,
    pub max_recv_wr: usize,
    pub max_send_sge: usize,
    pub max_recv_sge: usize,
    pub max_inline_data: usize,
}

/// A registered region of an end: an index there, and what peers must know.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Region {
    pub id: usize,
    pub addr: u64,
    pub len: usize,
    pub lkey: u32,
    pub rkey: u32,
}

impl Region {
    /// A part of it as a local element.
    pub fn sge(&self, offset: usize, len: usize) -> Element {
        Element {
            addr: self.addr + offset as u64,
            len: len as u32,
            lkey: self.lkey,
        }
    }

    /// A place in it as a remote target.
    pub fn at(&self, offset: usize) -> Target {
        Target {
            addr: self.addr + offset as u64,
            rkey: self.rkey,
        }
    }
}

/// A local scatter/gather element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Element {
    pub addr: u64,
    pub len: u32,
    pub lkey: u32,
}

impl From<Element> for Sge {
    fn from(element: Element) -> Self {
        Self {
            addr: element.addr,
            length: element.len,
            lkey: element.lkey,
        }
    }
}

/// A place in the peer's memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Target {
    pub addr: u64,
    pub rkey: u32,
}

/// A send request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Request {
    pub wr_id: u64,
    pub opcode: u32,
    pub flags: u32,
    pub imm: u32,
    pub elements: Vec<Element>,
    pub target: Target,
    pub compare_add: u64,
    pub swap: u64,
    pub to: Option<Destination>,
}

/// Where a datagram goes.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Destination {
    /// Index of an address handle.
    pub ah: usize,
    pub qp_num: u32,
    pub qkey: u32,
}

impl Request {
    /// A signaled request.
    pub fn new(opcode: u32, elements: &[Element], target: Target) -> Self {
        Self {
            wr_id: 0,
            opcode,
            flags: ffi::IBV_SEND_SIGNALED,
            imm: 0,
            elements: elements.to_vec(),
            target,
            compare_add: 0,
            swap: 0,
            to: None,
        }
    }

    pub fn send(elements: &[Element]) -> Self {
        Self::new(ffi::IBV_WR_SEND, elements, Target::default())
    }

    pub fn send_imm(elements: &[Element], imm: u32) -> Self {
        let request = Self::new(ffi::IBV_WR_SEND_WITH_IMM, elements, Target::default());
        Self { imm, ..request }
    }

    pub fn write(elements: &[Element], target: Target) -> Self {
        Self::new(ffi::IBV_WR_RDMA_WRITE, elements, target)
    }

    pub fn write_imm(elements: &[Element], target: Target, imm: u32) -> Self {
        let request = Self::new(ffi::IBV_WR_RDMA_WRITE_WITH_IMM, elements, target);
        Self { imm, ..request }
    }

    pub fn read(elements: &[Element], target: Target) -> Self {
        Self::new(ffi::IBV_WR_RDMA_READ, elements, target)
    }

    pub fn compare_swap(result: Element, target: Target, compare: u64, swap: u64) -> Self {
        Self {
            compare_add: compare,
            swap,
            ..Self::new(ffi::IBV_WR_ATOMIC_CMP_AND_SWP, &[result], target)
        }
    }

    pub fn fetch_add(result: Element, target: Target, add: u64) -> Self {
        Self {
            compare_add: add,
            ..Self::new(ffi::IBV_WR_ATOMIC_FETCH_AND_ADD, &[result], target)
        }
    }

    pub fn to(self, to: Destination) -> Self {
        Self {
            to: Some(to),
            ..self
        }
    }

    pub fn id(self, wr_id: u64) -> Self {
        Self { wr_id, ..self }
    }

    pub fn unsignaled(self) -> Self {
        Self {
            flags: self.flags & !ffi::IBV_SEND_SIGNALED,
            ..self
        }
    }

    pub fn inline(self) -> Self {
        Self {
            flags: self.flags | ffi::IBV_SEND_INLINE,
            ..self
        }
    }

    pub fn solicited(self) -> Self {
        Self {
            flags: self.flags | SendFlags::SOLICITED.bits(),
            ..self
        }
    }

    pub fn fenced(self) -> Self {
        Self {
            flags: self.flags | SendFlags::FENCE.bits(),
            ..self
        }
    }
}

/// A receive request.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Recv {
    pub wr_id: u64,
    pub elements: Vec<Element>,
}

impl Recv {
    pub fn new(wr_id: u64, elements: &[Element]) -> Self {
        Self {
            wr_id,
            elements: elements.to_vec(),
        }
    }
}

/// A refused list of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Refused {
    pub errno: i32,
    /// Index in the list of the first request not posted; anything if the device names none.
    pub index: usize,
}

/// A completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Completion {
    pub wr_id: u64,
    status: u32,
    opcode: u32,
    pub byte_len: u32,
    pub imm: Option<u32>,
    pub invalidated: Option<u32>,
    pub qp_num: u32,
    pub src_qp: u32,
    pub flags: u32,
}

impl Completion {
    pub fn status(&self) -> WcStatus {
        self.status.into()
    }

    pub fn raw_status(&self) -> u32 {
        self.status
    }

    pub fn opcode(&self) -> WcOpcode {
        self.opcode.into()
    }
}

impl From<&verbs_sys::WorkCompletion> for Completion {
    fn from(wc: &verbs_sys::WorkCompletion) -> Self {
        Self {
            wr_id: wc.wr_id(),
            status: wc.as_raw().status,
            opcode: wc.as_raw().opcode,
            byte_len: wc.byte_len(),
            imm: wc.imm_data(),
            invalidated: wc.invalidated_rkey(),
            qp_num: wc.qp_num(),
            src_qp: wc.as_raw().src_qp,
            flags: wc.as_raw().wc_flags,
        }
    }
}

/// An asynchronous event: its `ibv_event_type`, and the number of the queue pair if it is of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AsyncEvent {
    pub event_type: u32,
    pub qp_num: Option<u32>,
    /// Index of the shared receive queue that it is of.
    pub srq: Option<usize>,
    /// The completion queue that it is of.
    pub cq: Option<(u32, Queue)>,
}

/// A shared receive queue of an end: an index there, and its sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Srq {
    pub id: usize,
    pub max_wr: u32,
    pub max_sge: u32,
}

/// How to make and connect a queue pair. Sizes are at least these.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct QpSetup {
    /// The kind of service, as verbs number it.
    pub qp_type: u32,
    /// Index of the protection domain.
    pub pd: usize,
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_sge: u32,
    pub max_inline_data: u32,
    pub sq_sig_all: bool,
    /// One completion queue for both work queues.
    pub one_cq: bool,
    /// Entries of each completion queue.
    pub cqe: u32,
    /// Index of the shared receive queue.
    pub srq: Option<usize>,
    pub access: u32,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    /// READs and atomics outstanding each way.
    pub max_rd_atomic: u8,
}

impl Default for QpSetup {
    fn default() -> Self {
        Self {
            qp_type: ffi::IBV_QPT_RC,
            pd: 0,
            max_send_wr: 16,
            max_recv_wr: 16,
            max_sge: 4,
            max_inline_data: 64,
            sq_sig_all: false,
            one_cq: false,
            cqe: 256,
            srq: None,
            access: super::ALL_ACCESS.bits(),
            rnr_retry: 7,
            min_rnr_timer: 1,
            // A second: emulated machines are slow, and nothing here depends on it.
            timeout: 18,
            retry_cnt: 7,
            max_rd_atomic: 16,
        }
    }
}

impl QpSetup {
    pub fn path(&self, gid_index: u8) -> PathOptions {
        PathOptions {
            gid_index,
            rnr_retry: self.rnr_retry,
            min_rnr_timer: self.min_rnr_timer,
            timeout: self.timeout,
            retry_cnt: self.retry_cnt,
            max_rd_atomic: self.max_rd_atomic,
            ..PathOptions::default()
        }
    }
}

/// A `QueuePairEndpoint` as text.
pub type Address = String;

/// What an end does. The type of its answer is in the comment.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// `()`; must be the first.
    Open { memory: MemoryKind },
    /// `bool`
    IsSoftware,
    /// `usize`
    AllocPd,
    /// `Region`
    Register { pd: usize, len: usize, access: u32 },
    /// `()`
    Deregister { region: usize },
    /// `Option<i32>`: the error
    TryDeregister { region: usize },
    /// `Result<Region, i32>`: changes it, with new zeroed bytes if a length is given
    Rereg {
        region: usize,
        len: Option<usize>,
        pd: Option<usize>,
        access: Option<u32>,
    },
    /// `Bytes`: what was there before a region got new bytes
    LoadFormer {
        region: usize,
        offset: usize,
        len: usize,
    },
    /// `u32`, the `device_cap_flags`
    Capabilities,
    /// `Window`, of type 1 or 2
    AllocMw { pd: usize, kind: u32 },
    /// `Result<u32, i32>`: the new key, after ibv_bind_mw
    BindMw {
        qp: usize,
        window: usize,
        bind: Bind,
    },
    /// `Result<(), Refused>`, after posting a bind to this key
    PostBind {
        qp: usize,
        window: usize,
        rkey: u32,
        bind: Bind,
    },
    /// `()`
    DeallocMw { window: usize },
    /// `Vec<u32>`: writes ever new bytes to the target, with one thread for each queue pair, until a
    /// write fails; each failure's `ibv_wc_status`
    Batter {
        qps: Vec<usize>,
        sources: Vec<usize>,
        target: Target,
        len: usize,
    },
    /// `u64`: a number made of all bytes
    Digest { region: usize },
    /// `()`
    Store {
        region: usize,
        offset: usize,
        bytes: Bytes,
    },
    /// `()`
    Fill { region: usize, byte: u8 },
    /// `Bytes`
    Load {
        region: usize,
        offset: usize,
        len: usize,
    },
    /// `Qp`
    CreateQp { setup: QpSetup },
    /// `()`
    Init { qp: usize },
    /// `Address`
    Endpoint { qp: usize },
    /// `()`, after going to RTR
    ToRtr { qp: usize, remote: Address },
    /// `()`, after going to RTS
    ToRts { qp: usize },
    /// `()`, after going to RTS
    StartDatagrams { qp: usize, qkey: u32 },
    /// `usize`
    CreateAh { remote: Address },
    /// `()`, after going to SQD
    ToSqd { qp: usize },
    /// `()`, after going to SQD with an event at its end
    ToSqdWithEvent { qp: usize },
    /// `()`, after going from SQD to RTS
    Resume { qp: usize },
    /// `()`
    ToErr { qp: usize },
    /// `()`
    ToReset { qp: usize },
    /// `()`
    DestroyQp { qp: usize },
    /// `u32`, an `ibv_qp_state`
    State { qp: usize },
    /// `Result<(), Refused>`
    PostSend { qp: usize, list: Vec<Request> },
    /// `Result<(), Refused>`
    PostRecv { qp: usize, list: Vec<Recv> },
    /// `Option<Completion>`
    Poll { qp: usize, queue: Queue },
    /// `Completion`, or a panic when the patience is over
    Wait { qp: usize, queue: Queue },
    /// `Vec<Option<Completion>>`: empty if the queue cannot be polled any more
    TryPoll { qp: usize, queue: Queue },
    /// `usize`: entries that the queue has room for
    Capacity { qp: usize, queue: Queue },
    /// `Result<(), i32>`
    ResizeCq { qp: usize, queue: Queue, cqe: u32 },
    /// `()`
    Arm {
        qp: usize,
        queue: Queue,
        solicited_only: bool,
    },
    /// `Option<(u32, Queue)>`: the number of the queue pair whose queue has an event; waits for one
    /// if told so
    Event { wait: bool },
    /// `Srq`
    CreateSrq {
        pd: usize,
        max_wr: u32,
        max_sge: u32,
    },
    /// `Result<(), Refused>`
    PostSrqRecv { srq: usize, list: Vec<Recv> },
    /// `bool`: whether the device did it; `mask` has `IBV_SRQ_*` bits
    ModifySrq {
        srq: usize,
        max_wr: u32,
        limit: u32,
        mask: u32,
    },
    /// `u32`: the limit of which an event is due
    SrqLimit { srq: usize },
    /// `u32`: how many receives it holds
    SrqSize { srq: usize },
    /// `Option<AsyncEvent>`; waits for one if told so
    AsyncEvent { wait: bool },
    /// `()`: receives so many messages, whose immediates count up from 0, asleep while none is there
    ReceiveAsleep { qp: usize, count: u32 },
    /// `u32`: as `ReceiveAsleep`, by one poll for each event; how many that took. The receives are posted, and the
    /// queue is armed
    ReceiveByEvents { qp: usize, count: u32 },
    /// `Vec<u64>`: the values found by so many fetch-and-adds of 1, with one thread for each queue
    /// pair, all at once
    FetchAdds {
        qps: Vec<usize>,
        results: usize,
        target: Target,
        count: usize,
    },
    /// `()`: adds 1 so many times by reading and comparing-and-swapping until it succeeds, with one
    /// thread for each queue pair, all at once
    CompareSwaps {
        qps: Vec<usize>,
        results: usize,
        target: Target,
        count: usize,
    },
    /// `Option<u32>`: writes the words 1, 2, 3… to the target, one at a time, until a write fails;
    /// the failure's `ibv_wc_status`
    WriteUntilRefused {
        qp: usize,
        source: usize,
        target: Target,
    },
}
