//! `cargo xtask bench`: builds a release and runs one of the benchmarks.

use std::path::{Path, PathBuf};
use std::{env, fs};

use anyhow::{Result, ensure};
use clap::{Args, ValueEnum};
use xshell::cmd;

use crate::hosts::Hosts;
use crate::workspace::Workspace;

/// The device of every build.
const SOFTWARE: &str = "soft0";

/// The devices there are: those that the kernel has, and our own.
fn kernel_devices() -> Vec<String> {
    let entries = fs::read_dir("/sys/class/infiniband");
    let names = entries.into_iter().flatten().flatten();
    names
        .filter_map(|entry| entry.file_name().into_string().ok())
        .chain([SOFTWARE.to_owned()])
        .collect()
}

/// What there is to measure.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Section {
    /// Put and get between two processes
    Store,
    /// The software device alone on this host, beside UCX (Debian's ucx-utils) where it is installed
    Device,
    /// The software device over TCP between two hosts (network namespaces), beside plain TCP; needs root
    Hosts,
}

/// Arguments of `cargo xtask bench`.
#[derive(Args)]
pub struct Bench {
    /// Measure for seconds rather than minutes: coarser figures
    #[arg(long)]
    quick: bool,
    /// What to measure
    #[arg(long, value_enum, default_value_t = Section::Store)]
    section: Section,
    /// The RDMA device under the store; a real one makes the build use rdma-core [default: VERBS_DEVICE, else soft0]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Where the report and its picture go [default: bench-out in the workspace]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

impl Bench {
    /// Builds and measures.
    pub fn run(self) -> Result<()> {
        let workspace = Workspace::locate()?;
        let out = match &self.out {
            Some(out) => Workspace::absolute(out)?,
            None => workspace.root.join("bench-out"),
        };
        ensure!(
            self.section == Section::Store || self.device.is_none(),
            "--device is for the section store: the others measure {SOFTWARE}"
        );
        match self.section {
            Section::Store => self.store(&workspace, &out),
            Section::Device => self.alone(&workspace, &out),
            Section::Hosts => self.hosts(&workspace, &out),
        }
    }

    /// Between two hosts.
    fn hosts(&self, workspace: &Workspace, out: &Path) -> Result<()> {
        let bench = workspace.build_bench(false)?;
        let hosts = Hosts::new(workspace)?;
        let (here, there) = (hosts.first(), hosts.second());
        let address = Hosts::ADDRESSES[1];
        let quick = self.quick.then_some("--quick");
        let sh = &workspace.shell;
        cmd!(sh, "ip netns exec {here} {bench} hosts --out {out} --network {there} --address {address} {quick...}")
            .env("VERBS_SOFT_LISTEN", "0.0.0.0")
            .run()?;
        Ok(())
    }

    /// The software device by itself.
    fn alone(&self, workspace: &Workspace, out: &Path) -> Result<()> {
        let bench = workspace.build_bench(false)?;
        let sh = &workspace.shell;
        cmd!(
            sh,
            "cargo build --locked --release --package verbs-sys --example perf"
        )
        .run()?;
        let perf = workspace.target.join("release/examples/perf");
        let quick = self.quick.then_some("--quick");
        cmd!(sh, "{bench} device --perf {perf} --out {out} {quick...}").run()?;
        Ok(())
    }

    /// The store, on any device.
    fn store(&self, workspace: &Workspace, out: &Path) -> Result<()> {
        let named = self
            .device
            .clone()
            .or_else(|| env::var("VERBS_DEVICE").ok());
        let device = named.as_deref().filter(|name| !name.is_empty());
        // The software device is part of every build; any other needs libibverbs to be reached.
        let rdma_core = device.is_some_and(|name| name != SOFTWARE);
        if let Some(name) = device.filter(|_| rdma_core) {
            // Before minutes of building, not after.
            let known = kernel_devices();
            ensure!(
                known.iter().any(|known| known == name),
                "there is no device {name:?}; there are: {}",
                known.join(", ")
            );
        }
        let bench = workspace.build_bench(rdma_core)?;

        let sh = &workspace.shell;
        let quick = self.quick.then_some("--quick");
        let device = device.into_iter().flat_map(|name| ["--device", name]);
        cmd!(sh, "{bench} run --out {out} {quick...} {device...}").run()?;
        Ok(())
    }
}
