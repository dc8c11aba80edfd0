//! `cargo xtask dropin`: programs of others, unmodified, on the software device.
//!
//! What is run is a table of [cases](case::Case), a file of `dropin/cases` for each package of programs. To add one:
//! a function in such a file, and its name in [`cases::all`].

mod case;
pub mod cases;
mod claim;
mod process;
mod ratios;
mod report;
mod run;
mod rust;
mod sanitizer;
mod scenery;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::{Result, ensure};
use clap::Args;

use self::report::{Report, Verdict};
use self::run::Bed;
use self::sanitizer::Sanitizer;
use crate::dist::{self, Kind};
use crate::workspace::Workspace;

/// Arguments of `cargo xtask dropin`.
#[derive(Args)]
pub struct Dropin {
    /// Run the cases with this in their name only; can be given several times
    #[arg(long, value_name = "NAME-PART")]
    only: Vec<String>,
    /// Write the results to this file, too
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Say what would be run, and run nothing
    #[arg(long)]
    list: bool,
    /// Say which Debian packages that takes, and run nothing
    #[arg(long, conflicts_with = "list")]
    packages: bool,
    /// Build the libraries with AddressSanitizer (with the nightly toolchain), and fail if it finds something
    #[arg(long)]
    asan: bool,
    /// Run no case, but report what perftest measures beside the bare calls of the kernel, and what a start costs
    #[arg(long, conflicts_with_all = ["only", "json", "list", "packages", "asan"])]
    ratios: bool,
}

impl Dropin {
    /// Builds the libraries and runs everything on them; the exit status is 1 if anything failed.
    pub fn run(self) -> Result<ExitCode> {
        let wanted = |name: &str| self.only.iter().any(|part| name.contains(part.as_str()));
        let mut cases = cases::all();
        cases.retain(|case| self.only.is_empty() || wanted(&case.name));
        ensure!(!cases.is_empty(), "there is no such case");
        if self.list {
            for case in &cases {
                println!("{:<44} {}", case.name, case.package);
            }
            return Ok(ExitCode::SUCCESS);
        }
        if self.packages {
            let packages: BTreeSet<&str> = cases
                .iter()
                .map(|case| case.package)
                .filter(|package| !package.starts_with('('))
                .collect();
            for package in packages {
                println!("{package}");
            }
            return Ok(ExitCode::SUCCESS);
        }
        let workspace = Workspace::locate()?;
        let json = self.json.as_deref().map(Workspace::absolute).transpose()?;
        let kind = if self.asan {
            Kind::Sanitized
        } else {
            Kind::Usual
        };
        let sanitizer = self.asan.then(|| Sanitizer::new(&workspace)).transpose()?;
        let libraries = dist::build_default(&workspace, kind)?;
        let mut bed = Bed::new(&workspace, libraries.clone(), sanitizer.as_ref())?;
        if self.ratios {
            ratios::print(&workspace, &mut bed, &libraries)?;
            return Ok(ExitCode::SUCCESS);
        }
        let mut report = Report::default();
        println!("{}", report::head());
        for case in &cases {
            let verdict = Verdict::of(case, || bed.run(case).map(drop));
            println!("{}", verdict.row());
            report.verdicts.push(verdict);
        }
        println!("{}", report.summary());
        if let Some(path) = json {
            report.write(&path)?;
        }
        let found = sanitizer.as_ref().map_or(Ok(0), Sanitizer::show)?;
        Ok(ExitCode::from(u8::from(report.failed() + found > 0)))
    }
}
