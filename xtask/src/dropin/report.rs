//! What became of the cases: a table, and JSON.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use serde_json::{Value, json};

use super::case::Case;

/// What became of a case.
#[derive(Debug)]
pub struct Verdict {
    name: String,
    package: &'static str,
    took: Duration,
    /// Why it failed, if it did.
    failure: Option<String>,
}

/// All that was run.
#[derive(Debug, Default)]
pub struct Report {
    pub verdicts: Vec<Verdict>,
}

/// The head of the table.
pub fn head() -> String {
    format!(
        "{:<6} {:<52} {:<14} {:>7}",
        "", "case", "package", "seconds"
    )
}

impl Verdict {
    /// Runs a case.
    pub fn of(case: &Case, run: impl FnOnce() -> Result<()>) -> Self {
        let began = Instant::now();
        let failure = run().err().map(|error| format!("{error:#}"));
        Self {
            name: case.name.clone(),
            package: case.package,
            took: began.elapsed(),
            failure,
        }
    }

    /// A row of the table, and below it why the case failed.
    pub fn row(&self) -> String {
        let status = match self.failure {
            None => "passed",
            Some(_) => "FAILED",
        };
        let (name, package, seconds) = (&self.name, self.package, self.took.as_secs_f64());
        let mut row = format!("{status:<6} {name:<52} {package:<14} {seconds:>7.1}");
        if let Some(why) = &self.failure {
            for line in why.trim_end().lines() {
                row += "\n       ";
                row += line;
            }
        }
        row
    }

    fn json(&self) -> Value {
        json!({
            "name": self.name,
            "package": self.package,
            "seconds": self.took.as_secs_f64(),
            "passed": self.failure.is_none(),
            "failure": self.failure,
        })
    }
}

impl Report {
    /// How many cases failed.
    pub fn failed(&self) -> usize {
        let failed = |verdict: &&Verdict| verdict.failure.is_some();
        self.verdicts.iter().filter(failed).count()
    }

    /// One line about all.
    pub fn summary(&self) -> String {
        format!("{} cases, {} failed", self.verdicts.len(), self.failed())
    }

    /// Writes it as JSON.
    pub fn write(&self, path: &Path) -> Result<()> {
        let cases: Vec<Value> = self.verdicts.iter().map(Verdict::json).collect();
        let text = format!("{:#}\n", json!({ "failed": self.failed(), "cases": cases }));
        fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    fn report() -> Report {
        let case = Case::alone("package", "program", &["-x"]);
        let failed = Verdict::of(&case, || bail!("no\nway"));
        let passed = Verdict::of(&case, || Ok(()));
        Report {
            verdicts: vec![failed, passed],
        }
    }

    #[test]
    fn a_failure_is_counted_and_told() {
        let report = report();
        assert_eq!(report.summary(), "2 cases, 1 failed");
        let row = report.verdicts[0].row();
        assert!(row.starts_with("FAILED program -x"), "{row}");
        assert!(row.ends_with("\n       no\n       way"), "{row}");
        assert!(report.verdicts[1].row().starts_with("passed"));
        let json = report.verdicts[0].json();
        assert_eq!(
            (&json["passed"], &json["failure"]),
            (&json!(false), &json!("no\nway"))
        );
    }
}
