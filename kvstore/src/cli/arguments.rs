//! What the command line takes.

use std::ffi::OsString;
use std::net::{SocketAddr, ToSocketAddrs};
use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Parser, Subcommand, ValueEnum};
use kvstore::{ClientConfig, ServerConfig, Wait};

/// Where a server listens and a client looks for one, unless told otherwise.
const DEFAULT_ADDRESS: &str = "127.0.0.1:7411";

/// Put and get over registered memory.
#[derive(Debug, Parser)]
#[command(name = "kvstore", version, arg_required_else_help = true)]
pub struct Arguments {
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run a server until Ctrl-C
    Serve(Serve),
    /// Store a value
    Put(Put),
    /// Write a value to stdout or a file; fails if there is no such key
    Get(Get),
    /// Remove a key; fails if there is none
    Del(Del),
    /// Print what the server counts, one name and figure a line
    Stat(Connection),
    /// Store every regular file under a directory, its relative path as key, from several processes
    Load(Load),
    /// One process of `load`: takes relative paths from stdin, each ended by a zero byte
    #[command(hide = true)]
    LoadWorker(LoadWorker),
}

/// How a side waits for completions.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub enum WaitArgument {
    /// Spin: shortest latency, a whole core
    Poll,
    /// Sleep until woken: no CPU while idle
    Event,
}

impl From<WaitArgument> for Wait {
    fn from(argument: WaitArgument) -> Self {
        match argument {
            WaitArgument::Poll => Self::Poll,
            WaitArgument::Event => Self::Event,
        }
    }
}

/// Options of `serve`.
#[derive(Args, Debug)]
pub struct Serve {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = DEFAULT_ADDRESS, value_parser = address)]
    pub listen: SocketAddr,
    /// RDMA device [default: VERBS_DEVICE, else the first active one, else soft0]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// How the server waits for requests
    #[arg(long, value_enum, default_value = "event")]
    pub wait: WaitArgument,
    /// Ceiling on memory for values, in bytes; KiB, MiB and GiB are understood
    #[arg(long, value_name = "BYTES", default_value = "4GiB", value_parser = bytes)]
    pub memory: u64,
    /// Threads that serve requests
    #[arg(long, value_name = "N", default_value = "1")]
    pub workers: NonZeroUsize,
}

impl Serve {
    pub fn config(&self) -> ServerConfig {
        let mut config = ServerConfig::default();
        config.device.clone_from(&self.device);
        config.wait = self.wait.into();
        config.memory = self.memory;
        config.workers = self.workers.get();
        config
    }
}

/// How a client reaches its server.
#[derive(Args, Clone, Debug)]
pub struct Connection {
    /// The server's address
    #[arg(long, value_name = "HOST:PORT", env = "KVSTORE_SERVER", default_value = DEFAULT_ADDRESS, value_parser = address)]
    pub server: SocketAddr,
    /// RDMA device [default: VERBS_DEVICE, else the first active one, else soft0]
    #[arg(long, value_name = "NAME")]
    pub device: Option<String>,
    /// How the client waits for replies
    #[arg(long, value_enum, default_value = "event")]
    pub wait: WaitArgument,
    /// Longest that one operation may take, in seconds
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = seconds)]
    pub timeout: Duration,
}

impl Connection {
    pub fn config(&self) -> ClientConfig {
        let mut config = ClientConfig::default();
        config.device.clone_from(&self.device);
        config.wait = self.wait.into();
        config.timeout = self.timeout;
        config
    }
}

/// Options of `put`.
#[derive(Args, Debug)]
pub struct Put {
    #[command(flatten)]
    pub connection: Connection,
    /// The key
    pub key: OsString,
    /// The value [default: stdin]
    #[arg(conflicts_with = "file")]
    pub value: Option<OsString>,
    /// Take the value from a file
    #[arg(long, value_name = "PATH")]
    pub file: Option<PathBuf>,
}

/// Options of `get`.
#[derive(Args, Debug)]
pub struct Get {
    #[command(flatten)]
    pub connection: Connection,
    /// The key
    pub key: OsString,
    /// Write the value to a file [default: stdout]
    #[arg(long, short, value_name = "PATH")]
    pub output: Option<PathBuf>,
}

/// Options of `del`.
#[derive(Args, Debug)]
pub struct Del {
    #[command(flatten)]
    pub connection: Connection,
    /// The key
    pub key: OsString,
}

/// Options of `load`.
#[derive(Args, Debug)]
pub struct Load {
    #[command(flatten)]
    pub connection: Connection,
    /// The directory
    pub directory: PathBuf,
    /// Store nothing: read every file's value back and compare it byte for byte
    #[arg(long)]
    pub verify: bool,
    /// Client processes
    #[arg(long, value_name = "N", default_value = "4")]
    pub processes: NonZeroUsize,
}

/// Options of `load-worker`.
#[derive(Args, Debug)]
pub struct LoadWorker {
    #[command(flatten)]
    pub connection: Connection,
    /// The directory that the paths are relative to
    pub directory: PathBuf,
    /// Compare instead of store
    #[arg(long)]
    pub verify: bool,
}

fn address(text: &str) -> Result<SocketAddr, String> {
    text.to_socket_addrs()
        .map_err(|error| format!("{error}; expected HOST:PORT"))?
        .next()
        .ok_or_else(|| "the name has no address".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| !c.is_ascii_digit());
    let number: u64 = digits
        .parse()
        .map_err(|error| format!("{error}; expected bytes, such as 4GiB"))?;
    let shift = match &text[digits.len()..] {
        "" | "B" => 0,
        "K" | "KiB" => 10,
        "M" | "MiB" => 20,
        "G" | "GiB" => 30,
        unit => return Err(format!("unknown unit {unit:?}; use KiB, MiB or GiB")),
    };
    number
        .checked_mul(1 << shift)
        .filter(|&bytes| bytes > 0)
        .ok_or_else(|| "out of range".to_owned())
}

fn seconds(text: &str) -> Result<Duration, String> {
    let seconds: f64 = text.parse().map_err(|error| format!("{error}"))?;
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err("expected a positive number of seconds".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        <Arguments as clap::CommandFactory>::command().debug_assert();
    }

    #[test]
    fn bytes_have_units() {
        assert_eq!(bytes("17"), Ok(17));
        assert_eq!(bytes("4GiB"), Ok(4 << 30));
        assert_eq!(bytes("3K"), Ok(3 << 10));
        for wrong in ["", "GiB", "4 GiB", "4TB", "0", "99999999999G", "-1"] {
            assert!(bytes(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn times_are_positive() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        for wrong in ["0", "-1", "nan", "inf", "x", "1e300"] {
            assert!(seconds(wrong).is_err(), "{wrong}");
        }
    }
}
