//! One-sided operations on the memory of another process, post to polled completion, beside a
//! plain copy of the same bytes.

use std::hint::black_box;
use std::path::Path;
use std::time::Duration;

use bench::device::{Initiator, Verb};
use bench::process::Worker;
use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};

const SIZES: [usize; 3] = [8, 128, 4096];

fn verbs(criterion: &mut Criterion) {
    let device = verbs_sys::find_device(None).expect("a device").name();
    let target = Worker::start(
        Path::new(env!("CARGO_BIN_EXE_bench")),
        "target",
        ["target", "--device", &device].map(str::to_owned),
        &[],
    )
    .expect("the target starts");
    let mut initiator = Initiator::connect(&device, target).expect("a connection");
    let (from, mut to) = (vec![0x5a_u8; 4096], vec![0; 4096]);

    let mut group = criterion.benchmark_group(format!("verbs on {device}"));
    for size in SIZES {
        group.bench_function(BenchmarkId::new("memcpy", size), |bencher| {
            bencher.iter(|| {
                black_box(&mut to)[..size].copy_from_slice(&black_box(&from)[..black_box(size)]);
            });
        });
        for verb in Verb::ALL {
            group.bench_function(BenchmarkId::new(verb.name(), size), |bencher| {
                bencher.iter(|| initiator.run(verb, black_box(size)).expect("a completion"));
            });
        }
    }
    group.finish();
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1));
    targets = verbs
}
criterion_main!(benches);
