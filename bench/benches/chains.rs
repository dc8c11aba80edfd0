//! Sixteen WRITEs of 64 bytes, post to polled completion: one at a time, as a chain that is built for
//! each post, and as a chain that is laid out once.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, criterion_group, criterion_main};
use verbs_sys::owned::{OwnedQueuePair, PreparedRequest};
use verbs_sys::{
    AccessFlags, CompletionQueue, MemoryRegion, PathOptions, ProtectionDomain, QueuePair,
    QueuePairInit, RemoteAddr, WorkCompletion, find_device,
};

const CHAIN: usize = 16;
const LEN: usize = 64;

/// A queue pair that is connected to another one of this process.
struct Pair {
    qp: OwnedQueuePair<MemoryRegion>,
    cq: CompletionQueue,
    pd: ProtectionDomain,
    target: MemoryRegion,
    _peer: QueuePair,
}

type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

impl Pair {
    fn new() -> Result<Self> {
        let context = find_device(None)?.open()?;
        let pd = context.alloc_pd()?;
        let cq = context.create_cq(256, None)?;
        let init = QueuePairInit {
            max_send_wr: 64,
            ..QueuePairInit::new(&cq, &cq)
        };
        let (qp, peer) = (pd.create_qp(&init)?, pd.create_qp(&init)?);
        let path = PathOptions {
            gid_index: context.choose_gid(1)?.0,
            ..PathOptions::default()
        };
        let (here, there) = (qp.endpoint(&path, 1)?, peer.endpoint(&path, 2)?);
        for (qp, local, remote) in [(&qp, &here, &there), (&peer, &there, &here)] {
            qp.to_init(AccessFlags::REMOTE_WRITE, path.port)?;
            qp.to_rtr(remote, &path)?;
            qp.to_rts(local.psn, &path)?;
        }
        Ok(Self {
            target: region(&pd)?,
            qp: OwnedQueuePair::new(qp, 64, 0),
            cq,
            pd,
            _peer: peer,
        })
    }

    fn place(&self, at: usize) -> RemoteAddr {
        RemoteAddr {
            addr: self.target.addr() + (at * LEN) as u64,
            rkey: self.target.rkey(),
        }
    }

    /// Polls for so many completions, and gives what buffer came with the last.
    fn finish(&mut self, count: usize, give: &mut Vec<MemoryRegion>) {
        let mut found: [WorkCompletion; CHAIN] = Default::default();
        let mut done = 0;
        while done < count {
            let polled = self.cq.poll(&mut found).expect("a queue that works");
            for completion in &mut found[..polled] {
                let ended = self.qp.complete(completion).expect("its own completion");
                assert!(completion.is_ok());
                give.extend(ended.buffer);
                done += 1;
            }
        }
    }
}

fn region(pd: &ProtectionDomain) -> Result<MemoryRegion> {
    let memory = pd.context().alloc_memory(CHAIN * LEN)?;
    let access = AccessFlags::LOCAL_WRITE | AccessFlags::REMOTE_WRITE;
    Ok(pd.reg_memory(&memory, access)?)
}

fn chains(criterion: &mut Criterion) {
    let mut pair = Pair::new().expect("a connection");
    let mut group = criterion.benchmark_group("16 WRITEs of 64 B");

    let regions = (0..CHAIN).map(|_| region(&pair.pd));
    let mut singles: Vec<MemoryRegion> = regions.collect::<Result<_>>().expect("memory");
    group.bench_function("one by one", |bencher| {
        bencher.iter(|| {
            for at in 0..CHAIN {
                let buffer = singles.pop().expect("one is left");
                let posted = pair
                    .qp
                    .write(buffer, 0..LEN, pair.place(black_box(at)), None);
                posted.expect("room");
            }
            pair.finish(CHAIN, &mut singles);
        });
    });

    let mut whole = vec![region(&pair.pd).expect("memory")];
    group.bench_function("a chain built anew", |bencher| {
        bencher.iter(|| {
            let parts: [_; CHAIN] =
                std::array::from_fn(|at| (at * LEN..(at + 1) * LEN, pair.place(black_box(at))));
            let buffer = whole.pop().expect("it is back");
            pair.qp.write_chain(buffer, &parts).expect("room");
            pair.finish(1, &mut whole);
        });
    });

    let request = |pair: &Pair, at| {
        PreparedRequest::write(0, at * LEN..(at + 1) * LEN, pair.place(black_box(at)), None)
    };
    group.bench_function("a chain laid out anew", |bencher| {
        bencher.iter(|| {
            let requests: Vec<_> = (0..CHAIN).map(|at| request(&pair, at)).collect();
            let buffers = std::mem::take(&mut whole);
            let chain = pair.qp.prepare(buffers, &requests).expect("a chain");
            pair.qp.execute(chain).expect("room");
            pair.finish(1, &mut Vec::new());
            whole = pair.qp.release(chain).expect("it is done");
        });
    });

    let requests: Vec<_> = (0..CHAIN).map(|at| request(&pair, at)).collect();
    let chain = pair.qp.prepare(whole, &requests).expect("a chain");
    group.bench_function("a prepared chain", |bencher| {
        bencher.iter(|| {
            pair.qp.execute(black_box(chain)).expect("room");
            pair.finish(1, &mut Vec::new());
        });
    });
    group.bench_function("a prepared chain, one place changed", |bencher| {
        let mut at = 0;
        bencher.iter(|| {
            at = (at + 1) % CHAIN;
            let place = pair.place(at);
            let mut fields = pair.qp.prepared(chain, at).expect("a request");
            fields.set_remote(place);
            pair.qp.execute(chain).expect("room");
            pair.finish(1, &mut Vec::new());
        });
    });
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1));
    targets = chains
}
criterion_main!(benches);
