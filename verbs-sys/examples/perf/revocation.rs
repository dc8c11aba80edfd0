//! What it costs to take a region away, and what that costs others.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use verbs_sys::ffi;
use verbs_sys::{PreparedSend, RemoteAddr};

use crate::endpoint::{ACCESS, Options, request};
use crate::peer::{DONE, Pair, STOP, Service, Task};
use crate::rounds::{COUNTS, quantile};
use crate::{Figures, Result};

/// Bytes of the region that comes and goes.
const REGION: usize = 4096;
/// Between two deregistrations, where others are to be measured meanwhile.
const PAUSE: Duration = Duration::from_millis(1);
/// How long the others' operations are counted for at a time.
const COUNTED: Duration = Duration::from_millis(10);

/// Of so many deregistrations in a row the middle one counts, where the usual time is asked for.
const BATCH: usize = 256;

/// Times of deregistrations in nanoseconds, until `budget` is spent.
fn times(pair: &Pair, budget: Duration) -> Result<Vec<f64>> {
    let memory = pair.here.pd.context().alloc_memory(REGION)?;
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < budget {
        let region = pair.here.pd.reg_memory(&memory, ACCESS)?;
        let before = Instant::now();
        region.deregister()?;
        times.push(before.elapsed().as_nanos() as f64);
    }
    Ok(times)
}

/// The middle of a batch of times; of all batches, one that few are shorter than.
fn usual(times: &[f64]) -> f64 {
    let batches = times.chunks(BATCH);
    let mut middles: Vec<f64> = batches
        .map(|batch| quantile(&mut batch.to_vec(), 0.5))
        .collect();
    quantile(&mut middles, COUNTS)
}

/// Operations of the peer in a while, in which regions are taken away or not.
fn operations(pair: &Pair, deregister: bool) -> Result<f64> {
    let memory = pair.here.pd.context().alloc_memory(REGION)?;
    let done = pair.shared.word(DONE);
    let (started, before) = (Instant::now(), done.load(Ordering::Relaxed));
    let mut next = PAUSE;
    while started.elapsed() < COUNTED {
        if deregister && started.elapsed() >= next {
            pair.here.pd.reg_memory(&memory, ACCESS)?.deregister()?;
            next += PAUSE;
        }
        std::hint::spin_loop();
    }
    let count = done.load(Ordering::Relaxed) - before;
    Ok(count as f64 / started.elapsed().as_secs_f64())
}

/// Deregistrations while `qps` queue pairs are connected: idle, and while the peer writes words through all
/// of them; and how much of the peer's operations is left while a region is taken away each millisecond.
pub fn deregister(qps: usize, budget: Duration) -> Result<Figures> {
    let mut pair = Pair::start(Options {
        qps,
        ..Options::PLAIN
    })?;
    let mut idle = times(&pair, budget / 3)?;
    pair.wake()?;
    pair.ask(Task::Traffic, 0, 0)?;
    let mut busy = times(&pair, budget / 3)?;
    let mut left = Vec::new();
    let started = Instant::now();
    while left.len() < 7 || started.elapsed() < budget / 3 {
        let alone = operations(&pair, false)?;
        left.push(operations(&pair, true)? / alone);
    }
    pair.shared.word(STOP).store(1, Ordering::Relaxed);
    pair.rest()?;
    Ok(Figures::from([
        ("idle_p50_ns", usual(&idle)),
        ("idle_p99_ns", quantile(&mut idle, 0.99)),
        ("busy_p50_ns", usual(&busy)),
        ("busy_p99_ns", quantile(&mut busy, 0.99)),
        ("operations_left", quantile(&mut left, 0.5)),
    ]))
}

/// The peer's part: writes a word through each queue pair in turn until told to stop.
pub fn traffic(service: &Service) -> Result<()> {
    let here = &service.here;
    let mut sends: Vec<_> = (0..here.qps.len())
        .map(|place| {
            let remote = RemoteAddr {
                addr: service.there.addr + 64 * place as u64,
                ..service.there
            };
            let request = request(ffi::IBV_WR_RDMA_WRITE, remote);
            PreparedSend::new(&[(request, &[here.element(64 * place, 8)])])
        })
        .collect();
    let (stop, done) = (service.shared.word(STOP), service.shared.word(DONE));
    let mut count = 0;
    while stop.load(Ordering::Relaxed) == 0 {
        for (qp, send) in sends.iter_mut().enumerate() {
            here.post(qp, send)?;
            here.complete()?;
        }
        count += sends.len() as u64;
        done.store(count, Ordering::Relaxed);
    }
    Ok(())
}
