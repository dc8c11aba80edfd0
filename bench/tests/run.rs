//! The program from its command line to its files, on the software device.

use std::path::Path;
use std::time::Duration;

use assert_cmd::Command;
use bench::measure::{Budget, Operation};
use bench::report::{Mode, Report, Wait};
use bench::run::{Extent, Options, run, write};
use bench::workload::SIZES;

fn program() -> Command {
    Command::new(env!("CARGO_BIN_EXE_bench"))
}

fn stderr(assert: &assert_cmd::assert::Assert) -> String {
    String::from_utf8_lossy(&assert.get_output().stderr).into_owned()
}

/// Every mode, size, operation and way of waiting, as shortly as can be.
#[test]
fn a_run_measures_checks_and_reports_every_combination() {
    let shortest = Budget {
        timed: Duration::from_micros(1),
        wall: Duration::from_millis(1),
    };
    let report = run(&Options {
        program: Path::new(env!("CARGO_BIN_EXE_bench")).to_owned(),
        device: "soft0".to_owned(),
        software: true,
        extent: Extent {
            quick: true,
            rounds: 2,
            warm_up: shortest,
            budget: shortest,
            device: Duration::from_millis(1),
            working_set: 0,
            most_keys: 8,
        },
    })
    .unwrap();

    assert_eq!(report.results.len(), 5 * SIZES.len() * Operation::ALL.len());
    for row in &report.results {
        assert!(row.ops_per_s > 0.0, "{row:?}");
        assert!(row.vs_limit.is_some(), "{row:?}");
        assert!(row.vs_register_per_op.is_some(), "{row:?}");
        match row.mode {
            Mode::Pooled => assert_eq!(row.registrations_per_op, 0.0, "{row:?}"),
            Mode::RegisterPerOp | Mode::RegisterPerOpModelled => {
                assert!(row.registrations_per_op >= 1.0, "{row:?}");
            }
        }
        assert_eq!(
            row.vs_modelled.is_some(),
            row.mode == Mode::Pooled && row.wait == Wait::Poll,
            "{row:?}"
        );
    }
    assert_eq!(report.limits.len(), 2 * SIZES.len());
    assert_eq!(report.device.one_sided.len(), 2);

    let directory = tempfile::tempdir().unwrap();
    write(&report, directory.path()).unwrap();
    let mut names: Vec<_> = std::fs::read_dir(directory.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["report.json", "throughput.svg"]);
    let text = std::fs::read_to_string(directory.path().join("report.json")).unwrap();
    let again: Report = serde_json::from_str(&text).unwrap();
    assert_eq!(again.results.len(), report.results.len());
}

#[test]
fn an_unknown_device_is_named_with_those_there_are() {
    let directory = tempfile::tempdir().unwrap();
    let assert = program()
        .args(["run", "--device", "nothing7", "--out"])
        .arg(directory.path())
        .assert()
        .code(1);
    let text = stderr(&assert);
    assert!(
        text.contains("nothing7") && text.contains("soft0"),
        "{text}"
    );
    assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn wrong_usage_is_status_2() {
    program().arg("run").assert().code(2);
    program().arg("walk").assert().code(2);
}

#[test]
fn a_directory_that_cannot_be_made_is_an_error_before_the_run() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let assert = program()
        .args(["run", "--device", "soft0", "--out"])
        .arg(file.path().join("below"))
        .assert()
        .code(1);
    assert!(stderr(&assert).contains("cannot make the directory"));
}
