//! The software device alone on one host, beside plain copies, bare calls of the kernel, and UCX.
//!
//! Two programs measure: `verbs-sys/examples/perf` the device and what is as plain as can be, and
//! `ucx_perftest` what UCX makes of the same memory. Each round has every test once.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};

use crate::alone::comparisons::{Comparison, Figure, Test, UCX_RUNS};
use crate::alone::pace::Pace;
use crate::alone::ucx::Ucx;
use crate::machine::{Machine, Processors};
use crate::statistics::median;

pub mod comparisons;
mod pace;
mod perf;
mod ucx;

pub use comparisons::{Goal, Relation};

/// The figures of one test, by name.
type Figures = BTreeMap<String, f64>;

/// Why there are no figures of UCX.
const NO_UCX: &str = "not installed: apt package ucx-utils";

/// What to measure with, and how long.
#[derive(Clone, Debug)]
pub struct Options {
    /// The file of this program, which starts UCX's.
    pub program: PathBuf,
    /// The built `verbs-sys/examples/perf`.
    pub perf: PathBuf,
    /// `ucx_perftest`, by its path or a name in PATH.
    pub ucx: PathBuf,
    /// How much.
    pub extent: Extent,
}

/// How much to measure.
#[derive(Clone, Copy, Debug)]
pub struct Extent {
    /// Whether this is a short run.
    pub quick: bool,
    /// Times each test runs.
    pub rounds: usize,
    /// How long each test of ours takes.
    pub budget: Duration,
    /// Runs within each test of UCX.
    pub ucx_runs: usize,
    /// How much longer it may take in all, so that no test runs while the machine is slower than usual.
    pub patience: Duration,
}

impl Extent {
    /// About four minutes, or half of one; on a machine that is at times slower, up to five more.
    pub fn new(quick: bool) -> Self {
        if quick {
            Self {
                quick,
                rounds: 2,
                budget: Duration::from_millis(150),
                ucx_runs: UCX_RUNS,
                patience: Duration::ZERO,
            }
        } else {
            Self {
                quick,
                // How fast a test is depends on where the system puts its memory, too: on chance.
                rounds: 11,
                budget: Duration::from_millis(250),
                ucx_runs: UCX_RUNS,
                patience: Duration::from_secs(300),
            }
        }
    }
}

/// What device.json has.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Report {
    /// Whether this was a short run.
    pub quick: bool,
    /// Times each test ran.
    pub rounds: usize,
    /// Where.
    pub machine: Machine,
    /// The lines of the table.
    pub lines: Vec<Line>,
}

/// A figure, what it is compared with, and whether that is as wanted.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Line {
    /// What was measured.
    pub what: String,
    /// Unit of `ours` and `other`.
    pub unit: String,
    /// Median over the rounds.
    pub ours: Option<f64>,
    /// What it is compared with.
    pub against: Option<String>,
    /// That one's median over the rounds.
    pub other: Option<f64>,
    /// How they are compared.
    pub relation: Relation,
    /// Median over the rounds of the relation within each.
    pub value: Option<f64>,
    /// What is wanted of `value`.
    pub goal: Option<Goal>,
    /// Whether it is so.
    pub met: Option<bool>,
    /// Why a figure is missing.
    pub missing: Option<String>,
}

impl Line {
    /// Puts together what the rounds gave for a comparison.
    fn new(comparison: &Comparison, rounds: &[Measured]) -> Self {
        let figure = |figure: &Figure| median(rounds.iter().filter_map(|round| round.get(figure)));
        let values = rounds.iter().filter_map(|round| {
            let other = comparison.other.as_ref();
            let other = other.and_then(|other| round.get(other));
            comparison.relation.of(round.get(&comparison.ours)?, other)
        });
        let value = median(values);
        let other = comparison.other.as_ref();
        let unmeasured = other.is_some_and(|other| figure(other).is_none());
        Self {
            what: comparison.ours.label.clone(),
            unit: comparison.unit.to_owned(),
            ours: figure(&comparison.ours),
            against: other.map(|other| other.label.clone()),
            other: other.and_then(figure),
            relation: comparison.relation,
            value,
            goal: comparison.goal,
            met: comparison
                .goal
                .and_then(|goal| value.map(|value| goal.met(value))),
            missing: unmeasured.then(|| NO_UCX.to_owned()),
        }
    }
}

/// What the tests of one round gave; those of UCX are missing where it is.
#[derive(Default)]
struct Measured(Vec<(Test, Figures)>);

impl Measured {
    fn get(&self, figure: &Figure) -> Option<f64> {
        let (_, figures) = self.0.iter().find(|(test, _)| *test == figure.test)?;
        Some(figures.get(figure.name)? * figure.scale)
    }
}

/// The tests of all comparisons, each once, in the order in which they come.
fn tests(comparisons: &[Comparison]) -> Vec<Test> {
    let mut tests = Vec::new();
    for comparison in comparisons {
        for figure in [Some(&comparison.ours), comparison.other.as_ref()] {
            if let Some(Figure { test, .. }) = figure
                && !tests.contains(test)
            {
                tests.push(test.clone());
            }
        }
    }
    tests
}

/// Measures everything.
///
/// # Errors
/// There is one processor only, or a program failed; that UCX's is not there is no error.
pub fn run(options: &Options) -> Result<Report> {
    let extent = &options.extent;
    let processors = Processors::choose().context("two processors are needed")?;
    let ucx = Ucx::find(&options.ucx, &options.program, processors)?;
    let comparisons = comparisons::all();
    let tests = tests(&comparisons);
    let progress = crate::run::progress((extent.rounds * tests.len()) as u64);
    let mut pace = Pace::new(processors, extent.patience);
    let mut rounds = Vec::new();
    for number in 1..=extent.rounds {
        if progress.is_hidden() {
            eprintln!("round {number} of {}", extent.rounds);
        }
        let mut round = Measured::default();
        for test in &tests {
            let figures = match test {
                Test::Perf(arguments) => {
                    progress.set_message(arguments.clone());
                    let run = || perf::run(&options.perf, arguments, extent.budget);
                    Some(pace.keep(run)?)
                }
                Test::Ucx(arguments) => {
                    progress.set_message(format!("UCX: {arguments}"));
                    let run = |ucx: &Ucx| pace.keep(|| ucx.run(arguments, extent.ucx_runs));
                    ucx.as_ref().map(run).transpose()?
                }
            };
            round
                .0
                .extend(figures.map(|figures| (test.clone(), figures)));
            progress.inc(1);
        }
        rounds.push(round);
    }
    progress.finish_and_clear();
    Ok(Report {
        quick: extent.quick,
        rounds: extent.rounds,
        machine: Machine::describe(),
        lines: comparisons
            .iter()
            .map(|comparison| Line::new(comparison, &rounds))
            .collect(),
    })
}

/// Writes device.json.
///
/// # Errors
/// It cannot be written.
pub fn write(report: &Report, out: &Path) -> Result<()> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    let path = out.join("device.json");
    let text = serde_json::to_string_pretty(report)?;
    fs::write(&path, text + "\n").with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figure(test: Test, name: &'static str, scale: f64) -> Figure {
        Figure {
            test,
            name,
            scale,
            label: name.to_owned(),
        }
    }

    fn comparison() -> Comparison {
        Comparison {
            unit: "ns",
            ours: figure(Test::Perf("send".into()), "ours_ns", 1.0),
            other: Some(figure(Test::Ucx("ucp_am_lat".into()), "ns", 2.0)),
            relation: Relation::Time,
            goal: Some(Goal::AtMost(0.9)),
        }
    }

    fn round(ours: f64, ucx: Option<f64>) -> Measured {
        let figures = |name: &str, value| Figures::from([(name.to_owned(), value)]);
        let ours = (Test::Perf("send".into()), figures("ours_ns", ours));
        let ucx = ucx.map(|ns| (Test::Ucx("ucp_am_lat".into()), figures("ns", ns)));
        Measured([ours].into_iter().chain(ucx).collect())
    }

    #[test]
    fn a_line_is_the_median_of_the_relations_within_rounds() {
        // The machine is ten times as slow in the second round: the ratio stays.
        let rounds = [
            round(80.0, Some(50.0)),
            round(800.0, Some(500.0)),
            round(90.0, Some(50.0)),
        ];
        let line = Line::new(&comparison(), &rounds);
        assert_eq!((line.ours, line.other), (Some(90.0), Some(100.0)));
        assert_eq!((line.value, line.met), (Some(0.8), Some(true)));
        assert_eq!(line.missing, None);
        let line = Line::new(&comparison(), &[round(95.0, Some(50.0))]);
        assert_eq!((line.value, line.met), (Some(0.95), Some(false)));
    }

    #[test]
    fn without_ucx_a_line_has_our_figure_and_says_why_no_other() {
        let line = Line::new(&comparison(), &[round(80.0, None)]);
        assert_eq!((line.ours, line.other), (Some(80.0), None));
        assert_eq!((line.value, line.met), (None, None));
        assert!(line.missing.unwrap().contains("ucx-utils"));
    }

    #[test]
    fn a_test_that_several_lines_need_runs_once_a_round() {
        let comparisons = [comparison(), comparison()];
        assert_eq!(
            tests(&comparisons),
            [Test::Perf("send".into()), Test::Ucx("ucp_am_lat".into())]
        );
    }
}
