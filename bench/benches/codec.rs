//! Writing a message into the memory it is sent from, and viewing it where it arrived, beside a
//! plain copy of its bytes.

use std::hint::black_box;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use rkyv::with::InlineAsBox;
use rkyv::{Archive, Serialize};
use wire::{Frame, encode_with_body, view};

/// A request as a store sends it: a key in the archive, a value in the body.
#[derive(Archive, Serialize)]
struct Put<'a> {
    #[rkyv(with = InlineAsBox)]
    key: &'a [u8],
    address: u64,
    rkey: u32,
}

const KEY: &[u8; 24] = b"size-128/value-000000042";
const KIND: u16 = 1;
const BODIES: [usize; 3] = [0, 128, 4096];

/// As aligned as pooled memory.
#[repr(align(64))]
struct Slot([u8; 8192]);

fn put() -> Put<'static> {
    Put {
        key: KEY,
        address: 0x7f00_0000_0000,
        rkey: 77,
    }
}

fn write(slot: &mut [u8], tag: u64, value: &[u8]) -> usize {
    let (length, body) = encode_with_body(slot, KIND, tag, &put(), value.len() as u32)
        .expect("the message fits its slot");
    body.copy_from_slice(value);
    length
}

fn codec(criterion: &mut Criterion) {
    let mut slot = Box::new(Slot([0; 8192]));
    for body in BODIES {
        let value = vec![0x5a; body];
        let length = write(&mut slot.0, 0, &value);
        let message = slot.0[..length].to_vec();

        let mut group = criterion.benchmark_group("codec");
        group.throughput(Throughput::Bytes(length as u64));
        group.bench_function(BenchmarkId::new("memcpy", length), |bencher| {
            bencher.iter(|| black_box(&mut slot.0)[..length].copy_from_slice(black_box(&message)));
        });
        group.bench_function(BenchmarkId::new("encode", length), |bencher| {
            let mut tag = 0;
            bencher.iter(|| {
                tag += 1;
                write(black_box(&mut slot.0), tag, black_box(&value))
            });
        });
        group.bench_function(BenchmarkId::new("view", length), |bencher| {
            bencher.iter(|| {
                let frame = Frame::parse(black_box(&slot.0[..length])).expect("a whole frame");
                let put = view::<Put<'_>>(&frame).expect("a valid archive");
                (put.key.len(), put.address.to_native(), frame.body().len())
            });
        });
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(500))
        .measurement_time(Duration::from_secs(1));
    targets = codec
}
criterion_main!(benches);
