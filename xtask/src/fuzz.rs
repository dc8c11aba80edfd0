//! `cargo xtask fuzz`: coverage-guided bytes for every parser of what a peer sends.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::{Context, Result, bail};
use clap::Args;
use xshell::{Shell, cmd};

use crate::nightly;
use crate::workspace::Workspace;

/// What the fuzzer's library needs to see where the code goes, and what it compares.
const COVERAGE: &str = "-Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// A mistake shall be a panic, also in optimised code.
const CHECKS: &str = "-Cdebug-assertions -Coverflow-checks -Ccodegen-units=1";

/// Seconds after which one input is a finding for taking too long.
const TOO_LONG: u32 = 10;

/// Arguments of `cargo xtask fuzz`.
#[derive(Args)]
pub struct Fuzz {
    /// How long to fuzz each target
    #[arg(long, value_name = "N", default_value_t = 1)]
    minutes: u32,
    /// Fuzz this target only; can be given several times [default: all]
    #[arg(long = "target", value_name = "NAME")]
    targets: Vec<String>,
}

/// Where things are, all below cargo's target directory.
struct Folders {
    program: PathBuf,
    /// Inputs that the targets' authors gave.
    seeds: PathBuf,
    /// Inputs that were found to reach other code; kept from run to run.
    corpus: PathBuf,
    findings: PathBuf,
}

impl Fuzz {
    /// Builds the fuzzer and runs it on one target after the other; the exit status is 1 if one had
    /// a finding.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let sh = &workspace.shell;
        let folders = build(&workspace)?;
        let program = &folders.program;
        cmd!(sh, "{program}")
            .env("FUZZ_SEEDS", &folders.seeds)
            .quiet()
            .run()?;
        let known = names(&folders.seeds)?;
        let chosen = if self.targets.is_empty() {
            known
        } else {
            for name in &self.targets {
                if !known.contains(name) {
                    bail!("there is no target {name:?}, but: {}", known.join(", "));
                }
            }
            self.targets
        };
        let mut clean = true;
        for name in &chosen {
            clean &= fuzz(sh, &folders, name, self.minutes)?;
        }
        Ok(ExitCode::from(u8::from(!clean)))
    }
}

fn build(workspace: &Workspace) -> Result<Folders> {
    let sh = &workspace.shell;
    let target = nightly::target(sh)?;
    let folder = workspace.target.join("fuzz");
    let manifest = workspace.root.join("fuzz").join("Cargo.toml");
    let flags = format!("--cfg fuzzing {COVERAGE} {CHECKS} {}", nightly::ADDRESS);
    // Not `--locked`: a new dependency of a crate would have to be told to this program's file too.
    cmd!(
        sh,
        "cargo +nightly build --release --manifest-path {manifest} --target {target}
         --target-dir {folder}"
    )
    .env("RUSTFLAGS", flags)
    .run()?;
    Ok(Folders {
        program: folder.join(target).join("release").join("fuzz"),
        seeds: folder.join("seeds"),
        corpus: folder.join("corpus"),
        findings: folder.join("findings"),
    })
}

/// The targets: the names of the folders of their seeds.
fn names(seeds: &Path) -> Result<Vec<String>> {
    let read = || format!("cannot read {}", seeds.display());
    let mut names = Vec::new();
    for entry in fs::read_dir(seeds).with_context(read)? {
        let name = entry.with_context(read)?.file_name();
        names.push(name.to_string_lossy().into_owned());
    }
    names.sort();
    Ok(names)
}

/// Fuzzes one target; `false` if there is a finding.
fn fuzz(sh: &Shell, folders: &Folders, name: &str, minutes: u32) -> Result<bool> {
    let program = &folders.program;
    let (seeds, corpus) = (folders.seeds.join(name), folders.corpus.join(name));
    let findings = folders.findings.join(name);
    for folder in [&corpus, &findings] {
        sh.create_dir(folder)?;
    }
    // The library takes it for the beginning of a file's name.
    let prefix = findings.join("");
    let seconds = (u64::from(minutes) * 60).to_string();
    let limit = TOO_LONG.to_string();
    print!("{name:<12} ");
    std::io::stdout().flush()?;
    let output = cmd!(
        sh,
        "{program} -max_total_time={seconds} -timeout={limit} -artifact_prefix={prefix}
         -print_final_stats=1 -use_value_profile=1 {corpus} {seeds}"
    )
    .env("FUZZ_TARGET", name)
    .quiet()
    .ignore_status()
    .output()?;
    let log = String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        println!(
            "{}",
            summary(&log).context("the fuzzer says nothing of its runs")?
        );
        return Ok(true);
    }
    println!("failed; the end of the fuzzer's output:");
    let lines: Vec<&str> = log.lines().collect();
    for line in &lines[lines.len().saturating_sub(60)..] {
        println!("    {line}");
    }
    println!(
        "    the input is in {}; repeat with: FUZZ_TARGET={name} {} FILE",
        findings.display(),
        program.display()
    );
    Ok(false)
}

/// How many inputs were tried, and how many are in the corpus.
fn summary(log: &str) -> Option<String> {
    let stat = |name: &str| {
        let rest = log.lines().find_map(|line| line.strip_prefix(name))?;
        rest.trim().parse::<u64>().ok()
    };
    let runs = stat("stat::number_of_executed_units:")?;
    let new = stat("stat::new_units_added:")?;
    Some(format!("{runs} inputs, {new} of them new to the corpus"))
}

#[cfg(test)]
mod tests {
    use super::summary;

    #[test]
    fn a_run_is_summed_up() {
        let log = "#2\tINITED\n\
            stat::number_of_executed_units: 335110\n\
            stat::new_units_added:          855\n";
        assert_eq!(
            summary(log).as_deref(),
            Some("335110 inputs, 855 of them new to the corpus")
        );
        assert_eq!(summary("#2\tINITED\n"), None);
    }
}
