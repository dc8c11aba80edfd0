//! Two connected queue pairs in one process, on the device of the environment or the software device.

#![allow(dead_code)] // Each test program uses a part.

use std::{error::Error, ops::Range};

use verbs_sys::{
    AccessFlags, CompletionChannel, CompletionQueue, Context, MemoryRegion, PathOptions,
    ProtectionDomain, QueuePairInit, RemoteAddr, WorkCompletion, copy, find_device,
    owned::{Completed, OwnedQueuePair},
};

pub type Result<T = ()> = std::result::Result<T, Box<dyn Error>>;
pub type Queue = OwnedQueuePair<MemoryRegion>;

pub const ALL: AccessFlags = AccessFlags::all();

/// One side: a queue pair with a completion queue and a channel of its own.
pub struct Side {
    pub qp: Queue,
    pub cq: CompletionQueue,
    pub channel: CompletionChannel,
}

pub struct Pair {
    pub left: Side,
    pub right: Side,
    pub pd: ProtectionDomain,
    pub context: Context,
}

impl Pair {
    pub fn new() -> Result<Self> {
        Self::with(PathOptions::default())
    }

    /// Connected with these attributes.
    pub fn with(path: PathOptions) -> Result<Self> {
        let context = find_device(None)?.open()?;
        let pd = context.alloc_pd()?;
        let side = || -> Result<Side> {
            let channel = context.create_comp_channel()?;
            let cq = context.create_cq(64, Some(&channel))?;
            let init = QueuePairInit {
                max_send_wr: 8,
                max_recv_wr: 8,
                max_inline_data: 64,
                ..QueuePairInit::new(&cq, &cq)
            };
            let qp = OwnedQueuePair::new(pd.create_qp(&init)?, 8, 8);
            Ok(Side { qp, cq, channel })
        };
        let (left, right) = (side()?, side()?);
        let (gid_index, _) = context.choose_gid(1)?;
        let path = PathOptions { gid_index, ..path };
        let (here, there) = (left.qp.queue_pair(), right.qp.queue_pair());
        let ends = (here.endpoint(&path, 11)?, there.endpoint(&path, 22)?);
        for (qp, local, remote) in [(here, ends.0, ends.1), (there, ends.1, ends.0)] {
            qp.to_init(ALL, 1)?;
            qp.to_rtr(&remote, &path)?;
            qp.to_rts(local.psn, &path)?;
        }
        Ok(Self {
            left,
            right,
            pd,
            context,
        })
    }

    /// A region of `len` bytes, each of them `fill`.
    pub fn region(&self, len: usize, fill: u8) -> Result<MemoryRegion> {
        let memory = self.context.alloc_memory(len)?;
        // SAFETY: the memory is new, so nobody else uses it.
        unsafe { memory.addr().write_bytes(fill, len) };
        Ok(self.pd.reg_memory(&memory, ALL)?)
    }
}

impl Side {
    /// Polls for the next request that ends.
    pub fn next(&mut self) -> Result<Completed<MemoryRegion>> {
        next(&mut self.qp, &self.cq)
    }
}

pub fn next(qp: &mut Queue, cq: &CompletionQueue) -> Result<Completed<MemoryRegion>> {
    let mut room = [WorkCompletion::default()];
    loop {
        if cq.poll(&mut room)? == 1
            && let Some(done) = qp.complete(&mut room[0])
        {
            return Ok(done);
        }
    }
}

/// The bytes `range` of a region.
pub fn bytes(region: &MemoryRegion, range: Range<usize>) -> Vec<u8> {
    let memory = region.memory().expect("the device's memory");
    assert!(range.end <= memory.len());
    let mut bytes = vec![0; range.len()];
    // SAFETY: the range lies in the memory, which no reference covers.
    unsafe {
        copy::read_shared(
            bytes.as_mut_ptr(),
            memory.addr().add(range.start),
            range.len(),
        )
    };
    bytes
}

pub fn remote(region: &MemoryRegion, offset: u64) -> RemoteAddr {
    RemoteAddr {
        addr: region.addr() + offset,
        rkey: region.rkey(),
    }
}
