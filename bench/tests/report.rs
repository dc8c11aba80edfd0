//! The three outputs of one report: figures, tables, picture.

use std::time::Duration;

use bench::machine::Machine;
use bench::measure::{Operation, Slice};
use bench::report::{
    Device, Limit, Measured, Mode, OneSided, Report, Row, Thresholds, Variant, Wait, founding,
    legend,
};
use bench::workload::SIZES;
use bench::{plot, table};

/// A slice of 1000 operations of `nanoseconds` each.
fn slice(nanoseconds: u64) -> Slice {
    Slice {
        operations: 1000,
        timed: Duration::from_nanos(1000 * nanoseconds),
        cpu: Duration::from_nanos(990 * nanoseconds),
        all_operations: 2000,
        wall: Duration::from_nanos(3000 * nanoseconds),
        p50_us: nanoseconds as f64 / 1e3,
        p99_us: nanoseconds as f64 / 500.0,
    }
}

fn report() -> Report {
    let mut results = Vec::new();
    let mut limits = Vec::new();
    for (mode, wait, base) in [
        (Mode::RegisterPerOp, Wait::Poll, 4000),
        (Mode::Pooled, Wait::Poll, 400),
        (Mode::RegisterPerOp, Wait::Event, 24_000),
        (Mode::Pooled, Wait::Event, 20_000),
        (Mode::RegisterPerOpModelled, Wait::Poll, 100_000),
    ] {
        let variant = Variant {
            mode,
            wait,
            client_wait: Wait::Poll,
        };
        for op in Operation::ALL {
            for size in SIZES {
                let measured = Measured {
                    slice: slice(base + size as u64 / 10),
                    server_cpu_s: 0.001,
                    registrations: if mode == Mode::Pooled { 0 } else { 4000 },
                    one_sided: Some(2000),
                };
                let mut row = Row::new("soft0", variant, op, (size, 512), &[measured]);
                row.vs_register_per_op = Some(10.0);
                row.vs_limit = Some(0.85);
                row.vs_modelled = (mode == Mode::Pooled).then_some(250.0);
                results.push(row);
            }
        }
    }
    for op in Operation::ALL {
        for size in SIZES {
            limits.push(Limit::new(op, size, &[slice(5 + size as u64 / 12)]));
        }
    }
    Report {
        legend: legend(),
        quick: true,
        rounds: 1,
        machine: Machine::describe(),
        device: Device {
            name: "soft0".to_owned(),
            link: "shared memory".to_owned(),
            software: true,
            one_sided: vec![OneSided {
                op: "READ".to_owned(),
                size: 8,
                median_ns: 24.5,
                memcpy_ns: 2.5,
                above_memcpy_ns: 22.0,
            }],
        },
        thresholds: Thresholds::of_store(),
        results,
        limits,
        founding: founding(),
    }
}

#[test]
fn the_report_survives_its_file() {
    let report = report();
    let text = serde_json::to_string_pretty(&report).unwrap();
    let again: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(again.results.len(), 60);
    assert_eq!(again.results[0].ops_per_s, report.results[0].ops_per_s);
    assert_eq!(again.founding, founding());
}

#[test]
fn the_tables_say_how_both_sides_waited_and_what_is_a_model() {
    let text = table::render(&report());
    for promised in [
        "Client and server both polling",
        "Server asleep between requests (completion channel), client polling",
        "MODELLED, not measured hardware",
        "250x",
        "plain copies",
        "One-sided operations on another process",
        "register-per-op",
        "50 KiB",
    ] {
        assert!(text.contains(promised), "{promised} in\n{text}");
    }
    let modelled = text.split("MODELLED").nth(1).unwrap();
    assert!(!modelled.contains("NaN"));
    let width = text.lines().map(|line| line.chars().count()).max();
    assert!(width <= Some(140), "{width:?} columns\n{text}");
}

#[test]
fn the_picture_holds_every_series_and_both_operations() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("throughput.svg");
    plot::draw(&report(), &path).unwrap();
    let svg = std::fs::read_to_string(&path).unwrap();
    for promised in [
        "memcpy of the same bytes",
        "pooled",
        "register per operation",
        "modelled",
        "founding figures",
        "50 KiB",
        "1 MiB",
        "put",
        "get",
        "soft0",
        "shared memory",
    ] {
        assert!(svg.contains(promised), "{promised}");
    }
}

#[test]
fn a_report_without_results_has_no_picture() {
    let directory = tempfile::tempdir().unwrap();
    let mut report = report();
    report.results.clear();
    report.limits.clear();
    report.founding.clear();
    let error = plot::draw(&report, &directory.path().join("none.svg")).unwrap_err();
    assert!(format!("{error:#}").contains("no results"), "{error:#}");
}
