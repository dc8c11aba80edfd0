//! The whole benchmark: which pairs of processes, which measurements in which order.
//!
//! All that is compared is measured within a second or so: machines drift in phases of seconds,
//! so the rounds visit every mode and the limit for one size and operation before the next, and a
//! ratio is the median over the rounds of ratios within one round.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::device::{self, Initiator};
use crate::limit::Copies;
use crate::machine::{Machine, Processors, occupy};
use crate::measure::{Budget, Operation, Slice, measure, put_all};
use crate::pair::{Pair, role_arguments};
use crate::process::Worker;
use crate::report::{
    Device, Limit, Measured, Mode, OneSided, Report, Row, Thresholds, Variant, Wait, founding,
    legend, ratio,
};
use crate::workload::{SIZES, Workload};

/// What to measure.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file of this program, which has the roles of servers, clients and targets.
    pub program: PathBuf,
    /// Name of the device.
    pub device: String,
    /// Whether it is the software device in user space.
    pub software: bool,
    /// How much.
    pub extent: Extent,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Whether this is a short run.
    pub quick: bool,
    /// Measurements of each figure.
    pub rounds: usize,
    /// Before each measurement.
    pub warm_up: Budget,
    /// One measurement.
    pub budget: Budget,
    /// The measurement of the device alone.
    pub device: Duration,
    /// Bytes of the values of one size, as long as `most_keys` allows.
    pub working_set: usize,
    /// Most keys of one size.
    pub most_keys: usize,
}

impl Extent {
    /// Sized by time alone: a device in an emulated machine is a thousand times slower than the
    /// software device. Many short rounds rather than few long ones: what disturbs a machine for a
    /// moment then spoils a few rounds, which the medians pass over.
    pub fn new(quick: bool, software: bool) -> Self {
        let budget = |timed, wall| Budget {
            timed: Duration::from_millis(timed),
            wall: Duration::from_millis(wall),
        };
        match (quick, software) {
            (true, true) => Self {
                quick,
                device: Duration::from_millis(500),
                rounds: 5,
                warm_up: budget(4, 16),
                budget: budget(25, 100),
                working_set: 16 << 20,
                most_keys: 4096,
            },
            (false, true) => Self {
                quick,
                device: Duration::from_secs(2),
                rounds: 11,
                warm_up: budget(8, 32),
                budget: budget(80, 320),
                working_set: 32 << 20,
                most_keys: 4096,
            },
            (true, false) => Self {
                quick,
                device: Duration::from_millis(500),
                rounds: 5,
                warm_up: budget(20, 40),
                budget: budget(120, 300),
                working_set: 4 << 20,
                most_keys: 256,
            },
            (false, false) => Self {
                quick,
                device: Duration::from_secs(2),
                rounds: 5,
                warm_up: budget(60, 240),
                budget: budget(500, 1000),
                working_set: 32 << 20,
                most_keys: 4096,
            },
        }
    }

    fn workload(&self, size: usize) -> Workload {
        Workload::of_working_set(size, self.working_set, self.most_keys)
    }
}

/// All rounds of one size and operation.
struct Cell {
    operation: Operation,
    workload: Workload,
    /// A series of rounds for each pair.
    rounds: Vec<Vec<Measured>>,
    limits: Vec<Slice>,
}

/// Runs everything and returns the report.
///
/// # Errors
/// A process cannot be started, an operation failed, or a value got is wrong.
pub fn run(options: &Options) -> Result<Report> {
    let extent = &options.extent;
    let machine = Machine::describe();
    let processors = machine.processors;
    occupy(processors.map(|both| both.client));
    let one_sided = one_sided(options, processors)?;
    let variants = variants(options.software);
    let steps = variants.len() * (1 + SIZES.len() * Operation::ALL.len() * extent.rounds);
    let progress = progress(steps as u64);

    let mut pairs = Vec::new();
    for variant in variants {
        progress.set_message(format!("starting {}", variant.mode.name()));
        let mut pair = Pair::start(variant, options, processors)?;
        for size in SIZES {
            pair.put_all(&extent.workload(size))?;
        }
        pairs.push(pair);
        progress.inc(1);
    }
    let cells = rounds(&mut pairs, extent, &progress)?;
    progress.set_message("checking what is stored");
    let variants: Vec<Variant> = pairs.iter().map(|pair| pair.variant).collect();
    for mut pair in pairs {
        for size in SIZES {
            pair.check_all(size)?;
        }
        pair.finish()?;
    }
    progress.finish_and_clear();

    Ok(Report {
        legend: legend(),
        quick: extent.quick,
        rounds: extent.rounds,
        machine,
        device: Device {
            name: options.device.clone(),
            link: link(options.software).to_owned(),
            software: options.software,
            one_sided,
        },
        thresholds: Thresholds::of_store(),
        results: rows(&options.device, &variants, &cells),
        limits: cells
            .iter()
            .filter(|cell| cell.operation == cell.operation.limit())
            .map(|cell| Limit::new(cell.operation, cell.workload.size(), &cell.limits))
            .collect(),
        founding: founding(),
    })
}

/// The device alone, with a target in another process.
fn one_sided(options: &Options, processors: Option<Processors>) -> Result<Vec<OneSided>> {
    let arguments = role_arguments("target", options, processors.map(|both| both.server));
    let target = Worker::start(&options.program, "target", arguments, &[])?;
    let mut initiator = Initiator::connect(&options.device, target)?;
    device::one_sided(&mut initiator, 8, options.extent.device)
}

/// How a server and a client on this host reach each other.
fn link(software: bool) -> &'static str {
    if software {
        "shared memory"
    } else {
        "rdma-core, loopback"
    }
}

fn variants(software: bool) -> Vec<Variant> {
    let mut variants = Vec::new();
    for wait in [Wait::Poll, Wait::Event] {
        for mode in [Mode::RegisterPerOp, Mode::Pooled] {
            variants.push(Variant {
                mode,
                wait,
                client_wait: Wait::Poll,
            });
        }
    }
    if software {
        variants.push(Variant {
            mode: Mode::RegisterPerOpModelled,
            wait: Wait::Poll,
            client_wait: Wait::Poll,
        });
    }
    variants
}

fn rounds(pairs: &mut [Pair], extent: &Extent, progress: &ProgressBar) -> Result<Vec<Cell>> {
    let mut cells: Vec<Cell> = SIZES
        .into_iter()
        .flat_map(|size| Operation::ALL.map(|operation| (size, operation)))
        .map(|(size, operation)| Cell {
            operation,
            workload: extent.workload(size),
            rounds: pairs.iter().map(|_| Vec::new()).collect(),
            limits: Vec::new(),
        })
        .collect();
    for round in 0..extent.rounds {
        if progress.is_hidden() {
            eprintln!("round {} of {}", round + 1, extent.rounds);
        }
        for cell in &mut cells {
            let size = cell.workload.size();
            // One table serves both sides of a drift: it is made anew, as cold as it was.
            let mut copies = Copies::new(size, cell.workload.len());
            put_all(&mut copies, &mut cell.workload)?;
            measure(
                &mut copies,
                &mut cell.workload,
                cell.operation,
                extent.warm_up,
            )?;
            let limit = measure(
                &mut copies,
                &mut cell.workload,
                cell.operation,
                extent.budget,
            )?;
            cell.limits.push(limit);
            drop(copies);
            for turn in 0..pairs.len() {
                // Another one first in each round: nobody always comes right after the limit.
                let turn = (turn + round) % pairs.len();
                let pair = &mut pairs[turn];
                progress.set_message(format!(
                    "{} {} {}",
                    cell.operation.name(),
                    crate::format::bytes(size),
                    pair.variant.mode.name()
                ));
                cell.rounds[turn].push(pair.measure(size, cell.operation, extent)?);
                progress.inc(1);
            }
        }
    }
    Ok(cells)
}

/// The rows of the report: by way of waiting, operation, size, mode.
fn rows(device: &str, variants: &[Variant], cells: &[Cell]) -> Vec<Row> {
    let mut rows = Vec::new();
    for cell in cells {
        let slices = |wanted: Option<Variant>| {
            let place = variants.iter().position(|variant| Some(*variant) == wanted);
            place.map(|place| cell.rounds[place].iter().map(|round| &round.slice))
        };
        for (variant, rounds) in variants.iter().zip(&cell.rounds) {
            let place = (cell.workload.size(), cell.workload.len());
            let mut row = Row::new(device, *variant, cell.operation, place, rounds);
            let own = || rounds.iter().map(|round| &round.slice);
            let against = |mode| {
                let other = Variant { mode, ..*variant };
                slices(Some(other)).and_then(|other| ratio(own(), other))
            };
            row.vs_limit = ratio(own(), &cell.limits);
            row.vs_register_per_op = against(Mode::RegisterPerOp);
            if variant.mode == Mode::Pooled {
                row.vs_modelled = against(Mode::RegisterPerOpModelled);
            }
            rows.push(row);
        }
    }
    let order = |wanted: Operation| Operation::ALL.iter().position(|one| *one == wanted);
    // Stable: sizes and modes stay in the order they were measured in.
    rows.sort_by_key(|row| (row.wait == Wait::Event, order(row.op), row.size));
    rows
}

/// A bar of so many steps on standard error, hidden where that is no terminal.
pub(crate) fn progress(steps: u64) -> ProgressBar {
    // Hidden by itself where standard error is no terminal.
    let bar = ProgressBar::new(steps);
    if std::env::var_os("CI").is_some() {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} [{elapsed}] {msg}") {
        bar.set_style(style);
    }
    bar
}

/// Writes `report.json` and `throughput.svg` into `directory`, each complete or not at all.
///
/// # Errors
/// The directory cannot be written.
pub fn write(report: &Report, directory: &Path) -> Result<()> {
    let picture = directory.join("throughput.svg.part");
    crate::plot::draw(report, &picture)?;
    finish(&picture, &directory.join("throughput.svg"))?;
    let figures = directory.join("report.json.part");
    let text = serde_json::to_string_pretty(report)? + "\n";
    std::fs::write(&figures, text)
        .with_context(|| format!("cannot write {}", figures.display()))?;
    finish(&figures, &directory.join("report.json"))
}

fn finish(part: &Path, whole: &Path) -> Result<()> {
    std::fs::rename(part, whole)
        .with_context(|| format!("cannot rename {} to {}", part.display(), whole.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn slice(operations: u64) -> Slice {
        Slice {
            operations,
            timed: Duration::from_secs(1),
            cpu: Duration::from_secs(1),
            all_operations: operations,
            wall: Duration::from_secs(2),
            p50_us: 1.0,
            p99_us: 2.0,
        }
    }

    fn cell(size: usize, operation: Operation, rates: &[u64]) -> Cell {
        let measured = |rate: &u64| Measured {
            slice: slice(*rate),
            server_cpu_s: 0.0,
            registrations: 0,
            one_sided: None,
        };
        Cell {
            operation,
            workload: Workload::new(size, 8),
            rounds: rates.iter().map(|rate| vec![measured(rate)]).collect(),
            limits: vec![slice(1000)],
        }
    }

    #[test]
    fn rows_are_compared_with_their_own_way_of_waiting() {
        let variants = variants(true);
        assert_eq!(variants.len(), 5);
        // Polling: 100 and 400; asleep: 50 and 100; modelled: 2.
        let cells = [
            cell(128, Operation::Put, &[100, 400, 50, 100, 2]),
            cell(4096, Operation::Put, &[100, 400, 50, 100, 2]),
            cell(128, Operation::Get, &[100, 400, 50, 100, 2]),
        ];
        let rows = rows("soft0", &variants, &cells);
        assert_eq!(rows.len(), 15);
        let ratios = |wait: Wait, mode: Mode| {
            let row = rows.iter().find(|row| row.wait == wait && row.mode == mode);
            row.map(|row| (row.vs_register_per_op, row.vs_limit, row.vs_modelled))
        };
        assert_eq!(
            ratios(Wait::Poll, Mode::Pooled),
            Some((Some(4.0), Some(0.4), Some(200.0)))
        );
        assert_eq!(
            ratios(Wait::Event, Mode::Pooled),
            Some((Some(2.0), Some(0.1), None))
        );
        assert_eq!(
            ratios(Wait::Poll, Mode::RegisterPerOp),
            Some((Some(1.0), Some(0.1), None))
        );
        let order: Vec<_> = rows
            .iter()
            .map(|row| (row.wait, row.op, row.size))
            .collect();
        assert_eq!(order[0], (Wait::Poll, Operation::Put, 128));
        assert_eq!(order[3], (Wait::Poll, Operation::Put, 4096));
        assert_eq!(order[14], (Wait::Event, Operation::Get, 128));
    }

    #[test]
    fn a_device_that_is_not_ours_has_no_modelled_rows() {
        assert!(
            variants(false)
                .iter()
                .all(|variant| variant.mode != Mode::RegisterPerOpModelled)
        );
    }
}
