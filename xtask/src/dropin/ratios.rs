//! `cargo xtask dropin --ratios`: what programs of others measure, beside what is below it. Nothing is held to a figure.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, Result};
use xshell::cmd;

use super::case::Case;
use super::process;
use super::run::Bed;
use crate::dist::{self, SEARCH_PATH};
use crate::workspace::Workspace;

/// Each figure is the best of so many, which alternate with those that it stands beside: what else runs on the machine
/// only adds to them, and so do pages that chance has put where they displace each other from the caches.
const ROUNDS: usize = 12;
/// Each time within a program is that of the middle one of so many runs.
const RUNS: usize = 5;
/// Starts of a program in a round.
const STARTS: u32 = 20;

/// Two figures, in microseconds.
struct Row {
    what: String,
    here: f64,
    beside: f64,
    beside_what: &'static str,
}

/// Measures, and prints a table.
pub fn print(workspace: &Workspace, bed: &mut Bed<'_>, libraries: &Path) -> Result<()> {
    let perf = perf(workspace)?;
    println!(
        "{:<34} {:>10}   {:<32} {:>10} {:>6}",
        "", "us", "beside", "us", "ratio"
    );
    let within = bed.compile(
        "xtask/src/dropin/within.c",
        "within.so",
        &["-shared", "-fPIC"],
    )?;
    for kilobytes in [64, 256, 1024] {
        let size = kilobytes << 10;
        let here = |bed: &mut Bed<'_>| write_bw(bed, size, None).map(|(time, _)| time);
        let what = format!("ib_write_bw, {kilobytes} KiB, for each");
        beside_kernel(bed, what, here, || writev(&perf, size))?.print();
        within_program(bed, size, &within)?.print();
    }
    // The usual one of these.
    let here = |bed: &mut Bed<'_>| {
        let output = perftest(bed, "ib_write_lat", 8, None)?;
        column(&output, 8, 4)
    };
    let what = "ib_write_lat, 8 B, one way".to_owned();
    beside_kernel(bed, what, here, || writev(&perf, 8))?.print();

    process::check("ibv_devices", "ibverbs-utils")?;
    let path = dist::search_path(libraries)?;
    let (here, beside) = alternate(|| start(Some(&path)), || start(None))?;
    let row = Row {
        what: "ibv_devices, from start to end".to_owned(),
        here,
        beside,
        beside_what: "on the system's library",
    };
    row.print();
    Ok(())
}

impl Row {
    fn print(&self) {
        let (here, beside) = (self.here, self.beside);
        println!(
            "{:<34} {here:>10.2}   {:<32} {beside:>10.2} {:>6.2}",
            self.what,
            self.beside_what,
            here / beside
        );
    }
}

fn beside_kernel(
    bed: &mut Bed<'_>,
    what: String,
    here: impl Fn(&mut Bed<'_>) -> Result<f64>,
    beside: impl Fn() -> Result<f64>,
) -> Result<Row> {
    let (here, beside) = alternate(|| here(bed), beside)?;
    Ok(Row {
        what,
        here,
        beside,
        beside_what: "process_vm_writev alone",
    })
}

/// The best of two measurements that take turns.
fn alternate(
    mut first: impl FnMut() -> Result<f64>,
    mut second: impl FnMut() -> Result<f64>,
) -> Result<(f64, f64)> {
    let mut best = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        best = (best.0.min(first()?), best.1.min(second()?));
    }
    Ok(best)
}

/// The same message's time in a program, and in the calls of the kernel that the program makes for it: of the same
/// pages, wherever they lie.
fn within_program(bed: &mut Bed<'_>, size: u32, within: &Path) -> Result<Row> {
    let mut runs = Vec::new();
    for _ in 0..RUNS {
        let (time, output) = write_bw(bed, size, Some(within))?;
        let calls = calls(&output, size).with_context(|| format!("no calls in {output}"))?;
        runs.push((time, calls));
    }
    runs.sort_unstable_by(|one, other| (one.0 / one.1).total_cmp(&(other.0 / other.1)));
    let (here, beside) = runs[RUNS / 2];
    Ok(Row {
        what: String::new(),
        here,
        beside,
        beside_what: "its own calls of that",
    })
}

/// Microseconds of a WRITE in a stream of such, and what the program said.
fn write_bw(bed: &mut Bed<'_>, size: u32, before: Option<&Path>) -> Result<(f64, String)> {
    let output = perftest(bed, "ib_write_bw", size, before)?;
    // MiB per second, on average.
    let rate = column(&output, size, 3)?;
    Ok((f64::from(size) / rate / f64::from(1 << 20) * 1e6, output))
}

/// Microseconds in process_vm_writev(2) for so many bytes.
fn calls(output: &str, size: u32) -> Option<f64> {
    let mut words = output
        .lines()
        .find_map(|line| line.strip_prefix("process_vm_writev "))?
        .split_whitespace();
    let mut number = || words.next()?.parse::<f64>().ok();
    let (bytes, nanoseconds) = (number()?, number()?);
    Some(nanoseconds / 1000.0 / bytes * f64::from(size))
}

/// What a test says of messages of this size, with a library in front of it if there is one.
fn perftest(
    bed: &mut Bed<'_>,
    program: &'static str,
    size: u32,
    before: Option<&Path>,
) -> Result<String> {
    let size = size.to_string();
    // The first requests are those that everything is looked up for.
    let warmed: &[&str] = match program.ends_with("_bw") {
        true => &["--perform_warm_up"],
        false => &[],
    };
    let arguments = [&["-d", "soft0", "-n", "20000", "-s", &size], warmed].concat();
    let mut case = Case::pair("perftest", program, &arguments);
    if let Some(library) = before {
        case = case.with_environment("LD_PRELOAD", &library.to_string_lossy());
    }
    bed.run(&case)
}

/// A figure of a test's only line: the words before it are the size and the number of iterations.
fn column(output: &str, size: u32, at: usize) -> Result<f64> {
    figure(output, &size.to_string(), at).with_context(|| format!("it said: {output}"))
}

fn figure(output: &str, size: &str, at: usize) -> Option<f64> {
    let mut lines = output.lines().map(str::split_whitespace);
    let mut line = lines.find(|line| line.clone().next() == Some(size))?;
    line.nth(at)?.parse().ok()
}

/// The program that measures the device alone, and what it stands on.
fn perf(workspace: &Workspace) -> Result<PathBuf> {
    let sh = &workspace.shell;
    cmd!(
        sh,
        "cargo build --locked --release --package verbs-sys --example perf"
    )
    .run()?;
    Ok(workspace.target.join("release/examples/perf"))
}

/// Microseconds of a process_vm_writev(2) between two processes.
fn writev(perf: &Path, size: u32) -> Result<f64> {
    let output = Command::new(perf)
        .args(["heap", "--size", &size.to_string()])
        .stderr(Stdio::inherit())
        .output()?;
    let figures: BTreeMap<String, f64> =
        serde_json::from_slice(&output.stdout).context("what perf prints")?;
    let nanoseconds = figures.get("writev_ns").context("no figure")?;
    Ok(nanoseconds / 1000.0)
}

/// Microseconds of a program that lists devices, with libraries of this path if there is one.
fn start(path: Option<&OsStr>) -> Result<f64> {
    let began = Instant::now();
    for _ in 0..STARTS {
        let mut command = Command::new("ibv_devices");
        if let Some(path) = path {
            command.env(SEARCH_PATH, path);
        }
        // Without a device in the kernel it fails, having looked for one.
        command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .status()?;
    }
    Ok(began.elapsed().as_secs_f64() * 1e6 / f64::from(STARTS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_figure_is_found_by_its_size() {
        let output = " #bytes  #iterations  peak  average\n port 8 1 2\n 8  5000  1.5  1.25  0.1\n";
        assert_eq!(figure(output, "8", 3), Some(1.25));
        assert_eq!(figure(output, "16", 3), None);
        assert_eq!(figure(output, "8", 9), None);
    }

    #[test]
    fn the_time_of_calls_is_for_as_many_bytes() {
        let output = " 8 1 2\nprocess_vm_writev 4096 8000\n";
        assert_eq!(calls(output, 1024), Some(2.0));
        assert_eq!(calls("process_vm_writev 4096", 1024), None);
        assert_eq!(calls("", 1024), None);
    }

    #[test]
    fn the_best_is_of_what_took_turns() {
        let turns = std::cell::Cell::new(0);
        let turn = || turns.replace(turns.get() + 1);
        let first = || Ok(f64::from((turn() - 4_i32).abs()));
        let second = || Ok(f64::from((turn() - 5_i32).abs()));
        // Turns 0, 2, 4 and so on are of the first.
        assert_eq!(alternate(first, second).unwrap(), (0.0, 0.0));
        assert!(alternate(|| Ok(1.0), || anyhow::bail!("it failed")).is_err());
    }
}
