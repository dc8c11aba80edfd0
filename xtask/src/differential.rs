//! `cargo xtask differential`: random verbs programs on the software device and on the kernel's, and
//! whether they behave alike.
//!
//! The programs are those of the example `differential` of `verbs-sys`, which writes down what
//! happens, a step at a time. What is known to differ stands in a table, with who is right; anything
//! else fails the command.

mod compare;
pub mod known;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use xshell::cmd;

use self::compare::{Difference, compare};
use crate::vm;
use crate::workspace::{Workspace, features};

/// Arguments of `cargo xtask differential`.
#[derive(Args)]
pub struct Differential {
    /// Work requests and control calls, in programs of about a thousand
    #[arg(long, value_name = "N", default_value_t = 20_000)]
    ops: u64,
    /// What the programs follow from
    #[arg(long, value_name = "S", default_value_t = 1)]
    seed: u64,
    /// Run one program alone, by its own seed as a report names it
    #[arg(long, value_name = "SEED", conflicts_with_all = ["ops", "seed"])]
    program: Option<String>,
    /// Run on this device alone, and print what happens
    #[arg(long, value_name = "NAME")]
    device: Option<Device>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Device {
    /// The software device, here
    Soft0,
    /// The Linux kernel's rdma_rxe, in an emulated machine
    Rxe0,
}

/// Unexplained differences that are shown in full.
const SHOWN: usize = 10;

/// One program of so many may hang on the kernel's device.
const HANGS: usize = 20;

/// Seconds to wait for what must come. Emulated, the slowest takes about one.
const PATIENCE: &str = "20";

impl Differential {
    /// The exit status is 1 if there is a difference that nobody has explained.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let with_kernel = self.device != Some(Device::Soft0);
        let runner = build(&workspace, with_kernel)?;
        let mut traces = Vec::new();
        for device in [Device::Soft0, Device::Rxe0] {
            if self.device.is_none_or(|only| only == device) {
                let path = match device {
                    Device::Soft0 => self.on_soft0(&workspace, &runner)?,
                    Device::Rxe0 => self.on_rxe0(&workspace, &runner)?,
                };
                let text = fs::read(&path).with_context(|| format!("read {}", path.display()))?;
                traces.push(String::from_utf8_lossy(&text).into_owned());
            }
        }
        match traces.as_slice() {
            [soft0, rxe0] => report(&workspace, &runner, soft0, rxe0),
            _ => {
                traces.iter().for_each(|trace| print!("{trace}"));
                Ok(ExitCode::SUCCESS)
            }
        }
    }

    /// The runner's arguments, for a trace in `file`.
    fn arguments(&self, file: &Path) -> Vec<String> {
        let file = file.to_string_lossy().into_owned();
        match &self.program {
            Some(seed) => vec!["one".into(), hexadecimal(seed), file, PATIENCE.into()],
            None => vec![
                "run".into(),
                self.seed.to_string(),
                self.ops.to_string(),
                file,
                PATIENCE.into(),
            ],
        }
    }

    fn on_soft0(&self, workspace: &Workspace, runner: &Path) -> Result<PathBuf> {
        let sh = &workspace.shell;
        let file = workspace.target.join("differential.soft0");
        let arguments = self.arguments(&file);
        cmd!(sh, "{runner} {arguments...}")
            .env("VERBS_DEVICE", "soft0")
            .quiet()
            .run()?;
        Ok(file)
    }

    fn on_rxe0(&self, workspace: &Workspace, runner: &Path) -> Result<PathBuf> {
        let file = vm::results(workspace).join("differential.rxe0");
        let mut command = vec![runner.to_string_lossy().into_owned()];
        command.extend(self.arguments(&file));
        let step = vm::Step {
            name: "differential".into(),
            directory: workspace.root.clone(),
            command,
            // Ten times what it takes.
            limit: Duration::from_secs(600 + self.ops / 50),
        };
        let (status, log) = vm::run_step(workspace, step)?;
        if status != 0 {
            bail!(
                "the runner ended with status {status} in the guest; see {}",
                log.display()
            );
        }
        Ok(file)
    }
}

/// Seeds are printed without a prefix, and taken with or without.
fn hexadecimal(seed: &str) -> String {
    format!("0x{}", seed.trim_start_matches("0x"))
}

fn build(workspace: &Workspace, with_kernel: bool) -> Result<PathBuf> {
    let sh = &workspace.shell;
    let features = features(with_kernel);
    // A folder of its own for each choice of features, as the guest may be running one of them.
    let target = match with_kernel {
        true => workspace.target.join("rdma"),
        false => workspace.target.clone(),
    };
    cmd!(
        sh,
        "cargo build --locked --release --package verbs-sys --example differential {features...}
         --target-dir {target}"
    )
    .run()?;
    Ok(target.join("release/examples/differential"))
}

fn report(workspace: &Workspace, runner: &Path, soft0: &str, rxe0: &str) -> Result<ExitCode> {
    let found = compare(soft0, rxe0)?;
    println!(
        "\n{} programs, {} steps compared; {}",
        found.programs, found.steps, found.end
    );
    for (what, count) in &found.known {
        println!("{count:>8} known: {what}");
    }
    for (program, step, kind) in &found.hung {
        println!("left out the rest of program {program}: rxe0 hung at step {step} ({kind})");
    }
    for difference in found.unexplained.iter().take(SHOWN) {
        let text = cmd!(workspace.shell, "{runner} print")
            .arg(hexadecimal(difference.program))
            .quiet()
            .read()?;
        show(difference, &text);
    }
    println!("{} differences unexplained", found.unexplained.len());
    // The kernel's device hangs now and then; if it does so often, little is compared.
    let hangs = HANGS * found.hung.len() > found.programs;
    if hangs {
        println!("rxe0 hung in more than one program of {HANGS}");
    }
    let failed = hangs || !found.unexplained.is_empty();
    Ok(ExitCode::from(u8::from(failed)))
}

/// Prints a difference with the part of its program that leads there.
fn show(difference: &Difference<'_>, program: &str) {
    let Difference { program: seed, .. } = difference;
    println!("\nprogram {seed}, step {}:", difference.step);
    for line in excerpt(program, difference.step, difference.pair) {
        println!("  {line}");
    }
    for (device, lines) in [("soft0", &difference.soft0), ("rxe0", &difference.rxe0)] {
        for line in lines {
            println!("{device:>6}:{line}");
        }
    }
}

/// The objects of a program, and the steps of a pair from its last connection to `step`: what is
/// before that has no consequences, unless connecting has.
fn excerpt<'a>(program: &'a str, step: usize, pair: &str) -> Vec<&'a str> {
    let (steps, objects): (Vec<&str>, Vec<&str>) =
        program.lines().partition(|line| line.starts_with('@'));
    let before = steps.get(..=step).unwrap_or(&steps);
    let of_pair = |line: &&&str| line.split(' ').nth(1) == Some(pair);
    let mut lines: Vec<&str> = Vec::new();
    for line in before.iter().filter(of_pair) {
        let begins = line.contains(" [connect] ") || line.contains(" [reset] ");
        // The step itself may be one.
        if begins && !line.starts_with(&format!("@{step} ")) {
            lines.clear();
        }
        lines.push(line);
    }
    objects.into_iter().chain(lines).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_excerpt_begins_with_the_last_connection() {
        let program = "pair 0\n@0 0 [connect] a\n@1 0 [x] b\n@2 0 [connect] c\n@3 1 [x] d\n\
                       @4 0 [x] e\n@5 0 [x] f";
        let lines = excerpt(program, 4, "0");
        assert_eq!(lines, ["pair 0", "@2 0 [connect] c", "@4 0 [x] e"]);
        let lines = excerpt(program, 2, "0");
        assert_eq!(
            lines,
            [
                "pair 0",
                "@0 0 [connect] a",
                "@1 0 [x] b",
                "@2 0 [connect] c"
            ]
        );
    }

    #[test]
    fn a_seed_is_taken_as_it_is_printed() {
        assert_eq!(hexadecimal("00ab"), "0x00ab");
        assert_eq!(hexadecimal("0x1"), "0x1");
    }
}
