//! `cargo xtask test`: every check that a machine with only a Rust toolchain can make.

use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use xshell::{Cmd, Shell, cmd};

use crate::workspace::{Workspace, features};

/// Arguments of `cargo xtask test`.
#[derive(Args)]
pub struct Test {
    /// Build with real devices (feature `rdma-core`) as well
    #[arg(long)]
    rdma_core: bool,
}

impl Test {
    /// Runs the steps in order and stops at the first that fails.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        let sh = &workspace.shell;
        require_component(sh, "fmt", "rustfmt")?;
        require_component(sh, "clippy", "clippy")?;

        let began = Instant::now();
        let steps = self.steps(&workspace);
        let count = steps.len();
        for (index, (name, command)) in steps.into_iter().enumerate() {
            let number = index + 1;
            eprintln!("== {name} ({number} of {count})");
            let shown = command.to_string();
            if let Err(error) = command.run() {
                bail!("step `{name}` failed ({error}); repeat it with: {shown}");
            }
        }
        let seconds = began.elapsed().as_secs();
        println!("all {count} steps passed in {seconds} s");
        Ok(())
    }

    fn steps<'a>(&self, workspace: &'a Workspace) -> Vec<(&'static str, Cmd<'a>)> {
        let sh = &workspace.shell;
        let features = || features(self.rdma_core);
        let lint = features();
        let doc = features();
        let test = features();
        let mut steps = vec![
            ("format", cmd!(sh, "cargo fmt --all --check")),
            (
                "lints",
                cmd!(
                    sh,
                    "cargo clippy --locked --workspace --all-targets {lint...} -- --deny warnings"
                ),
            ),
            (
                "docs",
                cmd!(sh, "cargo doc --locked --workspace --no-deps {doc...}")
                    .env("RUSTDOCFLAGS", "--deny warnings"),
            ),
            (
                "tests and doctests",
                cmd!(
                    sh,
                    "cargo test --locked --workspace --no-fail-fast {test...}"
                ),
            ),
        ];
        if !self.rdma_core {
            // `--cfg loom` rebuilds everything below mr-pool, so it has a folder of its own. Loom
            // tries every schedule: only optimised does it end in seconds.
            let target = workspace.target.join("loom");
            steps.push((
                "loom: every schedule of the free lists",
                cmd!(
                    sh,
                    "cargo test --locked --release --package mr-pool --lib --target-dir {target}"
                )
                .env("RUSTFLAGS", "--cfg loom"),
            ));
        }
        steps
    }
}

/// Fails with the command that installs a component the toolchain lacks.
fn require_component(sh: &Shell, subcommand: &str, component: &str) -> Result<()> {
    let probe = cmd!(sh, "cargo {subcommand} --version")
        .quiet()
        .ignore_stdout()
        .ignore_stderr();
    if probe.run().is_err() {
        bail!("`cargo {subcommand}` is missing; install it with: rustup component add {component}");
    }
    Ok(())
}
