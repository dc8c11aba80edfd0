//! `report.json`: what was measured, on what machine, and what each figure means.

use serde::{Deserialize, Serialize};

use crate::machine::Machine;
use crate::measure::{Operation, Slice};
use crate::statistics::median;

/// How memory is registered for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// The founding behaviour: a fresh buffer allocated, registered, used, deregistered and freed
    /// by the client for each operation.
    RegisterPerOp,
    /// Memory registered once and handed out by the pool.
    Pooled,
    /// [`Mode::RegisterPerOp`] on a software device that charges each registration what was
    /// published for a NIC. A model: no such NIC was measured.
    RegisterPerOpModelled,
}

impl Mode {
    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::RegisterPerOp => "register-per-op",
            Self::Pooled => "pooled",
            Self::RegisterPerOpModelled => "register-per-op-modelled",
        }
    }
}

/// How a side waits for completions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Wait {
    /// It polls its completion queue and burns a core.
    Poll,
    /// It sleeps on its completion channel.
    Event,
}

impl Wait {
    /// The name in the report.
    pub fn name(self) -> &'static str {
        match self {
            Self::Poll => "poll",
            Self::Event => "event",
        }
    }
}

/// The whole report.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// What the keys of `results` mean, for who reads the file alone.
    pub legend: Vec<String>,
    /// Whether the run was a short one (`--quick`).
    pub quick: bool,
    /// Measurements of each figure; figures are medians over them.
    pub rounds: usize,
    /// The machine.
    pub machine: Machine,
    /// The device under the store, alone.
    pub device: Device,
    /// Sizes at which the store behaves differently.
    pub thresholds: Thresholds,
    /// The store, a row for each size, operation, mode and way of waiting.
    pub results: Vec<Row>,
    /// Plain copies of the same bytes, measured between the rows of `results`.
    pub limits: Vec<Limit>,
    /// What the founding complaint measured.
    pub founding: Vec<Founding>,
}

/// One row of [`Report::results`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Row {
    /// Name of the device, as `soft0`.
    pub device: String,
    /// Put or get.
    pub op: Operation,
    /// How memory is registered.
    pub mode: Mode,
    /// How the server waits for requests.
    pub wait: Wait,
    /// How the client waits for completions.
    pub client_wait: Wait,
    /// Bytes of a value.
    pub size: usize,
    /// Distinct keys, visited in turn.
    pub keys: usize,
    /// Operations per second, one synchronous client: median over the rounds.
    pub ops_per_s: f64,
    /// The smallest and the largest of the rounds.
    pub ops_per_s_range: [f64; 2],
    /// Value bytes per second, in 1e6.
    pub mb_per_s: f64,
    /// Median latency in microseconds: median over the rounds.
    pub p50_us: f64,
    /// 99th percentile of the latency in microseconds: median over the rounds.
    pub p99_us: f64,
    /// Memory registrations of client and server per operation, over all rounds.
    pub registrations_per_op: f64,
    /// `ops_per_s` over that of register-per-op with the same way of waiting: median of the
    /// rounds' ratios.
    pub vs_register_per_op: Option<f64>,
    /// `ops_per_s` over that of plain copies: median of the rounds' ratios.
    pub vs_limit: Option<f64>,
    /// `ops_per_s` over that of [`Mode::RegisterPerOpModelled`]: median of the rounds' ratios.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub vs_modelled: Option<f64>,
    /// CPU seconds of the client in `timed_s`.
    pub client_cpu_s: f64,
    /// CPU seconds of the server in `wall_s`: it waits while the client makes and checks values.
    pub server_cpu_s: f64,
    /// Seconds of the operations behind `ops_per_s`, all rounds.
    pub timed_s: f64,
    /// Seconds of the measurements, with making and checking values, all rounds.
    pub wall_s: f64,
    /// Operations behind `ops_per_s`, all rounds.
    pub operations: u64,
    /// Operations in all, each value got compared byte for byte.
    pub all_operations: u64,
    /// Share of the gets that were one-sided READs, without the server.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub one_sided_share: Option<f64>,
}

/// One row of [`Report::limits`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Limit {
    /// The direction of the copy.
    pub op: Operation,
    /// Bytes of a copy.
    pub size: usize,
    /// Copies per second: median over the rounds.
    pub ops_per_s: f64,
    /// Bytes per second, in 1e6.
    pub mb_per_s: f64,
    /// Median time of a copy in microseconds, as timed for `p50_us` of the results.
    pub p50_us: f64,
}

/// A figure of the founding complaint.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Founding {
    /// Put or get.
    pub op: Operation,
    /// Bytes of a value.
    pub size: usize,
    /// Value bytes per second, in 1e6.
    pub mb_per_s: f64,
}

/// What the founding complaint measured on an RDMA NIC, with a registration per operation.
pub fn founding() -> Vec<Founding> {
    let rows = |op, figures: [f64; 4]| {
        crate::workload::SIZES
            .into_iter()
            .zip(figures)
            .map(move |(size, mb_per_s)| Founding { op, size, mb_per_s })
    };
    rows(Operation::Put, [1.0, 37.0, 400.0, 2500.0])
        .chain(rows(Operation::Get, [1.0, 37.0, 375.0, 2000.0]))
        .collect()
}

/// Sizes at which the store behaves differently.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct Thresholds {
    /// Values of at most so many bytes travel in the request of a put; longer ones are READ by the
    /// server.
    pub inline_value: usize,
}

impl Thresholds {
    /// Those of a client that is not told otherwise, as all clients of the benchmark are.
    pub fn of_store() -> Self {
        Self {
            inline_value: kvstore::ClientConfig::default().inline_value,
        }
    }
}

/// The device under the store, measured alone.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Device {
    /// Its name.
    pub name: String,
    /// How client and server reach each other.
    pub link: String,
    /// Whether it is the software device in user space.
    pub software: bool,
    /// One-sided operations on another process, post to completion.
    pub one_sided: Vec<OneSided>,
}

/// One kind of one-sided operation on another process's memory.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct OneSided {
    /// `READ` or `WRITE`.
    pub op: String,
    /// Bytes of an operation.
    pub size: usize,
    /// Nanoseconds from posting to the polled completion: median over the rounds.
    pub median_ns: f64,
    /// Nanoseconds of a plain copy of the same bytes: median over the rounds.
    pub memcpy_ns: f64,
    /// The difference: median over the rounds.
    pub above_memcpy_ns: f64,
}

/// One measurement of a row.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The client's side.
    pub slice: Slice,
    /// CPU seconds of the server meanwhile.
    pub server_cpu_s: f64,
    /// Registrations of client and server meanwhile.
    pub registrations: u64,
    /// Gets served one-sidedly meanwhile, where the client counts them.
    pub one_sided: Option<u64>,
}

/// What tells the rows of a report apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Variant {
    /// How memory is registered.
    pub mode: Mode,
    /// How the server waits.
    pub wait: Wait,
    /// How the client waits.
    pub client_wait: Wait,
}

/// The median over rounds of the ratio of operations per second of two series of rounds.
pub fn ratio<'a>(
    of: impl IntoIterator<Item = &'a Slice>,
    to: impl IntoIterator<Item = &'a Slice>,
) -> Option<f64> {
    median(
        of.into_iter()
            .zip(to)
            .map(|(of, to)| of.operations_per_second() / to.operations_per_second()),
    )
}

impl Row {
    /// The figures of one row from its rounds; its ratios are still to be set.
    pub fn new(
        device: &str,
        variant: Variant,
        op: Operation,
        (size, keys): (usize, usize),
        rounds: &[Measured],
    ) -> Self {
        let sum = |of: fn(&Measured) -> f64| rounds.iter().map(of).sum::<f64>();
        let middle = |of: fn(&Measured) -> f64| median(rounds.iter().map(of)).unwrap_or(f64::NAN);
        let rates = || {
            rounds
                .iter()
                .map(|round| round.slice.operations_per_second())
        };
        let ops_per_s = median(rates()).unwrap_or(f64::NAN);
        let all_operations = rounds.iter().map(|round| round.slice.all_operations).sum();
        let registrations: u64 = rounds.iter().map(|round| round.registrations).sum();
        let one_sided: Option<u64> = rounds.iter().map(|round| round.one_sided).sum();
        Self {
            device: device.to_owned(),
            op,
            mode: variant.mode,
            wait: variant.wait,
            client_wait: variant.client_wait,
            size,
            keys,
            ops_per_s,
            ops_per_s_range: [
                rates().fold(f64::INFINITY, f64::min),
                rates().fold(0.0, f64::max),
            ],
            mb_per_s: ops_per_s * size as f64 / 1e6,
            p50_us: middle(|round| round.slice.p50_us),
            p99_us: middle(|round| round.slice.p99_us),
            registrations_per_op: registrations as f64 / all_operations as f64,
            vs_register_per_op: None,
            vs_limit: None,
            vs_modelled: None,
            client_cpu_s: sum(|round| round.slice.cpu.as_secs_f64()),
            server_cpu_s: sum(|round| round.server_cpu_s),
            timed_s: sum(|round| round.slice.timed.as_secs_f64()),
            wall_s: sum(|round| round.slice.wall.as_secs_f64()),
            operations: rounds.iter().map(|round| round.slice.operations).sum(),
            all_operations,
            one_sided_share: match op {
                Operation::Put | Operation::PutCopied => None,
                Operation::Get => one_sided.map(|gets| gets as f64 / all_operations as f64),
            },
        }
    }
}

impl Limit {
    /// The figures of one limit from its rounds.
    pub fn new(op: Operation, size: usize, rounds: &[Slice]) -> Self {
        let ops_per_s = median(rounds.iter().map(Slice::operations_per_second)).unwrap_or(f64::NAN);
        Self {
            op,
            size,
            ops_per_s,
            mb_per_s: ops_per_s * size as f64 / 1e6,
            p50_us: median(rounds.iter().map(|round| round.p50_us)).unwrap_or(f64::NAN),
        }
    }
}

/// What the report says of its own keys.
pub fn legend() -> Vec<String> {
    [
        "mb_per_s: 1e6 value bytes per second of one synchronous client; ops_per_s likewise; medians over the rounds",
        "mode register-per-op: the client allocates, registers, uses, deregisters and frees a fresh buffer for each operation; buffers of 128 KiB and more are fresh from the system each time (glibc's mmap threshold, kept at its first value), smaller ones are recycled by the allocator",
        "mode pooled: memory registered once, handed out by the pool",
        "mode register-per-op-modelled: a model, not a measurement of hardware: the software device charges each registration what was published for a NIC",
        "op put: the value was written by its maker into registered memory, taken and given back within the time; op put-copied: from the caller's own memory, copied on its way",
        "wait: how the server waits (poll: burns a core; event: sleeps on the completion channel between requests); client_wait: how the client waits",
        "values are made before, and compared byte for byte after, the timed sections; returning a value's buffer is timed",
        "p50_us and p99_us come from operations timed one by one, ops_per_s from batches timed as a whole; the former include reading the clock once for each of their steps, three for put, one for put-copied, two for get (machine.clock_ns each)",
        "vs_limit: against a plain copy of the same bytes, same number of values and buffers, same order, same run; vs_register_per_op: against register-per-op waiting the same way; medians of the rounds' ratios",
        "client_cpu_s: over timed_s; server_cpu_s: over wall_s, which includes making and checking values",
        "registrations_per_op: client and server together, from the pools' statistics",
    ]
    .map(str::to_owned)
    .into()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn measured(operations: u64, milliseconds: u64) -> Measured {
        Measured {
            slice: Slice {
                operations,
                timed: Duration::from_millis(milliseconds),
                cpu: Duration::from_millis(milliseconds / 2),
                all_operations: 2 * operations,
                wall: Duration::from_millis(3 * milliseconds),
                p50_us: 2.0,
                p99_us: 3.0,
            },
            server_cpu_s: 0.25,
            registrations: operations,
            one_sided: Some(operations),
        }
    }

    const VARIANT: Variant = Variant {
        mode: Mode::Pooled,
        wait: Wait::Event,
        client_wait: Wait::Poll,
    };

    #[test]
    fn a_row_is_the_median_of_its_rounds() {
        let rounds = [measured(1000, 10), measured(1000, 20), measured(1000, 40)];
        let row = Row::new("soft0", VARIANT, Operation::Get, (1000, 8), &rounds);
        assert_eq!(row.ops_per_s, 50_000.0);
        assert_eq!(row.ops_per_s_range, [25_000.0, 100_000.0]);
        assert_eq!(row.mb_per_s, 50.0);
        assert_eq!((row.p50_us, row.p99_us), (2.0, 3.0));
        assert_eq!(row.registrations_per_op, 0.5);
        assert_eq!(row.one_sided_share, Some(0.5));
        assert_eq!(row.server_cpu_s, 0.75);
        assert!((row.client_cpu_s - 0.035).abs() < 1e-9);
        assert!((row.wall_s - 0.21).abs() < 1e-9);
    }

    #[test]
    fn ratios_are_paired_by_round() {
        // The machine is twice as slow in the second round: the ratio stays.
        let fast = [measured(1000, 10), measured(1000, 20), measured(1000, 10)];
        let slow = [measured(1000, 30), measured(1000, 60), measured(1000, 30)];
        fn slices(rounds: &[Measured]) -> impl Iterator<Item = &Slice> {
            rounds.iter().map(|round| &round.slice)
        }
        let found = ratio(slices(&fast), slices(&slow)).unwrap();
        assert!((found - 3.0).abs() < 1e-9);
        assert_eq!(ratio(slices(&fast), slices(&[])), None);
    }

    #[test]
    fn rows_have_the_promised_keys() {
        let row = Row::new(
            "soft0",
            VARIANT,
            Operation::Put,
            (128, 8),
            &[measured(10, 1)],
        );
        let json = serde_json::to_value(&row).unwrap();
        for key in [
            "device",
            "op",
            "mode",
            "wait",
            "size",
            "ops_per_s",
            "mb_per_s",
            "p50_us",
            "p99_us",
            "registrations_per_op",
            "vs_register_per_op",
            "vs_limit",
            "client_cpu_s",
            "server_cpu_s",
        ] {
            assert!(json.get(key).is_some(), "{key}");
        }
        assert_eq!(json["op"], "put");
        assert_eq!(json["mode"], "pooled");
        assert_eq!(json["wait"], "event");
        assert_eq!(json["vs_limit"], serde_json::Value::Null);
        for mode in [Mode::RegisterPerOp, Mode::RegisterPerOpModelled] {
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
        }
    }

    #[test]
    fn the_founding_figures() {
        let figures = founding();
        assert_eq!(figures.len(), 8);
        let of = |op, size| {
            figures
                .iter()
                .find(|f| f.op == op && f.size == size)
                .unwrap()
        };
        assert_eq!(of(Operation::Put, 1 << 20).mb_per_s, 2500.0);
        assert_eq!(of(Operation::Get, 51_200).mb_per_s, 375.0);
    }
}
