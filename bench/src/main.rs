//! The end-to-end benchmark of the store.
#![forbid(unsafe_code)]

use std::env;
use std::ffi::OsString;
use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context, Result};
use bench::machine::occupy;
use bench::run::{Extent, Options, run, write};
use bench::{alone, client, device, hosts, process, server, table};
use clap::{Args, Parser, Subcommand, ValueEnum};
use kvstore::{ClientConfig, Memory, ServerConfig};
use verbs_sys::find_device;

/// Measures the store: put and get, registering memory per operation and pooled.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Measure, print the tables, write report.json and throughput.svg.
    Run(Run),
    /// Measure the software device alone, beside UCX; print a table, write device.json.
    Device(Device),
    /// Measure the software device over TCP between two hosts, print a table, write hosts.json.
    Hosts(Hosts),
    /// The other host that `hosts` drives through standard input and output.
    #[command(hide = true)]
    Remote(Remote),
    /// A server that `run` drives through standard input and output.
    #[command(hide = true)]
    Server(Role),
    /// A client that `run` drives through standard input and output.
    #[command(hide = true)]
    Client(Role),
    /// Another program, which does not outlive who starts this.
    #[command(hide = true)]
    Follow(Follow),
    /// Memory that `run` reads and writes with the device alone.
    #[command(hide = true)]
    Target(Place),
}

#[derive(Args)]
struct Run {
    /// Where report.json and throughput.svg go; made if need be.
    #[arg(long)]
    out: PathBuf,
    /// Fewer rounds and shorter measurements.
    #[arg(long)]
    quick: bool,
    /// Name of the device; by default the environment's VERBS_DEVICE, else the first active real
    /// one, else the software device.
    #[arg(long)]
    device: Option<String>,
}

#[derive(Args)]
struct Device {
    /// Where device.json goes; made if need be.
    #[arg(long)]
    out: PathBuf,
    /// Fewer rounds and shorter measurements.
    #[arg(long)]
    quick: bool,
    /// The program that measures the device: verbs-sys/examples/perf.
    #[arg(long)]
    perf: PathBuf,
    /// UCX's program.
    #[arg(long, hide = true, default_value = "ucx_perftest")]
    ucx: PathBuf,
    /// One round, as short as can be.
    #[arg(long, hide = true)]
    once: bool,
}

impl Device {
    fn run(self) -> Result<()> {
        let mut extent = alone::Extent::new(self.quick);
        if self.once {
            extent.rounds = 1;
            extent.budget = Duration::from_millis(1);
            extent.ucx_runs = 1;
            extent.patience = Duration::ZERO;
        }
        let report = alone::run(&alone::Options {
            program: env::current_exe().context("cannot find this program's own file")?,
            perf: self.perf,
            ucx: self.ucx,
            extent,
        })?;
        alone::write(&report, &self.out)?;
        println!("{}", table::device(&report));
        println!("device.json is in {}", self.out.display());
        Ok(())
    }
}

#[derive(Args)]
struct Follow {
    program: PathBuf,
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    arguments: Vec<OsString>,
}

#[derive(Args)]
struct Hosts {
    /// Where hosts.json goes; made if need be.
    #[arg(long)]
    out: PathBuf,
    /// Shorter measurements.
    #[arg(long)]
    quick: bool,
    /// The network namespace of the other host, as `ip netns` knows it.
    #[arg(long)]
    network: String,
    /// The other host's address.
    #[arg(long)]
    address: IpAddr,
}

#[derive(Args)]
struct Remote {
    #[arg(long)]
    device: String,
    #[arg(long)]
    address: IpAddr,
}

impl Hosts {
    fn run(self) -> Result<()> {
        let lines = hosts::run(&hosts::Options {
            program: env::current_exe().context("cannot find this program's own file")?,
            device: "soft0".into(),
            network: self.network,
            address: self.address,
            budget: Duration::from_secs(if self.quick { 3 } else { 30 }),
        })?;
        hosts::write(&lines, &self.out)?;
        println!("{}", table::hosts(&lines));
        println!("hosts.json is in {}", self.out.display());
        Ok(())
    }
}

/// Where a role runs.
#[derive(Args)]
struct Place {
    #[arg(long)]
    device: String,
    #[arg(long)]
    processor: Option<usize>,
}

impl Place {
    fn take(self) -> String {
        occupy(self.processor);
        self.device
    }
}

#[derive(Args)]
struct Role {
    #[command(flatten)]
    place: Place,
    #[arg(long)]
    wait: WaitName,
    #[arg(long)]
    memory: MemoryName,
}

#[derive(Clone, Copy, ValueEnum)]
enum WaitName {
    Poll,
    Event,
}

#[derive(Clone, Copy, ValueEnum)]
enum MemoryName {
    Pooled,
    PerOperation,
}

impl Role {
    fn wait(&self) -> kvstore::Wait {
        match self.wait {
            WaitName::Poll => kvstore::Wait::Poll,
            WaitName::Event => kvstore::Wait::Event,
        }
    }

    fn server(self) -> ServerConfig {
        let mut config = ServerConfig::default();
        config.wait = self.wait();
        config.device = Some(self.place.take());
        config
    }

    fn client(self) -> ClientConfig {
        let mut config = ClientConfig::default();
        config.wait = self.wait();
        config.memory = match self.memory {
            MemoryName::Pooled => Memory::Pooled,
            MemoryName::PerOperation => Memory::PerOperation,
        };
        config.device = Some(self.place.take());
        config
    }
}

impl Run {
    fn run(self) -> Result<()> {
        // Before minutes of measuring, not after.
        let device = find_device(self.device.as_deref())?;
        fs::create_dir_all(&self.out)
            .with_context(|| format!("cannot make the directory {}", self.out.display()))?;
        let probe = self.out.join("report.json.part");
        fs::write(&probe, "").with_context(|| format!("cannot write {}", probe.display()))?;
        let report = run(&Options {
            program: env::current_exe().context("cannot find this program's own file")?,
            device: device.name(),
            software: device.is_software(),
            extent: Extent::new(self.quick, device.is_software()),
        })?;
        write(&report, &self.out)?;
        println!("{}", table::render(&report));
        println!(
            "report.json and throughput.svg are in {}",
            self.out.display()
        );
        Ok(())
    }
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Run(run) => run.run(),
        Command::Device(device) => device.run(),
        Command::Follow(other) => process::follow(&other.program, &other.arguments),
        Command::Hosts(hosts) => hosts.run(),
        Command::Remote(remote) => hosts::remote(&remote.device, remote.address),
        Command::Server(role) => server::serve(&role.server()),
        Command::Client(role) => client::run(role.client()),
        Command::Target(target) => device::target(&target.take()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("bench: {error:#}");
            ExitCode::FAILURE
        }
    }
}
