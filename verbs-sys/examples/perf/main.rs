//! What the device alone costs, call by call, on the raw verbs: one-sided operations, messages,
//! deregistration, many queue pairs. It starts the peer, a process of its own, and prints one JSON object
//! of figures; each is measured in turn with what it is to be compared with.
//!
//! ```text
//! cargo run --release -p verbs-sys --example perf -- write --size 8
//! ```
//!
//! `cargo xtask bench --section device` runs it beside UCX's perftest.

mod endpoint;
mod many;
mod messages;
mod one_sided;
mod peer;
mod prepared;
mod revocation;
mod rounds;
mod shared;

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;

use clap::{Parser, Subcommand};

use crate::one_sided::Direction;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Medians by name; the name ends in the unit.
type Figures = BTreeMap<&'static str, f64>;

/// Measures the software device between two processes of this host.
#[derive(Parser)]
struct Cli {
    /// Milliseconds of measuring
    #[arg(long, global = true, default_value_t = 300)]
    ms: u64,
    #[command(subcommand)]
    test: Test,
}

#[derive(Subcommand)]
enum Test {
    /// Signaled WRITEs, post to polled completion, one at a time; beside plain copies between the same kinds of mapping
    Write(Single),
    /// Signaled READs, in the same way
    Read(Single),
    /// WRITEs of which only the last of each chain is signaled
    Chain {
        #[arg(long, default_value_t = 64)]
        size: usize,
        #[arg(long, default_value_t = 16)]
        length: usize,
    },
    /// WRITEs at offsets that differ from the source's alignment; beside aligned ones
    Skew(Bytes),
    /// WRITEs into heap memory; beside bare process_vm_writev
    Heap(Bytes),
    /// WRITEs of a line that the peer reads at once; beside plain copies that it reads at once
    Consumed {
        #[arg(long, default_value_t = 1)]
        length: usize,
    },
    /// WRITEs back and forth, half a round trip; beside a bare cache line's
    PutLatency,
    /// SENDs back and forth, both polling; beside a bare cache line's round trip
    Send {
        #[arg(long, default_value_t = 64)]
        size: usize,
    },
    /// SENDs back and forth, both asleep; beside a bare eventfd's round trip
    SendAsleep {
        #[arg(long, default_value_t = 64)]
        size: usize,
    },
    /// 16 WRITEs of 64 B: a chain laid out once, beside one built for each post, and single posts
    Prepared,
    /// Deregistration while so many queue pairs are connected
    Deregister {
        #[arg(long, default_value_t = 64)]
        qps: usize,
    },
    /// Memory of each of so many queue pairs, and what they cost one that is busy
    Many {
        #[arg(long, default_value_t = 1000)]
        qps: usize,
    },
    /// The other process
    #[command(hide = true)]
    Peer(peer::Inherited),
}

#[derive(clap::Args)]
struct Single {
    #[command(flatten)]
    bytes: Bytes,
    /// Go through so many bytes in turn, rather than use the same again and again
    #[arg(long, value_name = "BYTES", default_value_t = 0)]
    over: usize,
}

#[derive(clap::Args)]
struct Bytes {
    #[arg(long, default_value_t = 8)]
    size: usize,
}

fn run(cli: &Cli) -> Result<Figures> {
    let budget = std::time::Duration::from_millis(cli.ms);
    match &cli.test {
        Test::Write(single) => {
            one_sided::single(Direction::Write, single.bytes.size, single.over, budget)
        }
        Test::Read(single) => {
            one_sided::single(Direction::Read, single.bytes.size, single.over, budget)
        }
        Test::Chain { size, length } => one_sided::chain(*size, *length, budget),
        Test::Skew(bytes) => one_sided::skew(bytes.size, budget),
        Test::Heap(bytes) => one_sided::heap(bytes.size, budget),
        Test::Consumed { length } => one_sided::consumed(*length, budget),
        Test::PutLatency => one_sided::put_latency(budget),
        Test::Send { size } => messages::polling(*size, budget),
        Test::SendAsleep { size } => messages::asleep(*size, budget),
        Test::Prepared => prepared::prepared(budget),
        Test::Deregister { qps } => revocation::deregister(*qps, budget),
        Test::Many { qps } => many::many(*qps, budget),
        Test::Peer(inherited) => peer::serve(inherited).map(|()| Figures::new()),
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let printed = run(&cli).and_then(|figures| {
        if !matches!(cli.test, Test::Peer(_)) {
            println!("{}", serde_json::to_string(&figures)?);
        }
        Ok(())
    });
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("perf: {error}");
            ExitCode::FAILURE
        }
    }
}
