//! One measurement: a stretch of puts or gets on one store, every value made and checked outside
//! the timed sections.
//!
//! Operations run in batches small enough to stay in a core's cache. Before a batch of puts its
//! values are written; after a batch of gets its values are compared, while the store still holds
//! them; both outside the clock. Giving the values back is timed: it is where a buffer is
//! deregistered and freed. Batches alternate between two kinds: *throughput* batches read the
//! clock once for the whole batch, *latency* batches once per operation, so that reading the
//! clock, as long as a small get itself, does not enter the throughput.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::statistics::Latencies;
use crate::workload::{Stamp, Workload};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Operation {
    /// A value stored under a key and acknowledged.
    Put,
    /// The value of a key in the caller's hands.
    Get,
}

impl Operation {
    /// Both, in the order of the tables.
    pub const ALL: [Self; 2] = [Self::Put, Self::Get];

    /// `put` or `get`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::Get => "get",
        }
    }
}

/// What a [`measure`] drives: a store, or the plain copy that is its limit.
///
/// `slot` counts the operations of one batch, from 0 to [`batch`] of the value size.
pub trait Store {
    /// The memory from which the next put of `slot` takes its value of `size` bytes. Not timed.
    fn source(&mut self, slot: usize, size: usize) -> &mut [u8];

    /// Puts what [`Store::source`] holds in `slot` under `key`, whose number is `index`.
    ///
    /// # Errors
    /// The put failed.
    fn put(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()>;

    /// Gets the value of `key`, whose number is `index`, and holds it in `slot`.
    ///
    /// # Errors
    /// The get failed, or the key has no value.
    fn get(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()>;

    /// The value that `slot` holds. Not timed.
    fn value(&self, slot: usize) -> Option<&[u8]>;

    /// Gives the value of `slot` back.
    fn release(&mut self, slot: usize);
}

/// How long a measurement may take.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    /// Ends once the timed sections of both kinds of batches add up to this.
    pub timed: Duration,
    /// Ends after this in any case, once there is one batch of each kind.
    pub wall: Duration,
}

/// What one measurement found.
#[derive(Clone, Debug)]
pub struct Slice {
    /// Operations in throughput batches.
    pub operations: u64,
    /// Time of the throughput batches, without making and checking values.
    pub timed: Duration,
    /// CPU time of this process in the throughput batches.
    pub cpu: Duration,
    /// All operations, those of the latency batches included.
    pub all_operations: u64,
    /// The whole measurement, with making and checking values.
    pub wall: Duration,
    /// Latencies of the operations of the latency batches.
    pub latencies: Latencies,
}

impl Slice {
    /// Operations per second of the throughput batches.
    pub fn operations_per_second(&self) -> f64 {
        self.operations as f64 / self.timed.as_secs_f64()
    }
}

/// Operations in one batch of values of `size` bytes: 64 KiB of values, 1 to 64 of them.
pub fn batch(size: usize) -> usize {
    ((64 << 10) / size.max(1)).clamp(1, 64)
}

/// CPU time this process has used, all threads, in user and system mode.
pub fn process_cpu() -> Duration {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    Duration::new(
        time.tv_sec.unsigned_abs(),
        time.tv_nsec.unsigned_abs() as u32,
    )
}

/// Runs `operation` on the keys of `workload`, in their order, until `budget` is used.
///
/// # Errors
/// An operation failed, or a value got is not the one last put.
pub fn measure<S: Store>(
    store: &mut S,
    workload: &mut Workload,
    operation: Operation,
    budget: Budget,
) -> Result<Slice> {
    let mut run = Run {
        store,
        workload,
        stamps: Vec::new(),
    };
    let started = Instant::now();
    let mut slice = Slice {
        operations: 0,
        timed: Duration::ZERO,
        cpu: Duration::ZERO,
        all_operations: 0,
        wall: Duration::ZERO,
        latencies: Latencies::new(),
    };
    let mut timed = Duration::ZERO;
    loop {
        run.choose();
        let length = run.stamps.len() as u64;
        let cpu_before = process_cpu();
        let spent = run.timed(operation, None)?;
        slice.cpu += process_cpu().saturating_sub(cpu_before);
        slice.operations += length;
        slice.timed += spent;

        run.choose();
        timed += spent + run.timed(operation, Some(&mut slice.latencies))?;
        slice.all_operations += 2 * length;

        slice.wall = started.elapsed();
        if timed >= budget.timed || slice.wall >= budget.wall {
            return Ok(slice);
        }
    }
}

/// Puts a first value under every key of `workload`, then gets and checks each once.
///
/// # Errors
/// As [`measure`].
pub fn fill<S: Store>(store: &mut S, workload: &mut Workload) -> Result<()> {
    for operation in Operation::ALL {
        visit_all(store, workload, operation)?;
    }
    Ok(())
}

/// Gets and checks the value of every key of `workload`.
///
/// # Errors
/// As [`measure`].
pub fn check_all<S: Store>(store: &mut S, workload: &mut Workload) -> Result<()> {
    visit_all(store, workload, Operation::Get)
}

fn visit_all<S: Store>(store: &mut S, workload: &mut Workload, operation: Operation) -> Result<()> {
    let rounds = workload.len().div_ceil(batch(workload.size()));
    let mut run = Run {
        store,
        workload,
        stamps: Vec::new(),
    };
    for _ in 0..rounds {
        run.choose();
        run.timed(operation, None)?;
    }
    Ok(())
}

struct Run<'a, S> {
    store: &'a mut S,
    workload: &'a mut Workload,
    /// The batch: which key, and which put of it is expected or made.
    stamps: Vec<Stamp>,
}

impl<S: Store> Run<'_, S> {
    fn choose(&mut self) {
        self.stamps.clear();
        for _ in 0..batch(self.workload.size()) {
            let key = self.workload.advance();
            self.stamps.push(self.workload.stored(key));
        }
    }

    /// The time of one batch, operation by operation into `latencies` if given.
    fn timed(
        &mut self,
        operation: Operation,
        latencies: Option<&mut Latencies>,
    ) -> Result<Duration> {
        match operation {
            Operation::Put => self.puts(latencies),
            Operation::Get => self.gets(latencies),
        }
    }

    fn puts(&mut self, latencies: Option<&mut Latencies>) -> Result<Duration> {
        let size = self.workload.size();
        for (slot, stamp) in self.stamps.iter_mut().enumerate() {
            *stamp = self.workload.next_put(stamp.key);
            stamp.fill(self.store.source(slot, size));
        }
        let workload = &*self.workload;
        let store = &mut *self.store;
        let put = |slot: usize, stamp: &Stamp| {
            store
                .put(workload.key(stamp.key), stamp.key, slot)
                .with_context(|| describe("put", stamp, size))
        };
        Clock::over(&self.stamps, latencies, put)
    }

    fn gets(&mut self, mut latencies: Option<&mut Latencies>) -> Result<Duration> {
        let size = self.workload.size();
        let workload = &*self.workload;
        let store = &mut *self.store;
        let mut single = [0; 64];
        let mut total = Duration::ZERO;

        let mut clock = Clock::start();
        for (slot, stamp) in self.stamps.iter().enumerate() {
            store
                .get(workload.key(stamp.key), stamp.key, slot)
                .with_context(|| describe("get", stamp, size))?;
            if latencies.is_some() {
                single[slot] = clock.lap();
            }
        }
        total += clock.total();

        for (slot, stamp) in self.stamps.iter().enumerate() {
            let value = store
                .value(slot)
                .ok_or_else(|| anyhow!("no value held"))
                .with_context(|| describe("get", stamp, size))?;
            stamp.check(black_box(value), size)?;
        }

        let mut clock = Clock::start();
        for (slot, _) in self.stamps.iter().enumerate() {
            store.release(slot);
            if let Some(latencies) = &mut latencies {
                latencies.record(single[slot] + clock.lap());
            }
        }
        Ok(total + clock.total())
    }
}

fn describe(operation: &str, stamp: &Stamp, size: usize) -> String {
    format!("{operation} of key {} ({size} bytes)", stamp.key)
}

struct Clock {
    started: Instant,
    last: Instant,
}

impl Clock {
    fn start() -> Self {
        let now = Instant::now();
        Self {
            started: now,
            last: now,
        }
    }

    fn lap(&mut self) -> u64 {
        let now = Instant::now();
        let spent = now - self.last;
        self.last = now;
        spent.as_nanos() as u64
    }

    fn total(&self) -> Duration {
        self.started.elapsed()
    }

    fn over(
        stamps: &[Stamp],
        latencies: Option<&mut Latencies>,
        mut operation: impl FnMut(usize, &Stamp) -> Result<()>,
    ) -> Result<Duration> {
        let mut clock = Self::start();
        match latencies {
            None => {
                for (slot, stamp) in stamps.iter().enumerate() {
                    operation(slot, stamp)?;
                }
            }
            Some(latencies) => {
                for (slot, stamp) in stamps.iter().enumerate() {
                    operation(slot, stamp)?;
                    latencies.record(clock.lap());
                }
            }
        }
        Ok(clock.total())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limit::Copies;

    const SHORT: Budget = Budget {
        timed: Duration::from_millis(2),
        wall: Duration::from_secs(1),
    };

    /// A store that loses its `losing`-th put while acknowledging it.
    struct Forgetful {
        inner: Copies,
        puts: usize,
        losing: usize,
    }

    impl Store for Forgetful {
        fn source(&mut self, slot: usize, size: usize) -> &mut [u8] {
            self.inner.source(slot, size)
        }
        fn put(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()> {
            self.puts += 1;
            if self.puts == self.losing {
                return Ok(());
            }
            self.inner.put(key, index, slot)
        }
        fn get(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()> {
            self.inner.get(key, index, slot)
        }
        fn value(&self, slot: usize) -> Option<&[u8]> {
            self.inner.value(slot)
        }
        fn release(&mut self, slot: usize) {
            self.inner.release(slot);
        }
    }

    #[test]
    fn both_operations_are_measured_and_checked() {
        for size in [128, 4096, 100_000] {
            let mut workload = Workload::new(size, 70);
            let mut store = Copies::new(size, workload.len());
            fill(&mut store, &mut workload).unwrap();
            for operation in Operation::ALL {
                let slice = measure(&mut store, &mut workload, operation, SHORT).unwrap();
                assert!(slice.operations >= batch(size) as u64);
                assert_eq!(
                    slice.all_operations,
                    slice.operations + slice.latencies.len()
                );
                assert!(slice.timed <= slice.wall);
                assert!(slice.operations_per_second() > 0.0);
            }
            check_all(&mut store, &mut workload).unwrap();
        }
    }

    #[test]
    fn a_lost_put_is_noticed() {
        let mut workload = Workload::new(128, 64);
        let mut store = Forgetful {
            inner: Copies::new(128, 64),
            puts: 0,
            losing: 100,
        };
        fill(&mut store, &mut workload).unwrap();
        visit_all(&mut store, &mut workload, Operation::Put).unwrap();
        let error = check_all(&mut store, &mut workload).unwrap_err();
        assert!(error.to_string().contains("put 2 of key"), "{error}");
        assert!(
            error.to_string().contains("begin as put 1 of key"),
            "{error}"
        );
    }

    #[test]
    fn batches_stay_in_the_cache() {
        assert_eq!(batch(128), 64);
        assert_eq!(batch(4096), 16);
        assert_eq!(batch(51_200), 1);
        assert_eq!(batch(1 << 20), 1);
        assert_eq!(batch(0), 64);
    }
}
