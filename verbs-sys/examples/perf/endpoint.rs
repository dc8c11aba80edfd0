//! One process's part of a connection: memory and queue pairs.

use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

use verbs_sys::ffi::{self, ibv_recv_wr, ibv_send_wr, ibv_send_wr_rdma};
use verbs_sys::{
    AccessFlags, CompletionQueue, Context, HostMemory, MemoryRegion, PathOptions, PreparedSend,
    ProtectionDomain, QueuePair, QueuePairInit, RemoteAddr, Sge, WcOpcode, WorkCompletion,
    find_device,
};

use crate::Result;

/// Bytes of a side's memory.
pub const MEMORY: usize = (1 << 20) + 8192;
/// Sequence number of the first packet, either way.
const PSN: u32 = 0x51;

pub const ACCESS: AccessFlags = AccessFlags::LOCAL_WRITE
    .union(AccessFlags::REMOTE_READ)
    .union(AccessFlags::REMOTE_WRITE);

/// Where a side's bytes come from.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Memory {
    /// The device.
    Device,
    /// The allocator.
    Heap,
}

/// How completions are waited for.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Wait {
    /// By polling.
    Polling,
    /// On a channel.
    Asleep,
}

/// What both sides have.
#[derive(Clone, Copy, clap::Args)]
pub struct Options {
    #[arg(long)]
    pub memory: Memory,
    #[arg(long)]
    pub wait: Wait,
    #[arg(long)]
    pub qps: usize,
}

impl Options {
    /// One queue pair, memory of the device, polling.
    pub const PLAIN: Self = Self {
        memory: Memory::Device,
        wait: Wait::Polling,
        qps: 1,
    };
}

/// Memory and queue pairs; all complete on one queue.
pub struct Endpoint {
    pub qps: Vec<QueuePair>,
    pub cq: CompletionQueue,
    pub mr: MemoryRegion,
    pub pd: ProtectionDomain,
    /// Behind the region, so that it goes after it.
    _heap: Vec<u64>,
    path: PathOptions,
}

impl Endpoint {
    pub fn open(options: Options) -> Result<Self> {
        let Options { memory, wait, qps } = options;
        let context: Context = find_device(Some("soft0"))?.open()?;
        let pd = context.alloc_pd()?;
        let mut heap = Vec::new();
        let mr = match memory {
            Memory::Device => {
                let memory: HostMemory = context.alloc_memory(MEMORY)?;
                pd.reg_memory(&memory, ACCESS)?
            }
            Memory::Heap => {
                heap = vec![0_u64; MEMORY / 8];
                // SAFETY: the vector outlives the region, does not grow, and nothing refers to its
                // contents but through pointers.
                unsafe { pd.reg_mr(heap.as_mut_ptr().cast(), MEMORY, ACCESS) }?
            }
        };
        let channel = (wait == Wait::Asleep)
            .then(|| context.create_comp_channel())
            .transpose()?;
        let entries = u32::try_from(qps * 64)?;
        let mut this = Self {
            qps: Vec::new(),
            cq: context.create_cq(entries.max(256), channel.as_ref())?,
            mr,
            pd,
            _heap: heap,
            path: PathOptions::default(),
        };
        for _ in 0..qps {
            this.add()?;
        }
        this.touch();
        Ok(this)
    }

    fn add(&mut self) -> Result<()> {
        let mut init = QueuePairInit::new(&self.cq, &self.cq);
        init.max_send_wr = 32;
        init.max_recv_wr = 16;
        init.max_inline_data = 64;
        let qp = self.pd.create_qp(&init)?;
        qp.to_init(ACCESS, self.path.port)?;
        self.qps.push(qp);
        Ok(())
    }

    fn touch(&self) {
        let mut at = 0;
        while at < MEMORY {
            self.word(at / 8)
                .store(0, std::sync::atomic::Ordering::Relaxed);
            at += 4096;
        }
    }

    pub fn names(&self) -> Result<Vec<String>> {
        let endpoint = |qp: &QueuePair| Ok(qp.endpoint(&self.path, PSN)?.to_string());
        self.qps.iter().map(endpoint).collect()
    }

    pub fn connect(&self, remote: &[String]) -> Result<()> {
        for (qp, remote) in self.qps.iter().zip(remote) {
            qp.to_rtr(&remote.parse()?, &self.path)?;
            qp.to_rts(PSN, &self.path)?;
        }
        Ok(())
    }

    pub fn bytes(&self) -> *mut u8 {
        self.mr.addr() as *mut u8
    }

    /// A word of the memory; peers write it, too.
    pub fn word(&self, index: usize) -> &AtomicU64 {
        assert!(index < MEMORY / 8, "word {index} is outside the memory");
        let base = NonNull::new(self.bytes()).expect("memory is not at address 0");
        // SAFETY: within the region, whose memory lives as long as it, and which is aligned to 8 at
        // least; all else that touches it is copies of the device, of whole words.
        unsafe { AtomicU64::from_ptr(base.add(index * 8).as_ptr().cast()) }
    }

    pub fn element(&self, offset: usize, len: usize) -> Sge {
        Sge {
            addr: self.mr.addr() + offset as u64,
            length: len as u32,
            lkey: self.mr.lkey(),
        }
    }

    /// Posts `send` and forgets it.
    #[inline(always)]
    pub fn post(&self, qp: usize, send: &mut PreparedSend) -> Result<()> {
        // SAFETY: its elements lie in this endpoint's region (or `element` gave them to nobody else),
        // which lives as long as the queue pairs, and whose bytes are used as words or by copies only.
        unsafe { send.execute(&self.qps[qp]) }?;
        Ok(())
    }

    /// Posts a receive into this part of the memory.
    #[inline]
    pub fn receive(&self, qp: usize, offset: usize, len: usize) -> Result<()> {
        let mut element = self.element(offset, len);
        let mut request = ibv_recv_wr {
            sg_list: &raw mut element,
            num_sge: 1,
            ..ibv_recv_wr::zeroed()
        };
        // SAFETY: a list of one request, whose element lies in the region, as above.
        unsafe { self.qps[qp].post_recv(&raw mut request) }?;
        Ok(())
    }

    /// Polls until a completion is there.
    #[inline(always)]
    pub fn complete(&self) -> Result<WcOpcode> {
        let mut found = [WorkCompletion::default()];
        while self.cq.poll(&mut found)? == 0 {
            std::hint::spin_loop();
        }
        opcode(&found[0])
    }

    /// Sleeps until a completion is there.
    pub fn complete_asleep(&self) -> Result<WcOpcode> {
        let mut found = [WorkCompletion::default()];
        let channel = self
            .cq
            .channel()
            .ok_or("the completion queue has no channel")?;
        loop {
            if self.cq.poll(&mut found)? == 1 {
                break;
            }
            self.cq.req_notify(false)?;
            if self.cq.poll(&mut found)? == 1 {
                break;
            }
            drop(channel.wait()?);
        }
        opcode(&found[0])
    }
}

/// Looks at a completion where it is: a copy would wait for the stores that made it.
#[inline]
fn opcode(found: &WorkCompletion) -> Result<WcOpcode> {
    if found.is_ok() {
        return Ok(found.opcode());
    }
    Err(format!("a request ended with {:?}", found.status()).into())
}

/// A request of one element, signaled.
pub fn request(opcode: ffi::ibv_wr_opcode, remote: RemoteAddr) -> ibv_send_wr {
    let mut request = ibv_send_wr::zeroed();
    request.opcode = opcode;
    request.send_flags = ffi::IBV_SEND_SIGNALED;
    request.wr.rdma = ibv_send_wr_rdma {
        remote_addr: remote.addr,
        rkey: remote.rkey,
    };
    request
}
