//! The command line: what the library does, for the shell. Only this part prints and decides exit statuses.

mod arguments;
mod commands;
mod load;

use std::io::{self, IsTerminal};

use anyhow::Result;
use tracing_subscriber::EnvFilter;

pub use arguments::Arguments;
use arguments::Command;

/// Sends the log to stderr. `RUST_LOG` chooses what it holds; by default a server tells what it does, and a client
/// only what is wrong.
pub fn start_log(arguments: &Arguments) {
    let level = match arguments.command {
        Command::Serve(_) => "info",
        _ => "warn",
    };
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(level));
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(io::stderr().is_terminal())
        .init();
}

/// Carries out one command.
pub fn run(arguments: Arguments) -> Result<()> {
    match arguments.command {
        Command::Serve(arguments) => commands::serve(&arguments),
        Command::Put(arguments) => commands::put(&arguments),
        Command::Get(arguments) => commands::get(&arguments),
        Command::Del(arguments) => commands::del(&arguments),
        Command::Stat(connection) => commands::stat(&connection),
        Command::Load(arguments) => load::load(&arguments),
        Command::LoadWorker(arguments) => load::worker(&arguments),
    }
}

/// The error and its causes in one line, leaving out causes that the line already names.
pub fn describe(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain().map(ToString::to_string) {
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}
