//! Runs random verbs programs on the device that `VERBS_DEVICE` names, and writes down what
//! happens. The programs depend on the seed alone, so what two devices write can be compared line by
//! line: `cargo xtask differential` does.
//!
//! ```text
//! differential run SEED OPERATIONS FILE SECONDS   programs of so many operations in all
//! differential one SEED FILE SECONDS              one program
//! differential print SEED                         its text
//! ```
//!
//! FILE gets what happens, and SECONDS is how long what must come may take.

mod chains;
mod connect;
mod end;
mod generate;
mod memory;
mod mistakes;
mod opcode;
mod post;
mod program;
mod random;
mod run;
mod window;
mod windows;

use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use verbs_sys::find_device;

use crate::generate::generate;
use crate::random::Random;
use crate::run::World;

/// Chains of a program: long enough for what one leaves behind to meet another.
const CHAINS: u32 = 120;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match execute(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn execute(words: &[&str]) -> Result<(), Box<dyn Error>> {
    match words {
        ["print", seed] => {
            let text = generate(number(seed)?, CHAINS).to_string();
            std::io::stdout().write_all(text.as_bytes())?;
        }
        ["one", seed, file, patience] => {
            run([number(seed)?].into_iter(), 1, file, number(patience)?)?;
        }
        ["run", seed, operations, file, patience] => {
            let mut seeds = Random::new(number(seed)?);
            let seeds = std::iter::repeat_with(|| seeds.next());
            run(seeds, number(operations)?, file, number(patience)?)?;
        }
        _ => {
            return Err("expected: run SEED OPERATIONS FILE SECONDS | \
                        one SEED FILE SECONDS | print SEED"
                .into());
        }
    }
    Ok(())
}

fn number(word: &str) -> Result<u64, Box<dyn Error>> {
    let parsed = match word.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16),
        None => word.parse(),
    };
    parsed.map_err(|error| format!("{word:?} is no number: {error}").into())
}

/// Runs programs until they have done so many operations. They end alike on every device:
/// operations are counted in the text.
fn run(
    seeds: impl Iterator<Item = u64>,
    operations: u64,
    file: &str,
    patience: u64,
) -> Result<(), Box<dyn Error>> {
    let context = find_device(None)?.open()?;
    let patience = Duration::from_secs(patience);
    let mut out = BufWriter::with_capacity(1 << 20, File::create(file)?);
    let (mut done, mut programs) = (0, 0);
    let began = Instant::now();
    let tell = |programs, done| {
        let seconds = began.elapsed().as_secs();
        eprintln!("{programs} programs, {done} operations, {seconds} s");
    };
    for seed in seeds {
        let program = generate(seed, CHAINS);
        let mut trace = String::new();
        World::new(&context, &program, patience)?.run(&mut trace);
        out.write_all(trace.as_bytes())?;
        done += program.operations();
        programs += 1;
        if programs % 100 == 0 {
            // What was done counts even if the machine goes down.
            out.flush()?;
            tell(programs, done);
        }
        if done >= operations {
            break;
        }
    }
    writeln!(out, "end {programs} programs {done} operations")?;
    out.flush()?;
    tell(programs, done);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(seed: u64) -> String {
        let context = find_device(Some("soft0")).expect("no device");
        let context = context.open().expect("the device does not open");
        let program = generate(seed, CHAINS);
        let world = World::new(&context, &program, Duration::from_secs(60));
        let mut trace = String::new();
        world.expect("no objects").run(&mut trace);
        trace
    }

    #[test]
    fn a_program_follows_from_its_seed() {
        let text = |seed| generate(seed, CHAINS).to_string();
        assert_eq!(text(1), text(1));
        assert_ne!(text(1), text(2));
    }

    /// Were it otherwise, two devices could not be compared.
    #[test]
    fn the_software_device_does_the_same_again() {
        for seed in 1..=5 {
            let once = trace(seed);
            assert!(!once.contains(" stuck"), "{once}");
            assert!(once == trace(seed), "program {seed} is not determinate");
        }
    }
}
