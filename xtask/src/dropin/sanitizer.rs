//! Programs on libraries that were built with AddressSanitizer: the programs are not, so its own library comes first.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use xshell::cmd;

use crate::workspace::Workspace;

/// Where the sanitizer is, and where it writes what it finds.
pub struct Sanitizer {
    library: PathBuf,
    reports: PathBuf,
}

impl Sanitizer {
    /// That of the C compiler. Reports of earlier runs are removed.
    pub fn new(workspace: &Workspace) -> Result<Self> {
        let sh = &workspace.shell;
        let library = PathBuf::from(cmd!(sh, "cc -print-file-name=libasan.so").quiet().read()?);
        ensure!(library.is_absolute(), "the C compiler has no libasan.so");
        let reports = workspace.target.join("dropin").join("asan");
        sh.remove_path(&reports)?;
        sh.create_dir(&reports)?;
        Ok(Self { library, reports })
    }

    /// Has a program begin with the sanitizer. What programs of others leak is not looked at. Nor is there a stack for
    /// signals: the sanitizer's own end of a thread that was cancelled takes its place for a finding.
    pub fn load(&self, command: &mut Command) {
        let options = format!(
            "detect_leaks=0:use_sigaltstack=0:log_path={}",
            self.reports.join("found").display()
        );
        command
            .env("LD_PRELOAD", &self.library)
            .env("ASAN_OPTIONS", options);
    }

    /// Prints what was found in any program, and says how often.
    pub fn show(&self) -> Result<usize> {
        let cannot = || format!("cannot read {}", self.reports.display());
        let mut found = 0;
        for entry in fs::read_dir(&self.reports).with_context(cannot)? {
            print_report(&entry.with_context(cannot)?.path())?;
            found += 1;
        }
        println!("AddressSanitizer wrote {found} reports");
        Ok(found)
    }
}

fn print_report(path: &Path) -> Result<()> {
    let text = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    println!("{}:\n{}", path.display(), String::from_utf8_lossy(&text));
    Ok(())
}
