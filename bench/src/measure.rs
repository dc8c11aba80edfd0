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

use anyhow::{Context, Result};
use rustix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

use crate::statistics::Latencies;
use crate::workload::{Stamp, Workload};

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Operation {
    /// A value that its maker wrote into registered memory is stored and acknowledged; taking that
    /// memory and giving it back count, writing the value does not.
    Put,
    /// A value in the caller's own memory is stored and acknowledged: copied on its way.
    PutCopied,
    /// The value of a key in the caller's hands.
    Get,
}

impl Operation {
    /// All, in the order of the tables.
    pub const ALL: [Self; 3] = [Self::Put, Self::PutCopied, Self::Get];

    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Put => "put",
            Self::PutCopied => "put-copied",
            Self::Get => "get",
        }
    }

    /// The direction of the plain copy that is its limit.
    pub fn limit(self) -> Self {
        match self {
            Self::Put | Self::PutCopied => Self::Put,
            Self::Get => Self::Get,
        }
    }
}

/// What a [`measure`] drives: a store, or the plain copy that is its limit.
///
/// `slot` counts the operations of one batch, from 0 to [`batch`] of the value size.
pub trait Store {
    /// Takes memory for the value of `size` bytes that `slot` is to put.
    ///
    /// # Errors
    /// There is none.
    fn take(&mut self, slot: usize, size: usize) -> Result<()>;

    /// The memory that [`Store::take`] took for `slot`, to be written. Not timed.
    fn taken(&mut self, slot: usize) -> Option<&mut [u8]>;

    /// Puts what was written there under `key`, whose number is `index`.
    ///
    /// # Errors
    /// The put failed.
    fn put(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()>;

    /// Puts `value` under `key`, whose number is `index`.
    ///
    /// # Errors
    /// The put failed.
    fn put_copied(&mut self, key: &[u8], index: u32, value: &[u8]) -> Result<()>;

    /// Gets the value of `key`, whose number is `index`, and holds it in `slot`.
    ///
    /// # Errors
    /// The get failed, or the key has no value.
    fn get(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()>;

    /// The value that `slot` holds. Not timed.
    fn value(&self, slot: usize) -> Option<&[u8]>;

    /// Gives back what `slot` holds: memory taken, or a value got.
    fn release(&mut self, slot: usize);
}

/// How long a measurement may take.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Budget {
    /// Ends once the timed sections of both kinds of batches add up to this.
    pub timed: Duration,
    /// Ends after this in any case, once there is one batch of each kind.
    pub wall: Duration,
}

/// What one measurement found.
#[derive(Clone, Debug, Serialize, Deserialize)]
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
    /// Median of the operations of the latency batches, in microseconds.
    pub p50_us: f64,
    /// 99th percentile of the same.
    pub p99_us: f64,
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

/// CPU time between two readings of [`process_cpu`] with nothing in between.
fn cpu_reading() -> Duration {
    let pair = |_| {
        let before = process_cpu();
        process_cpu().saturating_sub(before)
    };
    (0..32).map(pair).min().unwrap_or_default()
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
    let mut run = Run::new(store, workload);
    let mut latencies = Latencies::new();
    let (mut operations, mut timed, mut timed_singly) = (0, Duration::ZERO, Duration::ZERO);
    let started = Instant::now();
    loop {
        timed += run.batch(operation, None)?;
        operations += run.stamps.len() as u64;
        timed_singly += run.batch(operation, Some(&mut latencies))?;

        let wall = started.elapsed();
        if timed + timed_singly >= budget.timed || wall >= budget.wall {
            return Ok(Slice {
                operations,
                timed,
                cpu: run.cpu,
                all_operations: operations + latencies.len(),
                wall,
                p50_us: latencies.quantile_us(0.50),
                p99_us: latencies.quantile_us(0.99),
            });
        }
    }
}

/// Puts a value under every key of `workload`.
///
/// # Errors
/// As [`measure`].
pub fn put_all<S: Store>(store: &mut S, workload: &mut Workload) -> Result<()> {
    visit_all(store, workload, Operation::Put)
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
    let mut run = Run::new(store, workload);
    for _ in 0..rounds {
        run.batch(operation, None)?;
    }
    Ok(())
}

struct Run<'a, S> {
    store: &'a mut S,
    workload: &'a mut Workload,
    /// The batch: which key, and which put of it is expected or made.
    stamps: Vec<Stamp>,
    /// What the operations of the batch took so far, in nanoseconds.
    single: Vec<u64>,
    /// The values of a batch of [`Operation::PutCopied`].
    copies: Vec<Vec<u8>>,
    /// CPU time of the timed sections of throughput batches.
    cpu: Duration,
    /// What of it is reading the CPU time, per section.
    cpu_reading: Duration,
}

impl<'a, S: Store> Run<'a, S> {
    fn new(store: &'a mut S, workload: &'a mut Workload) -> Self {
        let slots = batch(workload.size());
        Self {
            store,
            stamps: Vec::with_capacity(slots),
            single: vec![0; slots],
            copies: vec![vec![0; workload.size()]; slots],
            workload,
            cpu: Duration::ZERO,
            cpu_reading: cpu_reading(),
        }
    }

    /// The time of one batch; that of each operation goes into `latencies`, if given.
    fn batch(
        &mut self,
        operation: Operation,
        latencies: Option<&mut Latencies>,
    ) -> Result<Duration> {
        self.stamps.clear();
        for _ in 0..self.single.len() {
            let key = self.workload.advance();
            self.stamps.push(match operation {
                Operation::Get => self.workload.stored(key),
                Operation::Put | Operation::PutCopied => self.workload.next_put(key),
            });
        }
        self.single.fill(0);
        let each = latencies.is_some();
        let spent = match operation {
            Operation::Put => self.puts(each),
            Operation::PutCopied => self.copied_puts(each),
            Operation::Get => self.gets(each),
        }
        .with_context(|| format!("{} of {} bytes", operation.name(), self.workload.size()))?;
        if let Some(latencies) = latencies {
            for nanoseconds in &self.single {
                latencies.record(*nanoseconds);
            }
        }
        Ok(spent)
    }

    fn puts(&mut self, each: bool) -> Result<Duration> {
        let size = self.workload.size();
        let mut spent = self.timed(each, |store, _, _, slot| store.take(slot, size))?;
        for (slot, stamp) in self.stamps.iter().enumerate() {
            let value = self.store.taken(slot).context("no memory was taken")?;
            stamp.fill(value);
        }
        spent += self.timed(each, |store, key, index, slot| store.put(key, index, slot))?;
        Ok(spent + self.release(each)?)
    }

    fn copied_puts(&mut self, each: bool) -> Result<Duration> {
        let mut copies = std::mem::take(&mut self.copies);
        for (copy, stamp) in copies.iter_mut().zip(&self.stamps) {
            stamp.fill(copy);
        }
        let spent = self.timed(each, |store, key, index, slot| {
            store.put_copied(key, index, &copies[slot])
        });
        self.copies = copies;
        spent
    }

    fn gets(&mut self, each: bool) -> Result<Duration> {
        let size = self.workload.size();
        let spent = self.timed(each, |store, key, index, slot| store.get(key, index, slot))?;
        for (slot, stamp) in self.stamps.iter().enumerate() {
            let value = self.store.value(slot).context("no value is held")?;
            stamp.check(black_box(value), size)?;
        }
        Ok(spent + self.release(each)?)
    }

    fn release(&mut self, each: bool) -> Result<Duration> {
        self.timed(each, |store, _, _, slot| {
            store.release(slot);
            Ok(())
        })
    }

    /// The time that `step` takes for all operations of the batch, and for `each`.
    fn timed(
        &mut self,
        each: bool,
        mut step: impl FnMut(&mut S, &[u8], u32, usize) -> Result<()>,
    ) -> Result<Duration> {
        let cpu = process_cpu();
        let started = Instant::now();
        let mut last = started;
        for (slot, stamp) in self.stamps.iter().enumerate() {
            step(self.store, self.workload.key(stamp.key), stamp.key, slot)?;
            if each {
                let now = Instant::now();
                self.single[slot] += (now - last).as_nanos() as u64;
                last = now;
            }
        }
        if each {
            return Ok(last - started);
        }
        let spent = started.elapsed();
        self.cpu += process_cpu().saturating_sub(cpu + self.cpu_reading);
        Ok(spent)
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
        fn take(&mut self, slot: usize, size: usize) -> Result<()> {
            self.inner.take(slot, size)
        }
        fn taken(&mut self, slot: usize) -> Option<&mut [u8]> {
            self.inner.taken(slot)
        }
        fn put(&mut self, key: &[u8], index: u32, slot: usize) -> Result<()> {
            self.puts += 1;
            if self.puts == self.losing {
                return Ok(());
            }
            self.inner.put(key, index, slot)
        }
        fn put_copied(&mut self, key: &[u8], index: u32, value: &[u8]) -> Result<()> {
            self.inner.put_copied(key, index, value)
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
    fn all_operations_are_measured_and_checked() {
        for size in [128, 4096, 100_000] {
            let mut workload = Workload::new(size, 70);
            let mut store = Copies::new(size, workload.len());
            put_all(&mut store, &mut workload).unwrap();
            for operation in Operation::ALL {
                let slice = measure(&mut store, &mut workload, operation, SHORT).unwrap();
                assert!(slice.operations >= batch(size) as u64);
                assert_eq!(slice.all_operations, 2 * slice.operations);
                assert!(slice.p50_us <= slice.p99_us);
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
        put_all(&mut store, &mut workload).unwrap();
        put_all(&mut store, &mut workload).unwrap();
        let error = format!("{:#}", check_all(&mut store, &mut workload).unwrap_err());
        assert!(error.contains("get of 128 bytes"), "{error}");
        assert!(error.contains("put 2 of key"), "{error}");
        assert!(error.contains("begin as put 1 of key"), "{error}");
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
