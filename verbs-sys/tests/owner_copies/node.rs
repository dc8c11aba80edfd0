//! One end: queue pairs with memory of both kinds, and what they are told to do.

use std::{io::BufReader, os::unix::net::UnixStream};

use serde::{Deserialize, Serialize};
use verbs_sys::{
    AccessFlags, CompletionQueue, Context, MemoryRegion, PathOptions, ProtectionDomain, QpAttrMask,
    QpType, QueuePair, QueuePairInit, WcStatus, WorkCompletion, copy, ffi, find_device,
};

use crate::{
    process::{receive, send},
    sealed,
    traffic::{self, Plan},
};

/// Bytes of each region.
pub const LEN: usize = 1 << 20;
pub const RECEIVES: u32 = 64;
const PSN: u32 = 77;

/// Where memory comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Memory {
    /// The device: a peer maps it.
    Device,
    /// The heap: without process_vm_readv(2) its owner alone can reach it.
    Heap,
}

#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub struct Setup {
    pub unreliable: bool,
    /// One completion queue for both directions: then acknowledgements come with messages.
    pub one_cq: bool,
    /// As ibv_modify_qp(3) has it; 0 is for ever.
    pub timeout: u8,
}

/// What a peer may use.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Grant {
    pub addr: u64,
    pub rkey: u32,
}

/// A queue pair as its peer has to know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Made {
    pub id: usize,
    endpoint: String,
    pub device: Grant,
    pub heap: Grant,
}

impl Made {
    pub fn grant(&self, memory: Memory) -> Grant {
        match memory {
            Memory::Device => self.device,
            Memory::Heap => self.heap,
        }
    }
}

/// A request whose local memory is at the same offset as the peer's. Its number is its place in the
/// list that it is posted with.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Request {
    Write(Memory),
    Read(Memory),
    Add(Memory),
    /// So many bytes of ours.
    Send(Memory, u32),
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// Answers [`Made`].
    Create(Setup),
    Connect {
        id: usize,
        peer: Made,
    },
    /// Posts so many receives.
    Receive {
        id: usize,
        count: u32,
    },
    Post {
        id: usize,
        list: Vec<Request>,
    },
    /// Answers the numbers and statuses of the requests that end next, in their order.
    Wait {
        id: usize,
        count: usize,
    },
    /// Answers whether nothing has ended, after many polls.
    IsIdle {
        id: usize,
    },
    /// Answers the status and length of so many messages that come, with a new receive for each.
    Take {
        id: usize,
        count: usize,
    },
    Fill {
        id: usize,
        memory: Memory,
        byte: u8,
    },
    /// Answers the first byte, if all are the same.
    Look {
        id: usize,
        memory: Memory,
        len: usize,
    },
    ToErr {
        id: usize,
    },
    Reset {
        id: usize,
    },
    Destroy {
        id: usize,
    },
    /// Random requests, of which every byte is checked. Answers how many.
    Traffic {
        id: usize,
        plan: Plan,
    },
    /// Does each of the requests many times and ends the process, which may make no system calls for it.
    Sealed {
        id: usize,
        list: Vec<Request>,
    },
}

/// Bytes that peers use, by raw pointer only.
pub struct Region {
    /// Goes before the bytes do.
    pub region: MemoryRegion,
    base: *mut u8,
    _heap: Vec<u64>,
}

impl Region {
    fn new(context: &Context, pd: &ProtectionDomain, memory: Memory) -> Self {
        let access = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC;
        let (mut heap, device) = match memory {
            Memory::Device => (Vec::new(), Some(context.alloc_memory(LEN).expect("memory"))),
            Memory::Heap => (vec![0u64; LEN / 8], None),
        };
        if let Some(device) = device {
            return Self {
                base: device.addr(),
                region: pd.reg_memory(&device, access).expect("no region"),
                _heap: heap,
            };
        }
        let base = heap.as_mut_ptr().cast::<u8>();
        // SAFETY: the bytes live as long as the region, and are looked at by raw pointer only.
        let region = unsafe { pd.reg_mr(base, LEN, access) }.expect("no region");
        Self {
            region,
            base,
            _heap: heap,
        }
    }

    pub fn store(&self, offset: usize, bytes: &[u8]) {
        assert!(offset + bytes.len() <= LEN);
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::write_shared(self.base.add(offset), bytes.as_ptr(), bytes.len()) };
    }

    pub fn load(&self, offset: usize, len: usize) -> Vec<u8> {
        assert!(offset + len <= LEN);
        let mut bytes = vec![0; len];
        // SAFETY: inside the memory, as just checked; no reference covers it.
        unsafe { copy::read_shared(bytes.as_mut_ptr(), self.base.add(offset), len) };
        bytes
    }

    pub fn word(&self, offset: usize) -> u64 {
        u64::from_ne_bytes(self.load(offset, 8).try_into().expect("8 bytes"))
    }

    fn element(&self, offset: usize, len: u32) -> ffi::ibv_sge {
        ffi::ibv_sge {
            addr: self.region.addr() + offset as u64,
            length: len,
            lkey: self.region.lkey(),
        }
    }
}

/// A queue pair and what belongs to it; fields in the order in which they go.
pub struct Pair {
    pub qp: QueuePair,
    pub send_cq: CompletionQueue,
    pub recv_cq: CompletionQueue,
    pub device: Region,
    pub heap: Region,
    inbox: Region,
    path: PathOptions,
    pub peer: Option<Made>,
}

/// Set in the numbers of receives.
pub const RECEIVE: u64 = 1 << 63;

/// Bytes of a receive.
const RECEIVE_LEN: usize = LEN / RECEIVES as usize;

impl Pair {
    pub fn region(&self, memory: Memory) -> &Region {
        match memory {
            Memory::Device => &self.device,
            Memory::Heap => &self.heap,
        }
    }

    /// Posts one request: `from` our memory at an offset, to the peer's at another.
    pub fn post(
        &self,
        wr_id: u64,
        request: Request,
        (from, offset, len): (Memory, usize, u32),
        at: u64,
    ) {
        let peer = self.peer.as_ref().expect("not connected");
        let mut element = self.region(from).element(offset, len);
        let mut raw = ffi::ibv_send_wr {
            wr_id,
            sg_list: &mut element,
            num_sge: 1,
            send_flags: ffi::IBV_SEND_SIGNALED,
            ..ffi::ibv_send_wr::zeroed()
        };
        match request {
            Request::Send(..) => raw.opcode = ffi::IBV_WR_SEND,
            Request::Write(memory) | Request::Read(memory) => {
                raw.opcode = match request {
                    Request::Write(_) => ffi::IBV_WR_RDMA_WRITE,
                    _ => ffi::IBV_WR_RDMA_READ,
                };
                let grant = peer.grant(memory);
                raw.wr.rdma = ffi::ibv_send_wr_rdma {
                    remote_addr: grant.addr + at,
                    rkey: grant.rkey,
                };
            }
            Request::Add(memory) => {
                raw.opcode = ffi::IBV_WR_ATOMIC_FETCH_AND_ADD;
                let grant = peer.grant(memory);
                raw.wr.atomic = ffi::ibv_send_wr_atomic {
                    remote_addr: grant.addr + at,
                    compare_add: 1,
                    swap: 0,
                    rkey: grant.rkey,
                };
            }
        }
        // SAFETY: one valid request, whose element lies in a region that no reference covers.
        unsafe { self.qp.post_send(&mut raw) }.expect("cannot post");
    }

    /// Posts a request of a test's list.
    pub fn post_simple(&self, number: u64, request: Request) {
        let local = match request {
            Request::Send(memory, len) => (memory, 0, len),
            Request::Write(memory) => (memory, 0, 64),
            // Not over what is written.
            Request::Read(memory) => (memory, LEN / 2, 64),
            Request::Add(memory) => (memory, LEN / 2, 8),
        };
        self.post(number, request, local, 0);
    }

    pub fn post_receive(&self, index: u64) {
        let mut element = self
            .inbox
            .element(index as usize * RECEIVE_LEN, RECEIVE_LEN as u32);
        let mut raw = ffi::ibv_recv_wr {
            wr_id: RECEIVE | index,
            next: std::ptr::null_mut(),
            sg_list: &mut element,
            num_sge: 1,
        };
        // SAFETY: one valid request, whose element no other uses and no reference covers.
        unsafe { self.qp.post_recv(&mut raw) }.expect("cannot post a receive");
    }

    /// The bytes of a message.
    pub fn received(&self, completion: &WorkCompletion) -> Vec<u8> {
        let at = (completion.wr_id() & !RECEIVE) as usize * RECEIVE_LEN;
        self.inbox.load(at, completion.byte_len() as usize)
    }
}

/// The next completion, if there is one.
pub fn poll(cq: &CompletionQueue) -> Option<WorkCompletion> {
    let mut completions = [WorkCompletion::default()];
    let count = cq.poll(&mut completions).expect("cannot poll");
    let [completion] = completions;
    (count > 0).then_some(completion)
}

/// The next completion. Whoever asked for it does not wait for ever.
pub fn wait(cq: &CompletionQueue) -> WorkCompletion {
    loop {
        if let Some(completion) = poll(cq) {
            return completion;
        }
        std::thread::yield_now();
    }
}

struct Node {
    pairs: Vec<Option<Pair>>,
    pd: ProtectionDomain,
    context: Context,
}

/// Does what comes on `orders` until it ends.
pub fn run(orders: UnixStream) {
    let device = find_device(Some("soft0")).expect("no device");
    let context = device.open().expect("the device does not open");
    let mut node = Node {
        pairs: Vec::new(),
        pd: context.alloc_pd().expect("no protection domain"),
        context,
    };
    let mut orders = BufReader::new(orders);
    while let Some(command) = receive(&mut orders) {
        let answer = node.execute(command);
        send(orders.get_mut(), &answer);
    }
}

fn json(answer: impl Serialize) -> serde_json::Value {
    serde_json::to_value(answer).expect("cannot encode")
}

impl Node {
    fn pair(&mut self, id: usize) -> &mut Pair {
        self.pairs[id].as_mut().expect("destroyed")
    }

    fn execute(&mut self, command: Command) -> serde_json::Value {
        match command {
            Command::Create(setup) => return json(self.create(setup)),
            Command::Connect { id, peer } => {
                let pair = self.pair(id);
                let remote = peer.endpoint.parse().expect("no endpoint");
                pair.qp.to_init(AccessFlags::all(), 1).expect("INIT");
                pair.qp.to_rtr(&remote, &pair.path).expect("RTR");
                pair.qp.to_rts(PSN, &pair.path).expect("RTS");
                pair.peer = Some(peer);
            }
            Command::Receive { id, count } => {
                (0..count).for_each(|index| self.pair(id).post_receive(index.into()));
            }
            Command::Post { id, list } => {
                for (number, request) in list.into_iter().enumerate() {
                    self.pair(id).post_simple(number as u64, request);
                }
            }
            Command::Wait { id, count } => {
                let cq = &self.pair(id).send_cq;
                let ended = (0..count).map(|_| wait(cq));
                let ended = ended.map(|done| (done.wr_id(), done.as_raw().status));
                return json(ended.collect::<Vec<_>>());
            }
            Command::IsIdle { id } => {
                let cq = &self.pair(id).send_cq;
                return json((0..1000).all(|_| poll(cq).is_none()));
            }
            Command::Take { id, count } => {
                let pair = self.pair(id);
                let came = (0..count).map(|_| {
                    let done = wait(&pair.recv_cq);
                    if done.status() == WcStatus::Success {
                        pair.post_receive(done.wr_id() & !RECEIVE);
                    }
                    (done.as_raw().status, done.byte_len())
                });
                return json(came.collect::<Vec<_>>());
            }
            Command::Fill { id, memory, byte } => {
                self.pair(id).region(memory).store(0, &[byte; 4096]);
            }
            Command::Look { id, memory, len } => {
                let bytes = self.pair(id).region(memory).load(0, len);
                let same = bytes.iter().all(|byte| *byte == bytes[0]);
                return json(same.then_some(bytes[0]));
            }
            Command::ToErr { id } => self.pair(id).qp.to_err().expect("ERR"),
            Command::Reset { id } => {
                let mut attr = ffi::ibv_qp_attr::zeroed();
                attr.qp_state = ffi::IBV_QPS_RESET;
                let reset = self.pair(id).qp.modify(&attr, QpAttrMask::STATE);
                reset.expect("RESET");
            }
            Command::Destroy { id } => self.pairs[id] = None,
            Command::Traffic { id, plan } => return json(traffic::run(self.pair(id), plan)),
            Command::Sealed { id, list } => sealed::run(self.pair(id), &list),
        }
        json(())
    }

    fn create(&mut self, setup: Setup) -> Made {
        let queue = || self.context.create_cq(256, None).expect("no queue");
        let send_cq = queue();
        let recv_cq = if setup.one_cq {
            send_cq.clone()
        } else {
            queue()
        };
        let init = QueuePairInit {
            max_recv_wr: RECEIVES,
            qp_type: if setup.unreliable {
                QpType::Uc
            } else {
                QpType::Rc
            },
            ..QueuePairInit::new(&send_cq, &recv_cq)
        };
        let qp = self.pd.create_qp(&init).expect("no queue pair");
        let region = |memory| Region::new(&self.context, &self.pd, memory);
        let pair = Pair {
            device: region(Memory::Device),
            heap: region(Memory::Heap),
            inbox: region(Memory::Heap),
            path: PathOptions {
                gid_index: self.context.choose_gid(1).expect("no address").0,
                timeout: setup.timeout,
                ..PathOptions::default()
            },
            qp,
            send_cq,
            recv_cq,
            peer: None,
        };
        let grant = |region: &Region| Grant {
            addr: region.region.addr(),
            rkey: region.region.rkey(),
        };
        let endpoint = pair.qp.endpoint(&pair.path, PSN).expect("no endpoint");
        let made = Made {
            id: self.pairs.len(),
            endpoint: endpoint.to_string(),
            device: grant(&pair.device),
            heap: grant(&pair.heap),
        };
        self.pairs.push(Some(pair));
        made
    }
}
