//! The machine a report is from.

use std::fs;
use std::thread::available_parallelism;
use std::time::Instant;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

/// The processors of both sides, of those this process may run on; none where there is only one.
///
/// Without them, two polling sides end up on one processor for milliseconds now and then, and each
/// measurement is of the scheduler.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Processors {
    /// The client's, and that of the plain copies that are its limit: the first.
    pub client: usize,
    /// The server's: the last.
    pub server: usize,
}

impl Processors {
    /// Chooses them.
    pub fn choose() -> Option<Self> {
        let allowed = sched_getaffinity(None).ok()?;
        let mut allowed = (0..CpuSet::MAX_CPU).filter(|processor| allowed.is_set(*processor));
        Some(Self {
            client: allowed.next()?,
            server: allowed.next_back()?,
        })
    }
}

/// Keeps the calling thread, and those it starts, on a processor, if one is given. Where the system
/// does not allow it, nothing happens: the figures are only less steady.
pub fn occupy(processor: Option<usize>) {
    if let Some(processor) = processor {
        let mut set = CpuSet::new();
        set.set(processor);
        let _ = sched_setaffinity(None, &set);
    }
}

/// What a figure depends on beside the code.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Machine {
    /// Model of the first processor.
    pub cpu: String,
    /// Processors this process may run on.
    pub cores: usize,
    /// Which of them client and server have to themselves.
    pub processors: Option<Processors>,
    /// Bytes of memory.
    pub memory_bytes: u64,
    /// Release of the kernel.
    pub kernel: String,
    /// Architecture the benchmark was built for.
    pub architecture: String,
    /// Compiler the benchmark was built with.
    pub rustc: String,
    /// Whether it was built without optimisation, which makes every figure void.
    pub debug_build: bool,
    /// Nanoseconds that reading the clock takes: part of each latency.
    pub clock_ns: f64,
}

impl Machine {
    /// Describes this machine; what cannot be found out is empty.
    pub fn describe() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        Self {
            cpu: field(&read("/proc/cpuinfo"), "model name").to_owned(),
            cores: available_parallelism().map_or(0, usize::from),
            processors: Processors::choose(),
            memory_bytes: field(&read("/proc/meminfo"), "MemTotal")
                .trim_end_matches(" kB")
                .parse::<u64>()
                .map_or(0, |kilobytes| kilobytes << 10),
            kernel: read("/proc/sys/kernel/osrelease").trim().to_owned(),
            architecture: std::env::consts::ARCH.to_owned(),
            rustc: env!("BENCH_RUSTC_VERSION").to_owned(),
            debug_build: cfg!(debug_assertions),
            clock_ns: clock_ns(),
        }
    }
}

/// The value of the first line `name : value` of `text`, or nothing.
fn field<'a>(text: &'a str, name: &str) -> &'a str {
    text.lines()
        .filter_map(|line| line.split_once(':'))
        .find(|(key, _)| key.trim() == name)
        .map_or("", |(_, value)| value.trim())
}

fn clock_ns() -> f64 {
    const READS: u32 = 1000;
    let started = Instant::now();
    for _ in 1..READS {
        std::hint::black_box(Instant::now());
    }
    started.elapsed().as_nanos() as f64 / f64::from(READS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_proc_files() {
        let text = "processor\t: 0\nmodel name\t: Some CPU: fast\nmodel name\t: Other\nMemTotal:   12 kB\n";
        assert_eq!(field(text, "model name"), "Some CPU: fast");
        assert_eq!(field(text, "MemTotal"), "12 kB");
        assert_eq!(field(text, "flags"), "");
    }

    #[test]
    fn this_machine_is_described() {
        let machine = Machine::describe();
        assert!(machine.cores > 0);
        assert!(machine.rustc.starts_with("rustc "));
        assert!(!machine.kernel.is_empty());
        assert!(machine.memory_bytes > 1 << 20);
        assert!(machine.clock_ns > 0.0);
    }
}
