//! `kvstore`: the store's server, and a client for the shell.
#![forbid(unsafe_code)]

mod cli;

use std::process::ExitCode;

fn main() -> ExitCode {
    // A usage error ends the process here, with status 2.
    let arguments = <cli::Arguments as clap::Parser>::parse();
    cli::start_log(&arguments);
    match cli::run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", cli::describe(&error));
            ExitCode::FAILURE
        }
    }
}
