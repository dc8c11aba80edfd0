//! The project's one driver: `cargo xtask asan | bench | conformance | differential | dist | dropin |
//! faults | fuzz | run | test | vm`.
//!
//! Each command is a file; this one only lists them. The driver starts cargo and other programs and
//! depends on none of the product's crates, so it builds in seconds and works when they do not.

#![forbid(unsafe_code)]

mod asan;
mod bench;
mod conformance;
mod differential;
mod dist;
mod dropin;
mod faults;
mod fuzz;
mod hosts;
mod nightly;
mod test;
mod vm;
mod workspace;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Drives the build, the tests, the benchmark and the test bed.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run the libraries' tests under AddressSanitizer (with the nightly toolchain)
    Asan(asan::Asan),
    /// Build a release and measure: put and get between two processes, or the software device
    Bench(bench::Bench),
    /// Run the verbs conformance suite on every kind of link, or write its record
    Conformance(conformance::Conformance),
    /// Run random verbs programs on soft0 and on the kernel's device, and compare
    Differential(differential::Differential),
    /// Build the software device as libibverbs.so.1, and librdmacm.so.1, for programs that were built against rdma-core
    Dist(dist::Dist),
    /// Run programs of others, unmodified, on the software device
    Dropin(dropin::Dropin),
    /// Let strangers, liars, the dead and broken cables at the software device; needs root
    Faults(faults::Faults),
    /// Fuzz every parser of bytes that a peer sends (with the nightly toolchain)
    Fuzz(fuzz::Fuzz),
    /// Run a program on the software device, by the libraries that `dist` builds
    Run(dist::Run),
    /// Check format, lints and docs, and run every test
    Test(test::Test),
    /// Boot a stock kernel in an emulator and run tests there on its software RDMA device `rxe0`
    Vm(vm::Vm),
}

fn main() -> ExitCode {
    let result = match Cli::parse().command {
        Command::Asan(asan) => asan.run().map(|()| ExitCode::SUCCESS),
        Command::Bench(bench) => bench.run().map(|()| ExitCode::SUCCESS),
        Command::Conformance(conformance) => conformance.run(),
        Command::Differential(differential) => differential.run(),
        Command::Dist(dist) => dist.run(),
        Command::Dropin(dropin) => dropin.run(),
        Command::Faults(faults) => faults.run(),
        Command::Fuzz(fuzz) => fuzz.run(),
        Command::Run(run) => run.run(),
        Command::Test(test) => test.run().map(|()| ExitCode::SUCCESS),
        Command::Vm(vm) => vm.run(),
    };
    result.unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
