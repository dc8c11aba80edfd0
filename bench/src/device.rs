//! The device alone: one-sided operations on another process's memory, post to completion.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, anyhow, bail};
use mr_pool::{Buffer, Pool};
use serde::{Deserialize, Serialize};
use verbs_sys::owned::OwnedQueuePair;
use verbs_sys::{
    AccessFlags, CompletionQueue, MemoryRegion, PathOptions, ProtectionDomain, QueuePairInit,
    RemoteAddr, WcStatus, WorkCompletion, find_device,
};

use crate::process::{Worker, answer};
use crate::report::OneSided;
use crate::statistics::median;

/// Bytes of the target's memory.
const MEMORY: usize = 4096;
/// Sequence number of the first packet, either way.
const PSN: u32 = 0x1234;

/// What is asked of a target.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Connect to the queue pair with this endpoint; answered with [`Place`].
    Connect(String),
}

/// A target's memory and the queue pair that leads there.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Place {
    pub(crate) endpoint: String,
    pub(crate) addr: u64,
    pub(crate) rkey: u32,
}

/// One side of the connection.
pub(crate) struct Side {
    pub(crate) qp: OwnedQueuePair<Buffer>,
    pub(crate) cq: CompletionQueue,
    pub(crate) pd: ProtectionDomain,
    path: PathOptions,
}

impl Side {
    pub(crate) fn open(device: &str) -> Result<Self> {
        let context = find_device(Some(device))?.open()?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(64, None)?;
        let mut path = PathOptions::default();
        path.gid_index = context.choose_gid(path.port)?.0;
        let qp = pd.create_qp(&QueuePairInit::new(&cq, &cq))?;
        let access = AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
        qp.to_init(access, path.port)?;
        Ok(Self {
            qp: OwnedQueuePair::new(qp, 16, 16),
            cq,
            pd,
            path,
        })
    }

    pub(crate) fn endpoint(&self) -> Result<String> {
        let endpoint = self.qp.queue_pair().endpoint(&self.path, PSN)?;
        Ok(endpoint.to_string())
    }

    pub(crate) fn connect(&self, remote: &str) -> Result<()> {
        let qp = self.qp.queue_pair();
        qp.to_rtr(&remote.parse()?, &self.path)?;
        Ok(qp.to_rts(PSN, &self.path)?)
    }
}

/// The target's role: registers memory and sleeps while others read and write it.
///
/// # Errors
/// The device cannot be set up.
pub fn target(device: &str) -> Result<()> {
    let side = Side::open(device)?;
    let memory = side.pd.context().alloc_memory(MEMORY)?;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_READ | AccessFlags::REMOTE_WRITE;
    let region: MemoryRegion = side.pd.reg_memory(&memory, access)?;
    answer(|Command::Connect(remote)| {
        side.connect(&remote)?;
        Ok(Place {
            endpoint: side.endpoint()?,
            addr: region.addr(),
            rkey: region.rkey(),
        })
    })
}

/// A one-sided operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    /// RDMA READ.
    Read,
    /// RDMA WRITE.
    Write,
}

impl Verb {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// `READ` or `WRITE`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Read => "READ",
            Self::Write => "WRITE",
        }
    }
}

/// The process that reads and writes, connected to a target in another.
pub struct Initiator {
    side: Side,
    buffer: Option<Buffer>,
    place: RemoteAddr,
    completions: [WorkCompletion; 1],
    _target: Worker,
}

impl Initiator {
    /// Connects to `target`, a process in the role of [`target`] on the same device.
    ///
    /// # Errors
    /// The device cannot be set up, or the target failed.
    pub fn connect(device: &str, mut target: Worker) -> Result<Self> {
        let side = Side::open(device)?;
        let pool = Pool::builder(&side.pd).build()?;
        let place: Place = target.ask(&Command::Connect(side.endpoint()?))?;
        side.connect(&place.endpoint)?;
        Ok(Self {
            buffer: Some(pool.take(MEMORY)?),
            place: RemoteAddr {
                addr: place.addr,
                rkey: place.rkey,
            },
            completions: Default::default(),
            side,
            _target: target,
        })
    }

    /// The local bytes, before and after operations.
    ///
    /// # Panics
    /// Never: between operations the buffer is here.
    pub fn bytes(&mut self) -> &mut [u8] {
        match &mut self.buffer {
            Some(buffer) => buffer.as_mut_slice(),
            None => &mut [],
        }
    }

    /// Posts one operation on the first `size` bytes and polls until it has completed.
    ///
    /// # Errors
    /// Posting failed or the operation did not succeed.
    #[inline]
    pub fn run(&mut self, verb: Verb, size: usize) -> Result<()> {
        let buffer = self.buffer.take().context("the buffer is lost")?;
        let posted = match verb {
            Verb::Read => self.side.qp.read(buffer, 0..size, self.place),
            Verb::Write => self.side.qp.write(buffer, 0..size, self.place, None),
        };
        if let Err(rejected) = posted {
            self.buffer = rejected.buffer;
            return Err(anyhow!(rejected.error));
        }
        while self.side.cq.poll(&mut self.completions)? == 0 {
            std::hint::spin_loop();
        }
        let completed = self
            .side
            .qp
            .complete(&mut self.completions[0])
            .context("a completion of another request")?;
        self.buffer = completed.buffer;
        match completed.status {
            WcStatus::Success => Ok(()),
            status => bail!("{} ended with {status:?}", verb.name()),
        }
    }
}

/// Measures both operations on the first `size` bytes of a target, beside a plain copy of as many,
/// alternately, for `budget` in all.
///
/// # Errors
/// As [`Initiator::run`], and a READ that does not give what was written.
pub fn one_sided(
    initiator: &mut Initiator,
    size: usize,
    budget: Duration,
) -> Result<Vec<OneSided>> {
    check(initiator, size)?;
    let (mut rounds, mut reads, mut writes, mut copies) = (0, Vec::new(), Vec::new(), Vec::new());
    let (from, mut to) = (vec![0x5a; MEMORY], vec![0; MEMORY]);
    // As many per round as take a tenth of a millisecond or more.
    let each = 1000_u32;
    let time = |step: &mut dyn FnMut() -> Result<()>| {
        let started = Instant::now();
        for _ in 0..each {
            step()?;
        }
        Ok::<f64, anyhow::Error>(started.elapsed().as_nanos() as f64 / f64::from(each))
    };
    let started = Instant::now();
    while rounds < 3 || started.elapsed() < budget {
        reads.push(time(&mut || initiator.run(Verb::Read, size))?);
        copies.push(time(&mut || {
            black_box(&mut to)[..size].copy_from_slice(&black_box(&from)[..size]);
            Ok(())
        })?);
        writes.push(time(&mut || initiator.run(Verb::Write, size))?);
        rounds += 1;
    }
    Ok([(Verb::Read, &reads), (Verb::Write, &writes)]
        .into_iter()
        .map(|(verb, times)| OneSided {
            op: verb.name().to_owned(),
            size,
            median_ns: median(times.iter().copied()).unwrap_or(f64::NAN),
            memcpy_ns: median(copies.iter().copied()).unwrap_or(f64::NAN),
            above_memcpy_ns: median(times.iter().zip(&copies).map(|(time, copy)| time - copy))
                .unwrap_or(f64::NAN),
        })
        .collect())
}

/// Writes, clears, reads back and compares.
fn check(initiator: &mut Initiator, size: usize) -> Result<()> {
    initiator.bytes()[..size].fill(0xc3);
    initiator.run(Verb::Write, size)?;
    initiator.bytes()[..size].fill(0);
    initiator.run(Verb::Read, size)?;
    if initiator.bytes()[..size].iter().any(|byte| *byte != 0xc3) {
        bail!("a READ of {size} bytes did not give what had been written");
    }
    Ok(())
}
