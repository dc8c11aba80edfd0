//! One end: a process with queue pairs, which does what it is told and keeps their traffic going meanwhile.

use std::{
    os::{fd::AsFd, unix::net::UnixStream},
    time::{Duration, Instant},
};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::{Deserialize, Serialize};
use verbs_sys::{
    AccessFlags, CompletionChannel, CompletionQueue, Context, MemoryRegion, PathOptions,
    ProtectionDomain, QueuePair, QueuePairEndpoint, QueuePairInit, find_device,
};

use super::{
    memory::Memory,
    process::{receive, send},
    traffic::{Mix, RECEIVE_LEN, RECEIVES, SLOT_LEN, Traffic, WINDOW},
};

/// Bytes that a peer may use.
pub const GRANTED: usize = 256 << 10;
/// Bytes before and behind them that it may not.
const GUARD: usize = 16 << 10;
const GUARD_BYTE: u8 = 0xa5;
/// How long requests may be under way, whatever happens to the peer.
const PATIENCE: Duration = Duration::from_secs(90);

/// How a queue pair is connected: attributes of ibv_modify_qp(3).
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Setup {
    pub timeout: u8,
    pub retry_cnt: u8,
    pub psn: u32,
}

impl Default for Setup {
    /// Gives a silent peer up after about two seconds: a busy machine may keep one waiting for one.
    fn default() -> Self {
        Self {
            timeout: 16,
            retry_cnt: 6,
            psn: 0xff_ff00,
        }
    }
}

impl Setup {
    /// Waits for a peer for some ten seconds.
    pub fn patient() -> Self {
        Self {
            timeout: 18,
            retry_cnt: 7,
            ..Self::default()
        }
    }
}

/// What a peer may use, and with which key.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Grant {
    pub addr: u64,
    pub rkey: u32,
}

/// A queue pair as its peer has to know it.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Made {
    pub id: usize,
    pub endpoint: String,
    pub grant: Grant,
}

impl Made {
    pub fn qp_num(&self) -> u32 {
        let endpoint: QueuePairEndpoint = self.endpoint.parse().expect("no endpoint");
        endpoint.qp_num
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub enum Command {
    /// Answers [`Made`].
    Create(Setup),
    Connect {
        id: usize,
        remote: String,
        grant: Grant,
    },
    Start {
        id: usize,
        mix: Mix,
    },
    Stop {
        id: usize,
    },
    /// Answers a report.
    Outcome {
        id: usize,
        /// Once no request is under way.
        wait: bool,
    },
    /// Answers the granted bytes.
    Memory {
        id: usize,
    },
    /// Answers what is wrong with the peer's bytes, which come with the command.
    Judge {
        id: usize,
        received: u64,
    },
    /// Answers the offset of a changed byte beside those that are granted.
    Guards {
        id: usize,
    },
    Destroy {
        id: usize,
    },
}

/// A queue pair and what belongs to it; fields in the order in which they go.
pub struct Pair {
    pub qp: QueuePair,
    pub send_cq: CompletionQueue,
    pub recv_cq: CompletionQueue,
    pub slots: MemoryRegion,
    pub inbox: MemoryRegion,
    granted: MemoryRegion,
    pub slots_memory: Memory,
    pub inbox_memory: Memory,
    pub memory: Memory,
    path: PathOptions,
    psn: u32,
}

struct Node {
    pairs: Vec<Option<(Pair, Traffic)>>,
    pd: ProtectionDomain,
    channel: CompletionChannel,
    context: Context,
    gid_index: u8,
}

/// Does what comes on `orders` until it ends.
pub fn run(mut orders: UnixStream) {
    let device = find_device(Some("soft0")).expect("no device");
    let context = device.open().expect("the device does not open");
    let (gid_index, _) = context.choose_gid(1).expect("no address");
    let mut node = Node {
        pairs: Vec::new(),
        pd: context.alloc_pd().expect("no protection domain"),
        channel: context.create_comp_channel().expect("no channel"),
        context,
        gid_index,
    };
    send(&mut orders, &(), &[]);
    loop {
        let busy = node.step();
        if !busy && !node.arm() {
            node.sleep(&orders, None);
        }
        if is_readable(&orders) {
            let Some((command, blob)) = receive(&mut orders) else {
                return;
            };
            node.execute(&mut orders, command, &blob);
        }
    }
}

fn is_readable(stream: &UnixStream) -> bool {
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    let now = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    matches!(poll(&mut fds, Some(&now)), Ok(1..))
}

impl Node {
    /// Moves all traffic on; whether there was any.
    fn step(&mut self) -> bool {
        let mut busy = false;
        for (pair, traffic) in self.pairs.iter_mut().flatten() {
            busy |= traffic.step(pair);
        }
        busy
    }

    /// Arms all completion queues and looks once more.
    fn arm(&mut self) -> bool {
        while let Ok(Some(_)) = self.channel.try_get_event() {}
        for (pair, _) in self.pairs.iter().flatten() {
            pair.send_cq.req_notify(false).expect("cannot arm");
            pair.recv_cq.req_notify(false).expect("cannot arm");
        }
        self.step()
    }

    /// Until a completion or a command comes, or the time is over.
    fn sleep(&self, orders: &UnixStream, limit: Option<Duration>) {
        let limit = limit.map(|limit| Timespec {
            tv_sec: limit.as_secs() as i64,
            tv_nsec: i64::from(limit.subsec_nanos()),
        });
        let channel = self.channel.as_fd();
        let mut fds = [
            PollFd::new(&channel, PollFlags::IN),
            PollFd::new(orders, PollFlags::IN),
        ];
        // While a command waits for its end nothing else comes there.
        let count = if limit.is_some() { 1 } else { 2 };
        let _ = poll(&mut fds[..count], limit.as_ref());
    }

    fn execute(&mut self, orders: &mut UnixStream, command: Command, blob: &[u8]) {
        match command {
            Command::Create(setup) => {
                let made = self.create(setup);
                send(orders, &made, &[]);
            }
            Command::Connect { id, remote, grant } => {
                let (pair, traffic) = self.pair(id);
                let remote = remote.parse().expect("no endpoint");
                traffic.connect(grant, &remote);
                pair.qp.to_rtr(&remote, &pair.path).expect("no way to RTR");
                traffic.post_receives(pair);
                pair.qp.to_rts(pair.psn, &pair.path).expect("no way to RTS");
                send(orders, &(), &[]);
            }
            Command::Start { id, mix } => {
                self.pair(id).1.start(mix);
                send(orders, &(), &[]);
            }
            Command::Stop { id } => {
                self.pair(id).1.stop();
                send(orders, &(), &[]);
            }
            Command::Outcome { id, wait } => {
                let deadline = Instant::now() + PATIENCE;
                // What has been said to be done is there now.
                self.step();
                while wait && !self.pair(id).1.is_over() && Instant::now() < deadline {
                    if !self.step() && !self.arm() {
                        self.sleep(orders, Some(Duration::from_millis(100)));
                    }
                }
                self.step();
                let report = self.pair(id).1.report();
                send(orders, &report, &[]);
            }
            Command::Memory { id } => {
                let bytes = self.pair(id).0.memory.load(GUARD, GRANTED);
                send(orders, &(), &bytes);
            }
            Command::Judge { id, received } => {
                let wrong = self.pair(id).1.judge(blob, received);
                send(orders, &wrong, &[]);
            }
            Command::Guards { id } => {
                let memory = &self.pair(id).0.memory;
                let changed = |from| {
                    let bytes = memory.load(from, GUARD);
                    let at = bytes.iter().position(|byte| *byte != GUARD_BYTE);
                    at.map(|at| from + at)
                };
                let wrong = changed(0).or_else(|| changed(GUARD + GRANTED));
                send(orders, &wrong, &[]);
            }
            Command::Destroy { id } => {
                self.pairs[id] = None;
                send(orders, &(), &[]);
            }
        }
    }

    fn pair(&mut self, id: usize) -> &mut (Pair, Traffic) {
        self.pairs[id]
            .as_mut()
            .expect("the queue pair is destroyed")
    }

    fn create(&mut self, setup: Setup) -> Made {
        let queue = || {
            let depth = (WINDOW + RECEIVES) as u32;
            let queue = self.context.create_cq(depth, Some(&self.channel));
            queue.expect("no completion queue")
        };
        let (send_cq, recv_cq) = (queue(), queue());
        let init = QueuePairInit {
            max_send_wr: WINDOW as u32,
            max_recv_wr: RECEIVES as u32,
            ..QueuePairInit::new(&send_cq, &recv_cq)
        };
        let qp = self.pd.create_qp(&init).expect("no queue pair");
        let allocate = |len| Memory::new(&self.context, len);
        let memory = allocate(GUARD + GRANTED + GUARD);
        memory.store(0, &[GUARD_BYTE; GUARD]);
        memory.store(GUARD + GRANTED, &[GUARD_BYTE; GUARD]);
        let (slots_memory, inbox_memory) = (
            allocate(WINDOW * SLOT_LEN),
            allocate(RECEIVES * RECEIVE_LEN),
        );
        let granted = AccessFlags::LOCAL_WRITE
            | AccessFlags::REMOTE_WRITE
            | AccessFlags::REMOTE_READ
            | AccessFlags::REMOTE_ATOMIC;
        let private = AccessFlags::LOCAL_WRITE;
        // SAFETY: the memories go after their regions, which are in front of them in the pair.
        let (granted, slots, inbox) = unsafe {
            (
                memory.register(&self.pd, GUARD, GRANTED, granted),
                slots_memory.register(&self.pd, 0, WINDOW * SLOT_LEN, private),
                inbox_memory.register(&self.pd, 0, RECEIVES * RECEIVE_LEN, private),
            )
        };
        let pair = Pair {
            slots,
            inbox,
            granted,
            path: PathOptions {
                gid_index: self.gid_index,
                timeout: setup.timeout,
                retry_cnt: setup.retry_cnt,
                ..PathOptions::default()
            },
            psn: setup.psn,
            qp,
            send_cq,
            recv_cq,
            slots_memory,
            inbox_memory,
            memory,
        };
        pair.qp
            .to_init(AccessFlags::all(), 1)
            .expect("no way to INIT");
        let endpoint = pair.qp.endpoint(&pair.path, pair.psn).expect("no endpoint");
        let free = self.pairs.iter().position(Option::is_none);
        let id = free.unwrap_or(self.pairs.len());
        let made = Made {
            id,
            endpoint: endpoint.to_string(),
            grant: Grant {
                addr: pair.granted.addr(),
                rkey: pair.granted.rkey(),
            },
        };
        let traffic = Traffic::new(pair.qp.qp_num());
        if id == self.pairs.len() {
            self.pairs.push(None);
        }
        self.pairs[id] = Some((pair, traffic));
        made
    }
}
