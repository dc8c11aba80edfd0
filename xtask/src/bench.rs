//! `cargo xtask bench`: builds a release and runs the end-to-end benchmark.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use xshell::cmd;

use crate::workspace::Workspace;

/// Arguments of `cargo xtask bench`.
#[derive(Args)]
pub struct Bench {
    /// Measure for seconds rather than minutes: coarser figures
    #[arg(long)]
    quick: bool,
    /// The RDMA device; a real one makes the build use rdma-core [default: the first there is]
    #[arg(long, value_name = "NAME")]
    device: Option<String>,
    /// Where the report, its table and its picture go [default: bench-out in the workspace]
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
        let device = self.device.as_deref();
        // Software devices are part of every build; any other needs libibverbs to be reached.
        let rdma_core = device.is_some_and(|name| !name.starts_with("soft"));
        let bench = workspace.build_bench(rdma_core)?;

        let sh = &workspace.shell;
        let quick = self.quick.then_some("--quick");
        let device = device.into_iter().flat_map(|name| ["--device", name]);
        cmd!(sh, "{bench} run --out {out} {quick...} {device...}").run()?;
        Ok(())
    }
}
