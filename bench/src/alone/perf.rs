//! Runs the program that measures the device by itself, `verbs-sys/examples/perf`.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, bail};

use super::Figures;

/// One test of `program`, for about `budget`.
///
/// # Errors
/// It cannot be started, failed, or did not print one object of figures.
pub fn run(program: &Path, arguments: &str, budget: Duration) -> Result<Figures> {
    let output = Command::new(program)
        .args(arguments.split_whitespace())
        .args(["--ms", &budget.as_millis().to_string()])
        .output()
        .with_context(|| format!("cannot start {}", program.display()))?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        bail!("perf {arguments}: {}: {}", output.status, said.trim());
    }
    serde_json::from_slice(&output.stdout)
        .with_context(|| format!("perf {arguments} printed no figures"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_failing_program_says_is_in_the_error() {
        let budget = Duration::from_millis(1);
        // The shell knows no such option, and says so.
        let error = run(Path::new("/bin/sh"), "--no-such-option", budget).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("perf --no-such-option"), "{text}");
        assert!(text.contains("no-such-option") && text.contains("exit status"));
        let error = run(Path::new("/bin/echo"), "nothing", budget).unwrap_err();
        assert!(error.to_string().contains("printed no figures"), "{error}");
        let error = run(Path::new("/nonexistent/perf"), "write", budget).unwrap_err();
        assert!(error.to_string().contains("/nonexistent/perf"), "{error}");
    }
}
