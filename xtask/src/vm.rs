//! `cargo xtask vm`: tests on the Linux kernel's own RDMA device, `rdma_rxe`, in an emulated machine.
//!
//! The guest is a stock Debian kernel over this machine's file system, which it sees read-only; only
//! the results folder is shared for writing. Everything it needs lies in `target/vm`: nothing is
//! installed, no rights are needed, and KVM is not used, so it runs wherever QEMU does.

mod beside;
mod emulator;
mod guest;
mod kernel;
mod packages;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Args;

use self::emulator::Machine;
use self::guest::Outcome;
pub use self::guest::Step;
use crate::workspace::Workspace;

/// Arguments of `cargo xtask vm`.
#[derive(Args)]
pub struct Vm {
    /// Where the guest's results go [default: vm/results in the target directory]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// The guest's memory
    #[arg(long, value_name = "SIZE", default_value = "2G")]
    memory: String,
    /// The guest's processors
    #[arg(long, value_name = "N", default_value_t = 2)]
    cpus: u32,
    /// Minutes its work may take before the guest is stopped
    #[arg(long, value_name = "MINUTES", default_value_t = 60)]
    timeout: u64,
    /// Print the Debian packages this command needs, one a line, and do nothing else
    #[arg(long)]
    packages: bool,
    /// Fetch the kernel and the launcher if they are not there, and do nothing else
    #[arg(long)]
    prepare: bool,
    /// Run only what is about the drop-in library: programs on the guest's device and on `soft0`, listed together
    #[arg(long)]
    beside: bool,
    /// A command to run in the guest, with its arguments; without one: the verbs conformance tests,
    /// the store's tests, programs on the drop-in library and the quick benchmark
    #[arg(last = true, conflicts_with = "beside", value_name = "COMMAND")]
    command: Vec<String>,
}

impl Vm {
    /// Prepares and boots the guest; the exit status is that of what ran in it.
    pub fn run(self) -> Result<ExitCode> {
        if self.packages {
            packages::print();
            return Ok(ExitCode::SUCCESS);
        }
        let workspace = Workspace::locate()?;
        packages::check(&workspace.shell, self.command.is_empty() && !self.prepare)?;
        let bed = Bed::prepare(&workspace)?;
        if self.prepare {
            return Ok(ExitCode::SUCCESS);
        }

        let results = match &self.out {
            Some(out) => Workspace::absolute(out)?,
            None => results(&workspace),
        };
        empty(&results)?;
        let limit = Duration::from_secs(self.timeout * 60);
        let steps = if self.beside {
            vec![beside::step(&workspace)?]
        } else if self.command.is_empty() {
            default_steps(&workspace, &results)?
        } else {
            vec![Step {
                name: "command".into(),
                directory: std::env::current_dir().context("find the current folder")?,
                command: self.command,
                limit,
            }]
        };
        let size = (self.memory, self.cpus);
        let outcomes = bed.run(&workspace, &results, &steps, size, limit)?;
        report(&outcomes);
        let failed = outcomes.iter().find(|outcome| outcome.status != 0);
        Ok(ExitCode::from(failed.map_or(0, |outcome| outcome.status)))
    }
}

/// Where [`run_step`] leaves what ran in the guest, which writes there alone.
pub fn results(workspace: &Workspace) -> PathBuf {
    workspace.target.join("vm").join("results")
}

/// Runs one command in the guest; returns its exit status and the path of its log.
pub fn run_step(workspace: &Workspace, step: Step) -> Result<(u8, PathBuf)> {
    packages::check(&workspace.shell, true)?;
    let bed = Bed::prepare(workspace)?;
    let results = results(workspace);
    empty(&results)?;
    let (log, limit) = (results.join(step.log()), step.limit);
    let outcomes = bed.run(workspace, &results, &[step], ("2G".into(), 2), limit)?;
    let outcome = outcomes.first().context("the guest ran nothing")?;
    Ok((outcome.status, log))
}

/// What a guest is made of.
struct Bed {
    folder: PathBuf,
    kernel: kernel::Kernel,
    launcher: PathBuf,
}

impl Bed {
    fn prepare(workspace: &Workspace) -> Result<Self> {
        let sh = &workspace.shell;
        let folder = workspace.target.join("vm");
        fs::create_dir_all(&folder).with_context(|| format!("create {}", folder.display()))?;
        Ok(Self {
            kernel: kernel::unpack(sh, &folder)?,
            launcher: emulator::install_launcher(sh, &folder)?,
            folder,
        })
    }

    fn run(
        self,
        workspace: &Workspace,
        results: &Path,
        steps: &[Step],
        (memory, cpus): (String, u32),
        limit: Duration,
    ) -> Result<Vec<Outcome>> {
        guest::write_script(results, steps)?;
        eprintln!(
            "booting {} in an emulator; its results: {}",
            self.kernel.name,
            results.display()
        );
        let machine = Machine {
            launcher: self.launcher,
            kernel: self.kernel.image,
            memory,
            cpus,
            home: self.folder.join("home"),
        };
        let status = machine.run(&workspace.shell, results, steps, limit)?;
        guest::read_outcomes(results, status)
    }
}

/// What runs in the guest when the user names nothing: built here, since the guest is ten times
/// slower.
fn default_steps(workspace: &Workspace, results: &Path) -> Result<Vec<Step>> {
    let bench = workspace.build_bench(true)?;
    let tests = workspace.build_tests(&["verbs-sys", "kvstore"], true)?;

    let mut steps: Vec<Step> = tests
        .into_iter()
        // Of the lowest crate, only the conformance tests are about more than the software device.
        .filter(|test| test.package != "verbs-sys" || test.name.starts_with("conformance"))
        .map(|test| Step {
            name: format!("{}-{}", test.package, test.name),
            directory: test.directory,
            command: vec![test.executable.to_string_lossy().into_owned()],
            limit: Duration::from_secs(15 * 60),
        })
        .collect();
    steps.sort_by_key(|step| !step.name.contains("conformance"));

    steps.push(beside::step(workspace)?);
    let bench = bench.to_string_lossy();
    let out = results.join("bench");
    let out = out.to_string_lossy();
    let command = [
        &bench,
        "run",
        "--quick",
        "--device",
        guest::DEVICE,
        "--out",
        &out,
    ];
    steps.push(Step {
        name: "bench".into(),
        directory: workspace.root.clone(),
        command: command.map(str::to_owned).to_vec(),
        limit: Duration::from_secs(15 * 60),
    });
    Ok(steps)
}

/// Makes `results` an empty folder, and refuses to empty one that a run did not write.
fn empty(results: &Path) -> Result<()> {
    if results.join(guest::SCRIPT).exists() {
        fs::remove_dir_all(results).with_context(|| format!("empty {}", results.display()))?;
    }
    fs::create_dir_all(results).with_context(|| format!("create {}", results.display()))?;
    anyhow::ensure!(
        fs::read_dir(results)?.next().is_none(),
        "{} holds other files; name a new folder with --out",
        results.display()
    );
    Ok(())
}

fn report(outcomes: &[Outcome]) {
    println!();
    for outcome in outcomes {
        let verdict = match outcome.status {
            0 => "passed".to_owned(),
            124 | 137 => "stopped: it took too long".to_owned(),
            status => format!("failed with exit status {status}"),
        };
        println!("{:<40} {verdict} ({} s)", outcome.name, outcome.seconds);
    }
}
