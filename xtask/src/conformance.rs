//! `cargo xtask conformance`: one suite on every kind of link and on the kernel's device, and the
//! public record of how they compare.

mod record;

use std::fs;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use xshell::cmd;

use self::record::{Leg, Verdict, parse};
use crate::hosts::Hosts;
use crate::vm;
use crate::workspace::{TestBinary, Workspace};

/// Arguments of `cargo xtask conformance`.
#[derive(Args)]
pub struct Conformance {
    /// Run this leg only; can be given several times [default: all of the software device]
    #[arg(long = "leg", value_name = "NAME")]
    legs: Vec<LegName>,
    /// Run every leg, rxe0 too, and write the record of it to docs/conformance.md
    #[arg(long, conflicts_with = "legs")]
    write: bool,
}

/// Where the two ends of a test are, and what their memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum LegName {
    /// soft0 within one process, memory of the device
    Local,
    /// soft0 within one process, memory from the heap
    LocalHeap,
    /// soft0 between two processes, memory of the device: shared, copied by the initiator
    Shm,
    /// soft0 between two processes, memory from the heap: process_vm_readv(2) and writev
    Cma,
    /// soft0 between two processes that may not reach each other's heap: its owner copies that
    OwnerCopies,
    /// soft0 in strict mode: the owner copies and checks, whatever the memory
    Strict,
    /// soft0 between two hosts, which are network namespaces, over TCP; needs root
    Tcp,
    /// The Linux kernel's rdma_rxe, in an emulated machine, all four ways
    Rxe0,
}

impl LegName {
    const SOFTWARE: [Self; 7] = [
        Self::Local,
        Self::LocalHeap,
        Self::Shm,
        Self::Cma,
        Self::OwnerCopies,
        Self::Strict,
        Self::Tcp,
    ];

    /// Which tests are of a leg, as arguments of the suite.
    fn filter(self) -> &'static [&'static str] {
        match self {
            // What is about one process alone is part of the first leg.
            Self::Local => &[
                "--skip",
                "::one_process_heap_memory",
                "--skip",
                "::two_processes_",
            ],
            Self::LocalHeap => &["::one_process_heap_memory"],
            Self::Shm => &["::two_processes_device_memory"],
            Self::Cma => &["::two_processes_heap_memory"],
            Self::OwnerCopies | Self::Strict | Self::Tcp => &["::two_processes_"],
            Self::Rxe0 => &[],
        }
    }

    /// What the device is told by the environment.
    fn environment(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::OwnerCopies => Some(("VERBS_SOFT_CMA", "0")),
            Self::Strict => Some(("VERBS_SOFT_STRICT", "1")),
            Self::Tcp => Some(("VERBS_SOFT_LISTEN", "0.0.0.0")),
            _ => None,
        }
    }

    fn title(self) -> String {
        let name = self.to_possible_value();
        name.map_or_else(String::new, |name| name.get_name().to_owned())
    }
}

impl Conformance {
    /// Runs the legs; the exit status is 1 if a test failed on any.
    pub fn run(self) -> Result<ExitCode> {
        let workspace = Workspace::locate()?;
        let names = if self.write {
            let all = LegName::SOFTWARE.into_iter().chain([LegName::Rxe0]);
            all.collect()
        } else if self.legs.is_empty() {
            LegName::SOFTWARE.to_vec()
        } else {
            self.legs
        };
        let mut on_software = None;
        let mut legs = Vec::new();
        for name in names {
            let verdicts = match name {
                LegName::Rxe0 => on_rxe0(&workspace)?,
                name => {
                    // Built once, for all legs.
                    let suite = match &mut on_software {
                        Some(suite) => suite,
                        none => none.insert(suite(&workspace, false)?),
                    };
                    on_soft0(&workspace, suite, name)?
                }
            };
            let leg = Leg {
                name: name.title(),
                verdicts,
            };
            println!("{:<12} {}", leg.name, leg.summary());
            for test in leg.failures() {
                println!("{:<12} failed: {test}", "");
            }
            legs.push(leg);
        }
        if self.write {
            let path = workspace.root.join("docs/conformance.md");
            fs::write(&path, record::render(&legs))
                .with_context(|| format!("cannot write {}", path.display()))?;
            println!("wrote {}", path.display());
        }
        let failed = legs.iter().any(|leg| leg.failures().next().is_some());
        Ok(ExitCode::from(u8::from(failed)))
    }
}

/// The executable of the suite.
fn suite(workspace: &Workspace, rdma_core: bool) -> Result<TestBinary> {
    let binaries = workspace.build_tests(&["verbs-sys"], rdma_core)?;
    let mut suites = binaries.into_iter();
    suites
        .find(|binary| binary.name == "conformance")
        .context("cargo built no conformance suite")
}

fn on_soft0(workspace: &Workspace, suite: &TestBinary, name: LegName) -> Result<Vec<Verdict>> {
    let sh = &workspace.shell;
    let executable = &suite.executable;
    let _directory = sh.push_dir(&suite.directory);
    let filter = name.filter();
    let hosts = match name {
        LegName::Tcp => Some(Hosts::new(workspace)?),
        _ => None,
    };
    let command = match &hosts {
        None => cmd!(sh, "{executable}"),
        Some(hosts) => {
            let network = hosts.first();
            cmd!(sh, "ip netns exec {network} {executable}")
                .env("VERBS_PEER_NETWORK", hosts.second())
        }
    };
    let output = command
        .arg("--show-output")
        .args(filter)
        .env("VERBS_DEVICE", "soft0")
        .envs(name.environment())
        .quiet()
        .ignore_status()
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    verdicts(&text, output.status.success())
}

fn on_rxe0(workspace: &Workspace) -> Result<Vec<Verdict>> {
    let suite = suite(workspace, true)?;
    let step = vm::Step {
        name: "conformance".into(),
        directory: suite.directory,
        command: vec![
            suite.executable.to_string_lossy().into_owned(),
            "--show-output".into(),
        ],
        limit: Duration::from_secs(20 * 60),
    };
    let (status, log) = vm::run_step(workspace, step)?;
    let text = fs::read(&log).with_context(|| format!("cannot read {}", log.display()))?;
    verdicts(&String::from_utf8_lossy(&text), status == 0)
}

/// What the output of a run says; an error where that is not how the run ended, as when the suite
/// went down in the middle.
fn verdicts(output: &str, succeeded: bool) -> Result<Vec<Verdict>> {
    let verdicts = parse(output);
    let passed = verdicts.iter().all(|verdict| verdict.passed);
    if verdicts.is_empty() || passed != succeeded {
        bail!("the suite did not come to its end; its output:\n{output}");
    }
    Ok(verdicts)
}

#[cfg(test)]
mod tests {
    use super::verdicts;

    #[test]
    fn a_suite_that_went_down_is_no_success() {
        let output = "test a::b ... ok\n";
        assert!(verdicts(output, true).is_ok());
        assert!(verdicts(output, false).is_err());
        assert!(verdicts("", true).is_err());
        assert!(verdicts("test a::b ... FAILED\n", false).is_ok());
    }
}
