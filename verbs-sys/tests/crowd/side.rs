//! One end: many queue pairs whose completions go to one or two queues.

use std::fmt;
use std::str::FromStr;

use verbs_sys::ffi::{self, ibv_recv_wr, ibv_send_wr, ibv_send_wr_rdma, ibv_send_wr_ud, ibv_sge};
use verbs_sys::{
    AccessFlags, AddressHandle, CompletionChannel, CompletionQueue, Context, MemoryRegion,
    PathOptions, ProtectionDomain, QpType, QueuePair, QueuePairEndpoint, QueuePairInit, RemoteAddr,
    SharedReceiveQueue, WorkCompletion, find_device,
};

use crate::Result;

/// Reliable connections, and datagram queue pairs.
const CONNECTIONS: usize = 40;
const DATAGRAMS: usize = 10;
/// Receives posted to each queue pair, and sends that may be under way.
pub const DEPTH: usize = 4;
/// Bytes of a message: the last 8 hold what it says, wherever a datagram puts its header.
const MESSAGE: usize = 8;
const GRH: usize = 40;
/// Bytes of the place for one received message.
const PLACE: usize = 64;
const QKEY: u32 = 0x0123;
const PSN: u32 = 77;

/// How an end is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Setup {
    /// It waits for events.
    pub sleeps: bool,
    /// Connections have no receives of their own.
    pub has_srq: bool,
    /// Sends complete where receives do.
    pub one_cq: bool,
}

impl fmt::Display for Setup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {} {}", self.sleeps, self.has_srq, self.one_cq)
    }
}

impl FromStr for Setup {
    type Err = Box<dyn std::error::Error>;

    fn from_str(text: &str) -> Result<Self> {
        let flags: std::result::Result<Vec<bool>, _> = text.split(' ').map(str::parse).collect();
        match flags?[..] {
            [sleeps, has_srq, one_cq] => Ok(Self {
                sleeps,
                has_srq,
                one_cq,
            }),
            _ => Err("three flags make a setup".into()),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Connection,
    Datagrams,
}

pub struct Side {
    pub setup: Setup,
    pub qps: Vec<QueuePair>,
    pub channel: CompletionChannel,
    cqs: Vec<CompletionQueue>,
    srq: Option<SharedReceiveQueue>,
    peers: Vec<QueuePairEndpoint>,
    handle: Option<AddressHandle>,
    mr: MemoryRegion,
    pd: ProtectionDomain,
    path: PathOptions,
    context: Context,
}

impl Side {
    pub fn open(setup: Setup) -> Result<Self> {
        let context = find_device(Some("soft0"))?.open()?;
        let pd = context.alloc_pd()?;
        let all = CONNECTIONS + DATAGRAMS;
        let memory = context.alloc_memory(all * DEPTH * 2 * PLACE)?;
        let mr = pd.reg_memory(&memory, AccessFlags::all())?;
        let channel = context.create_comp_channel()?;
        let queues = if setup.one_cq { 1 } else { 2 };
        let entries = u32::try_from(all * DEPTH * 2)?;
        let cqs = (0..queues).map(|_| context.create_cq(entries, Some(&channel)));
        let cqs = cqs.collect::<std::result::Result<Vec<_>, _>>()?;
        let receives = u32::try_from(CONNECTIONS * DEPTH)?;
        let srq = setup.has_srq.then(|| pd.create_srq(receives, 1));
        let mut side = Self {
            setup,
            qps: Vec::new(),
            channel,
            cqs,
            srq: srq.transpose()?,
            peers: Vec::new(),
            handle: None,
            mr,
            pd,
            path: PathOptions::default(),
            context,
        };
        for number in 0..all {
            let qp = side.make(kind_of(number))?;
            side.qps.push(qp);
            side.refill(number, DEPTH)?;
        }
        Ok(side)
    }

    fn make(&self, kind: Kind) -> Result<QueuePair> {
        let [sends, receives] = [&self.cqs[0], self.cqs.last().ok_or("no queue")?];
        let depth = u32::try_from(DEPTH)?;
        let init = QueuePairInit {
            max_send_wr: depth,
            max_recv_wr: depth,
            max_inline_data: 8,
            srq: self.srq.as_ref().filter(|_| kind == Kind::Connection),
            qp_type: match kind {
                Kind::Connection => QpType::Rc,
                Kind::Datagrams => QpType::Ud,
            },
            ..QueuePairInit::new(sends, receives)
        };
        let qp = self.pd.create_qp(&init)?;
        match kind {
            Kind::Connection => qp.to_init(AccessFlags::all(), 1)?,
            Kind::Datagrams => qp.start_datagrams(1, QKEY, PSN)?,
        }
        Ok(qp)
    }

    pub fn names(&self) -> Result<Vec<String>> {
        let name = |qp: &QueuePair| Ok(qp.endpoint(&self.path, PSN)?.to_string());
        self.qps.iter().map(name).collect()
    }

    pub fn connect(&mut self, names: &[String]) -> Result {
        assert_eq!(names.len(), self.qps.len());
        for (number, name) in names.iter().enumerate() {
            let peer: QueuePairEndpoint = name.parse()?;
            self.peers.push(peer);
            if kind_of(number) == Kind::Connection {
                self.qps[number].to_rtr(&peer, &self.path)?;
                self.qps[number].to_rts(PSN, &self.path)?;
            }
        }
        let Some(QueuePairEndpoint { gid, lid, .. }) = self.peers.last().copied() else {
            return Err("nobody to talk to".into());
        };
        self.handle = Some(self.pd.create_ah(gid, lid, &self.path)?);
        Ok(())
    }

    pub fn of_kind(&self, kind: Kind) -> Vec<usize> {
        let all = 0..self.qps.len();
        all.filter(|number| kind_of(*number) == kind).collect()
    }

    /// The queue pair with this number of the device.
    pub fn number_of(&self, qp_num: u32) -> usize {
        let is_it = |qp: &QueuePair| qp.qp_num() == qp_num;
        let found = self.qps.iter().position(is_it);
        found.expect("a completion of a queue pair that is not ours")
    }

    /// Up to `room` completions of each queue.
    pub fn poll(&self, room: usize) -> Result<Vec<WorkCompletion>> {
        let mut all = Vec::new();
        for cq in &self.cqs {
            let mut found: Vec<_> = (0..room).map(|_| WorkCompletion::default()).collect();
            let count = cq.poll(&mut found)?;
            found.truncate(count);
            all.extend(found);
        }
        Ok(all)
    }

    pub fn arm(&self) -> Result {
        for cq in &self.cqs {
            cq.req_notify(false)?;
        }
        Ok(())
    }

    pub fn resize(&self, entries: u32) -> Result {
        Ok(self.cqs[0].resize(entries)?)
    }

    /// Receives that each queue pair has.
    pub fn posted(&self) -> usize {
        DEPTH
    }

    pub fn fail(&self, number: usize) -> Result {
        Ok(self.qps[number].to_err()?)
    }

    /// Memory that peers may write.
    pub fn place(&self) -> RemoteAddr {
        RemoteAddr {
            addr: self.mr.addr(),
            rkey: self.mr.rkey(),
        }
    }

    /// The type of the next asynchronous event.
    pub fn next_async_event(&self) -> Result<u32> {
        let event = self.context.next_async_event()?;
        Ok(event.event_type())
    }

    /// Posts some receives to a queue pair, or for it. All of a queue have the same place: what is
    /// received is told by its immediate.
    pub fn refill(&self, number: usize, count: usize) -> Result {
        let mut element = ibv_sge {
            addr: self.mr.addr() + (number * DEPTH * PLACE) as u64,
            length: (GRH + MESSAGE) as u32,
            lkey: self.mr.lkey(),
        };
        let mut request = ibv_recv_wr {
            wr_id: number as u64,
            sg_list: &raw mut element,
            num_sge: 1,
            ..ibv_recv_wr::zeroed()
        };
        for _ in 0..count {
            match (&self.srq, kind_of(number)) {
                // SAFETY: a list of one request, whose element lies in the region, which lives as long
                // as the queues and whose bytes nobody refers to.
                (Some(srq), Kind::Connection) => unsafe { srq.post_recv(&raw mut request) }?,
                // SAFETY: as above.
                _ => unsafe { self.qps[number].post_recv(&raw mut request) }?,
            }
        }
        Ok(())
    }

    /// Sends a message that says `imm`.
    pub fn send(&self, number: usize, id: u64, imm: u32) -> Result {
        let mut request = ibv_send_wr {
            wr_id: id,
            opcode: ffi::IBV_WR_SEND_WITH_IMM,
            send_flags: ffi::IBV_SEND_SIGNALED,
            imm_data: imm.to_be(),
            ..ibv_send_wr::zeroed()
        };
        if kind_of(number) == Kind::Datagrams {
            request.wr.ud = ibv_send_wr_ud {
                ah: self.handle.as_ref().ok_or("not connected")?.as_raw(),
                remote_qpn: self.peers[number].qp_num,
                remote_qkey: QKEY,
            };
        }
        self.post(number, request)
    }

    /// Writes some bytes.
    pub fn write(&self, number: usize, id: u64, remote: RemoteAddr) -> Result {
        let mut request = ibv_send_wr {
            wr_id: id,
            opcode: ffi::IBV_WR_RDMA_WRITE,
            send_flags: ffi::IBV_SEND_SIGNALED,
            ..ibv_send_wr::zeroed()
        };
        request.wr.rdma = ibv_send_wr_rdma {
            remote_addr: remote.addr,
            rkey: remote.rkey,
        };
        self.post(number, request)
    }

    fn post(&self, number: usize, mut request: ibv_send_wr) -> Result {
        let mut element = ibv_sge {
            addr: self.mr.addr() + self.mr.len() as u64 / 2,
            length: MESSAGE as u32,
            lkey: self.mr.lkey(),
        };
        request.sg_list = &raw mut element;
        request.num_sge = 1;
        // SAFETY: a list of one request, whose element lies in the region, as in `refill`; the address
        // handle of a datagram lives as long as this side.
        unsafe { self.qps[number].post_send(&raw mut request) }?;
        Ok(())
    }
}

pub fn kind_of(number: usize) -> Kind {
    if number < CONNECTIONS {
        Kind::Connection
    } else {
        Kind::Datagrams
    }
}
