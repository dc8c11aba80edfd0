//! `bench device` from its command line to its file, with scripts in place of what measures.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

use assert_cmd::Command;
use bench::alone::Report;

/// All figures of all tests, and the arguments it was called with in a file beside it.
const PERF: &str = r#"#!/bin/sh
echo "$@" >>"$0.calls"
echo '{"ours_ns":100,"memcpy_ns":90,"aligned_ns":90,"writev_ns":50,"line_ns":60,"eventfd_ns":90,
"idle_p50_ns":500,"busy_p99_ns":20001,"operations_left":0.95,"of_many_ns":100,"one_ns":90,
"memory_bytes":24576,"singles_ns":301,"rebuilt_ns":140}'
"#;

/// Held by each test. Another's child that is just starting would have a script that is being written
/// open, too, and what is open for writing cannot be executed.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn script(directory: &Path, name: &str, text: &str) -> PathBuf {
    let path = directory.join(name);
    fs::write(&path, text).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o700)).unwrap();
    path
}

fn device(directory: &Path, perf: &Path, ucx: &Path) -> assert_cmd::assert::Assert {
    Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["device", "--once", "--out"])
        .arg(directory.join("out"))
        .arg("--perf")
        .arg(perf)
        .arg("--ucx")
        .arg(ucx)
        .assert()
}

#[test]
fn all_but_ucx_is_measured_where_ucx_is_not_installed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let perf = script(directory.path(), "perf", PERF);
    let none = directory.path().join("ucx_perftest");
    let assert = device(directory.path(), &perf, &none).success();
    let printed = String::from_utf8_lossy(&assert.get_output().stdout).into_owned();
    for text in ["met", "missed", "not installed", "ucx-utils", "24.0 KiB"] {
        assert!(printed.contains(text), "{text}: {printed}");
    }

    let text = fs::read_to_string(directory.path().join("out/device.json")).unwrap();
    let report: Report = serde_json::from_str(&text).unwrap();
    let find = |what: &str, against: &str| {
        let against = (!against.is_empty()).then_some(against);
        report
            .lines
            .iter()
            .find(|line| line.what == what && line.against.as_deref() == against)
            .unwrap_or_else(|| panic!("no line {what} : {against:?} in {text}"))
    };
    let line = find("WRITE 8 B", "memcpy");
    assert_eq!((line.value, line.met), (Some(10.0), Some(true)));
    let line = find("WRITE 8 B", "ucp_get of 8 B");
    assert_eq!((line.ours, line.value, line.met), (Some(100.0), None, None));
    let line = find("WRITE 64 KiB to heap", "process_vm_writev");
    assert_eq!((line.value, line.met), (Some(0.5), Some(false)));
    let line = find("16 WRITEs, prepared chain", "16 posts");
    assert_eq!((line.value, line.met), (Some(3.01), Some(true)));
    let line = find("16 WRITEs, prepared chain", "chain built anew");
    assert_eq!((line.value, line.met), (Some(1.4), Some(false)));
    let line = find("deregister, 64 queue pairs idle, p50", "");
    assert_eq!(line.met, Some(true));
    let line = find("deregister, 64 queue pairs busy, p99", "");
    assert_eq!(line.met, Some(false));
    let line = find("memory of a queue pair, both sides", "");
    assert_eq!((line.value, line.met), (Some(24.0), None));
    // Only lines with UCX lack anything.
    for line in &report.lines {
        let with_ucx = line
            .against
            .as_deref()
            .is_some_and(|it| it.contains("ucp_"));
        assert_eq!(line.missing.is_some(), with_ucx, "{line:?}");
        assert!(line.ours.is_some(), "{line:?}");
    }
    // Each test once, and as short as was asked for.
    let calls = fs::read_to_string(perf.with_extension("calls")).unwrap();
    let mut calls: Vec<&str> = calls.lines().collect();
    assert!(calls.contains(&"write --size 8 --ms 1"), "{calls:?}");
    let all = calls.len();
    calls.sort_unstable();
    calls.dedup();
    assert_eq!(calls.len(), all);
}

#[test]
fn a_program_that_fails_ends_the_run_with_what_it_said() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let none = directory.path().join("ucx_perftest");
    let failing = script(
        directory.path(),
        "failing",
        "#!/bin/sh\necho no soft0 here >&2\nexit 7\n",
    );
    let assert = device(directory.path(), &failing, &none).code(1);
    let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(
        said.contains("no soft0 here") && said.contains('7'),
        "{said}"
    );
    assert!(!directory.path().join("out/device.json").exists());

    let perf = script(directory.path(), "perf", PERF);
    let assert = device(directory.path(), &perf, &failing).code(1);
    let said = String::from_utf8_lossy(&assert.get_output().stderr).into_owned();
    assert!(said.contains("UCX's server ended"), "{said}");
    assert!(said.contains("no soft0 here"), "{said}");
}

/// Where UCX is installed, that is, in the CI.
#[test]
fn the_lines_with_ucx_have_its_figures_or_say_that_it_is_not_installed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let perf = script(directory.path(), "perf", PERF);
    device(directory.path(), &perf, Path::new("ucx_perftest")).success();
    let text = fs::read_to_string(directory.path().join("out/device.json")).unwrap();
    let report: Report = serde_json::from_str(&text).unwrap();
    let mut lines = report.lines.iter().filter(|line| {
        let against = line.against.as_deref();
        against.is_some_and(|it| it.starts_with("ucp_"))
    });
    assert!(lines.clone().count() >= 8);
    let installed = std::process::Command::new("ucx_perftest")
        .stdout(Stdio::null())
        .arg("-h")
        .status()
        .is_ok();
    assert!(lines.all(|line| {
        let measured = line.other.is_some_and(|ns| ns > 0.0) && line.value.is_some();
        measured == installed && line.missing.is_none() == installed
    }));
}

/// Whether a process runs; one that nobody has waited for does not.
fn runs(pid: &str) -> bool {
    let status = fs::read_to_string(format!("/proc/{pid}/status"));
    status.is_ok_and(|text| !text.contains("State:\tZ"))
}

#[test]
fn no_server_outlives_a_run_that_is_killed() {
    let _turn = turn();
    let directory = tempfile::tempdir().unwrap();
    let perf = script(directory.path(), "perf", PERF);
    // Never listens. The name appears with all of the number in it.
    let server = script(
        directory.path(),
        "server",
        "#!/bin/sh\n[ \"$1\" = -h ] && exit\necho $$ >\"$0.part\"\nmv \"$0.part\" \"$0.pid\"\nexec sleep 1000\n",
    );
    let mut bench = std::process::Command::new(env!("CARGO_BIN_EXE_bench"))
        .args(["device", "--once", "--out"])
        .arg(directory.path().join("out"))
        .arg("--perf")
        .arg(&perf)
        .arg("--ucx")
        .arg(&server)
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let pid = loop {
        if let Ok(pid) = fs::read_to_string(server.with_extension("pid")) {
            break pid.trim().to_owned();
        }
        assert!(bench.try_wait().unwrap().is_none(), "it ended by itself");
        std::thread::yield_now();
    };
    assert!(runs(&pid));
    bench.kill().unwrap();
    bench.wait().unwrap();
    while runs(&pid) {
        std::thread::yield_now();
    }
}
