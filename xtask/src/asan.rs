//! `cargo xtask asan`: the tests of what is unsafe, and of what is built on it, under AddressSanitizer.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use xshell::{Shell, cmd};

use crate::nightly;
use crate::workspace::{TestBinary, Workspace, test_binaries};

/// What has unsafe code, and what puts load on it.
const PACKAGES: [&str; 5] = ["verbs-sys", "rdmacm", "mr-pool", "wire", "kvstore"];

/// Tests that something is never freed when it must not be; a new one of that kind belongs here.
const LEAKING: [&str; 4] = [
    "owned::tests::buffers_leak_if_the_queue_pair_cannot_be_destroyed",
    "owned::tests::prepared_buffers_leak_with_their_queue_pair",
    "tests::a_region_that_is_changed_keeps_what_it_has_then",
    "tests::memory_that_stays_registered_is_never_freed",
];

/// A test that limits its programs' address space, of which the sanitizer itself needs terabytes.
const LIMITING: &str = "a_registration_that_fails";

/// One whose program may make no system call, as the sanitizer does.
const SEALED: &str = "operations_on_memory_of_the_device_make_no_system_call";

/// Arguments of `cargo xtask asan`.
#[derive(Args)]
pub struct Asan {}

impl Asan {
    /// Runs all test programs on soft0 and fails if a test does, or the sanitizer finds something in
    /// any process that a test has started.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        let sh = &workspace.shell;
        let binaries = build(&workspace)?;
        let reports = workspace.target.join("asan").join("reports");
        sh.remove_path(&reports)?;
        sh.create_dir(&reports)?;
        let mut failed = Vec::new();
        for binary in &binaries {
            let skipped = match (binary.package.as_str(), binary.name.as_str()) {
                ("verbs-sys", "lib") => &LEAKING[..],
                ("verbs-sys", "owner_copies") => &[SEALED],
                ("kvstore", "cli") => &[LIMITING],
                _ => &[],
            };
            let arguments: Vec<&str> = skipped.iter().flat_map(|name| ["--skip", name]).collect();
            if run(sh, binary, &reports, true, &arguments).is_err() {
                failed.push(format!("{} of {}", binary.name, binary.package));
            }
            if skipped == LEAKING {
                let arguments = [&["--exact"], &LEAKING[..]].concat();
                let output = run(sh, binary, &reports, false, &arguments);
                let all = format!("{} passed", LEAKING.len());
                if !output.is_ok_and(|output| output.contains(&all)) {
                    failed.push("tests that leak, or one that there is not".to_owned());
                }
            }
        }
        show(&reports)?;
        ensure!(failed.is_empty(), "failed: {}", failed.join(", "));
        println!("nothing found in {} test programs", binaries.len());
        Ok(())
    }
}

fn build(workspace: &Workspace) -> Result<Vec<TestBinary>> {
    let sh = &workspace.shell;
    let target = nightly::target(sh)?;
    let folder = workspace.target.join("asan");
    let packages = PACKAGES.iter().flat_map(|name| ["--package", name]);
    let messages = cmd!(
        sh,
        "cargo +nightly test --locked --no-run --message-format=json-render-diagnostics
         --target {target} --target-dir {folder} {packages...}"
    )
    .env("RUSTFLAGS", nightly::ADDRESS)
    .read()?;
    let binaries = test_binaries(&messages)?;
    ensure!(!binaries.is_empty(), "cargo built no test executable");
    Ok(binaries)
}

/// Runs one program, and returns what it printed.
fn run(
    sh: &Shell,
    binary: &TestBinary,
    reports: &Path,
    leaks: bool,
    arguments: &[&str],
) -> Result<String> {
    let executable = &binary.executable;
    let _directory = sh.push_dir(&binary.directory);
    // A child's finding is not always its parent's failure: hence the files.
    let log = reports.join(&binary.name);
    let options = format!(
        "log_path={}:detect_leaks={}",
        log.display(),
        u8::from(leaks)
    );
    let output = cmd!(sh, "{executable} {arguments...}")
        .env("VERBS_DEVICE", "soft0")
        .env("ASAN_OPTIONS", options)
        .ignore_status()
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    if !output.status.success() {
        print!("{text}");
        eprint!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("{} failed", binary.name);
    }
    let result = text.lines().find(|line| line.starts_with("test result:"));
    let result = result.unwrap_or_default();
    println!("{:<10} {:<14} {result}", binary.package, binary.name);
    Ok(text)
}

/// Prints what the sanitizer has found; an error if it has.
fn show(reports: &Path) -> Result<()> {
    let mut found = 0;
    let read = || format!("cannot read {}", reports.display());
    for entry in fs::read_dir(reports).with_context(read)? {
        let path = entry.with_context(read)?.path();
        let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
        println!("{}:\n{}", path.display(), String::from_utf8_lossy(&text));
        found += 1;
    }
    ensure!(found == 0, "AddressSanitizer wrote {found} reports");
    Ok(())
}
