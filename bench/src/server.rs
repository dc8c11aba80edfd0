//! The server's role: a store in a process of its own.

use std::net::{Ipv4Addr, SocketAddr};
use std::thread;

use anyhow::{Context, Result, anyhow};
use kvstore::{Server, ServerConfig};
use serde::{Deserialize, Serialize};

use crate::measure::process_cpu;
use crate::process::answer;

/// What the driver asks of a server.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Command {
    /// Where clients connect; [`Answer::Address`].
    Address,
    /// CPU time so far; [`Answer::Cpu`].
    Cpu,
}

/// What a server answers.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub enum Answer {
    /// Where clients connect.
    Address(SocketAddr),
    /// CPU seconds, user and system, all threads.
    Cpu(f64),
}

/// Serves on a free port of the loopback address until standard input ends.
///
/// # Errors
/// The server cannot be started, or fails.
pub fn serve(config: &ServerConfig) -> Result<()> {
    let server = Server::bind((Ipv4Addr::LOCALHOST, 0).into(), config)?;
    let address = server.local_addr();
    let shutdown = server.shutdown_handle();
    let running = thread::Builder::new()
        .name("server".to_owned())
        .spawn(move || server.run())
        .context("cannot start the server's thread")?;
    let answered = answer(|command| {
        Ok(match command {
            Command::Address => Answer::Address(address),
            Command::Cpu => Answer::Cpu(process_cpu().as_secs_f64()),
        })
    });
    shutdown.shutdown();
    running
        .join()
        .map_err(|_| anyhow!("the server's thread panicked"))??;
    answered
}
