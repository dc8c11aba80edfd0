//! Taking a buffer and giving it back: pooled on one and on two threads, beside a registration per
//! buffer.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use mr_pool::Pool;

const SIZES: [usize; 3] = [128, 4096, 1 << 20];

/// The time of `takes` buffers taken and returned one after the other, by each of `threads`.
fn take_and_return(pool: &Pool, size: usize, threads: usize, takes: u64) -> Duration {
    let start = Barrier::new(threads);
    let work = || {
        start.wait();
        let started = Instant::now();
        for _ in 0..takes {
            black_box(pool.take(black_box(size)).expect("room below the ceiling"));
        }
        started.elapsed()
    };
    thread::scope(|scope| {
        let others: Vec<_> = (1..threads).map(|_| scope.spawn(work)).collect();
        let own = work();
        others
            .into_iter()
            .map(|other| other.join().expect("no panic"))
            .fold(own, Duration::max)
    })
}

fn pool(criterion: &mut Criterion) {
    let context = verbs_sys::find_device(None)
        .and_then(|device| device.open())
        .expect("a device");
    let pd = context.alloc_pd().expect("a protection domain");
    let pooled = Pool::builder(&pd).build().expect("a pool");
    let unpooled = Pool::builder(&pd).unpooled().build().expect("a pool");
    let mut group = criterion.benchmark_group("pool");
    for size in SIZES {
        for threads in [1, 2] {
            let name = format!("take and return, {threads} threads");
            group.bench_function(BenchmarkId::new(name, size), |bencher| {
                bencher.iter_custom(|takes| take_and_return(&pooled, size, threads, takes));
            });
        }
        group.bench_function(BenchmarkId::new("register per buffer", size), |bencher| {
            bencher.iter_custom(|takes| take_and_return(&unpooled, size, 1, takes));
        });
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1));
    targets = pool
}
criterion_main!(benches);
