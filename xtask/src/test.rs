//! `cargo xtask test`: every check that a machine with only a Rust toolchain can make.

use std::time::Instant;

use anyhow::{Result, bail};
use clap::Args;
use xshell::{Cmd, Shell, cmd};

use crate::hosts::Hosts;
use crate::workspace::{TestBinary, Workspace, features};

/// Arguments of `cargo xtask test`.
#[derive(Args)]
pub struct Test {
    /// Build with real devices (feature `rdma-core`) as well
    #[arg(long)]
    rdma_core: bool,
    /// Instead, run the store's tests with the server on another host: a network namespace; needs root
    #[arg(long, conflicts_with = "rdma_core")]
    between_hosts: bool,
}

impl Test {
    /// Runs the steps in order and stops at the first that fails.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        if self.between_hosts {
            return between_hosts(&workspace);
        }
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
            steps.push((
                "tests of the C library",
                cmd!(
                    sh,
                    "cargo test --locked --package verbs-sys --features drop-in --lib drop_in"
                ),
            ));
            // `--cfg loom` rebuilds everything below mr-pool, so it has a folder of its own. Loom
            // tries every schedule: only optimised does it end in seconds.
            let target = workspace.target.join("loom");
            for (name, what) in [
                (
                    "loom: every schedule of the locks of post and poll",
                    ["verbs-sys", "--test=schedules"],
                ),
                (
                    "loom: every schedule of the free lists",
                    ["mr-pool", "--lib"],
                ),
            ] {
                let step = cmd!(
                    sh,
                    "cargo test --locked --release --target-dir {target} --package {what...}"
                );
                steps.push((name, step.env("RUSTFLAGS", "--cfg loom")));
            }
        }
        steps
    }
}

/// Runs the tests of the store that start servers, with each server in another network namespace.
fn between_hosts(workspace: &Workspace) -> Result<()> {
    let sh = &workspace.shell;
    let binaries = workspace.build_tests(&["kvstore"], false)?;
    let hosts = Hosts::new(workspace)?;
    let (here, there) = (hosts.first(), hosts.second());
    let wanted = |binary: &&TestBinary| STORE_TESTS.contains(&binary.name.as_str());
    let mut failed = Vec::new();
    for binary in binaries.iter().filter(wanted) {
        let executable = &binary.executable;
        let _directory = sh.push_dir(&binary.directory);
        // One is about two servers on one host.
        let passed = cmd!(
            sh,
            "ip netns exec {here} {executable} --skip an_address_in_use"
        )
        .env("VERBS_DEVICE", "soft0")
        .env("VERBS_SOFT_LISTEN", "0.0.0.0")
        .env("KVSTORE_TEST_NETWORK", there)
        .env("KVSTORE_TEST_ADDRESS", Hosts::ADDRESSES[1])
        .run();
        if passed.is_err() {
            failed.push(binary.name.as_str());
        }
    }
    if !failed.is_empty() {
        bail!("between hosts these failed: {}", failed.join(", "));
    }
    println!("the store's tests passed between two hosts");
    Ok(())
}

/// Those that start servers.
const STORE_TESTS: [&str; 4] = ["cli", "values", "crash", "linearizable"];

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
